"What ordinary scripts do is the run of one process, without a warning; real offenders are warned of, by a code that the docs explain"
import re, warnings
from pathlib import Path
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from helpers import data, net, sgd, size, weights
from learnerdist.all import Callback, DataLoaders, Learner, TfmdDL, average_grads, get_model, group_rank, process_group
from learnerdist.distributed.self_check import read_items
from learnerdist.learner.losses import follows
from learnerdist.testing import run_ranks

torch.set_num_threads(1)


def labelled(n=48): return TensorDataset(data(n).tensors[0], torch.arange(n)%3)


def learner(model=None, loss=None, ds=None, **kw):
    return Learner(DataLoaders(TfmdDL(ds or data(), size(), shuffle=True)), model or net(), loss or nn.MSELoss(), sgd, **kw)


def fitted(make, n=1, **ctx):
    "The weights, or the error; and what this rank was warned of"
    with process_group(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        learn = make()
        try:
            with learn.distrib_ctx(seed=3, **ctx), learn.no_logging(): learn.fit(n)
        except ValueError as e: return f'{type(e).__name__}: {e}',[]
        return weights(learn),[str(o.message) for o in seen if str(o.message)[:1]=='[']

# --- scripts that are the same on any number of ranks -----------------------------------------------------------------------

class Lerp(Callback):
    def after_loss(self): self.learn.loss_grad = torch.lerp(torch.zeros_like(self.learn.loss_grad), self.learn.loss_grad, .5)
def lerp(): return learner(cbs=Lerp())

def as_triplets(b): return torch.cat([torch.stack([o[0]+i for o in b]) for i in range(3)]),torch.zeros(3*len(b))
def of_triplets(p, _): return F.triplet_margin_loss(*p.chunk(3))
def own_triplets(p, _):
    a,b,c = p.chunk(3)
    return ((a-b).norm(dim=1)-(a-c).norm(dim=1)+1).relu().mean()
def triplets(loss=of_triplets):
    dls = DataLoaders(DataLoader(data(), size(), shuffle=True, collate_fn=as_triplets))
    return Learner(dls, net(), loss, sgd)
def written_triplets(): return triplets(own_triplets)

class Detector(nn.Module):
    "As torchvision's: a dict of losses in training, boxes in evaluation"
    def __init__(self): super().__init__(); self.net = net() # noqa: E702
    def forward(self, x, y):
        out = self.net(x)
        return dict(boxes=((out-y)**2).mean(1).mean(), classes=out.abs().sum(1).mean()) if self.training else [dict(box=o) for o in out]
def of_detector(losses, *_): return sum(losses.values())
def twice(b): return torch.stack([o[0] for o in b]),torch.stack([o[1] for o in b]),torch.stack([o[1] for o in b])
def detector():
    dls = DataLoaders(DataLoader(data(), size(), shuffle=True, collate_fn=twice))
    dls.n_inp = 2
    return Learner(dls, Detector(), of_detector, sgd)

class Teachers(Callback):
    def __init__(self): self.teachers = [net(seed=6),net(seed=7)]
    def after_loss(self):
        with torch.no_grad(): want = sum(o(*self.xb) for o in self.teachers)/2
        self.learn.loss_grad = self.learn.loss_grad+F.mse_loss(self.pred, want)
def two_teachers(): return learner(cbs=Teachers())

class WithInput(nn.Module):
    def __init__(self): super().__init__(); self.net = net(n_out=1) # noqa: E702
    def forward(self, x):
        x = x.requires_grad_()
        return self.net(x),x
def penalised(out, y):
    p,x = out
    grad, = torch.autograd.grad(p.sum(), x, create_graph=True)
    return p.mean()+10*((grad.norm(dim=1)-1)**2).mean()
def gradient_penalty(): return learner(WithInput(), penalised)

class Gan(nn.Module):
    "A generator and a critic; the first one is trained in the second epoch"
    def __init__(self):
        super().__init__()
        self.gen,self.critic,self.generates = net(n_out=4),net(n_out=1, seed=6),False
    def forward(self, x): return self.critic(self.gen(x)) if self.generates else self.critic(torch.cat([x,self.gen(x).detach()], 1)[:,:4])
class Switcher(Callback):
    def before_fit(self): self._switch(False)
    def before_epoch(self): self._switch(self.epoch%2==1)
    def _switch(self, on):
        m = get_model(self.learn.model)
        m.generates = on
        m.gen.requires_grad_(on)
        m.critic.requires_grad_(not on)
def of_gan(p, y): return F.softplus(p).mean()
def gan(): return learner(Gan(), of_gan, cbs=Switcher(), splitter=lambda m: [*m.parameters()])

class Noisy(nn.Module):
    "As a variational autoencoder: it draws in evaluation, too"
    def __init__(self): super().__init__(); self.net = net(n_out=4) # noqa: E702
    def forward(self, x):
        mean,std = self.net(x).chunk(2, 1)
        return mean+0*torch.randn_like(mean),mean,std
def elbo(out, y): return ((out[0]-y)**2).sum()-.5*(1+out[2]-out[1]**2-out[2].exp()).sum()
def autoencoder(): return learner(Noisy(), elbo, lr=1e-3)

def doubled(x): return F.pad(x, (0, 4))
class Reshapes(Callback):
    "The model takes another shape than the data have"
    def before_batch(self): self.learn.xb = (doubled(self.xb[0]),)
def by_hand(p, y): return ((p-y)**2).mean(1).sum()/len(y)
def reshaped(): return learner(net(8), by_hand, cbs=Reshapes())

class Lines(IterableDataset):
    def __iter__(self): return iter([(x,y) for x,y in zip(*data().tensors)])
def stream(): return Learner(DataLoaders(TfmdDL(Lines(), size())), net(), by_hand, sgd)

def padded(b):
    n = max(int(y) for _,y in b)+1
    return torch.stack([F.pad(x[:int(y)+1], (0, n-int(y)-1)) for x,y in b]),torch.stack([y for _,y in b])
class Masked(nn.Module):
    def __init__(self): super().__init__(); self.net = net(1, 3) # noqa: E702
    def forward(self, x): return (self.net(x[...,None])*(x!=0)[...,None]).sum(1)
def texts(model):
    return Learner(DataLoaders(DataLoader(TensorDataset(data().tensors[0], torch.arange(48)//16), size(), shuffle=True,
                                          collate_fn=padded)), model, nn.CrossEntropyLoss(), sgd)
def masked(): return texts(Masked())

class Counting(nn.Module):
    "Hooks and calls are counted"
    def __init__(self):
        super().__init__()
        self.net,self.n,self.max = net(),0,nn.Embedding(48, 4, max_norm=.5).double()
        self.net.register_forward_hook(self.count)
    def count(self, *_): self.n += 1
    def forward(self, x): return self.net(x)+self.max(torch.arange(len(x))).sum()*0
class Counted(Callback):
    def after_fit(self): assert get_model(self.model).n==4, get_model(self.model).n
def counting(): return learner(Counting(), by_hand, cbs=Counted())

class Idle(nn.Module):
    "An output that the loss does not use, and a layer that nothing does"
    def __init__(self):
        super().__init__()
        self.net,self.aux,self.idle = net(),nn.Linear(4, 2).double(),nn.Linear(2, 2).double()
    def forward(self, x): return self.net(x),self.aux(x)
def first_output(out, y): return F.mse_loss(out[0], y)
def idle(): return learner(Idle(), first_output)

ordinary = [lerp,triplets,written_triplets,detector,two_teachers,gradient_penalty,gan,autoencoder,reshaped,stream,masked,counting]

def all_of(makes):
    return {f.__name__: fitted(f, 2 if f is gan else 1) for f in makes}

@pytest.mark.parametrize('W', [2,3])
def test_ordinary_scripts_are_exact_and_silent(W):
    want, = run_ranks(all_of, 1, ordinary)
    for got in run_ranks(all_of, W, ordinary, timeout_s=200):
        for k,(w,said) in got.items():
            assert said==[], (k,said)
            assert isinstance(w, torch.Tensor), (k,w)
            if k!='counting': assert (w-want[k][0]).abs().max()<1e-9, k

def test_unused_parameters():
    (want,_), = run_ranks(fitted, 1, idle)
    got = run_ranks(fitted, 2, idle)
    assert all((w-want).abs().max()<1e-9 for w,_ in got)
    said, = got[0][1]
    assert said.startswith('[unused-parameters] the loss does not depend on aux.weight, aux.bias, idle.weight and 1 more')
    assert len(got[0][1])==1 and got[1][1]==[]

# --- offenders ---------------------------------------------------------------------------------------------------------------

class Centred(nn.Module):
    def forward(self, x): return x-x.mean(0)
def mixing(): return learner(nn.Sequential(net(), Centred()).double())
class Averages(nn.Module):
    "Its padding counts"
    def __init__(self): super().__init__(); self.net = net(1, 3) # noqa: E702
    def forward(self, x): return self.net(x[...,None]).mean(1)
def padding(): return texts(Averages())

def in_batch(p, y): return F.cross_entropy(p@y.T, torch.arange(len(p)))
def contrastive(): return learner(loss=in_batch)
def nt_xent(p, _=None):
    n,p = len(p)//2,F.normalize(p)
    sim = (p@p.T).masked_fill(torch.eye(2*n, dtype=torch.bool), -1e9)
    return F.cross_entropy(sim/.5, torch.cat([torch.arange(n, 2*n),torch.arange(n)]))
class TwoViews(Callback):
    "SimCLR: the batch is doubled"
    def before_batch(self): self.learn.xb = (torch.cat([self.xb[0]+.1*torch.randn_like(self.xb[0]) for _ in range(2)]),)
def simclr(): return learner(loss=nt_xent, cbs=TwoViews())
class Views(nn.Module):
    def __init__(self): super().__init__(); self.net = net() # noqa: E702
    def forward(self, x): return self.net(torch.cat([x+.1*torch.randn_like(x) for _ in range(2)]))
def simclr_in_model(): return learner(Views(), nt_xent)

class Centers(nn.Module):
    def __init__(self): super().__init__(); self.centers = nn.Parameter(torch.zeros(3, 3, dtype=torch.double)) # noqa: E702
    def forward(self, p, y): return ((p-self.centers[y])**2).sum(1).mean()
class OwnStep(Callback):
    def __init__(self, opt, averages): self.opt_centers,self.averages = opt,averages
    def after_fit(self): self.learn.model.register_parameter('of_loss', self.centers.centers) # for `flat`
    def before_step(self):
        if self.averages: average_grads(p for g in self.opt_centers.param_groups for p in g['params'])
        self.opt_centers.step()
        self.opt_centers.zero_grad()
class OwnBackward(Callback):
    "A head with a loss of its own, whose gradients no one has weighed"
    def __init__(self): self.head = net(4, 2, 9); self.opt_head = sgd(self.head.parameters(), .1) # noqa: E702
    def after_step(self):
        F.mse_loss(self.head(self.xb[0]), self.yb[0]).backward()
        average_grads(self.head.parameters())
        self.opt_head.step()
        self.opt_head.zero_grad()
    def after_fit(self): self.learn.model.register_module('head', self.head) # for `flat`
def own_backward(n=45): return learner(ds=data(n), cbs=OwnBackward())

def center_loss(averages=False, n=48):
    centers = Centers()
    def loss(p, y): return F.cross_entropy(p, y)+.5*centers(p, y)
    loss.n_items = lambda p, y: len(y)
    learn = learner(net(4, 3), loss, labelled(n), cbs=OwnStep(torch.optim.SGD(centers.parameters(), lr=.5), averages))
    learn.own_step.centers = centers
    return learn
def remedied(): return center_loss(True, 45)

@pytest.mark.parametrize('make,want', [(mixing,'mixes-samples'), (padding,'mixes-samples'), (contrastive,'loss-not-mean'),
    (simclr,'loss-unknown'), (simclr_in_model,'loss-'), (center_loss,'ranks-differ')], ids=lambda o: getattr(o, '__name__', ''))
def test_offenders(make, want):
    got = run_ranks(fitted, 2, make)
    assert [re.match(rf'\[{want}', o) is not None for o in got[0][1]]==[True], got[0][1]
    assert got[1][1]==[] and (make is center_loss or torch.equal(got[0][0], got[1][0]))
    if make is center_loss: assert 'centers' in got[0][1][0] and 'average_grads' in got[0][1][0]

def checked(checks): return [fitted(o, checks=checks) for o in (mixing,contrastive,center_loss)]

def test_errors_are_raised_on_all_ranks_and_false_is_silent():
    for got in run_ranks(checked, 2, 'error'):
        assert [re.match(r'ValueError: \[(.*)\]', o).group(1) for o,_ in got]==['mixes-samples','loss-not-mean','ranks-differ']
    for got in run_ranks(checked, 2, False): assert all(isinstance(o, torch.Tensor) and not said for o,said in got)
    with pytest.raises(ValueError, match="checks='yes'"), learner().distrib_ctx(checks='yes'): pass

@pytest.mark.parametrize('make', [remedied,own_backward])
def test_average_grads_takes_a_generator_and_weighs_by_items(make):
    (want,_), = run_ranks(fitted, 1, make)
    for W in (2,3):
        got = run_ranks(fitted, W, make)
        assert all((w-want).abs().max()<1e-9 for w,_ in got) and not got[0][1]

class Another(nn.Sequential): pass
def other_models(kind):
    r = group_rank()
    if kind=='layer': return learner(net() if not r else nn.Sequential(*net(), nn.Linear(2, 2)).double())
    if kind=='class': return learner(nn.Sequential(nn.Linear(4, 2), nn.ReLU() if r else nn.Tanh()).double())
    if kind=='loss': return learner(loss=nn.L1Loss() if r else nn.MSELoss())
    if kind=='callback': return learner(cbs=Lerp() if r else Teachers())
    return learner(cbs=Teachers() if r==1 else None) # a rank may have more than others

def fits_others(kind): return fitted(lambda: other_models(kind))

@pytest.mark.parametrize('kind,want', [('layer','model.3: Linear'), ('class',r'model.1: Tanh on rank 0, model.1: ReLU on rank 1'),
    ('loss','loss_func: MSELoss on rank 0, loss_func: L1Loss'), ('callback','callback: Teachers on rank 0, callback: Lerp on rank 1')])
def test_other_models_on_other_ranks(kind, want):
    for o,_ in run_ranks(fits_others, 2, kind): assert o.startswith('ValueError: [different-models]') and re.search(want, o), o

def test_a_rank_may_have_more_callbacks(): assert all(not said for _,said in run_ranks(fits_others, 2, 'more'))

def all_codes():
    return {o for f in Path(__file__).parent.parent.glob('learnerdist/**/*.py')
            for o in re.findall(r"""['"]\[([a-z]+(?:-[a-z]+)+)\]|(?:findings|note)\('([a-z-]+)'""", f.read_text())}

def test_each_code_has_an_entry():
    docs = (Path(__file__).parent.parent/'docs'/'messages.md').read_text()
    entries = re.split(r'^## ', docs, flags=re.M)[1:]
    assert {a or b for a,b in all_codes()}=={re.match(r'`(.*)`', o).group(1) for o in entries}
    for o in entries: assert all(f'**{k}.**' in o for k in ('Cause','Example','Remedy')), o[:40]

def test_what_a_loss_follows_from():
    assert follows((2., None, 4), [(1., None, 2), (3., None, 2)], 1e-8)=='samples'
    assert follows((2.5, None, 4), [(1., None, 1), (3., None, 3)], 1e-8)=='samples'
    assert follows((4., None, 4), [(1., None, 2), (3., None, 2)], 1e-8)=='sum'
    assert follows((3., None, 4), [(1., None, 2), (3., None, 2)], 1e-8)=='other'
    assert follows((2.8, 10, 4), [(1., 1, 2), (3., 9, 2)], 1e-8)=='items'
    assert follows((2.8, 10, 4), [(1., 2, 2), (3., 9, 2)], 1e-8)=='other'
    assert follows((float('nan'), None, 4), [(1., None, 2), (3., None, 2)], 1e-8) is None
    assert follows((0., None, 4), [(0., None, 2), (0., None, 2)], 1e-8) is None

def test_what_travels_is_the_samples_alone():
    "A row of a tensor in memory is a view, and would take the whole tensor along to the other ranks"
    x = torch.randn(1000, 4)
    learn = Learner(DataLoaders(TfmdDL(TensorDataset(x, x[:,:1]), 8)), nn.Linear(4, 1), nn.MSELoss())
    learn.dl = learn.dls.train
    items = read_items(learn)
    assert len(items)==2 and all(o.untyped_storage().nbytes()==o.numel()*4 for item in items for o in item)
