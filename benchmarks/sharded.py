"""A model spread over the ranks: a step and memory of `distrib_ctx(shard=True)`, beside bare FSDP2, Accelerate's, Fabric's, and DDP

    python benchmarks/sharded.py

Time: all ways in the same processes, in turns, in an order drawn anew in each round; the ratio of a round to that of bare FSDP2 in the same
round. Accelerate takes FSDP for GPUs only: on the CPU it is told so by its state, and then runs as it would. Memory: *live* counts
the bytes of weights, gradients and optimizer state in a step; *peak* is the largest resident size of the process beyond that before the
model was made. glibc keeps freed memory in arenas unless its threshold for mmap is small (`MALLOC_MMAP_THRESHOLD_=65536` in the environment
of the launch): both are measured, since without it the peak on the CPU says little."""
import ctypes,gc,re,sys,threading,time
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from common import all_close,bars,main,on_ranks,peer,processor,quartiles,ratio_text,ratios,slowest,table,turns,verdict
from learnerdist.all import Callback,DataLoaders,Learner,ProgressCallback,group_size,process_group
from learnerdist.core.shards import is_part,whole
from learnerdist.distributed.blocks import repeated_blocks
from learnerdist.distributed.sharded import make_mesh
from learnerdist.testing import run_ranks
from step_time import Task,as_way,loop,quiet,skip

width,layers,bs = (4096,24,16) if torch.cuda.is_available() else (512,8,16) # samples a step on each rank

class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a,self.b = nn.Linear(n, n),nn.Linear(n, n)
    def forward(self, x): return x+self.b(self.a(x).relu())

def make(): return nn.Sequential(*[Block(width) for _ in range(layers)], nn.Linear(width, 10))
def adamw(params, lr=1e-3): return torch.optim.AdamW(params, lr=lr, eps=1e-4) # a small eps makes much of rounding errors

# --- the ways: each returns the model, and a function that trains it for a round and returns the last loss --------------------

def shard_by_hand(model, mesh):
    from torch.distributed.fsdp import fully_shard
    for m in [*repeated_blocks(model),model]: fully_shard(m, mesh=mesh)
    return model

def loader(task): return DataLoader(task.data(task.in_batches()), task.bs)

def bare(task, stack):
    model = shard_by_hand(task.model(), make_mesh(task.device, 1))
    return model,partial(loop, task, model, adamw(model.parameters()), dealt(task))

def dealt(task):
    from learnerdist.distributed import DistributedDL
    return DistributedDL.from_dl(DataLoader(task.data(), task.bs), torch.distributed.get_rank(), group_size())

def ours(task, stack, **kw):
    dls = DataLoaders(DataLoader(task.data(), task.bs), device=task.device)
    learn = Learner(dls, task.model(), F.cross_entropy, opt_func=adamw, lr=1e-3).remove_cb(ProgressCallback)
    learn.one_batch = task.clock.ticking(learn.one_batch)
    stack.enter_context(learn.distrib_ctx(seed=0, **kw))
    stack.enter_context(learn.no_logging())
    def train():
        learn.fit(1)
        return learn.loss
    return learn.model,train

def accelerated(task, stack):
    from accelerate import Accelerator,FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy='transformer_based_wrap',
                                            transformer_cls_names_to_wrap=['Block'], reshard_after_forward=True)
    acc = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    acc.state.distributed_type,acc.state.fsdp_plugin = DistributedType.FSDP,plugin
    model = task.model()
    plugin.set_auto_wrap_policy(model)
    model,opt = acc.prepare(model, adamw(model.parameters()))
    return model,partial(loop, task, model, opt, acc.prepare_data_loader(loader(task)), acc.backward)

def fabric(task, stack):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import ModelParallelStrategy
    strategy = ModelParallelStrategy(lambda m, mesh: shard_by_hand(m, mesh['data_parallel']), data_parallel_size=group_size(),
                                     tensor_parallel_size=1)
    kind = 'cuda' if torch.cuda.is_available() else 'cpu'
    fab = Fabric(accelerator=kind, devices=group_size(), strategy=strategy, plugins=[LightningEnvironment()])
    fab.launch()
    model = fab.setup_module(task.model())
    opt = fab.setup_optimizers(adamw(model.parameters()))
    return model,partial(loop, task, model, opt, fab.setup_dataloaders(DataLoader(task.data(), task.bs)), fab.backward)

ways = {'bare FSDP2': (bare, []), 'learnerdist, sharded': (partial(ours, shard=True), []),
        'Accelerate, FSDP2': (accelerated, ['accelerate']), 'Fabric, FSDP2': (fabric, ['lightning_fabric']), 'learnerdist, DDP': (ours, [])}

# --- time -------------------------------------------------------------------------------------------------------------------

def measure_rank(names, n_steps, n_rounds):
    "Seconds of a step in each round of each way, and how far its weights are from the bare loop's"
    quiet()
    with process_group(), ExitStack() as stack:
        task,losses = Task(make, (width,), bs, n_steps),{}
        made = {k: ways[k][0](task, stack) for k in names}
        times = turns({k: as_way(task, train, losses, k) for k,(_,train) in made.items()}, n_rounds)
        params = {k: [whole(p.detach()).clone() for p in m.parameters()] for k,(m,_) in made.items()}
        base = params['bare FSDP2']
        return dict(times=times, weights={k: max((a-b).abs().max().item() for a,b in zip(v, base)) for k,v in params.items()})

# --- memory -----------------------------------------------------------------------------------------------------------------

def rss(): # MiB
    with open('/proc/self/status') as f: return next(int(o.split()[1]) for o in f if o.startswith('VmRSS'))/1024

class Peak:
    "The largest resident size while it runs, sampled each millisecond; on a GPU what torch has allocated there"
    def __enter__(self):
        if torch.cuda.is_available(): torch.cuda.reset_peak_memory_stats()
        self.base,self.top,self.on = rss(),0.,True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self
    def _watch(self):
        while self.on:
            self.top = max(self.top, rss())
            time.sleep(.001)
    def over(self): return torch.cuda.max_memory_allocated()/2**20 if torch.cuda.is_available() else self.top-self.base
    def __exit__(self, *_):
        self.on = False
        self.thread.join()

def live(model, opt):
    "MiB of weights, gradients and optimizer state of this rank; memory that tensors share counts once"
    state = [v for s in opt.state.values() for v in s.values() if torch.is_tensor(v)]
    found = [t for t in [*model.parameters(), *[p.grad for p in model.parameters()], *state] if t is not None]
    stored = [(t.to_local() if is_part(t) else t).untyped_storage() for t in found]
    return sum({o.data_ptr(): o.nbytes() for o in stored}.values())/2**20

def small_threshold(): ctypes.CDLL(None).mallopt(-3, 2**16) # M_MMAP_THRESHOLD: tensors from 64 KiB go back to the system

class Watch(Callback):
    "The bytes while gradients are there"
    order = 10
    def after_step(self): self.bytes = live(self.learn.model, self.learn.opt)

def memory(shard, gives_back):
    "MiB of a rank in the second step: live, and the peak"
    if gives_back: small_threshold()
    with process_group():
        ds = Task(make, (width,), bs, 3).data()
        gc.collect()
        with Peak() as peak:
            learn = Learner(DataLoaders(DataLoader(ds, bs)), make(), F.cross_entropy, opt_func=adamw, cbs=Watch).remove_cb(ProgressCallback)
            with learn.no_logging(), learn.distrib_ctx(seed=1, **({'shard': True} if shard else {})):
                learn.fit(1)
                return learn.watch.bytes,peak.over()

def memory_of(W):
    res = {}
    for k,shard in (('learnerdist, DDP',False),('learnerdist, sharded',True)):
        plain,small = (run_ranks(memory, W, shard, o) for o in (False,True))
        res[k] = dict(live=max(o[0] for o in plain), peak=max(o[1] for o in plain), small=max(o[1] for o in small))
    return res

# --- the report ---------------------------------------------------------------------------------------------------------------

def measure(quick):
    ranks = [W for W in (2,4) if W<=(torch.cuda.device_count() or 4)]
    if not ranks: sys.exit(print('sharded: two GPUs are needed, nothing measured'))
    names,res = [k for k,(_,needs) in ways.items() if all(peer(o) is not None for o in needs)],{}
    for W in ranks:
        got = on_ranks(measure_rank, W, names, skip+4 if quick else skip+8, 2 if quick else 15, launched=True)
        diffs = {n: max(o['weights'][n] for o in got) for n in names}
        all_close(f'{W} ranks: weights', diffs, 1e-3)
        res[f'{W} ranks'] = dict(times=slowest([o['times'] for o in got]), weights=diffs, memory=memory_of(W))
    return dict(cases=res)

def report(res):
    rows,lines = [],[]
    for case,o in res['cases'].items():
        rs = ratios(o['times'], 'bare FSDP2')
        for i,(k,v) in enumerate(o['times'].items()):
            m = o['memory'].get(k, {})
            cells = [f'{m[n]:.0f}' if m else '' for n in ('live','peak','small')]
            rows.append([case if not i else '', k, f'{1000*quartiles(v)[1]:.0f}', ratio_text(rs[k]) if k in rs else '1', *cells])
        lines.append(verdict(f'{case}, a step sharded over bare FSDP2', rs['learnerdist, sharded'][1], 1.05))
        part = o['memory']['learnerdist, sharded']['live']/o['memory']['learnerdist, DDP']['live']
        lines.append(verdict(f"{case}, live bytes of a rank over a replica's", part, 1.15/int(case.split()[0])))
    head = ['ranks','way','ms a step','ratio to bare FSDP2: median of rounds (quartiles)','live MiB','peak MiB','peak, small threshold']
    n = (2*width*(width+1)*layers+(width+1)*10)/1e6
    return f'{n:.1f} million float32 weights in {layers} blocks, AdamW.\n\n'+table(head, rows)+'\n\n'+'\n'.join(lines)

def plot(res, path):
    groups = {k: ratios(o['times'], 'bare FSDP2') for k,o in res['cases'].items()}
    bars(path, groups, 'time over bare FSDP2', 'A step of a sharded model', line=1)

if __name__=='__main__':
    gpu = torch.cuda.is_available()
    main('sharded', measure, report, plot, kept_as='sharded-'+re.sub(r'\W+', '-', processor()).lower() if gpu else None)
