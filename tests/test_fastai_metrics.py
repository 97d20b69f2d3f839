"Every metric of fastai's, a user's own, and every option of get_preds: what ranks report is what one process reports"
import warnings
import pytest
pytest.importorskip('fastai')
import torch
from fastai import metrics as fm
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import AvgMetric, Learner, Metric, ValueMetric
from fastai.optimizer import SGD
from torch import nn
from torch.nn import functional as F
from test_fastai import accuracy, close, floats, items, make, on_ranks, same, state
from test_fastai_callbacks import quiet
from learnerdist.fastai import *
from learnerdist.testing import run_ranks

warnings.filterwarnings('ignore')
F64 = torch.float64

class Flat(nn.Module):
    "Predictions of shape `shape` from 8 numbers"
    def __init__(self, *shape):
        super().__init__()
        self.lin,self.shape = nn.Linear(8, torch.Size(shape).numel()),shape
    def forward(self, x): return self.lin(x).unflatten(1, self.shape) if self.shape!=(1,) else F.softplus(self.lin(x))

class Attr(nn.Module):
    "A loss with parts of its own"
    def __init__(self, func):
        super().__init__()
        self.func,self.reduction = func,'mean'
    def forward(self, pred, y):
        self.part = pred.mean().detach()
        return self.func(pred, y).float()

class Harmonic(Metric):
    "A user's own: neither a mean nor rows"
    def reset(self): self.vals,self.loss = [],0
    def accumulate(self, learn):
        self.vals += (learn.pred.double().sigmoid().flatten(1).mean(1)+learn.xb[0].abs().mean(1)+.1*learn.y).tolist()
        self.loss += learn.loss.item()*len(learn.y)
    @property
    def value(self): return len(self.vals)/sum(1/v for v in self.vals)+self.loss/len(self.vals)
    @property
    def name(self): return 'harmonic'

class First(Metric):
    "Depends on the order"
    def reset(self): self.val,self.n = 0.,0
    def accumulate(self, learn):
        for o in learn.pred.double().flatten(1)[:,0].tolist(): self.val = .9*self.val+.1*o
        self.n += 1
    @property
    def value(self): return self.val*self.n

class Positive(AvgMetric):
    "An AvgMetric that adds up something else besides"
    def __init__(self): super().__init__(accuracy)
    def reset(self):
        super().reset()
        self.most = 0.
    def accumulate(self, learn):
        super().accumulate(learn)
        self.most = max(self.most, learn.pred.max().item())
    @property
    def value(self): return self.total/self.count+self.most
    @property
    def name(self): return 'positive'

def targets(kind, n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g, dtype=F64)
    noise = torch.randn(n, 8, generator=g, dtype=F64)
    if kind=='single': y = (x[:,:3]+noise[:,:3]).argmax(1)
    elif kind=='binary': y = (x[:,0]+noise[:,0]>0).long()
    elif kind=='multi': y = (x[:,:4]+noise[:,:4]>0).double()
    elif kind=='real': y = (x[:,:1]+.1*noise[:,:1]).abs()
    elif kind=='mask': y = (x[:,:6]+noise[:,:6]>0).long().view(n, 2, 3)
    else: y = torch.randint(0, 3, (n, 5), generator=g)
    return list(zip(x, y))

def seq_loss(p, y): return F.cross_entropy(p.transpose(1, 2), y)

def kinds():
    macro = dict(average='macro')
    single = [fm.accuracy, fm.error_rate, AvgMetric(top2), fm.BalancedAccuracy(), fm.CohenKappa(), fm.F1Score(**macro), fm.HammingLoss(),
              fm.FBeta(2, average='micro'), fm.Jaccard(**macro), fm.Precision(**macro), fm.Recall(**macro), fm.RocAuc(), fm.Perplexity(),
              fm.MatthewsCorrCoef(), *fm.LossMetrics('part'), Harmonic(), First(), Positive()]
    binary = [fm.APScoreBinary(), fm.BrierScore(), fm.RocAucBinary(), fm.F1Score(), fm.Precision(), fm.Recall(), fm.Jaccard(), fm.FBeta(1)]
    multi = [fm.accuracy_multi, fm.APScoreMulti(), fm.F1ScoreMulti(), fm.FBetaMulti(2), fm.HammingLossMulti(), fm.JaccardMulti(),
             fm.PrecisionMulti(), fm.RecallMulti(), fm.RocAucMulti(), First()]
    real = [fm.mse, fm.rmse, fm.mae, fm.msle, fm.exp_rmspe, fm.ExplainedVariance(), fm.R2Score(), fm.PearsonCorrCoef(),
            fm.SpearmanCorrCoef()]
    mask = [fm.foreground_acc, fm.Dice(), fm.DiceMulti(), fm.JaccardCoeff(), fm.JaccardCoeffMulti(), First()]
    seq = [fm.CorpusBLEUMetric(vocab_sz=3), fm.accuracy, First()]
    ce,bce = F.cross_entropy,F.binary_cross_entropy_with_logits
    return dict(single=(single, Flat(3), ce), binary=(binary, Flat(2), ce), real=(real, Flat(1), F.mse_loss), multi=(multi, Flat(4), bce),
                mask=(mask, Flat(2, 2, 3), ce), seq=(seq, Flat(5, 3), seq_loss))

def top2(p, y): return fm.top_k_accuracy(p, y, k=2)

def measured(W, rank, n_valid, train_metrics):
    torch.set_default_dtype(F64)
    res = {}
    for name in kinds():
        torch.manual_seed(3)
        mets,model,loss = kinds()[name]
        dsets = targets(name, 45, 1),targets(name, n_valid, 2)
        dls = DataLoaders.from_dsets(*dsets, bs=16//W, num_workers=0, drop_last=False, shuffle=(True,False))
        learn = Learner(dls, model.double(), Attr(loss), opt_func=SGD, lr=.1, metrics=mets)
        if train_metrics: learn.recorder.train_metrics = True
        with quiet(learn), learn.distrib_ctx(seed=3):
            res[name] = floats(learn.validate())
            if train_metrics:
                learn.fit(1, lr=0.)
                res[name+' in training'] = dict(zip(learn.recorder.metric_names[1:], floats(learn.recorder.values[-1][:])))
                res[name+' losses'] = floats(learn.recorder.losses)
    return res

@pytest.mark.parametrize('n_valid,train_metrics', [(37,True), (32,False)])
def test_every_metric(n_valid, train_metrics):
    "Also with a row that is read twice in training"
    want = same(measured, n_valid, train_metrics, W=(2,4), tol=1e-6)
    assert all(torch.isfinite(torch.tensor(v)).all() for v in want.values() if isinstance(v, list))

def few(W, rank, n):
    learn = make(W, rank, n_valid=n, metrics=[accuracy, First(), Positive()])
    with quiet(learn), learn.distrib_ctx(seed=3): return floats(learn.validate()),learn.get_preds(with_loss=True)

@pytest.mark.parametrize('n', [1, 2, 3])
def test_ranks_without_a_batch(n): same(few, n, W=(4,), tol=1e-6)

def valued(W, rank):
    learn = make(W, rank, metrics=[ValueMetric(lambda: 1.5, 'mine')])
    with quiet(learn), learn.distrib_ctx(seed=3): return floats(learn.validate())

def test_value_metric(): same(valued, tol=1e-6)

# --- predictions ------------------------------------------------------------------------------------------------------------

def options(W, rank, path):
    learn = make(W, rank, n_valid=37)
    res = {}
    with quiet(learn), learn.distrib_ctx(seed=3):
        kws = dict(plain={}, all=dict(with_input=True, with_loss=True, with_decoded=True), loader=dict(reorder=False),
                   raw=dict(act=lambda o: o), train=dict(ds_idx=0), no_preds=dict(with_preds=False, with_loss=True),
                   no_targs=dict(with_targs=False))
        for name,kw in kws.items(): res[name] = learn.get_preds(**kw)
        res['dl'] = learn.get_preds(dl=TfmdDL(items(11, 5), bs=3, num_workers=0))
        res['shuffled'] = learn.get_preds(dl=TfmdDL(items(11, 5), bs=3, shuffle=True, num_workers=0))[0].sum(0)
        res['dropping'] = learn.get_preds(dl=TfmdDL(items(11, 5), bs=3, drop_last=True, num_workers=0))
        with learn: res['inner'] = learn.get_preds(inner=True)
    return res

def test_get_preds(tmp_path):
    want = same(options, tmp_path, W=(2,3), tol=1e-6)
    close(want['plain'][1], [y for _,y in items(37, 2)])
    close(want['shuffled'], want['dl'][0].sum(0))
    assert len(want['train'][0])==96

def shuffled(W, rank):
    learn = make(W, rank)
    with quiet(learn), learn.distrib_ctx(seed=3):
        dl = TfmdDL(items(11, 5), bs=3, shuffle=True, num_workers=0)
        return learn.get_preds(dl=dl),learn.get_preds(dl=learn.dls.train)

def test_a_shuffled_loader_is_put_in_order():
    for r in run_ranks(on_ranks, 2, shuffled):
        close(r[0][1], [y for _,y in items(11, 5)])
        close(r[1][1], [y for _,y in items(96, 1)])

def on_rank_0_only(W, rank):
    "What needs no other rank may be asked for on one"
    learn = make(W, rank)
    with quiet(learn), learn.distrib_ctx(seed=3):
        learn.fit(1)
        if rank==0:
            b = learn.dls.valid.source.one_batch()
            learn.get_preds(dl=[b])
            learn.summary()
        learn.fit(1)
        return state(learn)

def test_on_rank_0_only():
    a,b = run_ranks(on_ranks, 2, on_rank_0_only)
    close(a, b, 0)
