"What a fastai user does on the first day, with our Learner: exact on 2 and 3 ranks against one process"
import pytest,torch
from torch import nn
from torch.optim import SGD

from harness import asking, close, on_2_and_3
from helpers import Raise, weights
from learnerdist.all import *
from learnerdist.learner.finder import valley

def images(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 4, 4, generator=g, dtype=torch.double)
    return list(zip(x, x[:,0].mean(2).argmax(1)))

def net(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()
def groups(m): return [[*m[1].parameters(),*m[2].parameters()],[*m[4].parameters()]]
def sgd(ps, lr): return SGD(ps, lr, momentum=.9)

def learner(**kw):
    torch.manual_seed(1)
    dls = DataLoaders.from_dsets(images(50), images(23, 1), bs=12//max(num_distrib(), 1)) # no batch size divides 50
    learn = Learner(dls, net(), nn.CrossEntropyLoss(), sgd, lr=.1, splitter=groups, **kw)
    learn.logger = lambda line: None
    return learn

def state(learn): return {k: v.clone() for k,v in learn.model.state_dict().items()}

class Keeps(Callback):
    "Keeps a list that grows"
    def __init__(self): self.seen = []
    def after_batch(self): self.seen.append(float(self.learn.loss))

def alike(found, func, W):
    "What `func` returns in one process, after comparison with each rank"
    one, = found(func, 1)
    for o in found(func, W): close(o, one, at=func.__name__)
    return one

# --- lr_find ----------------------------------------------------------------------------------------------------------------

def everything(learn):
    "What `lr_find` must leave as it was, exactly"
    rec,opt = learn.recorder,learn.opt and learn.opt.state_dict()
    torch.set_printoptions(precision=17, threshold=10**6)
    recorded = rec.losses,rec.lrs,rec.values,learn.keeps.seen,learn.epoch
    return [*map(str, (state(learn),opt,recorded,torch.get_rng_state(),learn.model.training))]

def find(W, rank, path):
    learn,res = learner(cbs=Keeps()),{}
    with learn.distrib_ctx(seed=3):
        for name in ('fresh','trained'):
            before = everything(learn)
            lrs = learn.lr_find(end_lr=100, num_it=60)
            assert everything(learn)==before
            assert lrs==lrs.valley and 2*lrs>lrs
            res |= {f'{name} {k}': v for k,v in vars(lrs).items()}
            learn.fit(1)
            res[f'{name} weights'] = weights(learn)
    return res

def plain_fit():
    learn = learner()
    with learn.distrib_ctx(seed=3):
        learn.fit(1)
        return weights(learn)

@on_2_and_3
def test_lr_find(W, found):
    "The same losses on all ranks, and the fit after it is the one without it"
    one = alike(found, find, W)
    assert 20<len(one['fresh losses'])<60 # diverges: end_lr=100
    assert torch.equal(one['fresh weights'], plain_fit())

def find_cancelled(W, rank, path):
    res = []
    for event,exc in (('before_step',CancelStepException),('after_batch',CancelFitException)):
        learn = learner(cbs=Raise(event, exc, 1, 8))
        with learn.distrib_ctx(seed=3, timeout_s=20): res.append(learn.lr_find(num_it=12, stop_div=False, show_plot=False).losses)
    return res

def test_a_rank_that_cancels_late_in_lr_find_waits_for_nobody(found):
    "The others add up the losses of a batch then: they answer first"
    for got in found(find_cancelled, 2):
        close(got, found(find_cancelled, 2)[0], 0)
        assert [*map(len, got)]==[12,9]

def test_the_suggestion_is_fastais():
    theirs = pytest.importorskip('fastai.callback.schedule')
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        lrs,losses = torch.logspace(-6, 1, 85),torch.linspace(3, 1, 85)+torch.randn(85, generator=g)*.1*seed
        assert valley(lrs, losses)[0]==pytest.approx(theirs.valley(lrs, losses, 100)[0]), seed

def test_lr_find_of_nothing():
    learn = learner()
    with pytest.raises(ValueError, match='too few of them had a finite loss'): learn.lr_find(start_lr=1e30, end_lr=1e35)
    assert not weights(learn).isnan().any()

def tuned(W, rank, path):
    learn,res = learner(),{}
    with learn.distrib_ctx(seed=3):
        learn.fine_tune(2, base_lr=.1)
        res['fine_tune'],res['valid'] = weights(learn),learn.recorder.values[-1]
        learn.freeze()
        learn.fit(1, .1)
        res['freeze'] = weights(learn)
        learn.unfreeze()
        learn.fit_one_cycle(2, slice(.01, .1))
        res['unfreeze'],res['lrs'] = weights(learn),learn.recorder.lrs
    return res

@on_2_and_3
def test_fine_tune(W, found):
    one = alike(found, tuned, W)
    body = slice(0, 16*8+8)
    assert torch.equal(one['fine_tune'][body], one['freeze'][body]) and not torch.equal(one['unfreeze'][body], one['freeze'][body])
    assert not torch.equal(one['fine_tune'][136:152], one['freeze'][136:152]) # BatchNorm in the frozen group trains, as in fastai

found = asking(find, find_cancelled, tuned)
