"""Validation of a classifier, three ways in turns: this package's, exact; fastai's, which gathers every batch; a loop over a bare module

    python benchmarks/evaluation.py --ranks 2"""
import argparse,os,platform,statistics,time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from learnerdist.all import (DataLoaders,Learner,ProgressCallback,accuracy,all_sum,current_group,default_device,distrib_barrier,
                             gather_objects,group_size,process_group,to_device)
from learnerdist.launch import run
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader,TensorDataset

def mlp(n_out): return nn.Sequential(nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, n_out))

models = dict(few=partial(mlp, 10), many=partial(mlp, 1000)) # classes

def get_data(n):
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 1, 16, 16, generator=g), torch.randint(10, (n,), generator=g))

def gathered(t):
    "The rows of all ranks, for batches that are equally long on all"
    parts = [torch.empty_like(t) for _ in range(group_size())]
    dist.all_gather(parts, t.contiguous(), group=current_group())
    return torch.cat(parts)

def eval_loop(model, dl, gather=False):
    "Sums of loss and right answers, and the samples: of this rank, or of all ranks where `gather` brings every batch to each"
    model.eval()
    loss,right,n = 0.,0.,0
    with torch.no_grad():
        for b in dl:
            x,y = to_device(b, default_device())
            pred = model(x)
            if gather: pred,y = gathered(pred),gathered(y)
            loss += cross_entropy(pred, y, reduction='sum').double()
            right += (pred.argmax(-1)==y).sum()
            n += len(y)
    return torch.stack([loss, right.double(), loss.new_tensor(n)])

def means(sums): return (sums[:2]/sums[2]).tolist()

def _timed(func):
    distrib_barrier()
    if torch.cuda.is_available(): torch.cuda.synchronize()
    start = time.perf_counter()
    res = func()
    if torch.cuda.is_available(): torch.cuda.synchronize()
    return time.perf_counter()-start,res

def measure(name, bs, n_batches, n_rounds):
    "Seconds of each pass, by way and rank, and the loss and accuracy by each way"
    torch.manual_seed(0)
    data = get_data(bs*n_batches*group_size())
    learn = Learner(DataLoaders(DataLoader(data, bs), DataLoader(data, bs)), models[name](), cross_entropy, metrics=accuracy)
    learn.remove_cb(ProgressCallback)
    with learn.distrib_ctx():
        dl = learn.dls.valid
        ways = dict(exact=learn.validate, gather=lambda: eval_loop(learn.model, dl, gather=True), bare=lambda: eval_loop(learn.model, dl))
        rounds = [{k: _timed(f) for k,f in ways.items()} for _ in range(n_rounds+1)][1:] # the first one warms up
        last = {k: res for k,(_,res) in rounds[-1].items()}
        numbers = dict(exact=last['exact'], gather=means(last['gather']), bare=means(all_sum(last['bare'])))
    return dict(numbers=numbers, times=gather_objects({k: [o[k][0] for o in rounds] for k in ways}))

def measure_all(names, *args):
    with process_group(): return {o: measure(o, *args) for o in names}

def report(name, n_batches, res):
    "Print the median pass of each way, by the slowest rank, and the ratios of passes of the same round"
    slowest = {k: [max(o) for o in zip(*[t[k] for t in res['times']])] for k in res['numbers']}
    print(f'{name}, ms a batch: '+', '.join(f'{k} {1000*statistics.median(v)/n_batches:.3f}' for k,v in slowest.items()))
    for other in ('gather','bare'):
        low,mid,high = statistics.quantiles([a/b for a,b in zip(slowest['exact'], slowest[other])], n=4)
        print(f'  exact / {other}: median {mid:.3f}, half of the rounds from {low:.3f} to {high:.3f}')
    diff = max(abs(a-b) for other in ('gather','bare') for a,b in zip(res['numbers']['exact'], res['numbers'][other]))
    print(f'  loss {res["numbers"]["exact"][0]:.6f}, accuracy {res["numbers"]["exact"][1]:.6f}; largest difference between ways {diff:.1e}')
    if not diff<1e-6: raise SystemExit(f'{name}: the ways do not agree: {res["numbers"]}')

def processor():
    "What the machine computes on"
    if torch.cuda.is_available(): return torch.cuda.get_device_name()
    info = Path('/proc/cpuinfo')
    names = [o.partition(':')[2].strip() for o in info.read_text().splitlines() if o.startswith('model name')] if info.exists() else []
    return f'{os.cpu_count()} cores of {names[0] if names else platform.machine()}'

def main():
    p = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    p.add_argument('--ranks', type=int, default=2)
    p.add_argument('--batches', type=int, default=500, help='of each rank')
    p.add_argument('--bs', type=int, default=64)
    p.add_argument('--rounds', type=int, default=10, help='passes of each way; one more before them is not counted')
    p.add_argument('--models', nargs='+', choices=[*models], default=[*models])
    args = p.parse_args()
    print(f'{processor()}; {args.ranks} ranks, {args.batches} batches of {args.bs} each; Python {platform.python_version()}, '
          f'torch {torch.__version__}', flush=True)
    res = run(partial(measure_all, args.models, args.bs, args.batches, args.rounds), nproc=args.ranks)
    for name in args.models: report(name, args.batches, res[name])

if __name__=='__main__': main()
