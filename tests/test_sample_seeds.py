"What is drawn for a sample is the same at any number of ranks and workers: the weights are those of one process"
import random
import numpy as np, pytest, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from helpers import weights
from learnerdist.all import DataLoaders, Learner, TfmdDL, num_distrib
from learnerdist.testing import run_ranks

N = 48

def noise(): return torch.rand(1, dtype=torch.double)+np.random.rand()+random.random()

class Noisy(Dataset):
    "Draws from three generators for each sample, and a different number for each"
    def __len__(self): return N
    def row(self, i): return torch.stack([noise()[0] for _ in range(3+int(i)%2)][-3:])+i/N,torch.tensor([i/N], dtype=torch.double)
    def __getitem__(self, i): return self.row(i)

class AtOnce(Noisy):
    "Reads a batch at once, as those of Hugging Face do"
    def __getitems__(self, idxs): return [self.row(i) for i in idxs]

class Plain(Dataset):
    "Draws nothing"
    def __len__(self): return N
    def __getitem__(self, i): return torch.full((3,), i/N, dtype=torch.double),torch.tensor([i/N], dtype=torch.double)

class Stream(IterableDataset):
    def __iter__(self): return iter([Plain()[i] for i in range(N)])

def each(o): return o*(1+noise()) # fastai's transforms get the elements of a tuple
def jitter(o): return o[0]*(1+noise()),o[1]

def loader(kind, bs, workers):
    kw = dict(num_workers=workers, **(dict(multiprocessing_context='fork') if workers else {}))
    if kind=='torch': return DataLoader(Noisy(), bs, shuffle=True, **kw)
    if kind=='at once': return DataLoader(AtOnce(), bs, shuffle=True, **kw)
    if kind=='subset': return DataLoader(Subset(Noisy(), [*range(N)][::-1]), bs, shuffle=True, **kw)
    if kind=='item': return TfmdDL(Plain(), bs, shuffle=True, after_item=jitter, **kw)
    if kind=='tensors':
        rows = TensorDataset(*map(torch.stack, zip(*[Plain()[i] for i in range(N)])))
        return TfmdDL(rows, bs, True, after_item=jitter, **kw)
    if kind=='stream': return TfmdDL(Stream(), bs, after_item=jitter, **kw)
    return TfmdDL(Plain(), batch_sampler=[[*range(i, i+bs)] for i in range(0, N, bs)], after_item=jitter, **kw)

def model(): return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
def sgd(ps, lr): return torch.optim.SGD(ps, lr=.1)

def fit(kind, workers=0, **kw):
    torch.manual_seed(3)
    net = model()
    bs = 12//max(num_distrib(), 1)
    learn = Learner(DataLoaders(loader(kind, bs, workers), DataLoader(Noisy(), 16, num_workers=workers)), net, nn.MSELoss(), sgd)
    with learn.distrib_ctx(seed=5, **kw), learn.no_logging(): learn.fit(2)
    return weights(learn),torch.tensor(learn.recorder.values),torch.rand(()).item(),random.random(),np.random.rand()

class MSE(nn.MSELoss):
    "fastai's Recorder takes float32 only"
    def forward(self, p, t): return super().forward(p, t).float()

def fit_fastai(kind, workers=0):
    from fastai.data.core import DataLoaders as FastaiDataLoaders, TfmdDL as FastaiDL, TfmdLists
    from fastai.learner import Learner as FastaiLearner
    import learnerdist.fastai # noqa: F401
    torch.manual_seed(3)
    bs = 12//max(num_distrib(), 1)
    def dl(ds, bs, **kw): return FastaiDL(ds, bs=bs, num_workers=workers, **kw)
    train = {'torch': lambda: dl(Noisy(), bs, shuffle=True),
             'lists': lambda: dl(TfmdLists(range(N), lambda i: Noisy().row(i)), bs, shuffle=True),
             'item': lambda: dl(Plain(), bs, shuffle=True, after_item=each),
             'stream': lambda: dl(Stream(), bs, n=N, after_item=each)}[kind]()
    net = model()
    learn = FastaiLearner(FastaiDataLoaders(train, dl(Noisy(), 16)), net, MSE(), lr=.1)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=5): learn.fit(2)
    return weights(learn),torch.tensor([o[1:] for o in learn.recorder.values])

def same(one, ranks):
    for w,values,*after in ranks:
        torch.testing.assert_close(w, one[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(values, one[1], rtol=1e-6, atol=1e-9)
        assert after==[*one[2:]]

KINDS = 'torch','at once','subset','item','tensors','batches','stream'
FASTAI = 'torch','lists','item','stream'

def fits(workers):
    "Of each kind, by our learner and by fastai's; with workers two of each. Workers that read a stream make other batches of it"
    res = {k: fit(k, workers) for k in (('at once','item') if workers else KINDS)}
    return res | {f'fastai {k}': fit_fastai(k, workers) for k in (('torch','item') if workers else FASTAI)}

@pytest.fixture(scope='module')
def alone(): return run_ranks(fits, 1, 0, timeout_s=300)[0]

@pytest.mark.parametrize('W,workers', [(2,3),(2,0),*[pytest.param(*o, marks=pytest.mark.long) for o in ((1,2),(3,0),(3,2))]])
def test_as_one_process(alone, W, workers):
    ranks = run_ranks(fits, W, workers, timeout_s=300)
    for k in ranks[0]: same(alone[k], [r[k] for r in ranks])
