"""Memory and seconds of a step of a rank: the same model in DDP, sharded by `distrib_ctx(shard=True)`, and in a bare loop with FSDP2

    python benchmarks/sharded.py [--ranks 2 4] [--width 1024] [--layers 8]

*live* counts the bytes of tensors after a step: weights, gradients, and the optimizer's state. *peak* is the largest resident size of
the process beyond that before the model was made. glibc keeps freed memory in arenas unless its threshold for mmap is small
(`MALLOC_MMAP_THRESHOLD_=65536` in the environment of the launch): both are printed, since without it the peak on the CPU says little.
"""
import argparse,ctypes,gc,statistics,threading,time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader,TensorDataset
from learnerdist.all import Callback,DataLoaders,Learner,ProgressCallback,group_size,process_group
from learnerdist.core.shards import is_sharded
from learnerdist.testing import run_ranks

class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a,self.b = nn.Linear(n, n),nn.Linear(n, n)
    def forward(self, x): return x+self.b(self.a(x).relu())

def make(width, layers):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(layers)], nn.Linear(width, 8))

def rss(): # MiB
    with open('/proc/self/status') as f: return next(int(o.split()[1]) for o in f if o.startswith('VmRSS'))/1024

class Peak:
    "The largest resident size while it runs, sampled each millisecond"
    def __enter__(self):
        self.base,self.top,self.on = rss(),0.,True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self
    def _watch(self):
        while self.on:
            self.top = max(self.top, rss())
            time.sleep(.001)
    def __exit__(self, *_):
        self.on = False
        self.thread.join()

def live(model, opt):
    "MiB of weights, gradients and optimizer state of this rank; memory that tensors share counts once"
    state = [v for s in opt.state.values() for v in s.values() if torch.is_tensor(v)]
    found = [t for t in [*model.parameters(), *[p.grad for p in model.parameters()], *state] if t is not None]
    stored = [(t.to_local() if is_sharded(t) else t).untyped_storage() for t in found]
    return sum({o.data_ptr(): o.nbytes() for o in stored}.values())/2**20

def small_threshold(): ctypes.CDLL(None).mallopt(-3, 2**16) # M_MMAP_THRESHOLD: tensors from 64 KiB go back to the system

class Watch(Callback):
    "Seconds of each step from the third on, and the bytes while gradients are there"
    order = 10
    def before_fit(self): self.secs,self.at,self.bytes = [],None,0
    def after_step(self): self.bytes = live(self.learn.model, self.learn.opt)
    def after_batch(self):
        if not self.training: return
        now = time.perf_counter()
        if self.at and self.learn.iter>2: self.secs.append(now-self.at)
        self.at = now

def measure(way, width, layers, gives_back, n_steps=12, bs=4):
    if gives_back: small_threshold()
    with process_group():
        g = torch.Generator().manual_seed(1)
        n = n_steps*bs*group_size()
        ds = TensorDataset(torch.randn(n, width, generator=g), torch.randint(8, (n,), generator=g))
        gc.collect()
        with Peak() as peak:
            model = make(width, layers)
            if way=='bare FSDP2': res = bare(model, ds, bs)
            else:
                dls = DataLoaders(DataLoader(ds, bs), DataLoader(TensorDataset(*ds[:bs]), bs))
                learn = Learner(dls, model, F.cross_entropy, lr=1e-3, cbs=Watch)
                learn.remove_cb(ProgressCallback)
                with learn.no_logging(), learn.distrib_ctx(seed=1, **({'shard': True} if way=='sharded' else {})):
                    learn.fit(1)
                    res = dict(live=learn.watch.bytes, ms=statistics.median(learn.watch.secs)*1e3, peak=rss_peak(peak))
        return res

def rss_peak(peak): return peak.top-peak.base

def bare(model, ds, bs):
    from torch.distributed.fsdp import fully_shard
    from learnerdist.distributed.sharded import repeated_blocks
    from learnerdist.distributed.sharded import make_mesh
    from learnerdist.core.env import group_rank
    mesh,secs = make_mesh(torch.device('cpu'), 1),[]
    for m in [*repeated_blocks(model),model]: fully_shard(m, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i,(x,y) in enumerate(DataLoader(torch.utils.data.Subset(ds, range(group_rank(), len(ds), group_size())), bs)):
        start = time.perf_counter()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        used = live(model, opt)
        opt.zero_grad()
        if i>2: secs.append(time.perf_counter()-start)
    return dict(live=used, ms=statistics.median(secs)*1e3, peak=None)

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--ranks', type=int, nargs='+', default=[2,4])
    p.add_argument('--width', type=int, default=1024)
    p.add_argument('--layers', type=int, default=8)
    args = p.parse_args()
    torch.set_num_threads(1)
    n = sum(o.numel() for o in make(args.width, args.layers).parameters())
    block = 2*args.width*(args.width+1)*4/2**20
    print(f'{n/1e6:.1f} million float32 weights, AdamW, blocks of {block:.1f} MiB; torch {torch.__version__}; MiB a rank\n')
    print('| ranks | way | live | live of DDP | peak | peak, small threshold | ms a step |\n|---|---|---|---|---|---|---|')
    for W in args.ranks:
        first = None
        for way in ('DDP','sharded','bare FSDP2'):
            res = [run_ranks(measure, W, way, args.width, args.layers, o) for o in (False,True)]
            top = max(o['live'] for o in res[0])
            first = first or top
            peaks = ['' if r[0]['peak'] is None else f"{max(o['peak'] for o in r):.0f}" for r in res]
            ms = max(o['ms'] for o in res[0])
            print(f'| {W} | {way} | {top:.0f} | {top/first:.2f} | {peaks[0]} | {peaks[1]} | {ms:.1f} |', flush=True)

if __name__=='__main__': main()
