"`get_preds` and `predict` on several ranks: what one process predicts, in the order of the data set, on every rank"
import contextlib
from itertools import islice,zip_longest
from collections import namedtuple
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler, get_worker_info
from harness import asking, caught, close
from helpers import Of
from learnerdist.all import DataLoaders, Learner, TfmdDL, distrib_barrier

def plain(o):
    "Nested lists and dicts of numbers"
    if isinstance(o, torch.Tensor): return o.tolist()
    if isinstance(o, dict): return {k:plain(v) for k,v in o.items()}
    return [plain(v) for v in o] if isinstance(o, (list,tuple)) else o

def same(got, want):
    "The same structure and types; numbers that went through a matrix product to 1e-6"
    assert tree_map(type, got)==tree_map(type, want), got
    close(got, want, 1e-6)

def xy(n=13):
    g = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, generator=g),torch.randint(4, (n,), generator=g)

def linear(): return nn.Linear(3, 4)

def make(model=linear, valid=None, train=None, loss=F.cross_entropy, n=13):
    "`model`: a module, or a function that makes one with the same weights each time"
    torch.manual_seed(0)
    ds = TensorDataset(*xy(n))
    dls = DataLoaders(train or TfmdDL(ds, 4, shuffle=True, drop_last=True), TfmdDL(ds, 4) if valid is None else valid)
    return Learner(dls, model if isinstance(model, nn.Module) else model(), loss, torch.optim.SGD, lr=.1)

def preds(ctx, *args, model=linear, valid=None, train=None, loss=F.cross_entropy, n=13, **kw):
    learn = make(model, valid, train, loss, n)
    with ctx(learn): return plain(learn.get_preds(*args, **kw))

# --- models -----------------------------------------------------------------------------------------------------------------

Pair = namedtuple('Pair', 'a b')

def of(f):
    "A model of one function, whose output depends on each sample alone"
    return Of(lambda m, *xs: f(*xs))

def each_type(x): return x,x[:,0]>0,x.half(),x.double(),x.long(),(9*x).short(),(x>0).byte(),torch.complex(x, 2*x),x[:,:0]
def nested(x): return dict(logits=x@x.new_ones(3, 4), aux=(x[:,0], [x*2, Pair(x+1, x.sum(1).long())]))
def n_boxes(x): return int(x[0].abs()*3)
def boxes(x): return [dict(boxes=o.repeat(n_boxes(o), 1), scores=o[:1].repeat(n_boxes(o))) for o in x]
def box_list(x): return [o.repeat(n_boxes(o), 1) for o in x]
def packed(x): return nn.utils.rnn.pack_sequence([o[:n_boxes(o)%3+1] for o in x], False)
def bare_loss(p, *y): return torch.zeros(())

class Images(torch.utils.data.Dataset):
    "Of different sizes, with targets of detection"
    def __len__(self): return 7
    def __getitem__(self, i): return torch.full((3, 2+i%3, 3), float(i)),dict(boxes=torch.full((i%4, 4), float(i)), label=i)

def as_tuples(items): return tuple(zip(*items))

class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return islice(zip(*xy()), info.id if info else 0, None, info.num_workers if info else 1)

class Inputs(torch.utils.data.Dataset):
    "No targets: the tensor alone"
    def __len__(self): return 9
    def __getitem__(self, i): return torch.tensor([i, 1., 2.])

class Texts(torch.utils.data.Dataset):
    def __len__(self): return 9
    def __getitem__(self, i): return 'abcdefghi'[i]*(i%3+1),i

def lengths(texts): return torch.tensor([len(o) for o in texts])

def bn_and_dropout(): return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(.5), nn.Linear(5, 4))

class Smooth(nn.CrossEntropyLoss):
    def activation(self, x): return x.softmax(-1)

def dl(*args, **kw): return DataLoader(TensorDataset(*xy()), *args, **kw)
def weighted(): return WeightedRandomSampler(torch.arange(13.), 10)

def predictions(ctx):
    learn = make()
    x = xy()[0]
    res = {}
    with ctx(learn): res['tensor'] = learn.predict(x[3])
    two = make(of(lambda a,b: (a+1, dict(s=b.sum(1)))), loss=bare_loss)
    with ctx(two): res['tuple'] = two.predict((x[3],x[4]))
    dicts = make(of(lambda b: b['x']*2), loss=bare_loss)
    with ctx(dicts): res['dict'] = dicts.predict(dict(x=x[3]))
    with ctx(learn): res['act'] = learn.predict(x[3], act=lambda o: o.softmax(-1))
    found = make(of(boxes), loss=bare_loss)
    with ctx(found): res['boxes'] = found.predict(x[3])
    changed = make(of(lambda x: x), TfmdDL(TensorDataset(*xy()), 4, after_batch=lambda b: (b[0]*10,*b[1:])), loss=bare_loss)
    with ctx(changed): res['after_batch'] = changed.predict(x[3]),changed.get_preds()[0][3]
    return plain(res)

cases = dict(
    options=lambda ctx: preds(ctx, with_input=True, with_loss=True, act=lambda o: o.softmax(-1)),
    activation=lambda ctx: preds(ctx, loss=Smooth(), with_loss=True),
    train_set=lambda ctx: preds(ctx, 0, with_input=True),
    train_set_as_read=lambda ctx: preds(ctx, 0, train=TfmdDL(TensorDataset(*xy()), 4, drop_last=True), reorder=False),
    one_sample=lambda ctx: preds(ctx, n=1, train=dl(4), with_input=True, with_loss=True),
    other_loader=lambda ctx: preds(ctx, dl=dl(5), with_input=True),
    other_loader_as_read=lambda ctx: preds(ctx, dl=dl(5), reorder=False),
    other_shuffled_loader=lambda ctx: preds(ctx, dl=dl(5, shuffle=True, drop_last=True)),
    weighted=lambda ctx: preds(ctx, dl=dl(5, sampler=weighted())),
    subset=lambda ctx: preds(ctx, dl=dl(2, sampler=SubsetRandomSampler([7, 1, 4, 11, 2]))),
    batch_sampler=lambda ctx: preds(ctx, dl=dl(batch_sampler=[[3, 1], [0], [7, 8, 9, 2], [5, 5]])),
    batch_sampler_as_read=lambda ctx: preds(ctx, dl=dl(batch_sampler=[[3, 1], [0], [7, 8, 9, 2], [5, 5]]), reorder=False),
    stream=lambda ctx: preds(ctx, dl=DataLoader(Stream(), 4)),
    workers=lambda ctx: preds(ctx, dl=dl(2, num_workers=2), with_input=True),
    evaluation_mode=lambda ctx: preds(ctx, model=bn_and_dropout),
    tuple_output=lambda ctx: preds(ctx, model=of(each_type), loss=bare_loss),
    nested_output=lambda ctx: preds(ctx, model=of(nested), loss=bare_loss),
    fewer_rows=lambda ctx: preds(ctx, model=of(lambda x: x[x[:,0]>0]), loss=bare_loss),
    flattened_output=lambda ctx: preds(ctx, model=of(lambda x: x.reshape(-1)), loss=bare_loss),
    packed_output=lambda ctx: preds(ctx, model=of(packed), loss=bare_loss),
    number_beside_output=lambda ctx: preds(ctx, model=of(lambda x: (x, torch.tensor(3.), None, 'a')), loss=bare_loss),
    boxes=lambda ctx: preds(ctx, model=of(boxes), loss=bare_loss),
    list_of_boxes=lambda ctx: preds(ctx, model=of(box_list), loss=bare_loss),
    detection=lambda ctx: preds(ctx, model=of(lambda xs: [dict(boxes=o[0]) for o in xs]), loss=bare_loss, with_input=True,
                                dl=DataLoader(Images(), 3, collate_fn=as_tuples)),
    no_targets=lambda ctx: preds(ctx, dl=DataLoader(Inputs(), 4), with_input=True),
    texts=lambda ctx: preds(ctx, model=of(lengths), loss=bare_loss, dl=DataLoader(Texts(), 4), with_input=True),
    predict=predictions)
# What draws from a random stream is compared with a context of one process, where the stream is the same
random_cases = dict(
    shuffled_as_read=lambda ctx: preds(ctx, 0, reorder=False, with_input=True),
    weighted_as_read=lambda ctx: preds(ctx, dl=dl(5, sampler=weighted()), reorder=False))

def in_ctx(learn): return learn.distrib_ctx(seed=1)
def alone(learn): return contextlib.nullcontext()

# For rank 0 alone: wide rows, nested ones, lists, and fewer samples than ranks
for_rank0 = dict(
    rank0_wide=lambda ctx: preds(ctx, model=of(lambda x: x.repeat(1, 400)), loss=bare_loss, gather='rank0'),
    rank0_nested=lambda ctx: preds(ctx, model=of(nested), loss=bare_loss, gather='rank0', with_input=True),
    rank0_boxes=lambda ctx: preds(ctx, model=of(boxes), loss=bare_loss, gather='rank0'),
    rank0_one=lambda ctx: preds(ctx, n=1, train=dl(4), gather='rank0', with_loss=True))

def predicted(W, rank, path):
    preds(in_ctx) # opens what stays in this group
    return {k: caught(f, in_ctx) for k,f in {**cases,**random_cases,**for_rank0}.items()}
def streamed(W, rank, path): return [stream_preds(o) for o in (0,1,2)]
types = torch.float32,torch.float16,torch.bfloat16,torch.bool
def own_rows(W, rank, path):
    "Rows to which each rank has added a number: on one machine they share memory; their types"
    learn = make(of(lambda x: tuple((x>0) if o is torch.bool else x.to(o) for o in types)), loss=bare_loss)
    with learn.distrib_ctx(seed=1):
        rows,_ = learn.get_preds()
        rows[0].add_(rank+1)
        distrib_barrier()
        return rows[0]-rank-1,[o.dtype for o in rows]
# Of three ranks on one machine, and of two on as many machines
found,apart = asking(predicted, streamed, own_rows),asking(predicted, own_rows, env=dict(LOCAL_WORLD_SIZE='1'))

@pytest.mark.parametrize('name', [*cases,*random_cases])
def test_case(name, found, apart):
    func = {**cases,**random_cases}[name]
    expect = func(in_ctx if name in random_cases else alone)
    if name in cases: same(plain(func(in_ctx)), plain(expect))
    for got in found(predicted, 3)+apart(predicted, 2): same(plain(got[name]), plain(expect))

@pytest.mark.parametrize('where,W', [('found', 3), ('apart', 2)])
def test_rank_0_alone_and_rows_of_ones_own(where, W, request):
    ranks = request.getfixturevalue(where)
    for k,f in for_rank0.items():
        first,*others = (o[k] for o in ranks(predicted, W))
        same(first, f(alone))
        assert others==[[None]*len(first)]*(W-1)
    for rows,found in ranks(own_rows, W):
        close(rows, xy()[0], 1e-6)
        assert found==[*types]

# --- values by hand ---------------------------------------------------------------------------------------------------------

def test_alone_by_hand():
    x,y = xy()
    assert preds(alone, model=nn.Identity(), loss=bare_loss)==[x.tolist(), y.tolist()]
    assert preds(alone, 0, model=nn.Identity(), loss=bare_loss)==[x.tolist(), y.tolist()] # shuffled, and its last batch dropped
    assert [len(o) for o in preds(alone, 0, reorder=False)]==[12, 12]
    got = preds(alone, model=of(boxes), loss=bare_loss)[0]
    assert [len(o['boxes']) for o in got]==[n_boxes(o) for o in x] and len({n_boxes(o) for o in x})>3
    learn = make()
    losses = learn.get_preds(with_loss=True)[2]
    torch.testing.assert_close(losses, F.cross_entropy(learn.model(x), y, reduction='none').detach())
    assert learn.loss_func is F.cross_entropy

def test_predict_transforms_as_the_loader_does():
    res,x = predictions(alone),xy()[0]
    assert res['after_batch'][0]==res['after_batch'][1]==(x[3]*10).tolist()

def test_nothing_to_predict():
    learn = make(n=0, train=dl(4))
    assert learn.get_preds(with_input=True)==(None,)*3

def stream_preds(workers):
    learn = make(of(lambda x: x*2), valid=DataLoader(Stream(), 2, num_workers=workers), loss=bare_loss)
    with learn.distrib_ctx(): return learn.get_preds()

def test_order_of_a_stream(found):
    "Each row once, in the order of one process; several workers take turns"
    x,y = xy()
    for ranks in found(streamed, 3):
        for n,(p,t) in zip((1,1,2), ranks):
            parts = [torch.arange(13)[w::n].split(2) for w in range(n)] # of each worker, in batches
            order = torch.cat([o for step in zip_longest(*parts) for o in step if o is not None]).tolist()
            assert sorted(order)==[*range(13)] and t.tolist()==y[order].tolist() and torch.equal(p, x[order]*2)
