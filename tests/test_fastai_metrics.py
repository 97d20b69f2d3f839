"Every metric of fastai's, a user's own, and every option of get_preds: what ranks report is what one process reports"
import pytest
from fastai.basics import *
from fastai import learner as fastai_learner, metrics as fm
from sklearn.metrics import f1_score
from test_fastai import accuracy, asking, close, ctx, floats, items, make, on_1_and_2, per_rank, same, state
from test_fastai_callbacks import quiet
from learnerdist.core.env import group_rank
from learnerdist.distributed.loops import total_losses
from learnerdist.fastai import *
from fastai_lines import shows

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
    with_input = True
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
              fm.MatthewsCorrCoef(), *fm.LossMetrics('part'), Harmonic(), First(), Positive(), f1, root, fraction]
    binary = [fm.APScoreBinary(), fm.BrierScore(), fm.RocAucBinary(), fm.F1Score(), fm.Precision(), fm.Recall(), fm.Jaccard(), fm.FBeta(1)]
    multi = [fm.accuracy_multi, fm.APScoreMulti(), fm.BrierScoreMulti(), fm.F1ScoreMulti(), fm.FBetaMulti(2), fm.HammingLossMulti(),
             fm.JaccardMulti(), fm.PrecisionMulti(), fm.RecallMulti(), fm.RocAucMulti(), First()]
    real = [fm.mse, fm.rmse, fm.mae, fm.msle, fm.exp_rmspe, fm.ExplainedVariance(), fm.R2Score(), fm.PearsonCorrCoef(),
            fm.SpearmanCorrCoef(), fm.AccumMetric(fm.optim_metric(over, 'thresh', (.1, .9)), flatten=False)]
    mask = [fm.foreground_acc, fm.Dice(), fm.DiceMulti(), fm.JaccardCoeff(), fm.JaccardCoeffMulti(), First()]
    seq = [fm.CorpusBLEUMetric(vocab_sz=3), fm.accuracy, First()]
    ce,bce = F.cross_entropy,F.binary_cross_entropy_with_logits
    return dict(single=(single, Flat(3), ce), binary=(binary, Flat(2), ce), real=(real, Flat(1), F.mse_loss), multi=(multi, Flat(4), bce),
                mask=(mask, Flat(2, 2, 3), ce), seq=(seq, Flat(5, 3), seq_loss))

def f1(pred, targ): return f1_score(targ.numpy(), pred.argmax(-1).numpy(), average='macro')
def root(pred, targ): return (pred.softmax(-1)-F.one_hot(targ, 3)).pow(2).mean().sqrt()
def fraction(pred, targ): return (pred.argmax(-1)==targ).float().mean().item() # float32 of float64 predictions
def over(pred, targ, thresh): return ((pred>thresh)==(targ>.5)).double().mean().item()

lines = {
    'single': '`accuracy`, `error_rate`, `top_k_accuracy`, `BalancedAccuracy`, `CohenKappa`, `F1Score`, `FBeta`, `HammingLoss`, `Jaccard`, '
              '`Precision`, `Recall`, `RocAuc`, `Perplexity`, `MatthewsCorrCoef`, `LossMetric`, `LossMetrics`; metrics of a user: an '
              '`AvgMetric` with more state, one that depends on the order, one that is neither mean nor rows; functions that '
              'are no means over samples, F1 by scikit-learn and a root: their means over batches (in validation)',
    'binary': '`APScoreBinary`, `BrierScore`, `RocAucBinary`; `F1Score`, `Precision`, `Recall`, `Jaccard`, `FBeta` of two classes',
    'multi': '`accuracy_multi`, `APScoreMulti`, `BrierScoreMulti`, `F1ScoreMulti`, `FBetaMulti`, `HammingLossMulti`, `JaccardMulti`, '
             '`PrecisionMulti`, `RecallMulti`, `RocAucMulti`',
    'real': '`mse`, `rmse`, `mae`, `msle`, `exp_rmspe`, `ExplainedVariance`, `R2Score`, `PearsonCorrCoef`, `SpearmanCorrCoef`, '
            '`optim_metric`',
    'mask': '`foreground_acc`, `Dice`, `DiceMulti`, `JaccardCoeff`, `JaccardCoeffMulti`',
    'seq': '`CorpusBLEUMetric`'}

def test_every_metric_of_fastais_is_here():
    named = {o for line in lines.values() for o in re.findall(r'`(\w+)`', line)} - {'AvgMetric'}
    besides = {'AccumMetric','skm_to_fastai','perplexity', # what the classes are made of; an instance of `Perplexity`
               'MatthewsCorrCoefMulti'} # see below
    assert named==set(fm.__all__)-besides

def top2(p, y): return fm.top_k_accuracy(p, y, k=2)

def own_size(learn, bs=12):
    "Evaluate batches of this size on any number of ranks"
    learn.dls.loaders[1] = learn.dls.valid.new(bs=bs)
    return learn

no_means = f1,root,fm.foreground_acc # in training they depend on how many ranks there are

def measured(W, rank, n_valid, train_metrics, names=tuple(lines), **kw):
    torch.set_default_dtype(F64)
    res = {}
    for name in names:
        torch.manual_seed(3)
        mets,model,loss = kinds()[name]
        dsets = targets(name, 45, 1),targets(name, n_valid, 2)
        dls = DataLoaders.from_dsets(*dsets, bs=per_rank(12, W), num_workers=0, drop_last=False, shuffle=(True,False))
        if train_metrics: mets = [o for o in mets if o not in no_means]
        learn = own_size(Learner(dls, model.double(), Attr(loss), opt_func=SGD, lr=.1, metrics=mets))
        if train_metrics: learn.recorder.train_metrics = True
        with ctx(learn, W, **kw):
            res[name] = [floats(learn.validate())]
            if train_metrics:
                learn.fit(1, lr=0.)
                res[name].append([[*learn.recorder.metric_names[1:]], floats(learn.recorder.values[-1][:]), floats(learn.recorder.losses)])
    return res

def every_metric(W, rank, path): return dict(measured(W, rank, 37, True), even=measured(W, rank, 24, False, ['single']))

@pytest.mark.slow
@on_1_and_2
def test_every_metric(Ws, slow):
    "Also with a row that is read twice in training"
    keyed = {k: f'5 {v}; in training too (`train_metrics`)' for k,v in lines.items()}
    keyed['even'] = '5 `Recorder`, its loss and metrics, when all batches are full'
    want = same(every_metric, found=slow, W=Ws, tol=1e-6, lines=keyed)
    assert all(torch.isfinite(torch.tensor(v[0])).all() for k,v in want.items() if k!='even')

def in_parts(W, rank, path): return measured(W, rank, 37, True, ['single'], global_bs=12, max_bs=3)

@pytest.mark.slow
def test_metrics_of_training_in_parts(slow):
    "Also one that depends on the order"
    (one,),two = slow(in_parts, 1),slow(in_parts, 2)
    assert [str(o) for o in two]==[str(one)]*2

def unsupported(W, rank, path):
    torch.set_default_dtype(F64)
    dsets = targets('multi', 45, 1),targets('multi', 37, 2)
    dls = DataLoaders.from_dsets(*dsets, bs=per_rank(12, W), num_workers=0)
    learn = Learner(dls, Flat(4), Attr(F.binary_cross_entropy_with_logits), metrics=fm.MatthewsCorrCoefMulti())
    try:
        with ctx(learn, W): learn.validate()
    except Exception as e: return 'multilabel-indicator is not supported' in str(e)

@on_1_and_2
def test_what_fails_on_one_process_fails_on_all_ranks(Ws, found):
    for W in (0,*Ws): assert all(found(unsupported, W))
    for W in Ws: shows('5 `MatthewsCorrCoefMulti`', W, 'an error, as without a context: scikit-learn refuses several labels')

def few(W, rank, path):
    res = {}
    for n in (1,2,3):
        learn = make(W, rank, bs=12, n_valid=n, metrics=[accuracy, First(), Positive(), ValueMetric(lambda: 1.5, 'mine')])
        with ctx(learn, W): res[n] = floats(learn.validate()),learn.get_preds(with_loss=True)
    return res

@on_1_and_2
def test_ranks_without_a_batch(Ws, found):
    same(few, found=found, W=Ws, tol=1e-6, lines=['5 `ValueMetric`; 1, 2 or 3 samples in all: ranks without a batch'])

def sums(W, rank, path):
    learn = make(W, rank, bs=24, n_valid=48, loss=CrossEntropyLossFlat(reduction='sum'), metrics=[])
    with ctx(learn, W): learn.fit(1, lr=0.)
    return floats(learn.recorder.values[-1])

@on_1_and_2
def test_a_loss_that_is_a_sum(Ws, found):
    "Its validation batches are half as large on two ranks, which its number does not show"
    same(sums, found=found, W=Ws, tol=1e-6)

def test_totals_of_a_class_of_fastais():
    "Whose `new_ones` takes a shape as one argument, and a second one as a dtype"
    totals = torch.tensor([[6.,3.,1.],[4.,2.,1.]], dtype=F64)
    assert total_losses(TensorBase(totals), 3).tolist()==totals.tolist()

# --- predictions ------------------------------------------------------------------------------------------------------------

def in_files(folder): return {o.name: torch.load(o, weights_only=False) for o in sorted(folder.iterdir(), key=lambda o: int(o.name))}

def saved(learn, folder):
    "The files of `save_preds` and `save_targs`"
    if group_rank()==0:
        for o in ('preds','targs','only'): (folder/o).mkdir(parents=True)
    distrib_barrier()
    res = learn.get_preds(save_preds=folder/'preds', save_targs=folder/'targs'),learn.get_preds(with_preds=False, save_preds=folder/'only')
    return res,[in_files(folder/o) for o in ('preds','targs','only')]

def options(W, rank, path):
    learn = own_size(make(W, rank, n_valid=37, bs=12))
    res = {}
    with ctx(learn, W):
        kws = {'`get_preds`': {}, '`with_input`, `with_loss`, `with_decoded`': dict(with_input=True, with_loss=True, with_decoded=True),
               '`reorder=False`': dict(reorder=False), '`act`': dict(act=lambda o: o), '`ds_idx=0`': dict(ds_idx=0),
               '`with_preds=False`': dict(with_preds=False, with_loss=True), '`with_targs=False`': dict(with_targs=False)}
        for name,kw in kws.items(): res[name] = learn.get_preds(**kw)
        res['`dl`, whatever its batch size'] = learn.get_preds(dl=TfmdDL(items(11, 5), bs=3, num_workers=0))
        res['`dl` with `drop_last`'] = learn.get_preds(dl=TfmdDL(items(11, 5), bs=3, drop_last=True, num_workers=0))
        if W!=0: # fastai's own takes another order each time
            res['`dl` with `shuffle`: in order'] = learn.get_preds(dl=TfmdDL(items(11, 5), bs=3, shuffle=True, num_workers=0))
        with learn: res['`inner=True`'] = learn.get_preds(inner=True)
        res['`save_preds`, `save_targs`: the files of one process'] = saved(learn, path/str(W))
        res['`validate`, of either data set and of another loader'] = [floats(learn.validate()),floats(learn.validate(ds_idx=0)),
            floats(learn.validate(dl=learn.dls.valid.new(bs=5)))]
    return res

@on_1_and_2
def test_get_preds(Ws, found):
    want, = found(options, 0)
    shuffled = '`dl` with `shuffle`: in order'
    want[shuffled] = want['`dl`, whatever its batch size']
    for W in Ws:
        for got in found(options, W):
            for k in want: close(got[k], want[k], 1e-6 if W>1 or k==shuffled else 0, k)
        for k in want:
            line = k if k.startswith(('`get_preds`','`validate`')) else f'`get_preds`: {k}'
            shows(f'3 {line}', W, 0 if W==1 and k!=shuffled else 1e-6)
    close(want['`get_preds`'][1], [y for _,y in items(37, 2)])
    assert len(want['`ds_idx=0`'][0])==96

def on_rank_0_only(W, rank, path):
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

def test_on_rank_0_only(found):
    a,b = found(on_rank_0_only, 2)
    close(a, b, 0)

def reordered(W, rank, path):
    "How many rows fastai copies into order: of validation and training data, and of a loader that reads backwards"
    learn,calls = make(W, rank),[]
    old = fastai_learner.nested_reorder
    fastai_learner.nested_reorder = lambda t, idxs: calls.append(len(idxs)) or old(t, idxs)
    try:
        with ctx(learn, W):
            for i in (1,0): learn.get_preds(i)
            learn.get_preds(dl=TfmdDL(items(11, 5), bs=3, num_workers=0, get_idxs=lambda: range(10, -1, -1)))
    finally: fastai_learner.nested_reorder = old
    return calls

def test_what_is_in_order_is_not_copied(found):
    "All ranks map one result, which a copy would multiply"
    assert found(reordered, 2)==[[11]]*2

slow,found = asking(every_metric, in_parts),asking(unsupported, few, sums, options, on_rank_0_only, reordered)
