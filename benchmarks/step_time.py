"""A training step of this package against a bare DDP loop: the same model, data, ranks and processes, in turns

    python benchmarks/step_time.py --ranks 2"""
import argparse,os,platform,statistics,time
from functools import partial
from pathlib import Path

import learnerdist.memory,learnerdist.times # noqa: F401 - their callbacks are on every learner
import torch
from learnerdist.data import DataLoaders,to_device
from learnerdist.distributed import DistributedDL
from learnerdist.env import default_device,group_rank,group_size,in_group,process_group
from learnerdist.launch import run
from learnerdist.learner import Learner
from learnerdist.progress import ProgressCallback
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader,TensorDataset

def mlp(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

def resnet():
    from torchvision.models import resnet18
    return resnet18(num_classes=10)

# Name: model, shape of a sample, samples a step on each rank, how many times the rounds of --rounds
models = dict(small=(mlp, (1,28,28), 64, 5), large=(resnet, (3,64,64), 16, 1))

class TurnsDL(DataLoader):
    "A loader that lets another loop do `n_steps` before each `n_steps` of its own, and notes the seconds of every step of both"
    def take_turns(self, other, n_steps):
        self.other,self.n_steps,self.ours,self.theirs = other,n_steps,[],[]

    def __iter__(self):
        it = super().__iter__()
        for _ in range(len(self)//self.n_steps):
            for _ in range(self.n_steps): self._timed(self.theirs, lambda: next(self.other))
            for _ in range(self.n_steps):
                start = _now()
                yield next(it) # comes back after the step, for the next batch
                self.ours.append(_now()-start)

    def _timed(self, times, func):
        start = _now()
        func()
        times.append(_now()-start)

def _now():
    if torch.cuda.is_available(): torch.cuda.synchronize()
    return time.perf_counter()

def sgd(params, lr): return torch.optim.SGD(params, lr=lr, momentum=.9)

def bare_steps(model, opt, dl, losses):
    "The loop as one writes it by hand; a generator that rests after each step"
    device = default_device()
    ids = [device.index] if device.type=='cuda' else None
    ddp = DistributedDataParallel(model, device_ids=ids, forward_sync_buffers=False) if in_group() else model
    ddp.train()
    for b in dl:
        x,y = to_device(b, device)
        loss = cross_entropy(ddp(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
        yield

def get_data(shape, n):
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, *shape, generator=g), torch.randint(10, (n,), generator=g))

def new_model(func):
    torch.manual_seed(0)
    return func().to(default_device())

def measure(name, n_steps, n_rounds):
    "What this rank measured: seconds of each step of both loops, and how far apart the two results are"
    func,shape,bs,factor = models[name]
    data = get_data(shape, bs*group_size()*n_steps*n_rounds*factor)
    ours,bare,bare_losses = new_model(func),new_model(func),[]
    bare_dl = DistributedDL.from_dl(DataLoader(data, bs), group_rank(), group_size())
    dl = TurnsDL(data, bs)
    dl.take_turns(bare_steps(bare, sgd(bare.parameters(), .01), bare_dl, bare_losses), n_steps)
    learn = Learner(DataLoaders(dl), ours, cross_entropy, opt_func=sgd, lr=.01).remove_cb(ProgressCallback)
    times = dl.ours,dl.theirs # its share for the rank, which notes the times, is a shallow copy
    with learn.distrib_ctx(sync_bn=False, seed=0), learn.no_logging(): learn.fit(1)
    weight_diff = max((a-b).abs().max().item() for a,b in zip(ours.parameters(), bare.parameters()))
    return dict(times=times, loss_diff=abs(learn.loss-bare_losses[-1]).item(), weight_diff=weight_diff)

def measure_all(names, n_steps, n_rounds):
    with process_group(): return {o: measure(o, n_steps, n_rounds) for o in names}

def report(name, n_steps, res):
    "Print the medians over all steps but those of the first round, in ms, their ratio, and how the rounds scatter"
    ours,bare = times = [o[n_steps:] for o in res['times']]
    a,b = (1000*statistics.median(o) for o in times)
    rounds = [sum(ours[i:i+n_steps])/sum(bare[i:i+n_steps]) for i in range(0, len(ours), n_steps)]
    low,mid,high = statistics.quantiles(rounds, n=4)
    print(f'{name}: learnerdist {a:.2f} ms, bare DDP {b:.2f} ms, ratio {a/b:.3f} (of {len(rounds)} rounds: median {mid:.3f}, '
          f'half of them from {low:.3f} to {high:.3f}); differences: last loss {res["loss_diff"]:.1e}, weights {res["weight_diff"]:.1e}')
    if not max(res['loss_diff'], res['weight_diff'])<1e-4: raise SystemExit(f'{name}: the two loops did not train the same model')

def processor():
    "What the machine computes on"
    if torch.cuda.is_available(): return torch.cuda.get_device_name()
    info = Path('/proc/cpuinfo')
    names = [o.partition(':')[2].strip() for o in info.read_text().splitlines() if o.startswith('model name')] if info.exists() else []
    return f'{os.cpu_count()} cores of {names[0] if names else platform.machine()}'

def main():
    p = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    p.add_argument('--ranks', type=int, default=2)
    p.add_argument('--steps', type=int, default=5, help='steps of a round')
    p.add_argument('--rounds', type=int, default=20, help=f'turns of each loop with the large model; {models["small"][-1]} times as many '
                   'with the small one; the first is not counted')
    p.add_argument('--models', nargs='+', choices=[*models], default=[*models])
    args = p.parse_args()
    print(f'{processor()}; {args.ranks} ranks; Python {platform.python_version()}, torch {torch.__version__}', flush=True)
    res = run(partial(measure_all, args.models, args.steps, args.rounds), nproc=args.ranks)
    for name in args.models: report(name, args.steps, res[name])

if __name__=='__main__': main()
