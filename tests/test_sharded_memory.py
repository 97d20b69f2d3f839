"What a rank of a sharded model holds in memory"
import ctypes, gc, resource, threading
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from learnerdist.all import Callback, DataLoaders, Learner, process_group
from learnerdist.testing import run_ranks
from harness import needs_fsdp2

class Layer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.lin = nn.Linear(n, n, bias=False)
    def forward(self, x): return x+self.lin(x).tanh()

def net(n=1024, layers=12): return nn.Sequential(*[Layer(n) for _ in range(layers)], nn.Linear(n, 4))

def learner(n, layers, path, device='meta'):
    torch.manual_seed(0)
    with torch.device(device): model = net(n, layers)
    ds = TensorDataset(torch.randn(12, n), torch.randint(4, (12,)))
    return Learner(DataLoaders(DataLoader(ds, 2), DataLoader(ds, 2)), model, F.cross_entropy, lr=1e-4, path=path)

def rss(): # bytes of this process that are in memory
    with open('/proc/self/statm') as f: return int(f.read().split()[1])*resource.getpagesize()

class Held(Callback):
    "The largest resident size that a thread saw since the fit began"
    def before_fit(self):
        self.top,self.on = 0,True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
    def watch(self):
        while self.on: self.top = max(self.top, rss())
    def after_fit(self):
        self.on = False
        self.thread.join()

def held(how, n, layers, path):
    "The peak of a rank over what the process had before the model was made"
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 2**16) # M_MMAP_THRESHOLD
    with process_group():
        def shard(n): return how and dict(weights=path/f'{n}.pth')
        device = 'meta' if how else 'cpu'
        with learner(40, 2, path, device).no_logging() as small, small.distrib_ctx(shard=shard(40)): small.fit(1) # threads, modules
        gc.collect()
        before = rss()
        with learner(n, layers, path, device).no_logging() as learn, learn.distrib_ctx(shard=shard(n)):
            learn.fit(1, cbs=(cb := Held()))
            return cb.top-before

@pytest.mark.long # the bytes of its tensors are in test_plan.py, what is read of a file in test_sharded_building.py
@needs_fsdp2
@pytest.mark.parametrize('W', [2, 4])
def test_a_rank_holds_its_part(W, tmp_path):
    "Weights, gradients and AdamW: at most 1.15/W of a replica's bytes and some blocks are resident; DDP's beside it"
    n,layers = 1024,8
    for o,k in ((40,2),(n,layers)): torch.save(net(o, k).state_dict(), tmp_path/f'{o}.pth')
    block,whole = n*n*4,sum(p.numel() for p in net(n, layers).parameters())*16 # weights, gradients, two moments
    limit = 1.15*whole/W+block
    peak = run_ranks(held, W, True, n, layers, tmp_path)
    assert max(peak)<=limit+4*block, (peak,limit) # while it computes: the gathered block before it, gradients on their way, activations
    if W==2: assert min(run_ranks(held, W, False, n, layers, tmp_path))>=.99*whole # what is measured is there
