"""Train on digits under the launcher, killed at random, and compare with the run that nobody disturbed:

    python tools/soak.py --minutes 10 [--nproc 2] [--workers 0] [--seed 0]

A round is a run of 5 epochs with checkpoints every 5 steps. In each attempt a rank drawn at random kills itself (SIGKILL) after a step
drawn at random, or while rank 0 writes a checkpoint, and the launcher starts all ranks again; or it asks to end by SIGTERM, the launcher
ends with status 75, and is started again. Weights, optimizer
state, recorded numbers and the CSV file at the end are compared bit for bit."""
import argparse,json,os,random,signal,subprocess,sys,tempfile,time
from pathlib import Path

def train(path, workers, plans):
    "On each rank: attempt k dies as `plans[k]` says"
    import torch
    from learnerdist.checkpoint import snapshot
    from learnerdist.distributed.divergence import digest
    from learnerdist.all import (Callback,Checkpoint,CSVLogger,DataLoaders,Learner,TfmdDL,accuracy,rank_distrib)
    from sklearn.datasets import load_digits
    from torch import nn
    digits,k = load_digits(),int(os.environ['SOAK_DONE'])+int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))
    how,rank,step = plans[k] if k<len(plans) else (None,None,None)
    items = [*zip(torch.tensor(digits.images, dtype=torch.float32)/16, torch.tensor(digits.target))]
    def shaken(o): return (o[0].roll(random.randint(-1, 1), 0)+.1*torch.randn(8, 8)).flatten(),o[1]

    class Die(Callback):
        order = 950
        def after_batch(self):
            if not self.training or self.train_iter!=step or rank_distrib()!=rank: return
            if how=='write': snapshot._sync = lambda o: os.kill(os.getpid(), signal.SIGKILL)
            else: os.kill(os.getpid(), getattr(signal, how))

    torch.manual_seed(3)
    random.seed(3)
    train,valid = items[:400],items[800:960]
    kw = dict(after_item=shaken, num_workers=workers)
    dls = DataLoaders(TfmdDL(train, 16, shuffle=True, **kw), TfmdDL(valid, 16, **kw))
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(.2), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)]
    learn = Learner(dls, nn.Sequential(*layers), nn.CrossEntropyLoss(), torch.optim.Adam, lr=.003, metrics=accuracy, path=path)
    learn.logger = lambda line: None
    with learn.distrib_ctx(bucket_cap_mb=.01): learn.fit_one_cycle(5, cbs=[Checkpoint('ckpt', 5), CSVLogger(), Die()], resume=True)
    rec = learn.recorder
    states = [digest(o.state_dict()) for o in (learn.model,learn.opt)]
    res = [*states,rec.values,rec.losses,rec.lrs,(Path(path)/'history.csv').read_text()]
    if rank_distrib()==0: (Path(path)/'result.json').write_text(json.dumps(res))

def launch(args, path, plans):
    "What came of a run"
    cmd = [sys.executable, '-m', 'learnerdist.launch', '--nproc', str(args.nproc), '--max-restarts', str(len(plans)), __file__]
    ends,code,done = [k+1 for k,(how,*_) in enumerate(plans) if how=='SIGTERM'],75,0 # after which the launcher ends with status 75
    with open(f'{path}.log', 'w') as log:
        while code==75 and done<=len(plans):
            args_of_train = ['--train', json.dumps([path,args.workers,plans])]
            code = subprocess.run([*cmd, *args_of_train], stdout=log, stderr=log, env={**os.environ, 'SOAK_DONE': str(done)}).returncode
            done = next((k for k in ends if k>done), len(plans)+1)
    file = Path(path)/'result.json'
    return code,file.read_text() if file.exists() else None

def draw(rng, nproc):
    "Three interruptions, the later ones at later steps"
    steps = sorted(rng.sample(range(6, 60), 3))
    hows = rng.choices(['SIGKILL','write','SIGTERM'], [2,1,1], k=3)
    return [(how, 0 if how=='write' else rng.randrange(nproc), step) for how,step in zip(hows, steps)]

def soak(args):
    "Rounds until the time is up; exit status 1 at the first that differs"
    rng,end,n = random.Random(args.seed),time.monotonic()+60*args.minutes,0
    with tempfile.TemporaryDirectory() as d:
        code,whole = launch(args, f'{d}/whole', [])
        if code: sys.exit(Path(f'{d}/whole.log').read_text())
        while time.monotonic()<end:
            n,plans,start = n+1,draw(rng, args.nproc),time.monotonic()
            code,res = launch(args, f'{d}/{n}', plans)
            same = code==0 and res==whole
            print(f'round {n}: {plans}: {"equal" if same else f"DIFFERENT (status {code})"}, {time.monotonic()-start:.0f} s', flush=True)
            if not same: sys.exit(Path(f'{d}/{n}.log').read_text()[-4000:])
    print(f'{n} rounds, {3*n} interruptions, every run equal to the undisturbed one')

def main():
    p = argparse.ArgumentParser()
    for k,v in dict(minutes=10., nproc=2, workers=0, seed=0).items(): p.add_argument(f'--{k}', type=type(v), default=v)
    p.add_argument('--train', help=argparse.SUPPRESS)
    args = p.parse_args()
    return train(*json.loads(args.train)) if args.train else soak(args)

if __name__=='__main__': main()
