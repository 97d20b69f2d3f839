"What several files train on"
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from learnerdist.all import group_size

def data(n=48, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 4, generator=g, dtype=torch.double),
                         torch.randn(n, 2, generator=g, dtype=torch.double))

def net(n_in=4, n_out=2, seed=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out)).double()

def size(): return 12//group_size() # a global batch of 12
def sgd(ps, lr): return torch.optim.SGD(ps, lr=.05, momentum=.9)
def weights(learn): return torch.cat([p.detach().reshape(-1) for p in learn.model.parameters()])

class Stream(IterableDataset):
    "Knows no length"
    def __init__(self, items): self.items = items
    def __iter__(self): return iter(self.items)
