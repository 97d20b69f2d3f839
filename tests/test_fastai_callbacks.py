"fastai's callbacks on several ranks: decisions, files, accumulation, the finder of learning rates"
import contextlib, pytest
from fastai.basics import *
from fastai.callback.all import *
from test_fastai import F64, asking, close, ctx, data, floats, history, make, on_1_and_2, per_rank, same, state
from learnerdist.core.env import current_group, group_rank, group_size
from learnerdist.fastai import *
from helpers import Raise
from fastai_lines import shows

warnings.filterwarnings('ignore')
cancels = dict(fit=CancelFitException, epoch=CancelEpochException, train=CancelTrainException, validate=CancelValidException,
               batch=CancelBatchException, step=CancelStepException, backward=CancelBackwardException)

@contextlib.contextmanager
def quiet(learn):
    with learn.no_bar(), learn.no_logging(), contextlib.redirect_stdout(io.StringIO()): yield learn

class Cancels(Callback):
    "The last rank asks to leave, at one place of the second epoch; in a batch of the first, so that another one follows, but for the fit"
    order = 0
    def __init__(self, scope, event): self.scope,self.event = scope,event
    def __call__(self, event):
        if event==self.event and group_rank()==group_size()-1 and self.here(): raise cancels[self.scope]
    def here(self):
        inner = self.event in ('after_batch','before_batch','after_pred','before_backward','before_step')
        if self.learn.epoch!=(self.scope=='fit' or not inner): return False
        return not inner or self.learn.iter==1 and self.learn.training==(self.scope!='validate')

class Steps(Callback):
    order = -2001
    def before_fit(self): self.learn.trail = []
    def before_batch(self): self.learn.trail.append((self.learn.epoch, self.learn.iter, self.learn.training))

places = [('fit','after_batch'), ('fit','after_epoch'), ('epoch','after_train'), ('train','after_batch'), ('validate','after_batch'),
          ('fit','before_batch'), ('batch','after_pred'), ('batch','before_batch'), ('step','before_step'), ('backward','before_backward'),
          ('fit','before_epoch'), ('epoch','before_train'), ('validate','before_validate'), ('train','before_train'),
          ('fit','after_validate'), ('epoch','before_epoch')]

def votes(W, rank, path):
    res = []
    for scope,event in places:
        learn = make(W, rank, cbs=Steps, n=72, n_valid=48, metrics=[])
        with ctx(learn, W): learn.fit(3 if scope=='epoch' else 2, cbs=Cancels(scope, event))
        res.append((list(learn.trail), floats(learn.recorder.losses), len(learn.recorder.values), state(learn)))
    return res

@pytest.mark.slow
@on_1_and_2
def test_a_cancel_on_one_rank_is_a_cancel_on_all(Ws, slow):
    want, = slow(votes, 0)
    for W in Ws:
        for place,alone,*got in zip(places, want, *slow(votes, W)):
            assert all(o[:2]==got[0][:2] for o in got), place
            for o in got: close(o[3], got[0][3], 0, place)
            assert got[0][0]==alone[0] and got[0][2]==alone[2], place
            others_count = place[0] in ('batch','step','backward') or place[1]=='before_batch' # in this step
            if W==1 or not others_count: close(got[0][3], alone[3], 1e-9 if W>1 else 0, at=place)
        shows('6 a Cancel exception on one rank', W, 0 if W==1 else 'all ranks leave at the same step, with the same bits; weights 1e-09, '
              'but for what a cancelled batch, step or backward pass of one rank leaves of the step to the others')

# --- one callback or several, a fit -----------------------------------------------------------------------------------------

def fitted(W, rank, cbs, n=2, lr=None, **kw):
    learn = make(W, rank, **dict(n=48, n_valid=24)|kw)
    with ctx(learn, W):
        learn.fit(n, lr, cbs=cbs)
        return history(learn)

def saver(**kw):
    def run(W, rank, path):
        name = f'{"_".join(kw) or "best"}{W}'
        learn = make(W, rank, path=path, n_valid=40)
        with ctx(learn, W):
            learn.fit(3, lr=.5, cbs=SaveModelCallback(fname=name, **kw))
            res = history(learn)
            if 'every_epoch' in kw:
                learn.load(f'{name}_1')
                res['loaded'] = state(learn)
        return res
    return run

def fetched(W, rank, path):
    cb = FetchPredsCallback()
    return fitted(W, rank, cb),cb.preds

def gathered(W, rank, path):
    learn,cb = make(W, rank),GatherPredsCallback(with_input=True)
    with ctx(learn, W):
        return floats(learn.validate(cbs=cb)),cb.inputs,cb.preds,cb.targets

class NaNs(Callback):
    "A loss that is no number, on the last rank"
    order = -10
    def after_loss(self):
        if self.training and self.epoch==1 and self.iter==2 and group_rank()==group_size()-1: self.learn.loss = self.learn.loss*float('nan')

def nans(W, rank, path):
    learn = make(W, rank, cbs=Steps)
    with ctx(learn, W): learn.fit(3, cbs=[NaNs(),TerminateOnNaNCallback()])
    res = history(learn)
    if W>1: # one rank has cancelled, so all complete the batch, and record its loss
        assert len(res['losses'])==7 and math.isnan(res['losses'][6])
        res['losses'],res['lrs'] = res['losses'][:6],res['lrs'][:6]
    return res,[o for o in learn.trail if o[2]] # in training: of the validation loader, ranks have different numbers of batches

def conv(): return nn.Sequential(nn.Unflatten(1, (2,2,2)), nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))

class ProbeCallback(Callback):
    "As TensorBoardCallback(log_preds=True) does: one batch, on rank 0 alone"
    order = 51
    def after_epoch(self):
        if group_rank(): return
        self.learn.one_batch(0, self.dls.valid.one_batch())

class F32Loss:
    "fastai's Recorder takes float32 only"
    def forward(self, *args): return super().forward(*args).float()
class Smoothed(F32Loss, LabelSmoothingCrossEntropy): pass
class SmoothedFlat(LabelSmoothingCrossEntropyFlat):
    def __call__(self, *args, **kw): return super().__call__(*args, **kw).float()

def smooths(W, rank, path):
    res = []
    for loss in (Smoothed(), SmoothedFlat(eps=.2)):
        learn = make(W, rank, loss=loss)
        with ctx(learn, W):
            learn.fit(2)
            res.append((history(learn), learn.get_preds(with_loss=True, with_decoded=True)))
    return res

class Recurrent(nn.Module):
    "As AWD-LSTM: returns what was before and after dropout too"
    def __init__(self):
        super().__init__()
        self.rnn,self.out,self.h = nn.GRU(1, 6, batch_first=True),nn.Linear(6, 3),None
    def reset(self): self.h = None
    def forward(self, x):
        y,h = self.rnn(x[...,None], self.h)
        self.h = h.detach() if self.training else None
        return self.out(y[:,-1]),y,y*.5

def recurs(W, rank, path):
    learn = make(W, rank, model=Recurrent, n_valid=24, cbs=rnn_cbs(alpha=2, beta=1), drop_last=True)
    with ctx(learn, W):
        learn.fit(2)
        return history(learn)

class Halves(Callback):
    "An inner model in half the precision, to see that autocast was on"
    def after_pred(self): self.learn.kinds = {*getattr(self.learn, 'kinds', ()), str(self.learn.pred.dtype)}

def precise(W, rank, path):
    res = []
    for prepare in ('to_fp16','to_bf16','to_fp32'):
        learn = make(W, rank, dtype=torch.float32, cbs=Halves)
        getattr(learn, prepare)()
        with ctx(learn, W):
            learn.fit(1)
            res.append((history(learn), sorted(learn.kinds)))
    return res

cases = { # line: function, tolerance
    '`EarlyStoppingCallback`': (lambda W, r, p: fitted(W, r, EarlyStoppingCallback(patience=1, min_delta=.4), 3, lr=.5), 1e-6),
    '`EarlyStoppingCallback` by a metric': (lambda W, r, p: fitted(W, r, EarlyStoppingCallback('accuracy', patience=1), 3, lr=.5), 1e-6),
    '`ReduceLROnPlateau`': (lambda W, r, p: fitted(W, r, ReduceLROnPlateau(patience=1, min_delta=.2), 3, lr=.5), 1e-6),
    '`SaveModelCallback`, the best reloaded': (saver(), 1e-6),
    '`SaveModelCallback(every_epoch=True, with_opt=True)`': (saver(every_epoch=True, with_opt=True), 1e-6),
    '`SaveModelCallback(at_end=True)`': (saver(at_end=True), 1e-6),
    '`TerminateOnNaNCallback`, on one rank': (nans, 1e-6),
    '`SkipToEpoch`': (lambda W, r, p: fitted(W, r, SkipToEpoch(1)), 1e-6),
    '`ShortEpochCallback`': (lambda W, r, p: fitted(W, r, ShortEpochCallback(.5)), 1e-6),
    '`GradientClip`': (lambda W, r, p: fitted(W, r, GradientClip(.1)), 1e-6),
    '`ChannelsLast`': (lambda W, r, p: fitted(W, r, ChannelsLast, model=conv), 1e-6),
    '`MixedPrecision`, `to_fp16`, `to_bf16`, `to_fp32` (float32; fastai turns autocast off on the CPU)': (precise, 1e-5),
    '`FetchPredsCallback`': (fetched, 1e-6),
    '`GatherPredsCallback`': (gathered, 1e-6),
    '`LabelSmoothingCrossEntropy`, `LabelSmoothingCrossEntropyFlat`': (smooths, 1e-6),
    '`ModelResetter`, `RNNCallback`, `RNNRegularizer`': (recurs, 1e-6),
    'a batch that a callback runs on rank 0 alone': (lambda W, r, p: fitted(W, r, ProbeCallback), 1e-6)}

def all_cases(W, rank, path): return {k: f(W, rank, path) for k,(f,_) in cases.items()}

@pytest.mark.slow
@on_1_and_2
def test_callbacks(Ws, slow):
    want = same(all_cases, found=slow, W=Ws, lines={k: (f'6 {k}', tol) for k,(_,tol) in cases.items()})
    assert len(want['`EarlyStoppingCallback`']['values'])==2 and want['`ReduceLROnPlateau`']['lrs'][-1]<.5
    assert want['`TerminateOnNaNCallback`, on one rank'][1][-1]==(1, 2, True)
    names = [o for W in (0,*Ws) for o in (f'best{W}', f'at_end{W}', *[f'every_epoch_with_opt{W}_{i}' for i in range(3)])]
    assert {o.stem for o in (slow.path/'models').iterdir()}>={*names}

# --- callbacks that draw, or keep what they see -----------------------------------------------------------------------------

def mixes(W, rank, path):
    "In two runs"
    res = []
    for cb in (MixUp(.4), CutMix(), MixUp(.4), CutMix()):
        learn = make(W, rank, n=101, model=nn.Sequential, drop_last=False, dtype=torch.float32, loss=CrossEntropyLossFlat(), metrics=[])
        learn.model = conv()[1:]
        learn.dls = image_dls(W)
        with ctx(learn, W):
            learn.fit(1, cbs=cb)
            first,again = floats(learn.validate()),floats(learn.validate())
            res.append((history(learn), first==again))
    return res

def image_dls(W):
    from fastai.data.core import DataLoaders
    x,y = data(101)
    ds = list(zip(x.float().view(-1, 2, 2, 2), y))
    return DataLoaders.from_dsets(ds, ds[:37], bs=per_rank(24, W), num_workers=0, device='cpu')

@on_1_and_2
def test_mixing_draws_on_each_rank_and_trains_one_model(Ws, found):
    for W in Ws:
        first,*others = found(mixes, W)
        for o in others: close(o, first, 0)
        close(first[2:], first[:2], 0)
        assert all(o[1] for o in first)
        for o in ('MixUp','CutMix'):
            shows(f'6 `{o}`', W, 'each rank draws its own mixtures; the same bits on all ranks, and in a second run' if W>1 else
                  'other draws than without a context; the same in a second run')

def collects(W, rank, path):
    learn,stats,kept = make(W, rank, n=96, metrics=[]),ActivationStats(with_hist=False),CollectDataCallback()
    with ctx(learn, W): learn.fit(1, cbs=[stats,kept])
    means = [[float(layer['mean']) for layer in o] for o in stats.stats]
    return torch.tensor(means, dtype=F64),[o[0][0] for o in kept.data[:4]],len(kept.data)

@on_1_and_2
def test_what_callbacks_keep_is_this_ranks(Ws, found):
    want, = found(collects, 0)
    for W in Ws:
        got = found(collects, W)
        close(torch.stack([o[0] for o in got]).mean(0), want[0], 1e-7 if W>1 else 0)
        for i,x in enumerate(want[1]): close(torch.stack([o[1][i] for o in got], 1).flatten(0, 1), x, 1e-9 if W>1 else 0)
        shows('6 `ActivationStats`', W, 0 if W==1 else "this rank's; their mean over ranks is one process's, 1e-07")
        shows('6 `CollectDataCallback`', W, 0 if W==1 else "this rank's rows: every W-th of what one process collects")

# --- files and output -------------------------------------------------------------------------------------------------------

def logs(W, rank, path):
    out = io.StringIO()
    folder = path/'logs'/str(W)
    folder.mkdir(parents=True, exist_ok=True)
    learn = make(W, rank, path=folder)
    with contextlib.redirect_stdout(out), learn.distrib_ctx(seed=3):
        learn.fit(2, cbs=[CSVLogger(), ShowGraphCallback()])
        learn.fit(1, cbs=CSVLogger(append=True))
        learn.get_preds()
        learn.validate()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings(record=True) as warned, learn.distrib_ctx(seed=3), learn.no_logging():
        warnings.simplefilter('always')
        trackers = [o(min_delta=9, patience=1) for o in (EarlyStoppingCallback, ReduceLROnPlateau)]
        learn.fit(2, cbs=[SaveModelCallback(),*trackers])
        learn.load('model', with_opt=True)
    said = said.getvalue().splitlines()+[str(o.message) for o in warned if 'an optimizer' in str(o.message)]
    return [o.split()[:-1] for o in out.getvalue().splitlines()],hasattr(learn, 'progress'),said

@on_1_and_2
def test_one_writer_and_only_the_table_in_a_pipe(Ws, found):
    (one,_,said), = found(logs, 1)
    for o in ('Better model found', 'No improvement', 'reducing lr', "doesn't contain an optimizer"): assert any(o in line for line in said)
    header = ['epoch','train_loss','valid_loss','accuracy']
    assert [o[0] for o in one]==['epoch','0','1','epoch','0'] and one[0]==one[3]==header
    read = lambda W: [[v for v in o.split(',')[:4]] for o in (found.path/f'logs/{W}/history.csv').read_text().splitlines()]
    for W in Ws:
        (first,has_bar,more),*others = found(logs, W) if W>1 else [(one,True,said)]
        assert others==[([],True,[])]*(W-1) and has_bar and len(first)==5 and len(more)==len(said)
        for a,b in zip(first+read(W), one+read(1)):
            if a!=header: close([float(v) for v in a], [float(v) for v in b], 2e-6)
            else: assert b==header
        shows('6 `CSVLogger`', W, '2e-06; one writer')
        shows('6 `ProgressCallback`, `ShowGraphCallback` in a pipe or a log file', W, "2e-06; the table's lines, from rank 0, and no bar")

def x_of(i): return data(64)[0][i]
def y_of(i): return data(64)[1][i]

def dsets_dls(W):
    dsets = Datasets(range(64), [[x_of],[y_of]], splits=[range(48), range(48, 64)])
    return dsets.dataloaders(bs=per_rank(24, W), num_workers=0, device='cpu')

class FakeWandb(types.ModuleType):
    "Keeps what is logged"
    def __init__(self): super().__init__('wandb'); self.logged,self.config,self.run = [],{},types.SimpleNamespace(step=0, summary={})
    def log(self, what, step=None): self.logged.append(sorted(what))

def wandb(W, rank, path):
    sys.modules['wandb'] = fake = FakeWandb()
    try:
        import fastai.callback.wandb as mod
        mod._format_config = lambda config: None # fails on lists of numbers, with fastcore 2.2 and without us
        learn = make(W, rank, path=path/f'wandb/{W}')
        learn.dls = dsets_dls(W)
        with ctx(learn, W): learn.fit(2, cbs=mod.WandbCallback(log=None, n_preds=5))
        left = [cb for cb in learn.cbs if isinstance(cb, FetchPredsCallback)]
    finally: sys.modules.pop('wandb'), sys.modules.pop('fastai.callback.wandb', None)
    return history(learn),fake.logged,left

@on_1_and_2
def test_wandb_on_rank_0(Ws, found):
    "It predicts some samples on rank 0 alone, at the end of each epoch"
    want, = found(wandb, 0)
    assert ['epoch'] in want[1] and ['accuracy','valid_loss'] in want[1]
    for W in Ws:
        for r,got in enumerate(found(wandb, W)):
            close(got[0], want[0], 1e-6 if W>1 else 0)
            assert got[1]==(want[1] if r==0 else []) and not got[2]
        shows('6 `WandbCallback`, with a stand-in for wandb', W, 0 if W==1 else '1e-06; from rank 0, which predicts its samples alone')

def saves(W, rank, path):
    learn = make(W, rank, opt=Adam, path=path/f'saves/{W}', metrics=[])
    learn.dls = dsets_dls(W)
    with ctx(learn, W):
        n_cbs = len(learn.cbs)
        learn.fit(1)
        learn.save('a')
        learn.save('b', with_opt=False)
        before = state(learn)
        learn.fit(1)
        if group_rank()==0: learn.save('rank0')
        second = state(learn)
        learn.load('a')
        loaded = state(learn)
        learn.fit(1)
        if group_rank()==max(W, 1)-1: learn.load('rank0') # on one rank only
        else: learn.load('a')
        last = state(learn)
        learn.load('b', with_opt=False)
        learn.export('whole.pkl')
        kept = len(learn.cbs)==n_cbs
        learn.load('a') # on all ranks alike
        learn.fit(1)
    return before,loaded,last if group_rank()==max(W, 1)-1 else second,second,kept

@on_1_and_2
def test_files(Ws, found):
    "Saved on all ranks or on one, loaded on all or on one"
    want = found(saves, 0)[0][0]
    for W in Ws:
        for first,loaded,last,second,kept in found(saves, W):
            close(loaded, first, 0)
            close(last, second, 0)
            close(first, want, 1e-9 if W>1 else 0)
            assert kept
        shows('3 `save`, `load`, with the optimizer and without', W, 0 if W==1 else 1e-9)
        folder = found.path/f'saves/{W}'
        assert sorted(o.name for o in folder.iterdir())==['models','whole.pkl']
        learn = load_learner(folder/'whole.pkl')
        assert type(learn).__name__=='Learner' and not any('istributed' in k for k in vars(learn))
        close(learn.model.state_dict(), want, 1e-9 if W>1 else 0)
        shows('3 `export`, `load_learner`', W, 0 if W==1 else 1e-9)

# --- the finder of learning rates -------------------------------------------------------------------------------------------

def finds(W, rank, path):
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    random.seed(rank)
    folder = path/'finds'/str(W)
    folder.mkdir(parents=True, exist_ok=True)
    learn = make(W, rank, opt=Adam, path=folder)
    plt.close('all')
    with ctx(learn, W):
        learn.fit(1)
        before,opt = state(learn),[deepcopy(learn.opt.state[p]) for p in learn.model.parameters()]
        found = [learn.lr_find(num_it=24, end_lr=e, show_plot=e==10)[0] for e in (10,1e4)]
        lrs,losses = floats(learn.recorder.lrs),floats(learn.recorder.losses)
        close(state(learn), before, 0)
        after = [learn.opt.state[p] for p in learn.model.parameters()]
        for a,b in zip(after, opt): close({k:a[k] for k in b}, b, 0)
        plots = len(plt.get_fignums())==(group_rank()==0)
        plt.close('all')
        if W: learn.fit(1)
    return found,lrs,losses,len(losses),plots,state(learn) if W else None

@on_1_and_2
def test_lr_find(Ws, found):
    want, = found(finds, 0)
    one, = found(finds, 1)
    assert want[3]<24 # it stopped where the loss went up
    close(one[:5], want[:5], 0)
    for W in Ws:
        for got in found(finds, W) if W>1 else []: close(got, one, 1e-5)
        shows('3 `lr_find`, its plot', W, 0 if W==1 else 'suggestions 1e-05, on every rank; weights and optimizer as before, '
              'bit by bit; no file left; one plot, from rank 0')
    assert [o.name for W in (0,1,*Ws) for o in (found.path/f'finds/{W}').rglob('*')]==['models']*(len(Ws)+2)

Raises = partial(Raise, order=-5) # before the Recorder

def find_fails(W, rank, path):
    res = []
    for what in (CancelFitException(), KeyError('here')):
        learn = make(W, rank, path=path/'fails', cbs=Raises('after_batch', what, 1, 2))
        start = state(learn) if rank==0 else None
        try:
            with quiet(learn), learn.distrib_ctx(seed=3): learn.lr_find(num_it=20, show_plot=False, suggest_funcs=None)
        except (KeyError,RuntimeError) as e: how = type(e).__name__
        else: how = 'ended'
        res.append((how, state(learn), start))
    learn = make(W, rank, path=path/'fails', cbs=Raises('before_step', CancelStepException, 1, 2)) # the others add up losses meanwhile
    with quiet(learn), learn.distrib_ctx(seed=3, timeout_s=20): found = learn.lr_find(num_it=20, show_plot=False)
    res.append((len(learn.recorder.losses), found[0], None))
    return res

def test_lr_find_leaves_nothing_when_it_ends_early(found):
    ranks = found(find_fails, 2)
    assert [[o[0] for o in r] for r in ranks]==[['ended','RankError',20],['ended','KeyError',20]]
    assert ranks[0][2]==ranks[1][2]
    for r in ranks:
        for got,first in zip(r[:2], ranks[0]): close(got[1], first[2], 0)
    assert [o.name for o in (found.path/'fails').rglob('*')]==['models']

def ends_early(W, rank, path):
    learn = make(W, rank, n_valid=5, drop_last=False) # a batch for rank 0, and none for rank 1
    with quiet(learn), learn.distrib_ctx(seed=3):
        learn.fit(1, cbs=Raises('before_fit', CancelFitException))
        targs = [learn.get_preds(0, reorder=o)[1] for o in (False,True)]
    try:
        with quiet(learn), learn.distrib_ctx(seed=3): learn.get_preds(cbs=Raises('after_pred', KeyError('here'), 0))
    except (KeyError,RuntimeError) as e: how = type(e).__name__
    return how,targs

def test_a_failure_of_one_rank_in_get_preds_ends_all(found):
    "fastai sends `after_epoch` then too, where this rank voted, while the other one gathered predictions: neither ended"
    assert [o[0] for o in found(ends_early, 2)]==['KeyError','RankError']

def test_predictions_of_training_data_without_reorder_are_not_shuffled(found):
    for _,(given,ordered) in found(ends_early, 2): assert torch.equal(given, ordered)

class Reduces(Callback):
    "Counts the all-reduces of gradients"
    def before_fit(self): self.learn.n_reduced = 0
    def before_train(self):
        if self.learn.runner.loop.model is not None: self.learn.wrapper.ddp.register_comm_hook(self.learn, counted)

def counted(learn, bucket):
    learn.n_reduced += 1
    work = torch.distributed.all_reduce(bucket.buffer().div_(group_size()), group=current_group(), async_op=True)
    return work.get_future().then(lambda f: f.value()[0])

def accumulates(W, rank, path):
    res = {}
    for n_acc,bs in [(48,24),(24,24),(0,48)]:
        learn = make(W, rank, bs=bs, n=144, n_valid=40)
        cbs = ([GradientAccumulation(n_acc)] if n_acc else []) + ([Reduces()] if W>1 else [])
        with ctx(learn, W): learn.fit(1, cbs=cbs)
        res[n_acc] = state(learn),getattr(learn, 'n_reduced', None)
    return res

@on_1_and_2
def test_accumulation_reduces_once_a_step(Ws, found):
    want, = found(accumulates, 0)
    for W in Ws:
        for got in found(accumulates, W):
            for k in want: close(got[k][0], want[k][0], 1e-9 if W>1 else 0)
            close(got[48][0], got[0][0]) # as without accumulation
            assert W==1 or [got[k][1] for k in (48,24,0)]==[6,6,3] # the loss is a function of the user
        shows('6 `GradientAccumulation`', W, 0 if W==1 else 'weights 1e-09, those of the whole batch too')

def of_elements(out, y): return nn.functional.mse_loss(out, nn.functional.one_hot(y, 3).to(out)).float()
def a_sum(out, y): return .05*nn.functional.cross_entropy(out, y, reduction='sum').float()

def goes_on(W, rank, path):
    "Three batches of 16 an epoch, and a step every two: the second epoch begins with a gradient that the first one has left"
    res = []
    for n_acc,loss in ((32,None), (24,of_elements), (24,a_sum)): # 24: fastai divides the sum over 32 samples by it
        learn = make(W, rank, bs=16, n=48, metrics=[], loss=loss, cbs=GradientAccumulation(n_acc))
        with ctx(learn, W):
            learn.fit(2)
            res.append(history(learn))
    return res

def test_accumulation_goes_on_in_the_next_epoch(found):
    want, = found(goes_on, 1)
    for got in found(goes_on, 2): close(got, want, 1e-6)

slow,found = asking(votes, all_cases),asking(mixes, collects, logs, wandb, saves, finds, accumulates, goes_on, find_fails, ends_early)
