"What `fastai.distributed` gets wrong, shown, and that it is right here. Its `.cuda()` is replaced, so that it runs on the CPU"
import importlib, os, warnings
import pytest
pytest.importorskip('fastai')
pytest.importorskip('accelerate')
import torch, torch.distributed as dist
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.text.data import SortedDL
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from test_fastai import CrossEntropy, accuracy, make
from test_fastai_callbacks import quiet
import learnerdist.fastai_trainer as ours
from learnerdist.fastai import * # noqa: F401
from learnerdist.env import process_group
from learnerdist.fastai_loaders import ShareDL
from learnerdist.testing import run_ranks

warnings.filterwarnings('ignore')
F64 = torch.float64

def broadcast(self, t, rank):
    t = torch.LongTensor(t)
    dist.broadcast(t, rank)
    return t.tolist()

def theirs():
    "fastai's own, in place of ours, in this process"
    import fastai.torch_core as core
    os.environ['ACCELERATE_USE_CPU'] = 'true'
    core.maybe_gather = ours.fastais_gather
    mod = importlib.import_module('fastai.distributed')
    importlib.reload(mod)
    mod.DistributedDL._broadcast = broadcast
    return mod

def on_ranks(func, whose, *args):
    with process_group():
        if whose=='theirs': theirs()
        return func(dist.get_rank(), *args)

def both(func, *args):
    "What ranks 0 and 1 return: with fastai's, with ours"
    return [run_ranks(on_ranks, 2, func, whose, *args) for whose in ('theirs','ours')]

class Threshold(nn.Module):
    "The first three inputs are the prediction: nothing to train, but a bias"
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
    def forward(self, x): return x[:,:3]+self.bias

def learner(n_valid=37, bs=4, **kw):
    learn = make(2, 0, model=Threshold, bs=2*bs, n_valid=n_valid, metrics=[accuracy], **kw)
    learn.model.device = torch.device('cpu')
    return learn

# --- rows of the table ------------------------------------------------------------------------------------------------------

def measures(rank):
    learn = learner()
    with quiet(learn), learn.distrib_ctx(): learn.fit(1, lr=0.)
    return [float(o) for o in learn.recorder.values[0][1:]]

def test_metrics_are_exact():
    learn = learner()
    with quiet(learn): want = [float(o) for o in learn.validate()]
    wrong,right = both(measures)
    assert all(o==pytest.approx(want, abs=1e-7) for o in right)
    assert any(abs(a-b)>1e-4 for o in wrong for a,b in zip(o, want))

def predicts(rank):
    torch.set_default_dtype(torch.float32)
    x = torch.arange(16.)[:,None].repeat(1, 3)
    dls = DataLoaders.from_dsets([(o, torch.tensor(0)) for o in x], [(o, torch.tensor(0)) for o in x], bs=3, num_workers=0)
    learn = Learner(dls, Threshold(), CrossEntropy())
    learn.model.device = torch.device('cpu')
    with quiet(learn), learn.distrib_ctx():
        dl = learn.dls.valid
        if not hasattr(dl, 'dealer'): dl = theirs().DistributedDL(dl, device=torch.device('cpu'))
        return learn.get_preds(dl=dl, reorder=False, act=lambda o: o)[0][:,0].int().tolist()

def test_predictions_are_in_order():
    wrong,right = both(predicts)
    assert right==[list(range(16))]*2 and all(o!=list(range(16)) for o in wrong)

class Fails(Callback):
    def after_loss(self): raise KeyError('here')

def fails(rank):
    learn = make(2, 0, metrics=[])
    learn.model.device = torch.device('cpu')
    try:
        with quiet(learn), learn.distrib_ctx(): learn.fit(1, cbs=Fails)
    except KeyError: pass
    except Exception: pass # the other rank's
    return isinstance(learn.model, DistributedDataParallel),any(type(o) is not TfmdDL for o in learn.dls.loaders)

def test_an_exception_leaves_no_trace():
    wrong,right = both(fails)
    assert right==[(False,False)]*2 and wrong==[(True,True)]*2

def counts(rank, whose):
    res = []
    for n in range(1, 60):
        for bs in (3, 4, 7):
            dl = TfmdDL(list(range(n)), bs=bs, drop_last=True, num_workers=0)
            dl = ShareDL.from_dl(dl, rank, 2) if whose=='ours' else theirs().DistributedDL(dl, rank, 2, device=torch.device('cpu'))
            res.append(len(dl)==len(list(dl)))
    return all(res)

def test_length_is_the_number_of_batches():
    assert run_ranks(on_ranks, 2, counts, 'ours', 'ours')==[True]*2
    assert run_ranks(on_ranks, 2, counts, 'theirs', 'theirs')==[False]*2

def longest(rank, whose):
    dl = SortedDL([(torch.arange(n+1),) for n in range(16)], sort_func=lambda o: len(o[0]), bs=1, num_workers=0)
    dl = ShareDL.from_dl(dl, rank, 2) if whose=='ours' else theirs().DistributedDL(dl, rank, 2, device=torch.device('cpu'))
    return sum(len(b[0][0]) for b in dl)

def test_sorted_loaders_are_balanced():
    a,b = run_ranks(on_ranks, 2, longest, 'ours', 'ours')
    c,d = run_ranks(on_ranks, 2, longest, 'theirs', 'theirs')
    assert abs(a-b)==8 and abs(c-d)==64

def logged(rank, path):
    learn = make(2, 0, metrics=[], path=path)
    learn.model.device = torch.device('cpu')
    with quiet(learn), learn.distrib_ctx(): learn.fit(1, cbs=CSVLogger(append=True))

def test_one_rank_writes_the_log(tmp_path):
    lines = []
    for whose in ('theirs','ours'):
        (tmp_path/whose).mkdir()
        run_ranks(on_ranks, 2, logged, whose, tmp_path/whose)
        lines.append(len((tmp_path/whose/'history.csv').read_text().splitlines()))
    assert lines==[4, 2] # a header and a line

def finds(rank, path):
    torch.manual_seed(0)
    learn = make(2, 0, metrics=[], path=path)
    learn.model.device = torch.device('cpu')
    before = [p.detach().clone() for p in learn.model.parameters()]
    with quiet(learn), learn.distrib_ctx(): learn.lr_find(num_it=12, stop_div=False, show_plot=False, suggest_funcs=None)
    return all(torch.equal(a, b) for a,b in zip(before, learn.model.parameters()))

def test_lr_find_restores_every_rank(tmp_path):
    assert run_ranks(on_ranks, 2, finds, 'ours', tmp_path)==[True,True]
    a,b = run_ranks(on_ranks, 2, finds, 'theirs', tmp_path, errors='return')
    assert type(a).__name__=='RankFailure' and b is False # rank 0 waits, while it reloads, for a rank that has nothing to reload

def reduces(rank, whose):
    learn = make(2, 0, bs=16, n=96, metrics=[])
    learn.model.device = torch.device('cpu')
    calls = []
    class Hooked(Callback):
        order = 2000
        def before_train(self):
            if isinstance(self.learn.model, DistributedDataParallel): self.learn.model.register_comm_hook(calls, hook)
    with quiet(learn), learn.distrib_ctx(): learn.fit(1, cbs=[GradientAccumulation(16),Hooked])
    return len(calls)

def hook(calls, bucket):
    calls.append(1)
    fut = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
    return fut.then(lambda f: f.value()[0])

def test_accumulation_reduces_once_a_step():
    assert run_ranks(on_ranks, 2, reduces, 'ours', 'ours')==[3,3]
    assert run_ranks(on_ranks, 2, reduces, 'theirs', 'theirs')==[6,6]
