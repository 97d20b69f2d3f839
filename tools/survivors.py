"""Kill ranks of a run at random points, and compare with the run that nobody disturbed:

    python tools/survivors.py --kills 200 [--nproc 4] [--seed 0] [--soon] [--fastai] [--replace 5]

Each run trains on several ranks under `--on-failure shrink`, or under `replace` with states in memory after so many steps. A point
is a number of events (calls and returns of functions, of Python and of C) that a rank has come to since the fit began, or since it
went on without others: there it kills itself, sometimes another rank at the same time. So deaths are anywhere in steps, validation,
ends of epochs, and while those that are left form a group. Weights, recorded numbers and learning rates are compared at 1e-9 in
float64, on every rank that is left; shown is how long the ranks stood still."""
import argparse,faulthandler,json,os,random,signal,subprocess,sys,tempfile,time
from contextlib import suppress
from pathlib import Path

def make_fastai(Clock):
    "fastai's Learner on the same data, its callbacks, and its numbers"
    import fastai.learner,torch
    from fastai.callback.progress import CSVLogger
    from fastai.callback.tracker import SaveModelCallback
    from fastai.callback.training import GradientClip
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from torch import nn
    import learnerdist.fastai # noqa: F401
    fastai.learner.tensor = torch.tensor # so that the smooth loss is float64; fastai's is float32
    def accuracy(pred, targ): return (pred.argmax(-1)==targ).double().mean()
    dls = DataLoaders(*(DataLoader(data(n, i), bs=24, shuffle=i==0, num_workers=0) for i,n in enumerate((106, 50))))
    def learner(net, path): return fastai.learner.Learner(dls, net, loss_func=nn.CrossEntropyLoss(), lr=.01, metrics=accuracy, path=path)
    return learner,[Clock(),GradientClip(5.),CSVLogger(),SaveModelCallback()]

def make(Clock):
    "This package's Learner, and its callbacks"
    import torch
    from learnerdist.all import CSVLogger,DataLoaders,GradientClip,Learner,TfmdDL,accuracy
    from torch import nn
    dls = DataLoaders(TfmdDL(data(106, 0), 24, shuffle=True), TfmdDL(data(50, 1), 24))
    def learner(net, path): return Learner(dls, net, nn.CrossEntropyLoss(), torch.optim.AdamW, lr=.01, metrics=accuracy, path=path)
    return learner,[Clock(),GradientClip(5.),CSVLogger()]

def data(n, seed):
    import torch
    g = torch.Generator().manual_seed(seed)
    return [*zip(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g))]

def kill(folder, i, me, ranks):
    "Kill ranks, this one last, if that has not been done"
    try: (folder/f'{i}.fired').touch(exist_ok=False)
    except FileExistsError: return
    for r in sorted(ranks, key=me.__eq__):
        with suppress(ProcessLookupError): os.kill(int((folder/f'{r}.pid').read_text()), signal.SIGKILL)

def n_fired(folder): return len([*folder.glob('*.fired')])

def train(folder, plan, of_fastai, every):
    "On each rank; `plan`: (rank, how many deaths came before, events since then, ranks to kill); `every`: steps between states in memory"
    import torch,torch._dynamo # noqa: F401
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    from learnerdist.all import Callback,Checkpoint,local_rank,num_distrib,rank_distrib
    from learnerdist.checkpoint import survivors
    from torch import nn
    me,state = local_rank(),dict(n=0, gen=n_fired(folder), pause=0., left=None)
    (folder/f'{me}.pid').write_text(str(os.getpid()))
    faulthandler.register(signal.SIGUSR1, open(folder/f'{me}.stack', 'w'))
    own = [(i,o) for i,o in enumerate(plan) if o[0]==me]
    def watch(frame, event, arg):
        state['n'] += 1
        for i,(_,gen,n,ranks) in own:
            if state['gen']==gen and state['n']==n: kill(folder, i, me, ranks)
    join = survivors.join_generation
    def joined(n, left):
        join(n, left)
        state.update(gen=n_fired(folder), n=0)
    survivors.join_generation = joined

    class Clock(Callback):
        order = -10**9-.7
        last = max((float(o.read_text() or 0) for o in folder.glob('*.last')), default=None) # of the ranks before this one
        def before_batch(self):
            now = time.monotonic()
            if self.last: state['pause'] = max(state['pause'], now-self.last)
            self.last = now
            if every: (folder/f'{me}.last').write_text(f'{now}')

    new,cbs = (make_fastai if of_fastai else make)(Clock)
    if every: cbs.append(Checkpoint('states', every=every, in_memory=True, resume=True))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
    learn = new(net, folder)
    learn.logger = lambda line: None
    with learn.distrib_ctx(split_batches=True, seed=3):
        sys.setprofile(watch)
        try: learn.fit_one_cycle(3, cbs=cbs)
        finally: sys.setprofile(None)
    rec = learn.recorder
    losses,values,lrs = ([float(o) for o in os] for os in (rec.losses,(v for o in rec.values for v in o),rec.lrs))
    numbers = [[o.tolist() for o in net.state_dict().values()],losses,values,lrs,[*rec.iters]]
    files = sum(o.readlink().name.startswith(('socket', '/memfd')) for o in Path('/proc/self/fd').iterdir() if o.is_symlink())
    res = dict(numbers=numbers, pause=state['pause'], n=state['n'], world=num_distrib(), rank=rank_distrib(), gen=state['gen'], files=files)
    (folder/f'{me}.json').write_text(json.dumps(res))

def launch(args, folder, plan):
    "The launcher's exit status, what each rank left, and the rows of the CSV file"
    folder.mkdir()
    policy,job = 'replace' if args.replace else 'shrink',json.dumps([str(folder),plan,args.fastai,args.replace])
    options = ['--nproc',str(args.nproc),'--on-failure',policy,*['--max-restarts','9']*bool(args.replace)] # all may die
    cmd = [sys.executable,'-m','learnerdist.launch',*options,__file__,'--train',job]
    with open(folder/'log', 'w') as log, subprocess.Popen(cmd, stdout=log, stderr=log) as proc:
        try: code = proc.wait(150 if args.replace else 60)
        except subprocess.TimeoutExpired:
            code = 'hangs at '+stacks(folder)
            proc.kill()
    csv = folder/'history.csv'
    return code,{int(o.stem): json.loads(o.read_text()) for o in folder.glob('*.json')},csv.read_text() if csv.exists() else ''

whats = 'weights','losses','values','rates','steps'

def stacks(folder):
    "Where the ranks are that still run"
    for o in folder.glob('*.pid'):
        try: os.kill(int(o.read_text()), signal.SIGUSR1)
        except ProcessLookupError: pass
    time.sleep(.5)
    return '\n'.join(f'{o.stem}: {o.read_text()}' for o in folder.glob('*.stack') if o.stat().st_size)

def flat(o): return [n for i in o for n in flat(i)] if isinstance(o, list) else [o]

def close(a, b):
    a,b = flat(a),flat(b)
    return len(a)==len(b) and all(abs(x-y)<=1e-9*max(1, abs(x)) for x,y in zip(a, b))

def draw(rng, n_ranks, n_events, kills, soon, replace):
    "A plan of up to `kills` deaths"
    plan,alive,gen = [],[*range(n_ranks)],0
    for _ in range(kills if soon else rng.randint(1, kills)):
        both = len(alive)>2 and rng.random()<(.5 if soon and gen else .2)
        dead = rng.sample(alive, 1+both)
        most = n_events if not gen else rng.choice([3000, 300 if soon else n_events//2]) # soon after another death, or later
        plan.append([dead[0],gen,rng.randint(1, most),dead])
        gen += 1
        if not replace: alive = [o for o in alive if o not in dead]
        if len(alive)<2: break
    return plan

def main(args):
    rng,died,worst,bad,k = random.Random(args.seed),0,[],[],0
    with tempfile.TemporaryDirectory() as d:
        code,ref,csv = launch(args, Path(d)/'ref', [])
        assert not code and len(ref)==args.nproc, (Path(d)/'ref/log').read_text()
        n_events = min(o['n'] for o in ref.values())
        while died<args.kills:
            k,plan = k+1,draw(rng, args.nproc, n_events, args.nproc-1, args.soon, args.replace)
            folder,begin = Path(d)/str(k),time.monotonic()
            code,got,rows = launch(args, folder, plan)
            log = (folder/'log').read_text()
            fired = [o for i,o in enumerate(plan) if (folder/f'{i}.fired').exists()]
            died += (n := sum(len(o[3]) for o in fired))
            ended = len(got)==args.nproc-len({r for o in fired for r in o[3]}) # all that are left
            over = ended and all(o['gen']<len(fired) for o in got.values()) # and none has gone on after the last death
            late = code==137 and (over or 'left with status 0 before' in log or '_after_rank0' in log) # the others had ended their fit
            wrong,left = differences(got, ref[0], rows, csv) + [f'exit {code}']*bool(code and not late),left_over(folder)
            worst += (stood := [o['pause'] for o in got.values()])
            found = f'DIFFERENT: {wrong} {left}' if wrong or left or not (got or late) else 'equal'+', died when the others had ended'*late
            still,took = max(stood, default=0),time.monotonic()-begin
            print(f'{k}: {plan}: {n} died, {still:.2f} s, {took:.0f} s in all, {found}', flush=True)
            if found[0]=='D':
                bad.append(k)
                print(log[-args.tail:], rows, csv, sep='\n', flush=True)
    worst.sort()
    print(f'{k} runs, {died} deaths, {len(bad)} bad: {bad}; stood still at most {worst[-1]:.2f} s, in the median',
          f'{worst[len(worst)//2]:.2f} s')
    return len(bad)

def differences(got, ref, rows, csv):
    "What differs from the undisturbed run"
    res = [f'{what} of rank {r}' for r,o in got.items() for what,a,b in zip(whats, o['numbers'], ref['numbers']) if not close(a, b)]
    return res + ['CSV']*(not close_rows(rows, csv))

def left_over(folder):
    "Files that nobody has asked for"
    known = 'log','history.csv','models'
    return sorted(o.name for o in folder.iterdir() if o.suffix not in ('.json','.pid','.stack','.last','.fired') and o.name not in known)

def close_rows(a, b):
    a,b = ([[float(n) for n in o.split(',') if ':' not in n] for o in s.splitlines()[1:]] for s in (a, b)) # fastai's has the time
    return close(a, b)

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--kills', type=int, default=200)
    p.add_argument('--nproc', type=int, default=4)
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--tail', type=int, default=3000)
    p.add_argument('--soon', action='store_true', help='many deaths while those that are left form a group')
    p.add_argument('--fastai', action='store_true', help="with fastai's Learner")
    p.add_argument('--replace', type=int, default=0, metavar='N', help='start all again, from states in memory after N steps each')
    p.add_argument('--train')
    args = p.parse_args()
    if args.train:
        folder,*rest = json.loads(args.train)
        train(Path(folder), *rest)
    else: sys.exit(main(args))
