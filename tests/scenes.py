"""Ordinary and odd trainings: W ranks at batch size b do what one process does at W·b

`scenes` is the table: name → settings, which override those of `base`. `run` does one of them, on one process or as
one of W ranks, and returns plain data; test_scenes.py compares. A new scene is a line of the table."""
import copy, itertools
from dataclasses import dataclass
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch import Tensor, nn, tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset, default_collate
from harness import caught
from helpers import Of, Stream
from learnerdist.all import *
from learnerdist.core import stacks
from learnerdist.core.shards import full_tensor, map_tensors
from learnerdist.learner.techniques import GradientClip, Lookahead, MixedPrecision

F64,F32 = torch.float64,torch.float32
torch.set_num_threads(1)

# --- data: functions from a number of samples to a data set -----------------------------------------------------------

def draws(n, *shape, seed=0, **kw): return torch.randn(n, *shape, generator=torch.Generator().manual_seed(n+seed), **kw)
def ints(high, n, *shape): return torch.randint(high, (n,*shape), generator=torch.Generator().manual_seed(n))
def points(n): return TensorDataset(draws(n, 4), draws(n, 2, seed=1))
def classes(n): return TensorDataset(draws(n, 4), ints(2, n))
def pictures(n):
    x = draws(n, 1, 4, 4)
    return TensorDataset(x, x.flatten(1)[:,:3].argmax(1))
def texts(n):
    "Sequences with labels of uneven length"
    x = ints(9, n, 6)
    return list(zip(x, (x%4).masked_fill(torch.arange(6)>=1+ints(6, n, 1), -100)))
def texts_in_dicts(n): return [dict(x=x, labels=y) for x,y in texts(n)]
def as_dicts(n): return [dict({'in': [x, {'scale': tensor(1.+i%3)}]}, y=y) for i,(x,y) in enumerate(pictures(n))]
def as_pairs(n): return [(x, x.flatten()[:3], y) for x,y in pictures(n)]
def boxes(n): return [(o[:12].view(3, 4), dict(boxes=o[12:].view(2, 2))) for o in draws(n, 16)]
def graphs(n): return [(draws(k, 4, seed=i), draws(k, 2, seed=i)) for i,k in enumerate((1+ints(5, n)).tolist())]

def streamed(ds): return lambda n: Stream(list(ds(n)))

_filled = []
def fills(b):
    "A collate function that fills the same tensors for each batch"
    new = default_collate(b)
    _filled[:] = _filled or [o.new_zeros(12, *o.shape[1:]) for o in new]
    return [kept[:len(o)].copy_(o) for kept,o in zip(_filled, new)]

def as_lists(b): return tuple(map(list, zip(*b)))
def as_graph(b): return torch.cat([o for o,_ in b]),torch.cat([o for _,o in b])
def as_graph_with_ids(b): return torch.cat([o for o,_ in b]),torch.arange(len(b)),torch.cat([o.sum(1) for _,o in b])

class Batches:
    "A batch sampler of the user's"
    def __init__(self, n, bs): self.n,self.bs = n,bs
    def __len__(self): return -(-self.n//self.bs)
    def __iter__(self): return iter(torch.randperm(self.n).split(self.bs))

class Order:
    "A sampler of the user's, without a length"
    def __init__(self, n): self.n = n
    def __iter__(self): return iter(torch.randperm(self.n).tolist())

def by_sampler(ds, bs): return DataLoader(ds, bs, sampler=Order(len(ds)))
def by_batches(ds, bs, **kw): return DataLoader(ds, batch_sampler=Batches(len(ds), bs), **kw)
def by_torchs_batches(ds, bs): return DataLoader(ds, batch_sampler=BatchSampler(RandomSampler(ds), bs, False))

class OwnLoaders(SimpleNamespace):
    "What the learner asks of loaders, and no more"
    def __init__(self, train, valid): super().__init__(train=train, valid=valid)
    def __getitem__(self, i): return [self.train, self.valid][i]
    def __len__(self): return 2

def validates_training(train, valid):
    "In batches, of which the last one is dropped"
    return DataLoaders(train, DataLoader(train.dataset, 10, drop_last=True))

# --- models -----------------------------------------------------------------------------------------------------------

def net(): return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
def normed(): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
def checkpointed():
    return Of(lambda m, x: m.out(checkpoint(m.body, x, use_reentrant=False)), body=normed()[:3], out=nn.Linear(8, 2))
def instance_normed():
    return nn.Sequential(nn.Unflatten(1, (2,2)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(4, 2))
def linear(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
def conv(): return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
def bn(bias=True):
    return nn.Sequential(nn.Conv2d(1, 3, 3, bias=bias), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4, bias=bias),
                         nn.BatchNorm1d(4), nn.Linear(4, 3))
def bn_no_bias(): return bn(False) # before BatchNorm, its gradient is rounding alone, which Adam enlarges
def bn_frozen():
    m = bn()
    m[1].requires_grad_(False)
    return m
def bn_of_torch(): return nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8), nn.Tanh(), nn.Linear(8, 2))
def bn_cumulative(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))

def last_state(m, x): return m.out(m.rnn(x.flatten(1).view(len(x), 4, 4))[0][:,-1])
def recurrent(): return Of(last_state, rnn=nn.LSTM(4, 5, batch_first=True), out=nn.Linear(5, 3))
def with_side(m, x, z): return m.a(x.flatten(1))+m.b(z), {'side': m.b(z)}
def two_in_two_out(): return Of(with_side, a=nn.Linear(16, 3), b=nn.Linear(3, 3))
def adds_logits(m, b): return dict(b, logits=m.lin(b['in'][0].flatten(1))*b['in'][1]['scale'][:,None])
def of_dict(): return Of(adds_logits, lin=nn.Linear(16, 3))
def part_used(): return Of(lambda m, x: m.used(x.flatten(1)), used=nn.Linear(16, 3), idle=nn.Linear(2, 2))
def centers(m, xs): return [dict(center=m.lin(x).mean(0)) for x in xs]
def detector(): return Of(centers, lin=nn.Linear(4, 2))
@dataclass
class Output: logits:Tensor
def with_class(): return Of(lambda m, x: Output(m.net(x)), net=net()) # whose tensors nobody finds
def of_nodes(): return Of(lambda m, x, ids: m.net(x).sum(1), net=net())
def writes(): return Of(lambda m, b: m.net(b.sub_(.5)), net=net()) # changes what it is given

class Tags(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.out = nn.Embedding(9, 5),nn.GRU(5, 5, batch_first=True),nn.Linear(5, 4)
    def forward(self, x): return self.out(self.rnn(self.emb(x))[0])

def by_sign(m, x):
    "Each sample by one of two heads: a part of a step may use only one"
    first = (x[:,:1]>0).nonzero()[:,0]
    second = (x[:,:1]<=0).nonzero()[:,0]
    res = x.new_zeros(len(x), 2)
    for head,rows in ((m.a,first), (m.b,second)):
        if len(rows): res = res.index_add(0, rows, head(m.body(x[rows])))
    return res
def two_heads(): return Of(by_sign, body=nn.Linear(4, 3), a=nn.Linear(3, 2), b=nn.Linear(3, 2))

class OwnLoss(Tags):
    "Computes its loss itself, as models of Hugging Face do: the mean over labels that are not -100"
    def __init__(self, kind=dict):
        super().__init__()
        self.kind,self.idle = kind,nn.Linear(2, 2)
        self.own_hooks = [1] # as with activation checkpointing
    def forward(self, b):
        out = super().forward(b['x'])
        loss = F.cross_entropy(out.flatten(0, 1), b['labels'].flatten())
        return dict(loss=loss, logits=out) if self.kind is dict else (loss,out)

class ByName(OwnLoss):
    "Takes its inputs by name, as models of transformers do: `forward` gets the keys that it names"
    def forward(self, x, labels, absent=None): return super().forward(dict(x=x, labels=labels))

# --- losses and metrics -----------------------------------------------------------------------------------------------

weights = tensor([.3,.7])
def weighted_ce(): return nn.CrossEntropyLoss(weight=weights)
def focal(p, t):
    ce = F.cross_entropy(p, t, reduction='none')
    return ((1-(-ce).exp())**2*ce).mean()
def sum_and_count(p, t):
    w = weights.to(p)[t]
    return (F.cross_entropy(p, t, reduction='none')*w).sum(),w.sum()
def says_what_it_counts(p, t): return sum_and_count(p, t)[0]/weights.to(p)[t].sum()
says_what_it_counts.n_items = lambda p, t: weights.to(p)[t].sum()
def squares(p, t): return ((p-t)**2).sum()
def of_tokens(out, y): return F.cross_entropy(out.flatten(0, 1), y.flatten()) # a user's; no warning
def counted_tokens(out, y): return of_tokens(out, y)
counted_tokens.n_items = lambda p, t: (t!=-100).sum()
def guarded(p, t): # as one writes it where a batch may have no label
    m = t>=0
    return F.cross_entropy(p[m], t[m]) if m.any() else p.sum()*0
def weighted_squares(p, t): return F.mse_loss(p, t, weight=t.abs())
def weighted_distances(p, t): return F.l1_loss(p, t, weight=t.abs())
def two_loss(out, y): return F.cross_entropy(out[0], y)+F.cross_entropy(out[1]['side'], y)
def dict_loss(out, b): return F.cross_entropy(out['logits'], b['y'])
def of_boxes(outs, ys): return torch.stack([((o['center']-y['boxes'])**2).mean() for o,y in zip(outs, ys)]).mean()
def of_output(out, b): return out[0]
def of_class(p, t): return F.mse_loss(p.logits, t)
def huber(p, t): return ((p-t)**2+1).sqrt().mean()
def contrast(p, t): return torch.logsumexp(-torch.cdist(gather_with_grad(p), gather_with_grad(t.detach())), 1).mean()
contrast.n_items = 'whole'
def ranked(p, t):
    "Over the whole batch: each prediction against the mean"
    p,t = gather_with_grad(p),gather_with_grad(t)
    return ((p-p.mean(0)-t)**2).mean().sqrt()
ranked.n_items = 'whole'
def masked_in_place(p, t):
    m = t!=0
    t[~m] = 1
    return (F.cross_entropy(p, t, reduction='none')*m).mean()
@torch.jit.script
def scripted(p, t): return ((p-t)**2).mean()

class LearnedLoss(nn.Module):
    "Has parameters of its own, which the optimizer trains and the model does not have"
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
    def forward(self, p, t): return ((p*self.scale-t)**2).mean()

def right(out, y): return (out.argmax(-1)==y).double().mean()
def two_right(out, y): return right(out[0], y)
def dict_right(out, b): return right(out['logits'], b['y'])
def distance(p, t): return (p-t).abs().mean()
def of_pictures(): return [right, AvgMetric(lambda p,t: p.square().mean(), 'sq')]

# --- callbacks --------------------------------------------------------------------------------------------------------

class At(Callback):
    "Calls `f(learn)` at `event` of the training step `step` of the fit"
    run_valid = False
    def __init__(self, event, step, f):
        self.step,self.f = step,f
        setattr(self, event, self.call)
    def call(self):
        if self.train_iter==self.step: self.f(self.learn)

class FreezesFirst(Callback):
    def before_fit(self): self.model[0].requires_grad_(False)
def later(event, f): return lambda: [FreezesFirst(),At(event, 5, f)]
def fail(learn): raise ZeroDivisionError
def unfreeze(learn): learn.model[0].requires_grad_(True)
def freeze_more(learn): learn.model[2].requires_grad_(False)
def freeze_first(learn): learn.model[0].requires_grad_(False)
def freeze_all_but_bias(learn):
    for p in learn.model.parameters(): p.requires_grad_(False)
    learn.model[4].bias.requires_grad_(True)
def new_model(learn):
    torch.manual_seed(9)
    learn.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(learn.device, F64)
    learn.create_opt()

class Cancels(Callback):
    "Raises `what` at `event` of a batch of each epoch: on all ranks, or on one"
    def __init__(self, event, what, rank=None, at=2):
        self.what,self.rank,self.at = what,rank,at
        setattr(self, event, self._raise)
    def _raise(self):
        here = self.rank is None or group_rank()==self.rank%group_size()
        if self.training and self.iter==self.at and here: raise self.what

class SkipsFirst(Callback):
    "Cancels the first batch of each group of two"
    def after_pred(self):
        if self.training and self.iter%2==0: raise CancelBatchException

class OnOneRank(Callback):
    "Raises at a part of a step, whatever rank it is on"
    run_valid = False
    def __init__(self, event, exc, step, part):
        self.exc,self.at = exc,(step,part)
        setattr(self, event, self._raise)
    def _raise(self):
        if (self.train_iter,self.learn.runner.part.number)==self.at: raise self.exc

class Overflow(Callback):
    "An infinite loss on the last rank, in the batches `at`; alone, in place of the global one"
    order = 15
    def __init__(self, *at): self.at = at
    def before_backward(self):
        last = group_rank()==group_size()-1
        if last and (self.epoch,self.iter) in self.at: self.learn.loss_grad = self.loss_grad*float('inf')

class AddsLayer(Callback):
    "A new layer after the first epoch, in the model and in the optimizer"
    def after_epoch(self):
        if self.epoch: return
        torch.manual_seed(8)
        self.model.append(nn.Linear(2, 2).to(self.learn.device, F64))
        self.opt.add_param_group(dict(params=list(self.model[-1].parameters())))

class Renews(Callback):
    "Another model from the second epoch on"
    def before_epoch(self):
        if self.epoch==1: new_model(self.learn)

class Attributes(Callback):
    "To a callback, the learner's model is the user's at every event of training"
    def before_batch(self): self.model.temperature = self.iter
    def after_pred(self): assert isinstance(self.model, nn.Sequential) and self.model[0] is self.model._modules['0']

def other_loaders(learn):
    ds = TensorDataset(*(o.to(F64) for o in points(24).tensors))
    return DataLoaders(TfmdDL(ds, 12//group_size(), shuffle=True), TfmdDL(ds, 3))
class NewLoaders(Callback):
    "Other data from an epoch on, as in progressive resizing"
    def __init__(self, epoch): self.at = epoch
    def before_epoch(self):
        if self.epoch==self.at: self.learn.dls = other_loaders(self.learn)

class Swaps(Callback):
    "Trains on a loader of its own"
    order = 8
    def before_fit(self): self.mine = other_loaders(self.learn).train
    def before_train(self): self.learn.dl = self.mine

class Twice(Callback):
    "A second backward pass: `learn.wrapper` weighs it"
    run_valid = False
    def before_step(self): self.loss_func((self.wrapper or self.model)(*self.xb), *self.yb).backward()

class OwnPass(Callback):
    "A backward pass of its own, before the learner's"
    run_valid = False
    def before_backward(self): sum(.01*p.square().sum() for p in self.model.parameters()).backward()

class Jitters(Callback):
    "Draws after the backward pass: noise for gradients, and for weights"
    run_valid = False
    def before_step(self):
        for p in self.model.parameters(): p.grad += .01*torch.randn_like(p)
    @torch.no_grad()
    def after_step(self):
        for p in self.model.parameters(): p += .01*torch.randn_like(p)

class Penalty(Callback):
    run_valid = False
    def __init__(self, event, in_place=False):
        self.in_place = in_place
        setattr(self, event, self._add)
    def _add(self):
        penalty = .01*sum(p.square().sum() for p in self.model.parameters())
        if self.in_place: self.learn.loss_grad += penalty
        else: self.learn.loss_grad = self.loss_grad+penalty

class Discriminator(nn.Module):
    "The loss of a generator, which is what the learner trains"
    def __init__(self):
        super().__init__()
        torch.manual_seed(2) # no context makes its weights equal on all ranks
        self.judge = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    def forward(self, pred, targ): return (self.judge(pred)-1).square().mean()
class TrainsDiscriminator(Callback):
    "In whose gradients the learner's loss has left its own"
    run_valid = False
    def __init__(self, event): setattr(self, event, self._train)
    def before_fit(self): self.own = torch.optim.SGD(self.learn.loss_func.parameters(), lr=.1)
    def _train(self):
        judge = self.learn.loss_func.judge
        self.own.zero_grad()
        ((judge(self.yb[0])-1).square().mean()+judge(self.pred.detach()).square().mean()).backward()
        average_grads(judge.parameters())
        self.own.step()

class TrainsHead(Callback):
    "By an optimizer of its own, from the learner's loss"
    run_valid = False
    def before_fit(self): self.own = torch.optim.SGD(self.model[4].parameters(), lr=.1)
    def before_step(self): average_grads(self.model[4].parameters(), weighed=True) # which changes nothing
    def after_step(self):
        self.own.step()
        self.own.zero_grad()
def body(m): return list(m[:4].parameters())

class Ignores(Callback):
    "Some labels do not count, on each rank another number: known before the forward pass, or only in `event`"
    run_valid = False
    def __init__(self, event): setattr(self, event, self._ignore)
    def _ignore(self): self.learn.yb = self.yb[0].where(self.xb[0][:,0]>0, -100),
class Reweights(Callback):
    "Another option of the loss from the second epoch on"
    def __init__(self, option, val): self.option,self.val = option,val
    def before_epoch(self):
        if self.epoch==1: setattr(self.loss_func, self.option, self.val.to(self.learn.device) if isinstance(self.val, Tensor) else self.val)

def before_recorder():
    "A cancel of the second batch that comes before the Recorder hears of it"
    cb = Cancels('after_batch', CancelFitException, at=1)
    cb.order = 0
    return [cb]
def clips(**kw): return [GradientClip(**kw)]
def cancels(*args, **kw): return [Cancels(*args, **kw)]
def half_precision(*more): return [MixedPrecision('fp16', init_scale=64.),*more]

def scaled(more): return half_precision(GradientClip(.1), decays(), *more())

def decays(): return Scheduler(lambda opt: LambdaLR(opt, lambda i: .9**i))

class Sees(Callback):
    "What the training batches of each epoch held: the first number of each sample"
    order = 5
    def before_fit(self): self.learn.ids = getattr(self.learn, 'ids', [])
    def before_train(self): self.ids.append([])
    def after_pred(self):
        if self.training: self.ids[-1].append(tree_leaves(self.xb)[0].flatten(1)[:,0].tolist())

# --- one run ----------------------------------------------------------------------------------------------------------

def every_param(m): return list(m.parameters())
def groups_of(m): return [list(o.parameters()) for o in m if list(o.parameters())]
def sgd(ps, lr): return torch.optim.SGD(ps, lr, momentum=.9, weight_decay=.01)
def look(ps, lr): return Lookahead(torch.optim.SGD(ps, lr=lr, momentum=.9, nesterov=True), k=3, alpha=.5)
def look_adam(ps, lr): return Lookahead(torch.optim.Adam(ps, lr=lr), k=2, alpha=.8)
def one_cycle(): return Scheduler(lambda opt: OneCycleLR(opt, .1, total_steps=8))
def own_hook(group, bucket):
    "The mean over ranks, as DDP computes it"
    dist.all_reduce(bucket.buffer().div_(group_size()), group=group)
    fut = torch.futures.Future()
    fut.set_result(bucket.buffer())
    return fut

# `bs` is of all ranks. `parts`: micro-batches of `bs`; alone they are one batch, if `whole`.
# `accumulate`: samples of a step, on all ranks.
# `unlike`: what is not compared, since it depends on the size of batches or on what a callback changes late
# `alone`: one process can do the same. If not, ranks agree with each other. `warns`: codes of warnings
base = dict(model=net, ds=points, n=48, n_valid=11, val_ds=None, val_bs=3, bs=12, parts=1, accumulate=None,
            loader=TfmdDL, shuffle=True, dl={}, wrap=DataLoaders, n_inp=None, loss=nn.MSELoss, metrics=(), opt=sgd,
            lr=.1, splitter=None, cbs=list, ctx=dict(seed=3), fits=[2], cycle=False, sees=False, preds=True, whole=True,
            unlike=(), dtype=F64, tol=1e-9, alone=True, warns=())

def scene(**kw):
    assert not kw.keys()-base.keys(), kw.keys()-base.keys()
    return {**base, **kw}

@contextmanager
def default_dtype(dtype):
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try: yield
    finally: torch.set_default_dtype(old)

def make(c, W=1, rank=0):
    "A learner of W ranks; other ranks begin with other weights"
    with default_dtype(c['dtype']):
        torch.manual_seed(100+rank)
        model,loss = c['model'](),c['loss']
        if isinstance(loss, type) or loss is weighted_ce: loss = loss()
        if isinstance(loss, nn.Module): loss = copy.deepcopy(loss).to(c['dtype'])
        own = list(loss.parameters()) if isinstance(loss, nn.Module) else []
        ds,val = c['ds'](c['n']),(c['val_ds'] or c['ds'])(c['n_valid'])
    split = c['ctx'].get('split_batches')
    bs = c['bs'] if split else c['bs']//W//(1 if is_whole(c, W) else c['parts'])
    assert c['whole'] or bs*W*c['parts']==c['bs'], f'{W} ranks cannot share the micro-batches of one process'
    is_ordered = isinstance(ds, IterableDataset) or c['loader'] in (by_sampler,by_batches,by_torchs_batches)
    kw = {} if is_ordered else dict(shuffle=c['shuffle'])
    shared = {k:v for k,v in c['dl'].items() if k=='collate_fn'}
    dls = c['wrap'](c['loader'](ds, bs, **kw, **c['dl']), TfmdDL(val, c['val_bs'], **shared))
    if c['n_inp']: dls.n_inp = c['n_inp']
    splitter = c['splitter'] or (lambda m: every_param(m)+own)
    metrics = c['metrics']() if callable(c['metrics']) else list(c['metrics'])
    return Learner(dls, model, loss, c['opt'], lr=c['lr'], metrics=metrics, splitter=splitter, cbs=[Sees()] if c['sees'] else [])

def is_whole(c, W): return W==1 and c['accumulate'] is not None and c['whole']

def result(learn, unlike=()):
    "Plain data, without `unlike`"
    rec,loss = learn.recorder,learn.loss_func
    torchs = getattr(learn.opt, 'opt', learn.opt) # fastai's Learner has a wrapper
    state,opt = map_tensors([dict(learn.model.state_dict()),torchs.state_dict()], full_tensor)
    if isinstance(loss, nn.Module): state |= {f'loss.{k}':v for k,v in loss.state_dict().items()}
    moments = [o.clone() if isinstance(o, Tensor) else o for o in tree_leaves(opt.get('state', opt))]
    res = dict(state={k:v.clone() for k,v in state.items()}, opt=moments, values=[list(o) for o in rec.values],
               final=list(getattr(learn, 'final_record', ())), losses=list(rec.losses), lrs=list(rec.lrs))
    return {k:v for k,v in res.items() if k not in unlike}

def measured(cb):
    "What a callback has found: skipped steps and their scale"
    return [cb.skipped,cb.state_dict()] if isinstance(cb, MixedPrecision) else []

def on_cpu(o): return o.cpu() if isinstance(o, Tensor) else o

def run(c, W=1, rank=0, learn=None):
    "What the fits of a scene, validation and predictions give; of `learn`, if it is there already"
    learn,cbs,ctx = learn or make(c, W, rank),c['cbs'](),dict(c['ctx'])
    for k in ('split_batches','shard')*(W==1): ctx.pop(k, None)
    accumulates = c['accumulate'] is not None and not is_whole(c, W)
    if accumulates: cbs.append(GradientAccumulation(c['accumulate']))
    unlike = c['unlike']
    if c['parts']>1 and c['whole']: unlike = (*unlike,'losses','lrs') # each micro-batch is recorded
    torch.manual_seed(7)
    fits = []
    with learn.no_logging(), learn.distrib_ctx(**ctx):
        for o in c['fits']:
            kw = dict(n_epoch=o) if isinstance(o, int) else dict(o)
            (learn.fit_one_cycle if c['cycle'] else learn.fit)(kw.pop('n_epoch'), cbs=cbs, **kw)
            fits.append(result(learn, unlike))
        res = dict(fits=fits, measured=[o for o in map(measured, cbs) if o], validate=[*learn.validate()], ids=getattr(learn, 'ids', []))
        if c['preds']: res['preds'] = tree_leaves(learn.get_preds())
    return {k: tree_map(on_cpu, v) for k,v in res.items() if k not in unlike}

def of_table(name): return scenes[name]
def alone(name): return run(scenes[name]) if scenes[name]['alone'] else {}

def rank_runs(names, of=of_table, run=run):
    "What `run` gives on this rank of the scene `of` each name, or that it has failed; or warned of anything but what the scene says"
    def silently(c):
        before,res = {*stacks._warned},run(c, group_size(), group_rank())
        for k in c['warns']: stacks._warned.pop(k, None)
        assert {*stacks._warned}<=before, f'warned: {[*stacks._warned]}'
        return res
    with process_group(): return {k: caught(silently, of(k)) for k in names}

# --- the table --------------------------------------------------------------------------------------------------------

picture = partial(scene, model=linear, ds=pictures, n=40, loss=F.cross_entropy, metrics=of_pictures)
adam = dict(opt=torch.optim.Adam, lr=.01)
adamw = dict(opt=torch.optim.AdamW, lr=.01)
scenes = dict(
    linear=picture(sees=True), conv=picture(model=conv), lstm=picture(model=recurrent), adam=picture(**adam),
    conv_37_drop=picture(n=37, dl=dict(drop_last=True), model=conv, sees=True), rms=picture(opt=torch.optim.RMSprop, lr=.01),
    bn=picture(model=bn), bn_adam=picture(model=bn_no_bias, **adam), bn_frozen=picture(model=bn_frozen),
    bn_cumulative=picture(model=bn_cumulative), no_sync_bn=picture(ctx=dict(seed=3, sync_bn=False)),
    split=picture(model=bn, ctx=dict(seed=3, split_batches=True), sees=True),
    split_11=picture(model=bn, bs=11, ctx=dict(seed=3, split_batches=True), sees=True), # which no number of ranks divides
    find_unused=picture(model=part_used, ctx=dict(seed=3, find_unused_parameters=True)),
    static=picture(model=conv, ctx=dict(seed=3, static_graph=True)),
    view=picture(model=conv, ctx=dict(seed=3, gradient_as_bucket_view=True)),
    buffers=picture(model=bn, ctx=dict(seed=3, broadcast_buffers=True)),
    dict=picture(model=of_dict, ds=as_dicts, loss=dict_loss, metrics=[dict_right], sees=True),
    two=picture(model=two_in_two_out, ds=as_pairs, loss=two_loss, metrics=[two_right]),
    stream=picture(ds=streamed(pictures), val_ds=pictures, sees=True),
    groups=picture(model=conv, splitter=groups_of, lr=[.01, .1]),
    groups_slice=picture(model=conv, splitter=groups_of, lr=slice(1e-3, .1)),
    cycle=picture(model=conv, cycle=True),
    cycle_adam=picture(cycle=True, model=conv, splitter=groups_of, opt=torch.optim.Adam, lr=slice(.01, .1)),
    one_valid=picture(n_valid=1), three_valid=picture(n_valid=3, val_bs=1), valid_bs=picture(n_valid=50, val_bs=7),
    accuracy=picture(metrics=[accuracy]),
    fits_go_on=picture(model=bn, fits=[1, dict(n_epoch=1, lr=.05), dict(n_epoch=2, start_epoch=1)]),
    fits_go_on_adam=picture(model=bn_no_bias, fits=[1, dict(n_epoch=2, lr=.005)], **adam),
    seed_of_torch=picture(ctx={}), torchs_loader=picture(loader=DataLoader, metrics=[accuracy]),
    own_loaders=picture(loader=DataLoader, wrap=OwnLoaders))
bias_adam = 'a bias before BatchNorm, with Adam' # README's Limits: the gradient of such a bias is rounding
scenes[bias_adam] = picture(model=bn, fits=[2, dict(n_epoch=2, lr=.05)], preds=False, tol=1e-8, **adam)
# What is trained changes
unfrozen_in = 'before_batch','after_pred','after_step','after_batch'
scenes |= {f'unfreeze in {o}': scene(cbs=later(o, unfreeze)) for o in unfrozen_in}
scenes |= {f'freeze in {o}': scene(cbs=later(o, freeze_more)) for o in ('before_batch','after_loss','after_backward')}
def with_cb(f, *args, **kw): return scene(cbs=lambda: [f(*args)], **kw)
scenes |= {'freeze all but one': scene(cbs=later('before_batch', freeze_all_but_bias)),
           'freeze in a group': with_cb(At, 'before_batch', 1, freeze_first, bs=24, parts=2, accumulate=24, whole=False),
           'a layer is added': with_cb(AddsLayer), 'parameters of the loss': scene(loss=LearnedLoss),
           'another model': with_cb(Renews), 'another model in an epoch': with_cb(At, 'before_batch', 2, new_model),
           'attributes of the model': with_cb(Attributes),
           'new loaders': with_cb(NewLoaders, 1), 'new loaders, one cycle': with_cb(NewLoaders, 0, cycle=True),
           'own loader of a callback': with_cb(Swaps)}
# Sizes. 45: three samples fewer than fill the batches; 37, 38: one or two for the last step
# 47 with drop_last: rank 0 has a full batch more
scenes |= {f'{n} samples': scene(n=n, model=normed if n in (38,45) else net) for n in (1, 2, 3, 5, 37, 38, 45)}
scenes |= {'47, drop_last': scene(n=47, model=normed, dl=dict(drop_last=True)),
           'InstanceNorm': scene(n=37, model=instance_normed),
           'stream, 45': scene(n=45, ds=streamed(points), val_ds=points, model=normed)}
# Batches of any structure
scenes |= {"torch's batch sampler": scene(n=44, loader=by_torchs_batches),
           'batch sampler': scene(n=45, loader=by_batches), 'sampler without a length': scene(n=45, loader=by_sampler),
           'detection': scene(n=45, ds=boxes, loader=by_batches, model=detector, dl=dict(collate_fn=as_lists), loss=of_boxes, preds=False),
           'graph': scene(ds=graphs, dl=dict(collate_fn=as_graph), preds=False),
           'a loss of nodes': scene(ds=graphs, dl=dict(collate_fn=as_graph_with_ids), model=of_nodes, loss=huber, n_inp=2,
                                    metrics=[distance], preds=False),
           'inputs changed in place': scene(model=writes), 'filled again': scene(n=45, dl=dict(collate_fn=fills), preds=False)}
# Cancelled
in_batch = 'before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch'
by_all = [(o, CancelBatchException) for o in in_batch[:-1]]+[(o, CancelFitException) for o in in_batch]
by_all += [('before_step',CancelStepException), ('before_backward',CancelBackwardException)]
scenes |= {f'all cancel in {o}, {exc.__name__}': with_cb(Cancels, o, exc, None, 1, preds=False) for o,exc in by_all}
recorded = [f'all cancel in {o}, CancelBatchException' for o in ('after_loss','before_backward')] # in parts, too
scenes |= {'a repeat that is cancelled late': scene(n=13, bs=12, cbs=before_recorder), # of 13 samples the last step has one
           'cancelled after a step': with_cb(Cancels, 'after_batch', CancelTrainException, -1)}
# Losses: whatever they count, over ranks and over micro-batches
class_losses = dict(label=F.cross_entropy, weights=weighted_ce, focal=focal, returns=sum_and_count, attribute=says_what_it_counts)
def quarter(n):
    "Three of four labels do not count, so that a rank has often nothing to count"
    x,y = classes(n).tensors
    return TensorDataset(x, y.where(torch.arange(n)%4==0, -100))
def chances(n): return TensorDataset(draws(n, 4), draws(n, 2).sigmoid())
def few_ignored(n):
    x,y = classes(n).tensors
    return TensorDataset(x, y.where((torch.arange(n)%24-6).abs()!=1, -100))
def words(n):
    x = ints(9, n, 6)
    return TensorDataset(x, x[:,0]%3)
def rows_of_words(): return Of(lambda m, x: m.out(m.emb(x).mean(1)), emb=nn.Embedding(9, 5, sparse=True), out=nn.Linear(5, 3))
losses = {k: scene(n=37, ds=classes, loss=f) for k,f in class_losses.items()}
if hasattr(nn, 'LinearCrossEntropyLoss'): # torch 2.13
    class LastLayer(nn.LinearCrossEntropyLoss):
        "The last layer is in the loss, which computes chunks"
        def __init__(self): super().__init__(2, 3, options=nn.LinearCrossEntropyOptions())
    losses['last layer'] = scene(n=45, ds=quarter, loss=LastLayer)
losses |= dict(ignore=scene(n=37, ds=quarter, loss=nn.CrossEntropyLoss), mse=scene(n=37),
               bce=scene(n=37, ds=chances, loss=nn.BCEWithLogitsLoss),
               sum=scene(n=37, ds=classes, loss=nn.CrossEntropyLoss(reduction='sum'), lr=.002),
               squares=scene(n=37, loss=squares, lr=.002), distances=scene(n=45, loss=weighted_distances),
               tokens=scene(n=45, ds=texts, model=Tags, loss=of_tokens),
               counted=scene(n=45, ds=texts, model=Tags, loss=counted_tokens))
scenes |= losses | {'a batch without items': scene(n=48, bs=4, ds=few_ignored, loss=guarded, shuffle=False),
                    'sparse gradients': scene(n=45, ds=words, model=rows_of_words, loss=F.cross_entropy, opt=torch.optim.SGD),
                    'weights of torch': scene(n=45, loss=weighted_squares),
                    'a sum, unchecked': scene(n=45, loss=squares, lr=.002, ctx=dict(seed=3, checks=False)),
                    "torch's SyncBatchNorm": scene(n=45, model=bn_of_torch),
                    'own backward pass': with_cb(OwnPass, n=45), 'draws of a step': with_cb(Jitters),
                    'an output of a class': scene(n=37, model=with_class, loss=of_class, preds=False),
                    'activations computed again': scene(n=46, model=checkpointed),
                    'two optimizers': scene(n=45, cbs=lambda: [TrainsHead()], splitter=body)}
scenes |= {f'{k}, accumulated': {**c, 'bs': 24, 'parts': 2, 'accumulate': 24,
                                 **(dict(unlike=('values','final','validate')) if k in ('sum','squares') else adamw)}
           for k,c in losses.items()}
given = scene(n=45, ds=texts_in_dicts, model=OwnLoss, loss=None, ctx=dict(seed=3, find_unused_parameters=True))
of_sum = dict(n=45, loss=nn.MSELoss(reduction='sum'), lr=1e-3)
scenes |= {'loss of the model': given, 'loss of the model, in a tuple': {**given, 'model': lambda: OwnLoss(tuple), 'loss': of_output},
           'keys that forward names': {**given, 'model': ByName},
           'loss of the model, accumulated': {**given, 'n': 48, 'parts': 2, 'accumulate': 12},
           'validated in batches': scene(loss=ranked, ctx=dict(seed=3, split_batches=True), wrap=validates_training),
           'contrastive': scene(loss=contrast), 'a scripted loss': scene(loss=scripted),
           'targets changed in place': scene(n=45, ds=classes, loss=masked_in_place),
           'sum and penalty': with_cb(Penalty, 'after_loss', **of_sum),
           'sum and penalty in place': with_cb(Penalty, 'after_loss', True, **of_sum),
           'sum and late penalty': with_cb(Penalty, 'before_backward', **of_sum),
           'late penalty': with_cb(Penalty, 'before_backward', n=37),
           'tokens and late penalty': with_cb(Penalty, 'before_backward', n=45, ds=texts, model=Tags, loss=of_tokens),
           'weighed twice': with_cb(Twice, n=45), 'sum weighed twice': with_cb(Twice, **of_sum | dict(n=37)),
           'contrastive, twice': with_cb(Twice, loss=contrast, n=37)}
# A second loss, with an optimizer of its own: `average_grads` weighs by samples. 77: five in the last step
adversarial = {f'a discriminator in {o}': with_cb(TrainsDiscriminator, o, n=77, loss=Discriminator, splitter=every_param)
               for o in ('after_pred','before_step','after_step')}
scenes |= adversarial
weighted = dict(n=45, ds=classes, loss=weighted_ce)
scenes |= {'other weights': with_cb(Reweights, 'weight', tensor([.9,.1], dtype=F64), **weighted),
           'other labels ignored': with_cb(Reweights, 'ignore_index', 0, **weighted),
           'another reduction': with_cb(Reweights, 'reduction', 'sum', **weighted),
           'labels ignored': with_cb(Ignores, 'before_batch', **weighted),
           'labels ignored late': with_cb(Ignores, 'after_pred', **weighted),
           'labels changed after the loss': with_cb(Ignores, 'after_loss', unlike=('values','final'), **weighted)}
# Accumulation, clipping, rates: micro-batches of 6 in all
def micro(n=48, bs=12, parts=2, accumulate=12, **kw): return scene(n=n, bs=bs, parts=parts, accumulate=accumulate, **kw)
of_four = partial(micro, 44, 24, 4, 24)
scenes |= {'groups, even': micro(), 'groups, the last one short': micro(42), 'groups, the last batch short': of_four(),
           'groups, not a multiple': micro(48, 24, 2, 18), 'groups, one an epoch': micro(48, 48, 8, 1000),
           'groups, clipped, decay': of_four(cbs=lambda: [GradientClip(.3), decays()]),
           'groups, stream': of_four(ds=streamed(points), val_ds=points), 'groups, adam': of_four(**adam),
           'groups, static graph': of_four(ctx=dict(seed=3, static_graph=True)),
           'groups, view': of_four(ctx=dict(seed=3, gradient_as_bucket_view=True)),
           'groups, unused': of_four(ds=pictures, loss=F.cross_entropy, model=part_used, ctx=dict(seed=3, find_unused_parameters=True)),
           'groups, bn': micro(86, 48, 4, 48, model=normed, whole=False)} # its statistics are those of a batch, not of a group
scenes |= {f'clip {k}': scene(cbs=partial(clips, **kw)) for k,kw in dict(
    norm=dict(max_norm=.3), norm1=dict(max_norm=.5, norm_type=1.), max=dict(max_norm=.1, norm_type=float('inf')),
    measure=dict(max_norm=float('inf'))).items()}
# Cancelled in the middle of a group, on all ranks or on one; also with what changes gradients before a step
in_groups = partial(micro, 96, 24, 2, 24, whole=False) # micro-batches of 12, which 2, 3 and 4 ranks can share
in_parts = dict(seed=3, global_bs=12, max_bs=1, find_unused_parameters=True)
scenes |= {'weighed twice, groups': in_groups(cbs=lambda: [Twice()]), 'heads of parts': scene(n=29, model=two_heads, ctx=in_parts),
           'filled again, in parts': {**scenes['filled again'], 'ctx': in_parts},
           'no validation data': scene(n=24, n_valid=0, preds=False)}
events = 'before_batch','after_pred','after_backward'
scenes |= {f'the first of a group cancelled, {f.__name__}': in_groups(loss=f, cbs=lambda: [SkipsFirst()]) for f in (nn.MSELoss, huber)}
several = CancelBatchException,CancelTrainException,CancelFitException
where = {'all': None, 'one rank': -1}
# Each event and each exception, once on all ranks and once on one
for (_name,_rank),_several in zip(where.items(), (several, several[2:]+several[:2])):
    for _event,_what in zip(events, _several):
        _cbs = partial(cancels, _event, _what, _rank, at=2 if _rank is None else 1)
        scenes[f'{_what.__name__[6:-9]} in {_event}, {_name}'] = in_groups(model=normed, cbs=_cbs, alone=_rank is None)
for (_name,_rank),_at in itertools.product(where.items(), (0,1)):
    _kw = dict(alone=_rank is None)
    _step = partial(cancels, 'before_step', CancelStepException, _rank, _at)
    _backward = partial(cancels, 'before_backward', CancelBackwardException, _rank, _at)
    scenes |= {f'Backward, {_name}, {_at}': in_groups(cbs=_backward, **_kw),
               f'Step, {_name}, {_at}': in_groups(cbs=_step, **_kw),
               f'Step, scaled, clipped, {_name}, {_at}': scene(cbs=partial(scaled, _step), **_kw)}
# One rank cancels where the loss has a parameter, or is of a kind that nothing is known of
_first = dict(alone=False, cbs=partial(cancels, 'before_backward', CancelBackwardException, -1, 0))
scenes |= {'Backward, one rank, parameters of the loss': scene(loss=LearnedLoss, **_first),
           'Backward, one rank, an unknown loss': in_groups(loss=huber, **_first)}
# Mixed precision, where a part that overflows spoils its group; float64 is left alone by autocast, and so is exact
mixed = dict(bf16=dict(cbs=lambda: [MixedPrecision('bf16')]), fp16=dict(cbs=half_precision),
             overflow=dict(cbs=lambda: half_precision(Overflow((0,1), (1,0)))),
             clip=dict(cbs=lambda: half_precision(GradientClip(.3), Overflow((0,1)), decays())),
             bn=dict(model=normed, cbs=lambda: half_precision(Overflow((0,1)))),
             bn_bf16=dict(model=normed, cbs=lambda: [MixedPrecision('bf16')]))
mixed = {k: dict(o, dtype=F32, tol=3e-3, unlike=('opt',)) for k,o in mixed.items()} \
        | dict(exact=dict(cbs=mixed['clip']['cbs']))
scenes |= {f'amp {k}': scene(**o) for k,o in mixed.items()}
scenes |= {f'amp {k}, groups': in_groups(**o) for k,o in mixed.items()}
scenes |= dict(lookahead=scene(opt=look), lookahead_adam=scene(opt=look_adam, lr=.01),
               lookahead_cycle=with_cb(one_cycle, opt=look),
               lookahead_everything=in_groups(opt=look, cbs=lambda: half_precision(GradientClip(.3), Overflow((0,1)), one_cycle())))
hooks = ('fp16','fp16',1e-3), ('bf16','bf16',1e-2), ('powersgd','powersgd',.1), ('own',own_hook,1e-6)
scenes |= {f'comm_hook {k}': scene(dtype=F32, tol=tol, opt=torch.optim.SGD, ctx=dict(seed=3, comm_hook=o)) for k,o,tol in hooks}
scenes['comm_hook, groups, amp, clip'] = in_groups(dtype=F32, tol=1e-2, ctx=dict(seed=3, comm_hook='bf16'),
                                                   cbs=lambda: half_precision(GradientClip(.3)))

# In float32, to 1e-5
in_float32 = 'conv','lstm','bn','split','stream','weights','tokens, accumulated','groups, clipped, decay'
scenes |= {f'{k}, float32': {**scenes[k], 'dtype': F32, 'tol': 1e-5} for k in in_float32}

# What another scene shows as well: these are run before a release
rare = {'rms','bn_adam','groups_slice','cycle','fits_go_on_adam','three_valid','accuracy','2 samples','5 samples','37 samples', # 37: `mse`
        'unfreeze in after_batch','freeze in before_batch','bce','groups, even','groups, adam','groups, unused','groups, view','clip norm1',
        *(f'all cancel in {o}, CancelFitException' for o in ('after_pred','after_loss','after_backward','before_step')),
        *(f'{o}, accumulated' for o in ('label','focal','attribute','mse','bce')),
        *(f'Step, scaled, clipped, {o}, 1' for o in where), *(f'amp {o}' for o in ('fp16','bn_bf16')),
        *(f'amp {o}, groups' for o in ('fp16','bn_bf16','overflow')), 'lookahead_adam','lookahead_cycle','comm_hook fp16',
        *(f'{o}, float32' for o in ('conv','split','stream'))}
