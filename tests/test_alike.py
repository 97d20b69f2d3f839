"Orders, data and draws that would differ between ranks: found and named, or the same by construction"
import warnings
import numpy as np, torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from learnerdist.all import Callback, DataLoaders, Learner, gather_objects, group_rank, num_distrib, rank_distrib
from learnerdist.testing import run_ranks

N = 24
X = torch.arange(N, dtype=torch.double)[:,None]/N
def data(): return TensorDataset(X, X)
def size(): return max(num_distrib(), 1)

class Seen(Callback):
    "What this rank has trained on"
    def before_fit(self): self.seen = []
    def after_batch(self):
        if self.training: self.seen += [round(o, 6) for o in self.xb[0][:,0].tolist()]

def fitted(train, valid=None, n=1, cbs=(), **ctx):
    "What all ranks have trained on; what was raised, and warned of"
    net,seen = nn.Linear(1, 1).double(),Seen()
    learn = Learner(DataLoaders(train, valid), net, nn.MSELoss(), lambda ps, lr: torch.optim.SGD(ps, lr=.1))
    error,every = '',[]
    with warnings.catch_warnings(record=True) as messages, learn.no_logging():
        warnings.simplefilter('always')
        try:
            with learn.distrib_ctx(seed=1, timeout_s=60, **ctx):
                learn.fit(n, cbs=[seen,*cbs])
                every = sum(gather_objects(seen.seen), [])
        except Exception as e: error = f'{type(e).__name__}: {e}'
    return len({*every}),error,[str(o.message) for o in messages if o.category is UserWarning]

# --- the order ---

class Own:
    "Draws from a generator of its own"
    def __len__(self): return N
    def __iter__(self): return iter(np.random.default_rng().permutation(N).tolist())

class Hard:
    "A sampler whose weights this rank has computed"
    def __len__(self): return N
    def __iter__(self): return iter(torch.multinomial(torch.arange(1., N+1)**group_rank(), N).tolist())

class Lists(Own):
    def __len__(self): return N//4
    def __iter__(self): return iter(np.random.default_rng().permutation(N).reshape(-1, 4).tolist())

def of_fastai():
    from fastai.callback.data import WeightedDL
    from fastai.data.core import DataLoaders as FastaiDataLoaders, TfmdDL as FastaiDL
    from fastai.learner import Learner as FastaiLearner
    import learnerdist.fastai # noqa: F401
    class Shuffles(FastaiDL):
        def shuffle_fn(self, idxs): return np.random.default_rng().permutation(idxs).tolist()
    items = [(o,o) for o in X.float()]
    weights = np.arange(1, N+1)**float(rank_distrib())
    res = []
    for dl in (Shuffles(items, bs=4, shuffle=True), WeightedDL(items, bs=4, shuffle=True, wgts=weights)):
        learn = FastaiLearner(FastaiDataLoaders(dl, FastaiDL(items, bs=4)), nn.Linear(1, 1), nn.MSELoss())
        try:
            with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=1, checks='error'): learn.fit(1)
        except Exception as e: res.append(str(e))
    return res

def orders():
    "By kind of sampler; in evaluation"
    makes = dict(own=dict(sampler=Own()), hard=dict(sampler=Hard()),
                 batches=dict(batch_sampler=BatchSampler(Own(), 4, False)), lists=dict(batch_sampler=Lists()))
    res = {k: [fitted(DataLoader(data(), **kw), checks=o) for o in ('warn','error')] for k,kw in makes.items()}
    res['alike'] = fitted(DataLoader(data(), 4, shuffle=True), n=2, checks='error')
    res['valid'] = fitted(DataLoader(data(), 4), DataLoader(data(), 4, sampler=Own()))
    return res,of_fastai()

def test_orders_that_differ():
    for r,(got,errors) in enumerate(run_ranks(orders, 2, timeout_s=120)):
        assert got.pop('alike')==(N,'',[])
        assert got.pop('valid')[1].startswith('RuntimeError: [different-orders] Own gives each rank another order')
        for k,((n,error,messages),(_,other,_)) in got.items():
            assert n<N and not error and len(messages)==(r==0) and all(o.startswith('[different-orders] ') for o in messages), (k,messages)
            assert other.startswith('ValueError: [different-orders] '), (k,other)
        assert [o.split(' gives')[0] for o in errors]==['[different-orders] Shuffles','[different-orders] WeightedDL']
