"fastai's callbacks on several ranks: decisions, files, accumulation, the finder of learning rates"
import contextlib, copy, io, random, warnings
import pytest
pytest.importorskip('fastai')
import torch
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger, ShowGraphCallback
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.data import CollectDataCallback
from fastai.callback.core import FetchPredsCallback
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.hook import ActivationStats
from fastai.callback.mixup import MixUp
from fastai.callback.training import GradientAccumulation, GradientClip, ShortEpochCallback
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback, TerminateOnNaNCallback
from fastai.data.core import Datasets
from fastai.learner import (CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException, CancelStepException,
                            CancelTrainException, CancelValidException, load_learner)
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam
from test_fastai import accuracy, close, data, floats, history, make, on_ranks, same, state
from learnerdist.env import group_rank
from learnerdist.fastai import *
from learnerdist.testing import run_ranks

warnings.filterwarnings('ignore')
cancels = dict(fit=CancelFitException, epoch=CancelEpochException, train=CancelTrainException, validate=CancelValidException,
               batch=CancelBatchException, step=CancelStepException, backward=CancelBackwardException)

@contextlib.contextmanager
def quiet(learn):
    with learn.no_bar(), learn.no_logging(), contextlib.redirect_stdout(io.StringIO()): yield learn

# --- votes ------------------------------------------------------------------------------------------------------------------

class Cancels(Callback):
    "One rank asks to leave, at one place"
    def __init__(self, scope, event, rank, order=0): self.scope,self.event,self.rank,self.order = scope,event,rank,order
    def __call__(self, event):
        if event==self.event and group_rank()==self.rank and self.here(): raise cancels[self.scope]
    def here(self):
        inner = self.event in ('after_batch','before_batch','after_pred','before_backward','before_step')
        if self.learn.epoch!=1 or not inner: return self.learn.epoch==1
        return self.learn.iter==1 and self.learn.training==(self.scope!='validate')

class Steps(Callback):
    order = -2000
    def before_fit(self): self.learn.trail = []
    def before_batch(self): self.learn.trail.append((self.learn.epoch, self.learn.iter, self.learn.training))

places = [('fit','after_batch'), ('fit','after_epoch'), ('epoch','after_train'), ('train','after_batch'), ('validate','after_batch'),
          ('fit','before_batch'), ('batch','after_pred'), ('batch','before_batch'), ('step','before_step'), ('backward','before_backward'),
          ('fit','before_epoch'), ('epoch','before_train'), ('validate','before_validate'), ('train','before_train'),
          ('fit','after_validate'), ('epoch','before_epoch')]

def votes(W, rank):
    res = []
    for scope,event in places:
        learn = make(W, rank, cbs=Steps, n_valid=40)
        with quiet(learn), learn.distrib_ctx(seed=3): learn.fit(3, cbs=Cancels(scope, event, min(1, W-1)))
        res.append((list(learn.trail), floats(learn.recorder.losses), len(learn.recorder.values), state(learn)))
    return res

def test_a_cancel_on_one_rank_is_a_cancel_on_all():
    want = votes(1, 0)
    ranks = run_ranks(on_ranks, 2, votes)
    for place,alone,*got in zip(places, want, *ranks):
        assert got[0][0]==got[1][0] and got[0][1]==got[1][1], place
        assert all(torch.equal(got[0][3][k], v) for k,v in got[1][3].items()), place
        assert got[0][0]==alone[0] and got[0][2]==alone[2], place
        if place[0] in ('batch','step','backward') or place[1]=='before_batch': continue # the others' part of this step counts
        close(got[0][3], alone[3])

# --- trackers ---------------------------------------------------------------------------------------------------------------

def trackers(W, rank, path):
    res = {}
    kinds = dict(stop=lambda: EarlyStoppingCallback(patience=1, min_delta=.4), best=lambda: SaveModelCallback(fname=f'best{W}'),
                 every=lambda: SaveModelCallback(fname=f'every{W}', every_epoch=True, with_opt=True),
                 end=lambda: SaveModelCallback(fname=f'end{W}', at_end=True), plateau=lambda: ReduceLROnPlateau(patience=1, min_delta=.2),
                 metric=lambda: EarlyStoppingCallback('accuracy', patience=1))
    for name,cb in kinds.items():
        learn = make(W, rank, path=path, n_valid=40)
        with quiet(learn), learn.distrib_ctx(seed=3):
            learn.fit(4, lr=.5, cbs=cb())
            res[name] = history(learn)
            if name=='every':
                learn.load(f'every{W}_1')
                res['loaded'] = state(learn)
    return res

def test_trackers(tmp_path):
    want = same(trackers, tmp_path, tol=1e-6)
    assert 1<len(want['stop']['values'])<4 and want['plateau']['lrs'][-1]<.5
    names = [f'best{W}' for W in (1,2)] + [f'end{W}' for W in (1,2)] + [f'every{W}_{i}' for W in (1,2) for i in range(4)]
    assert {o.stem for o in (tmp_path/'models').iterdir()}=={*names}

class NaNs(Callback):
    "A loss that is no number, on one rank"
    order = -10
    def after_loss(self):
        if self.training and self.epoch==1 and self.iter==2 and group_rank()==self.rank: self.learn.loss = self.learn.loss*float('nan')

def nans(W, rank):
    cb = NaNs()
    cb.rank = W-1
    learn = make(W, rank, cbs=Steps)
    with quiet(learn), learn.distrib_ctx(seed=3): learn.fit(3, cbs=[cb,TerminateOnNaNCallback()])
    return history(learn),learn.trail

def test_terminate_on_nan():
    got = same(nans, tol=1e-6)
    assert got[1][-1]==(1, 2, True)

# --- files and output -------------------------------------------------------------------------------------------------------

def logs(W, rank, path):
    out = io.StringIO()
    learn = make(W, rank, path=path/str(W), metrics=[accuracy])
    with contextlib.redirect_stdout(out):
        with learn.distrib_ctx(seed=3):
            learn.fit(2, cbs=[CSVLogger(), ShowGraphCallback()])
            learn.fit(1, cbs=CSVLogger(append=True))
            learn.get_preds()
    return out.getvalue()!='',hasattr(learn, 'progress')

def test_one_writer(tmp_path):
    for o in '12': (tmp_path/o).mkdir()
    logs(1, 0, tmp_path)
    assert run_ranks(on_ranks, 2, logs, tmp_path)==[(True,True),(False,True)]
    one,two = [(tmp_path/o/'history.csv').read_text().splitlines() for o in '12']
    assert len(one)==len(two)==5
    for a,b in zip(one, two): assert a.split(',')[0]==b.split(',')[0] and a.split(',')[3:4]==b.split(',')[3:4]

def board(W, rank, path):
    from fastai.callback.tensorboard import TensorBoardCallback
    learn = make(W, rank, path=path, metrics=[accuracy])
    cb = TensorBoardCallback(log_dir=path/f'{W}_{rank}', trace_model=False, log_preds=False)
    with quiet(learn), learn.distrib_ctx(seed=3): learn.fit(2, cbs=cb)
    return history(learn)

def test_tensorboard_on_rank_0(tmp_path):
    pytest.importorskip('tensorboard')
    same(board, tmp_path, tol=1e-6)
    assert (tmp_path/'2_0').exists() and not (tmp_path/'2_1').exists()

class ProbeCallback(Callback):
    "As TensorBoardCallback(log_preds=True) does: one batch, on rank 0 alone"
    order = 51
    def after_epoch(self):
        if group_rank(): return
        self.learn.one_batch(0, self.dls.valid.one_batch())
        self.learn.preds_shape = self.learn.pred.shape

def one_batch(W, rank):
    learn = make(W, rank, metrics=[accuracy])
    with quiet(learn), learn.distrib_ctx(seed=3): learn.fit(2, cbs=ProbeCallback)
    return history(learn)

def test_a_batch_on_rank_0_alone(): same(one_batch, tol=1e-6)

def x_of(i): return data(64)[0][i]
def y_of(i): return data(64)[1][i]

def saves(W, rank, path):
    learn = make(W, rank, opt=Adam, path=path/str(W), metrics=[])
    dsets = Datasets(range(64), [[x_of],[y_of]], splits=[range(48), range(48, 64)])
    learn.dls = dsets.dataloaders(bs=16//W, num_workers=0, device='cpu')
    with quiet(learn), learn.distrib_ctx(seed=3):
        learn.fit(1)
        learn.save('a')
        learn.save('b', with_opt=False)
        before = state(learn)
        learn.fit(1)
        if rank==0: learn.save('rank0')
        second = state(learn)
        learn.load('a')
        loaded = state(learn)
        learn.fit(1)
        if rank==W-1: learn.load('rank0') # on one rank only
        else: learn.load('a')
        last = state(learn)
        learn.load('b', with_opt=False)
        learn.export('whole.pkl')
        kept = type(learn).__name__,len(learn.cbs)
        learn.fit(1)
    return before,loaded,last if rank==W-1 else second,second,state(learn),kept==('DistributedLearner',6 if W==1 else 8) or kept

def test_files(tmp_path):
    res = [saves(1, 0, tmp_path)[:4]]+[o[:4] for o in run_ranks(on_ranks, 2, saves, tmp_path)]
    for first,loaded,last,second in res:
        close(loaded, first, 0)
        close(last, second, 0)
        close(first, res[0][0])
    assert sorted(o.name for o in (tmp_path/'2').iterdir())==['models','whole.pkl']
    learn = load_learner(tmp_path/'2'/'whole.pkl')
    assert type(learn).__name__=='Learner' and not any('istributed' in k for k in vars(learn))
    close(learn.model.state_dict(), res[0][0])

# --- the finder of learning rates -------------------------------------------------------------------------------------------

def finds(W, rank, path):
    random.seed(rank)
    learn = make(W, rank, opt=Adam, path=path/str(W))
    (path/str(W)).mkdir(exist_ok=True)
    with quiet(learn), learn.distrib_ctx(seed=3):
        learn.fit(1)
        before,opt = state(learn),[copy.deepcopy(learn.opt.state[p]) for p in learn.model.parameters()]
        found = [learn.lr_find(num_it=40, end_lr=e, show_plot=False)[0] for e in (10,1e4)]
        lrs,losses = floats(learn.recorder.lrs),floats(learn.recorder.losses)
        close(state(learn), before, 0)
        after = [learn.opt.state[p] for p in learn.model.parameters()]
        for a,b in zip(after, opt): close({k:a[k] for k in b}, b, 0)
        learn.fit(1)
    return found,lrs,losses,len(losses),state(learn)

def test_lr_find(tmp_path):
    got = same(finds, tmp_path, tol=1e-5)
    assert got[3]<40 # it stopped where the loss went up
    assert [o.name for d in '12' for o in (tmp_path/d).rglob('*')]==['models']*2

class FailsLate(Callback):
    def after_batch(self):
        if self.training and self.learn.iter==2 and group_rank()==self.at: raise self.what

def find_fails(W, rank, path, what):
    learn = make(W, rank, path=path)
    cb = FailsLate()
    cb.at,cb.what = 1,what
    learn.add_cb(cb)
    start = state(learn) if rank==0 else None
    try:
        with quiet(learn), learn.distrib_ctx(seed=3): learn.lr_find(num_it=20, show_plot=False, suggest_funcs=None)
    except (KeyError,RuntimeError) as e: return type(e).__name__,state(learn),start
    return 'ended',state(learn),start

@pytest.mark.parametrize('what,want', [(KeyError('here'), ['RankError','KeyError']), (CancelFitException(), ['ended','ended'])])
def test_lr_find_leaves_nothing_when_it_ends_early(tmp_path, what, want):
    (kind0,state0,start),(kind1,state1,_) = run_ranks(on_ranks, 2, find_fails, tmp_path, what)
    assert [kind0,kind1]==want
    close(state0, start, 0)
    close(state1, start, 0)
    assert [o.name for o in tmp_path.rglob('*')]==['models']

# --- training callbacks -----------------------------------------------------------------------------------------------------

class Reduces(Callback):
    "Counts the all-reduces of gradients"
    def before_fit(self): self.learn.n_reduced = 0
    def before_train(self):
        if hasattr(self.learn.model, 'register_comm_hook'): self.learn.model.register_comm_hook(self.learn, counted)

def counted(learn, bucket):
    learn.n_reduced += 1
    from learnerdist.env import current_group, group_size
    work = torch.distributed.all_reduce(bucket.buffer().div_(group_size()), group=current_group(), async_op=True)
    return work.get_future().then(lambda f: f.value()[0])

def accumulates(W, rank):
    res = {}
    for n_acc,bs in [(32,16),(16,16),(0,32)]:
        learn = make(W, rank, bs=bs, n=96, n_valid=40)
        cbs = ([GradientAccumulation(n_acc//W)] if n_acc else []) + ([Reduces()] if W>1 else [])
        with quiet(learn), learn.distrib_ctx(seed=3): learn.fit(1, cbs=cbs)
        res[n_acc] = state(learn),getattr(learn, 'n_reduced', None)
    return res

def test_accumulation_reduces_once_a_step():
    one = accumulates(1, 0)
    for two in run_ranks(on_ranks, 2, accumulates):
        for k in one: close(two[k][0], one[k][0])
        close(two[32][0], two[0][0]) # as without accumulation
        assert [two[k][1] for k in (32,16,0)]==[3,6,3]

def others(W, rank):
    res = {}
    kinds = dict(clip=lambda: GradientClip(.1), fetch=FetchPredsCallback, channels=ChannelsLast, short=lambda: ShortEpochCallback(.5),
                 half=MixedPrecision, bf16=lambda: MixedPrecision('bf16'))
    for name,cb in kinds.items():
        learn = make(W, rank, n_valid=40)
        with quiet(learn), learn.distrib_ctx(seed=3):
            cb = cb()
            learn.fit(2, cbs=cb)
            res[name] = history(learn)
            if name=='fetch': res['fetched'] = cb.preds
    return res

def test_other_callbacks(): same(others, tol=1e-6)

def mixes(W, rank):
    res = []
    for cb in (MixUp(.4), ActivationStats(with_hist=False), CollectDataCallback()):
        learn = make(W, rank, n=101, drop_last=False, dtype=torch.float32, loss=CrossEntropyLossFlat(), metrics=[])
        with quiet(learn), learn.distrib_ctx(seed=3):
            learn.fit(2, cbs=cb)
            first,again = floats(learn.validate()),floats(learn.validate())
            res.append((state(learn), floats(learn.recorder.losses), [floats(v) for v in learn.recorder.values], first==again))
    return res

def test_callbacks_with_draws_of_their_own_agree_on_all_ranks():
    a,b = run_ranks(on_ranks, 2, mixes)
    close(a, b, 0)
    assert all(o[3] for o in a)
