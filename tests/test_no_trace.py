"After the context the learner is what it was: also when its body failed, on every rank or on one"
import contextlib,io,random
import numpy as np, pytest, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from helpers import Raise
from learnerdist.all import *
from learnerdist.learner.metrics import mk_metric
from learnerdist.testing import run_ranks

class Renamed(nn.BatchNorm1d):
    "A subclass"

def make(rank=0, **kw):
    torch.manual_seed(rank)
    x,y = torch.randn(20, 6),torch.randint(3, (20,))
    items = list(zip(x, y))
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), Renamed(5), nn.Dropout(.1), nn.Linear(5, 3))
    dls = DataLoaders(TfmdDL(items, 4, shuffle=True), TfmdDL(items[:7], 4), DataLoader(items, 5))
    return Learner(dls, model, F.cross_entropy, lr=.1, metrics=[accuracy, mk_metric(accuracy)], cbs=Mine(), **kw)

class Mine(Callback): order = 3

run_state = 'final_record','train_iter','pct_train' # what a fit sets by itself

def snapshot(learn):
    "Whatever a context must leave as it is; identities, so that a copy does not pass"
    return dict(model=(learn.model, type(learn.model)), modules=[(o, type(o)) for o in learn.model.modules()],
                hooks=[(len(o._forward_hooks), len(o._forward_pre_hooks), len(o._backward_hooks)) for o in learn.model.modules()],
                param_hooks=[len(p._post_accumulate_grad_hooks or ()) for p in learn.model.parameters()],
                params=list(map(id, learn.model.parameters())), dls=learn.dls, loaders=[learn.dls.loaders, *learn.dls.loaders],
                kinds=[type(o) for o in learn.dls], samplers=[o.sampler for o in learn.dls],
                loader_vars=[sorted(vars(o)) for o in learn.dls], logger=learn.logger, metrics=list(learn.metrics),
                cbs=list(learn.cbs), handlers={k:list(v) for k,v in learn._handlers.items()},
                loss_func=learn.loss_func, names=sorted(k for k in vars(learn) if k not in run_state),
                dls_names=sorted(vars(learn.dls)), device=learn.dls.device, n_inp=learn.dls.n_inp, training=learn.training,
                group=dist.is_initialized(), runs=[(cb, cb.run) for cb in learn.cbs])

def changes(before, learn):
    "Names of what is not as it was"
    after = snapshot(learn)
    return [k for k in before if not _same(before[k], after[k])]

def _same(a, b):
    if isinstance(a, (list,tuple)): return type(a) is type(b) and len(a)==len(b) and all(map(_same, a, b))
    if isinstance(a, dict): return a.keys()==b.keys() and all(_same(a[k], b[k]) for k in a)
    return a is b or (isinstance(a, (str,int,float,bool,torch.device)) and a==b)

events = ['before_fit','before_epoch','before_train','after_pred','before_step','after_batch','after_train','before_validate',
          'after_validate','after_epoch','after_fit']

def raises(event, error=KeyError, late=True):
    "A callback that raises at an event, in its second round if it has one"
    return Raise(event, error('on purpose'), at=int(late and event not in ('before_fit','after_fit')))

def attempt(how, rank):
    "One context: what changed, and what was raised"
    learn = make(rank)
    before = snapshot(learn)
    error = None
    try:
        with learn.distrib_ctx() as same:
            assert same is learn
            use(learn, how)
    except Exception as e: error = type(e).__name__
    res = changes(before, learn),error
    learn.fit(1) # and it still works, by itself
    return (*res,changes(before, learn))

def use(learn, how):
    "The body of a context"
    kind,*args = how
    if kind=='fit': learn.fit(2)
    elif kind=='all':
        learn.fit_one_cycle(1)
        learn.validate()
        learn.get_preds()
        learn.predict(torch.zeros(6))
        with learn.no_bar(), learn.no_logging(), learn.added_cbs(Callback()): learn.fit(1)
    elif kind=='body': raise KeyError('on purpose')
    elif kind=='fails': learn.fit(2, cbs=raises(*args))
    elif kind=='validate': learn.validate(cbs=raises('after_pred', late=False))
    elif kind=='preds': learn.get_preds(cbs=raises('after_batch', late=False))

def rank_attempts(hows, opened):
    if opened: setup_distrib()
    res = []
    for how in hows:
        with silent(): res.append(attempt(how, group_rank() if opened else rank_distrib()))
    if opened:
        assert dist.is_initialized()
        dist.barrier()
        teardown_distrib()
    return res

def silent(): return contextlib.redirect_stdout(io.StringIO())

hows = {'fit':(['fit'], None), 'all':(['all'], None), 'body':(['body'], 'KeyError'), 'validate':(['validate'], 'KeyError'),
        'preds':(['preds'], 'KeyError'), **{f'fails {e}':(['fails', e], 'KeyError') for e in events},
        'cancel':(['fails','after_batch', CancelFitException], None)}

few = 'fit','all','body','preds','fails before_fit','fails after_batch','cancel'

@pytest.mark.parametrize('world_size,opened,names', [(1, True, few), (2, False, tuple(hows)), (2, True, few)])
def test_no_trace_on_any_rank(world_size, opened, names):
    for res in run_ranks(rank_attempts, world_size, [hows[k][0] for k in names], opened):
        got = dict(zip(names, res))
        assert {k:v[0] for k,v in got.items() if v[0]}=={}
        assert {k:v[1] for k,v in got.items()}=={k:hows[k][1] for k in names}
        assert {k:v[2] for k,v in got.items() if v[2]}=={}

@pytest.mark.parametrize('how', list(hows))
def test_no_trace_alone(how, capsys):
    changed,error,later = attempt(hows[how][0], 0)
    assert (changed,error,later)==([], hows[how][1], [])

class NoLoader:
    "Cannot be split for training"
    def __iter__(self): return iter([])

def rank_attach():
    rank = rank_distrib()
    res,learn = {},make(rank)
    before = snapshot(learn)
    learn.to_distributed()
    res['changed'] = changes(before, learn)
    try: learn.to_distributed()
    except ValueError as e: res['twice'] = str(e)
    try:
        with learn.distrib_ctx(): pass
    except ValueError as e: res['nested'] = str(e)
    res['still'] = dist.is_initialized() and len(learn.cbs)
    with silent(): learn.fit(1)
    assert learn.detach_distributed() is learn
    res['left'] = changes(before, learn)
    learn.detach_distributed()
    res['again'] = changes(before, learn)
    res['unsplit'] = fails_to_attach(rank, lambda o: o.dls.loaders.__setitem__(0, NoLoader()))
    res['bs'] = fails_to_attach(rank, lambda o: None, global_bs=1)
    res['option'] = fails_to_attach(rank, lambda o: None, bogus=1)
    res['device'] = fails_to_attach(rank, lambda o: None, cuda_id=99)
    res['seed'] = fails_to_attach(rank, lambda o: None, seed='x')
    return res

def fails_to_attach(rank, spoil, **kw):
    learn = make(rank)
    spoil(learn)
    before = snapshot_loaders(learn)
    try:
        with learn.distrib_ctx(**kw): return 'entered'
    except ValueError as e: return [k for k,v in snapshot_loaders(learn).items() if not _same(v, before[k])],str(e)

def snapshot_loaders(learn):
    return dict(loaders=list(learn.dls.loaders), cbs=list(learn.cbs), model=learn.model, device=learn.dls.device,
                group=dist.is_initialized(), names=sorted({*vars(learn)}-{*run_state}))

def test_attach_and_detach():
    for r in run_ranks(rank_attach, 2):
        assert 'group' in r['changed'] and 'loaders' in r['changed'] and 'cbs' in r['changed']
        assert 'already' in r['twice'] and 'already' in r['nested'] and r['still']
        assert r['left']==r['again']==[]
        for k,words in dict(unsplit='NoLoader', bs='global_bs=1', option='bogus', device='99', seed="'x'").items():
            assert r[k][0]==[] and words in r[k][1]

def rank_streams():
    rank = rank_distrib()
    learn = make(rank)
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    def draws(): return torch.rand(()).item(),random.random(),np.random.rand()
    with learn.distrib_ctx(seed=1): learn.get_preds()
    first = draws()
    with silent(), learn.distrib_ctx(seed=1): learn.fit(2)
    return first,draws()

def test_streams_after_the_context_do_not_depend_on_the_number_of_ranks():
    (alone,),ranks = run_ranks(rank_streams, 1),run_ranks(rank_streams, 3)
    assert ranks==[alone]*3
