"What strangers ran into with fastai's Learner: an error that names the remedy, or the run of one process"
from functools import partial
from types import SimpleNamespace
import pytest,torch
from fastai.basics import DataLoaders,Learner,L,RandomSplitter,Transform,accuracy,noop
from fastai.data.core import Datasets,TfmdLists
from fastai.data.load import DataLoader
from fastai.optimizer import OptimWrapper
from torch import nn
from learnerdist.fastai import *
from learnerdist.testing import run_ranks

torch.set_num_threads(1)

def loader(n=8, bs=2): return DataLoader([(torch.full((3,), float(i)), torch.tensor(i%2)) for i in range(n)], bs=bs)
def quiet(learn):
    learn.logger = noop
    return learn

class Graph:
    "A batch object, as of PyTorch Geometric"
    def __init__(self, x): self.x = x
    def to(self, *args, **kwargs): return self

class OnGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
    def forward(self, g): return SimpleNamespace(loss=self.inner(g.x).mean())

def without_targets(world=1):
    dl = [Graph(torch.ones(2, 3))]*2
    learn = quiet(Learner(DataLoaders(dl, dl), OnGraph(), noop, opt_func=partial(OptimWrapper, opt=torch.optim.SGD)))
    with learn.no_bar(), learn.distrib_ctx(): learn.fit(1)

@pytest.mark.parametrize('n', [1,2])
def test_a_batch_object_without_targets_is_an_error(n):
    res = run_ranks(without_targets, n, errors='return')
    assert all('has no targets' in o.message and 'Graph' in o.message for o in res)

class Both(Transform):
    "A transform by type"
    def encodes(self, o:int): return o+1

def typed(): # as in fastai's tutorial on transformers
    tls = TfmdLists(list(range(8)), [Both()], splits=RandomSplitter(seed=1)(range(8)))
    dsets = Datasets(tls.items, [[Both(),float_row],[torch.tensor]], splits=tls.splits)
    dls = dsets.dataloaders(bs=2, val_bs=2)
    tls.types += [torch.Tensor,int]
    dls.train.dataset.types = dls.valid.dataset.types = [torch.Tensor,int,list]
    learn = quiet(Learner(dls, nn.Linear(3, 9), nn.CrossEntropyLoss(), opt_func=partial(OptimWrapper, opt=torch.optim.SGD)))
    with learn.no_bar(), learn.distrib_ctx(): learn.fit(1)
    return True

def float_row(i): return torch.full((3,), float(i))

def test_a_data_set_with_a_list_of_classes(): assert run_ranks(typed, 2)==[True]*2
