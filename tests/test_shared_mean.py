"Gradients in shared memory: the same bits as gloo's, on every rank; and what becomes of it when a rank is gone"
import gc,os,signal
from pathlib import Path
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from learnerdist.all import Callback, DataLoaders, Learner, TfmdDL, process_group
from learnerdist.core.collectives import gather_rows
from learnerdist.core.env import group_rank,group_size,shared_store,wait_key
from learnerdist.distributed.replica import find_hook
from learnerdist.distributed import replica
from learnerdist.distributed.vote_links import GlooLinks,open_links
from learnerdist.testing import run_ranks

dtypes = torch.float64,torch.float32,torch.float16,torch.bfloat16

class Odd(nn.Module):
    "Parameters of all dtypes and odd sizes; the gradient of each is what `forward` is given"
    def __init__(self):
        super().__init__()
        self.ps = nn.ParameterList([nn.Parameter(torch.zeros(n, dtype=d)) for d in dtypes for n in (1, 37, 501)])
        self.rows = nn.Embedding(10, 3, sparse=True)
    def forward(self, gs): return sum((p*g).sum().double() for p,g in zip(self.ps, gs))+self.rows(torch.tensor([group_rank()])).sum()

def drawn(step):
    "This rank's gradients, of all sizes down to subnormal ones"
    g = torch.Generator().manual_seed(100*step+group_rank())
    return [torch.randn(p.shape, generator=g).mul(10.**torch.randint(-44, 3, p.shape, generator=g)).to(p.dtype) for p in Odd().ps]

def grads(hook, links, **kw):
    model = Odd()
    ddp = DistributedDataParallel(model, **kw)
    find_hook(hook)(ddp, links)
    res = []
    for i in range(4):
        ddp(drawn(i)).backward()
        res += [p.grad.to_dense().clone() for p in model.parameters()]
        model.zero_grad()
    return res

def in_order(t):
    "The mean of all ranks' `t`, added up in the order of ranks"
    first,*more = [o*(1/group_size()) for o in gather_rows(t)]
    for o in more: first = first+o # of 2 and 3 ranks this is the order of the tree
    return first

def rank_bits():
    with process_group(), open_links() as links:
        small = dict(bucket_cap_mb=.001)
        cases = [{},small,dict(small, gradient_as_bucket_view=True),dict(small, static_graph=True)]
        gloo = grads('allreduce', links)
        ours = [grads(o, links, **kw) for o in ('shm',None) for kw in cases]
        replica._large = 0 # one slot, as for large models
        ours += [grads('shm', links, **kw) for kw in cases]
        by_hand = [in_order(o) for i in range(4) for o in drawn(i)]
        dense = [[o for o in g if o.dim()==1] for g in ours]
        return dict(gloo=[all(map(torch.equal, gloo, o)) for o in ours], by_hand=[all(map(torch.equal, by_hand, o)) for o in dense],
                    close=all(torch.allclose(a, b, 1e-2) for a,b in zip(gloo, ours[0])), grads=ours[0], used=links.adding>0)

@pytest.mark.parametrize('W', [2, 3])
def test_bits(W):
    "Of gloo where there are 2 ranks, of a sum in the order of ranks in any case, and the same everywhere"
    ranks = run_ranks(rank_bits, W)
    for r in ranks:
        assert r['used'] and all(r['by_hand']) and r['close'] and all(map(torch.equal, r['grads'], ranks[0]['grads']))
        assert W>2 or all(r['gloo'])

seconds = [] # that the last fit has added up gradients

def trained(hook):
    torch.manual_seed(0)
    x,model = torch.randn(26, 4),nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    learn = Learner(DataLoaders(TfmdDL(list(zip(x, x[:,:3].argmax(1))), 4, shuffle=True)), model, F.cross_entropy, torch.optim.SGD, lr=.1)
    learn.logger = lambda line: None
    for _ in range(2): # contexts
        with learn.distrib_ctx(seed=1, comm_hook=hook):
            for _ in range(2): learn.fit(1)
            seconds[:] = [getattr(learn.runner.links, 'adding', 0.)]
    return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

def mapped():
    "Pieces of shared memory that this process maps"
    maps = Path('/proc/self/maps')
    return maps.read_text().count('memfd:learnerdist') if maps.exists() else 0

def rank_ends():
    trained(None)
    gc.collect()
    return seconds[0]>0,mapped()

def test_no_memory_is_left(): assert run_ranks(rank_ends, 2)==[(True,0)]*2

# --- a rank that is gone, or does not come ----------------------------------------------------------------------------------

class Fail(Callback):
    "Rank 1 is stopped within the second backward pass, after its first bucket"
    def __init__(self, how): self.how = how
    def before_backward(self):
        if self.iter!=1: return
        if self.how=='hang': self.learn.runner.links.timeout_s = 2 # from now on
        if group_rank()==1: self.learn.model[0].weight.register_hook(self.fail)
    def fail(self, g):
        if self.how=='raise': raise KeyError('in a hook')
        if self.how=='kill': os.kill(os.getpid(), signal.SIGKILL)
        wait_key(shared_store(), 'ended', 30)

def rank_fails(how):
    x = torch.randn(40, 4)
    model = nn.Sequential(nn.Linear(4, 500), nn.Linear(500, 3))
    learn = Learner(DataLoaders(TfmdDL(list(zip(x, x[:,:3])), 4)), model, F.mse_loss)
    learn.logger = lambda line: None
    try:
        with learn.distrib_ctx(bucket_cap_mb=.001, comm_hook='shm'): learn.fit(1, cbs=Fail(how))
    except Exception as e:
        if group_rank()==0: shared_store().set('ended', 'yes')
        return type(e).__name__,str(e)

def memory_files(): # not the folders of launchers that other tests have started
    return {o.name for o in Path('/dev/shm').glob('*') if o.is_file()} if Path('/dev/shm').exists() else set()

def test_a_rank_is_gone():
    before = memory_files()
    res = run_ranks(rank_fails, 2, 'kill', errors='return', timeout_s=60)
    assert res[1].kind=='ProcessDied' and res[0][0] in ('RankError','DistNetworkError')
    a,b = run_ranks(rank_fails, 2, 'raise', timeout_s=60)
    assert b[0]=='KeyError' and a[0]=='RankError' and 'rank 1 failed with KeyError' in a[1]
    assert not [o for o in memory_files()-before if 'learnerdist' in o]

def test_a_rank_does_not_come():
    a,_ = run_ranks(rank_fails, 2, 'hang', timeout_s=60)
    assert a[0]=='TimeoutError' and 'rank 1' in a[1]

# --- ranks that share no memory ---------------------------------------------------------------------------------------------

def rank_apart():
    with process_group(), open_links() as links:
        kinds = isinstance(links, GlooLinks)
        same = torch.equal(trained('allreduce'), trained(None))
        try: trained('shm')
        except ValueError as e: return kinds,same,seconds[0],str(e)

def test_between_machines():
    for links,same,used,msg in run_ranks(rank_apart, 2, env=dict(LOCAL_WORLD_SIZE=1)):
        assert links and same and used==0 and "comm_hook='shm'" in msg and 'several machines' in msg and 'leave comm_hook out' in msg

def test_alone_it_does_nothing(): assert torch.equal(trained('shm'), trained('allreduce'))
