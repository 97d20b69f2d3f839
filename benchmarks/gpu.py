"""On a GPU: a training step under nccl, one rank, ours beside bare DDP, and how often either waits for the GPU

    python benchmarks/gpu.py"""
import re,sys,warnings
from contextlib import ExitStack

import torch
from common import all_close,bars,main,on_ranks,processor,quartiles,ratio_text,ratios,table,turns,verdict
from learnerdist.core.env import setup_distrib,teardown_distrib
from step_time import Task,as_way,bare,mlp,ours,resnet

# Name: model, shape of a sample, samples a step, steps of a round, rounds
models = dict(small=(mlp, (1,28,28), 64, 30, 30), large=(resnet, (3,64,64), 256, 12, 20))
ways = {'bare DDP': bare, 'learnerdist': ours}

def waits(way, task):
    "Calls that make the host wait for the GPU, in a round: torch warns of each"
    with ExitStack() as stack, warnings.catch_warnings(record=True) as found:
        _,train = way(task, stack)
        task.clock.start()
        warnings.simplefilter('always')
        torch.cuda.set_sync_debug_mode('warn')
        try: train()
        finally: torch.cuda.set_sync_debug_mode('default')
    return sum('synchroniz' in str(o.message) for o in found)

def measure_model(func, shape, bs, n_steps, n_rounds):
    task,more,losses = Task(func, shape, bs, n_steps),Task(func, shape, bs, 2*n_steps),{}
    with ExitStack() as stack:
        made = {k: f(task, stack) for k,f in ways.items()}
        times = turns({k: as_way(task, train, losses, k) for k,(_,train) in made.items()}, n_rounds)
        base = [*made['bare DDP'][0].parameters()]
        diffs = {k: max((a-b).abs().max().item() for a,b in zip(m.parameters(), base)) for k,(m,_) in made.items()}
    counts = {k: (waits(f, more)-waits(f, task))/n_steps for k,f in ways.items()} # what is once a fit drops out
    all_close('weights', diffs, 1e-3)
    return dict(times=times, waits=counts, weights=diffs)

def measure_rank(sizes):
    setup_distrib() # a group of one: DDP and nccl take part
    try: return {k: measure_model(*v) for k,v in sizes.items()}
    finally: teardown_distrib()

def measure(quick):
    got, = on_ranks(measure_rank, 1, {k: (*v[:-1], 2 if quick else v[-1]) for k,v in models.items()}, launched=True)
    return dict(cases=got)

def report(res):
    rows = [[case if not i else '', k, f'{1000*quartiles(v)[1]:.2f}', ratio_text(rs[k]) if k in rs else '1', f"{o['waits'][k]:g}"]
            for case,o in res['cases'].items() for rs in [ratios(o['times'], 'bare DDP')] for i,(k,v) in enumerate(o['times'].items())]
    text = table(['model','way','ms a step','ratio to bare DDP: median of rounds (quartiles)','waits for the GPU in a step'], rows)
    large = ratios(res['cases']['large']['times'], 'bare DDP')['learnerdist'][1]
    more = {k: o['waits']['learnerdist']-o['waits']['bare DDP'] for k,o in res['cases'].items()}
    lines = [verdict('large, learnerdist over bare DDP, nccl, 1 rank', large, 1.02),
             *(verdict(f"{k}, waits for the GPU in a step of ours beyond the bare loop's", v, 0, '{:g}') for k,v in more.items())]
    return text+'\n\n'+'\n'.join(lines)

def plot(res, path):
    groups = {k: ratios(o['times'], 'bare DDP') for k,o in res['cases'].items()}
    bars(path, groups, 'time over bare DDP', 'A training step under nccl', line=1)

if __name__=='__main__':
    if not torch.cuda.is_available(): sys.exit(print('gpu: no GPU here, nothing measured'))
    main('gpu', measure, report, plot, kept_as='gpu-'+re.sub(r'\W+', '-', processor()).lower())
