"Numbers weighted by samples, on one rank and on several; the history of a fit"
import warnings
from functools import partial
import numpy as np, pytest, sklearn.metrics as skm, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from helpers import flat
from learnerdist.all import (AccumMetric, AvgMetric, Callback, DataLoaders, Learner, Metric, TfmdDL, accuracy,
                             error_rate, process_group, skm_metric, top_k_accuracy)
from learnerdist.learner.metrics import mk_metrics
from learnerdist.testing import run_ranks
tm = pytest.importorskip('torchmetrics')
from torchmetrics import classification as tmc

C = 4
def data(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, C, generator=g, dtype=torch.float64)
    return x,(x+torch.randn(n, C, generator=g)).argmax(1)

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
    auc = partial(skm.roc_auc_score, multi_class='ovr')
    return [as_tensor, as_float, as_numpy, as_numpy_array, as_bool, as_int, with_grad, partial(top_k_accuracy, k=2), accuracy, error_rate,
            Called(), AvgMetric(as_tensor, 'named'), AvgMetric(lambda p,t: as_tensor(p, t)), Hits, Hits(),
            AccumMetric(f1_of, name='f1'), skm_metric(skm.f1_score, dim_argmax=1, average='macro'),
            skm_metric(skm.confusion_matrix, dim_argmax=-1, name='cm'), skm_metric(auc, activation=lambda p: p.softmax(1), name='auc'),
            AccumMetric(lambda p,t: len(p), name='n'), AccumMetric(lambda p,t: (p.sum(), t.sum()), name='pair'),
            tmc.MulticlassAccuracy(C, average='micro'), tmc.MulticlassF1Score(C, average='macro'), tmc.MulticlassAUROC(C),
            tmc.MulticlassConfusionMatrix(C), tmc.MulticlassCohenKappa(C),
            tm.MetricCollection({'acc': tmc.MulticlassAccuracy(C, average='micro'), 'prec': tmc.MulticlassPrecision(C)})]

def make(n=23, bs=4, metrics=None, cbs=None, n_train=16):
    torch.manual_seed(3)
    train,valid = TensorDataset(*data(n_train, 1)),TensorDataset(*data(n, 2))
    learn = Learner(DataLoaders(TfmdDL(train, bs, shuffle=True), TfmdDL(valid, bs)), nn.Linear(C, C).double(), F.cross_entropy,
                    torch.optim.SGD, lr=.1, metrics=all_metrics() if metrics is None else metrics, cbs=cbs)
    learn.logger = lambda o: None
    return learn

def plain(o):
    if isinstance(o, (torch.Tensor,np.ndarray)): return o.tolist()
    if isinstance(o, (tuple,list)): return [plain(i) for i in o]
    return o

def by_hand(learn, n=23, bs=4):
    "Every number of `all_metrics`, without us"
    x,y = data(n, 2)
    with torch.no_grad(): p = learn.model(x)
    hit = (p.argmax(1)==y).double()
    acc,top2 = hit.mean().item(),(p.topk(2).indices==y[:,None]).any(1).double().mean().item()
    f1 = skm.f1_score(y, p.argmax(1), average='macro')
    hits,auc = [[len(o) for o in hit.split(bs)], int(hit.sum())],skm.roc_auc_score(y, p.softmax(1), multi_class='ovr')
    cm = skm.confusion_matrix(y, p.argmax(1)).tolist()
    ns = [len(o) for o in hit.split(bs)]
    all_of,size = sum(o.all()*len(o) for o in hit.split(bs)).item()/n,sum(o*o for o in ns)/n # means of batches
    return [acc, acc, acc, acc, all_of, size, acc, top2, acc, 1-acc, acc, acc, acc, hits, hits, f1, f1, cm, auc, n,
            [p.sum().item(), y.sum().item()], acc, f1, auc, cm, skm.cohen_kappa_score(y, p.argmax(1)), acc,
            skm.precision_score(y, p.argmax(1), average='macro', zero_division=0)]

def close(a, b, tol=1e-6):
    assert len(a)==len(b)
    for i,(u,v) in enumerate(zip(a, b)): np.testing.assert_allclose(flat(u), flat(v), rtol=tol, atol=tol, err_msg=f'metric {i}')

def test_values_alone():
    learn = make()
    learn.fit(1)
    loss,*vals = plain(learn.validate())
    close(vals, by_hand(learn))
    assert plain(learn.recorder.values[0][1:])==[loss,*vals]
    x,y = data(23, 2)
    assert loss==pytest.approx(F.cross_entropy(learn.model(x), y).item(), rel=1e-12)
    want = '''as_tensor as_float as_numpy as_numpy_array as_bool as_int with_grad top_k_accuracy accuracy error_rate called named
        <lambda> hits hits f1 f1_score cm auc n pair multiclassaccuracy multiclassf1score multiclassauroc
        multiclassconfusionmatrix multiclasscohenkappa acc prec'''
    assert learn.recorder.metric_names==['epoch','train_loss','valid_loss',*want.split(),'time']
    assert make(metrics=accuracy).metrics==[accuracy] and len(make(metrics=[]).validate())==1

# --- on several ranks -------------------------------------------------------------------------------------------------------

def rank_values():
    "Values inside a fit and of validate; what the context leaves changed of an object of torchmetrics"
    warnings.simplefilter('ignore')
    with process_group():
        m,learn = tmc.MulticlassAccuracy(C),make()
        learn.metrics.append(m)
        plain_kinds,own = (bool,str,int,type(None)),('_update','_computed','_cache')
        before = {k:v for k,v in vars(m).items() if not k.startswith(own) and isinstance(v, plain_kinds)}
        with learn.distrib_ctx(seed=1):
            learn.fit(1)
            found = plain(learn.validate())
        return plain(learn.recorder.values),found,learn.model.state_dict(),[k for k,v in before.items() if vars(m)[k]!=v]

def test_values_on_several_ranks():
    alone,ranks = make(),run_ranks(rank_values, 3)
    hits = [i+1 for i,m in enumerate(mk_metrics(all_metrics())) if isinstance(m, Hits)]
    for values,found,state,changed in ranks:
        alone.model.load_state_dict(state)
        alone.prepare(.1)
        want = plain(alone.validate())
        close(found[:-1], want, 1e-12)
        assert values[0][1:]==found and all(o[1]==ranks[0][1] for o in ranks) # the same on all ranks
        for i in hits: assert found[i]==want[i] # fed the batches of one process
        assert changed==[]

class PerSample(tm.Metric):
    "Adds an entry for each sample of a batch, or a number for the batch; the order counts"
    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers
        self.add_state('rows', [], dist_reduce_fx='cat')
    def update(self, pred, targ): self.rows += [pred.sum()] if self.numbers else [o[:1] for o in pred]
    def compute(self):
        rows = torch.stack([o.reshape(()) for o in self.rows])
        return (rows*torch.arange(1, len(rows)+1)).sum()

def several_entries(): return plain(make(metrics=[PerSample(False), PerSample(True)]).validate())
def rank_several_entries():
    with process_group():
        learn = make(metrics=[PerSample(False), PerSample(True)])
        with learn.distrib_ctx(seed=1): return plain(learn.validate())

def test_a_metric_with_several_entries_or_a_number_for_a_batch():
    want = several_entries()
    for found in run_ranks(rank_several_entries, 2): close(found, want, 1e-12)

class Looks(Callback):
    "Validates on a part of the data within a validation loop"
    order = -5
    def __init__(self, dl): self.dl_ = dl
    def after_batch(self):
        if not self.training and self.iter==1 and self.learn.dl is not self.dl_: self.learn.validate(dl=self.dl_)

def test_a_validation_within_a_validation():
    x,y = data(20)
    def value(cbs=()):
        torch.manual_seed(0)
        dls = DataLoaders.from_dsets(TensorDataset(x, y), TensorDataset(x, y), bs=8)
        learn = Learner(dls, nn.Linear(C, C).double(), F.cross_entropy, metrics=accuracy)
        learn.fit(1, cbs=cbs)
        return learn.recorder.values
    assert value(Looks(TfmdDL(TensorDataset(x[:3], y[:3]), 3)))==value()
