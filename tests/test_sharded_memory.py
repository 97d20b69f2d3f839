"What a rank of a sharded model holds in memory"
import ctypes, gc, resource, threading
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from learnerdist.all import Callback, DataLoaders, Learner, process_group
from learnerdist.testing import run_ranks
from learnerdist.core.shards import is_sharded
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

def live_bytes(learn):
    "Bytes of weights, gradients and optimizer state on this rank; tensors that share memory count once"
    state = [v for s in learn.opt.state.values() for v in s.values() if torch.is_tensor(v)]
    found = [t for p in learn.model.parameters() for t in (p,p.grad) if t is not None]+state
    stored = [(t.to_local() if is_sharded(t) else t).untyped_storage() for t in found]
    return {o.data_ptr(): o.nbytes() for o in stored}

def rss(): # bytes of this process that are in memory
    with open('/proc/self/statm') as f: return int(f.read().split()[1])*resource.getpagesize()

class Held(Callback):
    "After the second step: bytes by kind; the largest resident size that a thread saw since the fit began"
    order = 50
    def before_fit(self):
        self.top,self.on = 0,True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
    def watch(self):
        while self.on: self.top = max(self.top, rss())
    def before_step(self):
        if self.training and self.iter==1: self.bytes = sum(live_bytes(self.learn).values())
    def after_fit(self):
        self.on = False
        self.thread.join()

def held(how, n, layers, path):
    "Live bytes of a rank in a step, and its peak over what the process had before the model was made"
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
            return cb.bytes,cb.top-before

@pytest.mark.long # live bytes are in test_plan.py, what is read of a file in test_sharded_building.py
@needs_fsdp2
@pytest.mark.parametrize('W', [2, 4])
def test_a_rank_holds_its_part(W, tmp_path):
    "At most 1.15/W of a replica's bytes and one block: tensors of weights, gradients and AdamW; and the resident size, DDP's beside it"
    n,layers = 1024,8
    for o,k in ((40,2),(n,layers)): torch.save(net(o, k).state_dict(), tmp_path/f'{o}.pth')
    block,whole = n*n*4,sum(p.numel() for p in net(n, layers).parameters())*16 # weights, gradients, two moments
    limit = 1.15*whole/W+block
    live,peak = zip(*run_ranks(held, W, True, n, layers, tmp_path))
    assert max(live)<=limit and sum(live)>=.99*whole
    assert max(peak)<=limit+4*block, (peak,limit) # while it computes: the gathered block before it, gradients on their way, activations
    if W==2: # what is measured is there
        ddp,ddp_peak = zip(*run_ranks(held, W, False, n, layers, tmp_path))
        assert min(ddp)>=.99*whole and min(ddp_peak)>=.99*whole
