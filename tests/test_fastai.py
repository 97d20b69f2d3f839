"fastai's Learner on W ranks and on one process: the same weights, numbers and predictions"
import warnings
import pytest
pytest.importorskip('fastai')
import torch, torch.distributed as dist
import fastai.callback.all # noqa: F401
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD, Adam
from fastai.metrics import F1Score, RocAuc
from torch import nn
from learnerdist.env import group_rank, group_size, process_group
from learnerdist.fastai import *
from learnerdist.testing import run_ranks

warnings.filterwarnings('ignore')
torch.set_num_threads(1)
F64 = torch.float64

def data(n, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g, dtype=F64)
    return x,x[:,:3].argmax(1)

def plain(): return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
def bn(): return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
def groups_of(m): return [list(m[0].parameters()), list(m[1:].parameters())]

class CrossEntropy(nn.CrossEntropyLoss):
    "fastai's Recorder takes float32 only; the gradients are float64 all the same"
    def forward(self, out, y): return super().forward(out, y).float()
    def activation(self, out): return out.softmax(-1)
    def decodes(self, out): return out.argmax(-1)

def accuracy(pred, targ): return (pred.argmax(-1)==targ).double().mean()

def items(n, seed=1, dtype=F64):
    x,y = data(n, seed)
    return list(zip(x.to(dtype), y))

def make(W=1, rank=0, model=plain, bs=24, n=96, n_valid=37, opt=SGD, drop_last=True, metrics=None, dtype=F64, loss=None, **kw):
    "A learner of W ranks, in float64; other ranks begin with other weights"
    torch.set_default_dtype(dtype)
    torch.manual_seed(100+rank)
    dls = DataLoaders.from_dsets(items(n, 1, dtype), items(n_valid, 2, dtype), bs=bs//W, drop_last=(drop_last,False), num_workers=0,
                                 device=torch.device('cpu'))
    mets = [accuracy, F1Score(average='macro'), RocAuc()] if metrics is None else metrics
    return Learner(dls, model(), loss or CrossEntropy(), opt_func=opt, lr=.1, metrics=mets, **kw)

def state(learn): return {k:v.clone() for k,v in learn.model.state_dict().items()}
def floats(o): return [float(v) for v in o]
def history(learn):
    rec = learn.recorder
    return dict(state=state(learn), losses=floats(rec.losses), lrs=floats(rec.lrs), values=[floats(o) for o in rec.values],
                iters=list(rec.iters), hps={k:floats(v) for k,v in getattr(rec, 'hps', {}).items()}, pct=float(learn.pct_train))

def close(a, b, tol=1e-9):
    if isinstance(b, dict):
        assert list(a)==list(b)
        for k in b: close(a[k], b[k], tol)
    elif isinstance(b, (list,tuple)) and any(isinstance(o, (list,tuple,torch.Tensor,dict)) for o in b):
        assert len(a)==len(b)
        for o in zip(a, b): close(*o, tol)
    elif b is None or isinstance(b, str): assert a==b
    else: torch.testing.assert_close(torch.as_tensor(a, dtype=F64), torch.as_tensor(b, dtype=F64), atol=tol, rtol=tol)

def on_ranks(func, *args):
    "What `func(W, rank, *args)` returns on this rank"
    with process_group(): return func(group_size(), group_rank(), *args)

def same(func, *args, W=(2,), tol=1e-9):
    want = func(1, 0, *args)
    for w in W:
        for got in run_ranks(on_ranks, w, func, *args): close(got, want, tol)
    return want

# --- fits -------------------------------------------------------------------------------------------------------------------

def fits(W, rank, how, kw):
    learn = make(W, rank, **kw)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=3):
        getattr(learn, how[0])(*how[1], **how[2])
        res = history(learn)
        res['validate'],res['preds'] = floats(learn.validate()),learn.get_preds(with_loss=True)
    return res

def call(name, *args, **kw): return name,args,kw

cases = dict(
    fit=(call('fit', 3), {}), cycle=(call('fit_one_cycle', 3, .2), {}), flat=(call('fit_flat_cos', 3), {}),
    sgdr=(call('fit_sgdr', 2, 1), {}), bn=(call('fit_one_cycle', 2), dict(model=bn)), adam=(call('fit', 2), dict(opt=Adam)),
    start=(call('fit', 3, start_epoch=1), {}),
    tune=(call('fine_tune', 2), dict(model=bn, splitter=groups_of)),
    slices=(call('fit_one_cycle', 2, slice(.01, .1)), dict(splitter=groups_of)),
    drop=(call('fit', 2), dict(n=100)), one_valid=(call('fit', 2), dict(drop_last=False, n_valid=1, metrics=[accuracy])))

def all_fits(W, rank): return {k: fits(W, rank, *o) for k,o in cases.items()}

@pytest.fixture(scope='module')
def alone(): return all_fits(1, 0)

@pytest.fixture(scope='module', params=[2, 3])
def ranks(request): return run_ranks(on_ranks, request.param, all_fits)

@pytest.mark.parametrize('name', list(cases))
def test_fits(alone, ranks, name):
    for got in ranks:
        close(got[name]['state'], alone[name]['state'])
        close(got[name], alone[name], 1e-6)
    assert all(torch.equal(ranks[0][name]['state'][k], r[name]['state'][k]) for r in ranks for k in r[name]['state'])
    assert abs(alone[name]['pct']-1)<1e-9

# --- no trace ---------------------------------------------------------------------------------------------------------------

class Fails(Callback):
    def __init__(self, event, rank=None): self.event,self.rank = event,rank
    def __call__(self, event):
        if event==self.event and self.rank in (None,group_rank()): raise KeyError(f'here: {event}')

def look(learn):
    ids = lambda os: [id(o) for o in os]
    return dict(cls=type(learn), model=type(learn.model), layers=[type(o) for o in learn.model.modules()], loaders=ids(learn.dls.loaders),
                cbs=ids(learn.cbs), names=sorted(k for k in vars(learn) if k not in usual), logger=learn.logger, mets=ids(learn.metrics),
                device=vars(learn.dls).get('_device'), devices=[o.device for o in learn.dls.loaders], group=dist.is_initialized())

usual = 'epoch iter n_iter n_epoch train_iter pct_train loss loss_grad pred xb yb dl training opt smooth_loss final_record'.split()

def traces(W, rank, event):
    res = []
    for fails in (None,event):
        learn = make(W, rank, model=bn)
        before = look(learn)
        try:
            with learn.distrib_ctx():
                inside = look(learn)
                learn.fit(2, cbs=Fails(fails) if fails else None)
        except KeyError as e: res.append(str(e))
        else: res.append('')
        res.append(look(learn)==before)
        res.append(inside!=before)
        learn.fit(1) if W==1 else None
    return res

def alone_on_ranks(func, *args):
    "With RANK and WORLD_SIZE set; the function opens the group, if it wants one"
    return func(dist_size(), rank_distrib(), *args)
def dist_size(): return num_distrib()

@pytest.mark.parametrize('event', ['before_fit','before_train','after_pred','after_step','before_validate','after_validate','after_epoch',
                                   'after_fit'])
def test_no_trace(event):
    for res in run_ranks(alone_on_ranks, 2, traces, event):
        assert res[:3]==['',True,True] and event in res[3] and res[4:]==[True,True]

def one_fails(W, rank):
    learn = make(W, rank)
    before = look(learn)
    try:
        with learn.distrib_ctx(): learn.fit(2, cbs=Fails('after_loss', 1))
    except Exception as e: return type(e).__name__,str(e),look(learn)==before

def test_failure_of_one_rank_reaches_all():
    (kind0,msg0,same0),(kind1,msg1,same1) = run_ranks(alone_on_ranks, 2, one_fails)
    assert (kind0,kind1)==('RankError','KeyError') and same0 and same1
    assert 'rank 1' in msg0 and 'here: after_loss' in msg0

def detached(W, rank):
    learn = make(W, rank, model=bn)
    before = look(learn)
    learn.to_distributed(seed=3)
    try: learn.fit(1, cbs=Fails('after_loss'))
    except KeyError: pass
    plain_model = type(learn.model) is nn.Sequential and not any('Sync' in type(o).__name__ for o in learn.model.modules())
    with pytest.raises(ValueError, match='distributed already'): learn.to_distributed()
    with pytest.raises(ValueError, match='distributed already'), learn.distrib_ctx(): pass
    learn.detach_distributed()
    return plain_model,look(learn)==before,learn.detach_distributed() is learn

def test_to_and_from_distributed(): assert run_ranks(alone_on_ranks, 2, detached)==[(True,True,True)]*2

def test_options():
    learn = make()
    for bad in ('gradient_accumulation_steps','dataloader_config','bogus'):
        with pytest.raises(ValueError, match=bad), learn.distrib_ctx(**{bad: 2}): pass
    with learn.distrib_ctx(True, in_notebook=False): assert learn.distributed_trainer.sync_bn
    with learn.distrib_ctx(False): assert not learn.distributed_trainer.sync_bn
    assert type(learn) is Learner

# --- outside of a context ---------------------------------------------------------------------------------------------------

def plain_run(path):
    "What a learner does without a context"
    learn = make(path=path, metrics=[accuracy])
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)
        return history(learn),learn.get_preds(),type(learn)

def outside(W, rank, path): return plain_run(path)

def test_outside_a_context_a_rank_is_one_process(tmp_path):
    torch.manual_seed(0)
    random_seeded = run_ranks(seeded_outside, 2, tmp_path)
    want = run_ranks(seeded_outside, 1, tmp_path)[0]
    for got in random_seeded: close(got[:2], want[:2], 0)

def seeded_outside(path):
    import random
    random.seed(1)
    return plain_run(path)[:2]

def grouped_outside(path):
    "Also with a group open"
    setup_distrib()
    res = seeded_outside(path)
    teardown_distrib()
    return res

def test_outside_a_context_with_a_group_open(tmp_path):
    want = run_ranks(seeded_outside, 1, tmp_path)[0]
    for got in run_ranks(grouped_outside, 2, tmp_path): close(got, want, 0)

def parallel(W, rank):
    learn = make()
    with learn.no_bar(), learn.no_logging():
        before = look(learn)
        with learn.parallel_ctx():
            learn.fit(1)
            inside = [type(cb).__name__ for cb in learn.cbs]
        learn.to_parallel().fit(1)
        learn.detach_parallel()
        return 'ParallelTrainer' in inside,look(learn)==before

def test_parallel(): assert parallel(1, 0)==(True,True)

def began_alone(W, rank):
    "Ranks that trained apart before go on with rank 0's weights and optimizer"
    learn = make(W, rank, opt=Adam, metrics=[])
    with learn.no_bar(), learn.no_logging():
        if rank==0: learn.fit(1)
        with learn.distrib_ctx(seed=3):
            learn.fit(1)
            return state(learn),[learn.opt.state[p]['sqr_avg'] for p in learn.model.parameters()]

def test_optimizer_state_is_rank_0s():
    a,b = run_ranks(on_ranks, 2, began_alone)
    close(a, b, 0)

def split_batches(W, rank):
    learn = make(1, rank)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=3, split_batches=True):
        learn.fit(2)
        return history(learn)

def test_split_batches():
    want = split_batches(1, 0)
    for got in run_ranks(on_ranks, 2, split_batches): close(got, want, 1e-6)
    with pytest.raises(Exception, match='24 does not divide'): run_ranks(on_ranks, 5, split_batches)

def lengths(W, rank):
    learn = make(W, rank, n=96)
    with learn.distrib_ctx():
        dls = learn.dls
        return len(dls.train),dls.train.n,len(dls.valid.new(bs=37)),dls.valid_ds is dls.valid.source.dataset

def test_lengths_inside(): assert run_ranks(on_ranks, 2, lengths)==[(4, 48, 1, True)]*2
