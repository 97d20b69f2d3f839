"""`EMA`: the average of one process on any number of ranks, replicated and sharded, for both Learners; no trace.
That a fit goes on with it is in the tests of checkpoints, of both Learners and of sharded models"""
import io,random
from pathlib import Path
from contextlib import nullcontext,redirect_stdout
from functools import partial
import pytest,torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel,get_ema_multi_avg_fn
import scenes
from harness import asking, close, on_2_and_3
from scenes import F64,draws,scene
from learnerdist.all import *
from learnerdist.core.compat import fsdp_on_cpu
from learnerdist.core.shards import is_sharded
from learnerdist.distributed.comparison import digest

def rows(n):
    x = draws(n, 4, dtype=F64)
    return list(zip(x, x[:,:3].argmax(1)))

def net():
    m = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3))
    m[3].bias.requires_grad_(False)
    return m

c = scene(ds=rows, n=36, n_valid=11, val_bs=4, model=net, loss=F.cross_entropy, opt=torch.optim.AdamW, lr=.05)

def make(kind='ours', path='.', cbs=None, bs=12):
    random.seed(0) # fastai's loaders
    if kind=='fastai': from test_fastai_scenes import fastais as of_scene
    else: of_scene = scenes.make
    learn = of_scene(dict(c, bs=bs), num_distrib() or 1, rank_distrib()) # rank 0's weights are everyone's
    learn.path,learn.logger = Path(path),lambda *args: None
    return learn.add_cbs(cbs)

def values(learn): return {k: v.detach().clone() for k,v in learn.model.state_dict().items()}

def run(kind, ctx=None, evaluate=True, acc=0, fits=1):
    "What a run has in the end, in a context with these options; None: alone"
    cbs = [GradientAccumulation(acc)] if acc and kind=='ours' else []
    learn = make(kind, cbs=[EMA(.7, evaluate),*cbs], bs=6 if acc else 12)
    with learn.distrib_ctx(seed=3, **(ctx or {})):
        for _ in range(fits): learn.fit(2)
        parts = {is_sharded(t) for t in (*learn.ema.weights.values(),*learn.model.parameters())}
        preds = learn.get_preds()[0]
        with learn.ema.apply(): averaged = learn.validate()
    res = dict(weights=values(learn), average=learn.ema.weights, preds=preds, averaged=averaged, own=learn.validate())
    with learn.ema.apply(): res['applied'] = values(learn)
    if kind=='ours': res |= dict(losses=[o[:2] for o in learn.recorder.values])
    assert not any(map(is_sharded, learn.ema.weights.values()))
    return res,parts

# --- one process --------------------------------------------------------------------------------------------------------------

class Follow(Callback):
    "torch's own, and steps that are skipped or accumulated"
    order = -7.5
    def before_fit(self): self.want = AveragedModel(self.learn.model, multi_avg_fn=get_ema_multi_avg_fn(.7))
    def after_step(self): self.want.update_parameters(self.learn.model)

def test_is_torchs_average():
    learn = make(cbs=[EMA(.7), Follow])
    learn.fit(3)
    want = dict(learn.follow.want.module.named_parameters())
    assert all(torch.equal(t, want[k]) for k,t in learn.ema.weights.items()) and '3.bias' not in learn.ema.weights
    plain,state = make(),values(learn)
    plain.fit(3)
    assert digest(values(plain))==digest(state)
    with learn.ema.apply(): # buffers are the model's
        assert all(torch.equal(v, learn.ema.weights.get(k, v) if v.requires_grad else v) for k,v in learn.model.named_buffers())
        assert {k for k,v in values(learn).items() if not torch.equal(v, state[k])}=={*learn.ema.weights}
    with pytest.raises(ZeroDivisionError), learn.ema.apply(): raise ZeroDivisionError
    assert digest(values(learn))==digest(state)

class Skip(Callback):
    "Cancel a step; note how often the average has changed"
    def before_fit(self): self.learn.n,self.old = 0,None
    def before_step(self):
        if self.train_iter%3==1: raise CancelStepException
    def after_batch(self):
        if not self.training or not self.ema.weights: return
        new = digest([*self.ema.weights.values()])
        self.learn.n += new!=self.old
        self.old = new

@pytest.mark.parametrize('cbs,n', [((), 6), ((Skip,), 4), ((partial(GradientAccumulation, 24),), 4),
                                   ((partial(MixedPrecision, 'fp16', init_scale=2.**70, growth_interval=1),), 0)])
def test_counts_steps(cbs, n):
    "Two epochs of three batches: skipped, accumulated, and float16 that overflows in each step"
    class Count(Skip):
        def before_step(self): pass
    learn = make(cbs=[EMA(.7), *[o() for o in cbs], *([] if cbs==(Skip,) else [Count])])
    learn.model.float()
    for o in (learn.dls.train, learn.dls.valid): o.dataset[:] = [(x.float(),y) for x,y in o.dataset]
    learn.fit(2)
    assert learn.n==n and bool(learn.ema.weights)==bool(n)

class Fail(Callback):
    def __init__(self, e, training=False): self.e,self.when = e,training
    def after_batch(self):
        if self.training==self.when and (self.when or self.ema.applied): raise self.e
    def after_cancel_fit(self): assert not self.ema.applied # what saves weights then saves the trained ones

@pytest.mark.parametrize('kind', ['ours','fastai'])
@pytest.mark.parametrize('e', [ZeroDivisionError,CancelValidException,CancelFitException,KeyboardInterrupt])
def test_no_trace(kind, e):
    "An evaluation with the average that is left early, in a fit and alone, and within another loop"
    if kind=='fastai':
        pytest.importorskip('fastai')
        import fastai.callback.core as core
        e = getattr(core, e.__name__, e)
    learn,plain = make(kind, cbs=EMA(.7, evaluate=True)),make(kind)
    torch.manual_seed(1)
    plain.fit(1)
    torch.manual_seed(1)
    with pytest.raises(e) if not issubclass(e, Exception) or e is ZeroDivisionError else nullcontext(): learn.fit(1, cbs=Fail(e))
    assert digest(values(learn))==digest(values(plain)) and not learn.ema.applied
    if e.__name__=='CancelFitException': return
    with pytest.raises(e) if e in (ZeroDivisionError,KeyboardInterrupt) else nullcontext(), learn.added_cbs([Fail(e)]): learn.validate()
    assert digest(values(learn))==digest(values(plain)) and not learn.ema.applied

class Within(Callback):
    "Evaluations within loops, also ones that fail"
    def after_batch(self):
        if self.nested: return
        self.nested,was = True,self.ema.applied
        w = digest(values(self.learn))
        self.learn.validate()
        try: self.learn.validate(cbs=Fail(ZeroDivisionError))
        except ZeroDivisionError: pass
        assert self.ema.applied==was==(not self.training) and digest(values(self.learn))==w
        self.nested = False
    nested = False

def best(kind, path, ctx=None):
    "The best validation loss, that of the learner after the fit, and that of a learner that loads the file"
    if kind=='fastai': from fastai.callback.tracker import SaveModelCallback
    else: from learnerdist.all import SaveModelCallback
    learn,rates = make(kind, path, [EMA(.5, evaluate=True)]),[.05,.05,5.] # from the third epoch on it diverges
    with learn.distrib_ctx(seed=3, **(ctx or {})):
        with replaced_print(): learn.fit(3, cbs=[SetRate(rates),SaveModelCallback()])
        losses,now = [o[1] for o in learn.recorder.values],learn.validate()[0]
    plain = make(kind, path)
    with replaced_print(): loaded = plain.load('model').validate()[0]
    return losses,now,loaded,learn.ema.applied

class SetRate(Callback):
    def __init__(self, rates): self.rates = rates
    def before_step(self):
        opt = getattr(self.learn.opt, 'opt', self.learn.opt)
        for g in opt.param_groups: g['lr'] = self.rates[self.learn.epoch]

def replaced_print(): return redirect_stdout(io.StringIO()) # fastai says what it has found

@pytest.mark.parametrize('kind', ['ours', 'fastai'])
def test_the_best_weights_are_those_that_were_validated(kind, tmp_path):
    losses,now,loaded,applied = best(kind, tmp_path)
    assert losses[2]>min(losses) and not applied
    assert now==loaded==min(losses)

def test_within_loops():
    a,b = make(cbs=[EMA(.7, evaluate=True), Within]),make(cbs=[EMA(.7, evaluate=True)])
    for o in (a,b):
        with o.distrib_ctx(seed=3): o.fit(2)
    assert digest(values(a))==digest(values(b)) and digest(a.ema.weights)==digest(b.ema.weights)

def test_bad_use():
    with pytest.raises(ValueError, match='decay=1.5: give'): EMA(1.5)
    learn = make(cbs=EMA())
    with pytest.raises(ValueError, match='leave apply'), learn.ema.apply(): learn.fit(1)
    learn.fit(1)
    learn.model = nn.Linear(4, 3).double()
    learn.opt = None
    with pytest.raises(ValueError, match='of another model'): learn.fit(1)
    learn = make(cbs=EMA())
    learn.fit(1)
    before = digest(learn.ema.weights)
    learn.lr_find(num_it=20, show_plot=False)
    assert digest(learn.ema.weights)==before

# --- ranks --------------------------------------------------------------------------------------------------------------------

cases = {f'{kind} {name}': (kind,kw) for kind in ('ours','fastai') for name,kw in dict(
    plain=dict(fits=2), sharded=dict(ctx=dict(shard=True), fits=2)).items()}
cases |= {'ours trained': ('ours',dict(evaluate=False)),
          'ours accumulated': ('ours',dict(acc=12)), 'ours both': ('ours',dict(acc=12, ctx=dict(shard=True)))}

def many(W, rank, path):
    res = {}
    for o in cases:
        if not fsdp_on_cpu and ('sharded' in o or 'both' in o): continue
        kind,kw = cases[o]
        if W<2: kw = {k: v for k,v in kw.items() if k!='ctx'}
        res[o],parts = run(kind, **kw)
        assert parts=={'ctx' in kw}, (o,parts)
    return res

@on_2_and_3
def test_ranks(W, found):
    want, = found(many, 1)
    for res in (every := found(many, W)):
        for o in res:
            for k in want[o]: close(res[o][k], want[o][k], 1e-6 if 'averaged' in k or k in ('own','losses') and 'fastai' in o else 1e-9)
    assert len({digest([o['average'] for o in res.values()]) for res in every})==1

def drifted(W, rank, path):
    "Ranks whose averages differ, of fits alone: rank 0's is everyone's, also of a sharded model"
    learn = make(cbs=EMA(.7))
    torch.manual_seed(rank_distrib())
    learn.fit(1)
    own = digest(learn.ema.weights)
    with learn.distrib_ctx(): learn.fit(0+1)
    res = own,digest(learn.ema.weights)
    if fsdp_on_cpu:
        with learn.distrib_ctx(shard=True): learn.fit(1)
        with learn.distrib_ctx(shard=True), learn.ema.apply(): learn.get_preds()
    return (*res,digest(learn.ema.weights))

found = asking(alone=(many, drifted))

def test_equal_ranks(found):
    own,ctx,kept = zip(*found(drifted, 2))
    assert len({*own})==2 and len({*ctx})==len({*kept})==1
