"""Seconds that training stands still while a checkpoint is saved: plain, in the background, in memory:

    python -m learnerdist.launch --nproc 1 benchmarks/checkpoint.py
    python -m learnerdist.launch --nproc 2 benchmarks/checkpoint.py

The model has 8.4 million weights (34 MB); with Adam's two moments a checkpoint is 101 MB. A step's time is taken between the ends of
two batches, so that it includes whatever happens at a save; printed is how much longer the steps with a save take than the others."""
import argparse,tempfile,time
from statistics import mean,median

import torch
from torch import nn
from torch.utils.data import TensorDataset
from learnerdist.all import Callback,Checkpoint,DataLoaders,Learner,broadcast_object,rank_distrib

class Times(Callback):
    "When each batch began: after all that happens between two batches"
    order,run_valid = 1002,False
    def before_fit(self): self.t = []
    def before_batch(self): self.t.append(time.perf_counter())
    def steps(self): return [b-a for a,b in zip(self.t, self.t[1:])]

def measure(every, n_steps, **kw):
    "Seconds of each step with a save, and the median of the others"
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8*n_steps, 1024), torch.randint(10, (8*n_steps,)))
    model = nn.Sequential(*[o for _ in range(8) for o in (nn.Linear(1024, 1024), nn.ReLU())], nn.Linear(1024, 10))
    times = Times()
    learn = Learner(DataLoaders.from_dsets(data, bs=8), model, nn.CrossEntropyLoss(), opt_func=torch.optim.Adam)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(split_batches=True), tempfile.TemporaryDirectory() as d:
        learn.fit(1, cbs=[Checkpoint(broadcast_object(d), every, **kw), times])
    steps = times.steps()
    saves = set(range(every-1, len(steps), every))
    return [steps[i] for i in saves],median(o for i,o in enumerate(steps) if i not in saves)

def main():
    p = argparse.ArgumentParser()
    p.add_argument('--steps', type=int, default=120)
    args = p.parse_args()
    for name,kw in dict(plain={}, background=dict(background=True), memory=dict(in_memory=True)).items():
        saves,step = measure(20, args.steps, **kw)
        extra = [o-step for o in saves]
        said = f'{name:<11} {mean(extra):.4f} s a save (from {min(extra):.4f} to {max(extra):.4f}); a step {step:.3f} s'
        if rank_distrib()==0: print(said)

if __name__=='__main__': main()
