"""What options of `distrib_ctx` and of the optimizer bring, each by itself: our Learner with it beside our Learner without, in turns

    python benchmarks/options.py"""
from contextlib import ExitStack
from functools import partial

import torch
from common import all_close,main,on_ranks,quartiles,ratio_text,ratios,slowest,table,turns
from learnerdist.all import DataLoaders,Learner,ProgressCallback
from learnerdist.core.env import process_group
from learnerdist.distributed.timer import Timer
from step_time import Task,as_way,bare,lr,models,momentum,quick_models
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

def plain(task, stack, opt_func=None, cbs=None, compiled=None, timer=True, **kw):
    "Our Learner with options of `distrib_ctx`; `compiled`: those of `compile`"
    dls = DataLoaders(DataLoader(task.data(), task.bs), device=task.device)
    learn = Learner(dls, task.model(), cross_entropy, opt_func=opt_func or sgd(), lr=lr, cbs=cbs).remove_cb(ProgressCallback)
    if compiled is not None: learn.compile(**compiled)
    if not timer: learn.remove_cb(Timer)
    learn.one_batch = task.clock.ticking(learn.one_batch)
    stack.enter_context(learn.distrib_ctx(sync_bn=False, seed=0, **kw))
    stack.enter_context(learn.no_logging())
    def train():
        learn.fit(1)
        return learn.loss
    return learn.model,train

def sgd(**kw): return partial(torch.optim.SGD, momentum=momentum, **kw)

base,adamw = "gloo's all-reduce",partial(torch.optim.AdamW, weight_decay=.01)
gloo,views = dict(comm_hook='allreduce'),dict(gradient_as_bucket_view=True)
default = 'shared memory, the default'
ways = {base: gloo, default: {}, 'the default, without the timer': dict(timer=False),
        'gradients are views': {**gloo, **views}, 'shared memory and views': views,
        'static_graph': dict(gloo, static_graph=True), 'bucket_cap_mb=1': dict(gloo, bucket_cap_mb=1),
        'bucket_cap_mb=100': dict(gloo, bucket_cap_mb=100),
        'fused SGD': dict(gloo, opt_func=sgd(fused=True)), 'foreach SGD': dict(gloo, opt_func=sgd(foreach=True)),
        'AdamW': dict(gloo, opt_func=adamw),
        'AdamW, fused': dict(gloo, opt_func=partial(adamw, fused=True)),
        'AdamW, foreach': dict(gloo, opt_func=partial(adamw, foreach=True))}
optimizers = [k for k in ways if 'AdamW' in k or 'SGD' in k]
other = {k: 'AdamW' for k in ways if k.startswith('AdamW, ')} # The way that each of these is compared with, in place of `base`
other['the default, without the timer'] = default

def measure_model(func, shape, bs, n_steps, n_rounds):
    task,losses,params = Task(func, shape, bs, n_steps),{},{}
    with ExitStack() as stack:
        made = {k: plain(task, stack, **kw) for k,kw in ways.items()}
        made['bare DDP'] = bare(task, stack)
        times = turns({k: as_way(task, train, losses, k) for k,(_,train) in made.items()}, n_rounds)
        params = {k: torch.cat([p.detach().flatten() for p in model.parameters()]) for k,(model,_) in made.items()}
    return dict(times=times, weights={k: (v-params[other.get(k, base)]).abs().max().item() for k,v in params.items() if k!='AdamW'})

def measure_rank(sizes):
    with process_group(): return {k: measure_model(*v) for k,v in sizes.items()}

def measure(quick):
    sizes,res = quick_models if quick else {k: (*v[:3],v[3]//2+2,v[4]//3) for k,v in models.items()},{}
    got = on_ranks(measure_rank, 2, sizes)
    for k in sizes:
        diffs = {n: max(o[k]['weights'][n] for o in got) for n in got[0][k]['weights']}
        all_close(k, {n: v for n,v in diffs.items() if n not in optimizers}, 1e-4) # these round otherwise, and it grows
        res[k] = dict(times=slowest([o[k]['times'] for o in got]), weights=diffs)
    return dict(cases=res)

def report(res):
    rows = []
    for k,o in res['cases'].items():
        for i,(n,v) in enumerate(o['times'].items()):
            first = n in (base,'AdamW')
            ratio = '1' if first else ratio_text(ratios(o['times'], other.get(n, base))[n])
            rows.append(['' if i else k, n, f'{1000*quartiles(v)[1]:.2f}', ratio, '' if first else f"{o['weights'][n]:.0e}"])
    return table(['model, 2 ranks', 'option', 'ms a step', 'ratio: median of rounds (quartiles)', 'weights differ by'], rows)

if __name__=='__main__': main('options', measure, report, lambda res, path: None)
