"""From the death of a rank to the next step, and to the next step of as many ranks as at first; how many steps were done again, and how
many samples of the epoch the weights have seen other than once. torchft by turns with ours, where it is installed (Linux)

    python benchmarks/deaths.py"""
import json,os,shutil,socket,subprocess,sys,tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from common import bars,here,main,peer,quartiles,table,turns,verdict

# A step takes 40 ms or more; rank 1 kills itself in the midst of step 12. `committed` is called after each step that counts
common = '''import json,os,signal,sys,time,torch
from pathlib import Path
from torch import nn
{imports}
torch.set_num_threads(1)
folder,n,bs = Path(sys.argv[1]),{n},16
seen = open(folder/f'{{os.getpid()}}.seen', 'a', buffering=1)
def within(rank, step):
    time.sleep(.04)
    if rank==1 and step>=12 and not (folder/'killed').exists():
        (folder/'killed').write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
def committed(step, rows, world_size, attempt=0):
    seen.write(json.dumps([attempt,step,rows.tolist()])+'\\n')
    if not (folder/'killed').exists(): return
    for k in ['next']+['all']*(world_size==3):
        try: open(folder/k, 'x').write(str(time.time()))
        except FileExistsError: pass
torch.manual_seed(0)
rows,xs = torch.arange(n),torch.randn(n, 20)
ys = xs[:,:1]
def mark(k): print(k, os.environ.get('RANK'), time.time(), file=open(folder/'marks', 'a'))
def marked(cls, name, k):
    "Let a method leave a mark when it returns"
    old = getattr(cls, name)
    def method(*args, **kw):
        res = old(*args, **kw)
        mark(k)
        return res
    setattr(cls, name, method)
mark('script')
model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 1))
'''
own = '''
from learnerdist.distributed.engine import Context,Engine
marked(Context, 'join', 'group')
marked(Engine, 'open_context', 'context')
marked(Engine, 'check_settings', 'state')
class Net(nn.Module):
    def __init__(self): super().__init__(); self.net = model
    def forward(self, i, x): return self.net(x)
class Step(Callback):
    def after_loss(self): within(rank_distrib(), self.train_iter+1)
    def after_batch(self): committed(self.train_iter, self.xb[0], num_distrib(), {attempt})
dls = DataLoaders.from_dsets(torch.utils.data.TensorDataset(rows, xs, ys), None, bs=bs, n_inp=2)
learn = Learner(dls, Net(), nn.MSELoss(), torch.optim.SGD, lr=.01, path=folder)
learn.logger = lambda line: None
with learn.distrib_ctx(): learn.fit(1, cbs=[Step(),*{cbs}])
'''
# As by torchft's documentation; the batch goes by the step that all have committed, so that one that was not is tried again
fault_tolerant = '''
from datetime import timedelta
me = int(os.environ['REPLICA_GROUP_ID'])
opt = torch.optim.SGD(model.parameters(), lr=.01)
def load(o): model.load_state_dict(o['model']), opt.load_state_dict(o['opt'])
def state(): return dict(model=model.state_dict(), opt=opt.state_dict())
manager = Manager(pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load, state_dict=state,
                  replica_id=f'group_{me}', timeout=timedelta(seconds=20))
ddp,optimizer = DistributedDataParallel(manager, model),Optimizer(manager, opt)
mine = [*DistributedSampler(rows, me, 3, group_rank=0, num_replicas=1, shuffle=True)]
while manager.current_step()<n//3//bs:
    optimizer.zero_grad()
    step = manager.current_step()
    i = torch.tensor(mine[step*bs:(step+1)*bs])
    loss = nn.functional.mse_loss(ddp(xs[i]), ys[i])
    within(me, step+1)
    loss.backward()
    optimizer.step()
    if manager.current_step()>step: committed(step+1, i, manager.num_participants())
manager.shutdown(wait=False)
'''

# The launcher, which leaves marks, too
launcher = '''import os,sys,time
from learnerdist.launch import cli,watch
folder = sys.argv.pop(1)
def mark(k, at): print(k, None, at, file=open(f'{folder}/marks', 'a'))
start = watch.Job.start
def marked(job, *args):
    if job.ranks: mark('seen', min(o.seen for o in job.ranks))
    mark('ended', time.time())
    start(job, *args)
watch.Job.start = marked
sys.exit(cli.main())'''

W,n_samples = 3,3*16*250
parts = dict(seen='death seen', ended='ranks ended', script='forks', group='group', context='context', state='state', next='first step')

def parts_of(folder, death, step):
    "Seconds from each mark to the next, of the last rank that leaves it"
    lines = [o.split() for o in (folder/'marks').read_text().splitlines()]
    at,res = death,{}
    for k,name in parts.items():
        last = max([float(t) for o,_,t in lines if o==k and float(t)<=step], default=step)
        at,res[name] = last,last-at
    return res

def result(folder, ended):
    "Seconds from the death to the next step, and to one of all ranks; steps done again; samples not trained on exactly once"
    for o in ended:
        if o.returncode: raise SystemExit(f'{o.args}: {o.stdout[-3000:]}')
    death,*after = (float((folder/o).read_text()) if (folder/o).exists() else None for o in ('killed','next','all'))
    lines = [json.loads(line) for o in folder.glob('*.seen') for line in o.read_text().splitlines()]
    last = max(a for a,*_ in lines)
    begin = min(step for a,step,_ in lines if a==last) # what earlier attempts did from here on was done again
    again = max((step for a,step,_ in lines if a<last), default=begin-1)-begin+1
    times = Counter(i for a,step,rows in lines if a==last or step<begin for i in rows)
    split = parts_of(folder, death, after[0]) if 'seen' in (folder/'marks').read_text() else {}
    return dict(split, next=after[0]-death, all=after[1] and after[1]-death, again=again, wrong=sum(times[i]!=1 for i in range(n_samples)))

def write(folder, imports, text): (folder/'train.py').write_text(common.format(imports=imports, n=n_samples)+text)

def start(*cmd, **env):
    env['PYTHONPATH'] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get('PYTHONPATH', '')])
    return subprocess.Popen([sys.executable,*cmd], env=os.environ|env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

def end(proc, timeout_s=200):
    out,_ = proc.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(proc.args, proc.returncode, out)

def of_launch(folder, options, cbs, attempt):
    "By this package"
    write(folder, 'from learnerdist.all import *', own.format(cbs=cbs, attempt=attempt))
    return result(folder, [end(start('-c',launcher,str(folder),'--nproc',str(W),*options,f'{folder}/train.py',str(folder)))])

def of_torchft(folder, heartbeat_ms):
    "By torchft: each rank is a replica group, which torchrun starts again; a lighthouse knows who is there"
    write(folder, 'from torchft import DistributedDataParallel,DistributedSampler,Manager,Optimizer,ProcessGroupGloo', fault_tolerant)
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        at = f'127.0.0.1:{s.getsockname()[1]}'
    lighthouse = shutil.which('torchft_lighthouse', path=os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']]))
    options = ['--min_replicas','1','--bind',at,'--heartbeat_timeout_ms',str(heartbeat_ms),'--join_timeout_ms','10000']
    with subprocess.Popen([lighthouse,*options], stderr=subprocess.DEVNULL) as house:
        try:
            torchrun = '-m','torch.distributed.run','--standalone','--nproc-per-node=1','--max-restarts=1',f'{folder}/train.py',str(folder)
            groups = [start(*torchrun, REPLICA_GROUP_ID=str(i), TORCHFT_LIGHTHOUSE=f'http://{at}') for i in range(W)]
            with ThreadPoolExecutor() as pool: return result(folder, [*pool.map(end, groups)])
        finally: house.kill()

in_memory = "[Checkpoint('states', every=10, in_memory=True, resume=True)]"
ways = {'learnerdist, --on-failure shrink': (of_launch,['--on-failure','shrink'],'[]','3-num_distrib()'),
        'learnerdist, --max-restarts 1': (of_launch,['--max-restarts','1'],in_memory,"int(os.environ['TORCHELASTIC_RESTART_COUNT'])"),
        'torchft': (of_torchft,5000), 'torchft, heartbeats within .5 s': (of_torchft,500)}

def stored():
    "What was measured before: for torchft's rows where it is not installed"
    file = here/'results/deaths.json'
    res = json.loads(file.read_text()) if file.exists() else dict(deaths={}, torchft=None)
    return {k: v for k,v in res['deaths'].items() if ways.get(k, [None])[0] is of_torchft},res['torchft']

def measure(quick):
    got = {k: [] for k,(f,*_) in ways.items() if f is of_launch or peer('torchft')}
    def once(k):
        func,*args = ways[k]
        with tempfile.TemporaryDirectory() as d: got[k].append(func(Path(d), *args))
    turns({k: lambda k=k: once(k) for k in got}, 1 if quick else 5, warm=0)
    if peer('torchft'): return dict(deaths=got, torchft=version('torchft-nightly'))
    before,which = stored()
    return dict(deaths=got | before, torchft=which, torchft_before=True)

def _seconds(xs):
    known = [o for o in xs if o is not None]
    return f'{quartiles(known)[1]:.2f}' + f' ({len(known)} of {len(xs)} times)'*(len(known)<len(xs)) if known else 'does not come back'

def report(res):
    head = f'one of {W} ranks dies','to the next step, s','to a step of all ranks, s','steps done again, at most', \
        f'not trained on once: at most, of {n_samples:,} samples'
    def most(v, t): return max([o[t] for o in v if t in o], default='not counted')
    rows = [[k, *(_seconds([o[t] for o in v]) for t in ('next','all')), *(most(v, t) for t in ('again','wrong'))]
            for k,v in res['deaths'].items()]
    own = {k: v for k,v in res['deaths'].items() if parts['seen'] in v[0]}
    split = [[k, *(f'{1000*quartiles([o[t] for o in v])[1]:.0f}' for t in parts.values())] for k,v in own.items()]
    text = table(head, rows)+'\n\n'+table(['where the time goes, ms',*parts.values()], split)
    ours = {k: quartiles([o['next'] for o in v])[1] for k,v in res['deaths'].items() if 'learnerdist' in k}
    peers = f"Medians of {len(next(iter(res['deaths'].values())))} runs. "
    if res['torchft']: peers += f"torchft-nightly {res['torchft']}"+', measured on another day'*res.get('torchft_before', False)+'.'
    return peers+'\n\n'+text+'\n\n'+'\n'.join(verdict(f'seconds of {k}', s, .5, '{:.2f}') for k,s in ours.items())

def plot(res, path):
    def bars_of(t): return {k: quartiles(xs) for k,v in res['deaths'].items() if (xs := [o[t] for o in v if o[t] is not None])}
    bars(path, {'to the next step': bars_of('next'), 'to a step of all ranks': bars_of('all')}, 's', 'One of 3 ranks dies')

if __name__=='__main__': main('deaths', measure, report, plot)
