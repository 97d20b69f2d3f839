"fastai's Learner on W ranks and on one process: the same weights, numbers and predictions"
import fastai.torch_core, pytest, torch.distributed as dist
from fastai.callback.all import *
from fastai.basics import *
from learnerdist.fastai import *
from learnerdist.fastai.trainer import fastais_gather
from learnerdist.data.distributed_dl import set_epoch
from learnerdist.testing import run_ranks
from fastai_lines import shows
from harness import asking, close, on_ranks
from helpers import Raise

warnings.filterwarnings('ignore')
F64 = torch.float64

@functools.cache
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

class OwnLoss(nn.Module):
    "Computes its loss itself, as models of Hugging Face do: the mean over labels that are not -100"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 3)
    def forward(self, b):
        out = self.lin(b['x'])
        return dict(logits=out, loss=nn.functional.cross_entropy(out, b['labels']))
def of_output(out, y): return out['loss'].float()

def own_loss(W, rank, path):
    rows = [(dict(x=x, labels=torch.tensor(-100) if x[0]>.4 else y),y) for x,y in items(96)]
    learn = make(W, rank, OwnLoss, loss=of_output, metrics=[])
    learn.dls = DataLoaders.from_dsets(rows, rows[:37], bs=per_rank(24, W), drop_last=(False,False), num_workers=0, device='cpu')
    learn.dls.loaders[1] = learn.dls.valid.new(bs=24)
    with ctx(learn, W):
        learn.fit(2)
        return dict(history(learn), validate=floats(learn.validate()))

def per_rank(bs, W): return bs//max(W, 1)

def make(W=1, rank=0, model=plain, bs=24, n=96, n_valid=37, opt=SGD, drop_last=True, metrics=(accuracy,), dtype=F64, loss=None, **kw):
    "A learner of W ranks, in float64; other ranks begin with other weights"
    torch.set_default_dtype(dtype)
    torch.manual_seed(100+rank)
    dls = DataLoaders.from_dsets(items(n, 1, dtype), items(n_valid, 2, dtype), bs=per_rank(bs, W), drop_last=(drop_last,False),
                                 num_workers=0, device=torch.device('cpu'))
    return Learner(dls, model(), loss or CrossEntropy(), opt_func=opt, lr=.1, metrics=[*metrics], **kw)

def state(learn): return {k:v.clone() for k,v in learn.model.state_dict().items()}
def floats(o): return [float(v) for v in o]
def history(learn):
    rec = learn.recorder
    return dict(state=state(learn), losses=floats(rec.losses), lrs=floats(rec.lrs), values=[floats(o) for o in rec.values],
                iters=list(rec.iters), hps={k:floats(v) for k,v in getattr(rec, 'hps', {}).items()}, pct=float(learn.pct_train))

# Numbers of ranks: what 2 show is shown by 3 before a release
on_1_and_2 = pytest.mark.parametrize('Ws', [pytest.param((1,2), id='1-2'), pytest.param((3,), id='3', marks=pytest.mark.long)])

@on_1_and_2
def test_a_model_computes_its_loss(Ws, found): same(own_loss, found=found, W=Ws, tol=1e-7) # the loss, and so its factor, is float32

class Dealt(Callback):
    "A learner without a context reads its training data in the order that the context deals"
    order,seen = -2000,0
    def before_epoch(self):
        for dl in self.dls.loaders: set_epoch(dl, self.seen+self.epoch)
    def before_train(self): self.trained = True
    def after_fit(self):
        if getattr(self, 'trained', False): self.seen += self.n_epoch
        self.trained = False

@contextmanager
def ctx(learn, W, seed=3, **kw):
    "The context; for W=0, none"
    if W: kind = learn.distrib_ctx(seed=seed, **kw)
    else:
        train,*others = learn.dls.loaders
        learn.dls.loaders = [DistributedDL.from_dl(train, 0, 1, seed=seed),*others]
        kind = learn.added_cbs(Dealt())
    with learn.no_bar(), learn.no_logging(), redirect_stdout(io.StringIO()), kind: yield learn

def same(func, *args, W, tol=1e-9, lines=(), found=None):
    """What `func(W, rank, *args)` returns on every rank of W processes is what fastai returns without a context (W=0). `lines`: those of
    the table that this shows; or for each key of what is returned its line, or its line and tolerance; or the point, where the keys are the
    lines. `found`: the fixture of `asking`"""
    found = found or (lambda func, W: [func(W, 0, *args)] if W<2 else run_ranks(on_ranks, W, func, *args))
    want, = found(func, 0)
    if isinstance(lines, str): lines = {k: f'{lines} {k}' for k in want}
    keyed = {k: v if isinstance(v, tuple) else (v,tol) for k,v in lines.items()} if isinstance(lines, dict) else {}
    if keyed: assert keyed.keys()==want.keys()
    for w in W:
        for got in found(func, w):
            if not keyed: close(got, want, tol if w>1 else 0)
            for k,(_,t) in keyed.items(): close(got[k], want[k], t if w>1 else 0, k)
        for line,t in keyed.values() if keyed else ((o,tol) for o in lines): shows(line, w, t if w>1 else 0)
    return want

def fits(W, rank, hows, kw):
    learn = make(W, rank, **kw)
    with ctx(learn, W):
        for name,args,kws in hows: getattr(learn, name)(*args, **kws)
        return dict(history(learn), validate=floats(learn.validate()), preds=learn.get_preds(with_loss=True))

def call(name, *args, **kw): return name,args,kw

cases = {
    '`fit`': ([call('fit', 2)], {}),
    '`fit` with Adam': ([call('fit', 2)], dict(opt=Adam)),
    '`fit`, a model with BatchNorm': ([call('fit', 2)], dict(model=bn)),
    '`fit(start_epoch=1)`': ([call('fit', 2, start_epoch=1)], {}),
    '`fit_one_cycle`, momenta and learning rates': ([call('fit_one_cycle', 2, .2)], {}),
    '`fit_flat_cos`': ([call('fit_flat_cos', 2)], {}),
    '`fit_sgdr`': ([call('fit_sgdr', 2, 1)], {}),
    '`fine_tune`': ([call('fine_tune', 1)], dict(model=bn, splitter=groups_of)),
    '`freeze`, `unfreeze`': ([call('freeze'), call('fit', 1), call('unfreeze'), call('fit', 1, slice(.01, .1))],
                             dict(model=bn, splitter=groups_of)),
    'discriminative learning rates': ([call('fit_one_cycle', 2, slice(.01, .1))], dict(splitter=groups_of)),
    '`drop_last`, `pct_train` ends at 1': ([call('fit', 2)], dict(n=100)),
    'without `drop_last`, one sample to validate': ([call('fit', 2)], dict(drop_last=False, n_valid=1))}

def all_fits(W, rank, path): return {k: fits(W, rank, *o) for k,o in cases.items()}

@on_1_and_2
def test_fits(Ws, found):
    want, = found(all_fits, 0)
    for W in Ws:
        res = found(all_fits, W)
        for name in cases:
            for got in res:
                close(got[name]['state'], want[name]['state'], 1e-9 if W>1 else 0, name)
                close(got[name], want[name], 1e-6 if W>1 else 0, name)
            assert all(torch.equal(res[0][name]['state'][k], r[name]['state'][k]) for r in res for k in r[name]['state'])
            shows(f'2 {name}', W, 'weights 1e-09, numbers 1e-06' if W>1 else 0)
            assert abs(want[name]['pct']-1)<1e-9

# --- no trace ---------------------------------------------------------------------------------------------------------------

def look(learn):
    ids = lambda os: [id(o) for o in os]
    return dict(cls=type(learn), model=type(learn.model), layers=[type(o) for o in learn.model.modules()], loaders=ids(learn.dls.loaders),
                cbs=ids(learn.cbs), names=sorted(k for k in vars(learn) if k not in usual), logger=learn.logger, mets=ids(learn.metrics),
                device=vars(learn.dls).get('_device'), devices=[o.device for o in learn.dls.loaders], group=dist.is_initialized())

usual = 'epoch iter n_iter n_epoch train_iter pct_train loss loss_grad pred xb yb dl training opt smooth_loss final_record'.split()

events = ['before_fit','before_train','after_pred','after_step','before_validate','after_validate','after_epoch','after_fit']

def traces(W, rank, path):
    res = []
    for event in (None,*events):
        learn = make(W, rank, model=bn)
        before = look(learn)
        try:
            with learn.distrib_ctx():
                inside = look(learn)
                learn.fit(1, cbs=Raise(event, KeyError(f'here: {event}'), 1 if event!='after_fit' else None) if event else None)
        except Exception as e: failed = type(e).__name__,str(e)
        else: failed = None
        res.append((event, failed, look(learn)==before, inside!=before))
    return res

def test_no_trace(found):
    "Nor does a failure of one rank, which reaches all"
    for res,kind,words in zip(found(traces, 2), ('RankError','KeyError'), ('rank 1 failed with KeyError: ','')):
        for event,failed,restored,changed in res:
            assert restored and changed, event
            if event=='after_fit': assert failed==('KeyError',"'here: after_fit'") # on both ranks: nobody waits any more
            elif event: assert failed[0]==kind and f"{words}'here: {event}'" in failed[1], failed
            else: assert failed is None

def detached(W, rank, path):
    learn = make(W, rank, model=bn)
    before = look(learn)
    learn.to_distributed(seed=3)
    try: learn.fit(1, cbs=Raise('after_loss', KeyError))
    except KeyError: pass
    plain_model = type(learn.model) is nn.Sequential and not any('Sync' in type(o).__name__ for o in learn.model.modules())
    with pytest.raises(ValueError, match='distributed already'): learn.to_distributed()
    with pytest.raises(ValueError, match='distributed already'), learn.distrib_ctx(): pass
    learn.detach_distributed()
    return plain_model,look(learn)==before,learn.detach_distributed() is learn

def test_to_and_from_distributed(found): assert found(detached, 2)==[(True,True,True)]*2

def test_options():
    learn = make()
    for bad in ('gradient_accumulation_steps','dataloader_config','bogus'):
        with pytest.raises(ValueError, match=bad), learn.distrib_ctx(**{bad: 2}): pass
    with learn.distrib_ctx(True, in_notebook=False): assert learn.runner.opts.sync_bn
    with learn.distrib_ctx(False): assert not learn.runner.opts.sync_bn
    assert type(learn) is Learner
    for f in (Learner.distrib_ctx,Learner.to_distributed): # what help() says, also in a script
        assert all(f'\n{o}: ' in f.__doc__ for o in ('seed','global_bs','max_bs','checks')) and "and DDP's" in f.__doc__

# --- outside of a context ---------------------------------------------------------------------------------------------------

def plain_run(path):
    "What a learner does without a context"
    random.seed(1)
    learn = make(path=path)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)
        return history(learn),learn.get_preds(),type(learn).__name__

def outside(W, rank, path):
    "With WORLD_SIZE and RANK set, first without a group, then with one"
    res = [plain_run(path/f'{rank}')]
    setup_distrib()
    res.append(plain_run(path/f'{rank}'))
    teardown_distrib()
    return res

@on_1_and_2
def test_outside_a_context_a_rank_is_one_process(Ws, found, tmp_path):
    want = plain_run(tmp_path)
    for W in {*Ws}-{1}:
        for got in found(outside, W): close(got, [want]*2, 0)
        shows('8 `fit` and `get_preds` with `WORLD_SIZE` and `RANK` set, with a group and without one', W, 0)

changed = {'fastai.torch_core.maybe_gather', *(f'fastai.callback.tracker.SaveModelCallback.{o}' for o in ('_save','after_fit')),
           'fastai.tabular.learner.TabularLearner.predict', 'fastai.text.learner.LMLearner.predict',
           *(f'fastai.text.learner.TextLearner.{o}' for o in ('load','load_encoder','save_encoder')),
           *(f'fastai.learner.Learner.{o}' for o in
             ('to_distributed','detach_distributed','distrib_ctx','to_parallel','detach_parallel','parallel_ctx','prepare_model','runner','start_at','_call_one',
              '__exit__','fit','_do_fit','_do_epoch','_do_grad_opt',
              'all_batches','say','save','load','compile','uncompile', # also for `fit(resume=)`
              'get_preds','lr_find','predict','show_results','summary','export','__getstate__'))} # as fastai's, but in a context

def ours(o): return (getattr(o, '__module__', None) or '').startswith('learnerdist.')

def planted():
    "Where in fastai's modules something of ours stands"
    for m in [o for k,o in sys.modules.items() if k.split('.')[0]=='fastai' and k!='fastai.distributed']:
        for k,v in vars(m).items():
            if ours(v): yield f'{m.__name__}.{k}'
            if isinstance(v, type) and v.__module__==m.__name__: yield from (f'{m.__name__}.{k}.{n}' for n,f in vars(v).items() if ours(f))

def test_the_import_changes_a_learners_distribution_and_one_function():
    assert {*planted()}==changed
    x = torch.ones(2)
    assert fastai.torch_core.maybe_gather(x) is x is fastais_gather(x) # without a launcher it does what fastai's does

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

def began_alone(W, rank, path):
    "Ranks that trained apart before go on with rank 0's weights and optimizer"
    learn = make(W, rank, opt=Adam, metrics=[])
    with learn.no_bar(), learn.no_logging():
        if rank==0: learn.fit(1)
        with learn.distrib_ctx(seed=3):
            learn.fit(1)
            return state(learn),[learn.opt.state[p]['sqr_avg'] for p in learn.model.parameters()]

def test_optimizer_state_is_rank_0s(found):
    close(*found(began_alone, 2), 0)

found = asking(own_loss, all_fits, began_alone, alone=(traces, detached, outside))
