"""What options of `distrib_ctx`, of the optimizer and of the loader bring, each by itself and together: our Learner with it beside our
Learner without, in turns; and what the timer takes

    python benchmarks/options.py
    python benchmarks/options.py --cases small   # one of the models; the figures of the other are kept"""
from contextlib import ExitStack,nullcontext
from functools import partial
from time import perf_counter

import torch
from common import all_close,main,on_ranks,quartiles,ratio_text,ratios,slowest,table,turns,verdict
from learnerdist.all import DataLoaders,Learner,ProgressCallback
from learnerdist.core.compat import sync_buffers
from learnerdist.core.env import process_group
from learnerdist.distributed.profiling import Timer
from step_time import Task,as_way,bare,lr,models,momentum,quick_models
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader,default_collate

def plain(task, stack, opt_func=None, cbs=None, compiled=None, timer=False, layout=None, loader=None, valid=False, **kw):
    "Our Learner with options of `distrib_ctx`; `compiled`: those of `compile`; `layout`: of the weights; `loader`: options of it"
    dl = DataLoader(task.data(), task.bs, **(loader or {}))
    dls = DataLoaders(dl, *[dl]*valid, device=task.device)
    model = task.model() if layout is None else task.model().to(memory_format=layout)
    learn = Learner(dls, model, cross_entropy, opt_func=opt_func or sgd(), lr=lr, cbs=cbs).remove_cb(ProgressCallback)
    if timer: learn.add_cb(Timer)
    if compiled is not None: learn.compile(**compiled)
    learn.one_batch = task.clock.ticking(learn.one_batch)
    stack.enter_context(learn.distrib_ctx(sync_bn=False, seed=0, **kw))
    stack.enter_context(learn.no_logging())
    def train():
        learn.fit(1)
        return learn.loss
    return learn.model,learn.validate if valid else train

def sgd(**kw): return partial(torch.optim.SGD, momentum=momentum, **kw)

class Zeroing(torch.optim.SGD):
    "Keeps the memory of gradients between steps, as torch did by default once"
    def zero_grad(self): super().zero_grad(set_to_none=False)

# --- a step -----------------------------------------------------------------------------------------------------------------

base,adam,adamw = "gloo's all-reduce",torch.optim.Adam,partial(torch.optim.AdamW, weight_decay=.01)
gloo,views,foreach = dict(comm_hook='allreduce'),dict(gradient_as_bucket_view=True),dict(opt_func=sgd(foreach=True))
default = 'shared memory, the default'
ways = {base: gloo, default: {}, 'the default, with the timer': dict(timer=True),
        'gradients are views': {**gloo, **views}, 'shared memory and views': views,
        'static_graph': dict(gloo, static_graph=True), 'bucket_cap_mb=1': dict(gloo, bucket_cap_mb=1),
        'a first bucket as large as the others': dict(gloo, bucket_cap_mb=25), 'bucket_cap_mb=100': dict(gloo, bucket_cap_mb=100),
        'buffers broadcast in each step': {**gloo, sync_buffers: True},
        'gradients set to zero, not to None': dict(gloo, opt_func=partial(Zeroing, momentum=momentum)),
        'channels_last': dict(gloo, layout=torch.channels_last),
        'fused SGD': dict(gloo, opt_func=sgd(fused=True)), 'foreach SGD': {**gloo, **foreach},
        'all that keep the weights, together': dict(views, bucket_cap_mb=100, static_graph=True, **foreach),
        'Adam': dict(gloo, opt_func=adam), 'Adam, fused': dict(gloo, opt_func=partial(adam, fused=True)),
        'Adam, foreach': dict(gloo, opt_func=partial(adam, foreach=True)),
        'AdamW': dict(gloo, opt_func=adamw), 'AdamW, fused': dict(gloo, opt_func=partial(adamw, fused=True)),
        'AdamW, foreach': dict(gloo, opt_func=partial(adamw, foreach=True))}
rounding = {k for k in ways if 'fused' in k or 'Adam' in k or k=='channels_last'} # These round otherwise, and it grows
first = {k: k.partition(',')[0] for k in ways if k.startswith('Adam')} # The way that each of these is compared with, in place of `base`
first['the default, with the timer'] = default

def measure_model(func, shape, bs, n_steps, n_rounds):
    task,losses,params = Task(func, shape, bs, n_steps),{},{}
    with ExitStack() as stack:
        made = {k: plain(task, stack, **kw) for k,kw in ways.items()}
        made['bare DDP'] = bare(task, stack)
        times = turns({k: as_way(task, train, losses, k) for k,(_,train) in made.items()}, n_rounds)
        params = {k: torch.cat([p.detach().flatten() for p in model.parameters()]) for k,(model,_) in made.items()}
    weights = {k: (v-params[first.get(k, base)]).abs().max().item() for k,v in params.items()}
    return dict(times=times, weights=weights, timer=timed(task), **measure_epochs(task, max(2, n_rounds//2)))

# --- the timer --------------------------------------------------------------------------------------------------------------

handlers = 'before_batch','after_batch','before_backward','_begun','_computed','_exchanged'

def timed(task, n_fits=10):
    "Medians of fits: seconds of a step that the handlers of `Timer` take, and of the whole step"
    spent,old = {},{k: vars(Timer)[k] for k in handlers}
    def wrapped(k, f):
        def call(*args):
            begin = perf_counter()
            try: return f(*args)
            finally: spent[k] = spent.get(k, 0)+perf_counter()-begin
        return call
    def fit(train):
        task.clock.start()
        spent.clear()
        train()
        return sum(spent.values())/task.n_steps,task.clock.step
    try:
        for k,f in old.items(): setattr(Timer, k, wrapped(k, f))
        with ExitStack() as stack:
            _,train = plain(task, stack, timer=True)
            return [quartiles(o)[1] for o in zip(*[fit(train) for _ in range(n_fits)])]
    finally:
        for k,f in old.items(): setattr(Timer, k, f)

# --- an epoch ---------------------------------------------------------------------------------------------------------------

def one_by_one(items): return default_collate(items) # any function but torch's own: then rows are not read at once
def into_shared(items): return [o.share_memory_() for o in default_collate(items)]

kept = dict(num_workers=1, persistent_workers=True)
epochs = {'a worker of each rank, new in each epoch': dict(loader=dict(num_workers=1)), 'kept between epochs': dict(loader=kept),
          'no worker, each sample by itself': dict(loader=dict(collate_fn=one_by_one)),
          'batches in shared memory': dict(loader=dict(collate_fn=into_shared)),
          'validation': dict(valid=True), 'in inference_mode': dict(valid=True)}

def measure_epochs(task, n_rounds):
    "Seconds of whole epochs; each second way is compared with the one before it"
    with ExitStack() as stack:
        made = {k: plain(task, stack, **kw)[1] for k,kw in epochs.items()}
        def way(k, run):
            def call():
                task.clock.start()
                with torch.inference_mode() if k=='in inference_mode' else nullcontext(): run()
            return call
        return dict(epochs=turns({k: way(k, run) for k,run in made.items()}, n_rounds))

# --- the measure ------------------------------------------------------------------------------------------------------------

def measure_rank(sizes):
    with process_group(): return {k: measure_model(*v) for k,v in sizes.items()}

def measure(quick, cases=('',)):
    sizes,res = quick_models if quick else {k: (*v[:3],v[3]//2+2,v[4]//3) for k,v in models.items()},{}
    sizes = {k: v for k,v in sizes.items() if k.startswith(tuple(cases))}
    got = on_ranks(measure_rank, 2, sizes)
    for k in sizes:
        diffs = {n: max(o[k]['weights'][n] for o in got) for n in got[0][k]['weights']}
        all_close(k, {n: v for n,v in diffs.items() if n not in rounding}, 1e-4)
        res[k] = dict(weights=diffs, timer=[max(v) for v in zip(*[o[k]['timer'] for o in got])],
                      **{n: slowest([o[k][n] for o in got]) for n in ('times','epochs')})
    return dict(cases=res)

def report(res):
    rows,more,lines = [],[],[]
    for k,o in res['cases'].items():
        for i,(n,v) in enumerate(o['times'].items()):
            alone = first.get(n, base)==n
            ratio = '1' if alone else ratio_text(ratios(o['times'], first.get(n, base))[n])
            rows.append(['' if i else k, n, f'{1000*quartiles(v)[1]:.2f}', ratio, '' if alone else f"{o['weights'][n]:.0e}"])
        names = [*o['epochs']]
        for i,n in enumerate(names):
            ratio = ratio_text(ratios(o['epochs'], names[i-1])[n]) if i%2 else '1'
            more.append(['' if i else k, n, f"{1000*quartiles(o['epochs'][n])[1]:.1f}", ratio])
        own,*_,step = o['timer']
        what = f'{k}: what the timer takes of a step, in % ({1e6*own:.0f} µs of {1000*step:.2f} ms)'
        lines.append(verdict(what, 100*own/step, 1, '{:.2f}'))
    head = ['model, 2 ranks', 'option', 'ms a step', 'ratio: median of rounds (quartiles)', 'weights differ by']
    epoch = [head[0], 'an epoch', 'ms', 'ratio to the line above: median of rounds (quartiles)']
    return '\n\n'.join([table(head, rows), table(epoch, more), '\n'.join(lines)])

if __name__=='__main__': main('options', measure, report, lambda res, path: None)
