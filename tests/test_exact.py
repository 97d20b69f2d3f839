"What ordinary scripts do off the usual paths: the run on 2 and 3 ranks is the one of one process, or ranks are told that it is not"
import re, warnings
import numpy as np, pytest, torch
from torch import nn, tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset
from learnerdist.all import (Callback, all_sum, DataLoaders, GradientAccumulation, Learner, TfmdDL, gather_with_grad, get_model,
                             group_rank, group_size, process_group, set_seed)
from learnerdist.learner import losses as learner_losses
from learnerdist.learner.callback import CancelBackwardException, CancelBatchException, CancelTrainException
from learnerdist.testing import RanksError, run_ranks

N,BS = 48,6 # a global batch of 12: on 1, 2 and 3 ranks 12, 6 and 4 each

def data(n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 4, generator=g, dtype=torch.double), torch.randn(n, 2, generator=g, dtype=torch.double))

def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()

def size(): return 12//group_size()
def sgd(ps, lr): return torch.optim.SGD(ps, lr=.1, momentum=.9)
def every_param(m): return list(m.parameters())

def learner(model=None, ds=None, loss=None, splitter=every_param, opt=sgd, **kw):
    ds = data() if ds is None else ds
    return Learner(DataLoaders(TfmdDL(ds, size(), shuffle=True), TfmdDL(ds, size())), model or net(), loss or nn.MSELoss(), opt,
                   splitter=splitter, **kw)

def flat(learn): return torch.cat([p.detach().reshape(-1) for p in learn.model.parameters()])

def fitted(learn, *cbs, n=2):
    with learn.distrib_ctx(seed=3), learn.no_logging(): learn.fit(n, cbs=list(cbs))
    return flat(learn),learn.recorder.losses,learn.recorder.values

# --- what is trained --------------------------------------------------------------------------------------------------------

class Freezes(Callback):
    "Freezes the first layer at once, and unfreezes it at `event` of the sixth step, or freezes another one then"
    def __init__(self, event, later): self.event,self.later = event,later
    def before_fit(self): self.model[0].requires_grad_(False)
def _freezes(event):
    def f(self):
        if self.event==event and self.training and self.train_iter==5: self.later(self.model)
    return f
for _o in ('before_batch','after_pred','after_loss','after_backward','after_step','after_batch'): setattr(Freezes, _o, _freezes(_o))

def unfreeze(m): m[0].requires_grad_(True)
def freeze_more(m): m[2].requires_grad_(False)
def freeze_all_but_bias(m):
    for p in m.parameters(): p.requires_grad_(False)
    m[4].bias.requires_grad_(True)

class AddsLayer(Callback):
    "A new layer after the first epoch, in the model and in the optimizer"
    def after_epoch(self):
        if self.epoch: return
        torch.manual_seed(8)
        self.model.append(nn.Linear(2, 2).double())
        self.opt.add_param_group(dict(params=list(self.model[-1].parameters())))

class CancelAt(Callback):
    "Raises `what` at `event` of the third step of each epoch: on all ranks, or on the last one"
    def __init__(self, event, what, last=False):
        self.what,self.last = what,last
        setattr(self, event, self._raise)
    def _raise(self):
        if self.training and self.iter==2 and (not self.last or group_rank()==group_size()-1): raise self.what

class LearnedLoss(nn.Module):
    "Has parameters of its own, which the optimizer trains and the model does not have"
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.double))
    def forward(self, p, t): return ((p*self.scale-t)**2).mean()

class Shortened(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.emb,self.out = nn.Embedding(20, 4, max_norm=.8).double(),nn.Linear(4, 2).double()
    def forward(self, i): return self.out(self.emb(i))

def tokens():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(20, (N,), generator=g), torch.randn(N, 2, generator=g, dtype=torch.double))

def loss_params():
    loss = LearnedLoss()
    learn = learner(loss=loss, splitter=lambda m: [*m.parameters(),*loss.parameters()])
    w,*rest = fitted(learn)
    return torch.cat([w,loss.scale.detach()]),*rest

def contrast(p, t): return torch.logsumexp(-torch.cdist(gather_with_grad(p), gather_with_grad(t.detach())), 1).mean()
contrast.n_items = 'whole'

def contrastive(): return loaded(TfmdDL(data(), size(), shuffle=True), TfmdDL(data(11, 3), 3), net(), contrast)

class Attributes(Callback):
    "To a callback, the learner's model is the user's at every event of training"
    def before_batch(self): self.model.temperature = self.iter
    def after_pred(self): assert isinstance(self.model, nn.Sequential) and self.model[0] is self.model._modules['0']
    def after_loss(self): self.learn.seen = self.model.temperature

def attributes():
    learn = learner()
    res = fitted(learn, Attributes())
    return *res,learn.seen,learn.model.temperature

class NewLoaders(Callback):
    "Other data from the second epoch on, as in progressive resizing"
    def before_epoch(self):
        if self.epoch==1: self.learn.dls = DataLoaders(TfmdDL(data(24, 7), size(), shuffle=True), TfmdDL(data(24, 7), size()))

def new_loaders_then_one_cycle():
    learn = learner()
    with learn.distrib_ctx(seed=3), learn.no_logging():
        learn.dls = DataLoaders(TfmdDL(data(24, 7), size(), shuffle=True), TfmdDL(data(24, 7), size()))
        learn.fit_one_cycle(2, .1)
    return flat(learn),learn.recorder.losses,learn.recorder.lrs

def folds():
    "One seed at the top, and a model and a context for each fold"
    set_seed(42)
    res = []
    for i in range(3):
        model = nn.Linear(4, 2).double()
        learn = learner(model, Subset(data(), [j for j in range(N) if j%4!=i]))
        with learn.distrib_ctx(), learn.no_logging(): learn.fit(1)
        res.append(flat(learn))
    return torch.cat([*res,torch.rand(3, dtype=torch.double)]),[],[]

def batch_sampler():
    "torch's own, over a number of samples that does not divide"
    ds = data(44)
    def dl(): return DataLoader(ds, batch_sampler=BatchSampler(RandomSampler(ds), size(), False))
    learn = Learner(DataLoaders(dl(), dl()), net(), nn.MSELoss(), sgd)
    with learn.distrib_ctx(seed=3), learn.no_logging(): learn.fit(2)
    return tensor(0.),[],[o[1] is not None for o in learn.recorder.values]

# --- batches of different sizes, and of any structure ------------------------------------------------------------------------

def normed():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()

def instance_normed():
    torch.manual_seed(5)
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (2,2)), norm, nn.Flatten(), nn.Linear(4, 2)).double()

class Stream(IterableDataset):
    def __init__(self, ds): self.ds = ds
    def __iter__(self): return iter(self.ds)

def loaded(dl, valid, model, loss, *cbs, **kw):
    learn = Learner(DataLoaders(dl, valid), model, loss, sgd, splitter=every_param, **kw)
    res = fitted(learn, *cbs)
    return *res,[o.tolist() for o in learn.model.buffers()]

def of_length(n, model=normed, **kw):
    ds = data(n)
    return loaded(TfmdDL(ds, size(), shuffle=True, **kw), TfmdDL(data(11, 3), 3), model(), nn.MSELoss())

def a_stream():
    return loaded(TfmdDL(Stream(data(45)), size()), TfmdDL(data(11, 3), 3), normed(), nn.MSELoss())

class Tags(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.emb,self.rnn,self.out = nn.Embedding(9, 5).double(),nn.GRU(5, 5, batch_first=True).double(),nn.Linear(5, 4).double()
    def forward(self, x): return self.out(self.rnn(self.emb(x))[0])

def texts(n):
    g = torch.Generator().manual_seed(4)
    x = torch.randint(9, (n,6), generator=g)
    return list(zip(x, (x%4).masked_fill(torch.arange(6)>=torch.randint(1, 7, (n,1), generator=g), -100)))

def of_tokens(out, y): return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()) # a user's; nothing is said of it
def flat_tokens(): return loaded(TfmdDL(texts(45), size(), shuffle=True), TfmdDL(texts(11), 3), Tags(), of_tokens)

class Boxes(nn.Module):
    "From a list of pictures to a list of dicts"
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.lin = nn.Linear(4, 2).double()
    def forward(self, xs): return [dict(center=self.lin(x).mean(0)) for x in xs]

def of_boxes(outs, ys): return torch.stack([((o['center']-y['boxes'])**2).mean() for o,y in zip(outs, ys)]).mean()
def scenes_with_boxes(n):
    g = torch.Generator().manual_seed(6)
    rows = lambda *s: torch.randn(*s, generator=g, dtype=torch.double)
    return [(rows(3, 4),dict(boxes=rows(2, 2))) for _ in range(n)]

class Batches:
    "A batch sampler of the user's"
    def __init__(self, n): self.n = n
    def __len__(self): return -(-self.n//size())
    def __iter__(self): return iter(torch.randperm(self.n).split(size()))

class OwnLoss(Tags):
    "Computes its loss itself, as models of Hugging Face do: the mean over labels that are not -100"
    def __init__(self, kind=dict):
        super().__init__()
        self.kind,self.idle = kind,nn.Linear(2, 2).double()
    def forward(self, b):
        out = super().forward(b['x'])
        loss = nn.functional.cross_entropy(out.flatten(0, 1), b['labels'].flatten())
        return dict(loss=loss, logits=out) if self.kind is dict else (loss,out)

def of_output(out, b): return out[0]
def loss_of_model(kind=dict, loss=None, n=45, cb=()):
    rows = lambda n: [dict(x=x, labels=y) for x,y in texts(n)]
    dls = DataLoaders(TfmdDL(rows(n), size()//(2 if cb else 1), shuffle=True), TfmdDL(rows(11), 3))
    learn = Learner(dls, OwnLoss(kind), loss, sgd, splitter=every_param)
    with learn.distrib_ctx(seed=3, find_unused_parameters=True), learn.no_logging(): learn.fit(2, cbs=cb)
    return flat(learn),learn.recorder.losses,learn.recorder.values

def as_lists(b): return tuple(map(list, zip(*b)))
def detection():
    dl = DataLoader(scenes_with_boxes(45), batch_sampler=Batches(45), collate_fn=as_lists)
    return loaded(dl, TfmdDL(scenes_with_boxes(11), 3, collate_fn=as_lists), Boxes(), of_boxes)

def as_graph(b): return torch.cat([o for o,_ in b]),torch.cat([o for _,o in b])
def graphs(n):
    g = torch.Generator().manual_seed(6)
    return [(torch.randn(k, 4, generator=g, dtype=torch.double),torch.randn(k, 2, generator=g, dtype=torch.double))
            for k in torch.randint(1, 6, (n,), generator=g).tolist()]
def nodes(): return loaded(TfmdDL(graphs(48), size(), collate_fn=as_graph), TfmdDL(graphs(11), 3, collate_fn=as_graph), net(), nn.MSELoss())

class OfNodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
    def forward(self, x, ids): return self.net(x).sum(1)
def with_ids(b): return torch.cat([o for o,_ in b]),torch.arange(len(b)),torch.cat([o.sum(1) for _,o in b])
def huber(p, t): return ((p-t)**2+1).sqrt().mean()
def nodes_and_ids():
    "A loss and a metric of nodes, of which nothing is known; a tensor tells the number of graphs"
    dls = DataLoaders(*[TfmdDL(graphs(n), bs, collate_fn=with_ids) for n,bs in ((48,size()),(11,3))])
    dls.n_inp = 2
    return fitted(Learner(dls, OfNodes(), huber, sgd, metrics=lambda p,t: (p-t).abs().mean()))

class WeighedTwice(Callback):
    "A second backward pass, whose loss is weighed by hand"
    run_valid = False
    def before_step(self):
        share = 1 if self.learn.global_items is None else self.learn.items/self.learn.global_items
        (share*self.loss_func((self.wrapper or self.model)(*self.xb), *self.yb)).backward()
def weighed_twice(): return loaded(TfmdDL(data(45), size()), TfmdDL(data(11, 3), 3), net(), nn.MSELoss(), WeighedTwice())

class Penalty(Callback):
    run_valid = False
    def after_loss(self): self.learn.loss_grad = self.loss_grad+.01*sum(p.square().sum() for p in self.model.parameters())
def sum_and_penalty():
    return loaded(TfmdDL(data(45), size()), TfmdDL(data(11, 3), 3), net(), nn.MSELoss(reduction='sum'), Penalty(), SmallSteps())

class PenaltyInPlace(Penalty):
    def after_loss(self): self.learn.loss_grad += .01*sum(p.square().sum() for p in self.model.parameters())
def sum_and_penalty_in_place():
    return loaded(TfmdDL(data(45), size()), TfmdDL(data(11, 3), 3), net(), nn.MSELoss(reduction='sum'), PenaltyInPlace(), SmallSteps())

class SmallSteps(Callback):
    def before_fit(self): self.opt.param_groups[0]['lr'] = 1e-3

class FreezeBetween(Callback):
    "Freezes the first layer after the first of two micro-batches"
    def before_batch(self):
        if self.training and self.train_iter==1: self.model[0].requires_grad_(False)
def freeze_in_a_group():
    acc = GradientAccumulation(size())
    return loaded(TfmdDL(data(48), size()//2), TfmdDL(data(11, 3), 3), net(), nn.MSELoss(), acc, FreezeBetween())

def odd(p, t): return ((p-t)/(t.std(0)+1)).pow(2).mean()
def validated():
    "Before any fit: a loss that is no mean over samples, and one of the whole batch on ranks with different numbers of batches"
    res = []
    for loss in (odd, contrast):
        learn = Learner(DataLoaders(TfmdDL(data(24), size()), TfmdDL(data(11, 3), 4)), net(), loss, sgd)
        with learn.distrib_ctx(seed=3): res += learn.validate()
    return tensor(res),[],[]

def labelled(n): return TensorDataset(data(n).tensors[0], torch.randint(2, (n,), generator=torch.Generator().manual_seed(n)))
class Ignores(Callback):
    "Some labels do not count, on each rank another number: known before the forward pass, or only in `event`"
    run_valid = False
    def __init__(self, event): setattr(self, event, self._ignore)
    def _ignore(self): self.learn.yb = self.yb[0].where(self.xb[0][:,0]>0, -100),
class Harmless(Callback):
    keeps_batch = True
    def after_pred(self): pass
def weighted_ce(): return nn.CrossEntropyLoss(weight=tensor([.3,.7], dtype=torch.double))
def ignored(event, *cbs):
    return loaded(TfmdDL(labelled(45), size()), TfmdDL(labelled(11), 3), net(), weighted_ce(), Ignores(event), *cbs)

def first_labels_in_order():
    "A weighted loss that nobody knows, and the labels 0, 1, 2 … of its first batch: they are classes, and no contrastive loss's samples"
    labels = torch.cat([torch.arange(12),torch.randint(12, (N-12,), generator=torch.Generator().manual_seed(1))])
    weight = torch.linspace(.1, 3., 12, dtype=torch.double)
    torch.manual_seed(2)
    return loaded(TfmdDL(TensorDataset(data().tensors[0], labels), size()), TfmdDL(labelled(11), 3), nn.Linear(4, 12).double(),
                  lambda p,t: nn.functional.cross_entropy(p, t, weight))

class Writes(nn.Module):
    "Changes what it is given: a tensor, or a dict"
    def __init__(self, how): super().__init__(); self.how,self.net = how,net() # noqa: E702
    def forward(self, b): return self.net(self.how(b))
def in_a_dict(b): return dict(x=torch.stack([o[0] for o in b])),torch.stack([o[1] for o in b])
def writes(how, **kw): return loaded(TfmdDL(data(), size(), shuffle=True, **kw), TfmdDL(data(11, 3), 3, **kw), Writes(how), nn.MSELoss())
def written(b):
    b['x'] = b['x']*2
    return b['x']

def counted_calls():
    "A loss that goes by the number of its calls"
    n = 0
    def annealed(p, t):
        nonlocal n
        n += p.requires_grad
        return ((p-t)**2).mean()+min(1, n/9)*(p**2).mean()
    res = loaded(TfmdDL(data(), size(), shuffle=True), TfmdDL(data(11, 3), 3), net(), annealed)
    return *res,[n]
class Kept(nn.Module):
    "A loss with a list and a buffer that it replaces"
    def __init__(self): super().__init__(); self.steps = []; self.register_buffer('n', torch.zeros(())) # noqa: E702
    def forward(self, p, t):
        if p.requires_grad:
            self.n = self.n+1
            self.steps.append(float(self.n))
        return ((p-t)**2).mean()*len(self.steps)
@torch.jit.script
def scripted(p, t): return ((p-t)**2).mean()
def masked_in_place(p, t):
    m = t!=0
    t[~m] = 1
    return (nn.functional.cross_entropy(p, t, reduction='none')*m).mean()
class Reweights(Callback):
    "Other options of the loss from the second epoch on"
    def __init__(self, **kw): self.kw = kw
    def before_epoch(self):
        if self.epoch: vars(self.learn.loss_func).update({k: v for k,v in self.kw.items() if k!='weight'})
        if self.epoch and 'weight' in self.kw: self.learn.loss_func.weight = self.kw['weight']
def of_labels(loss, *cbs): return loaded(TfmdDL(labelled(45), size()), TfmdDL(labelled(11), 3), net(), loss, *cbs)
class NewModel(Callback):
    "Another model from the second epoch on, or from the third step of the first"
    def __init__(self, event): setattr(self, event, self._renew)
    def _renew(self):
        if self.train_iter!=(2 if hasattr(self, 'before_batch') else N//12) or not self.training and hasattr(self, 'before_batch'): return
        torch.manual_seed(9)
        self.learn.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        self.learn.create_opt()

unfrozen_in = 'before_batch','after_pred','after_step','after_batch'
scenes = {f'unfreeze in {o}': lambda o=o: fitted(learner(), Freezes(o, unfreeze)) for o in unfrozen_in}
scenes |= {f'freeze in {o}': lambda o=o: fitted(learner(), Freezes(o, freeze_more)) for o in ('before_batch','after_loss','after_backward')}
scenes |= {'freeze all but one': lambda: fitted(learner(), Freezes('before_batch', freeze_all_but_bias)),
           'a layer is added': lambda: fitted(learner(), AddsLayer()), 'parameters of the loss': loss_params,
           'max_norm': lambda: fitted(learner(Shortened(), tokens())), 'contrastive': contrastive,
           'attributes of the model': attributes, 'new loaders': lambda: fitted(learner(), NewLoaders()),
           'new loaders, one cycle': new_loaders_then_one_cycle, 'folds': folds, 'batch sampler': batch_sampler}
# 45: three samples fewer than fill the batches; 37, 38: one or two for the last step; 47 with drop_last: rank 0 has a full batch more
scenes |= {'45 samples': lambda: of_length(45), '37 samples': lambda: of_length(37, net), '38 samples': lambda: of_length(38),
           '47, drop_last': lambda: of_length(47, drop_last=True),
           '2 samples': lambda: of_length(2, net), 'stream': a_stream, 'tokens': flat_tokens, 'detection': detection, 'graph': nodes,
           'max_norm, cancelled': lambda: fitted(learner(Shortened(), tokens()), CancelAt('before_batch', CancelTrainException)),
           'a backward pass cancelled': lambda: fitted(learner(), CancelAt('before_backward', CancelBackwardException)),
           'cancelled after a step': lambda: fitted(learner(), CancelAt('after_batch', CancelTrainException, True)),
           'InstanceNorm': lambda: of_length(37, instance_normed),
           'loss of the model': loss_of_model, 'loss of the model, in a tuple': lambda: loss_of_model(tuple, of_output),
           'loss of the model, accumulated': lambda: loss_of_model(n=48, cb=[GradientAccumulation(size())]),
           'sum and penalty': sum_and_penalty, 'sum and penalty in place': sum_and_penalty_in_place, 'a loss of nodes': nodes_and_ids,
           'first labels in order': first_labels_in_order,
           'inputs changed in place': lambda: writes(lambda x: x.sub_(.5)),
           'inputs changed in a dict': lambda: writes(written, collate_fn=in_a_dict),
           'inputs taken out of a dict': lambda: writes(lambda b: b.pop('x'), collate_fn=in_a_dict), 'a loss that counts': counted_calls,
           'a loss that keeps': lambda: loaded(TfmdDL(data(), size()), TfmdDL(data(11, 3), 3), net(), Kept()),
           'a scripted loss': lambda: loaded(TfmdDL(data(), size()), TfmdDL(data(11, 3), 3), net(), scripted),
           'targets changed in place': lambda: of_labels(masked_in_place),
           'other weights': lambda: of_labels(weighted_ce(), Reweights(weight=tensor([.9,.1], dtype=torch.double))),
           'other labels ignored': lambda: of_labels(weighted_ce(), Reweights(ignore_index=0)),
           'another reduction': lambda: of_labels(weighted_ce(), Reweights(reduction='sum')),
           'another model': lambda: fitted(learner(), NewModel('before_epoch')),
           'another model in an epoch': lambda: fitted(learner(), NewModel('before_batch')),
           'labels ignored': lambda: ignored('before_batch'), 'labels ignored, kept': lambda: ignored('before_batch', Harmless()),
           'labels ignored late': lambda: ignored('after_pred'), 'labels changed after the loss': lambda: (*ignored('after_loss')[:2],[]),
           'weighed twice': weighed_twice, 'freeze in a group': freeze_in_a_group, 'validate first': validated}

def all_scenes():
    with process_group(): return {k: f() for k,f in scenes.items()}

@pytest.fixture(scope='module')
def alone(): return {k: f() for k,f in scenes.items()}

@pytest.fixture(scope='module', params=[2,3])
def ranks(request): return run_ranks(all_scenes, request.param, timeout_s=300)

@pytest.mark.parametrize('k', scenes)
def test_as_in_one_process(alone, ranks, k):
    want = alone[k]
    for got in (o[k] for o in ranks):
        assert got[0].shape==want[0].shape and (got[0]-want[0]).abs().max()<=1e-9
        assert torch.allclose(tensor(got[1], dtype=torch.double), tensor(want[1], dtype=torch.double), atol=1e-9)
        assert len(got[2])==len(want[2]) and len(got)==len(want)
        for a,b in zip(_numbers([got[2:]]), _numbers([want[2:]]), strict=True): assert a==pytest.approx(b, abs=1e-9, nan_ok=True)

def _numbers(o):
    "The numbers in nested lists, in order"
    return [p for v in o for p in _numbers(v)] if isinstance(o, (list,tuple)) else [float('nan') if o is None else o]

# --- what cannot be the same is said ----------------------------------------------------------------------------------------

def told(make, **ctx):
    "What rank 0 was warned of, or the error of each rank"
    with process_group(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        learn = make()
        try:
            with learn.distrib_ctx(seed=3, **ctx), learn.no_logging(): learn.fit(2)
        except Exception as e: return f'{type(e).__name__}: {e}'
        return ' | '.join(str(o.message) for o in seen)

def batch_std(p, t): return ((p-t)/(t.std(0)+1)).pow(2).mean()
def odd_loss(): return learner(loss=batch_std)
def other_split():
    torch.manual_seed(group_rank())
    return learner(ds=Subset(data(), torch.randperm(N)[:24].tolist()))
def other_length(): return learner(ds=data(24+6*group_rank()))
def other_rate(): return learner(opt=lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=.1*(1+group_rank())))

class Counts(nn.Module):
    "Keeps a mean of its inputs, as a codebook or a feature normaliser does"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2).double()
        self.register_buffer('seen', torch.zeros(4, dtype=torch.double))
    def forward(self, x):
        if self.training: self.seen.lerp_(x.detach().mean(0), .1)
        return self.lin(x)
def own_buffer(): return learner(Counts())

class Drifts(Callback):
    "Changes weights on one rank alone"
    def after_step(self):
        if group_rank()==1:
            with torch.no_grad(): get_model(self.model)[2].bias.add_(1e-6)
class Keeps(Callback):
    "What differs on the ranks as it should, and what is the same"
    rank_state = ('own',)
    def before_fit(self): self.own,self.last,self.weights,self.seen = torch.zeros(1),torch.zeros(1),{},np.zeros(1)
    def after_batch(self):
        model = get_model(self.learn.model)
        self.own,self.last,model.seen = self.own+1+group_rank(),self.pred.detach(),self.pred.detach().sum()
        self.weights,self.seen = {k: o.detach().clone() for k,o in model.named_parameters()},self.seen+1
def keeps():
    learn = learner(cbs=Keeps())
    learn.model.seen = torch.zeros(())
    return learn

def drift(): return learner(cbs=Drifts())
def other_path(): return learner(path=f'/tmp/run-{group_rank()}')

def pairs(): return Learner(DataLoaders(TfmdDL(data(), 2)), net(), batch_std, sgd)
def batch_mean(p, t): return 2*((p-t)**2).mean()
def single_samples(): return Learner(DataLoaders(TfmdDL(data(8), 1)), net(), batch_mean, sgd)
class WithLoss(nn.Module):
    "Returns its loss, as models of Hugging Face do"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2).double()
    def forward(self, x): return dict(loss=self.lin(x).square().mean())
class Pairs(WithLoss):
    "A contrastive loss: each row against the other rows of its batch"
    def forward(self, x):
        out = self.lin(x)
        return dict(loss=nn.functional.cross_entropy(out@out.T, torch.arange(len(out))))
def of_pairs(): return learner(Pairs(), loss=given)
def given(out, y): return out['loss']
def of_model(): return learner(WithLoss(), loss=given)
class Second(Callback):
    "Trains a model of its own, on each rank with that rank's samples"
    def __init__(self): self.net = nn.Linear(4, 1).double()
    def before_batch(self):
        with torch.no_grad(): self.net.weight.add_(self.learn.xb[0].mean(0)*self.training)
def second_model():
    torch.manual_seed(1)
    return learner(cbs=Second())

def by_weight(p, t):
    w = torch.tensor([1.,9.], dtype=torch.double)[t]
    return (nn.functional.cross_entropy(p, t, reduction='none')*w).sum()/w.sum()
def with_loss(loss_func): return Learner(DataLoaders(TfmdDL(data(48), size())), net(), loss_func, sgd)
def distances(): return with_loss(lambda p,t: nn.functional.mse_loss(torch.cdist(p, p), torch.cdist(t, t)))
def alike(): return with_loss(lambda p,t: nn.functional.binary_cross_entropy_with_logits(p@p.T, (t[:,None]>t).double().mean(2)))
def of_centred(): return with_loss(lambda p,t: nn.functional.l1_loss(p-p.mean(0), t))
def gram(): return with_loss(lambda p,t: nn.functional.mse_loss(p.T@p, t.T@t))
def counted(): return with_loss(lambda p,t: (nn.functional.mse_loss(p-p.mean(0), t, reduction='sum'),tensor(float(t.numel()))))
def of_sizes():
    "Means of torch's losses over items of the samples, which follow from those of parts"
    def of_some(p, t): return nn.functional.mse_loss(p[t[:,0]>0], t[t[:,0]>0])
    return with_loss(of_some)

def one_class():
    "Labels alternate as ranks do, so that each rank has one class in every batch"
    i = torch.arange(48)
    return Learner(DataLoaders(TfmdDL(TensorDataset(data(48).tensors[0], i%2), size())), net(), by_weight, sgd)

class Twice(Callback):
    "A second backward pass, by DDP"
    run_valid = False
    def before_step(self): self.loss_func(self.wrapper(*self.xb), *self.yb).backward()
def twice(): return Learner(DataLoaders(TfmdDL(data(45), size())), net(), nn.MSELoss(), sgd, cbs=Twice())

class Advantages(Callback):
    "Normalises targets by the statistics of the batch; `over`: from a tensor (n,…) to its sum over ranks"
    run_valid = False
    def __init__(self, over=lambda o: o): self.over = over
    def before_batch(self):
        y = self.yb[0]
        self.learn.yb = (y-self.over(y.sum(0))/self.over(tensor(float(len(y)))),)

class Centred(nn.Module):
    def forward(self, x): return x-x.mean(0)
class Drawing(nn.Module):
    "Draws also in evaluation"
    def forward(self, x): return x+torch.randn_like(x)
def centred(): return learner(model=nn.Sequential(nn.Linear(4, 4), Centred(), nn.Dropout(.1), nn.Linear(4, 2)).double())
def unrelated(): return learner(model=nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4), nn.Linear(4, 2), Drawing()).double())

class Spoken(torch.utils.data.Dataset):
    "Sequences with labels of other lengths, which a batch holds one after the other"
    def __len__(self): return 24
    def __getitem__(self, i): return torch.full((12, 4), i/24, dtype=torch.double),torch.arange(1, 3+i%3)
def together(b): return torch.stack([o[0] for o in b]),torch.cat([o[1] for o in b]),tensor([len(o[1]) for o in b])
def ctc(p, t, n): return nn.functional.ctc_loss(p.log_softmax(-1).transpose(0, 1), t, torch.full_like(n, 12), n)
def spoken():
    dls = DataLoaders(torch.utils.data.DataLoader(Spoken(), size(), collate_fn=together))
    dls.n_inp = 1
    return Learner(dls, nn.Linear(4, 6).double(), ctc, sgd)

class Ordinary(Callback):
    "Constants, noise, a part of the samples, and sorting: what a sample becomes does not depend on others"
    run_valid = False
    def before_batch(self):
        x,i,half = (self.xb[0]-.5)/.25,self.xb[0][:,0].argsort(),torch.rand(len(self.y))<.5
        x = (x+torch.randn_like(x)).float().double()
        x[half] = x[half].flip(-1)
        x = torch.cat([x[:2]*2, x[2:]])
        self.learn.xb,self.learn.yb = (x[i],),(self.y[i],)
def ordinary(): return learner(cbs=[Ordinary(),Advantages(all_sum)])

def lazy(): return learner(nn.Sequential(nn.LazyLinear(2)).double())
def summed(g): return all_sum(g)/group_size()
class Masks(Callback):
    "Gradients by hooks that scale them, add them up or only look at them, and a loss that is scaled"
    def before_fit(self):
        fs = (lambda g: g*.5),(lambda g: None),summed
        self.seen = [p.register_hook(f) for p in self.model.parameters() for f in fs]
    def after_loss(self): self.learn.loss_grad = 2*(self.learn.loss_grad*.7+3)
    def after_fit(self): [o.remove() for o in self.seen]
def masks(): return learner(cbs=Masks())

@pytest.mark.parametrize('make, want', [
    (lazy, '^ValueError: the model has lazy layers'),
    (centred, r'^\[mixes-samples\] predictions of Sequential depend on which other samples are in the batch'),
    *[(o, r'^\[loss-not-mean\] the loss .* of a batch does not follow from its values on parts of it.*n_items')
      for o in (distances,alike,of_centred,gram,counted,odd_loss,pairs,of_pairs,one_class)],
    (other_split, r'\[different-data\] .*: training data.indices: #'),
    (other_length, r'^ValueError: \[different-data\] .*len\(training data\): 24 on rank 0, 30 on rank 1'),
    (other_rate, r'^ValueError: \[different-settings\] .*momentum of parameter group 0: 0\.1 on rank 0, 0\.2 on rank 1'),
    (own_buffer, r'\[ranks-differ\] seen: each rank has computed this'), (second_model, r'second\.net\.weight: each rank has computed this'),
    (drift, r'^RuntimeError: .*2\.bias differs between rank 0 and \[1\]'),
    (other_path, r'\[different-path\] learn.path differs: .*run-0 on rank 0, .*run-1')],
    ids=lambda o: getattr(o, '__name__', ''))
def test_a_difference_is_told(make, want):
    got = run_ranks(told, 2, make)
    assert re.search(want, got[0]), got[0]
    if 'Error' in want: assert got[1].split(':')[0]==got[0].split(':')[0] # an error on every rank
    else: assert not re.search(want, got[1]) # once, on rank 0

def test_known_and_additive_losses_are_not_told():
    for make in (learner,ordinary,unrelated,of_sizes,spoken,keeps,masks,of_model,single_samples): assert run_ranks(told, 2, make)==['','']

def test_a_second_backward_pass_on_ranks_with_different_numbers_of_items_is_told():
    assert any('learn.wrapper is called again' in o for o in run_ranks(told, 2, twice))

class ValidatesAlone(Callback):
    def after_batch(self):
        if group_rank()==0 and self.training and self.iter==1: self.learn.validate()

def validates_alone():
    with process_group():
        learn = learner(cbs=ValidatesAlone())
        with learn.distrib_ctx(seed=3), learn.no_logging(): learn.fit(1)

def test_what_rank_0_alone_calls_is_named_on_all_ranks():
    with pytest.raises(RanksError) as e: run_ranks(validates_alone, 2)
    for f in e.value.errors.values():
        assert 'RanksApart' in str(f) and 'rank 0 is at the start of a validation loop' in str(f) and 'in after_batch' in str(f)

def cancels(p, t):
    if group_rank()==1: raise CancelBatchException
    return nn.functional.cross_entropy(p, t)

class KeepsNot(Ignores): keeps_batch = True

@pytest.mark.parametrize('kw,said', [
    (dict(loss=cancels), 'Raise it in an event of a callback'),
    (dict(loss=weighted_ce(), cbs=KeepsNot('after_pred')), 'Do this in an event of a callback')])
def test_items_that_change_after_they_were_told(kw, said):
    if kw['loss'] is cancels: cancels.n_items = learner_losses._n_elements # known before the forward pass
    with pytest.raises(RanksError) as e: run_ranks(fits_told, 2, kw)
    assert all(said in str(o) for o in e.value.errors.values()), e.value

def fits_told(kw):
    with process_group():
        learn = learner(ds=labelled(24), **kw)
        if kw['loss'] is cancels: cancels.n_items = learner_losses._n_elements
        fitted(learn)

# --- found by scripts of many domains, and by sweeps --------------------------------------------------------------------------

def ranked(p, t):
    "Over the whole batch: each prediction against the mean"
    p,t = gather_with_grad(p),gather_with_grad(t)
    return ((p-p.mean(0)-t)**2).mean().sqrt()
ranked.n_items = 'whole'

def split_validation():
    "A loss of whole batches is validated on those of one process, of which the last one is dropped"
    valid = DataLoader(data(31, 1), 12, drop_last=True)
    learn = Learner(DataLoaders(TfmdDL(data(), 12, shuffle=True), valid), net(), ranked, sgd)
    with learn.distrib_ctx(seed=3, split_batches=True), learn.no_logging(): learn.fit(1)
    return learn.recorder.values[0]

def test_validation_on_split_batches():
    want = split_validation()
    for W in (2,3):
        for got in run_ranks(split_validation, W): assert got==pytest.approx(want, abs=1e-12)

class Scaled(nn.Module):
    "With a parameter that the optimizer has, and the model has not"
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros((), dtype=torch.double))
    def forward(self, p, t): return ((p-t)**2).mean()*(-self.log).exp()+self.log

class Cancels(Callback):
    "On rank 1 alone, in one batch of each epoch"
    def __init__(self, event, exc): self.exc = exc; setattr(self, event, self.cancel)
    def cancel(self):
        if self.training and group_rank()==1 and self.iter==self.at: raise self.exc
    at = 0

def cancels_alone():
    "A backward pass, where the loss has a parameter; a batch before the loss, which has to be probed, with accumulation"
    res = []
    with process_group():
        loss = Scaled()
        scaled = learner(loss=loss, splitter=lambda m: [*m.parameters(),loss.log])
        unknown = learner(loss=lambda p,t: ((p-t)**2).mean(1).mean())
        for learn,cbs in ((scaled, [Cancels('before_backward', CancelBackwardException)]),
                          (unknown, [Cancels('before_batch', CancelTrainException), GradientAccumulation(12)])):
            with learn.distrib_ctx(seed=3, timeout_s=30), learn.no_logging(): learn.fit(2, cbs=cbs)
            res.append(flat(learn).tolist())
    return res+[loss.log.item()]

@pytest.mark.parametrize('W', [2,pytest.param(3, marks=pytest.mark.long)])
def test_a_cancel_with_parameters_of_the_loss_and_with_a_loss_to_probe(W):
    first,*others = run_ranks(cancels_alone, W)
    assert all(o==first for o in others) and first[-1]!=0
