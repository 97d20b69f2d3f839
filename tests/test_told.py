"What the contract leaves out is told: a warning with its cause on rank 0, or an error on every rank"
import re, warnings
import numpy as np, pytest, torch
from torch import nn, tensor
from torch.utils.data import Subset, TensorDataset
from helpers import data, net, size
from learnerdist.all import Callback, all_sum, DataLoaders, Learner, TfmdDL, get_model, group_rank, group_size, process_group
from learnerdist.learner import losses as learner_losses
from learnerdist.learner.callback import CancelBatchException
from learnerdist.testing import RanksError, run_ranks

N = 48 # a global batch of 12: on 1, 2 and 3 ranks 12, 6 and 4 each



def sgd(ps, lr): return torch.optim.SGD(ps, lr=.1, momentum=.9)
def every_param(m): return list(m.parameters())

def learner(model=None, ds=None, loss=None, splitter=every_param, opt=sgd, **kw):
    ds = data() if ds is None else ds
    return Learner(DataLoaders(TfmdDL(ds, size(), shuffle=True), TfmdDL(ds, size())), model or net(), loss or nn.MSELoss(), opt,
                   splitter=splitter, **kw)


def labelled(n): return TensorDataset(data(n).tensors[0], torch.randint(2, (n,), generator=torch.Generator().manual_seed(n)))
class Ignores(Callback):
    "Some labels do not count, on each rank another number: known before the forward pass, or only in `event`"
    run_valid = False
    def __init__(self, event): setattr(self, event, self._ignore)
    def _ignore(self): self.learn.yb = self.yb[0].where(self.xb[0][:,0]>0, -100),
def weighted_ce(): return nn.CrossEntropyLoss(weight=tensor([.3,.7], dtype=torch.double))

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
    (own_buffer, r'\[ranks-differ\] seen: each rank has computed this'),
    (second_model, r'second\.net\.weight: each rank has computed this'),
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
    if kw['loss'] is cancels: cancels.n_items = learner_losses.n_elements # known before the forward pass
    with pytest.raises(RanksError) as e: run_ranks(fits_told, 2, kw)
    assert all(said in str(o) for o in e.value.errors.values()), e.value

def fits_told(kw):
    with process_group():
        learn = learner(ds=labelled(24), **kw)
        if kw['loss'] is cancels: cancels.n_items = learner_losses.n_elements
        with learn.distrib_ctx(seed=3), learn.no_logging(): learn.fit(2)
