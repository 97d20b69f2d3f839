"What once depended on the number of ranks without a word: a callback's draws, the loss of a cancelled batch, a second loss"
import random
import numpy as np
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from learnerdist.all import Callback, CancelBatchException, DataLoaders, Learner, ProgressCallback, average_grads, group_size, process_group
from learnerdist.testing import run_ranks
from test_fastai import on_ranks

F64 = torch.float64

def data(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g, dtype=F64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())

def learner(n, loss=F.mse_loss, opt=torch.optim.SGD, bs=12):
    for o in (torch.manual_seed, np.random.seed, random.seed): o(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    learn = Learner(DataLoaders.from_dsets(data(n), data(9), bs=bs//group_size()), model, loss, opt, lr=.05)
    learn.remove_cb(ProgressCallback)
    return learn

def each(f, *args):
    "What `f` returns alone, and on 2 ranks"
    return f(*args),run_ranks(on_group, 2, f, *args)
def on_group(f, *args):
    with process_group(): return f(*args)

# --- draws outside of loops ---------------------------------------------------------------------------------------------

outside = 'before_fit','before_epoch','before_train','after_train','before_validate','after_validate','after_epoch','after_fit'

class Draws(Callback):
    "Draws from each global stream in each event that is outside of batches"
    def __init__(self):
        self.drawn = []
        for o in outside: setattr(self, o, self._draw)
    def _draw(self): self.drawn.append((torch.randperm(99)[:3].tolist(), np.random.randint(10**6), random.random()))

def drawn():
    learn,cb = learner(31),Draws()
    with learn.no_logging(), learn.distrib_ctx(seed=3): learn.fit(3, cbs=cb)
    return cb.drawn

def drawn_in_fastai(W, rank):
    from fastai.callback.core import Callback as Fastais
    from test_fastai import ctx, make
    class Redraws(Fastais):
        drawn = []
        def before_epoch(self): self.drawn.append((torch.randperm(99)[:3].tolist(), np.random.randint(10**6), random.random()))
    learn,cb = make(W, rank),Redraws()
    with ctx(learn, W): learn.fit(3, cbs=cb)
    return cb.drawn

def test_a_callback_draws_the_same_on_each_rank():
    "New negatives or a new subset for an epoch: events outside of batches have a stream that ranks share"
    alone,ranks = each(drawn)
    assert len({str(o) for o in alone})==len(alone)==2+6*3 # nothing is drawn twice
    assert ranks==[alone]*2

def test_a_callback_of_fastais_draws_the_same_on_each_rank():
    a,b = run_ranks(on_ranks, 2, drawn_in_fastai)
    assert a==b and len({str(o) for o in a})==3

# --- the recorded loss of a cancelled batch -------------------------------------------------------------------------------

class Cancels(Callback):
    "Cancels one batch, or one part of it"
    def __init__(self, event): setattr(self, event, self._cancel)
    def _cancel(self):
        if self.training and self.learn.iter==1: raise CancelBatchException

def cancelled(event, max_bs):
    learn = learner(48)
    with learn.no_logging(), learn.distrib_ctx(seed=3, max_bs=max_bs): learn.fit(1, cbs=Cancels(event))
    return [float(o) for o in learn.recorder.losses],[p.detach() for p in learn.model.parameters()]

@pytest.mark.parametrize('event', ['after_loss','before_backward'])
def test_the_loss_of_a_cancelled_batch(event):
    "The recorded losses, that of the batch too, depend neither on `max_bs` nor on the number of ranks"
    found = [o for max_bs in (None, 6, 3) for a,bs in [each(cancelled, event, max_bs)] for o in (a, *bs)]
    losses,weights = found[0]
    assert len(losses)==4
    for o,ws in found[1:]:
        torch.testing.assert_close(o, losses, rtol=0, atol=1e-12)
        torch.testing.assert_close(ws, weights, rtol=0, atol=1e-12)

# --- a second loss that reaches what the learner trains -------------------------------------------------------------------

class Adversarial(nn.Module):
    "A generator, and the loss of it that a discriminator tells; `generator` alone is what the learner trains"
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.judge = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    def forward(self, pred, targ): return (self.judge(pred)-1).square().mean()

class TrainsJudge(Callback):
    "Trains the discriminator, in whose gradients the learner's loss has left its own"
    def __init__(self, event): setattr(self, event, self._train)
    def before_fit(self): self.own = torch.optim.SGD(self.learn.loss_func.parameters(), lr=.1)
    def _train(self):
        if not self.training: return
        judge = self.learn.loss_func.judge
        self.own.zero_grad()
        ((judge(self.yb[0])-1).square().mean()+judge(self.pred.detach()).square().mean()).backward()
        average_grads(judge.parameters())
        self.own.step()

def with_second(n, event):
    learn = learner(n, Adversarial())
    with learn.no_logging(), learn.distrib_ctx(seed=3): learn.fit(2, cbs=TrainsJudge(event))
    return [p.detach() for p in (*learn.model.parameters(),*learn.loss_func.parameters())]

@pytest.mark.parametrize('event', ['after_pred','before_step','after_step'])
def test_average_grads_weighs_by_samples(event):
    alone,ranks = each(with_second, 77, event) # the last batch has 5 samples
    for o in ranks: torch.testing.assert_close(o, alone, rtol=0, atol=1e-12)
