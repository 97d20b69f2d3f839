"""What many ranks of one machine tell one another: CPU seconds, messages, bytes and unpickled objects of a rank, for opening a context, a
fit, a checkpoint, a vote and `gather_objects`; and a failure until the launcher ends. They share the cores, so seconds of the clock say
little. Other traffic of the loopback interface counts: `unshare -n sh -c "ip link set lo up; python many_ranks.py"` has none

    python benchmarks/many_ranks.py"""
import os,pickle,resource,subprocess,sys,tempfile,time
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import torch
from common import main,on_ranks,peer,save_plot,table,together
from learnerdist.all import Checkpoint,DataLoaders,Learner,gather_objects
from learnerdist.core import collectives
from learnerdist.core.env import group_rank,process_group
from learnerdist.distributed.vote_links import Message,SocketLinks,cast
from torch import nn

worlds = 2,8,16,32,48
counts = dict(pickles=0, sent=0, sent_bytes=0)

def count_calls():
    "Let unpickled objects and rows of votes be counted"
    send = SocketLinks.send
    def counted_read(data):
        counts['pickles'] += 1
        return pickle.loads(data)
    def counted_send(links, n, rows):
        counts['sent'] += 1
        counts['sent_bytes'] += len(rows)
        return send(links, n, rows)
    collectives.pickle,SocketLinks.send = SimpleNamespace(dumps=pickle.dumps, loads=counted_read),counted_send

def now():
    "What this process has used, and what all have sent over the loopback interface"
    line = next(o for o in Path('/proc/net/dev').read_text().splitlines() if o.strip().startswith('lo:'))
    n_bytes,packets = map(int, line.split(':')[1].split()[:2])
    return dict(counts, cpu=time.process_time(), packets=packets, bytes=n_bytes)

class Meter:
    "What each part has cost; less what two barriers cost"
    def __init__(self, W):
        self.W,self.found,self.base = W,{},None
        self.base = self('nothing', lambda: None)

    def __call__(self, name, func, n=1):
        for _ in range(2): together() # nobody begins before all have read the counters
        before = now()
        for _ in range(n): func()
        own = now()
        together()
        after = now()
        res = {k: (own[k]-before[k])/n for k in own}
        for k in ('packets','bytes'): res[k] = (after[k]-before[k]-(self.base or {}).get(k, 0))/self.W/n
        self.found[name] = res
        return dict(res, **{k: after[k]-before[k] for k in ('packets','bytes')})

def measure_rank(W, folder):
    count_calls()
    xs = torch.arange(W*4*16*20.).view(-1, 20)/1000
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 1))
    with process_group():
        meter = Meter(W)
        dls = DataLoaders.from_dsets(torch.utils.data.TensorDataset(xs, xs[:,:1]), None, bs=4)
        learn = Learner(dls, model, nn.MSELoss(), torch.optim.AdamW, lr=1e-3, path=folder)
        learn.logger = lambda line: None
        ctx = learn.distrib_ctx()
        meter('opening a context', ctx.__enter__)
        meter('a fit of 16 steps', lambda: learn.fit(1))
        meter('the same, with 16 checkpoints', lambda: learn.fit(1, cbs=Checkpoint('states', every=1)))
        meter('a vote', lambda: cast(learn.runner.links, Message(yes=True), 0), 20)
        meter('gather_objects', lambda: gather_objects(group_rank()), 20)
        ctx.__exit__(None, None, None)
    return meter.found

fails = '''import sys
from learnerdist.all import *
class Fails(Callback):
    def after_step(self):
        if rank_distrib()==1: raise ValueError('this one')
xs = torch.ones(1600, 20)
learn = Learner(DataLoaders.from_dsets(torch.utils.data.TensorDataset(xs, xs[:,:1]), None, bs=4), nn.Linear(20, 1), nn.MSELoss(), lr=.01)
with learn.distrib_ctx(): learn.fit(1, cbs=Fails())
'''.replace('import sys\n', 'import torch\nfrom torch import nn\n')

def failure(W):
    "Seconds from the start of a launch whose rank 1 fails in its first step until its end, and CPU seconds of a rank"
    with tempfile.TemporaryDirectory() as d:
        (Path(d)/'train.py').write_text(fails)
        before,began = resource.getrusage(resource.RUSAGE_CHILDREN),time.time()
        cmd = [sys.executable,'-m','learnerdist.launch','--nproc',str(W),f'{d}/train.py']
        out = subprocess.run(cmd, capture_output=True, text=True, env=os.environ|dict(OMP_NUM_THREADS='1'), cwd=d)
        if 'rank 1 failed first: ValueError' not in out.stderr: raise SystemExit(out.stderr[-3000:])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime+after.ru_stime-before.ru_utime-before.ru_stime
    return dict(seconds=time.time()-began, cpu=cpu/W)

def measure(quick):
    res,failed = {},{}
    for W in (2,8) if quick else worlds:
        with tempfile.TemporaryDirectory() as d: ranks = on_ranks(measure_rank, W, W, d, n_threads=1)
        res[W] = {k: {c: mean(o[k][c] for o in ranks) for c in v} for k,v in ranks[0].items()}
        failed[W] = failure(W)
        print(W, res[W], failed[W], flush=True)
    return dict(many={str(k): v for k,v in res.items()}, failure={str(k): v for k,v in failed.items()})

def cost(o): return f"{1000*o['cpu']:.1f} ms, {o['packets']+o['sent']:.0f}, {(o['bytes']+o['sent_bytes'])/1000:.1f} kB, {o['pickles']:.0f}"

def report(res):
    many = res['many']
    rows = [[k, *(cost(o[k]) for o in many.values())] for k in next(iter(many.values())) if k!='nothing']
    failed = [f"{o['seconds']:.1f} s; {o['cpu']:.2f} s" for o in res['failure'].values()]
    text = table(['of a rank: CPU, messages, bytes, unpickled objects',*(f'{W} ranks' for W in many)], rows)
    return text+'\n\n'+table(['a launch that fails in its first step: clock; CPU of a rank',*many], [['',*failed]])

def plot(res, path):
    plt = peer('matplotlib.pyplot', 'matplotlib')
    if plt is None: return
    many = res['many']
    fig,axs = plt.subplots(1, 2, figsize=(9, 3.4))
    for k in next(iter(many.values())):
        if k=='nothing': continue
        axs[0].plot([*map(int, many)], [o[k]['packets']+o[k]['sent'] for o in many.values()], 'o-', label=k)
        axs[1].plot([*map(int, many)], [(o[k]['bytes']+o[k]['sent_bytes'])/1000 for o in many.values()], 'o-', label=k)
    for ax,what in zip(axs, ('messages of a rank','kB of a rank')): ax.set(xlabel='ranks', ylabel=what, xscale='log', yscale='log')
    save_plot(fig, axs[1], path, loc='upper left', bbox_to_anchor=(1, 1))

if __name__=='__main__': main('many_ranks', measure, report, plot)
