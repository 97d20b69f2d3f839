"The gradient, the weights and the recorded losses of the mean over all items of the global batch, whatever a loss counts"
from functools import partial
from types import SimpleNamespace
import pytest, torch
from torch import nn, tensor
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset
from learnerdist.all import DataLoaders, GradientAccumulation, Learner, TfmdDL, process_group
from learnerdist.learner.losses import batch_rows
from learnerdist.testing import run_ranks

N,BS,SEQ,V = 37,3,5,4

def make_data(kind):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(N, SEQ, 3, generator=g, dtype=torch.double)
    labels = torch.randint(V, (N,SEQ), generator=g)
    lens = torch.randint(1, SEQ+1, (N,), generator=g)
    if kind=='tokens': labels[torch.arange(SEQ)>=lens[:,None]] = -100 # of uneven length
    elif kind in ('label','weights','sum','focal','returns','attribute'): labels = labels[:,0]
    elif kind=='ignore':
        labels = labels[:,0]
        labels[torch.arange(N)%4!=0] = -100 # one rank of 2 or 4 has nothing to count, in most steps
    elif kind in ('bce','mse'): labels = torch.rand(N, V, generator=g, dtype=torch.double)
    return x,labels

def focal(p, t):
    ce = F.cross_entropy(p, t, reduction='none')
    return ((1-(-ce).exp())**2*ce).mean()
weights = tensor([1.,5.,.2,3.], dtype=torch.double)
def returns(p, t): return (F.cross_entropy(p, t, reduction='none')*weights[t]).sum(),weights[t].sum()
def attribute(p, t): return (F.cross_entropy(p, t, reduction='none')*weights[t]).sum()/weights[t].sum()
attribute.n_items = lambda p, t: weights[t].sum()
def squares(p, t): return ((p-F.one_hot(t, V))**2).sum()
def flat_tokens(p, t): return F.cross_entropy(p.flatten(0, 1), t.flatten())
flat_tokens.n_items = lambda p, t: (t!=-100).sum()

losses = dict(label=F.cross_entropy, weights=nn.CrossEntropyLoss(weight=weights), ignore=nn.CrossEntropyLoss(), tokens=flat_tokens,
              bce=nn.BCEWithLogitsLoss(pos_weight=weights), mse=nn.MSELoss(), sum=nn.CrossEntropyLoss(reduction='sum'), focal=focal,
              returns=returns, attribute=attribute, squares=squares)

def make_model(kind):
    torch.manual_seed(7)
    head = [nn.Linear(3, V)] if kind=='tokens' else [nn.Flatten(), nn.Linear(3*SEQ, V)]
    return nn.Sequential(*head).double()

def kind_of(kind): return 'label' if kind=='squares' else kind

def by_hand(kind, opt_func, world, n_acc):
    "Plain torch on one process: each step is one batch of the samples of `world` ranks and `n_acc` micro-batches; its losses at each step"
    x,y = make_data(kind_of(kind))
    model,f,seen = make_model(kind),losses[kind],[]
    opt = opt_func(model.parameters())
    size = BS*world*n_acc
    for idxs in torch.arange(N).split(size):
        res = f(model(x[idxs]), y[idxs])
        loss = res[0]/res[1] if isinstance(res, tuple) else res
        loss.backward()
        opt.step()
        opt.zero_grad()
        seen.append(loss.item())
    return [p.detach().clone() for p in model.parameters()],seen

sgd,adamw = partial(torch.optim.SGD, lr=.1, momentum=.9),partial(torch.optim.AdamW, lr=.01)
small = partial(torch.optim.SGD, lr=.002, momentum=.9) # for sums

def learner(kind, opt_func, n_acc=1):
    dls = DataLoaders(*[TfmdDL(TensorDataset(*make_data(kind_of(kind))), BS) for _ in range(2)])
    lr = opt_func.keywords['lr']
    learn = Learner(dls, make_model(kind), losses[kind], lambda ps, lr: opt_func(ps), lr=lr)
    return learn.add_cb(GradientAccumulation(BS*n_acc)) if n_acc>1 else learn

def fit(kind, opt_func, n_acc):
    learn = learner(kind, opt_func, n_acc)
    with learn.distrib_ctx(seed=1), learn.no_logging(): learn.fit(1)
    return [p.detach() for p in learn.model.parameters()],learn.recorder.losses,learn.recorder.values[0]

cases = [(kind,opt,n_acc) for kind in losses for opt in ((small,) if kind in ('sum','squares') else (sgd,adamw)) for n_acc in (1,2,4)]

def all_fits():
    with process_group(): return [fit(*o) for o in cases]

@pytest.fixture(scope='module', params=[1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
def fits(request): return request.param,run_ranks(all_fits, request.param, timeout_s=300)

@pytest.mark.parametrize('i', range(len(cases)), ids=[f'{k}-{o.func.__name__}-{n}' for k,o,n in cases])
def test_weights_are_those_of_one_process(fits, i):
    world,got = fits
    kind,opt,n_acc = cases[i]
    want,seen = by_hand(kind, opt, world, n_acc)
    for weights_,losses_,_ in (o[i] for o in got):
        for a,b in zip(weights_, want): assert (a-b).abs().max()<=1e-9*max(b.abs().max(), 1)
        if n_acc==1: assert torch.allclose(tensor(losses_), tensor(seen), atol=1e-9, rtol=0, equal_nan=True)

@pytest.mark.parametrize('i', [i for i,o in enumerate(cases) if o[2]==1])
def test_recorded_losses_are_alike_on_all_ranks_and_leave_padding_out(fits, i):
    world,got = fits
    kind,opt,_ = cases[i]
    x,y = make_data(kind_of(kind))
    f,model = losses[kind],make_model(kind)
    for o in got: assert str(o[i][1:])==str(got[0][i][1:]) # also NaN, of steps with nothing to count
    first = f(model(x[:BS*world]), y[:BS*world])
    first = first[0]/first[1] if isinstance(first, tuple) else first
    assert abs(got[0][i][1][0]-first.item())<1e-9*max(1, abs(first.item()))
    model = nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(got[0][i][0]), model.parameters()) or model
    with torch.no_grad(): whole = f(model(x), y)
    if kind in ('sum','squares'): return # their validation loss depends on the batch size
    whole = whole[0]/whole[1] if isinstance(whole, tuple) else whole
    assert abs(got[0][i][2][1]-whole.item())<1e-9 # the mean over all items of the data set

class Pictures(IterableDataset):
    "A stream of (picture of its own height, boxes)"
    def __iter__(self): return ((torch.zeros(3+i, 6), dict(boxes=torch.zeros(2, 4))) for i in range(3))

def test_samples_of_a_streams_last_batch_of_lists():
    "It has one picture with two boxes, which is not the batch size of two"
    dl = TfmdDL(Pictures(), 2, collate_fn=lambda items: tuple(map(list, zip(*items))))
    assert [batch_rows(SimpleNamespace(xb=b[:1], yb=b[1:], dl=dl, iter=i)) for i,b in enumerate(dl)]==[2,1]

def test_samples_of_pictures_and_masks():
    def rows(x, y, **kw): return batch_rows(SimpleNamespace(xb=(torch.zeros(x),), yb=(torch.zeros(y),), iter=0, **kw))
    said = dict(dl=SimpleNamespace(bs=4, n=8))
    assert rows((5,3,8,8), (5,8,8), **said)==5 and rows((5,3), (5,), **said)==5 and rows((5,), (5,), **said)==5
    assert rows((7,4), (7,4), **said)==4 # time first, as the loader says
    assert rows((5,3,8,8), (5,8,8), n_rows=9, **said)==9 # put together from the rows of all ranks
