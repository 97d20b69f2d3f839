"""A step of 256 samples in micro-batches of 32, on 2 ranks: `distrib_ctx(global_bs=256, max_bs=32)` beside accumulation by hand with DDP,
and beside `GradientAccumulation`. The processor's seconds of a rank, paired by rounds. Nothing is kept.

    python benchmarks/micro_batches.py [rounds]
"""
import sys
from time import process_time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from learnerdist.all import Callback, DataLoaders, GradientAccumulation, Learner, group_rank, group_size, process_group
from learnerdist.testing import run_ranks
from common import all_close, ratio_text, ratios

n_rounds = int(sys.argv[1]) if sys.argv[1:] else 7
G,m,n_steps,width = 256,32,40,768

def model():
    torch.manual_seed(0)
    hidden = [o for _ in range(2) for o in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))

def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(G*n_steps, 64, generator=g)
    return TensorDataset(x, x[:,:10].argmax(1))

def by_hand():
    "torch's DDP, a loop, and `no_sync` in all micro-batches of a step but the last"
    W,ddp = group_size(),DistributedDataParallel(model())
    opt,x,y = torch.optim.SGD(ddp.parameters(), .05),*[t[group_rank()::W] for t in data().tensors]
    dl,n = DataLoader(TensorDataset(x, y), m),G//W//m
    def fit():
        for i,(xb,yb) in enumerate(dl):
            ddp.require_backward_grad_sync = last = i%n==n-1
            (F.cross_entropy(ddp(xb), yb)/n).backward()
            if not last: continue
            opt.step()
            opt.zero_grad()
    return fit,ddp.module

class Clock(Callback):
    "Seconds of the training loop, without the start of a fit"
    order = -10**8
    def before_train(self): self.begin = process_time()
    def after_train(self): self.seconds = process_time()-self.begin

def learner(bs, *cbs, **ctx):
    learn = Learner(DataLoaders(DataLoader(data(), bs)), model(), F.cross_entropy, torch.optim.SGD, lr=.05, cbs=[Clock(),*cbs])
    learn.logger = lambda line: None
    return learn,learn.distrib_ctx(seed=0, comm_hook='allreduce', checks=False, **ctx)

def distances(bare, **learners):
    "How far the weights of learners are from those by hand"
    pairs = {k: zip(o.model.parameters(), bare.parameters()) for k,o in learners.items()}
    return {k: max((a-b).abs().max().item() for a,b in o) for k,o in pairs.items()}

def on_rank():
    "Seconds by way, and how far weights are from those by hand"
    torch.set_num_threads(1)
    with process_group():
        fit,bare = by_hand()
        one,ctx = learner(64, global_bs=G, max_bs=m)
        acc,ctx2 = learner(m, GradientAccumulation(G))
        times = {}
        with ctx, ctx2:
            def epoch(learn):
                learn.fit(1)
                return learn.clock.seconds
            ways = {'by hand': fit, 'global_bs': lambda: epoch(one), 'GradientAccumulation': lambda: epoch(acc)}
            for i in range(n_rounds+1):
                if i==1: far = distances(bare, global_bs=one, GradientAccumulation=acc) # rounding adds up in later rounds
                for k,f in ways.items():
                    dist.barrier()
                    begin = process_time()
                    own = f() or process_time()-begin
                    if i: times.setdefault(k, []).append(own)
    return times,far

def main():
    times,far = run_ranks(on_rank, 2, timeout_s=900)[0]
    all_close('weights', far, 1e-5)
    for k,q in ratios(times, 'by hand').items(): print(f'{k}: {ratio_text(q)} of accumulation by hand; weights differ by {far[k]:.1e}')

if __name__=='__main__': main()
