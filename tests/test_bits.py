"""The same bits on any number of devices: `distrib_ctx(global_bs=…, max_bs=…)` ends with equal weights, optimizer state, recorded
losses, metrics and predictions on 1, 2, 4 and 8 ranks, in float32 and bfloat16, also if it was stopped and goes on elsewhere"""
from functools import cache, partial
import random
import numpy as np, pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from harness import close
from helpers import Of
from scenes import F32, F64, Jitters, OnOneRank, draws, make, rank_runs, result, scene
from learnerdist.all import *
from learnerdist.learner.techniques import GradientClip, MixedPrecision
from learnerdist.testing import run_ranks

def rows(n):
    x = draws(n, 6)
    return TensorDataset(x, x[:,:3].argmax(1))
def pictures(n):
    x = draws(n, 1, 8, 8)
    return TensorDataset(x, x[:,0,0,:3].argmax(1))
def texts(n):
    "Of several lengths, padded by part; some labels do not count"
    return [(torch.arange(2+i%5)%7, torch.arange(2+i%5)%3-(100 if i%4==0 else 0)) for i in range(n)]
def pad(b):
    xs,ys = zip(*b)
    padded = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return padded(xs),padded([y.where(y>=0, -100) for y in ys], padding_value=-100)

def mlp(): return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
def dropped(): return nn.Sequential(nn.Linear(6, 16), nn.Dropout(.3), nn.Tanh(), nn.Dropout(.2), nn.Linear(16, 3))
def conv():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(.3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
                         nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
class Shifted(nn.Sequential):
    "With buffers that are other tensors after each forward pass: the first one makes them, or lets them grow"
    def __init__(self):
        super().__init__(*mlp())
        for k,o in dict(mean=torch.zeros(6), most=None, seen=torch.zeros(0, 6)).items(): self.register_buffer(k, o)
    def forward(self, x):
        if self.training:
            self.mean = self.mean*.9+x.mean(0)*.1
            self.most = x.amax(0) if self.most is None else self.most.maximum(x.amax(0))
            self.seen = torch.cat([self.seen, x.mean(0, keepdim=True)])
        return super().forward((x-self.mean)/(1 if self.most is None else self.most))
class Centred(nn.Module):
    "A loss with a buffer, which each call of training moves"
    def __init__(self):
        super().__init__()
        self.register_buffer('centre', torch.zeros(3))
    def forward(self, p, t):
        if p.requires_grad: self.centre.mul_(.9).add_(p.detach().mean(0), alpha=.1)
        return F.cross_entropy(p-self.centre, t)
class Noisy(nn.Sequential):
    "Draws from random generators of its own"
    def __init__(self):
        super().__init__(*mlp())
        self.own = torch.Generator().manual_seed(4),np.random.default_rng(4),random.Random(4)
    def forward(self, x):
        a,b,c = self.own
        if self.training: x = x+torch.rand(x.shape, generator=a)+torch.from_numpy(b.random(x.shape)).to(x)+c.random()
        return super().forward(x)
def columns(): return Of(lambda m, x: m.net(x).t(), net=nn.Linear(6, 4))
def sum_of_columns(p, t): return (p.t()-F.one_hot(t, 4)).square().sum()
def synced(): return nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Tanh(), nn.Linear(8, 3))
class Laid(nn.Module):
    "Its parameters are channels_last, transposed, every second column of a tensor, and complex"
    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
        self.mixed = nn.Parameter(torch.randn(16, 64).t()/8)
        self.second = nn.Parameter((torch.randn(16, 6)/4)[:,::2])
        self.wave = nn.Linear(3, 3, dtype=torch.complex64)
    def forward(self, x): return self.wave((self.convs(x).flatten(1)@self.mixed@self.second)+0j).abs()
def tags(): return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 3))
def of_tokens(p, t): return F.cross_entropy(p.flatten(0, 1), t.flatten())

class MixUp(Callback):
    "Mixes samples of a part, by draws of numpy's kind and torch's"
    run_valid = False
    def before_batch(self):
        x,y = self.learn.xb[0],self.learn.yb[0]
        lam,order = torch.distributions.Beta(.4, .4).sample(),torch.randperm(len(x))
        self.learn.xb,self.learn.yb = (lam*x+(1-lam)*x[order],),(lam*F.one_hot(y, 3)+(1-lam)*F.one_hot(y[order], 3),)

class Halves:
    "A batch transform that draws"
    def __call__(self, b): return b[0]*(torch.rand(len(b[0]), 1)>.5),b[1]

sgd,by_part = partial(torch.optim.SGD, momentum=.9),('batchnorm-parts',)
of_bits = partial(scene, ds=rows, n=70, n_valid=23, val_bs=5, bs=24, model=mlp, loss=F.cross_entropy, opt=torch.optim.AdamW, lr=.01,
                  dtype=F32, fits=[2], metrics=[accuracy], ctx=dict(seed=3, global_bs=24, max_bs=3))
scenes = dict(
    plain=of_bits(), allreduce=of_bits(ctx=dict(seed=3, global_bs=24, max_bs=3, comm_hook='allreduce')),
    dropout=of_bits(model=dropped), mixup=of_bits(cbs=lambda: [MixUp()], metrics=[]),
    conv=of_bits(ds=pictures, model=conv, fits=[2], warns=by_part),
    bfloat16=of_bits(ds=pictures, model=conv, dtype=torch.bfloat16, fits=[2], warns=by_part),
    tokens=of_bits(ds=texts, model=tags, loss=of_tokens, dl=dict(collate_fn=pad), metrics=[]),
    weights=of_bits(loss=nn.CrossEntropyLoss(weight=torch.tensor([.2,.5,.3])), opt=sgd),
    transforms=of_bits(dl=dict(after_batch=Halves()), cbs=lambda: [GradientClip(.5), EMA(.9, evaluate=True)]),
    accumulation=of_bits(cbs=lambda: [GradientAccumulation(48)], opt=sgd),
    amp=of_bits(model=dropped, cbs=lambda: [MixedPrecision('bf16')]),
    a_part_cancelled=of_bits(cbs=lambda: [OnOneRank('after_pred', CancelBatchException, 1, 5)]),
    cancelled_late=of_bits(cbs=lambda: [OnOneRank('after_loss', CancelBatchException, 2, 0)]),
    fit_cancelled=of_bits(cbs=lambda: [OnOneRank('before_backward', CancelFitException, 4, 6)]),
    buffer=of_bits(model=Shifted, loss=Centred, warns=('loss-not-mean',)), own_draws=of_bits(model=Noisy, cbs=lambda: [Jitters()]),
    # in one process, too, the kind of a loss is found from samples that are read, since this batch cannot be cut; x·12/12
    # is not always x
    columns=of_bits(model=columns, loss=sum_of_columns, lr=.001, metrics=[], preds=False, dtype=F64, fits=[6]),
    torchs_sync_bn=of_bits(model=synced, warns=by_part), layouts=of_bits(ds=pictures, model=Laid),
    # the last part of one process, and of one of two ranks: the others go on, so the step is taken
    cancelled_after_a_backward_pass=of_bits(cbs=lambda: [OnOneRank('after_backward', CancelFitException, 1, 7)]),
    # whose sum is rounded
    items_of_a_group=of_bits(loss=nn.CrossEntropyLoss(weight=draws(3, seed=1, dtype=F64).abs()), dtype=F64, n=96, opt=sgd,
                             bs=16, cbs=lambda: [GradientAccumulation(48)], ctx=dict(seed=3, global_bs=16, max_bs=1)),
    early_stopping=of_bits(cbs=lambda: [EarlyStoppingCallback('valid_loss', min_delta=10., patience=1)], fits=[5]),
    double=of_bits(n_valid=83, dtype=F64, fits=[6])) # sums of validation are rounded
if torch.__version__<'2.7': del scenes['layouts'] # DDP broadcasts no complex numbers there

def of_these(name): return scenes[name]

@pytest.fixture(scope='module')
def on():
    @cache
    def _on(W, *names): return run_ranks(rank_runs, W, names, of_these, timeout_s=300) if W>1 else [rank_runs(names, of_these)]
    return _on

@pytest.mark.parametrize('name', scenes)
@pytest.mark.parametrize('W', [2, *[pytest.param(o, marks=pytest.mark.long) for o in (4,8)]])
def test_bits(on, W, name): same_bits(on, W, name, [*scenes])

few = ['dropout','conv','bfloat16','allreduce']
@pytest.mark.slow
@pytest.mark.parametrize('name', few)
def test_bits_of_few(on, name): same_bits(on, 4, name, few)

def same_bits(on, W, name, names):
    want = on(1, *scenes)[0][name]
    for r in on(W, *names):
        close(r[name], want, 0, name)

# --- stopped, and going on with another number of ranks ----------------------------------------------------------------

class Dies(Callback):
    "An error at a step of the fit, on the last rank"
    def __init__(self, step): self.step = step
    def after_step(self):
        if self.train_iter==self.step and group_rank()==group_size()-1: raise RuntimeError('ZeroDivision')

def fit(folder, name, *cbs, **kw):
    with process_group():
        c = scenes[name]
        learn = make(c, group_size(), group_rank())
        learn.path = folder
        torch.manual_seed(7)
        with learn.no_logging(), learn.distrib_ctx(**c['ctx']): learn.fit(*c['fits'], cbs=[*c['cbs'](),Checkpoint('ckpt', 2),*cbs], **kw)
        return result(learn)

def begin(folder, name, step):
    with pytest.raises(Exception, match='ZeroDivision'): fit(folder, name, Dies(step))

def on_ranks(f, W, *args): return run_ranks(f, W, *args, timeout_s=120) if W>1 else [f(*args)]

# From so many ranks to so many, killed in so many steps
moves = [('dropout', 2, 1, 4), ('conv', 1, 2, 5)]
moves += [pytest.param(k, a, b, n, marks=pytest.mark.long) for k,a,b,n in (
          ('mixup', 4, 2, 4), ('conv', 2, 4, 3), ('tokens', 4, 1, 5), ('transforms', 1, 4, 5),
          ('weights', 2, 1, 2), ('bfloat16', 4, 2, 3), ('amp', 1, 4, 4))]

@pytest.mark.slow
@pytest.mark.parametrize('name,before,after,step', moves)
def test_resume_elsewhere(on, tmp_path, name, before, after, step):
    on_ranks(begin, before, tmp_path, name, step)
    want = on(1, *scenes)[0][name]
    for r in on_ranks(partial(fit, resume=True), after, tmp_path, name): close(r, want['fits'][0], 0, name)
