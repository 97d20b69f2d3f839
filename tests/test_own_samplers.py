"Samplers of the user's, whose length is an estimate, whose draws no rank shares, or which look at the training: the run of one process"
import warnings
from itertools import islice
import pytest, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from learnerdist.all import Callback, DataLoaders, Learner, TfmdDL, gather_objects, num_distrib
from learnerdist.testing import run_ranks

N = 45 # on 2 and 3 ranks the last global batch is a part of one

def data(n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.cat([torch.arange(n, dtype=torch.double)[:,None]/n, torch.randn(n, 3, generator=g, dtype=torch.double)], 1)
    return TensorDataset(x, torch.randn(n, 2, generator=g, dtype=torch.double))

def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()

def size(): return max(num_distrib(), 1)
def sgd(ps, lr): return torch.optim.SGD(ps, lr=.1, momentum=.9)

class Seen(Callback):
    "The places in the data of the samples that this rank has trained on, in each epoch"
    def before_fit(self): self.places = []
    def before_train(self): self.places.append([])
    def before_batch(self):
        if self.training and not self.learn.repeated: self.places[-1] += (self.xb[0][:,0]*N).round().int().tolist()

def fitted(train, *cbs, n=2):
    "Weights, the places of all ranks in each epoch, sorted, and the validation losses; and what was warned of"
    seen,learn = Seen(),Learner(DataLoaders(train, TfmdDL(data(11, 7), 12//size())), net(), nn.MSELoss(), sgd)
    with warnings.catch_warnings(record=True) as messages, learn.distrib_ctx(seed=1, timeout_s=60), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(n, cbs=[seen,*cbs])
        every = [sum(o, []) for o in zip(*gather_objects(seen.places))]
    flat = torch.cat([p.detach().reshape(-1) for p in learn.model.parameters()])
    return flat,[sorted(o) for o in every],learn.recorder.values,[str(o.message) for o in messages if o.category is UserWarning]

def same(one, ranks):
    for weights,places,values,_ in ranks:
        torch.testing.assert_close(weights, one[0], rtol=0, atol=1e-9)
        assert places==one[1]
        torch.testing.assert_close(torch.tensor(values), torch.tensor(one[2]))

class Tokens:
    "Batches of up to 12 tokens, `joined` to one; `length` is what it gives as their number"
    def __init__(self, length, joined=1): self.length,self.joined = length,joined
    def __len__(self): return -(-self.length//self.joined)
    def batches(self):
        b,n = [],0
        for i in range(N):
            if n+1+i*7%5>12:
                yield b
                b,n = [],0
            b,n = [*b,i],n+1+i*7%5
        yield b
    def __iter__(self):
        it = self.batches()
        while bs := [*islice(it, self.joined)]: yield sum(bs, [])

class Guessed:
    "All places, backwards; `length` is what it gives as their number"
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __iter__(self): return iter(range(N)[::-1])

def of_tokens(length, joined): return fitted(DataLoader(data(), batch_sampler=Tokens(length, joined)))
def of_samples(length, workers): return fitted(DataLoader(data(), 12//size(), sampler=Guessed(length), num_workers=workers))

def estimates(W):
    "By the length that is given; there are 14 batches of tokens and 45 samples. One process joins the batches of `W` ranks"
    tokens = {('tokens',o): of_tokens(o, W if size()==1 else 1) for o in (1,8,14,40)}
    return tokens | {('samples',*o): of_samples(*o) for o in ((10,0),(13,1),(40,0),(200,1))}

@pytest.mark.parametrize('W', [pytest.param(2, marks=pytest.mark.long),3])
def test_lengths_that_are_estimates(W):
    (one,),ranks = run_ranks(estimates, 1, W),run_ranks(estimates, W, W)
    for k,o in one.items():
        assert o[1]==[[*range(N)]]*2, k
        same(o, [r[k] for r in ranks])

class Widening:
    "Draws from the first `k` samples only, which a callback changes"
    def __init__(self): self.k,self.g = 10,torch.Generator().manual_seed(3)
    def __len__(self): return 96
    def __iter__(self):
        for _ in range(96): yield int(torch.randint(self.k, (1,), generator=self.g))
class Widen(Callback):
    def __init__(self, sampler): self.sampler = sampler
    def after_step(self): self.sampler.k = min(N, 10+4*self.learn.train_iter)

def of_widening(n_workers=0):
    sampler = Widening()
    return fitted(DataLoader(data(), 12//size(), sampler=sampler, num_workers=n_workers), Widen(sampler))

def outside_of_a_context():
    sampler,seen = Widening(),Seen()
    learn = Learner(DataLoaders(DataLoader(data(), 12, sampler=sampler), TfmdDL(data(11, 7), 12)), net(), nn.MSELoss(), sgd)
    with learn.no_logging(): learn.fit(2, cbs=[seen,Widen(sampler)])
    return torch.cat([p.detach().reshape(-1) for p in learn.model.parameters()]),[sorted(o) for o in seen.places],learn.recorder.values

@pytest.mark.parametrize('W', [1,3])
def test_a_sampler_that_looks_at_the_training(W): same(outside_of_a_context(), run_ranks(of_widening, W))
