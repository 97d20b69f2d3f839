"A second learner beside one in a context, what callbacks compute before training, and metrics that read the learner"
import warnings
from importlib.util import find_spec
import pytest, torch
from torch import nn
from torch.utils.data import TensorDataset
from learnerdist.all import Callback, DataLoaders, Learner, TfmdDL, group_size, process_group
from learnerdist.testing import run_ranks

def data(n=48, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 4, generator=g, dtype=torch.double), torch.randn(n, 2, generator=g, dtype=torch.double))

def net(seed=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()

def sgd(ps, lr): return torch.optim.SGD(ps, lr=.05, momentum=.9)
def loaders(): return DataLoaders(TfmdDL(data(), 12//group_size(), shuffle=True), TfmdDL(data(11, 7), 3))
def learner(dls=None, seed=5, **kw): return Learner(dls or loaders(), net(seed), nn.MSELoss(), sgd, **kw)
def flat(learn): return torch.cat([p.detach().reshape(-1) for p in learn.model.parameters()]).tolist()

def told(func, *args):
    "What `func` returns on this rank, and the warnings"
    with process_group(), warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        return func(*args),[str(o.message) for o in ws if o.category is UserWarning]

def both(func, W, *args):
    "What one process returns; what `W` ranks return, and the warnings of rank 0"
    (one,_),*got = [*run_ranks(told, 1, func, *args),*run_ranks(told, W, func, *args)]
    return one,[o for o,_ in got],got[0][1]

# --- two learners over the same loaders -------------------------------------------------------------------------------------

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
    return flat(a),[*map(float, valid)],[*map(float, given)],preds.tolist(),orders,cb.n

def fastais_loaders():
    from fastai.data.core import DataLoaders as Loaders, TfmdDL as FastaiDL
    return Loaders(FastaiDL(data(), bs=12//group_size(), shuffle=True, num_workers=0), FastaiDL(data(11, 7), bs=3, num_workers=0))

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
    return FastaiLearner(dls or fastais_loaders(), net(seed), Mse(), opt_func=SGD, lr=.05, **kw)

makers = [learner, pytest.param(fastais, marks=pytest.mark.skipif(find_spec('fastai') is None, reason='no fastai'))]

@pytest.mark.parametrize('make', makers)
@pytest.mark.parametrize('W', [2, 3])
def test_a_learner_without_a_context_has_all_the_data(make, W):
    (weights,*one,orders,n),got,said = both(beside, W, make)
    for w,*own,seen,steps in got:
        torch.testing.assert_close(w, weights, rtol=0, atol=1e-7)
        torch.testing.assert_close(own, one, rtol=0, atol=1e-6)
        assert seen==orders and sorted(seen[0])==sorted(data()[:][0][:,0].tolist()) and seen[0]!=seen[1]
        assert (n,steps)==(4,4*W)
    assert any('trains on the whole data' in o for o in said)
# --- metrics -------------------------------------------------------------------------------------------------------------------

def metric(reads):
    learn = learner()
    def off(pred, targ): return ((learn.pred-learn.y) if reads else pred-targ).abs().mean()
    learn.metrics = off
    with learn.distrib_ctx(seed=1), learn.no_logging(): learn.fit(2)

@pytest.mark.parametrize('W', [2,3])
def test_a_metric_that_reads_the_learner_is_the_same_on_all_ranks(W):
    "What the learner has is the batch that the metric gets"
    for reads in (True,False): assert [o for _,o in run_ranks(told, W, metric, reads)]==[[]]*W
