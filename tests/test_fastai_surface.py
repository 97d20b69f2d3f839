"fastai's own signatures, subclasses, flags and warnings within the context: what a script may do without a context, it may do here"
import functools, importlib, io, sys, types, warnings
from contextlib import redirect_stdout
import numpy as np, pandas as pd, pytest
pytest.importorskip('fastai')
import torch
from fastai.callback.core import CancelBatchException
from fastai.callback.data import WeightedDL
from fastai.callback.training import ShortEpochCallback
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.data.core import DataLoaders, TfmdDL
from fastai.tabular.all import Categorify, TabularDataLoaders, tabular_learner
from fastai.text.all import AWD_LSTM, TextDataLoaders, Tokenizer, awd_lstm_clas_config, awd_lstm_lm_config, language_model_learner, \
    text_classifier_learner
from fastai.torch_core import to_detach
from fastai.vision.gan import FixedGANSwitcher, GANLearner
from fastcore.foundation import L
from torch import nn
from test_fastai import (F64, Callback, F1Score, Learner, RocAuc, SGD, Adam, accuracy, alone_on_ranks, bn, close, ctx, floats, items, look,
                         make, on_ranks, per_rank, state)
from test_fastai_apps import Words, texts
from test_fastai_metrics import First
from learnerdist.core.env import group_rank
from learnerdist.fastai import *
from learnerdist.fastai import learner as ours
from learnerdist.learner.loggers import CSVLogger, LogWriter
from learnerdist.testing import run_ranks
from fastai_lines import shows

warnings.filterwarnings('ignore')

# --- learners ---------------------------------------------------------------------------------------------------------------

def loaders(ds, bs, W, valid=None):
    return DataLoaders.from_dsets(ds, valid or ds, bs=per_rank(bs, W), num_workers=0, device=torch.device('cpu'))

def unlabelled(W, rank):
    "Train with metrics that are no plain means, predict the test set"
    learn = make(W, rank, metrics=[F1Score(average='macro'), RocAuc(), First()])
    with ctx(learn, W):
        learn.fit(1)
        return learn.get_preds(dl=loaders([o[:1] for o in items(37)], 24, W)[1], with_input=True)[:2]

class Mine(Learner):
    "A subclass whose methods take something else"
    def get_preds(self, mine=1, **kw): return [mine, super().get_preds(**kw)]
    def save(self, name, mine=2): return super().save(f'{name}-{mine}')
    def load(self, name, mine=2): return super().load(f'{name}-{mine}')

def subclass(W, rank, path):
    learn = make(W, rank, metrics=[], path=path)
    learn.__class__ = Mine
    with ctx(learn, W):
        learn.fit(1)
        learn.save('a', 3)
        learn.load('a', 3)
        lrs = learn.lr_find(1e-6, 1., 4, False, False)
        by_position = Learner.get_preds(learn, 1, None, True, False, False, None, False, False) if not W else \
            super(type(learn), learn).get_preds(mine=4, with_input=True, reorder=False)[1]
        return learn.get_preds(5, ds_idx=1), by_position, floats(lrs)

def language_model(W, rank):
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    kw = dict(text_col='text', valid_col='is_valid', is_lm=True, seq_len=4, bs=per_rank(6, W), device='cpu', num_workers=0)
    with redirect_stdout(io.StringIO()): dls = TextDataLoaders.from_df(texts(), tok_tfm=Tokenizer.from_df('text', tok=Words(), n_workers=1), **kw)
    torch.manual_seed(0)
    config = dict(awd_lstm_lm_config, n_hid=12, emb_sz=8, n_layers=2)
    learn = language_model_learner(dls, AWD_LSTM, config=config, pretrained=False, metrics=[])
    with ctx(learn, W): return learn.get_preds(ds_idx=0, reorder=False), learn.predict("abc", 3, no_bar=True, no_unk=False), len(dls.train)

def empty_parameters(W, rank):
    "Tables without continuous columns have a `BatchNorm1d(0)`"
    torch.set_default_dtype(torch.float32)
    res,g = {},np.random.RandomState(0)
    df = pd.DataFrame(dict(a=g.randint(0, 4, 80).astype(str), b=g.randint(0, 3, 80).astype(str), y=g.rand(80).astype('float32')))
    kw = dict(bs=per_rank(12, W), device='cpu', num_workers=0)
    tab = TabularDataLoaders.from_df(df, procs=[Categorify], cat_names=['a','b'], y_names='y', valid_idx=[*range(60, 80)], **kw)
    col = CollabDataLoaders.from_df(df, user_name='a', item_name='b', rating_name='y', valid_pct=.25, seed=1, bs=per_rank(12, W), device='cpu')
    for name,func in dict(tab=lambda: tabular_learner(tab, layers=[6]), col=lambda: collab_learner(col, use_nn=True, layers=[6])).items():
        torch.manual_seed(1+rank if W else 1)
        learn = func()
        learn.opt_func,before = SGD,{*vars(learn.model)}
        with ctx(learn, W):
            learn.fit(2, .1)
            res[name] = floats(learn.validate()),any(not p.numel() for p in learn.model.parameters())
        assert before=={*vars(learn.model)}
    return res

class SkipsSecond(Callback):
    def before_batch(self):
        if self.training and self.iter==1: raise CancelBatchException

def cancelled(W, rank):
    "What a batch that all ranks cancel leaves in BatchNorm; rows of short epochs"
    learn = make(W, rank, model=bn, metrics=[])
    with ctx(learn, W): learn.fit(2, cbs=SkipsSecond())
    res = [{k:v for k,v in state(learn).items() if 'running' in k or 'tracked' in k}]
    for pct,both in ((0.,False),(.3,True),(.3,False),(.75,False)):
        learn = make(W, rank, metrics=[])
        with ctx(learn, W): learn.fit(2, cbs=ShortEpochCallback(pct, both))
        res.append([[floats(o) for o in learn.recorder.values], len(learn.recorder.losses), learn.recorder.iters])
    return res

def applications(W, rank, path): return dict(unlabelled=unlabelled(W, rank), subclass=subclass(W, rank, path/str(W)),
    lm=language_model(W, rank), empty=empty_parameters(W, rank), cancelled=cancelled(W, rank))

lines = dict(unlabelled=('3 `get_preds` of data without labels, with metrics that are no means', 1e-6),
    subclass=('3 a subclass of `Learner` with arguments of its own', 1e-6),
    lm=('7 `LMLearner.get_preds`, `LMLearner.predict` (float32)', 1e-5),
    empty=('7 `tabular_learner` without continuous columns, `collab_learner(use_nn=True)` (float32)', 1e-5),
    cancelled=('6 `CancelBatchException` on all ranks with BatchNorm; the rows of `ShortEpochCallback`', 1e-6))

def test_applications(tmp_path):
    for o in range(4): (tmp_path/str(o)).mkdir()
    want = applications(0, 0, tmp_path)
    assert want['lm'][2]==3 and want['empty']['tab'][1] and want['cancelled'][0]['1.num_batches_tracked']==6
    for W in (1,2,3):
        for got in [applications(1, 0, tmp_path)] if W==1 else run_ranks(on_ranks, W, applications, tmp_path):
            for k,(_,tol) in lines.items(): close(got[k], want[k], tol if W>1 else 0, k)
        for line,tol in lines.values(): shows(line, W, tol if W>1 else 0)
