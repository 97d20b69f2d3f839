"`distrib_ctx(shard=…)`: the run of one process, whatever is trained and evaluated; files, and the way out of the context"
import copy, functools, itertools, os, signal, traceback, warnings
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from learnerdist.all import (Callback, CancelBackwardException, CancelBatchException, CancelStepException,
                             CancelTrainException, DataLoaders, EarlyStoppingCallback,
                             GradientAccumulation, GradientClip, Learner, Lookahead,
                             group_rank, group_size, process_group, rank_distrib)
from learnerdist.core.compat import fsdp_on_cpu
from learnerdist.core.shards import is_sharded, load_opt, map_tensors, shard_of, full_tensor
from learnerdist.distributed import sharded as sharded_module
from learnerdist.learner.callback import cancels, inner_events
from learnerdist.testing import run_ranks

F64 = torch.float64
needs_fsdp2 = pytest.mark.skipif(not fsdp_on_cpu, reason='a torch without FSDP2 on the CPU')

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

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn,self.out,self.n = nn.LSTM(6, 5, batch_first=True),nn.Linear(5, 6),0
    def reset(self): self.n += 1
    def forward(self, x): return self.out(self.rnn(x[:,None])[0][:,-1])

def net(): return Net()
class Light(Layer):
    "docs/sharded.md's recipe; what it draws, it draws again"
    def forward(self, x): return checkpoint(super().forward, x, use_reentrant=False)

def light(): return nn.Sequential(nn.Sequential(*[Light(6) for _ in range(3)]), nn.Linear(6, 6))
def tied(): return Net(tied=True)
def bn(): return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
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

def data(n, seed=1):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 6, generator=g, dtype=F64), torch.randint(6, (n,), generator=g))

def acc64(p, y): return (p.argmax(-1)==y).double().mean()

# --- one run ----------------------------------------------------------------------------------------------------------------

sgd = lambda p, lr: torch.optim.SGD(p, lr, momentum=.9, weight_decay=.01)
def ahead(p, lr): return Lookahead(torch.optim.SGD(p, lr), k=2)
def two_groups(m): return [list(m.layers.parameters()), [m.head.weight, m.emb.weight, m.scale]]

base = dict(model=net, opt=torch.optim.AdamW, lr=.05, n=21, n_valid=11, bs=6, cbs=(), cycle=False, shard=True, splitter=None, fits=(2,),
            ctx={})
def case(**kw): return {**base, **kw}

def make(c, W=1, rank=0):
    torch.manual_seed(5+rank)
    dls = DataLoaders(DataLoader(data(c['n']), c['bs']//W, shuffle=True), DataLoader(data(c['n_valid'], 2), 3))
    kw = {'splitter': c['splitter']} if c['splitter'] else {}
    learn = Learner(dls, c['model']().double(), F.cross_entropy, c['opt'], lr=c['lr'], metrics=acc64, **kw)
    learn.add_cbs([o(W) for o in c['cbs']])
    return learn

def numbers(learn): return [list(o) for o in learn.recorder.values]

def run(c, W=1, rank=0, sharded=False):
    learn = make(c, W, rank)
    params,before = dict(learn.model.named_parameters()),[(type(m),{*vars(m)}) for m in learn.model.modules()]
    with learn.no_logging(), learn.distrib_ctx(seed=3, **({'shard': c['shard']} if sharded or W>1 else {}), **c['ctx']):
        start = learn.validate() # before any other pass
        for n in c['fits']: (learn.fit_one_cycle if c['cycle'] else learn.fit)(n)
        sharded = W==1 or all(is_sharded(p) for p in learn.model.parameters())
        res = dict(start=start, values=numbers(learn), losses=list(learn.recorder.losses), lrs=list(learn.recorder.lrs), n=learn.train_iter,
                   preds=learn.get_preds(), norms=[x for cb in learn.cbs for x in getattr(cb, 'norms', [])],
                   short=learn.get_preds(dl=DataLoader(data(1, 7), 3)))
        whole = [map_tensors(o.state_dict(), full_tensor) for o in (learn.model,learn.opt)]
    assert sharded and all(params[k] is p for k,p in learn.model.named_parameters())
    assert [(type(m),{*vars(m)}) for m in learn.model.modules()]==before
    copy.deepcopy(learn.model)
    on_meta = any(p.is_meta for p in learn.model.parameters()) # as it was: nobody has the whole
    model,opt = whole if on_meta else (learn.model.state_dict(),learn.opt.state_dict())
    res['params'] = {k: p.detach().clone() for k,p in model.items()}
    res['opt'] = {k: {n: torch.as_tensor(v).clone() for n,v in s.items()} for k,s in opt.get('state', {}).items()}
    if on_meta: assert learn.opt is None
    else:
        with learn.no_logging(): learn.fit(1) # alone, with the state of the optimizer
    return res

def rank_runs(cases):
    with process_group(): return {k: outcome(c, group_size(), group_rank()) for k,c in cases.items()}

@functools.cache
def on_two_ranks(): return run_ranks(rank_answers, 2, timeout_s=400)
def answers(key): return [o[key] for o in on_two_ranks()]

def rank_answers():
    "All that is asked of two ranks, but for the runs of `same`"
    both = False,True
    return dict(left_within=in_group(left_within, 2), left_by=left_by('raise'),
                late=[in_group(cancelled_late, o) for o in both], lower=[in_group(lower, o) for o in both],
                half={(o,k): in_group(half, o, k) for o in both for k in ('fp16','bf16')},
                refusals=refusals(), muon=in_group(muon), refused_within=refused_within(), offloaded=offloaded())

def in_group(f, *args):
    with process_group(): return f(*args)

def outcome(c, W=1, rank=0):
    try: return run(c, W, rank, sharded=True)
    except Exception as e: return dict(error=''.join(traceback.format_exception(e)))

def flat(o):
    if isinstance(o, dict): return [x for k in o for x in flat(o[k])]
    if isinstance(o, (list,tuple)): return [x for v in o for x in flat(v)]
    return [] if isinstance(o, str) else [-1. if o is None else o]

def differs(a, b):
    "The largest difference of two results"
    assert 'error' not in b, b['error']
    xs,ys = flat(a),flat(b)
    assert len(xs)==len(ys)
    return max((float((torch.as_tensor(x, dtype=F64)-torch.as_tensor(y, dtype=F64)).abs().max()) for x,y in zip(xs, ys)), default=0.)

class Twice(Callback):
    "Predicts with two passes in evaluation, from its first batch on, which only one rank has"
    def after_pred(self):
        if not self.training: self.learn.pred = self.pred+self.model(-self.x)

def even(**kw): return case(**{**dict(n=31, bs=12), **kw}) # a batch size that 1 to 4 ranks divide, and a last batch that they do not
def acc(n): return lambda W: GradientAccumulation(n)

same = dict(sgd=even(opt=sgd), adamw=even(), one_cycle=even(cycle=True), few=even(n_valid=1),
            few_of_blocks=even(model=blocks, n_valid=1, ctx=dict(timeout_s=20)),
            twice=even(cbs=[lambda W: Twice()], n_valid=2, ctx=dict(timeout_s=20)),
            groups=even(splitter=two_groups, lr=[.01,.05]), lookahead=even(opt=ahead), clip=even(cbs=[lambda W: GradientClip(.5)]),
            frozen=even(model=partly_frozen), tied=even(model=tied),
            accumulation=even(cbs=[acc(24)]), odd=even(cbs=[acc(36)], n=56),
            recurrent=even(model=Recurrent), batchnorm=even(model=bn, n=36), root=even(shard=dict(blocks=lambda m: False)),
            linears=even(shard=dict(blocks=[nn.Linear])), tied_blocks=even(model=tied_layers, shard=dict(blocks=Layer)),
            light=even(model=light), kept=even(shard=dict(reshard=False)), dropped=even(shard=dict(blocks=Layer, reshard=True)),
            stopping=even(cbs=[lambda W: EarlyStoppingCallback(min_delta=10., patience=1)], fits=(5,)))

@needs_fsdp2
@pytest.mark.parametrize('W', [pytest.param('some', marks=pytest.mark.slow), *(pytest.param(o, marks=pytest.mark.long) for o in (1,2,3,4))])
def test_same_run(W):
    "Some on two ranks: one of each kind"
    more = ('sgd','few','groups','accumulation','linears','kept','stopping','light','one_cycle') if W=='some' else () # a page has `light`
    cases = {k: c for k,c in same.items() if k not in more}
    alone = {k: run(c) for k,c in cases.items()}
    for ranks in run_ranks(rank_runs, 2 if W=='some' else W, cases, timeout_s=600):
        assert {k: d for k in cases if (d := differs(alone[k], ranks[k]))>1e-9} == {}

# --- cancelled ----------------------------------------------------------------------------------------------------------------

class Left(Callback):
    "Leaves the loop in the middle of an accumulation, on one rank; a layer is frozen before the next one"
    def after_batch(self):
        if self.training and self.learn.iter==2 and group_rank()==group_size()-1: raise CancelTrainException
    def after_epoch(self): self.model.layers[0].requires_grad_(False)

def left_within(W=1):
    learn = make(case(n=24, opt=sgd, cbs=[acc(12),lambda W: Left()]), W)
    with learn.no_logging(), learn.distrib_ctx(seed=3, **({'shard': True} if W>1 else {})):
        for _ in range(2): learn.fit(2)
    return [p.detach().clone() for p in learn.model.parameters()]

@needs_fsdp2
def test_gradients_of_an_incomplete_accumulation_are_dropped():
    alone = left_within()
    for found in answers('left_within'): assert differs(alone, found)<1e-9

class Cancel(Callback):
    "Raises once at an event, on one rank; at one of a batch in batch `i`"
    def __init__(self, event, exc, rank=1, i=1):
        self.exc,self.rank,self.i,self.done = exc,rank,i,False
        name,_,valid = event.partition(' ')
        setattr(self, name, lambda: self._at(name in inner_events, not valid))
    def _at(self, in_batch, training):
        if self.done or in_batch and (self.learn.iter!=self.i or self.training!=training): return
        if group_rank()==self.rank:
            self.done = True
            raise self.exc

# Each event, and each exception that may be raised there
in_training,in_validation = ['before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step'],[
    'before_batch valid','after_pred valid','after_loss valid']
all_raised = dict(dict.fromkeys(in_training, 'batch train epoch fit'), **dict.fromkeys(in_validation, 'batch validate epoch fit'),
                  **{'after_batch': 'train epoch fit', 'after_batch valid': 'validate epoch fit'})
all_raised |= dict(before_epoch='epoch fit', before_train='train epoch fit', after_train='epoch fit',
    before_validate='validate epoch fit', after_validate='epoch fit', after_epoch='fit', before_fit='fit')
every = [(e, cancels[k]) for e,ks in all_raised.items() for k in ks.split()]
every += [('before_backward', CancelBackwardException), ('before_step', CancelStepException)]

def cancelled(shard):
    "The weights and numbers after each cancelled run"
    res = {}
    for (e,x),i,rank in itertools.product(every, (0,1), (1,None)):
        learn = make(case(n=16, n_valid=12), group_size()).add_cb(Cancel(e, x, group_rank() if rank is None else rank, i))
        with learn.no_logging(), learn.distrib_ctx(seed=3, **({'shard': True} if shard else {})): learn.fit(1)
        res[f'{e} {x.__name__} {i} {rank}'] = dict(w=[p.detach().clone() for p in learn.model.parameters()], v=numbers(learn))
    return res

def cancelled_late(shard):
    "On one rank, after its backward pass, while the other one waits for it in the norm of the gradients"
    res = []
    for e,k in (('after_backward','fit'),('before_step','step')):
        learn = make(case(n=16, n_valid=2, cbs=[lambda W: GradientClip(.5)]), group_size()).add_cb(Cancel(e, cancels[k]))
        with learn.no_logging(), learn.distrib_ctx(seed=3, timeout_s=20, **({'shard': True} if shard else {})): learn.fit(1)
        res.append([p.detach().clone() for p in learn.model.parameters()])
    return res

@needs_fsdp2
def test_cancelled_late_with_a_norm():
    for ddp,sharded in answers('late'): assert differs(ddp, sharded)<1e-9

@pytest.mark.long
@needs_fsdp2
@pytest.mark.parametrize('W', [2, 3])
def test_cancelled_as_with_ddp(W):
    "On one rank, and on all: at the first batch, and at a later one"
    for a,b in zip(*(run_ranks(in_group, W, cancelled, o, timeout_s=900) for o in (False,True))):
        assert {k: d for k in a if (d := differs(a[k], b[k]))>1e-9} == {}

# --- the way out ------------------------------------------------------------------------------------------------------------

def left_by(how):
    "The model after a context that was left by an exception on one rank, or that a rank died in"
    learn = make(case(), 2)
    params = dict(learn.model.named_parameters())
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter('always')
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

@needs_fsdp2
def test_left_by_an_exception():
    "The ranks meet again, and each has the whole weights of the moment"
    (a,*found),(b,*found2) = answers('left_by')
    assert (a,b)==('RankError','KeyError') and found[:2]==found2[:2]==[True,True] and not found[3]

@needs_fsdp2
def test_a_dead_rank_takes_its_part_along():
    found,dead = run_ranks(left_by, 2, 'killed', errors='return')
    error,same,_,sizes,messages = found
    assert same and set(sizes)=={0} and 'weights of learn.model are empty' in messages[0]

# --- replicas, half precision, calls by rank 0 --------------------------------------------------------------------------------

def replicated():
    "The mesh and the weights of two replicas"
    with process_group():
        learn = make(case(n=24, bs=12), group_size())
        with learn.no_logging(), learn.distrib_ctx(seed=3, shard=dict(replicas=2)):
            learn.fit(2)
            mesh = next(learn.model.parameters()).device_mesh
            shape,ranks = tuple(mesh.shape),mesh.mesh.tolist()
        return shape,ranks,[p.detach().clone() for p in learn.model.parameters()]

@needs_fsdp2
def test_a_mesh_of_replicas():
    "Its rows are ranks that follow each other, as those of a machine do"
    learn = make(case(n=24, bs=12))
    with learn.no_logging(), learn.distrib_ctx(seed=3): learn.fit(2)
    for shape,ranks,params in run_ranks(replicated, 4):
        assert (shape,ranks)==((2,2), [[0,1],[2,3]]) and differs(list(learn.model.parameters()), params)<1e-9

class Dtypes(Callback):
    "The types that the model computes in"
    def before_fit(self):
        self.seen = set()
        self.h = self.model.layers[0].register_forward_hook(lambda m,x,y: self.seen.update([x[0].dtype,y.dtype,m.a.weight.dtype]))
    def after_pred(self): self.out = self.pred.dtype
    def after_fit(self): self.h.remove()

def floats(n=24): return TensorDataset(*[t.float() if t.is_floating_point() else t for t in data(n).tensors])

def muon():
    "What two fits of torch's Muon say"
    torch.manual_seed(5)
    dl = DataLoader(floats(), 6)
    learn = Learner(DataLoaders(dl, dl), nn.Linear(6, 6, bias=False), F.cross_entropy, getattr(torch.optim, 'Muon', torch.optim.SGD), lr=.1)
    with warnings.catch_warnings(record=True) as found, learn.no_logging(), learn.distrib_ctx(seed=3, shard=True):
        warnings.simplefilter('always')
        for _ in range(2): learn.fit(1)
    return [str(o.message).split()[0] for o in found]

@pytest.mark.slow
@needs_fsdp2
@pytest.mark.skipif(not hasattr(torch.optim, 'Muon'), reason='a torch without Muon')
def test_muon_is_said_once(): assert answers('muon')==[['[sharded-muon]'],[]]

def lower(policy):
    "Weights after training in bfloat16 by the learner, and in a bare loop of FSDP2"
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from learnerdist.distributed.sharded import make_mesh
    torch.manual_seed(5)
    ds,m = floats(),Net()
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

@needs_fsdp2
@pytest.mark.parametrize('policy', [False, True])
def test_fsdps_own_mixed_precision(policy):
    "As a bare loop with the policy; weights stay float32, and by 'bf16' what the loss gets is float32"
    for own,other,seen,out,kept in (o[policy] for o in answers('lower')):
        assert differs(own, other)<1e-6 and torch.bfloat16 in seen and kept=={torch.float32}
        assert out==(torch.bfloat16 if policy else torch.float32)

class Big(Callback):
    "A loss that overflows in float16 on rank 1, in the second batch"
    order = 5
    def after_loss(self):
        if self.training and self.learn.iter==1 and group_rank()==1: self.learn.loss_grad = self.learn.loss_grad*1e38*1e38

def half(shard, dtype):
    learn = make(case(n=24), 2)
    learn.model.float()
    learn.dls = DataLoaders(*[DataLoader(floats(), 3) for _ in range(2)])
    getattr(learn, f'to_{dtype}')()
    if dtype=='fp16': learn.add_cb(Big())
    learn.metrics = []
    with learn.no_logging(), learn.distrib_ctx(seed=3, sync_bn=False, **({'shard': True} if shard else {})): learn.fit(2)
    return [p.detach().double() for p in learn.model.parameters()],learn.mixed_precision.skipped

@needs_fsdp2
@pytest.mark.parametrize('dtype', ['fp16', 'bf16'])
def test_autocast_as_with_ddp(dtype):
    "Also where one rank's gradients overflow: then all skip the step"
    for a,b in ((o[False,dtype],o[True,dtype]) for o in answers('half')):
        assert a[1]==b[1]==(2 if dtype=='fp16' else 0) and differs(a[0], b[0])<1e-6

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

# Name: (model, options of the context, what the error says)
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
    lazy=(lambda: nn.Sequential(nn.LazyLinear(3)), dict(shard=True), 'run a batch through the model before the context'),
    max_norm=(lambda: nn.Sequential(nn.Embedding(6, 3, max_norm=1.)), dict(shard=True), '0 has max_norm, which shortens on each rank'),
    meta=(lambda: nn.Linear(6, 3, device='meta'), dict(shard=True), 'weight is on the meta device, and has no values'),
    strided=(strided, dict(shard=True), 'is not contiguous: model.to(memory_format=torch.contiguous_format)'),
    number=(number, dict(shard=True), 'is a single number, which cannot be cut: make it a tensor of shape (1,)'),
    by_hand=(cut_by_hand, dict(shard=True), 'is a DTensor already: a model that is sharded by hand trains in a loop by hand'),
    no_cpu=(net, dict(shard=True), 'does not run on the CPU: get a newer torch'))

def refusals():
    res = {}
    for k,(model,kw,_) in refused.items():
        with process_group():
            m = model()
            learn = Learner(DataLoaders(DataLoader(data(8), 2), DataLoader(data(8), 2)), m, F.cross_entropy)
            if any(p.is_meta or is_sharded(p) for p in m.parameters()): learn.prepare_model = lambda: None
            before = [(type(o),{*vars(o)}) for o in m.modules()]
            if k=='no_cpu': sharded_module.fsdp_on_cpu = False
            try:
                with learn.distrib_ctx(**kw): pass
            except Exception as e: res[k] = f'{type(e).__name__}: {e}'
            else: res[k] = ''
            sharded_module.fsdp_on_cpu = fsdp_on_cpu
            assert before==[(type(o),{*vars(o)}) for o in m.modules()] and not learn.cbs[-1].name.startswith('after_others')
    return res

@needs_fsdp2
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
            learn = make(case(n=24, model=model, **kw), group_size())
            if f is None: learn.create_opt()
            try:
                with learn.no_logging(), learn.distrib_ctx(seed=3, shard=True):
                    if k=='loaded': learn.fit(1)
                    if f: f(learn)
            except Exception as e: messages[k] = str(e)
    return messages

@needs_fsdp2
def test_refused_within_the_context():
    for messages in answers('refused_within'):
        assert {k: messages.get(k) for k,(*_,why) in within.items() if why not in messages.get(k, '')}=={}

def offloaded():
    "As on a GPU, but for the check of the device: what FSDP2 was given, and the runs"
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    given,real = [],sharded_module.offload_of
    def spy(m, **kw):
        given.append(kw['offload_policy'])
        return fully_shard(m, **kw)
    sharded_module.offload_of,torch.distributed.fsdp.fully_shard = (lambda device: CPUOffloadPolicy(pin_memory=False)),spy
    try: res = rank_runs({k: dict(same[k], shard=dict(offload=True)) for k in ('adamw','clip')})
    finally: sharded_module.offload_of,torch.distributed.fsdp.fully_shard = real,fully_shard
    return res,len(given),all(isinstance(o, CPUOffloadPolicy) for o in given)

@needs_fsdp2
def test_offloading_reaches_fsdp():
    "Every block has the policy, and the run is the same; on a CPU this moves nothing, so that `offload=True` is refused there"
    for ranks,n,right in answers('offloaded'):
        assert right and n==2*4 and {k: d for k in ranks if (d := differs(run(same[k]), ranks[k]))>1e-9}=={}
