"`learn.compile`: the weights and numbers of the plain model on 1, 2 and 3 ranks, two graphs a fit, no break, plain keys, no trace"
import copy, functools, tempfile
from pathlib import Path
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset
import scenes
from harness import close, needs_fsdp2
from helpers import At, Raise
from learnerdist.core.compat import fsdp_on_cpu
from scenes import F32, draws, scene
from learnerdist.all import *
from learnerdist.testing import run_ranks

class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a,self.b = nn.Linear(n, n),nn.Linear(n, n)
    def forward(self, x): return x+self.b(self.a(x).relu())

class Branches(nn.Module):
    "Synchronised layers side by side, which a compiler could reorder"
    def __init__(self):
        super().__init__()
        self.inp,self.sides = nn.Linear(6, 8),nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.bns = nn.ModuleList([nn.BatchNorm1d(8, momentum=.1*(i+1)) for i in range(3)])
    def forward(self, x):
        x = self.bns[2](self.inp(x)).relu()
        return torch.cat([bn(m(x)) for m,bn in zip(self.sides, self.bns)], 1)

def blocks(): return nn.Sequential(nn.Linear(6, 8), *[Block(8) for _ in range(3)], nn.Linear(8, 3))
def branches(): return nn.Sequential(Branches(), nn.Linear(16, 3))

def labelled(n):
    x = draws(n, 6)
    return TensorDataset(x, x[:,:3].argmax(1))

def compiled_scene(model=blocks, n=47, **kw):
    bs = 12//max(group_size(), 1)
    return scene(ds=labelled, model=model, n=n, n_valid=23, val_bs=bs, loss=F.cross_entropy, metrics=[accuracy], dtype=F32, **kw)

def make(model=blocks, cbs=None, path='.'):
    learn = scenes.make(compiled_scene(model), max(group_size(), 1))
    learn.path = Path(path)
    return learn.add_cbs(cbs).remove_cb(ProgressCallback)

def traces(model): return [k for m in model.modules() for k in vars(m) if 'compiled' in k or k=='forward']

def n_graphs(): return counters['stats']['unique_graphs']

def run(compiled, model=blocks, n_epoch=2, ctx=(), **kw):
    "Weights and numbers of a fit, and what the compiler did in it"
    learn,before,n = make(model),len(counters['graph_break']),n_graphs()
    if compiled is not None: learn.compile(compiled, **kw)
    with learn.no_logging(), learn.distrib_ctx(seed=3, **dict(ctx)):
        learn.fit(n_epoch)
        graphs,cb = n_graphs()-n,getattr(learn, 'compiled', None)
        val,(preds,_) = learn.validate(),learn.get_preds()
    return dict(state=[t.clone() for t in learn.model.state_dict().values()], keys=[*learn.model.state_dict()],
                losses=learn.recorder.losses, val=val, preds=preds, graphs=graphs, n_eager=cb and cb.n_eager,
                n_regions=cb and len(cb.regions), breaks=[*counters['graph_break']][before:], left=traces(learn.model))

def same(a, b):
    keys = 'state','losses','preds','val','keys'
    close({k: a[k] for k in keys}, {k: b[k] for k in keys}, 1e-5)

def plain_runs(W, backend):
    kw = dict(backend=backend)
    cases = [(None,{}), (False,kw), (True,kw), (None,dict(model=branches)), (False,dict(kw, model=branches, fullgraph=W==1))]
    with process_group(): return dict(plain=[run(c, **kw) for c,kw in cases])

def rank_answers(path):
    "All that is asked of two ranks"
    res = plain_runs(2, 'aot_eager')
    for f in (of_files,*[of_sharded]*fsdp_on_cpu,of_fastai):
        torch._dynamo.reset()
        with process_group(): res[f.__name__] = f(Path(path))
    return res

@functools.cache
def on_two():
    with tempfile.TemporaryDirectory() as d: return run_ranks(rank_answers, 2, d, timeout_s=300)

# With inductor a C++ compiler is at work
others = [pytest.param(W, 'inductor', marks=pytest.mark.long) for W in (1,3)]

@pytest.mark.slow
@pytest.mark.parametrize('W,backend', [(2,'aot_eager'), *others])
def test_the_plain_run(W, backend):
    env = dict(TORCHINDUCTOR_COMPILE_THREADS='1')
    ranks = on_two() if (W,backend)==(2,'aot_eager') else run_ranks(plain_runs, W, W, backend, timeout_s=500, env=env)
    for r,(plain,whole,parts,bn,synced) in enumerate(o['plain'] for o in ranks):
        for a,b in ((plain,whole), (plain,parts), (bn,synced)): # the last batch is whole on rank 0, and not on the last rank
            same(a, b)
            assert (b['n_eager']>0)==(r==W-1) and b['left']==[], b
            if b is not synced or W==1: assert b['graphs']==2 and b['breaks']==[], b # synchronised layers are not compiled

class CancelSome(Callback):
    "Rank 1 cancels a batch, then the epoch"
    def after_pred(self):
        if group_rank()!=group_size()-1 or not self.training: return
        if self.epoch==0 and self.iter==1: raise CancelBatchException
        if self.epoch==1 and self.iter==2: raise CancelEpochException

def fit_files(path, compiled):
    "Weights after a fit with cancelled batches, accumulation and autocast; keys in a file; a copy made within a batch"
    copies = []
    class Copies(Callback):
        def after_loss(self): copies.append(copy.deepcopy(self.learn.model))
    cbs = CancelSome,GradientAccumulation(6),MixedPrecision('bf16'),Copies,Checkpoint(path/f'c{compiled}')
    learn = make(cbs=[*cbs], path=path)
    if compiled: learn.compile(backend='eager')
    with learn.no_logging(), learn.distrib_ctx(seed=3):
        learn.fit(2)
        file = learn.save(f'a{compiled}')
        learn.load(f'a{compiled}').load(f'c{compiled}')
    keys = [*torch.load(file, weights_only=True)['model']]
    return [p.detach().clone() for p in learn.model.parameters()],keys,traces(copies[0])

def of_files(path): return fit_files(path, False),fit_files(path, True)

@pytest.mark.slow
def test_cancels_accumulation_and_files():
    for (want,keys,_),(got,keys2,left) in (o['of_files'] for o in on_two()):
        close(got, want, 2e-3) # bfloat16
        assert keys==keys2==[*blocks().state_dict()] and left==[]

def of_sharded(path):
    sharded = dict(shard=dict(blocks=[Block]))
    return run(None),run(None, ctx=sharded),run(False, ctx=sharded, backend='aot_eager')

@pytest.mark.slow
@needs_fsdp2
def test_sharded():
    ranks = [o['of_sharded'] for o in on_two()]
    for want,plain,got in ranks:
        same(want, plain)
        same(want, got)
        assert got['graphs']<=3 and got['n_regions']==3
    assert sum(got['n_eager'] for *_,got in ranks) # the last batch of one rank is smaller

def test_what_is_compiled_and_what_is_left_of_it():
    learn = make().compile(regional=True, backend='eager')
    with learn.no_logging(): learn.fit(1)
    assert [*learn.compiled.regions]==[*learn.model[1:4]]
    with pytest.raises(ValueError, match='regional='): learn.compile(regional=nn.Linear)
    learn.compile(regional=True).model = nn.Sequential(nn.Linear(6, 3))
    with pytest.raises(ValueError, match='no repeated blocks'), learn.no_logging(): learn.fit(1)
    assert not hasattr(learn.uncompile(), 'compiled') and not any('forward' in vars(m) for m in learn.model.modules())
    learn = make().compile(backend='eager')
    learn.loss_func = None
    with pytest.raises(ValueError, match='computes its loss'), learn.no_logging(): learn.fit(1)
    learn = make(lambda: torch.compile(blocks(), backend='eager')).compile()
    with pytest.raises(ValueError, match='the result of torch.compile'), learn.no_logging(): learn.fit(1)
    learn = make(cbs=Raise('after_pred', ZeroDivisionError)).compile(backend='eager')
    with pytest.raises(ZeroDivisionError), learn.no_logging(): learn.fit(1)
    assert traces(learn.model)==[] # an error in a batch leaves the plain model

@pytest.mark.parametrize('ctx', [{}, dict(global_bs=12, max_bs=3)])
@pytest.mark.parametrize('n', [42,48])
def test_a_resume_before_the_last_step_compiles_what_the_whole_run_does(ctx, n, tmp_path):
    "The first batch of a loop says what a full one is, but there it may be short: inductor would draw other numbers for dropout"
    def fit(path, cbs=()):
        on = [] # whether the model runs compiled, of each batch of training
        class Look(Callback):
            order = 10**9
            def before_batch(self):
                if self.training: on.append(bool(self.learn.compiled.on))
        learn = scenes.make(compiled_scene(n=n), 1).compile(backend='eager')
        learn.path = path
        with learn.no_logging(), learn.distrib_ctx(seed=3, **ctx): learn.fit(1, cbs=[Look, Checkpoint('c', 1), *cbs], resume=True)
        return on
    whole = fit(tmp_path/'whole')
    with pytest.raises(ZeroDivisionError): fit(tmp_path/'cut', [At(4)])
    again = fit(tmp_path/'cut')
    assert again==whole[-len(again):] and all(again)==(n==48) and len(again)==(4 if ctx else 1)

def fastai_fit(compiled):
    "Weights, predictions and graphs of a fastai learner"
    from test_fastai_scenes import fastais
    learn = fastais(compiled_scene(n=45), max(group_size(), 1), 0)
    if compiled: learn.compile(backend='eager')
    n = n_graphs()
    with learn.no_logging(), learn.distrib_ctx(seed=3):
        learn.fit(2)
        graphs = n_graphs()-n if compiled else 2
        preds = learn.get_preds(reorder=False)[0]
    return [p.detach().clone() for p in learn.model.parameters()],preds,graphs,traces(learn.model)

def of_fastai(path): return fastai_fit(False),fastai_fit(True)

@pytest.mark.slow
def test_fastais_learner():
    for (want,p,_,_),(got,q,graphs,left) in (o['of_fastai'] for o in on_two()):
        close([*got, q], [*want, p], 1e-5)
        assert graphs==2 and left==[]
