"A second learner beside one in a context, what callbacks compute before training, and metrics that read the learner"
import warnings
from importlib.util import find_spec
import pytest, torch
from torch import nn
from helpers import data, net, sgd, weights
from learnerdist.all import Callback, DataLoaders, Learner, TfmdDL, num_distrib, process_group
from learnerdist.testing import run_ranks

def loaders(): return DataLoaders(TfmdDL(data(), 12//max(num_distrib(), 1), shuffle=True), TfmdDL(data(11, 7), 3))
def learner(dls=None, seed=5, **kw): return Learner(dls or loaders(), net(seed=seed), nn.MSELoss(), sgd, **kw)

def told(func, *args):
    "What `func` returns on this rank, and the warnings"
    with process_group(), warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        return func(*args),[str(o.message) for o in ws if o.category is UserWarning]

def both(func, W, *args):
    "What one process returns; what `W` ranks return, and the warnings of rank 0"
    (one,_),*got = [*run_ranks(told, 1, func, *args),*run_ranks(told, W, func, *args)]
    return one,[o for o,_ in got],got[0][1]

class Samples(Callback):
    "The first number of each sample that is trained on, in order, and its length in steps"
    def before_fit(self): self.seen,self.n = [],0
    def before_batch(self):
        if self.training: self.seen,self.n = self.seen+self.xb[0][:,0].tolist(),self.n_iter

def beside(make):
    dls = loaders() if make is learner else fastais_loaders()
    a,b = make(dls),make(dls, 9)
    cb = Samples()
    with a.distrib_ctx(seed=1), a.no_logging(), b.no_logging():
        if make is not learner: a,b = a.remove_cbs(a.progress),b.remove_cbs(b.progress)
        a.fit(1)
        valid,given,preds = b.validate(),b.validate(dl=a.dls.valid),b.get_preds(reorder=False)[0]
        orders = []
        for _ in range(2):
            if make is learner: b.fit(1, cbs=cb)
            else: b.fit(1, cbs=fastais_samples(cb))
            orders.append(cb.seen)
        a.fit(1)
    return weights(a).tolist(),[*map(float, valid)],[*map(float, given)],preds.tolist(),orders,cb.n

def fastais_loaders():
    from fastai.data.core import DataLoaders as Loaders, TfmdDL as FastaiDL
    return Loaders(FastaiDL(data(), bs=12//max(num_distrib(), 1), shuffle=True, num_workers=0), FastaiDL(data(11, 7), bs=3, num_workers=0))

def fastais_samples(cb):
    from fastai.callback.core import Callback as FastaiCallback
    class Samples(FastaiCallback):
        def before_fit(self): type(cb).before_fit(cb)
        def before_batch(self):
            if self.training: cb.seen,cb.n = cb.seen+self.xb[0][:,0].tolist(),self.n_iter
    return Samples()

class Mse(nn.MSELoss):
    "fastai's Recorder takes float32 only"
    def forward(self, p, t): return super().forward(p, t).float()

def fastais(dls=None, seed=5, **kw):
    import learnerdist.fastai # noqa: F401
    from fastai.learner import Learner as FastaiLearner
    from fastai.optimizer import SGD
    return FastaiLearner(dls or fastais_loaders(), net(seed=seed), Mse(), opt_func=SGD, lr=.05, **kw)

makers = [learner, pytest.param(fastais, marks=pytest.mark.skipif(find_spec('fastai') is None, reason='no fastai'))]

@pytest.mark.parametrize('make', makers)
@pytest.mark.parametrize('W', [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_learner_without_a_context_has_all_the_data(make, W):
    (weights,*one,orders,n),got,messages = both(beside, W, make)
    for w,*own,seen,steps in got:
        torch.testing.assert_close(w, weights, rtol=0, atol=1e-7)
        torch.testing.assert_close(own, one, rtol=0, atol=1e-6)
        assert seen==orders and sorted(seen[0])==sorted(data()[:][0][:,0].tolist()) and seen[0]!=seen[1]
        assert (n,steps)==(4,4*W)
    assert any('trains on the whole data' in o for o in messages)

def outside(a, b):
    "What contexts set that belongs to others: the group, warnings, loaders, and what the learners have"
    import fastai.callback.progress as bars
    return (torch.distributed.is_initialized(),warnings.showwarning,bars.master_bar,[*a.dls.loaders],[*b.dls.loaders],
            sorted({*vars(a)}-run_state),sorted({*vars(b)}-run_state))

run_state = {'epoch','n_epoch','iter','n_iter','dl','xb','yb','pred','loss','loss_grad','items','final_record','training','train_iter',
             'pct_train','opt','smooth_loss','_loss_over','x','y'}

def in_any_order(make, shared, first):
    dls = loaders() if make is learner else fastais_loaders()
    other = dls if shared else loaders() if make is learner else fastais_loaders()
    a,b = make(dls),make(other, 9)
    if make is not learner: a,b = a.remove_cbs(a.progress),b.remove_cbs(b.progress)
    before = outside(a, b)
    with a.no_logging(), b.no_logging():
        a.to_distributed(seed=1)
        a.fit(1)
        b.to_distributed(seed=2)
        b.fit(1)
        ends,goes_on = (a,b) if first=='a' else (b,a)
        ends.detach_distributed()
        goes_on.fit(1)
        valid,preds = goes_on.validate(),goes_on.get_preds()[0]
        goes_on.detach_distributed()
    same = [o is p if callable(o) else o==p for o,p in zip(before, outside(a, b))]
    return weights(a).tolist(),weights(b).tolist(),[*map(float, valid)],preds.tolist(),same

def on_rank(make):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return [in_any_order(make, shared, first) for shared in (False,True) for first in 'ab']

@pytest.mark.parametrize('make', makers)
def test_contexts_that_end_in_any_order(make):
    alone, = run_ranks(on_rank, 1, make)
    for rank in run_ranks(on_rank, 2, make, timeout_s=200):
        for (*one,_),(*got,same) in zip(alone, rank, strict=True):
            for x,y in zip(got[:2], one[:2]): torch.testing.assert_close(x, y, rtol=0, atol=1e-7)
            torch.testing.assert_close(got[2:], one[2:], rtol=0, atol=1e-6)
            assert all(same), same
