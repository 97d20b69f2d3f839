"Where ranks begin: rank 0's weights, buffers and optimizer; random streams; a group and loaders that are there already"
import random
import numpy as np, torch
from torch import nn
from torch.utils.data import TensorDataset
from scenes import make, picture, scene
from learnerdist.all import Callback, DataLoaders, Learner, TfmdDL, group_rank, group_size, num_distrib, process_group, rank_distrib
from learnerdist.testing import run_ranks

F64 = torch.float64

class OddState(nn.Module):
    "Buffers and parameters of every type, layout and stride"
    def __init__(self, rank):
        super().__init__()
        self.conv,self.out = nn.Conv2d(1, 3, 3),nn.Linear(12, 3)
        for k in (torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.float16, torch.complex64):
            self.register_buffer('b_'+str(k).split('.')[1], torch.full((2, 3), 1-rank, dtype=k))
        self.register_buffer('turned', torch.full((4, 3), float(rank)).T)
        self.register_buffer('none', torch.full((0, 3), float(rank)))
        self.register_buffer('scalar', torch.tensor(rank))
        self.register_buffer('seen', torch.zeros((), dtype=F64)) # of this rank's batches
        self.frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
    def forward(self, x):
        if self.training: self.seen += x.sum()
        return self.out(self.conv(x).relu().flatten(1))

def odd_state(W=1, rank=0):
    learn = make(picture(), W, rank)
    learn.model = OddState(rank)
    learn.model.conv.to(memory_format=torch.channels_last).double()
    learn.model.out.double()
    def state(): return {k:v.clone() for k,v in learn.model.state_dict().items()}
    with learn.no_logging(), learn.distrib_ctx(seed=3):
        begun = state() # DDP has not sent its own yet
        learn.fit(1)
    return begun,state(),learn.model.conv.weight.is_contiguous(memory_format=torch.channels_last)

def test_parameters_and_buffers_of_any_kind_and_optimizer_states_are_rank_0s():
    ranks = run_ranks(rank_begins, 2)
    for (*states,is_last),trained in ranks:
        assert is_last
        for state in states:
            assert all((state[f'b_{k}']==1).all() for k in ('bool','int64','uint8','bfloat16','float16','complex64'))
            for k in ('turned','frozen','scalar'): assert (state[k]==0).all()
        for ps,qs in zip(trained, ranks[0][1], strict=True): assert all(map(torch.equal, ps, qs))
    assert ranks[0][0][1]['seen']==ranks[1][0][1]['seen']!=0

def rank_trained_before():
    "Each rank has trained by itself, on its own order, before the context: rank 0's optimizer counts, too"
    rank,res = rank_distrib(),[]
    for opt in ('SGD','Adam'):
        learn = make(picture(opt=getattr(torch.optim, opt), lr=.01), 1, 0)
        torch.manual_seed(rank)
        with learn.no_logging():
            learn.fit(1)
            with learn.distrib_ctx(seed=3): learn.fit(2)
        res.append([p.detach().clone() for p in learn.model.parameters()])
    return res

def rank_begins():
    with process_group(): odd = odd_state(group_size(), group_rank())
    return odd,rank_trained_before()

# --- random streams ---------------------------------------------------------------------------------------------------

class NoiseSpy(Callback):
    "Every random stream, at each step"
    def before_batch(self):
        if self.training: self.learn.noise.append((torch.rand(()).item(), random.random(), np.random.rand()))
    def after_pred(self):
        if self.training: self.learn.masks.append((self.pred==0).tolist())

def streams(**ctx):
    x = torch.ones(16, 8, dtype=F64)
    model = nn.Sequential(nn.Linear(8, 8).double(), nn.Dropout(.5))
    learn = Learner(DataLoaders(TfmdDL(TensorDataset(x, x), 4)), model, lambda p, t: p.mean(), cbs=NoiseSpy)
    learn.noise,learn.masks = [],[]
    with learn.no_logging(), learn.distrib_ctx(seed=3, **ctx): learn.fit(2)
    return learn.noise,learn.masks

def test_each_rank_draws_from_its_own_streams():
    "Within a batch; those of samples are in test_alike"
    runs = [run_ranks(streams, 2) for _ in range(2)]
    assert runs[0]==runs[1] # reproducible
    (noise0,masks0),(noise1,masks1) = runs[0]
    for i in range(3): assert len({o[i] for o in noise0+noise1})==8 # 2 ranks, 2 epochs of 2 steps
    assert masks0!=masks1 and masks0[:2]!=masks0[2:]

def test_each_part_draws_from_its_own_stream():
    noise,_ = streams(max_bs=2)
    for i in range(3): assert len({o[i] for o in noise})==16 # 2 parts of 4 steps in 2 epochs

outside = 'before_fit','before_epoch','before_train','after_train','before_validate','after_validate','after_epoch','after_fit'

class Draws(Callback):
    "Draws from each global stream in each event that is outside of batches"
    def __init__(self):
        self.drawn = []
        for o in outside: setattr(self, o, self.draw)
    def draw(self):
        self.drawn.append((torch.randperm(99)[:3].tolist(), np.random.randint(10**6), random.random()))
        if len(self.drawn)==1: seed_all(rank_distrib()) # from the first epoch on that does not matter

def seed_all(seed):
    for o in (torch.manual_seed, np.random.seed, random.seed): o(seed)

def drawn():
    learn,cb = make(scene(n=31), max(num_distrib(), 1)),Draws()
    seed_all(1)
    with learn.no_logging(), learn.distrib_ctx(seed=3): learn.fit(3, cbs=cb)
    return cb.drawn

def test_a_callback_draws_the_same_on_each_rank():
    "New negatives or a new subset for an epoch: events outside of batches have a stream that ranks share"
    alone,ranks = drawn(),run_ranks(drawn, 2)
    assert len({str(o) for o in alone})==len(alone)==2+6*3 # nothing is drawn twice
    assert ranks==[alone]*2

def test_alone_nothing_is_reseeded():
    torch.manual_seed(42)
    want = torch.rand(3)
    learn = make(picture(), 1)
    torch.manual_seed(42)
    with learn.distrib_ctx(seed=1): assert torch.equal(torch.rand(3), want)
