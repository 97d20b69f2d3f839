"Every number of a validation on several ranks is the one that a single process computes on the whole data set"
import contextlib,functools,math
from functools import partial
import numpy as np, pytest, sklearn.metrics as skm, torch, torchmetrics
from sklearn.metrics import f1_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset, WeightedRandomSampler
from torchmetrics import classification as tm
from harness import caught, close, on_2_and_3
from helpers import Stream
from learnerdist.all import *
from learnerdist.data.loaders import find_bs
from learnerdist.testing import run_ranks

def plain(o):
    if isinstance(o, (list,tuple)): return [plain(v) for v in o]
    return o if o is None else torch.as_tensor(o).double().tolist()
def values(learn): return plain(learn.final_record)

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

def of_all_items(p, t): # as DETR counts: in evaluation one rank has the whole batch, and another one perhaps none
    distrib_barrier()
    n = len(gather_objects(broadcast_object(p))) # 1
    return n*F.cross_entropy(p, t, reduction='sum')/all_sum(torch.tensor(float(len(t))))

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

# --- kinds of metrics ---

class Hits(Metric):
    "A metric of the user's, of which nothing is known"
    def reset(self): self.seen = []
    def accumulate(self, learn): self.seen.append((learn.pred.argmax(-1)==learn.yb[0]).tolist())
    @property
    def value(self): return [len(o) for o in self.seen],sum(map(sum, self.seen))

def as_tensor(p, t): return (p.argmax(-1)==t).double().mean()
def as_float(p, t): return float(as_tensor(p, t))
def as_numpy(p, t): return np.float64(as_float(p, t))
def as_numpy_array(p, t): return np.array(as_float(p, t))
def as_bool(p, t): return bool((p.argmax(-1)==t).all())
def as_int(p, t): return len(p)
def with_grad(p, t): return nn.Parameter(torch.ones((), dtype=torch.float64))*as_tensor(p, t)
class Called:
    def __call__(self, p, t): return as_tensor(p, t)

def f1_of(p, t): return skm.f1_score(t.numpy(), p.argmax(1).numpy(), average='macro')

def all_metrics():
    def auc(p, t): return skm.roc_auc_score(t, p.softmax(1), multi_class='ovr')
    return [as_tensor, as_float, as_numpy, as_numpy_array, as_bool, as_int, with_grad, partial(top_k_accuracy, k=2), accuracy, error_rate,
            Called(), AvgMetric(as_tensor, 'named'), AvgMetric(lambda p,t: as_tensor(p, t)), Hits, Hits(),
            AccumMetric(f1_of, name='f1'), skm_metric(skm.f1_score, dim_argmax=1, average='macro'),
            skm_metric(skm.confusion_matrix, dim_argmax=-1, name='cm'), AccumMetric(auc),
            AccumMetric(lambda p,t: len(p), name='n'), AccumMetric(lambda p,t: (p.sum(), t.sum()), name='pair'),
            tm.MulticlassAccuracy(4, average='micro'), tm.MulticlassF1Score(4, average='macro'), tm.MulticlassAUROC(4),
            tm.MulticlassConfusionMatrix(4), tm.MulticlassCohenKappa(4),
            torchmetrics.MetricCollection({'acc': tm.MulticlassAccuracy(4, average='micro'), 'prec': tm.MulticlassPrecision(4)})]

class PerSample(torchmetrics.Metric):
    "Adds an entry for each sample of a batch, or a number for the batch; the order counts"
    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers
        self.add_state('rows', [], dist_reduce_fx='cat')
    def update(self, pred, targ): self.rows += [pred.sum()] if self.numbers else [o[:1] for o in pred]
    def compute(self):
        rows = torch.stack([o.reshape(()) for o in self.rows])
        return (rows*torch.arange(1, len(rows)+1)).sum()

class CountsItself(torchmetrics.Metric):
    "Its number of samples is no state of torchmetrics"
    def __init__(self):
        super().__init__()
        self.add_state('right', torch.tensor(0.), dist_reduce_fx='sum')
        self.n = 0
    def reset(self):
        super().reset()
        self.n = 0
    def update(self, pred, targ):
        self.right += (pred.argmax(1)==targ).sum()
        self.n += len(targ)
    def compute(self): return self.right/self.n

class Spread(torchmetrics.ClasswiseWrapper):
    "A wrapper, which shows the state of the metric inside as its own"
    def compute(self): return max(super().compute().values())

# --- kinds of loaders, losses and metrics ---

cases = dict(
    kinds=lambda ctx: validated(ctx, TfmdDL(KeyedXY(23), 4), metrics=all_metrics()),
    several_entries=lambda ctx: validated(ctx, TfmdDL(KeyedXY(23), 4), metrics=[PerSample(False), PerSample(True)]),
    own_reset=lambda ctx: validated(ctx, TfmdDL(KeyedXY(23), 4), metrics=[CountsItself(), Spread(tm.MulticlassRecall(4, average=None))]),
    loss_of_pairs=lambda ctx: validated(ctx, TfmdDL(KeyedXY(13), 4), loss=of_pairs, metrics=[root]),
    collectives=lambda ctx: validated(ctx, TfmdDL(KeyedXY(13), 5), loss=of_all_items, metrics=[root]),
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
    weighted_drop_last=lambda ctx: validated(ctx, DataLoader(KeyedXY(13), 4, sampler=WeightedRandomSampler(torch.arange(13.), 10),
                                                             drop_last=True)))

def in_ctx(learn): return learn.distrib_ctx(seed=1)

def rank_answers(W):
    "All that is asked of `W` ranks"
    with process_group():
        res = {k: caught(f, in_ctx) for k,f in {**cases,**random_cases}.items()} # the next ones go on
        if W==3: return res
        return res|dict(parts=parts(), splits=[split(o) for o in ('plain','shuffled','own')],
                        within=[within(o) for o in (True,False)], others=others(in_ctx))

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

@pytest.mark.parametrize('bs,fits', [(1, True), (11, False)])
def test_a_sum_of_which_nobody_has_said_so(bs, fits):
    "In training we see what it is, which batches of one sample do not show; before the first fit validation looks at its own"
    x,y = xy(44)
    learn = Learner(DataLoaders(TfmdDL(TensorDataset(*xy(32)), 16), TfmdDL(TensorDataset(x, y), bs)), nn.Linear(3, 4), squares, lr=0.)
    with learn.no_logging(), learn.distrib_ctx():
        if fits: learn.fit(1)
        loss, = learn.validate()
    assert loss==pytest.approx(squares(learn.model(x), y).item()*16/44, rel=1e-5) # 16 samples: a step

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
        for k in ('keeps','reset','lists'): close(got[k], want[k], 1e-6)
        assert 'set with_input = True' in got['unasked'] and 'computes.auroc: a rank had no batch' in got['empty']
        assert got['carries'].startswith('[carries-state] in evaluation the model carries h from')

@functools.cache
def on_ranks(W): return run_ranks(rank_answers, W, W, timeout_s=240)

def parts():
    "What each rank's share of a loader says of itself, with a batch size that `split_batches` divides"
    learn = make(TfmdDL(KeyedXY(13), 4), n_train=16)
    with learn.distrib_ctx(seed=1, split_batches=True):
        return len(learn.dls.valid),[len(b[0]) for b in learn.dls.valid],learn.validate(0)

def test_a_rank_evaluates_batches_of_the_loaders_own_size():
    want = make(TfmdDL(KeyedXY(13), 4), n_train=16).validate(0)
    (a,b) = [o['parts'] for o in on_ranks(2)]
    assert (a[:2],b[:2])==((2,[4,4]), (2,[4,1]))
    for o in (a,b): close(plain(o[2]), plain(want), 1e-6)

def test_kinds_of_metrics_by_hand():
    "By scikit-learn, and their names"
    learn = make(TfmdDL(KeyedXY(23), 4), metrics=all_metrics())
    with learn.no_logging(): learn.fit(1)
    x,y = xy(23)
    learn.validate()
    with torch.no_grad(): p = learn.model(x)
    sure,guess = p.softmax(1),p.argmax(1)
    names = learn.recorder.metric_names[3:-1]
    got = dict(zip(names, values(learn)[1:]))
    auc = skm.roc_auc_score(y, sure, multi_class='ovr')
    want = dict(accuracy=skm.accuracy_score(y, guess), top_k_accuracy=skm.top_k_accuracy_score(y, p, k=2), auc=auc, multiclassauroc=auc,
                cm=skm.confusion_matrix(y, guess).tolist(), multiclasscohenkappa=skm.cohen_kappa_score(y, guess), n=23,
                prec=skm.precision_score(y, guess, average='macro', zero_division=0))
    want |= dict.fromkeys(('f1','f1_score','multiclassf1score'), skm.f1_score(y, guess, average='macro'))
    close({k: got[k] for k in want}, want, 1e-6)
    for k in ('as_tensor','as_float','as_numpy','as_numpy_array','with_grad','called','named','acc'): close(got[k], want['accuracy'], 1e-6)
    assert names=='''as_tensor as_float as_numpy as_numpy_array as_bool as_int with_grad top_k_accuracy accuracy error_rate called named
        <lambda> hits hits f1 f1_score cm auc n pair multiclassaccuracy multiclassf1score multiclassauroc
        multiclassconfusionmatrix multiclasscohenkappa acc prec'''.split()

@on_2_and_3
@pytest.mark.parametrize('name', [*cases,*random_cases])
def test_case(name, W):
    func = {**cases,**random_cases}[name]
    expect = func(in_ctx if name in random_cases else lambda learn: contextlib.nullcontext())
    close(func(in_ctx), expect, 1e-6)
    for got in on_ranks(W): close(got[name], expect, 1e-6)

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
        for got in ranks['splits']: close(got, expect, 1e-6)

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

class Looks(Callback):
    "Validates on a part of the data within a validation loop"
    order = -5
    def __init__(self, dl): self.dl_ = dl
    def after_batch(self):
        if not self.training and self.iter==1 and self.learn.dl is not self.dl_: self.learn.validate(dl=self.dl_)

def test_a_validation_within_a_validation():
    x,y = xy(20)
    def value(cbs=()):
        torch.manual_seed(0)
        dls = DataLoaders.from_dsets(TensorDataset(x, y), TensorDataset(x, y), bs=8)
        learn = Learner(dls, nn.Linear(3, 4), F.cross_entropy, metrics=accuracy)
        learn.fit(1, cbs=cbs)
        return learn.recorder.values
    assert value(Looks(TfmdDL(TensorDataset(x[:3], y[:3]), 3)))==value()
