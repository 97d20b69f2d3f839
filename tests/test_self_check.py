"What ordinary scripts do is the run of one process, without a warning; what is not is warned of, by a code that the docs explain"
import copy, re
from pathlib import Path
import numpy as np, pytest, torch
from torch import nn, tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from harness import all_warnings, asking, on_2_and_3
from helpers import Of, Stream, data, net, sgd, size, weights
from learnerdist.all import *
from learnerdist.command import entries
from learnerdist.core.stacks import coded
from learnerdist.distributed.self_check import read_items
from learnerdist.learner.callback import CancelBatchException
from learnerdist.learner.losses import follows, n_elements

def labelled(n=48): return TensorDataset(data(n).tensors[0], torch.arange(n)%3)

def learner(model=None, loss=None, ds=None, opt=sgd, **kw):
    return Learner(DataLoaders(TfmdDL(ds or data(), size(), shuffle=True)), model or net(), loss or nn.MSELoss(), opt, **kw)

def fitted(make, n=1, **ctx):
    "The weights, or the error; and what this rank was warned of, which shows the user's line"
    with process_group(), all_warnings() as seen:
        learn = make()
        try:
            with learn.distrib_ctx(**(dict(seed=3)|ctx|getattr(make, 'options', dict)())), learn.no_logging(): learn.fit(n)
        except Exception as e: return f'{type(e).__name__}: {e}',[]
        ours = [o for o in seen if str(o.message)[:1]=='[']
        assert {o.filename for o in ours} <= {__file__}
        return weights(learn),[str(o.message) for o in ours]

# --- scripts that are the same on any number of ranks -----------------------------------------------------------------------

def as_triplets(b): return torch.cat([torch.stack([o[0]+i for o in b]) for i in range(3)]),torch.zeros(3*len(b))
def of_triplets(p, _): return F.triplet_margin_loss(*p.chunk(3))
def own_triplets(p, _):
    a,b,c = p.chunk(3)
    return ((a-b).norm(dim=1)-(a-c).norm(dim=1)+1).relu().mean()
def triplets(loss=of_triplets):
    dls = DataLoaders(DataLoader(data(), size(), shuffle=True, collate_fn=as_triplets))
    return Learner(dls, net(), loss, sgd)
def written_triplets(): return triplets(own_triplets)

def detects(m, x, y):
    "As torchvision's: a dict of losses in training, boxes in evaluation"
    out = m.net(x)
    return dict(boxes=((out-y)**2).mean(1).mean(), classes=out.abs().sum(1).mean()) if m.training else [dict(box=o) for o in out]
def of_detector(losses, *_): return sum(losses.values())
def twice(b): return torch.stack([o[0] for o in b]),torch.stack([o[1] for o in b]),torch.stack([o[1] for o in b])
def detector(forward=detects, loss=of_detector):
    dls = DataLoaders(DataLoader(data(), size(), shuffle=True, collate_fn=twice))
    dls.n_inp = 2
    return Learner(dls, Of(forward, net=net()), loss, sgd)

def detr(m, x, y):
    "As DETR: in training it divides by a mean over ranks"
    out,n = m.net(x),y.abs().sum()
    if m.training: n = all_sum(n)/(num_distrib() or 1)
    return dict(loss=((out-y)**2).sum()/n)
def counts_over_ranks(): return detector(detr, None)

def with_input(m, x):
    x = x.requires_grad_()
    return m.net(x),x
def penalised(out, y):
    p,x = out
    grad, = torch.autograd.grad(p.sum(), x, create_graph=True)
    return p.mean()+10*((grad.norm(dim=1)-1)**2).mean()
def gradient_penalty(): return learner(Of(with_input, net=net(n_out=1)), penalised)

def noisy(m, x):
    "As a variational autoencoder: it draws in evaluation, too"
    mean,std = m.net(x).chunk(2, 1)
    return mean+0*torch.randn_like(mean),mean,std
def elbo(out, y): return ((out[0]-y)**2).sum()-.5*(1+out[2]-out[1]**2-out[2].exp()).sum()
def autoencoder(): return learner(Of(noisy, net=net(n_out=4)), elbo, lr=1e-3)

def doubled(x): return F.pad(x, (0, 4))
class Reshapes(Callback):
    "The model takes another shape than the data have"
    def before_batch(self): self.learn.xb = (doubled(self.xb[0]),)
def by_hand(p, y): return ((p-y)**2).mean(1).sum()/len(y)
def reshaped(): return learner(net(8), by_hand, cbs=Reshapes())

def lines(): return DataLoaders(TfmdDL(Stream(list(data())), size()))
def stream(): return Learner(lines(), net(), by_hand, sgd)

def padded(b):
    n = max(int(y) for _,y in b)+1
    return torch.stack([F.pad(x[:int(y)+1], (0, n-int(y)-1)) for x,y in b]),torch.stack([y for _,y in b])
def masks_padding(m, x): return (m.net(x[...,None])*(x!=0)[...,None]).sum(1)
def texts(model):
    return Learner(DataLoaders(DataLoader(TensorDataset(data().tensors[0], torch.arange(48)//16), size(), shuffle=True,
                                          collate_fn=padded)), model, nn.CrossEntropyLoss(), sgd)
def masked(): return texts(Of(masks_padding, net=net(1, 3)))

class Counting(nn.Module):
    "Hooks and calls are counted"
    def __init__(self):
        super().__init__()
        self.net,self.n = net(),0
        self.net.register_forward_hook(self.count)
    def count(self, *_): self.n += 1
    def forward(self, x): return self.net(x)
class NormedLoss:
    "Its BatchNorm is none of the model's"
    def __init__(self): self.norm = nn.BatchNorm1d(2).double()
    def __call__(self, p, y):
        self.norm(p)
        return by_hand(p, y)
class Counted(Callback):
    def before_fit(self): self.mean = 0.
    def after_pred(self): self.mean = .9*self.mean+.1*self.pred.detach().mean(0)
    def after_fit(self):
        norm = self.learn.loss_func.norm
        assert get_model(self.model).n==norm.num_batches_tracked==4
        assert (norm.running_mean-self.mean).abs().max()<1e-12
def counting(): return learner(Counting(), NormedLoss(), cbs=Counted())

def first_output(out, y): return F.mse_loss(out[0], y)
def idle():
    "An output that the loss does not use, and a layer that nothing does"
    model = Of(lambda m, x: (m.net(x),m.aux(x)), net=net(), aux=nn.Linear(4, 2), idle=nn.Linear(2, 2))
    return learner(model.double(), first_output)

class Keeps(Callback):
    "What differs on the ranks as it should, and what is the same"
    rank_state = ('own',)
    def before_fit(self): self.own,self.last,self.weights,self.seen = torch.zeros(1),torch.zeros(1),{},np.zeros(1)
    def after_batch(self):
        self.own,self.last,self.learn.model.seen = self.own+1+group_rank(),self.pred.detach(),self.pred.detach().sum()
        self.weights,self.seen = {k: o.detach().clone() for k,o in self.model.named_parameters()},self.seen+1
def keeps():
    learn = learner(cbs=Keeps())
    learn.model.seen = torch.zeros(())
    return learn

class Spoken(Dataset):
    "Sequences with labels of other lengths, which a batch holds one after the other"
    def __len__(self): return 24
    def __getitem__(self, i): return torch.full((12, 4), i/24, dtype=torch.double),torch.arange(1, 3+i%3)
def together(b): return torch.stack([o[0] for o in b]),torch.cat([o[1] for o in b]),tensor([len(o[1]) for o in b])
def ctc(p, t, n): return F.ctc_loss(p.log_softmax(-1).transpose(0, 1), t, torch.full_like(n, 12), n)
def spoken():
    dls = DataLoaders(DataLoader(Spoken(), size(), collate_fn=together))
    dls.n_inp = 1
    return Learner(dls, nn.Linear(4, 6).double(), ctc, sgd)

class Normalised(Callback):
    "Constants, sorting, and statistics of the global batch: what a sample becomes does not depend on the number of ranks"
    run_valid = False
    def before_batch(self):
        x,y = (self.xb[0]-.5)/.25,self.yb[0]
        y = y-all_sum(y.sum(0))/all_sum(tensor(float(len(y))))
        i = x[:,0].argsort()
        self.learn.xb,self.learn.yb = (x[i],),(y[i],)
def normalised(): return learner(cbs=Normalised())

class Masks(Callback):
    "Gradients by hooks that scale them or only look at them, and a loss that is scaled"
    def before_fit(self): self.seen = [p.register_hook(f) for p in self.model.parameters() for f in (lambda g: g*.5, lambda g: None)]
    def after_loss(self): self.learn.loss_grad = 2*(self.learn.loss_grad*.7+3)
    def after_fit(self): [o.remove() for o in self.seen]
def masks(): return learner(cbs=Masks())

def minus_mean(m, x):
    "A remedied model: all ranks compute it in the check, as its collective needs"
    out = m.net(x)
    return out-gather_with_grad(out).mean(0)
def global_mean(): return learner(Of(minus_mean, net=net()))
def mean_of_a_stream(): return Learner(lines(), Of(minus_mean, net=net()), by_hand, sgd)

def batch_mean(p, t): return 2*((p-t)**2).mean()

ordinary = [triplets,written_triplets,detector,counts_over_ranks,gradient_penalty,autoencoder,reshaped,stream,masked,counting,keeps,
            spoken,normalised,masks,global_mean,mean_of_a_stream]

def of_some(p, t): return F.mse_loss(p[t[:,0]>0], t[t[:,0]>0])
def of_sizes(): return learner(loss=of_some) # follows from those of parts, by numbers that the batch shows
class Drawing(nn.Module):
    "Draws also in evaluation"
    def forward(self, x): return x+torch.randn_like(x)
def drawing(): return learner(nn.Sequential(net(), nn.Dropout(), nn.BatchNorm1d(2), Drawing()).double())
def pairs_of_one(): return Learner(DataLoaders(TfmdDL(data(8), 1)), net(), batch_mean, sgd)

def local_statistics(): return target_model() # of the copy of a model whose BatchNorm is not synchronised
local_statistics.options = lambda: dict(sync_bn=False)

# What a check cannot cut, send or hash does not end a run
def of_jagged(m, x): return torch.stack([m.net(o).mean(0) for o in x.unbind()])
def jag(b):
    x = torch.nested.nested_tensor([o[0].repeat(1+i%3, 1) for i,o in enumerate(b)], layout=torch.jagged)
    return x,torch.stack([o[1] for o in b])
def jagged(): return Learner(DataLoaders(TfmdDL(data(), size(), shuffle=True, collate_fn=jag)), Of(of_jagged, net=net()), nn.MSELoss(), sgd)
class HoldsOdd(Callback):
    def before_fit(self):
        self.net = nn.Linear(1, 1)
        self.net.register_buffer('eighth', torch.ones(2).to(torch.float8_e5m2))
        self.net.register_buffer('nested', torch.nested.nested_tensor([torch.ones(1),torch.ones(2)], layout=torch.jagged))
def holds_odd(): return learner(cbs=HoldsOdd())
def eighth():
    x,y = data().tensors
    return learner(Of(lambda m, x: m.net(x.double()), net=net()), ds=TensorDataset(x.to(torch.float8_e4m3fn), y))
odd = [jagged,holds_odd,eighth]

def all_of(makes): return {f.__name__: fitted(f) for f in makes}
def scripts(*_): return all_of(ordinary+odd)

@on_2_and_3
def test_ordinary_scripts_are_exact_and_silent(W, found):
    want, = found(scripts, 1)
    for got in found(scripts, W):
        for k,(w,messages) in got.items():
            assert messages==[], (k,messages)
            assert isinstance(w, torch.Tensor), (k,w)
            if k!='counting': assert (w-want[k][0]).abs().max()<1e-9, k

def drawn(b): return b[0]+torch.randn(4, dtype=b[0].dtype),b[1]
def checked_or_not():
    def make(): return Learner(DataLoaders(TfmdDL(data(), 6, after_item=drawn)), nn.Sequential(nn.Dropout(.5), net()), nn.MSELoss(), sgd)
    return [fitted(make, checks=o)[0] for o in ('warn',False)]

def on_two(*_):
    short = transformer,halves,autocast
    return all_of([of_sizes,drawing,pairs_of_one,with_more,local_statistics,*short]),checked_or_not()

def test_what_is_not_known_to_differ_is_silent(found):
    "Random streams stay: a fit that goes on in mid-epoch checks another batch. So do short types"
    short = dict(transformer=torch.bfloat16, halves=torch.float16, autocast=torch.float32)
    for got,(a,b) in found(on_two, 2):
        for k,(w,messages) in got.items():
            assert messages==[] and w.dtype is short.get(k, torch.float64), (k,w,messages)
        assert a.equal(b)

class TrainGen(Callback):
    "A backward pass of its own through the whole model, in one event"
    def __init__(self, event): setattr(self, event, self.train_gen)
    def before_fit(self): self.opt_gen = sgd(get_model(self.model).gen.parameters(), .1)
    def train_gen(self):
        m = get_model(self.model)
        kept = [p.grad if p.grad is None else p.grad.clone() for p in m.critic.parameters()]
        m.critic(m.gen(self.xb[0])).mean().backward()
        for p,g in zip(m.critic.parameters(), kept): p.grad = g
        average_grads(m.gen.parameters())
        self.opt_gen.step()
        self.opt_gen.zero_grad()
def judged(m, x): return m.critic(x)+m.critic(m.gen(x).detach())
def both(event, **ctx):
    "A critic, and a generator that only a callback trains"
    return fitted(lambda: learner(Of(judged, critic=net(), gen=net(n_out=4, seed=6)), cbs=TrainGen(event)), **ctx)

def unused(*_):
    expects = dict(find_unused_parameters=True)
    gans = both('after_loss', **expects),*map(both, ('before_batch','after_loss','after_step'))
    return fitted(idle),skips(),skips(**expects),skips(3),skips(1, LaterIdle, 1, timeout_s=20),*gans

class SkipsSecond(Callback):
    run_valid,n = False,0
    def before_batch(self):
        get_model(self.model).skips = self.n%2==1
        self.n += 1
def skips_part(*_): return fitted(lambda: learner(Later(), cbs=SkipsSecond()), global_bs=8, max_bs=2)[0]

def test_what_the_last_part_of_a_step_does_not_use(found):
    "It has a gradient, of an earlier part, which does not travel: an error, too"
    of_part = 'ValueError: [unused-parameters] no gradient for what earlier parts'
    for o in found(skips_part, 2): assert o.startswith(of_part) and 'find_unused_parameters=True' in o, o

def test_unused_parameters(found):
    """Named, also where a callback trains them; an error with its remedy if a later batch is the first that does not use
    some, and the run of one process with it"""
    (want,_),(later,_),_,_,_,(gan,_),*gans = found(unused, 1)[0]
    ranks = found(unused, 2)
    for r,((w,messages),(failed,_),(remedied,_),(last,_),(on_one,_),(expected,silent),*found) in enumerate(ranks):
        assert (expected-gan).abs().max()<1e-9 and not silent
        for (a,_),(b,said) in zip(gans, found): assert (a-b).abs().max()<1e-9 and len(said)==(r==0)
        assert (w-want).abs().max()<1e-9 and (remedied-later).abs().max()<1e-9
        # one rank does, in a model with others that are summed beside DDP
        assert 'ValueError: [unused-parameters] no gradient for more.0.weight' in on_one
        for o in (failed,last): # in the last one DDP has no next forward pass that would say so
            assert o.startswith('ValueError: [unused-parameters] no gradient for more.0.weight') and 'find_unused_parameters=True' in o
        assert len(messages)==(r==0) and all(o.startswith('[unused-parameters] the loss does not depend on aux.weight, aux.bias, '
                                                      'idle.weight and 1 more') for o in messages)

class Later(nn.Module):
    "A layer that some batches do not use"
    skips = False
    def __init__(self): super().__init__(); self.net,self.more = net(),net(2) # noqa: E702
    def forward(self, x): return self.net(x) if self.skips else self.more(self.net(x))
class LaterIdle(Later):
    def __init__(self): super().__init__(); self.idle = nn.Linear(2, 2) # noqa: E702
class Skips(Callback):
    def __init__(self, at, rank): self.at,self.rank = at,rank # None: all
    def before_batch(self): get_model(self.model).skips = self.iter==self.at and self.rank in (None,group_rank())
def skips(at=1, model=Later, rank=None, **ctx): return fitted(lambda: learner(model(), cbs=Skips(at, rank)), **ctx)

# --- offenders ---------------------------------------------------------------------------------------------------------------

class Centred(nn.Module):
    def forward(self, x): return x-x.mean(0)
def mixing(): return learner(nn.Sequential(net(), Centred()).double())
def averages(m, x): return m.net(x[...,None]).mean(1) # its padding counts
def padding(): return texts(Of(averages, net=net(1, 3)))

def in_batch(p, y): return F.cross_entropy(p@y.T, torch.arange(len(p)))
def contrastive(): return learner(loss=in_batch)
def nt_xent(p, _=None):
    n,p = len(p)//2,F.normalize(p)
    sim = (p@p.T).masked_fill(torch.eye(2*n, dtype=torch.bool), -1e9)
    return F.cross_entropy(sim/.5, torch.cat([torch.arange(n, 2*n),torch.arange(n)]))
def two_views(m, x): return m.net(torch.cat([x+.1*torch.randn_like(x) for _ in range(2)]))
def simclr_in_model(): return learner(Of(two_views, net=net()), nt_xent)

class Centers(nn.Module):
    def __init__(self): super().__init__(); self.centers = nn.Parameter(torch.zeros(3, 3, dtype=torch.double)) # noqa: E702
    def forward(self, p, y): return ((p-self.centers[y])**2).sum(1).mean()
class OwnStep(Callback):
    def __init__(self, opt, averages): self.opt_centers,self.averages = opt,averages
    def after_fit(self): self.learn.model.register_parameter('of_loss', self.centers.centers) # for `flat`
    def before_step(self):
        if self.averages: average_grads((p for g in self.opt_centers.param_groups for p in g['params']), weighed=True)
        self.opt_centers.step()
        self.opt_centers.zero_grad()
def center_loss(averages=False, n=48):
    centers = Centers()
    def loss(p, y): return F.cross_entropy(p, y)+.5*centers(p, y)
    loss.n_items = lambda p, y: len(y)
    learn = learner(net(4, 3), loss, labelled(n), cbs=OwnStep(torch.optim.SGD(centers.parameters(), lr=.5), averages))
    learn.own_step.centers = centers
    return learn
def remedied(): return center_loss(True, 45)
def remedied_in_groups():
    "Of 24, 21 samples"
    learn = remedied()
    return learn.add_cb(GradientAccumulation(24))

def domains(m, x, other):
    "As DANN: samples of two domains, whose classes are known in one of them"
    f = m.body(torch.cat([x,other]))
    return m.classes(f[:len(x)]),m.domain(f)
def two_parts(out, y): return F.cross_entropy(out[0], y)+F.cross_entropy(out[1], torch.arange(2*len(y))//len(y))
def two_parts_drawn(out, y): return two_parts(out, y)+0*torch.rand(())
def two_parts_of_many(out, y): return two_parts(out, y)/(len(y)>2)
def two_parts_counted(out, y): return two_parts_drawn(out, y)*len(y),len(y)
def dann(loss, n=45):
    x,y = labelled(n).tensors
    dls = DataLoaders(TfmdDL(TensorDataset(x, x.flip(0)+1, y), size(), shuffle=True))
    dls.n_inp = 2
    return Learner(dls, Of(domains, body=net(n_out=4), classes=net(n_out=3), domain=net()), loss, sgd)
def all_domains(*_): return [fitted(lambda o=o: dann(o), 2) for o in (two_parts,two_parts_counted,two_parts_drawn,two_parts_of_many)]

@on_2_and_3
def test_a_loss_of_unknown_kind_in_an_uneven_last_batch(W, found):
    "Samples count alike, and not ranks: also where a warning says that it could not be checked"
    one, = found(all_domains, 1)
    for r,got in enumerate(found(all_domains, W)):
        for (w,messages),(want,_),warned in zip(got, one, (False,False,True,True)):
            assert (w-want).abs().max()<1e-9
            assert [o.split(']')[0] for o in messages]==['[loss-unknown']*(warned and not r)

class OfPairs(nn.Module):
    "Returns its loss: each row against the other rows of its batch"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2).double()
    def forward(self, x):
        out = self.lin(x)
        return dict(loss=F.cross_entropy(out@out.T, torch.arange(len(out))))
def of_pairs(): return learner(OfPairs(), lambda out, y: out['loss'])
def by_weight(p, t):
    w = tensor([1.,9.], dtype=torch.double)[t]
    return (F.cross_entropy(p, t, reduction='none')*w).sum()/w.sum()
def one_class():
    "Labels alternate as ranks do, so that each rank has one class in every batch"
    return Learner(DataLoaders(TfmdDL(TensorDataset(data().tensors[0], torch.arange(48)%2), size())), net(), by_weight, sgd)

def other_length(): return learner(ds=data(24+6*group_rank()))
def other_rate(): return learner(opt=lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=.1*(1+group_rank())))
def with_nan(ps, lr):
    opt = sgd(ps, lr)
    for o in opt.param_groups: o['of_user'] = float('nan')
    return opt
def not_a_number(): return learner(opt=with_nan)
class Lerp(Callback): "A callback of the user's"
class Teachers(Callback): "Another one"
def other_callback(): return learner(cbs=Lerp() if group_rank() else Teachers())
def with_more(): return learner(cbs=Teachers() if group_rank()==1 else None) # a rank may have more callbacks than others
def other_path(): return learner(path=f'/tmp/run-{group_rank()}')
def lazy(): return learner(nn.Sequential(nn.LazyLinear(2)).double())

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
class Second(Callback):
    "Trains a model of its own, on each rank with that rank's samples"
    def __init__(self): self.net = net()
    def before_batch(self):
        with torch.no_grad(): self.net[0].weight.add_(self.learn.xb[0].mean(0)*self.training)
def second_model(): return learner(cbs=Second())
class Target(Callback):
    "As BYOL: targets by a copy of the model, whose BatchNorm trains on them; `sync`: over all ranks"
    def __init__(self, sync=False): self.sync = sync
    def before_fit(self):
        self.target = copy.deepcopy(get_model(self.learn.model)).requires_grad_(False)
        if self.sync: sync_batchnorm(self.target)
    def before_batch(self):
        with torch.no_grad(): self.learn.yb = (self.target(self.learn.xb[0]+1),)
def with_norm(): return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
def target_model(): return learner(with_norm(), cbs=Target())
def synced_target(): return learner(with_norm(), cbs=Target(sync=True))
class Drifts(Callback):
    "Changes weights on one rank alone, from a step on"
    def __init__(self, since=0): self.since = since
    def after_step(self):
        if group_rank()==1 and self.iter>=self.since:
            with torch.no_grad(): get_model(self.model)[2].bias.add_(1e-6)
def drift(): return learner(cbs=Drifts())
def drift_within(): return learner(cbs=Drifts(1))
drift_within.options = lambda: dict(check_every=2)
def other_options(): return learner()
other_options.options = lambda: dict(timeout_s=20.)|[{},dict(checks='error', check_every=2, seed=4)][group_rank()]
class OwnEMA(EMA): "A class of the user's"
def other_decays(): return learner(cbs=[OwnEMA(.9-.2*group_rank()),GradientClip(2, [2.,1.][group_rank()])])
def rank0_saves(): return learner(cbs=[Checkpoint('never')]*(group_rank()==0)+[CSVLogger('never')]*group_rank())
def other_intervals(): return learner(cbs=Checkpoint('never', every=1+group_rank(), in_memory=3))
for _o in (other_decays, rank0_saves, other_intervals): _o.options = lambda: dict(timeout_s=20.)

def more_layers(): return learner(net() if not group_rank() else nn.Sequential(*net(), nn.Linear(2, 2)).double())
def other_loss(): return learner(loss=nn.L1Loss() if group_rank() else nn.MSELoss())

differently = r'ValueError: \[different-settings\] the ranks train differently: .*'
not_mean = r'\[loss-not-mean\] the loss .* of a batch does not follow from its values on parts of it.*n_items'
offenders = [(mixing,r'\[mixes-samples\] predictions of Sequential depend on which other samples are in the batch'),
    (padding,r'\[mixes-samples'), (contrastive,not_mean), (simclr_in_model,r'\[loss-'), (of_pairs,not_mean),
    (one_class,not_mean), (lazy,'ValueError: the model has lazy layers'),
    (other_length,r'ValueError: \[different-data\] .*len\(training data\): 24 on rank 0, 30 on rank 1'),
    (other_rate,r'ValueError: \[different-settings\] .*momentum of parameter group 0: 0\.1 on rank 0, 0\.2 on rank 1'),
    (other_options,r"ValueError: \[different-settings\] .*: seed: 3 on rank 0, 4 on rank 1; check_every: None .*, 2 .*; checks: 'warn' "),
    (other_decays,r'ValueError: .*: OwnEMA.decay: 0.9 on rank 0, 0.7\d* on rank 1; GradientClip.norm_type: 2.0 on rank 0, 1.0 on rank 1.'),
    (rank0_saves,r'ValueError: .*: Checkpoint: given on rank 0, none on rank 1; Checkpoint.path: '),
    (other_callback,differently+'callbacks: Teachers on rank 0, Lerp on rank 1'),
    (more_layers,differently+'model.3: none on rank 0, Linear on rank 1'),
    (other_loss,differently+'loss_func: MSELoss on rank 0, L1Loss on rank 1'),
    (other_intervals,r'ValueError: .*: Checkpoint.every: 1 on rank 0, 2 on rank 1. Give'),
    (target_model,r'\[ranks-differ\] target\.target\.1\.running_mean, .*running_var: each.*sync_batchnorm'),
    (own_buffer,r'\[ranks-differ\] seen: each rank has computed this'), (second_model,r'\[ranks-differ\] second\.net\.0\.weight: each'),
    (center_loss,r'\[ranks-differ\] .*centers.*average_grads'), (not_a_number,None),
    (drift,r'RuntimeError: \[weights-differ\] .*2\.bias differs between rank 0 and \[1\]'),
    (drift_within,r'RuntimeError: \[weights-differ\] after 2 steps of this epoch 2\.bias differs .*: something changes it on one rank'),
    (other_path,r'\[different-path\] learn.path: .*run-0 on rank 0, .*run-1')]

def offences(W, *_): return all_of([o for o,_ in offenders]) if W==2 else {} # their differences are those of two ranks

@pytest.mark.parametrize('make,want', offenders, ids=lambda o: getattr(o, '__name__', ''))
def test_offenders(found, make, want):
    "A warning, once, on rank 0; or an error on every rank"
    (got,messages),(other,others) = [o[make.__name__] for o in found(offences, 2)]
    if want is None: assert isinstance(got, torch.Tensor) and messages==others==[], (got,messages) # NaN on all ranks is no difference
    elif 'Error' in want: assert re.match(want, got) and got.split(':')[0]==other.split(':')[0], got
    else: assert len(messages)==1 and re.match(want, messages[0]) and others==[], messages

def checked(*_): return [[fitted(o, checks=checks) for o in (mixing,contrastive,center_loss)] for checks in ('error',False)]

def test_errors_are_raised_on_all_ranks_and_false_is_silent(found):
    for errors,silent in found(checked, 2):
        assert [re.match(r'ValueError: \[(.*)\]', o).group(1) for o,_ in errors]==['mixes-samples','loss-not-mean','ranks-differ']
        assert all(isinstance(o, torch.Tensor) and not messages for o,messages in silent)

def remedies(*_): return all_of([remedied,remedied_in_groups,synced_target])

@on_2_and_3
def test_remedies_are_exact(W, found):
    "average_grads weighs by items; a model that a callback copies has synchronised BatchNorm. Second passes are in the table of scenes"
    want, = found(remedies, 1)
    for got in found(remedies, W):
        for k,(w,messages) in got.items(): assert (w-want[k][0]).abs().max()<1e-9 and not messages, k

def all_codes():
    texts = [o.read_text() for o in Path(__file__).parent.parent.glob('learnerdist/**/*.py')]
    assert not [o for o in texts if re.search(r"""['"]\[[a-z]+(?:-[a-z]+)+\]""", o)] # but through `coded`, which names the entry
    return {o for s in texts for o in re.findall(r"(?:findings|note|warn|coded)\('([a-z-]+)'", s)}

def test_each_code_has_an_entry():
    assert coded('no-context', 'Text') == '[no-context] Text (learnerdist explain no-context)'
    assert all_codes()=={*entries()}

def test_what_a_loss_follows_from():
    assert follows((2., None, 4), [(1., None, 2), (3., None, 2)], 1e-8)=='samples'
    assert follows((2.5, None, 4), [(1., None, 1), (3., None, 3)], 1e-8)=='samples'
    assert follows((4., None, 4), [(1., None, 2), (3., None, 2)], 1e-8)=='sum'
    assert follows((3., None, 4), [(1., None, 2), (3., None, 2)], 1e-8)=='other'
    assert follows((3., None, 4), [(0., None, 2), (3., None, 2)], 1e-8) is None # a sum, or a mean over the pairs of the second part
    assert follows((2.8, 10, 4), [(1., 1, 2), (3., 9, 2)], 1e-8)=='items'
    assert follows((2.8, 10, 4), [(1., 2, 2), (3., 9, 2)], 1e-8)=='other'
    assert follows((float('nan'), None, 4), [(1., None, 2), (3., None, 2)], 1e-8) is None
    assert follows((0., None, 4), [(0., None, 2), (0., None, 2)], 1e-8) is None

class Boxes(list):
    "Remembers how many boxes the samples have that were read"
    def __getitem__(self, i):
        self.n.append(len(super().__getitem__(i)[1]['boxes']))
        return super().__getitem__(i)

def test_the_samples_are_those_whose_targets_differ_most():
    "Those with as many boxes each do not show a mean over boxes"
    ds = Boxes((torch.zeros(4), dict(boxes=torch.zeros(1+i%3, 2))) for i in range(30))
    ds.n = []
    learn = Learner(DataLoaders(TfmdDL(ds, 4, collate_fn=list)), nn.Linear(4, 1), nn.MSELoss())
    learn.dl = learn.dls.train
    assert [len(y['boxes']) for _,y in read_items(learn, 2)]==[*sorted(ds.n)[:2],*sorted(ds.n)[-2:]] and len(ds.n)==8

# --- what one rank does alone, or changes too late -----------------------------------------------------------------------------

class ValidatesAlone(Callback):
    def after_batch(self):
        if group_rank()==0 and self.training and self.iter==1: self.learn.validate()

def validating(cbs=None):
    learn = learner(cbs=cbs)
    learn.dls = DataLoaders(learn.dls.train, TfmdDL(data(), size()))
    return learn

def validates_alone(*_): return fitted(lambda: validating(ValidatesAlone()))[0]

def test_what_rank_0_alone_calls_is_named_on_all_ranks(found):
    for f in found(validates_alone, 2):
        assert 'RanksDiverged' in f and 'in after_batch' in f
        assert 'rank 0 is at a collective or a loop (validate, get_preds) within a training batch' in f

def cancels(p, t):
    if group_rank()==1: raise CancelBatchException
    return F.cross_entropy(p, t)
cancels.n_items = n_elements # known before the forward pass

def cancels_in_the_loss(*_): return fitted(lambda: learner(net(n_out=3), cancels, labelled()), 2)[0]

def test_a_cancel_within_the_loss_names_the_remedy(found):
    for o in found(cancels_in_the_loss, 2): assert 'Raise it in an event of a callback' in o

# --- models in bfloat16 and float16 ------------------------------------------------------------------------------------------

def short(model=None, loss=by_hand, ds=None, dtype=torch.bfloat16, **kw):
    "A learner whose model and data are of a short type"
    ds = TensorDataset(*[o.to(dtype) if o.is_floating_point() else o for o in (ds or data()).tensors])
    return learner((model or net()).to(dtype), loss, ds, **kw)

def written_ce(p, y): return F.cross_entropy(p, y, reduction='none').sum()/len(y)
def transformer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0., batch_first=True)
    return short(nn.Sequential(nn.Unflatten(1, (1,4)), layer, nn.BatchNorm1d(1), nn.Flatten()), written_ce, labelled())
def halves(): return short(dtype=torch.float16)
class Autocast(Callback):
    "As mixed precision, around the whole batch"
    def before_batch(self):
        self.ctx = torch.autocast('cpu', torch.bfloat16)
        self.ctx.__enter__()
    def after_loss(self): self.ctx.__exit__(None, None, None)
def autocast(): return short(dtype=torch.float32, cbs=Autocast())

def shaken(b):
    "Draws for a batch, which the check does not collate again: each rank looks at samples of its own"
    torch.rand(1)
    return tuple(map(torch.stack, zip(*b)))
def of_marked(p, y, marks): return (marks*(p-y).square().mean(1)).sum()/marks.sum()
def marked(at=1):
    "Rank 1 alone, whose first sample is not marked, can see what the loss is the mean over"
    marks = torch.ones(48).double()
    marks[at] = 0
    dls = DataLoaders(DataLoader(TensorDataset(*data().tensors, marks), size(), collate_fn=shaken), n_inp=1)
    return Learner(dls, net(), of_marked, sgd)

def masked_pairs():
    "fastai's learner asks `dls`, and no loader, what the inputs are; the first two of four samples have one item"
    from fastai.basics import DataLoaders, Learner, SGD, TfmdDL
    from learnerdist import fastai # noqa: F401
    items = [(*o,tensor(i%3)) for i,o in enumerate(zip(*[t.float() for t in data().tensors]))]
    dls = DataLoaders(*[TfmdDL(items, size()) for _ in range(2)])
    dls.n_inp = 1
    return Learner(dls, net().float(), lambda p, y, k: of_marked(p, y, (k>0).float()), opt_func=SGD, lr=.1)

def on_ones_own(*_): return all_of([marked,masked_pairs])

def test_what_one_rank_alone_sees_is_heard_on_all(found):
    for k,(_,messages) in found(on_ones_own, 2)[0].items():
        assert [o.split()[0] for o in messages]==['[loss-not-mean]'], (k,messages)

found = asking(alone=(on_ones_own, scripts, all_domains, remedies, on_two, unused, skips_part, offences, checked, validates_alone,
                      cancels_in_the_loss))
