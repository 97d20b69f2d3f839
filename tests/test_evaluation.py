"Every number of a validation on several ranks is the one that a single process computes on the whole data set"
import contextlib,functools,math,traceback
import pytest, torch
from sklearn.metrics import f1_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (BatchSampler, DataLoader, Dataset, DistributedSampler, SubsetRandomSampler, TensorDataset,
                              WeightedRandomSampler)
from torchmetrics import classification as tm
from helpers import Stream
from learnerdist.all import *
from learnerdist.data.loaders import find_bs
from learnerdist.testing import RanksError, run_ranks

def values(learn): return [o if o is None else torch.as_tensor(o).double().tolist() for o in learn.final_record]

def assert_close(a, b, tol=1e-6):
    "Nested lists of numbers, nan equal to nan; whatever is no float is the same"
    if isinstance(b, dict): a,b = [a[k] for k in b],list(b.values())
    if isinstance(b, (list,tuple)):
        assert len(a)==len(b), (a, b)
        for o,p in zip(a, b): assert_close(o, p, tol)
    elif isinstance(b, float): assert a==pytest.approx(b, abs=tol, nan_ok=True)
    else: assert a==b

class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def forward(self, x): return x*self.factor

sizes = [(n, bs) for n in (1, 2, 5, 8, 17) for bs in (1, 4, 16)]

def sweep_data(n): return torch.arange(n)[:,None]*1.,(torch.arange(n)[:,None]*3.)%5-1

def sweep_one(n, bs, model):
    x,y = sweep_data(n)
    dls = DataLoaders.from_dsets(TensorDataset(x, y), TensorDataset(x, y), bs=bs)
    learn = Learner(dls, model, nn.MSELoss(), metrics=[F.l1_loss, AccumMetric(lambda p,t: (p-t).abs().max())])
    with learn.distrib_ctx(): return learn.validate(),[o.flatten().tolist() for o in learn.get_preds(with_loss=True)]

def sweep(): return {(n, bs): sweep_one(n, bs, Times(n%2)) for n,bs in sizes}

def by_hand(n, bs, factor):
    x,y = ([v.item() for v in o] for o in sweep_data(n))
    preds = [factor*v for v in x]
    losses = [(p-t)**2 for p,t in zip(preds, y)]
    diffs = [abs(p-t) for p,t in zip(preds, y)]
    return [sum(losses)/n, sum(diffs)/n, max(diffs)],preds,y,losses

def check_sweep(found):
    for n,bs in sizes:
        record,(preds,targs,losses) = found[n,bs]
        means,p,t,l = by_hand(n, bs, n%2)
        assert (preds, targs)==(p, t), (n, bs)
        assert record==pytest.approx(means, rel=1e-6) and losses==pytest.approx(l, rel=1e-6), (n, bs)

@pytest.mark.parametrize('W', [1, 2, *[pytest.param(o, marks=pytest.mark.long) for o in (3,4)]])
def test_every_size_against_values_by_hand(W):
    for o in on_ranks(W): check_sweep(o['sweep'])

class BatchMeans(Metric):
    "A class never seen: the mean of the batches' means, which depends on where the batches end"
    def reset(self): self.means = []
    def accumulate(self, learn): self.means.append(accuracy(learn.pred, learn.y).item())
    @property
    def value(self): return sum(self.means)/len(self.means) if self.means else None

class Histogram(Metric):
    "Another: of the inputs, with the index of the batch, the loss and the number of inputs"
    with_input = True
    def reset(self): self.counts = torch.zeros(8)
    def accumulate(self, learn):
        others = learn.iter,learn.loss*find_bs(learn.yb),learn.y.float().sum()
        self.counts += torch.cat([torch.histc(learn.xb[0], 5, -2, 2), torch.tensor(others)])
    @property
    def value(self): return self.counts.tolist()

def xy(n=13, *shape):
    g = torch.Generator().manual_seed(n)
    return torch.randn(n, *shape, 3, generator=g),torch.randint(4, (n, *shape), generator=g)

def make(valid, n_train=8, metrics=(accuracy, BatchMeans, Histogram), loss=F.cross_entropy, **kw):
    torch.manual_seed(0)
    train = DataLoader(TensorDataset(*xy(n_train)), 4)
    return Learner(DataLoaders(train, valid), nn.Linear(3, 4), loss, torch.optim.SGD, lr=.1, metrics=[*metrics], **kw)

def validated(ctx, *args, cbs=None, **kw):
    learn = make(*args, **kw)
    with ctx(learn): learn.validate(cbs=cbs)
    return values(learn)

class KeyedXY(Dataset):
    def __init__(self, n): self.x,self.y = xy(n)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i],self.y[i]

class Uneven:
    "A batch sampler of the user's: batches of 1, 2, 3, … samples, from the last to the first"
    def __init__(self, n): self.n = n
    def __iter__(self):
        left,size = [*range(self.n)],1
        while left:
            yield [left.pop() for _ in range(min(size, len(left)))]
            size += 1
    def __len__(self): return len([*iter(self)])

def nan_for_some(p, t): return p.mean()*(math.nan if t.max()<2 else 1)
def always_nan(p, t): return torch.tensor(math.nan)

def tokens_loss(p, t): return F.cross_entropy(p.flatten(0, -2), t.flatten())

class Largest(AvgMetric):
    "A subclass whose state does not add up"
    def __init__(self): super().__init__(None, 'largest')
    def accumulate(self, learn): self.total,self.count = max(self.total, learn.pred.max()),1

class SkipBatch(Callback):
    "Cancels the batch that has sample `x`"
    order,run_train = 5,False
    def __init__(self, x): self.x = x
    def before_batch(self):
        if (self.learn.x==self.x).all(-1).any(): raise CancelBatchException

def root(p, t): return (p.softmax(-1)-F.one_hot(t, 4)).pow(2).mean().sqrt() # no mean over samples

def own_batch(ctx):
    "A model that depends on who shares a batch, a loss that is a sum, metrics that are no means"
    torch.manual_seed(0)
    x,y = xy(13)
    dl,train = TfmdDL(TensorDataset(x.double(), y), 5),TfmdDL(TensorDataset(x[:5].double(), y[:5]), 5)
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 4)).double()
    learn = Learner(DataLoaders(train, dl), model, nn.CrossEntropyLoss(reduction='sum'), metrics=[root, accuracy, AccumMetric(root)])
    with ctx(learn): learn.validate()
    return values(learn)

def of_pairs(p, t): return F.cross_entropy(p@p.T, torch.arange(len(p))) # a loss of the batch

def padded_texts(ctx):
    "Padded to the longest of the batch; the model adds up what is there"
    def collate(items):
        xs,ys = zip(*items)
        return nn.utils.rnn.pad_sequence(xs, batch_first=True, padding_value=1.),torch.stack(ys)
    texts = [(torch.arange(i%5+1.)/9, torch.tensor(float(i))) for i in range(11)]
    class Sums(nn.Module):
        def forward(self, x): return x.cumsum(1)[:,-1]
    dl = TfmdDL(texts, 2, collate_fn=collate)
    learn = Learner(DataLoaders(dl, dl), Sums(), F.mse_loss, metrics=[F.l1_loss])
    with ctx(learn): learn.validate()
    return values(learn)

def one_graph(ctx):
    "The data set is one graph: one rank has it"
    dl = DataLoader([xy(9)], None)
    return validated(ctx, dl, metrics=[root, accuracy, AccumMetric(root), BatchMeans])

cases = dict(
    loss_of_pairs=lambda ctx: validated(ctx, TfmdDL(KeyedXY(13), 4), loss=of_pairs, metrics=[root]),
    padded_texts=padded_texts, one_graph=one_graph,
    nan=lambda ctx: validated(ctx, TfmdDL(KeyedXY(13), 1), metrics=[nan_for_some, always_nan, accuracy]),
    no_sample=lambda ctx: validated(ctx, TfmdDL(KeyedXY(0), 4), metrics=[accuracy, BatchMeans, tm.MulticlassAccuracy(4)]),
    fewer_samples_than_ranks=lambda ctx: validated(ctx, TfmdDL(KeyedXY(1), 4), metrics=[accuracy, BatchMeans, Histogram,
        tm.MulticlassAccuracy(4), tm.MulticlassAUROC(4), skm_metric(f1_score, dim_argmax=-1, average='macro')]),
    fewer_samples_than_a_batch=lambda ctx: validated(ctx, TfmdDL(KeyedXY(5), 4)),
    tokens=lambda ctx: validated(ctx, TfmdDL(TensorDataset(*xy(7, 5)), 2), loss=tokens_loss),
    batch_sampler=lambda ctx: validated(ctx, DataLoader(KeyedXY(13), batch_sampler=Uneven(13))),
    no_automatic_batches=lambda ctx: validated(ctx, DataLoader([xy(n) for n in (3, 1, 4, 2, 5)], None)),
    stream=lambda ctx: validated(ctx, DataLoader(Stream(KeyedXY(13)), 4)),
    stream_with_workers=lambda ctx: validated(ctx, DataLoader(Stream(KeyedXY(13)), 2, num_workers=2), metrics=[accuracy]),
    drop_last=lambda ctx: validated(ctx, TfmdDL(KeyedXY(13), 4, drop_last=True)),
    drop_last_and_nothing_left=lambda ctx: validated(ctx, TfmdDL(KeyedXY(3), 4, drop_last=True)),
    drop_last_in_batch_sampler=lambda ctx: validated(ctx, DataLoader(KeyedXY(13), batch_sampler=BatchSampler(range(12, -1, -1), 3, True))),
    subclasses=lambda ctx: validated(ctx, TfmdDL(KeyedXY(13), 4), metrics=[Largest]),
    skipped_batch=lambda ctx: validated(ctx, TfmdDL(KeyedXY(13), 1), cbs=SkipBatch(xy(13)[0][5])),
)
# What draws from a random stream is compared with a context of one process, where the stream is the same; so is a loss that is a sum,
# which a context gives for as many samples as a step has
random_cases = dict(
    own_batch=own_batch,
    shuffled=lambda ctx: validated(ctx, TfmdDL(KeyedXY(13), 4, shuffle=True)),
    weighted=lambda ctx: validated(ctx, DataLoader(KeyedXY(13), 4, sampler=weighted())),
    subset=lambda ctx: validated(ctx, DataLoader(KeyedXY(13), 4, sampler=SubsetRandomSampler([1, 2, 5, 7, 11]))),
    weighted_drop_last=lambda ctx: validated(ctx, DataLoader(KeyedXY(13), 4, sampler=weighted(), drop_last=True)))

def weighted(): return WeightedRandomSampler(torch.arange(13.), 10)

def in_ctx(learn): return learn.distrib_ctx(seed=1)

def outcome(name):
    try: return {**cases,**random_cases}[name](in_ctx)
    except Exception: return traceback.format_exc() # the next cases go on

def rank_answers(W):
    "All that is asked of `W` ranks"
    with process_group():
        if W==3: return dict({o: outcome(o) for o in (*cases,*random_cases)}, sweep=sweep())
        if W!=2: return dict(sweep=sweep()) # one process, or four
        return dict(sweep=sweep(), parts=parts(), splits=[split(o) for o in ('plain','shuffled','own')],
                    within=[within(o) for o in (True,False)], others=others(in_ctx), sums=sums(2))

class NeedsInput(BatchMeans):
    "Reads inputs, and does not ask for them"
    def accumulate(self, learn): self.means.append(learn.x.mean().item())

class Stateful(nn.Module):
    "A recurrent net that goes on from the last batch; or one that keeps its output for others to look at"
    def __init__(self, carries=True):
        super().__init__()
        self.rnn,self.lin,self.carries,self.h = nn.RNN(3, 4),nn.Linear(4, 4),carries,None
    def forward(self, x):
        out,h = self.rnn(x[None], self.h if self.carries else None)
        self.h = h.detach()
        return self.lin(out[0])

class Reset(Callback):
    def before_batch(self): self.model.h = None

class Computes(Callback):
    "An object of torchmetrics that a callback computes"
    def __init__(self): self.auroc = tm.MulticlassAUROC(4)
    def before_validate(self): self.auroc.reset()
    def after_batch(self): self.auroc.update(self.pred.softmax(-1), self.y)
    def after_validate(self): self.value = self.auroc.compute().item()

def reads_others(ctx, metrics=(), model=None, n=20, cbs=None):
    "The values of a validation that needs the batches of other ranks, or what the error says"
    learn = make(TfmdDL(KeyedXY(n), 4), metrics=metrics, cbs=cbs)
    if model is not None: learn.model = model
    with ctx(learn):
        try: res = learn.validate()
        except ValueError as e: return str(e)
    return [*res,learn.computes.value] if hasattr(learn, 'computes') else res

def squares(p, t): return ((p-F.one_hot(t, 4))**2).sum() # nobody has said that it is a sum

def sums(W):
    "Losses of the table for batches of 16 samples on all ranks together, in training and in validation: of a fit, and before it"
    res = []
    for loss in (nn.CrossEntropyLoss(reduction='sum'),squares):
        dl = TfmdDL(TensorDataset(*xy(32)), 16//W)
        learn = Learner(DataLoaders(dl, TfmdDL(TensorDataset(*xy(44)), 16//W)), nn.Linear(3, 4), loss, torch.optim.SGD, lr=0.)
        nn.init.eye_(learn.model.weight), nn.init.zeros_(learn.model.bias)
        with learn.no_logging(), learn.distrib_ctx(seed=1):
            before = learn.validate()
            learn.fit(1)
            res += [*before,*learn.recorder.values[-1],*learn.validate(0)]
    return res

def test_a_loss_that_is_a_sum_has_one_scale():
    "For the samples of a step, in training and validation, at any number of ranks: on two, validation was half of training"
    for got in (sums(1),*[o['sums'] for o in on_ranks(2)]):
        for i,loss in enumerate((nn.CrossEntropyLoss(reduction='sum'),squares)):
            valid,train = [loss(nn.functional.pad(x, (0, 1)), y).item()*16/len(x) for x,y in (xy(44),xy(32))]
            assert got[4*i:4*i+4]==pytest.approx([valid,train,valid,train], rel=1e-5)

def test_batches_of_one_sample_do_not_hide_a_sum():
    "In one process: training has shown what the loss is"
    learn = Learner(DataLoaders(TfmdDL(TensorDataset(*xy(32)), 16), TfmdDL(TensorDataset(*xy(44)), 1)), nn.Linear(3, 4), squares, lr=0.)
    with learn.no_logging(), learn.distrib_ctx(): learn.fit(1)
    x,y = xy(44)
    assert learn.recorder.values[-1][1]==pytest.approx(squares(learn.model(x), y).item()*16/44, rel=1e-5)

def others(ctx):
    torch.manual_seed(0)
    kept,carried = Stateful(False),Stateful()
    return dict(unasked=reads_others(ctx, [NeedsInput()]), keeps=reads_others(ctx, model=kept), carries=reads_others(ctx, model=carried),
                reset=reads_others(ctx, model=carried, cbs=Reset()), lists=reads_others(ctx, cbs=Computes()),
                empty=reads_others(ctx, n=4, cbs=Computes()))

def test_what_needs_the_batches_of_other_ranks():
    "It is the number of one process, or an error that says what is missing; gloo would end a rank without a list by SIGABRT"
    want = others(lambda learn: contextlib.nullcontext())
    for got in (o['others'] for o in on_ranks(2)):
        for k in ('keeps','reset','lists'): assert_close(got[k], want[k])
        assert 'set with_input = True' in got['unasked'] and 'computes.auroc: a rank had no batch' in got['empty']
        assert got['carries'].startswith('[carries-state] in evaluation the model carries h from')

@functools.cache
def on_ranks(W): return [rank_answers(1)] if W==1 else run_ranks(rank_answers, W, W, timeout_s=240)

def parts():
    "What each rank's share of a loader says of itself, with a batch size that `split_batches` divides"
    learn = make(TfmdDL(KeyedXY(13), 4), n_train=16)
    with learn.distrib_ctx(seed=1, split_batches=True):
        return len(learn.dls.valid),[len(b[0]) for b in learn.dls.valid],learn.validate(0)

def test_a_rank_evaluates_batches_of_the_loaders_own_size():
    want = make(TfmdDL(KeyedXY(13), 4), n_train=16).validate(0)
    (a,b) = [o['parts'] for o in on_ranks(2)]
    assert (a[:2],b[:2])==((2,[4,4]), (2,[4,1]))
    for o in (a,b): assert_close([torch.as_tensor(v).tolist() for v in o[2]], [torch.as_tensor(v).tolist() for v in want])

@pytest.mark.parametrize('name', [*cases,*random_cases])
def test_case(name):
    func = {**cases,**random_cases}[name]
    expect = func(in_ctx if name in random_cases else lambda learn: contextlib.nullcontext())
    assert_close(func(in_ctx), expect)
    for got in on_ranks(3): assert_close(got[name], expect)

class OwnSampler:
    "A sampler of the user's that splits: the first half is for rank 0"
    def __init__(self, n, rank, num_replicas): self.n,self.rank,self.num_replicas = n,rank,num_replicas
    def __iter__(self): return iter(range(self.rank*self.n//self.num_replicas, (self.rank+1)*self.n//self.num_replicas))
    def __len__(self): return len([*iter(self)])

split_metrics = [accuracy, skm_metric(f1_score, dim_argmax=-1, average='macro'), tm.MulticlassAccuracy(4, average='micro')]

def split(kind):
    ds = KeyedXY(13)
    sampler = OwnSampler(13, group_rank(), 2) if kind=='own' else DistributedSampler(ds, 2, group_rank(), shuffle=kind=='shuffled')
    learn = make(DataLoader(ds, 4, sampler=sampler), metrics=split_metrics)
    with learn.distrib_ctx(seed=1):
        learn.validate()
        return values(learn),[o.tolist() for o in learn.get_preds()]

def test_split_by_the_user():
    learn = make(DataLoader(KeyedXY(13), 4), metrics=split_metrics)
    learn.validate()
    expect = values(learn),[o.tolist() for o in learn.get_preds()]
    for ranks in on_ranks(2):
        for got in ranks['splits']: assert_close(got, expect)

class Evaluates(Callback):
    "Validates and predicts in the midst of training and at its end"
    order = 70
    def __init__(self): self.seen = []
    def after_batch(self):
        if self.training and self.iter%2: self.look()
    def after_train(self): self.look()
    def look(self): self.seen.append((self.learn.validate(),self.learn.get_preds(0)[0].sum().item()))

def within(looks):
    learn,cb = make(TfmdDL(KeyedXY(13), 4), n_train=16*2, metrics=[accuracy, BatchMeans]),Evaluates() if looks else None
    with learn.distrib_ctx(seed=1), learn.no_logging(): learn.fit(2, cbs=cb)
    return learn.recorder.values,learn.recorder.losses,[p.tolist() for p in learn.model.parameters()],cb and cb.seen

@pytest.mark.parametrize('W', [1, 2])
def test_evaluation_within_a_fit_leaves_no_trace(W):
    ranks = [[within(o) for o in (True,False)]] if W==1 else [o['within'] for o in on_ranks(2)]
    first = ranks[0][0][3]
    for a,b in ranks: assert a[:3]==b[:3] and a[3]==first
    assert len(ranks[0][1][0][0])==4 and first[-1][0]==ranks[0][1][0][-1][1:]

def fails_here(p, t):
    if group_rank()==1: raise KeyError('a metric')
    return accuracy(p, t)

class FailsAtTheEnd(BatchMeans):
    @property
    def value(self):
        if group_rank()==1: raise KeyError('a metric')
        return super().value

def rank_fails(metric):
    learn = make(TfmdDL(KeyedXY(13), 2), metrics=[metric])
    with learn.distrib_ctx(): learn.fit(1)

@pytest.mark.parametrize('metric', [fails_here, FailsAtTheEnd])
def test_a_metric_that_fails_on_one_rank_fails_on_all(metric):
    with pytest.raises(RanksError) as e: run_ranks(rank_fails, 2, metric)
    errors = e.value.errors
    assert errors[1].kind=='KeyError' and errors[0].kind=='RankError'
    assert 'rank 1' in errors[0].message and 'a metric' in errors[0].message
