"A model that fails under a memory limit with DDP, and trains sharded"
import ctypes, resource
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from learnerdist.all import DataLoaders, Learner, deferred, process_group
from learnerdist.testing import RanksError, run_ranks
from test_sharded import needs_fsdp2

class Layer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.lin = nn.Linear(n, n, bias=False)
    def forward(self, x): return x+self.lin(x).tanh()

def net(n=1024, layers=12): return nn.Sequential(*[Layer(n) for _ in range(layers)], nn.Linear(n, 4))

def learner(n, layers, path):
    torch.manual_seed(0)
    ds = TensorDataset(torch.randn(12, n), torch.randint(4, (12,)))
    return Learner(DataLoaders(DataLoader(ds, 2), DataLoader(ds, 2)), deferred(lambda: net(n, layers)), F.cross_entropy, lr=1e-4, path=path)

def data_kb(): # memory that RLIMIT_DATA counts
    with open('/proc/self/status') as f: return next(int(o.split()[1]) for o in f if o.startswith('VmData'))

def limited(how, mib, path):
    "Train under a limit of so many MiB beyond what torch itself has taken by then"
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 2**16) # M_MMAP_THRESHOLD: else glibc keeps what FSDP2 frees
    with process_group():
        with learner(40, 2, path).no_logging() as small, small.distrib_ctx(shard=how): small.fit(1) # threads, modules
        old = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, ((data_kb()+mib*1024)*1024, old[1]))
        try:
            with learner(1024, 12, path).no_logging() as learn, learn.distrib_ctx(shard=how and dict(keep_sharded=True)):
                learn.fit(1)
                learn.save('big')
                return learn.recorder.losses[0]
        finally: resource.setrlimit(resource.RLIMIT_DATA, old)

@pytest.mark.slow
@needs_fsdp2
def test_trains_where_ddp_does_not_fit(tmp_path):
    "48 MiB of weights, AdamW: a replica has 192 MiB, DDP's buckets beside it; a half of it is 96"
    with pytest.raises(RanksError, match="can't allocate memory|not enough memory"): run_ranks(limited, 2, False, 170, tmp_path)
    first = run_ranks(limited, 2, True, 170, tmp_path)[0]
    whole = learner(1024, 12, tmp_path).load('big')
    assert first>0 and whole.opt.state[whole.model[0].lin.weight]['step']==3
