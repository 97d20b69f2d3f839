"fastai's own signatures, subclasses, flags and warnings within the context: what a script may do without a context, it may do here"
import importlib, pytest
from fastai.collab import *
from fastai.tabular.all import *
from fastai.text.all import *
from harness import all_warnings
from test_fastai import asking, close, ctx, floats, items, make, on_1_and_2, per_rank, same, state
from test_fastai_apps import Words, texts
from learnerdist.fastai import *
from learnerdist.data.distributed_dl import set_epoch
from learnerdist.learner.loggers import CSVLogger, LogWriter

warnings.filterwarnings('ignore')

# --- learners ---------------------------------------------------------------------------------------------------------------

def loaders(ds, bs, W, valid=None):
    return DataLoaders.from_dsets(ds, valid or ds, bs=per_rank(bs, W), num_workers=0, device=torch.device('cpu'))

class Mine(Learner):
    "A subclass whose methods take something else"
    def get_preds(self, mine=1, **kw): return [mine, super().get_preds(**kw)]
    def save(self, name, mine=2): return super().save(f'{name}-{mine}')
    def load(self, name, mine=2): return super().load(f'{name}-{mine}')

def subclass(W, rank, path):
    learn = make(W, rank, metrics=[], path=path)
    learn.__class__ = Mine
    with ctx(learn, W):
        learn.fit(1)
        learn.save('a', 3)
        learn.load('a', 3)
        lrs = learn.lr_find(1e-6, 1., 4, False, False)
        by_position = Learner.get_preds(learn, 1, None, True, False, False, None, False, False)
        return learn.get_preds(5, ds_idx=1), by_position, floats(lrs)

def language_model(W, rank):
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    kw = dict(text_col='text', valid_col='is_valid', is_lm=True, seq_len=4, bs=per_rank(6, W), device='cpu', num_workers=0)
    tok = Tokenizer.from_df('text', tok=Words(), n_workers=1)
    with redirect_stdout(io.StringIO()): dls = TextDataLoaders.from_df(texts(), tok_tfm=tok, **kw)
    torch.manual_seed(0)
    config = dict(awd_lstm_lm_config, n_hid=12, emb_sz=8, n_layers=2)
    learn = language_model_learner(dls, AWD_LSTM, config=config, pretrained=False, metrics=[])
    dl = dls.train.new(bs=6, shuffle=False, drop_last=False) # predictions follow from this loader's own rows, at any number of ranks
    with ctx(learn, W):
        preds = learn.get_preds(dl=dl, reorder=False)
        torch.manual_seed(5) # what it predicts is drawn
        return preds, learn.predict("abc", 3, no_bar=True, no_unk=False), len(dls.train)

def empty_parameters(W, rank):
    "Tables without continuous columns have a `BatchNorm1d(0)`"
    torch.set_default_dtype(torch.float32)
    res,g = {},np.random.RandomState(0)
    df = pd.DataFrame(dict(a=g.randint(0, 4, 80).astype(str), b=g.randint(0, 3, 80).astype(str), y=g.rand(80).astype('float32')))
    kw = dict(bs=per_rank(12, W), device='cpu', num_workers=0)
    tab = TabularDataLoaders.from_df(df, procs=[Categorify], cat_names=['a','b'], y_names='y', valid_idx=[*range(60, 80)], **kw)
    named = dict(user_name='a', item_name='b', rating_name='y')
    col = CollabDataLoaders.from_df(df, valid_pct=.25, seed=1, bs=per_rank(12, W), device='cpu', **named)
    for name,func in dict(tab=lambda: tabular_learner(tab, layers=[6]), col=lambda: collab_learner(col, use_nn=True, layers=[6])).items():
        torch.manual_seed(1+rank if W else 1)
        learn = func()
        learn.opt_func,before = SGD,{*vars(learn.model)}
        with ctx(learn, W):
            learn.fit(2, .1)
            res[name] = floats(learn.validate()),any(not p.numel() for p in learn.model.parameters())
        assert before=={*vars(learn.model)}
    return res

class SetsLoaders(Callback):
    def __init__(self, dls): self.new = dls
    def before_epoch(self):
        if self.epoch!=1: return
        self.learn.dls = self.new
        set_epoch(self.new.train, 1) # without a context

def other_loaders(W, rank):
    "`learn.dls = …` in the context, by the script and by a callback; without a context, the new loaders are dealt by hand"
    res = []
    for by_callback in (False,True):
        learn,new = make(W, rank, metrics=[]),loaders(items(50, 5), 24, W, items(19, 6))
        if not W: new.loaders = [DistributedDL.from_dl(new.train, 0, 1, seed=3),new.valid]
        with ctx(learn, W):
            learn.fit(2 if by_callback else 1, cbs=SetsLoaders(new) if by_callback else None)
            learn.dls = new
            learn.fit(1)
            res += [state(learn), [floats(o) for o in learn.recorder.values], learn.get_preds(), len(learn.dls.train)]
    return res

def paths(W, rank, path):
    "Each rank has a folder of its own; the tracker reads rank 0's"
    learn = make(W, rank, metrics=[], path=path/f'own-{W}-{rank}')
    with all_warnings() as ws:
        with ctx(learn, W): learn.fit(2, cbs=SaveModelCallback())
    assert any('[different-path]' in str(o.message) for o in ws)==(W>1 and rank==0) and learn.path.name==f'own-{W}-{rank}'
    return state(learn)

def applications(W, rank, path): return dict(subclass=subclass(W, rank, path/f'own/{W}'),
    lm=language_model(W, rank), empty=empty_parameters(W, rank), dls=other_loaders(W, rank), paths=paths(W, rank, path))

lines = dict(subclass=('3 a subclass of `Learner` with arguments of its own', 1e-6),
    lm=('7 `LMLearner.get_preds`, `LMLearner.predict` (float32)', 1e-5),
    empty=('7 `tabular_learner` without continuous columns, `collab_learner(use_nn=True)` (float32)', 1e-5),
    dls=('4 `learn.dls = …` in the context, by the script and by a callback', 1e-6),
    paths=('3 a `learn.path` of each rank\'s own, `SaveModelCallback`', 1e-6))

@pytest.mark.slow
@on_1_and_2
def test_applications(Ws, slow):
    want = same(applications, found=slow, W=Ws, lines=lines)
    assert want['lm'][2]==3 and want['empty']['tab'][1]

def messages(func):
    "The warnings of `func()` that are fastai's of a shadowed name"
    with all_warnings() as ws:
        func()
    return [str(o.message) for o in ws if 'shadowing' in str(o.message)]

def a_fit(W, rank):
    learn = make(W, rank, metrics=[])
    with ctx(learn, W): learn.fit(2)

def shadowed(W, rank, path):
    "A later import of `fastai.distributed` changes nothing"
    importlib.import_module('fastai.distributed')
    assert Learner.distrib_ctx.__module__=='learnerdist.fastai.learner'
    return messages(lambda: a_fit(W, rank))

def test_a_fit_warns_of_no_shadowed_name(found):
    pytest.importorskip('accelerate')
    assert found(shadowed, 2)==[[]]*2

# --- fastai.distributed's signatures ----------------------------------------------------------------------------------------

def as_lists(batches): return [[o.tolist() for o in (b if isinstance(b, (tuple,list)) else (b,))] for b in batches]

def test_a_loader_a_data_set_and_options():
    "`DistributedDL(dl, rank, world_size)`, as in fastai's notebook 20a; without a launcher, all of a loader"
    assert as_lists(DistributedDL(list(range(5)), 1, 2, bs=2))==[[[1,3]],[[0]]]
    dl = TfmdDL(list(range(5)), bs=2, num_workers=0)
    assert as_lists(DistributedDL(dl))==as_lists(dl) and as_lists(DistributedDL(dl, 1, 2, bs=1))==[[[1]],[[3]],[[0]]]
    assert DistributedDL(dl, 0, 2, device='meta').device.type=='meta' and dl.device is None
    assert len(DistributedDL(dl, 1, 2, pad=False))==1 and DistributedDL(dl, 0, 2, seed=5).seed==5
    learn = make()
    with learn.distrib_ctx(False, True): assert not learn.runner.opts.sync_bn
    assert DistributedTrainer(False).engine.opts.sync_bn is False and setup_distrib(gpu=None).type=='cpu'

def by_hand(W, rank, path):
    "A loader that the script has split is left alone in training; what is evaluated is dealt in whole batches"
    learn = make(W, rank)
    if W: learn.dls.loaders = [DistributedDL.from_dl(o, rank, W, seed=3) for o in learn.dls.loaders]
    with ctx(learn, W):
        learn.fit(2)
        return state(learn),[floats(o) for o in learn.recorder.values],learn.get_preds()

@on_1_and_2
def test_loaders_by_hand(Ws, found): same(by_hand, found=found, W=Ws, tol=1e-6)

# --- flags of `fit`, logs, memory -------------------------------------------------------------------------------------------

class Rows(LogWriter):
    def open(self): self.rows = []
    def log_epoch(self, row): self.rows.append({k:float(v) for k,v in row.items()})
    def close(self): self.closed = True

class Full(nn.Module):
    "Has no room for a batch, on the last rank"
    def __init__(self, fails):
        super().__init__()
        self.lin,self.fails = nn.Linear(8, 3),fails
    def forward(self, x):
        if self.fails: raise torch.OutOfMemoryError('CUDA out of memory.')
        return self.lin(x)

class Types(Callback):
    "What the layers compute in"
    def before_fit(self):
        self.seen = set()
        self.learn.model[0].register_forward_hook(lambda m, x, out: self.seen.add(out.dtype))

def flags(W, rank, path):
    folder = path/f'flags/{W}/{rank}'
    folder.mkdir(parents=True, exist_ok=True)
    learn,types,rows = make(dtype=torch.float32, metrics=[], path=folder),Types(),Rows()
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, amp='bf16', ddp=dict(seed=3, split_batches=True), cbs=[types,rows,CSVLogger()])
        trained,n,in_amp = state(learn),len(learn.cbs),types.seen
        learn.fit(1, amp=False, ddp=None, cbs=types)
        with pytest.raises(ValueError, match='leave out one'): learn.to_bf16().fit(1, amp=True)
        broken = make(dtype=torch.float32, metrics=[], model=lambda: Full(rank in (0, W-1)))
        try: broken.fit(1, ddp=True)
        except Exception as e: err = str(e)
    csv = folder/'history.csv'
    text,closed = csv.exists() and csv.read_text(),getattr(rows, 'closed', False)
    return trained,(in_amp,types.seen),getattr(rows, 'rows', None),closed,text,err,n,type(learn).__name__

@on_1_and_2
def test_flags(Ws, found):
    want, = found(flags, 0)
    assert want[1]==({torch.bfloat16},{torch.float32}) and [*want[2][0]]==['epoch','train_loss','valid_loss']
    assert want[3] and len(want[4].splitlines())==3
    for W,rank,got in [(w,*o) for w in Ws for o in enumerate(found(flags, w))]:
        close(got[0], want[0], 2e-2) # bfloat16 sums of half batches
        assert got[1]==want[1] and got[6]==want[6] and got[7]=='Learner'
        assert (got[2] is not None, got[3], bool(got[4]))==(rank==0,)*3
        if rank==0: close(got[2], want[2], 2e-2)
        assert 'with a batch of 24 samples' in got[5] and (W==1 or 'Take a smaller batch size' in got[5])
    assert 'with a batch of 24 samples. Take' in want[5]

def generator(): return nn.Sequential(nn.Linear(8, 12), nn.Unflatten(1, (3,2,2)))
def critic(): return nn.Sequential(nn.Flatten(), nn.Linear(12, 1), nn.Flatten(0))
def gen_loss(fake, out, target): return ((out-target)**2).mean()-fake.mean()
def crit_loss(real, fake): return (fake-real).mean()

def size_of(out, *_): return out.abs().mean()

def gan(W, rank, path, n=48, switcher=None, **opts):
    "Its trainer calls `learn.model.switch`, and keeps what it needs on the model"
    from fastai.vision.gan import FixedGANSwitcher, GANLearner
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(1+rank if W else 1)
    g = torch.Generator().manual_seed(0)
    ds = list(zip(torch.randn(n, 8, generator=g), torch.randn(n, 3, 2, 2, generator=g)))
    kw = dict(switcher=switcher or FixedGANSwitcher(1, 1), opt_func=SGD, lr=.01, gen_first=False)
    learn = GANLearner(loaders(ds, 12, W, ds[:12]), generator(), critic(), gen_loss, crit_loss, metrics=size_of, **kw)
    learn.recorder.train_metrics = n!=48
    with ctx(learn, W, **(opts|dict(find_unused_parameters=True) if W else {})):
        learn.fit(2)
        return state(learn) | dict(values=[floats(o) for o in learn.recorder.values])

def uneven_gan(W, rank, path): return gan(W, rank, path, 45)

def adaptive_gan(W, rank, path):
    "It switches by the loss of a step"
    from fastai.vision.gan import AdaptiveGANSwitcher
    return gan(W, rank, path, switcher=AdaptiveGANSwitcher(gen_thresh=1.72, critic_thresh=0.))

def gan_of_parts(W, rank, path):
    "Switchers count steps, and not their parts"
    from fastai.vision.gan import AdaptiveGANSwitcher, FixedGANSwitcher
    switchers = FixedGANSwitcher(1, 2),AdaptiveGANSwitcher(gen_thresh=1.72, critic_thresh=0.)
    res = [gan(W, rank, path, switcher=o, global_bs=12, max_bs=3) for o in switchers]
    for o in res: o.pop('values') # the critic's loss in evaluation is that of a rank's last batch
    return res

@on_1_and_2
def test_gan(Ws, found):
    same(gan, found=found, W=Ws, tol=1e-5, lines=['7 `GANLearner` (float32)'])
    same(uneven_gan, found=found, W=Ws[-1:], tol=1e-5) # with metrics of training
    same(adaptive_gan, found=found, W=Ws, tol=1e-5)

def test_a_gan_to_the_bit(found):
    want, = found(gan_of_parts, 1)
    for o in found(gan_of_parts, 2): close(o, want, 0)

slow,found = asking(applications),asking(gan, uneven_gan, adaptive_gan, gan_of_parts, shadowed, by_hand, alone=(flags,))
