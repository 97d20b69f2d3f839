"`distrib_ctx(shard=…)`: the run of one process, whatever is trained and evaluated; files, and the way out of the context"
import copy, itertools, traceback
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from learnerdist.all import (Callback, CancelBatchException, CancelFitException, CancelTrainException, CancelValidException, Checkpoint,
                             DataLoaders, EarlyStoppingCallback, GradientAccumulation, GradientClip, Learner, Lookahead, accuracy,
                             group_rank, group_size, process_group)
from learnerdist.core.compat import torch_version
from learnerdist.core.shards import is_part
from learnerdist.testing import RanksError, run_ranks

F64 = torch.float64
needs_fsdp2 = pytest.mark.skipif(torch_version<(2,6), reason='FSDP2 came with torch 2.6')

# --- models -----------------------------------------------------------------------------------------------------------------

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
        if tied: self.head.weight = nn.Parameter(self.emb.weight.detach().t().contiguous()); self.emb = nn.Identity()
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
def tied(): return Net(tied=True)
def bn(): return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
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

base = dict(model=net, opt=torch.optim.AdamW, lr=.05, n=21, n_valid=11, bs=6, cbs=(), cycle=False, shard=True, splitter=None, fits=(2,), ctx={})
def case(**kw): return {**base, **kw}

def make(c, W=1, rank=0):
    torch.manual_seed(5+rank)
    learn = Learner(DataLoaders(DataLoader(data(c['n']), c['bs']//W, shuffle=True), DataLoader(data(c['n_valid'], 2), 3)), c['model']().double(),
                    F.cross_entropy, c['opt'], lr=c['lr'], metrics=acc64, **({'splitter': c['splitter']} if c['splitter'] else {}))
    learn.add_cbs([o(W) for o in c['cbs']])
    return learn

def numbers(learn): return [list(o) for o in learn.recorder.values]

def run(c, W=1, rank=0):
    learn = make(c, W, rank)
    params,before = dict(learn.model.named_parameters()),[(type(m),{*vars(m)}) for m in learn.model.modules()]
    with learn.no_logging(), learn.distrib_ctx(seed=3, **({'shard': c['shard']} if W>1 else {}), **c['ctx']):
        start = learn.validate() # before any other pass
        for n in c['fits']: (learn.fit_one_cycle if c['cycle'] else learn.fit)(n)
        sharded = W==1 or all(is_part(p) for p in learn.model.parameters())
        res = dict(start=start, values=numbers(learn), losses=list(learn.recorder.losses), lrs=list(learn.recorder.lrs), preds=learn.get_preds(),
                   short=learn.get_preds(dl=DataLoader(data(1, 7), 3)), norms=[x for cb in learn.cbs for x in getattr(cb, 'norms', [])],
                   n=learn.train_iter)
    assert sharded
    assert all(params[k] is p for k,p in learn.model.named_parameters())
    assert [(type(m),{*vars(m)}) for m in learn.model.modules()]==before
    copy.deepcopy(learn.model)
    res['params'] = {k: p.detach().clone() for k,p in learn.model.state_dict().items()}
    res['opt'] = {k: {n: torch.as_tensor(v).clone() for n,v in s.items()} for k,s in learn.opt.state_dict().get('state', {}).items()}
    with learn.no_logging(): learn.fit(1) # alone, with the state of the optimizer
    return res

def rank_runs(cases):
    with process_group(): return {k: outcome(c, group_size(), group_rank()) for k,c in cases.items()}

def outcome(c, W=1, rank=0):
    try: return run(c, W, rank)
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

# --- the same run -----------------------------------------------------------------------------------------------------------

same = dict(sgd=case(opt=sgd), adamw=case(), one_cycle=case(cycle=True), two_fits=case(fits=(1,2)), groups=case(splitter=two_groups, lr=[.01,.05]),
            lookahead=case(opt=ahead), clip=case(cbs=[lambda W: GradientClip(.5)]), clip_value=case(cbs=[lambda W: GradientClip(value=.02)]), frozen=case(model=partly_frozen), tied=case(model=tied),
            accumulation=case(cbs=[lambda W: GradientAccumulation(12//W)]), odd=case(cbs=[lambda W: GradientAccumulation(18//W)], n=40),
            recurrent=case(model=Recurrent), batchnorm=case(model=bn, n=24), root=case(shard=lambda m: False), linears=case(shard=[nn.Linear]),
            kept=case(shard=dict(reshard=False)), dropped=case(shard=dict(blocks=Layer, reshard=True)),
            stopping=case(cbs=[lambda W: EarlyStoppingCallback(min_delta=10., patience=1)], fits=(6,)), few=case(n_valid=1))

@needs_fsdp2
@pytest.mark.parametrize('W', [2, 3])
def test_same_run(W):
    alone = {k: run(c) for k,c in same.items()}
    for ranks in run_ranks(rank_runs, W, same): assert {k: d for k in same if (d := differs(alone[k], ranks[k]))>1e-9} == {}

# --- cancels ----------------------------------------------------------------------------------------------------------------

class Cancel(Callback):
    "Raises once at an event of batch `i`, on one rank"
    def __init__(self, event, exc, rank=1, i=1): self.event,self.exc,self.rank,self.i,self.done = event,exc,rank,i,False
    def _at(self, event):
        if self.done or event!=self.event or self.learn.iter!=self.i or self.training!=('valid' not in event): return
        if group_rank()==self.rank:
            self.done = True
            raise self.exc
    def before_batch(self): self._at('before_batch' if self.training else 'before_batch valid')
    def after_pred(self): self._at('after_pred' if self.training else 'after_pred valid')
    def before_backward(self): self._at('before_backward')
    def before_step(self): self._at('before_step')

events = [('before_batch', CancelBatchException), ('after_pred', CancelFitException), ('before_backward', CancelTrainException),
          ('before_step', CancelBatchException), ('before_batch valid', CancelBatchException), ('before_batch valid', CancelFitException),
          ('after_pred valid', CancelValidException), ('after_pred valid', CancelBatchException)]

def cancelled(shard):
    "The weights and numbers after each cancelled run"
    res = {}
    with process_group():
        for (e,x),i,rank in itertools.product(events, (0,1), (1,None)):
            learn = make(case(cbs=[lambda W: Cancel(e, x, group_rank() if rank is None else rank, i)], n=16, n_valid=12), group_size())
            with learn.no_logging(), learn.distrib_ctx(seed=3, **({'shard': True} if shard else {})): learn.fit(1)
            res[f'{e} {x.__name__} {i} {rank}'] = dict(w=[p.detach().clone() for p in learn.model.parameters()], v=numbers(learn))
    return res

@needs_fsdp2
@pytest.mark.parametrize('W', [2, 3])
def test_cancelled_as_with_ddp(W):
    "On one rank, and on all, at the first batch, before the order of the blocks is known, and at a later one"
    for a,b in zip(run_ranks(cancelled, W, False), run_ranks(cancelled, W, True)):
        assert {k: d for k in a if (d := differs(a[k], b[k]))>1e-9} == {}
