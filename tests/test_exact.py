"What ordinary scripts do off the usual paths: the run on 2 and 3 ranks is the one of one process, or ranks are told that it is not"
import re, warnings
import pytest, torch
from torch import nn, tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, TensorDataset
from learnerdist.all import (Callback, DataLoaders, Learner, TfmdDL, gather_with_grad, get_model, group_rank, group_size, process_group,
                             set_seed)
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

class Freeze(Callback):
    "Freezes the first layer at once, and unfreezes it at `event` of the sixth step, or freezes another one then"
    def __init__(self, event, later): self.event,self.later = event,later
    def before_fit(self): self.model[0].requires_grad_(False)
def _freezes(event):
    def f(self):
        if self.event==event and self.training and self.train_iter==5: self.later(self.model)
    return f
for _o in ('before_batch','after_pred','after_loss','after_backward','after_step','after_batch'): setattr(Freeze, _o, _freezes(_o))

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

unfrozen_in = 'before_batch','after_pred','after_step','after_batch'
scenes = {f'unfreeze in {o}': lambda o=o: fitted(learner(), Freeze(o, unfreeze)) for o in unfrozen_in}
scenes |= {f'freeze in {o}': lambda o=o: fitted(learner(), Freeze(o, freeze_more)) for o in ('before_batch','after_loss','after_backward')}
scenes |= {'freeze all but one': lambda: fitted(learner(), Freeze('before_batch', freeze_all_but_bias)),
           'a layer is added': lambda: fitted(learner(), AddsLayer()), 'parameters of the loss': loss_params,
           'max_norm': lambda: fitted(learner(Shortened(), tokens())), 'contrastive': lambda: fitted(learner(loss=contrast)),
           'attributes of the model': attributes, 'new loaders': lambda: fitted(learner(), NewLoaders()),
           'new loaders, one cycle': new_loaders_then_one_cycle, 'folds': folds, 'batch sampler': batch_sampler}

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
        assert str(got[3:])==str(want[3:]) and len(got[2])==len(want[2])

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
def drift(): return learner(cbs=Drifts())
def other_path(): return learner(path=f'/tmp/run-{group_rank()}')

@pytest.mark.parametrize('make, want', [
    (odd_loss, r'the loss batch_std may train otherwise on 2 ranks .*n_items'), (other_split, r'different data: training data.indices: #'),
    (other_length, r'^ValueError: .*len\(training data\): 24 on rank 0, 30 on rank 1'),
    (other_rate, r'^ValueError: .*momentum of parameter group 0: 0\.1 on rank 0, 0\.2 on rank 1'),
    (own_buffer, 'seen: each rank has computed this'),
    (drift, r'^RuntimeError: .*2\.bias differs between rank 0 and \[1\]'), (other_path, 'learn.path differs: .*run-0 on rank 0, .*run-1')],
    ids=lambda o: getattr(o, '__name__', ''))
def test_a_difference_is_told(make, want):
    got = run_ranks(told, 2, make)
    assert re.search(want, got[0]), got[0]
    if want.startswith('^'): assert got[1].split(':')[0]==got[0].split(':')[0] # an error on every rank
    else: assert not re.search(want, got[1]) # once, on rank 0

def test_known_and_additive_losses_are_not_told():
    assert run_ranks(told, 2, learner)==['','']

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
