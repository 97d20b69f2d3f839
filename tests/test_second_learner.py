"A second learner beside one in a context, whose contexts end in any order"
import warnings
from importlib.util import find_spec
import pytest, torch
from harness import all_warnings, asking, close, on_2_and_3
from helpers import weights
from scenes import make, scene
from learnerdist.all import Callback

pytestmark = pytest.mark.slow

c = scene(lr=.05)

def ours(W, rank, dls=None):
    learn = make(c, max(W, 1))
    learn.dls = dls or learn.dls
    return learn

def fastais(W, rank, dls=None):
    from test_fastai_scenes import fastais
    learn = fastais(c, max(W, 1), 0)
    learn.dls = dls or learn.dls
    return learn

class Samples(Callback):
    "The first number of each sample that is trained on, in order, and its length in steps"
    def before_fit(self): self.seen,self.n = [],0
    def before_batch(self):
        if self.training: self.seen,self.n = self.seen+self.xb[0][:,0].tolist(),self.n_iter

def samples(make):
    if make is ours: return Samples()
    from fastai.callback.core import Callback as FastaiCallback
    return type('Samples', (FastaiCallback,), dict(before_fit=Samples.before_fit, before_batch=Samples.before_batch))()

def beside(make, W, rank):
    a = make(W, rank)
    b,orders,cb = make(W, rank, a.dls),[],samples(make)
    with all_warnings() as ws, a.distrib_ctx(seed=1), a.no_logging(), b.no_logging():
        a.fit(1)
        valid,given,preds = b.validate(),b.validate(dl=a.dls.valid),b.get_preds(reorder=False)[0]
        for _ in range(2):
            b.fit(1, cbs=cb)
            orders.append(cb.seen)
        a.fit(1)
    said = [o for o in ws if 'trains on the whole data' in str(o.message)]
    return dict(weights=weights(a), valid=[*map(float, valid)], given=[*map(float, given)], preds=preds),orders,cb.n,len(said)

def outside(a, b):
    "What contexts set that belongs to others: the group, warnings, loaders, and what the learners have"
    import fastai.callback.progress as bars
    return (torch.distributed.is_initialized(),warnings.showwarning,bars.master_bar,[*a.dls.loaders],[*b.dls.loaders],
            sorted({*vars(a)}-run_state),sorted({*vars(b)}-run_state))

run_state = {'epoch','n_epoch','iter','n_iter','dl','xb','yb','pred','loss','loss_grad','items','final_record','training','train_iter',
             'pct_train','opt','smooth_loss','_loss_over','x','y'}

def in_any_order(make, W, rank):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return [two_contexts(make, W, rank, shared, first) for shared in (False,True) for first in 'ab']

def two_contexts(make, W, rank, shared, first):
    a = make(W, rank)
    b = make(W, rank, a.dls if shared else None)
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
    return dict(weights=[weights(a),weights(b)], valid=[*map(float, valid)], preds=preds),same

makers = [ours,*[fastais]*(find_spec('fastai') is not None)]
def besides(W, rank, path): return {o.__name__: beside(o, W, rank) for o in makers}
def in_any_orders(W, rank, path): return {o.__name__: in_any_order(o, W, rank) for o in makers}
found = asking(besides, in_any_orders)

@on_2_and_3
@pytest.mark.parametrize('name', [o.__name__ for o in makers])
def test_a_learner_without_a_context_has_all_the_data(name, W, found):
    want,orders,n,_ = found(besides, 1)[0][name]
    for r,(got,seen,steps,said) in enumerate(o[name] for o in found(besides, W)):
        close(got, want, 1e-6)
        close(got['weights'], want['weights'], 1e-7)
        data = make(c).dls.train.dataset.tensors[0][:,0].tolist()
        assert seen==orders and sorted(seen[0])==sorted(data) and seen[0]!=seen[1]
        assert (n,steps)==(4,4*W)
        if name=='ours': assert bool(said)==(r==0) # once a process

@pytest.mark.parametrize('name', [o.__name__ for o in makers])
def test_contexts_that_end_in_any_order(name, found):
    for rank in found(in_any_orders, 2):
        for (want,_),(got,same) in zip(found(in_any_orders, 1)[0][name], rank[name], strict=True):
            close(got, want, 1e-6)
            close(got['weights'], want['weights'], 1e-7)
            assert all(same), same
