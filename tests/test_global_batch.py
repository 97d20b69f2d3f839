"`distrib_ctx(global_bs=…, max_bs=…)`: the same steps at any number of ranks, in parts of any size"
from functools import partial
from itertools import count
import pytest, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from learnerdist.all import *
from learnerdist.core.compat import fsdp_on_cpu
from learnerdist.distributed import profiling
from learnerdist.data.dealing import count_parts
from learnerdist.testing import run_ranks
from test_scenes import same
from harness import all_warnings, asking, close, error_of, on_2_and_3
from helpers import Of
from scenes import OnOneRank, adversarial, contrast, losses, make, net, normed, rank_runs, recorded, run, scene, scenes

# --- the same run -----------------------------------------------------------------------------------------------------

# What a part cannot have: rows of its own, a loss or statistics of the whole batch; or what a callback does in it once
by_nature = ('static','weighed twice','unfreeze in after_pred','freeze in after_backward','another model in an epoch','InstanceNorm',
             'a loss of nodes','own backward pass',*adversarial)
def can_be_cut(k, c):
    if k.startswith('all cancel') and k not in recorded: return False
    if k in by_nature or 'float32' in k or {'split_batches','global_bs'} & {*c['ctx']} or c['accumulate'] is not None: return False
    return c['alone'] and c['parts']==1 and c['loss'] is not contrast and fits(c)
def fits(c):
    has_bn = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in c['model']().modules())
    return not has_bn and c['loader'].__name__ in ('TfmdDL','DataLoader','by_sampler') and c['wrap'] is DataLoaders

names = [k for k,c in scenes.items() if can_be_cut(k, c)]
# By number of ranks: samples in a step, at most in a micro-batch
dials = {1: (12, 5), 2: (12, 2), 3: (10, 2), 4: (12, 1)}

def dialled(k):
    G,m = dials[group_size()]
    if k=='sparse gradients': m = 1 # on 2 ranks there are partial sums then
    return dict(scenes[k], bs=G, ctx=dict(scenes[k]['ctx'], global_bs=G, max_bs=m))

# A fourth of them on 1 or 2 ranks; before a release each on 2, and some on 3 and 4. That what is dealt is the same, test_dealing.py shows
dealt = [(1, names[3::12]), (2, [*dict.fromkeys([*names[::6],*recorded,'sparse gradients'])])]
dealt += [pytest.param(W, ks, marks=pytest.mark.long)
          for W,ks in ((1, names[9::12]), (2, [k for i,k in enumerate(names) if i%6]), (3, names[1::4]), (4, names[::6]))]

@pytest.mark.parametrize('W,ks', dealt, ids=lambda o: o if isinstance(o, int) else o[0])
def test_scenes(W, ks):
    assert len(names)>80 and {*losses}-{'contrastive'}<={*names}
    ks = [k for k in ks if W!=3 or 'loader' not in k] # their callbacks have batches of 12
    ranks = run_ranks(rank_runs, W, ks, dialled, timeout_s=300) if W>1 else [rank_runs(ks, dialled)]
    for k in ks: same(ranks, run(dict(scenes[k], bs=dials[W][0])), k, scenes[k]['tol'])

groups = dict(accumulate=20, whole=False) # two batches of 12, or one at the end: more samples than are asked for, or fewer
def grouped(k): return dict(dialled(k), **groups)

@pytest.mark.parametrize('W,every', [(2, 12), pytest.param(1, 3, marks=pytest.mark.long), pytest.param(2, 3, marks=pytest.mark.long)])
def test_batches_of_parts_that_are_accumulated(W, every):
    "Gradients of the group's earlier batches get the scale of all its items, too"
    found = [k for k in names if 'late penalty' not in k] # in one process GradientAccumulation has weighed before it
    ks = [*dict.fromkeys([*found[::every],'mse','tokens','labels changed after the loss','sampler without a length'])]
    ranks = run_ranks(rank_runs, W, ks, grouped, timeout_s=300)
    for k in ks: same(ranks, run(dict(scenes[k], bs=12, **groups)), k, scenes[k]['tol'])

# --- one reduction a step, memory. That a fit goes on, test_bits.py shows ------------------------------------------------

class Limited(nn.Module):
    "Runs out of memory in training with more than `most` samples, in the forward or in the backward pass"
    def __init__(self, most, where, real=False):
        super().__init__()
        self.most,self.where,self.real,self.sizes,self.lin = most,where,real,[],nn.Linear(4, 2)
    def _fail(self):
        if self.real: torch.empty(2**60, dtype=torch.uint8) # the allocator's own error. 2**46 some machines promise
        raise torch.OutOfMemoryError('out of memory')
    def forward(self, x):
        self.sizes.append(len(x))
        fails,y = self.training and len(x)>self.most,self.lin(x)
        if fails and self.where=='forward': self._fail()
        if fails: y.register_hook(lambda g: self._fail())
        return y

def of(model=None, n=61, **kw): return scene(model=model or partial(Limited, 99, ''), n=n, n_valid=n, bs=24, val_bs=24, **kw)
def weights(learn): return [p.detach().clone() for p in learn.model.parameters()]

def fitted(learn, cbs=(), **ctx):
    with learn.no_logging(), learn.distrib_ctx(seed=1, **{'global_bs': 24, **ctx}): learn.fit(2, cbs=[*cbs])
    return learn

def fit(model=None, cbs=(), n=61, **ctx):
    "Weights, and losses of steps"
    learn = fitted(make(of(model, n)), cbs, **ctx)
    return weights(learn),learn.recorder.losses

def fastais(most=99, **ctx):
    "The same with fastai's Learner"
    from test_fastai_scenes import fastais as make
    learn = make(of(partial(Limited, most, 'forward')), 1, 0)
    fitted(learn, **ctx)
    return weights(learn),[*map(float, learn.recorder.losses)]

def reductions():
    "How often gradients travel in a fit of two epochs of 2 steps: DDP's buckets"
    n = 0
    def hook(group, bucket):
        nonlocal n
        n += 1
        t = bucket.buffer().div_(group_size())
        dist.all_reduce(t, group=group)
        fut = torch.futures.Future()
        fut.set_result(t)
        return fut
    return fit(n=48, max_bs=5, comm_hook=hook),n

class Steps(Callback):
    run_valid = False
    def __init__(self): self.n = self.passes = 0
    def after_pred(self): self.passes += 1
    def after_step(self): self.n += 1

def gathering(): return Of(lambda m, x: m.net(x-gather_with_grad(x).mean(0)), net=net())

def bad_contexts():
    "What an option or a script that cannot be says"
    def ctx(model=net, loss=nn.MSELoss, **kw):
        learn = make(of(model, loss=loss))
        with learn.no_logging(), learn.distrib_ctx(**kw): learn.fit(1)
    res = dict(few=error_of(ctx, global_bs=1), text=error_of(ctx, global_bs='256'), zero=error_of(ctx, max_bs=0),
               both=error_of(ctx, global_bs=8, split_batches=True), static=error_of(ctx, max_bs=4, static_graph=True),
               whole=error_of(ctx, loss=contrast, max_bs=2), gathers=error_of(ctx, gathering, max_bs=2),
               ctx=error_of(ctx, max_bs='most'))
    with all_warnings() as messages:
        ctx(model=normed, max_bs=4)
    return dict(res, messages=' '.join(str(o.message) for o in messages))

class Without(Callback):
    "Alone: the second step has no samples of one of V parts"
    def __init__(self, v, V): self.v,self.V = v,V
    def before_batch(self):
        if not self.training or (self.epoch,self.iter)!=(0,1): return
        own = torch.arange(len(self.xb[0]))%self.V!=self.v
        self.learn.xb,self.learn.yb = (self.xb[0][own],),(self.yb[0][own],)
class Leaves(Callback):
    "Ends the fit after the second step"
    def after_batch(self):
        if self.training and self.iter==1: raise CancelFitException

def first_of_last(W):
    "The first part of the last rank, among all of a step"
    V = count_parts(24, 5, W)
    return V-V//W

def answers(W, rank, path):
    most = [99,3,2][-1-group_rank()] # of 3 ranks, and of 2
    res = dict(cut=fit(max_bs=5), real=fit(partial(Limited, most, 'forward', True), max_bs='auto'), fastai=fastais(max_bs=5),
               fastai_auto=fastais(most, max_bs='auto'), ddp=reductions(), bad=bad_contexts(),
               sharded=fit(n=48, max_bs=5, shard=fsdp_on_cpu))
    res |= {f'auto {o}': fit(partial(Limited, most, o), max_bs='auto') for o in ('forward','backward')}
    cancelled = {'first batch': (CancelBatchException, 0), 'second batch': (CancelBatchException, 1),
                 'second fit': (CancelFitException, 1)}
    first = first_of_last(group_size())
    res |= {k: fit(cbs=[OnOneRank('after_pred', exc, 1, first+i)], max_bs=5) for k,(exc,i) in cancelled.items()}
    return res

found = asking(answers)

@on_2_and_3
def test_learners_memory_and_reductions(found, W):
    whole,shorter = fit(),fit(n=48)
    for r in found(answers, W):
        for k in ('cut','auto forward','auto backward','real'): close(r[k], whole)
        for k in ('fastai','fastai_auto'): close(r[k], fastais(), 1e-6)
        losses,n = r['ddp']
        close(losses, shorter)
        close(r['sharded'], shorter)
        assert n==4 # steps

@on_2_and_3
def test_a_part_that_is_cancelled_does_not_count(found, W):
    "The step is that of the samples of the other parts; all leave after it"
    first,V = first_of_last(W),count_parts(24, 5, W)
    for r in found(answers, W):
        close(r['first batch'], fit(cbs=[Without(first, V)]))
        close(r['second batch'], fit(cbs=[Without(first+1, V)]))
        close(r['second fit'], fit(cbs=[Without(first+1, V),Leaves()]))

def test_errors(found):
    for bad in (r['bad'] for r in found(answers, 2)):
        want = dict(few="global_bs=1", text="global_bs='256'", zero='max_bs=0', both='leave out one', static='static_graph',
                    gathers='global batch at once', whole='global batch at once', ctx="or 'auto'")
        for k,text in want.items(): assert bad[k].startswith('ValueError') and text in bad[k], (k, bad[k])
    assert '[batchnorm-parts]' in found(answers, 2)[0]['bad']['messages']
    own = DataLoader(range(6), batch_sampler=[[0,1,2],[3],[4,5]])
    with pytest.raises(ValueError, match='max_bs: this DataLoader makes batches in its own way.* GradientAccumulation'):
        DistributedDL.from_dl(own, 0, 2, pad='batch', max_bs=2)

class SkipsStep(Callback):
    "Cancels all parts of a step; what gradients there are then"
    run_valid = False
    def after_pred(self):
        if self.train_iter==1: raise CancelBatchException
    def after_backward(self):
        if self.train_iter==1: self.grads = [p.grad for p in self.model.parameters()]

def test_a_step_that_is_cancelled_whole_has_no_gradient():
    cb = SkipsStep()
    fitted(make(of()), [cb], max_bs=5)
    assert cb.grads==[None]*2

def test_steps_are_counted_and_not_parts():
    n = Steps()
    learn = fitted(make(of()), [n], max_bs=5)
    assert (learn.train_iter,learn.n_iter,len(learn.recorder.losses))==(6,3,6)
    assert (n.n,n.passes)==(6, 2*3*5)

def test_the_timer_counts_the_data_of_a_step_once(monkeypatch):
    ticks = count()
    monkeypatch.setattr(profiling, 'perf_counter', lambda: next(ticks))
    timer = Timer()
    fit(cbs=[timer], max_bs=5)
    assert len(timer.times)==2 and timer.times[0]['data']==timer.times[1]['data']>0

def test_memory_that_one_sample_does_not_have():
    messages = 'with a batch of 1 sample. The model is too large: .*shard=True'
    with pytest.raises(torch.OutOfMemoryError, match=messages): fit(partial(Limited, 0, 'forward'), max_bs='auto')
    # Without the option
    for real,error,words in ((False,torch.OutOfMemoryError,'out of memory'), (True,RuntimeError,'DefaultCPUAllocator')):
        with pytest.raises(error, match=words) as e: fit(partial(Limited, 0, 'forward', real))
        assert str(e.value).count('Out of memory in training with a batch of 24 samples.')==1

# --- a callback that accumulates --------------------------------------------------------------------------------------

class EverySecond(Callback):
    "A step for two batches"
    def after_pred(self): pass # so that nobody knows the items before
    def before_step(self):
        if self.learn.iter%2==0: raise CancelBatchException

class LeavesEpoch(Callback):
    "The first epoch ends after the last backward pass: its gradient is part of the next step"
    def after_pred(self): pass
    def after_backward(self):
        if (self.learn.epoch,self.learn.iter)==(0,3): raise CancelTrainException

def accumulated(cuts, cb):
    with process_group():
        c = scene(n=44, lr=.05, cbs=lambda: [cb], preds=False)
        return [run(dict(c, ctx=dict(seed=3, global_bs=12, max_bs=o)), group_size())['fits'][0]['state'] for o in cuts]

def test_gradients_that_a_callback_keeps_are_left_alone():
    "They were divided by the items of later batches, where these are no samples: two for each here"
    cuts = None,2,'auto'
    same_weights(cuts, EverySecond(), 2)

def same_weights(cuts, cb, W):
    alone = accumulated(cuts, cb)
    for o in alone+sum(run_ranks(accumulated, W, cuts, cb), []): close(o, alone[0], 1e-12)

def test_gradients_of_an_epoch_that_is_left_after_its_last_backward_pass():
    "8 samples on 3 ranks: they were not corrected for their number"
    same_weights((None,'auto'), LeavesEpoch(), 3)

def test_a_second_pass_of_a_step_in_parts_is_an_error():
    "Also on one process, where the second pass would be of the last part alone"
    in_parts = dict(scenes['weighed twice'], ctx=dict(seed=3, global_bs=12, max_bs=3))
    with pytest.raises(ValueError, match='max_bs=3: learn.wrapper is called again'): run(in_parts)
