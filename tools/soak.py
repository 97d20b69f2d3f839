"""Train on digits under the launcher, killed at random, and compare with the run that nobody disturbed:

    python tools/soak.py --minutes 10 [--nproc 2] [--workers 0] [--background] [--seed 0]
    python tools/soak.py --minutes 10 --nproc 1,2,3      # another number of processes at each restart
    python tools/soak.py --minutes 10 --shard            # a model spread over the ranks, each of which writes its rows
    python tools/soak.py --minutes 10 --in-memory        # states in memory in place of files; ranks die some milliseconds after the step

A round is a run of 5 epochs with checkpoints every 5 steps. In each attempt a rank drawn at random kills itself (SIGKILL) after a step
drawn at random, or while it writes a checkpoint (rank 0, or any rank of a sharded model), and the launcher starts all ranks again; or it
asks to end by SIGTERM, the launcher ends with status 75, and is started again. Weights, optimizer state, recorded numbers and the CSV file
at the end are compared bit for bit. Nothing but whole checkpoints may be left in the folder.

With several numbers of processes the global batch size stays (`split_batches`), and nothing draws at random but the order of the samples,
in float64: then weights and recorded numbers are equal to 1e-9."""
import argparse,json,os,random,re,signal,subprocess,sys,tempfile,threading,time
from pathlib import Path

def train(path, workers, background, varying, shard, in_memory, plans):
    "On each rank: attempt k dies as `plans[k]` says"
    import torch
    if varying: torch.set_default_dtype(torch.float64)
    from learnerdist.checkpoint import snapshot
    from learnerdist.distributed.comparison import digest
    from learnerdist.all import (Callback,Checkpoint,CSVLogger,DataLoaders,Learner,TfmdDL,accuracy,rank_distrib)
    from sklearn.datasets import load_digits
    from torch import nn
    digits,k = load_digits(),int(os.environ['SOAK_DONE'])+int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))
    how,rank,step = plans[k] if k<len(plans) else (None,None,None)
    items = [*zip(torch.tensor(digits.images, dtype=torch.get_default_dtype())/16, torch.tensor(digits.target))]
    def shaken(o): return (o[0] if varying else o[0].roll(random.randint(-1, 1), 0)+.1*torch.randn(8, 8)).flatten(),o[1]

    class Die(Callback):
        order = 950
        def after_batch(self):
            if not self.training or self.train_iter!=step or rank_distrib()!=rank: return
            if how=='write' and in_memory: snapshot._publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            elif how=='SIGKILL' and in_memory: threading.Timer(step%10/500, os.kill, (os.getpid(),signal.SIGKILL)).start()
            elif how=='write' and shard: snapshot.save_sealed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            elif how=='write': snapshot._sync = lambda o: os.kill(os.getpid(), signal.SIGKILL)
            else: os.kill(os.getpid(), getattr(signal, how))

    torch.manual_seed(3)
    random.seed(3)
    train,valid = items[:396 if varying else 400],items[800:960] # 396 divides by 2 and 3: no padding, which BatchNorm would see
    kw = dict(after_item=shaken, num_workers=workers)
    bs = 24 if varying else 16
    dls = DataLoaders(TfmdDL(train, bs, shuffle=True, **kw), TfmdDL(valid, bs, **kw))
    drop,opt = (0,torch.optim.SGD) if varying else (.2,torch.optim.Adam)
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(drop), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)]
    learn = Learner(dls, nn.Sequential(*layers), nn.CrossEntropyLoss(), opt, lr=.003, metrics=accuracy, path=path)
    learn.logger,cbs = lambda line: None,[Checkpoint('ckpt', 5, background=background, in_memory=in_memory), CSVLogger(), Die()]
    kw = dict(shard=True) if shard else dict(bucket_cap_mb=.01)
    with learn.distrib_ctx(**kw, split_batches=varying, seed=3): learn.fit_one_cycle(5, cbs=cbs, resume=True)
    rec,weights = learn.recorder,learn.model.state_dict()
    states = [[o.tolist() for o in weights.values()]] if varying else [digest(weights),digest(learn.opt.state_dict())]
    res = [*states,rec.values,rec.losses,rec.lrs,(Path(path)/'history.csv').read_text()]
    if rank_distrib()==0: (Path(path)/'result.json').write_text(json.dumps(res))

def launch(args, path, plans, nprocs):
    "What came of a run whose attempts have these numbers of processes; only one number: the launcher itself starts them again"
    one = len({*nprocs})==1
    args_of_train = ['--train', json.dumps([path,args.workers,args.background,len(args.nproc)>1,args.shard,args.in_memory,plans])]
    ends = [k+1 for k,(how,*_) in enumerate(plans) if how=='SIGTERM' or not one] # after which the launcher is started again
    with open(f'{path}.log', 'w') as log:
        for k in [0, *ends]:
            cmd = [sys.executable, '-m', 'learnerdist.launch', '--nproc', str(nprocs[k]), '--max-restarts', str(len(plans)*one), __file__]
            code = subprocess.run([*cmd, *args_of_train], stdout=log, stderr=log, env={**os.environ, 'SOAK_DONE': str(k)}).returncode
            due = plans[k:] if one else plans[k:k+1]
            if code!=next((75 if how=='SIGTERM' else 137 for how,*_ in due if how=='SIGTERM' or not one), 0): break
    file,folder = Path(path)/'result.json',Path(path)/'ckpt'
    left = [o.name for o in folder.iterdir() if not re.fullmatch(r'epoch_\d+-step_\d+', o.name)] if folder.exists() else []
    return code,json.loads(file.read_text()) if file.exists() else None,left

def numbers(o):
    "All numbers in a result, and in the columns of its CSV file but the last one, which is a time"
    if isinstance(o, list): return [n for i in o for n in numbers(i)]
    return [float(n) for line in o.splitlines()[1:] for n in line.split(',')[:-1]] if isinstance(o, str) else [o]

def same(a, b, exact):
    if exact or b is None: return a==b
    a,b = numbers(a),numbers(b)
    return len(a)==len(b) and all(abs(x-y)<=1e-9*max(1, abs(x)) for x,y in zip(a, b))

def draw(rng, nprocs, shard):
    "Three interruptions, the later ones at later steps; the numbers of processes before and after them"
    steps,ns = sorted(rng.sample(range(6, 60), 3)),rng.choices(nprocs, k=4)
    hows = rng.choices(['SIGKILL','write','SIGTERM'], [2,1,1], k=3)
    return [(how, 0 if how=='write' and not shard else rng.randrange(n), step) for how,step,n in zip(hows, steps, ns)],ns

def soak(args):
    "Rounds until the time is up; exit status 1 at the first that differs"
    rng,end,n,exact = random.Random(args.seed),time.monotonic()+60*args.minutes,0,len(args.nproc)==1
    with tempfile.TemporaryDirectory() as d:
        code,whole,_ = launch(args, f'{d}/whole', [], args.nproc[:1])
        if code: sys.exit(Path(f'{d}/whole.log').read_text())
        while time.monotonic()<end:
            n,(plans,ns),start = n+1,draw(rng, args.nproc, args.shard or args.in_memory),time.monotonic()
            code,res,left = launch(args, f'{d}/{n}', plans, ns)
            good = code==0 and same(whole, res, exact) and not left
            print(f'round {n}, processes {ns}: {plans}: {"equal" if good else f"DIFFERENT (status {code}, left {left})"}, '
                  f'{time.monotonic()-start:.0f} s', flush=True)
            if not good: sys.exit(Path(f'{d}/{n}.log').read_text()[-4000:])
    print(f'{n} rounds, {3*n} interruptions, every run equal to the undisturbed one')

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for k,v in dict(minutes=10., workers=0, seed=0).items(): p.add_argument(f'--{k}', type=type(v), default=v)
    p.add_argument('--nproc', type=lambda s: [*map(int, s.split(','))], default=[2], help='number of processes, or several: 1,2,3')
    p.add_argument('--background', action='store_true', help='write checkpoints while training goes on')
    p.add_argument('--shard', action='store_true', help='spread the model: each rank writes its rows')
    p.add_argument('--in-memory', action='store_true', help='keep states in memory, in place of files')
    p.add_argument('--train', help=argparse.SUPPRESS)
    args = p.parse_args()
    return train(*json.loads(args.train)) if args.train else soak(args)

if __name__=='__main__': main()
