"""How a step grows with the ranks: measured on 1 to 4, bytes counted, a model of the step fitted and carried to 1,024

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
from common import main,on_ranks,quartiles,save_plot,table,together,turns,verdict
from learnerdist.all import TfmdDL
from learnerdist.core.collectives import gather_rows
from learnerdist.distributed.vote_links import Message,cast
from learnerdist.core.compat import sync_buffers
from learnerdist.core.env import current_group,group_rank,group_size,in_group,process_group
from learnerdist.distributed.vote_links import GlooLinks,Links,open_links
from learnerdist.distributed.replica import SharedMean
from learnerdist.launch.processes import share_of_cores
from learnerdist.data.dealing import epoch_order
from step_time import Task,as_way,bare,lr,ours,sgd,skip
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

def model(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))

class Sleeping(nn.Module):
    "20 ms of sleep (2 more or less: standard deviation) in place of computing, in which ranks share no cores; 1 MiB of weights"
    def __init__(self):
        super().__init__()
        self.weights,self.rng = nn.Parameter(torch.zeros(2**18)),np.random.default_rng(group_rank())
    def forward(self, x):
        time.sleep(max(self.rng.normal(.02, .002), 0))
        return x.flatten(1)[:,:10]+self.weights.sum()

shape,bs = (1,28,28),128
worlds = 1,2,3,4
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

def after_last(func, n, warm=3, before=lambda: None):
    "Seconds from when the last rank begins a call until the last one has ended it, the median of `n`: each rank is 1 ms late by turns"
    marks = []
    for i in range(n+warm):
        before()
        if i%group_size()==group_rank(): time.sleep(.001)
        start = time.perf_counter() # the same clock in all processes of a machine
        func()
        marks.append((start,time.perf_counter()))
    starts,ends = torch.stack(gather_rows(torch.tensor(marks[warm:], dtype=torch.double))).amax(0).T
    return (ends-starts).median().item()

def nothing(state, bucket):
    "A hook of DDP that exchanges nothing; its gradients are copied into buckets and out of them all the same"
    fut = torch.futures.Future()
    fut.set_result(bucket.buffer())
    return fut

def local_steps(task, secs):
    "A way whose steps compute and read their batch, within DDP, and exchange nothing; the seconds of each are added to `secs`"
    plain,dl = task.model(),TfmdDL(task.data(), task.bs)
    m = DistributedDataParallel(plain, **{sync_buffers: False}) if in_group() else plain
    if in_group(): m.register_comm_hook(None, nothing)
    opt = sgd(plain.parameters(), lr)
    def way():
        start,own = time.perf_counter(),[]
        for x,y in dl:
            cross_entropy(m(x), y).backward()
            opt.step()
            opt.zero_grad()
            own.append(time.perf_counter()-start)
            start = time.perf_counter()
        secs.extend(own[skip:])
        return np.mean(own[skip:])
    return way

def vote(links, measure=per_call):
    "A vote"
    def call(): cast(links, Message(yes=True), 0)
    together()
    return measure(call, 500)

class Cold:
    "Called before an exchange: reads and writes other memory, as a step does, so that caches hold none of the gradients; then ranks meet"
    def __init__(self): self.t = torch.zeros(2**24)
    def __call__(self):
        self.t += 1
        together()

def exchange(n_bytes):
    "An all-reduce of so many bytes"
    t = torch.zeros(n_bytes//4)
    return after_last(partial(dist.all_reduce, t, group=current_group()), 15, before=Cold())

class Bucket:
    "As DDP gives it to a hook: all gradients in one"
    def __init__(self, t): self.t = t
    def buffer(self): return self.t
    def index(self): return 0
    def is_last(self): return True

def shared(links, n_bytes):
    "An average of so many bytes in shared memory"
    t = torch.zeros(n_bytes//4)
    mean = SharedMean(nn.ParameterList([nn.Parameter(t)]), links)
    return after_last(lambda: mean.hook(Bucket(t)).wait(), 15, before=Cold())

sizes = 2**10,2**18,2**20,2**22,2**24

def measure_rank(func, bs, n_steps, n_rounds):
    with process_group(), ExitStack() as stack:
        task,losses,secs = Task(func, shape, bs, n_steps),{},[]
        ways = {k: as_way(task, f(task, stack)[1], losses, k) for k,f in dict(bare=bare, ours=ours).items()}
        res = {k: quartiles(v)[1] for k,v in turns(dict(ways, local=local_steps(task, secs)), n_rounds).items()}
        secs = torch.cat(gather_rows(torch.tensor(secs[n_steps-skip:], dtype=torch.double))).tolist() # without the round that warms up
        return dict(res, secs=[round(o, 6) for o in secs], **(between_ranks(task) if group_size()>1 else {}))

def between_ranks(task):
    "What ranks tell one another, on one machine (sockets) and, by what is told over gloo, on several"
    with open_links() as links: near,means = vote(links, after_last),{str(o): shared(links, o) for o in sizes}
    return dict(vote=near, shared=means, far_vote=vote(GlooLinks(60), after_last), exchange={str(o): exchange(o) for o in sizes},
                **count_bytes(task))

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

def fit_line(times, n_messages, n_bytes):
    "Seconds for a message, and for a byte, from times by size; `n_bytes`: how many for each byte of a size"
    secs = np.array(list(times.values()))
    a = np.array([[n_messages, n_bytes*int(k)] for k in times])/secs[:,None] # relative errors count
    (msg,byte),*_ = np.linalg.lstsq(a, np.ones(len(secs)), rcond=None)
    return max(msg, 0.),max(byte, 0.)

def ring(W): return 2*(W-1),2*(W-1)/W # gloo's: messages one after the other, and of the bytes each rank sends so many
def memory(W):
    "Shared memory: rounds of votes in which ranks meet, and bytes that a rank reads and writes for each byte of gradients"
    if W==2: return 1,5 # into its slot (2), then both slots are added up (3)
    return 2*vote_rounds(W),2+5*(W-1)/W+2/W # into its slot; its part of all slots is added up, put there (2/W), and the others' are fetched

def vote_rounds(W): return (W-1).bit_length() # each as long as the vote of two ranks

def predict(W, part, secs, n_bytes=0, own=0., cores=None, sleeping=False):
    "Seconds of a step of W ranks with `n_bytes` of gradients; `secs`: of local steps; `cores`: that all share; None: each its own, gloo"
    local = np.mean(secs)
    if W==1: return dict(local=local, own=0., waiting=0., exchange=0., vote=0., step=local)
    busy,at_once = max(1, W/cores) if cores else 1,W if sleeping else min(W, cores or W) # one that waits gives its core to another
    (n_msg,n_byte),(msg,byte) = (memory(W),part['shared']) if cores else (ring(W),part['gloo'])
    res = dict(local=local, own=own, waiting=local*(slowest_of(at_once, secs, 4000)-1),
               exchange=(n_msg*msg+n_byte*n_bytes*byte)*busy,
               vote=2*part['vote' if cores else 'far_vote']*vote_rounds(W)*busy) # a vote, and the number of items
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
    order,lens,seen = epoch_order(n, 1, 2, True),[],torch.zeros(n, dtype=torch.int8)
    for r in range(W):
        idxs = order[r::W]
        seen[idxs] += 1
        lens.append(len(idxs))
    padded = {-(-n//W)}
    shares = time.perf_counter()-start
    if not (seen==1).all() or max(lens)-min(lens)>1 or len(padded)!=1: raise SystemExit('the shares are no partition')
    told = votes(W, {700: 'epoch', 3: 'train', 1023: 'validate'})
    if (told.scope,told.n_yes,told.asked)!=('epoch',W-1,False): raise SystemExit(f'the votes of {W} ranks say {told}')
    return dict(ranks=W, n=n, longest=max(lens), shortest=min(lens), padded=padded.pop(), shares_s=shares)

class QueueLinks(Links):
    "Between ranks that are threads of this process"
    def __init__(self, rank, world_size, queues):
        super().__init__(rank, world_size)
        self.queues = queues
    def send(self, n, rows): self.queues[self.rank,self.before(n)].put(rows)
    def receive(self, n, n_bytes): return self.queues[self.after(n),self.rank].get(timeout=60)

def votes(W, asks):
    "What the ranks of a vote hear, all of them the same"
    queues = {(r,(r-(1<<k))%W): SimpleQueue() for r in range(W) for k in range((W-1).bit_length())}
    def vote(r):
        return cast(QueueLinks(r, W, queues), Message(scope=asks.get(r), yes=r!=9), 0)
    with ThreadPoolExecutor(W) as ex: told, = {*ex.map(vote, range(W))}
    return told

# --- report -----------------------------------------------------------------------------------------------------------------

def measure(quick):
    (n_steps,n_rounds),cores,res = (6,2) if quick else (16,6),share_of_cores(1),{}
    for kind in ('weak','strong','sleeping'):
        for W in worlds:
            b = bs//W if kind=='strong' else bs
            got = on_ranks(measure_rank, W, Sleeping if kind=='sleeping' else model, b, n_steps, n_rounds, n_threads=1)
            res[f'{kind} {W}'] = dict(got[0], batch=b, **{k: max(o[k] for o in got) for k in ('bare','ours')})
    two = res['weak 2']
    part = dict(gloo=fit_line(two['exchange'], *ring(2)), shared=fit_line(two['shared'], *memory(2)), vote=two['vote'],
                far_vote=two['far_vote'])
    return dict(runs=res, cores=cores, part=part, simulated=simulate())

def predicted(res, name):
    kind,W = name.split()
    o,one = res['runs'][name],res['runs'][f'{kind} 1']
    return predict(int(W), res['part'], o['secs'], o.get('gradient_bytes', 0), one['ours']-one['local'], res['cores'], kind=='sleeping')

def far_away(res, W):
    one,two = res['runs']['weak 1'],res['runs']['weak 2']
    return predict(W, res['part'], two['secs'], two['gradient_bytes'], one['ours']-one['local'])

def ms(o): return f'{1000*o:.2f}'

def report(res):
    rows,lines,part = [],[],res['part']
    for name,o in res['runs'].items():
        (kind,W),p = name.split(),predicted(res, name)
        off = p['step']/o['ours']-1
        rows.append([kind, W, o['batch'], ms(o['bare']), ms(o['ours']), f"{o['ours']/o['bare']:.3f}", *(ms(p[k]) for k in parts),
                     ms(p['step']), f'{off:+.0%}'])
        if kind=='sleeping' or int(W)<=res['cores']:
            lines.append(verdict(f"{kind}, {W} rank{'s'*(W!='1')}: the model is off by, in %", abs(100*off), 10, '{:.1f}'))
    head = ['scaling','ranks','batch of a rank','bare DDP, ms','learnerdist, ms','ratio',*parts.values(),'the model says','off by']
    two = res['runs']['weak 2']
    seen = two['wire_bytes']
    wire = '' if seen is None else f", {seen:,.0f} seen on the loopback interface (both ranks, and all other traffic)"
    text = '\n\n'.join([table(head, rows), '\n'.join(lines),
                        f"Bytes of a step on 2 ranks: {two['gradient_bytes']:,.0f} of gradients{wire}; a vote is 16 of them.",
                        of_parts(res['runs'], part)])
    alone = np.mean(res['runs']['weak 1']['secs'])
    far_rows = [[W, *(ms(p[k]) for k in ('step',*parts)), f"{alone/p['step']:.0%}"] for W in far for p in [far_away(res, W)]]
    head = ['ranks, gloo between machines','predicted step, ms',*parts.values(),'efficiency']
    return text+'\n\n'+table(head, far_rows)+'\n\n'+gpu_table()+'\n\n'+_of_many(res['simulated'])

parts = dict(local='compute, loader, copies', own='Learner', waiting='waiting', exchange='exchange', vote='votes')

def of_parts(runs, part):
    def spread(k): return f"{slowest_of(2, runs[k]['secs'], 4000)-1:.0%}"
    def way(k): return f"{1e6*part[k][0]:.0f} µs and {1e-9/max(part[k][1], 1e-15):.2f} GB/s"
    return f"Of two steps that exchange nothing the slower one takes {spread('weak 2')} longer than the mean " + \
        f"({spread('sleeping 2')} where ranks sleep). A round of votes takes {1e6*part['vote']:.0f} µs, by gloo " + \
        f"{1e6*part['far_vote']:.0f} µs; " + \
        f"a meeting in shared memory, and what it moves, {way('shared')}; a message of gloo's {way('gloo')}."

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
    for kind in ('weak','strong','sleeping'):
        got = {int(k.split()[1]): o['ours'] for k,o in res['runs'].items() if k.startswith(kind)}
        axs[0].plot(list(got), [1000*v for v in got.values()], 'o-', label=f'{kind}, measured')
        axs[0].plot(list(got), [1000*predicted(res, f'{kind} {W}')['step'] for W in got], 'x:', label=f'{kind}, the model')
    axs[0].set(xlabel=f"ranks, on {res['cores']} cores", ylabel='ms a step', xticks=list(worlds))
    axs[0].legend(fontsize=7)
    for k in ('step',*parts): axs[1].plot(far, [1000*far_away(res, W)[k] for W in far], 'o-', label=k)
    axs[1].set(xscale='log', yscale='log', xlabel='ranks, each with a core of its own', ylabel='ms a step, predicted')
    save_plot(fig, axs[1], path)

if __name__=='__main__': main('growth', measure, report, plot)
