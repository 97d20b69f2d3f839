"""How a step grows with the ranks: measured on 1, 2 and 4, bytes counted, a model of the step fitted and carried to 1,024

    python benchmarks/growth.py"""
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
from common import main,on_ranks,quartiles,save_plot,table,together,turns
from learnerdist.distributed.agreement import Ballot,Tally
from learnerdist.core.env import current_group,group_size,process_group
from learnerdist.distributed.vote_links import GlooLinks,Links,open_links
from learnerdist.launch.processes import share_of_cores
from learnerdist.data.sharding import share_chunks,share_len
from step_time import Task,as_way,bare,ours
from torch import nn
from torch.nn.functional import cross_entropy

def model(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
shape,bs = (1,28,28),128
worlds = 1,2,4
far = 8,16,32,64,128,256,512,1024

# --- what a step is made of, each by itself ---------------------------------------------------------------------------------

def per_call(func, n, warm=3):
    "Seconds of a call: the median of `n`"
    secs = []
    for i in range(n+warm):
        start = time.perf_counter()
        func()
        if i>=warm: secs.append(time.perf_counter()-start)
    return quartiles(secs)[1]

def compute(task):
    m = task.model()
    opt,x,y = torch.optim.SGD(m.parameters(), lr=.01, momentum=.9),task.x[:task.bs],task.y[:task.bs]
    def step():
        cross_entropy(m(x), y).backward()
        opt.step()
        opt.zero_grad()
    return per_call(step, 20)

def loader(task):
    from torch.utils.data import DataLoader
    dl = DataLoader(task.data(), task.bs)
    return per_call(lambda: [*dl], 3, warm=1)/len(dl)

def vote(links):
    "A vote that is read as soon as it is posted"
    b = Ballot(links)
    def call():
        b.post(more=True)
        b.read()
    together()
    return per_call(call, 500)

def exchange(n_bytes):
    "An all-reduce of so many bytes"
    t = torch.zeros(n_bytes//4)
    together()
    return per_call(partial(dist.all_reduce, t, group=current_group()), 15)

sizes = 2**10,2**18,2**20,2**22,2**24

def measure_rank(bs, n_steps, n_rounds):
    with process_group(), ExitStack() as stack:
        task,losses = Task(model, shape, bs, n_steps),{}
        ways = {k: as_way(task, f(task, stack)[1], losses, k) for k,f in dict(bare=bare, ours=ours).items()}
        res = {k: quartiles(v)[1] for k,v in turns(ways, n_rounds).items()}
        return dict(res, **between_ranks(task)) if group_size()>1 else res

def between_ranks(task):
    "What ranks tell one another, on one machine (sockets) and, by what is told over gloo, on several"
    with open_links() as links: near = vote(links)
    return dict(vote=near, far_vote=vote(GlooLinks(60)), exchange={str(o): exchange(o) for o in sizes}, **count_bytes(task))

# --- bytes ------------------------------------------------------------------------------------------------------------------

def _loopback():
    "Bytes that have gone through the loopback interface; None where the system does not tell"
    file = Path('/proc/net/dev')
    lines = [o.split(':') for o in file.read_text().splitlines() if ':' in o] if file.exists() else []
    return next((int(v.split()[0]) for k,v in lines if k.strip()=='lo'), None)

def count_bytes(task):
    "Bytes of gradients that a hook of DDP saw in a step, and what the loopback carried for all ranks, in training by `learnerdist`"
    from learnerdist.all import Callback,DataLoaders,Learner,ProgressCallback
    from torch.utils.data import DataLoader
    seen = []
    def hook(group, bucket):
        seen.append(bucket.buffer().nbytes)
        fut = dist.all_reduce(bucket.buffer().div_(group_size()), group=group, async_op=True).get_future()
        return fut.then(lambda f: f.value()[0])
    class Notes(Callback):
        def before_batch(self):
            if self.training and self.iter in (0,task.n_steps-1): notes.append(_loopback())
    notes = []
    dls = DataLoaders(DataLoader(task.data(), task.bs))
    learn = Learner(dls, task.model(), cross_entropy, lr=.01, cbs=Notes).remove_cb(ProgressCallback)
    with learn.distrib_ctx(seed=0, comm_hook=hook), learn.no_logging(): learn.fit(1)
    wire = None if None in notes else (notes[1]-notes[0])/(task.n_steps-1)
    return dict(gradient_bytes=sum(seen)/task.n_steps, wire_bytes=wire)

# --- the model of a step ----------------------------------------------------------------------------------------------------

def fit_exchange(times, W):
    "Seconds for a message, and for a byte, of a ring: 2(W-1) messages one after the other, 2(W-1)/W of the bytes"
    a = np.array([[2*(W-1), 2*(W-1)/W*int(k)] for k in times])
    weights = 1/np.array(list(times.values())) # relative errors count
    (msg,byte),*_ = np.linalg.lstsq(a*weights[:,None], np.array(list(times.values()))*weights, rcond=None)
    return max(msg, 0.),max(byte, 0.)

def fit_local(alone):
    "What a step computes and reads: seconds, whatever the batch, and seconds for each sample more"
    each,fixed = np.polyfit([int(b) for b in alone], list(alone.values()), 1)
    return max(fixed, 0.),each

def vote_rounds(W): return (W-1).bit_length() # each as long as the vote of two ranks

def predict(W, part, batch=bs, cores=None):
    "Seconds of a step of W ranks; `cores`: that all of them share, on one machine; else each has its own, and gloo carries the votes"
    busy = max(1, W/cores) if cores else 1
    local = part['fixed']+part['each']*batch
    ring = 2*(W-1)*part['message']+2*(W-1)/W*part['gradient_bytes']*part['byte'] if W>1 else 0.
    res = dict(local=local*busy, exchange=ring*busy, vote=part['vote' if cores else 'far_vote']*vote_rounds(W)*busy)
    return dict(res, step=sum(res.values()))

# --- GPUs, by what is published ---------------------------------------------------------------------------------------------

# µs, from nccl's own model of itself (src/graph/tuning.cc): of a call, of a step over NVLink and over the network; share of the bandwidth
nccl = dict(ring=(8.4, 3.4, 9.6, 1.), ring_ll128=(10., 1.9, 4., .92), tree_ll128=(4.4, 1.2, 8.5, .9*.915))
link = 370e9 # Bytes/s of a ring: H100 over NVLink (nccl-tests issue 212), and of 8 network cards of 46 to 48 GB/s (issue 290)
gpu_steps = {'ResNet50, 25.6 million weights': (102.4e6, .100), 'a transformer of 1.3 billion weights, bfloat16': (2.6e9, .600)} # bytes, s
gpu_spread = .02 # Standard deviation of a rank's step, relative

def slowest_of(W, spread, n):
    "The mean of the largest of W draws, over the mean of one: how much longer a step is when ranks wait for the slowest"
    draws = np.random.default_rng(0).choice(spread, (n,W))
    return draws.max(1).mean()/np.mean(spread)

def nccl_s(W, n_bytes, per_node=8):
    "Seconds of nccl's all-reduce over W GPUs, by the quickest of its ways"
    N = max(1, W//per_node)
    def way(name):
        base,near,net,share = nccl[name]
        if name.startswith('ring'): return base+2*(W-N)*near+2*(N-1)*net,link*share*W/(2*(W-1))
        return base+2*((W//N-1)*near+(N-1).bit_length()*net),link*share/2
    return min(lat*1e-6+n_bytes/speed for lat,speed in map(way, nccl))

def of_gpus(W, n_bytes, secs):
    "Seconds of a step: computing, waiting for the slowest of W (normal, independent), a tenth of the exchange at least, all of it at most"
    waiting = secs*(slowest_of(W, np.random.default_rng(1).normal(1, gpu_spread, 20000), 500)-1)
    whole = nccl_s(W, n_bytes)
    hidden = max(whole-secs*2/3, whole/10) # DDP sends what is computed; two thirds of a step are the backward pass
    return dict(waiting=waiting, exchange=whole, least=secs+waiting+hidden, most=secs+waiting+whole)

# --- many ranks in one process ----------------------------------------------------------------------------------------------

def simulate(W=1024, n=2**20+5):
    "The shares of all ranks, put together, and what a vote of them says; seconds of both"
    start = time.perf_counter()
    lens,seen = [],torch.zeros(n, dtype=torch.int8)
    for r in range(W):
        idxs = torch.cat([*share_chunks(n, r, W, pad=False, shuffle=True, epoch=1, seed=2)])
        seen[idxs] += 1
        lens.append(len(idxs))
    padded = {share_len(n, r, W) for r in range(W)}
    shares = time.perf_counter()-start
    if not (seen==1).all() or max(lens)-min(lens)>1 or len(padded)!=1: raise SystemExit('the shares are no partition')
    told = votes(W, {700: 'epoch', 3: 'train', 1023: 'validate'})
    if told!=Tally(0, 1, 1, 1, W, W-1) or told.verdict!='epoch': raise SystemExit(f'the votes of {W} ranks say {told}')
    return dict(ranks=W, n=n, longest=max(lens), shortest=min(lens), padded=padded.pop(), shares_s=shares)

class QueueLinks(Links):
    "Between ranks that are threads of this process"
    def __init__(self, rank, world_size, queues):
        super().__init__(rank, world_size)
        self.queues = queues
    def tell(self, n, rows): self.queues[self.rank,self.before(n)].put(rows)
    def hear(self, n, n_bytes): return self.queues[self.after(n),self.rank].get(timeout=60)

def votes(W, asks):
    "What the ranks of a vote hear, all of them the same"
    queues = {(r,(r-(1<<k))%W): SimpleQueue() for r in range(W) for k in range((W-1).bit_length())}
    def vote(r):
        b = Ballot(QueueLinks(r, W, queues))
        b.post(asks.get(r), stepped=True, more=r!=9)
        return b.read()
    with ThreadPoolExecutor(W) as ex: told, = {*ex.map(vote, range(W))}
    return told

# --- report -----------------------------------------------------------------------------------------------------------------

def alone(batches):
    "By batch size: seconds to compute a step and to read its batch, in one process"
    return {str(b): compute(task)+loader(task) for b in batches for task in [Task(model, shape, b, 10)]}

def measure(quick):
    n_steps,n_rounds,res = (6,2,{}) if quick else (20,10,{})
    for kind in ('weak','strong'):
        for W in worlds:
            b = bs if kind=='weak' else bs//W
            got = on_ranks(measure_rank, W, b, n_steps, n_rounds, n_threads=1)
            res[f'{kind} {W}'] = dict(got[0], batch=b, **{k: max(o[k] for o in got) for k in ('bare','ours')})
    own, = on_ranks(alone, 1, [bs, bs//2, bs//4], n_threads=1)
    return dict(runs=res, alone=own, cores=share_of_cores(1), part=parts(res['weak 2'], own), simulated=simulate())

def parts(two, own):
    msg,byte = fit_exchange(two['exchange'], 2)
    fixed,each = fit_local(own)
    return dict(fixed=fixed, each=each, message=msg, byte=byte, **{k: two[k] for k in ('vote','far_vote','gradient_bytes')})

def ms(o): return f'{1000*o:.2f}'

def report(res):
    rows = []
    for name,o in res['runs'].items():
        kind,W = name.split()
        p = predict(int(W), res['part'], o['batch'], res['cores'])
        rows.append([kind, W, o['batch'], ms(o['bare']), ms(o['ours']), f"{o['ours']/o['bare']:.3f}", ms(p['step']),
                     f"{p['step']/o['ours']-1:+.0%}"])
    text = table(['scaling','ranks','batch of a rank','bare DDP, ms','learnerdist, ms','ratio','the model says','off by'], rows)
    two = res['runs']['weak 2']
    seen = two['wire_bytes']
    wire = '' if seen is None else f", {seen:,.0f} seen on the loopback interface (both ranks, and all other traffic)"
    part = res['part']
    text += f"\n\nBytes of a step on 2 ranks: {two['gradient_bytes']:,.0f} of gradients{wire}; a vote is 8 of them.\n" + \
            f"Parts of the model: compute and loader {ms(part['fixed'])} ms and {1e6*part['each']:.1f} µs a sample, " + \
            f"a round of votes {1e6*part['vote']:.0f} µs, by gloo {1e6*part['far_vote']:.0f} µs, " + \
            f"a message {1e6*part['message']:.0f} µs, {1e-9/max(part['byte'], 1e-15):.2f} GB/s.\n\n"
    far_rows = [[W, *(ms(p[k]) for k in ('step','local','exchange','vote')), f"{predict(1, part)['step']/p['step']:.0%}"]
                for W in far for p in [predict(W, part)]]
    head = ['ranks','predicted step, ms','compute and loader','exchange','vote','efficiency']
    return text+table(head, far_rows)+'\n\n'+gpu_table()+'\n\n'+_of_many(res['simulated'])

def gpu_table():
    rows = [[k if W==far[0] else '', W, ms(o['waiting']), ms(o['exchange']), f"{ms(o['least'])} to {ms(o['most'])}",
             f"{secs/o['most']:.0%} to {secs/o['least']:.0%}"]
            for k,(n,secs) in gpu_steps.items() for W in far for o in [of_gpus(W, n, secs)]]
    return table(['GPUs, nccl','ranks','waiting, ms','all-reduce, ms','step, ms','efficiency'], rows)

def _of_many(sim):
    return f"Simulated in one process: {sim['ranks']:,} ranks share {sim['n']:,} shuffled samples, each exactly once, " + \
        f"{sim['shortest']:,} or {sim['longest']:,} a rank ({sim['padded']:,} padded), in {sim['shares_s']:.2f} s; " + \
        "and a vote of theirs, from queue to queue, tells each of them what was asked."

def plot(res, path):
    import matplotlib.pyplot as plt
    fig,axs = plt.subplots(1, 2, figsize=(9, 3.6))
    for kind in ('weak','strong'):
        got = {int(k.split()[1]): o['ours'] for k,o in res['runs'].items() if k.startswith(kind)}
        axs[0].plot(list(got), [1000*v for v in got.values()], 'o-', label=f'{kind}, measured')
        told = [1000*predict(W, res['part'], bs if kind=='weak' else bs//W, res['cores'])['step'] for W in got]
        axs[0].plot(list(got), told, 'x:', label=f'{kind}, the model')
    axs[0].set(xlabel=f"ranks, on {res['cores']} cores", ylabel='ms a step', xticks=list(worlds))
    axs[0].legend(fontsize=7)
    part = res['part']
    for k in ('step','local','exchange','vote'): axs[1].plot(far, [1000*predict(W, part)[k] for W in far], 'o-', label=k)
    axs[1].set(xscale='log', yscale='log', xlabel='ranks, each with a core of its own', ylabel='ms a step, predicted')
    save_plot(fig, axs[1], path)

if __name__=='__main__': main('growth', measure, report, plot)
