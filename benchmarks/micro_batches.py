"""A step in micro-batches, on 2 ranks: `distrib_ctx(global_bs=256, max_bs=32)` beside accumulation by hand with DDP, and beside
`GradientAccumulation`; for a small network, and for a ResNet-18. The processor's seconds of a rank, paired by rounds. Nothing is kept.

    python benchmarks/micro_batches.py [rounds]
"""
import sys
from functools import partial
from itertools import product
from time import process_time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from learnerdist.all import Callback, DataLoaders, GradientAccumulation, Learner, group_rank, group_size, process_group
from learnerdist.testing import run_ranks
from learnerdist.core.compat import sync_buffers
from common import all_close, ratio_text, ratios
from step_time import resnet

n_rounds = int(sys.argv[1]) if sys.argv[1:] else 7
width = 768

def mlp():
    hidden = [o for _ in range(2) for o in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))

class Case(NamedTuple):
    func:object  # Makes the model
    shape:tuple  # Of a sample
    G:int        # Samples of a step of all ranks
    m:int        # At most in a micro-batch
    n_steps:int  # Of a round
    lr:float
    norm:bool=False # Whether it has BatchNorm: then it matters which samples are in a micro-batch
    def model(self):
        torch.manual_seed(0)
        return self.func()
    def data(self):
        g = torch.Generator().manual_seed(1)
        x = torch.randn(self.G*self.n_steps, *self.shape, generator=g)
        return TensorDataset(x, x.flatten(1)[:,:10].argmax(1))
    def own(self):
        "This rank's samples, as they are dealt over micro-batches"
        V,W = self.G//self.m,group_size()
        parts = [t.view(self.n_steps, self.m, V, *t.shape[1:]).transpose(1, 2) for t in self.data().tensors]
        return TensorDataset(*[t.chunk(W, 1)[group_rank()].flatten(0, 2) for t in parts])

cases = dict(mlp=Case(mlp, (64,), 256, 32, 40, .05), resnet18=Case(resnet, (3,64,64), 32, 4, 12, .001, norm=True))

def by_hand(case):
    "torch's DDP, a loop, and `no_sync` in all micro-batches of a step but the last"
    W,ddp = group_size(),DistributedDataParallel(case.model(), **{sync_buffers: False})
    opt = torch.optim.SGD(ddp.parameters(), case.lr)
    dl,n = DataLoader(case.own(), case.m),case.G//W//case.m
    def fit():
        for i,(xb,yb) in enumerate(dl):
            ddp.require_backward_grad_sync = last = i%n==n-1
            (F.cross_entropy(ddp(xb), yb)/n).backward()
            if not last: continue
            opt.step()
            opt.zero_grad()
    return fit,ddp.module

class Clock(Callback):
    "Seconds of a step on average, but for the first one, in which DDP lays out its buckets again"
    order = -10**8
    def before_train(self): self.n = -1
    def after_step(self):
        if self.n<0: self.begin = process_time()
        self.n += 1
        self.seconds = (process_time()-self.begin)/max(self.n, 1)

def learner(case, bs, hook, *cbs, **ctx):
    dls = DataLoaders(DataLoader(case.data(), bs))
    learn = Learner(dls, case.model(), F.cross_entropy, torch.optim.SGD, lr=case.lr, cbs=[Clock(),*cbs])
    learn.logger = lambda line: None
    return learn,learn.distrib_ctx(seed=0, sync_bn=False, comm_hook=hook, checks=False, **ctx)

def distances(bare, **learners):
    "How far the weights of learners are from those by hand"
    pairs = {k: zip(o.model.parameters(), bare.parameters()) for k,o in learners.items()}
    return {k: max((a-b).abs().max().item() for a,b in o) for k,o in pairs.items()}

def on_rank(case, hook, dtype, n_rounds):
    "Seconds of a step by way, and how far weights are from those by hand after the first round"
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    with process_group():
        fit,bare = by_hand(case)
        one,ctx = learner(case, 64, hook, global_bs=case.G, max_bs=case.m)
        acc,ctx2 = learner(case, case.m, hook, GradientAccumulation(case.G))
        learners = dict(global_bs=one)
        if not case.norm: learners['GradientAccumulation'] = acc
        times = {}
        with ctx, ctx2:
            def epoch(learn):
                learn.fit(1)
                return learn.clock.seconds
            ways = {'by hand': fit}|{k: partial(epoch, o) for k,o in learners.items()}
            for i in range(n_rounds+1):
                for k,f in ways.items():
                    dist.barrier()
                    begin = process_time()
                    own = f() or (process_time()-begin)/case.n_steps
                    if i: times.setdefault(k, []).append(own)
                if not i: far = distances(bare, **learners)
    return times,far

def main():
    for (name,case),hook in product(cases.items(), (None,'allreduce')):
        _,far = run_ranks(on_rank, 2, case, hook, torch.float64, 0)[0]
        all_close('weights', far, 1e-12)
        times,_ = run_ranks(on_rank, 2, case, hook, torch.float32, n_rounds, timeout_s=900)[0]
        for k,q in ratios(times, 'by hand').items():
            same = f"weights in float64 differ by {far[k]:.1e}"
            print(f"{name}, comm_hook={hook}, {k}: {ratio_text(q)} of accumulation by hand; {same}", flush=True)

if __name__=='__main__': main()
