"`distrib_ctx(shard=…)`: blocks, what a model may look like, files, and the way out of the context. Trainings: test_scenes.py"
import copy, functools, os, signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
import scenes
from harness import all_warnings, caught, close, error_of, in_group, needs_fsdp2
from helpers import At, Raise
from scenes import F64, draws, ints, right, scene
from learnerdist.all import *
from learnerdist.core.compat import can_group, fsdp_on_cpu
from learnerdist.core.shards import is_sharded, load_opt, map_tensors, shard_of, full_tensor
from learnerdist.distributed import sharded as sharded_module
from learnerdist.testing import run_ranks

pytestmark = needs_fsdp2

class Layer(nn.Module):
    def __init__(self, n=5):
        super().__init__()
        self.a,self.b = nn.Linear(n, 7),nn.Linear(7, n, bias=False)
    def forward(self, x): return x+self.b(self.a(x).tanh())

class Net(nn.Module):
    "Its layers are registered in another order than they run in; weights of the root; one with fewer rows than ranks"
    def __init__(self, tied=False):
        super().__init__()
        self.head,self.layers,self.emb = nn.Linear(5, 6, bias=False),nn.ModuleList([Layer() for _ in range(3)]),nn.Linear(6, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        if tied: self.head.weight,self.emb = nn.Parameter(self.emb.weight.detach().t().contiguous()),nn.Identity()
        self.tied = tied
    def forward(self, x):
        x = F.linear(x, self.head.weight.t()) if self.tied else self.emb(x)
        for o in self.layers: x = o(x)
        return self.head(x*self.scale)

def net(): return Net()
class Light(Layer):
    "docs/sharded.md's recipe; what it draws, it draws again"
    def forward(self, x): return checkpoint(super().forward, x, use_reentrant=False)

def light(): return nn.Sequential(nn.Sequential(*[Light(6) for _ in range(3)]), nn.Linear(6, 6))
def tied(): return Net(tied=True)
def blocks(): return nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]) # the model itself has no weights
def tied_layers():
    m = Net()
    m.layers[0].a.weight = m.layers[1].a.weight
    m.layers[0].is_tied = True
    return m
def partly_frozen():
    m = Net()
    m.layers[1].a.requires_grad_(False)
    m.emb.requires_grad_(False)
    return m

def rows(n, dtype=F64): return TensorDataset(draws(n, 6, dtype=dtype), ints(6, n))

# --- one run ----------------------------------------------------------------------------------------------------------------

def two_groups(m): return [list(m.layers.parameters()), [m.head.weight, m.emb.weight, m.scale]]

def numbers(learn): return [list(o) for o in learn.recorder.values]

case = partial(scene, model=net, ds=rows, n=21, n_valid=11, bs=6, loader=DataLoader, loss=F.cross_entropy, metrics=[right],
               opt=torch.optim.AdamW, lr=.05)
def make(c): return scenes.make(c, max(group_size(), 1), group_rank())
def context(learn, shard=True, **kw):
    "The context of a learner, sharded where there are several ranks"
    return learn.distrib_ctx(seed=3, **(dict(shard=shard) if group_size()>1 and shard else {}), **kw)

class Begins(Callback):
    "Validates before any other pass"
    def before_fit(self):
        if self.first is not None: return
        assert group_size()==1 or all(is_sharded(p) for p in self.model.parameters())
        self.first = self.learn.validate()
    first = None

def run(c):
    "A scene; the model is whole after it, as it was, and trains alone with the optimizer's state. Without values it has none again"
    learn = make(c).add_cb(Begins())
    params,before = dict(learn.model.named_parameters()),[(type(m),{*vars(m)}) for m in learn.model.modules()]
    res = dict(scenes.run(c, group_size(), group_rank(), learn), first=learn.begins.first)
    assert all(params[k] is p for k,p in learn.model.named_parameters())
    assert [(type(m),{*vars(m)}) for m in learn.model.modules()]==before
    copy.deepcopy(learn.model)
    if any(p.is_meta for p in learn.model.parameters()): assert learn.opt is None
    else:
        close(dict(learn.model.state_dict()), res['fits'][-1]['state'], 0)
        with learn.no_logging(): learn.fit(1)
    return res

def runs(cases): return {k: caught(run, c) for k,c in cases.items()}

def train(path, shard=True, stop=None, at='ck', model=net, opt=torch.optim.AdamW, cbs=(), every=2, resume=True, n=36, n_epoch=3,
          quiet=True, **kw):
    "A fit of three epochs of 3 steps, with states: stopped after `stop` steps, or going on from there"
    learn = make(case(n=n, model=model, opt=opt, bs=12)).add_cb(EMA(.7))
    learn.path = Path(path)
    with learn.no_logging() if quiet else nullcontext(), context(learn, shard):
        learn.fit(n_epoch, cbs=[Checkpoint(at, every=every, **kw),*([At(stop)] if stop else []),*cbs], resume=resume)
    return dict(w=dict(learn.model.state_dict()), v=numbers(learn), average=learn.ema.weights)

def even(shard=True, **kw): # a batch size that 1 to 4 ranks divide, and a last batch that they do not
    return case(**dict(n=31, bs=12, ctx=dict(seed=3, shard=shard)) | kw)
class Twice(Callback):
    "Predicts with two passes in evaluation, from its first batch on, which only one rank has"
    def after_pred(self):
        if not self.training: self.learn.pred = self.pred+self.model(-self.x)

same = dict(twice=even(cbs=lambda: [Twice()], n_valid=2, ctx=dict(seed=3, shard=True, timeout_s=20)),
            few_of_blocks=even(model=blocks, n_valid=1, ctx=dict(seed=3, shard=True, timeout_s=20)), groups=even(splitter=two_groups),
            frozen=even(model=partly_frozen), tied=even(model=tied), root=even(dict(blocks=lambda m: False)),
            linears=even(dict(blocks=[nn.Linear])), tied_blocks=even(dict(blocks=Layer), model=tied_layers), light=even(model=light),
            kept=even(dict(reshard=False)), dropped=even(dict(blocks=Layer, reshard=True)),
            stopping=even(cbs=lambda: [EarlyStoppingCallback(min_delta=10., patience=1)], fits=[5]))
if not can_group: del same['tied_blocks'] # an error, as in `refusals`

@functools.cache
def on_two_ranks(): return run_ranks(rank_answers, 2, timeout_s=400)
def answers(key): return [o[key] for o in on_two_ranks()]

def rank_answers():
    "All that is asked of two ranks, but for the runs of `same`"
    return dict(left_by=left_by('raise'), late=[in_group(cancelled_late, o) for o in (False,True)],
                lower=[in_group(lower, o) for o in (False,True)], refusals=refusals(), muon=in_group(muon),
                refused_within=refused_within())

@pytest.mark.parametrize('W', [pytest.param('some', marks=pytest.mark.slow), *(pytest.param(o, marks=pytest.mark.long) for o in (2,3))])
def test_same_run(W):
    "Some on two ranks: one of each kind. Others are shown by a page (`light`), and by test_sharded_files.py (`tied`)"
    more = ('groups','linears','kept','dropped','stopping','light','tied') if W=='some' else ()
    cases = {k: c for k,c in same.items() if k not in more}
    want = runs(cases)
    for got in run_ranks(in_group, 2 if W=='some' else W, runs, cases, timeout_s=600): close(got, want)

def cancelled_late(shard):
    "On one rank, after its backward pass, while the other one waits for it in the norm of the gradients"
    res = []
    for event,exc in (('after_backward',CancelFitException),('before_step',CancelStepException)):
        learn = make(case(n=16, n_valid=2)).add_cbs([GradientClip(.5),Raise(event, exc, 1, 1)])
        with learn.no_logging(), context(learn, shard, timeout_s=20): learn.fit(1)
        res.append([p.detach().clone() for p in learn.model.parameters()])
    return res

def test_cancelled_late_with_a_norm():
    for ddp,sharded in answers('late'): close(sharded, ddp)

# --- the way out ------------------------------------------------------------------------------------------------------------

def left_by(how):
    "The model after a context that was left by an exception on one rank, or that a rank died in"
    learn = scenes.make(case(), 2)
    params = dict(learn.model.named_parameters())
    with all_warnings() as messages:
        try:
            with learn.no_logging(), learn.distrib_ctx(seed=3, shard=True):
                learn.fit(1)
                kept = map_tensors(learn.model.state_dict(), full_tensor)
                if rank_distrib()==1 and how=='raise': raise KeyError('mine')
                if rank_distrib()==1 and how=='killed': os.kill(os.getpid(), signal.SIGKILL)
                learn.validate()
        except Exception as e: error = type(e).__name__
    same = all(params[k] is p for k,p in learn.model.named_parameters())
    with torch.no_grad(): right = how!='killed' and all(torch.equal(v, kept[k]) for k,v in learn.model.state_dict().items())
    return error,same,right,[len(p) for p in params.values()],[str(o.message) for o in messages if 'parts' in str(o.message)]

def test_left_by_an_exception():
    "The ranks meet again, and each has the whole weights of the moment"
    (a,*found),(b,*found2) = answers('left_by')
    assert (a,b)==('RankError','KeyError') and found[:2]==found2[:2]==[True,True] and not found[3]

def test_a_dead_rank_takes_its_part_along():
    found,dead = run_ranks(left_by, 2, 'killed', errors='return')
    error,same,_,sizes,messages = found
    assert same and set(sizes)=={0} and 'weights of learn.model are empty' in messages[0]

# --- replicas, half precision, calls by rank 0 --------------------------------------------------------------------------------

def replicated():
    "The mesh and the weights of two replicas"
    learn = make(case(n=24, bs=12))
    with learn.no_logging(), context(learn, dict(replicas=2)):
        learn.fit(2)
        mesh = getattr(next(learn.model.parameters()), 'device_mesh', None)
        about = mesh and (tuple(mesh.shape),mesh.mesh.tolist())
    return about,[p.detach().clone() for p in learn.model.parameters()]

def test_a_mesh_of_replicas():
    "Its rows are ranks that follow each other, as those of a machine do"
    _,want = replicated()
    for about,got in run_ranks(in_group, 4, replicated):
        close(got, want)
        assert about==((2,2), [[0,1],[2,3]])

class Dtypes(Callback):
    "The types that the model computes in"
    def before_fit(self):
        self.seen = set()
        self.h = self.model.layers[0].register_forward_hook(lambda m,x,y: self.seen.update([x[0].dtype,y.dtype,m.a.weight.dtype]))
    def after_pred(self): self.out = self.pred.dtype
    def after_fit(self): self.h.remove()

def muon():
    "What two fits of torch's Muon say"
    torch.manual_seed(5)
    dl = DataLoader(rows(24, torch.float32), 6)
    learn = Learner(DataLoaders(dl, dl), nn.Linear(6, 6, bias=False), F.cross_entropy, getattr(torch.optim, 'Muon', torch.optim.SGD), lr=.1)
    with all_warnings() as found, learn.no_logging(), learn.distrib_ctx(seed=3, shard=True):
        for _ in range(2): learn.fit(1)
    return [str(o.message).split()[0] for o in found]

@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, 'Muon'), reason='a torch without Muon')
def test_muon_is_said_once(): assert answers('muon')==[['[sharded-muon]'],[]]

def lower(policy):
    "Weights after training in bfloat16 by the learner, and in a bare loop of FSDP2"
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from learnerdist.distributed.sharded import make_mesh
    torch.manual_seed(5)
    ds,m = rows(24, torch.float32),Net()
    bare,dls = copy.deepcopy(m),DataLoaders(DataLoader(ds, 3), DataLoader(ds, 3))
    learn = Learner(dls, m, F.cross_entropy, torch.optim.SGD, lr=.1, cbs=Dtypes())
    mp = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if policy else 'bf16'
    with learn.no_logging(), learn.distrib_ctx(seed=3, shard=dict(mp=mp)): learn.fit(1)
    mesh,kw = make_mesh(torch.device('cpu'), 1),dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for o in bare.layers: fully_shard(o, mesh=mesh, mp_policy=MixedPrecisionPolicy(**kw))
    fully_shard(bare, mesh=mesh, mp_policy=MixedPrecisionPolicy(**kw, output_dtype=None if policy else torch.float32))
    opt = torch.optim.SGD(bare.parameters(), lr=.1)
    for x,y in DataLoader(torch.utils.data.Subset(ds, range(group_rank(), 24, 2)), 3):
        F.cross_entropy(bare(x), y).backward()
        opt.step()
        opt.zero_grad()
    own,other = [p.detach() for p in learn.model.parameters()],[p.full_tensor().detach() for p in bare.parameters()]
    return own,other,learn.dtypes.seen,learn.dtypes.out,{p.dtype for p in own}

@pytest.mark.parametrize('policy', [False, True])
def test_fsdps_own_mixed_precision(policy):
    "As a bare loop with the policy; weights stay float32, and by 'bf16' what the loss gets is float32"
    for own,other,seen,out,kept in (o[policy] for o in answers('lower')):
        close(own, other, 1e-6)
        assert torch.bfloat16 in seen and kept=={torch.float32}
        assert out==(torch.bfloat16 if policy else torch.float32)

# --- what cannot be ---------------------------------------------------------------------------------------------------------

def strided():
    m = nn.Linear(6, 3)
    m.weight = nn.Parameter(torch.randn(6, 3).t())
    return m

def number():
    m = nn.Linear(6, 3)
    m.scale = nn.Parameter(torch.tensor(1.))
    return m

def cut_by_hand():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    m = nn.Linear(6, 4)
    m.weight = nn.Parameter(distribute_tensor(m.weight.detach(), init_device_mesh('cpu', (2,)), [Shard(0)]))
    return m

# Name: (model, options of the context, what the error says; of some models FSDP2's own)
refused = dict(text=(net, dict(shard='nodes'), 'give True, or a dict of options, such as dict(blocks=[Block]); they are blocks, reshard'),
    fp16_policy=(net, dict(shard=dict(mp='fp16')), 'for float16 use learn.to_fp16()'),
    unknown=(net, dict(shard=dict(block=1)), "'block' is no option; give blocks, reshard"),
    replicas_0=(net, dict(shard=dict(replicas=0)), 'replicas=0: give the number of copies'),
    replicas_3=(net, dict(shard=dict(replicas=3)), 'replicas=3 does not divide 2 ranks: give a divisor of 2'),
    offload=(net, dict(shard=dict(offload=True)), 'trains on the CPU, in whose memory the weights are: leave it out'),
    ddp_option=(net, dict(shard=True, find_unused_parameters=True), 'find_unused_parameters: of DDP, and without a meaning'),
    comm_hook=(net, dict(shard=True, comm_hook='fp16'), 'comm_hook: of DDP'),
    absent=(net, dict(shard=dict(blocks=[nn.LSTM])), "has no such module with weights. Give classes of this model: Linear"),
    container=(net, dict(shard=dict(blocks=nn.ModuleList)), 'has no forward pass: give the modules in it'),
    tied=(tied_layers, dict(shard=dict(blocks=lambda m: hasattr(m, 'is_tied'))), 'or give the module that holds both'),
    lazy=(lambda: nn.Sequential(nn.LazyLinear(3)), dict(shard=True), 'call it on a batch before the context'),
    max_norm=(lambda: nn.Sequential(nn.Embedding(6, 3, max_norm=1.)), dict(shard=True), '0 has max_norm, which shortens on each rank'),
    by_freq=(lambda: nn.Sequential(nn.Embedding(6, 3, scale_grad_by_freq=True)), {}, '0 has scale_grad_by_freq, which counts rows'),
    strided=(strided, dict(shard=True), 'does not support non-contiguous parameters'),
    number=(number, dict(shard=True), 'Change scale to a 1D tensor'),
    by_hand=(cut_by_hand, dict(shard=True), 'has DTensors already: what is sharded by hand trains in a loop by hand'),
    no_cpu=(net, dict(shard=True), 'does not run on the CPU: get a newer torch'))

def enters(learn, **kw):
    with learn.distrib_ctx(**kw): pass

def refusals():
    res = {}
    for k,(model,kw,_) in refused.items():
        with process_group():
            m = model()
            learn = Learner(DataLoaders(DataLoader(rows(8), 2), DataLoader(rows(8), 2)), m, F.cross_entropy)
            if any(is_sharded(p) for p in m.parameters()): learn.prepare_model = lambda: None
            before = [(type(o),{*vars(o)}) for o in m.modules()]
            if k=='no_cpu': sharded_module.fsdp_on_cpu = False
            res[k] = error_of(enters, learn, **kw)
            sharded_module.fsdp_on_cpu = fsdp_on_cpu
            assert before==[(type(o),{*vars(o)}) for o in m.modules()] and not learn.cbs[-1].name.startswith('after_others')
    return res

def test_refused_with_a_remedy():
    for found in answers('refusals'): assert {k: found[k] for k,(_,_,why) in refused.items() if why not in found[k]}=={}

class Idle(Net):
    "Its last layer takes no part"
    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(2, 2)

class Cancels(Net):
    def forward(self, x): raise CancelBatchException

class Calls(Callback):
    "Calls the model on one rank's behalf, as a logger of pictures or graphs does"
    def after_epoch(self):
        with self.learn.runner.sharded.on_rank0(): self.learn.model(torch.zeros(1, 6, dtype=F64))

def factored(m, lr):
    "An optimizer whose state has another shape than the weight"
    opt = torch.optim.SGD(m, lr)
    for g in opt.param_groups:
        for p in g['params']: opt.state[p] = dict(rows=torch.zeros(len(p)+1, dtype=F64))
    return opt

def load_factored(learn): load_opt(learn.opt, {**learn.opt.state_dict(), 'state': {0: dict(rows=torch.zeros(9))}})

within = dict(idle=(Idle, {}, lambda o: o.fit(1), 'no gradient for idle.weight, idle.bias: freeze what takes no part in the loss'),
              cancel=(Cancels, {}, lambda o: o.fit(1), 'CancelBatchException within the forward pass'),
              calls=(Net, {}, lambda o: o.fit(1, cbs=Calls()), 'calls the model on rank 0 only, which has a part of it: after the context'),
              loaded=(Net, dict(opt=torch.optim.SGD), load_factored, 'Begin with a new optimizer: learn.opt = None before the context'),
              factored=(Net, dict(opt=factored), None, 'cannot be cut as they are. Begin with a new optimizer: learn.opt = None'),
              shapes=(Net, {}, lambda o: shard_of(torch.zeros(9), o.model.head.weight), 'a tensor of shape (9,) has no parts like'))

def refused_within():
    messages = {}
    for k,(model,kw,f,_) in within.items():
        with process_group(timeout_s=60):
            learn = make(case(n=24, model=model, **kw))
            if f is None: learn.create_opt()
            try:
                with learn.no_logging(), learn.distrib_ctx(seed=3, shard=True):
                    if k=='loaded': learn.fit(1)
                    if f: f(learn)
            except Exception as e: messages[k] = str(e)
    return messages

def test_refused_within_the_context():
    for messages in answers('refused_within'):
        assert {k: messages.get(k) for k,(*_,why) in within.items() if why not in messages.get(k, '')}=={}
