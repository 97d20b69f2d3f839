"""What a step under fastai's Learner takes beside plain fastai: with `learnerdist.fastai` imported and no context, in a context of one
process, and on 2 ranks.
Alone the processor's seconds count, so that other processes on the machine do not. Nothing is kept.

    python benchmarks/fastai_step.py
"""
import subprocess,sys
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter,process_time

n_batches,n_rounds = 200,int(sys.argv[1]) if sys.argv[1:] else 7

def learner():
    "A small model, so that what Python does in a step shows"
    import torch
    from fastai.basics import DataLoaders,Learner,SGD,TfmdDL
    from fastai.callback.progress import ProgressCallback
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(n_batches*8, 16)
    dl = TfmdDL(list(zip(x, x[:,:4].argmax(1))), bs=8, num_workers=0, device='cpu')
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    return Learner(DataLoaders(dl, TfmdDL([], bs=8)), model, torch.nn.CrossEntropyLoss(), opt_func=SGD, lr=.01).remove_cb(ProgressCallback)

def step_s(ctx=False, n=n_batches, rounds=1, clock=process_time):
    "The seconds of a step in each of so many fits"
    learn,res = learner(),[]
    with learn.no_logging(), learn.distrib_ctx(seed=0) if ctx else nullcontext():
        for i in range(rounds+1):
            begin = clock()
            learn.fit(1)
            if i: res.append((clock()-begin)/n)
    return res

def on_rank():
    import learnerdist.fastai # noqa: F401
    return step_s(True, n_batches//2, n_rounds, perf_counter)

def once(way):
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import fastai_step as o\n"
    if way!='plain': code += 'import learnerdist.fastai\n'
    code += f"print(*o.step_s({way=='context'}))"
    p = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, check=True)
    return float(p.stdout.split()[-1])

def main():
    ways = 'plain','imported','context'
    times = {k: [] for k in ways}
    for _ in range(n_rounds):
        for k in ways: times[k].append(once(k)) # in turns, each in a process of its own
    from learnerdist.testing import run_ranks
    for k in ways:
        ratio = median(a/b for a,b in zip(times[k], times['plain']))
        print(f"{k:10} {1e3*median(times[k]):.3f} ms a step, {ratio:.3f} of plain fastai's")
    two = max(median(o) for o in run_ranks(on_rank, 2))
    print(f"2 ranks    {1e3*two:.3f} ms a step, {two/median(times['plain']):.2f} of plain fastai's on one process, by the clock")

if __name__=='__main__': main()
