"Scenes of the table with fastai's Learner: each on 2 ranks, and before a release on 3, is what it is on one process"
import traceback, warnings
from functools import partial
import pytest
pytest.importorskip('fastai')
import torch
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.utils._pytree import tree_leaves
from learnerdist.core.env import group_rank, group_size, process_group
from learnerdist.fastai import *
from learnerdist.testing import run_ranks
from harness import close
from scenes import make, scenes

warnings.filterwarnings('ignore')

# Those without callbacks of ours
exact = ('linear','conv','lstm','adam','bn','bn_adam','bn_frozen','bn_cumulative','no_sync_bn','split','find_unused',
         'static','view','one_valid','valid_bs','InstanceNorm','contrastive','a scripted loss','inputs changed in place')
# Samples that fill no batch, or parts that are not equal, or items, weigh a loss that fastai's Recorder wants in float32
rounded = ('ignore','45 samples','5 samples','47, drop_last','label','weights','focal','attribute','graph','bce','mse','tokens',
           'counted','conv_37_drop','split_11','targets changed in place')

class OneFloat(nn.Module):
    "A loss in float32, which fastai's Recorder asks for; its gradients are in float64 all the same"
    def __init__(self, func):
        super().__init__()
        self.func = func
        if hasattr(func, 'n_items'): self.n_items = func.n_items
    def forward(self, *args): return self.func(*args).float()

def fastais(c, W, rank):
    "The learner of the scene, with fastai's classes"
    ours = make(c, W, rank)
    train,valid = ours.dls.train,ours.dls.valid
    kw = dict(num_workers=0, device=torch.device('cpu'), **{k: v for k,v in c['dl'].items() if k!='collate_fn'})
    if 'collate_fn' in c['dl']: kw['create_batch'] = c['dl']['collate_fn']
    dls = DataLoaders(TfmdDL(train.dataset, bs=train.batch_size, shuffle=c['shuffle'], **kw),
                      TfmdDL(valid.dataset, bs=c['val_bs'], **{**kw, 'drop_last': False}))
    opt = partial(OptimWrapper, opt=lambda ps, lr: c['opt'](ps, lr))
    splitter = c['splitter'] or (lambda m: [[*m.parameters()]])
    return Learner(dls, ours.model, OneFloat(ours.loss_func), opt, lr=c['lr'], splitter=splitter)

def run(name, W=1, rank=0):
    c = scenes[name]
    learn,ctx = fastais(c, W, rank),dict(c['ctx'])
    if W==1: ctx.pop('split_batches', None)
    torch.manual_seed(7)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**ctx):
        learn.fit(2)
        res = dict(state=dict(learn.model.state_dict()), opt=tree_leaves(learn.opt.opt.state_dict()['state']),
                   losses=learn.recorder.losses, values=[[*o] for o in learn.recorder.values],
                   validate=[*learn.validate()])
        if c['preds']: res['preds'] = tree_leaves(learn.get_preds())
    return {k: tree_leaves(v) for k,v in res.items()}

def outcome(*args):
    try: return run(*args)
    except Exception as e: return dict(error=''.join(traceback.format_exception(e)))

def rank_runs():
    with process_group(): return {k: outcome(k, group_size(), group_rank()) for k in exact+rounded}

@pytest.fixture(scope='module', params=[2,pytest.param(3, marks=pytest.mark.long)])
def ranks(request): return run_ranks(rank_runs, request.param, timeout_s=300)

@pytest.mark.parametrize('name', exact+rounded)
def test_scene(ranks, name):
    want = outcome(name)
    for r in ranks:
        assert 'error' not in want and 'error' not in r[name], (want.get('error'),r[name].get('error'))
        for k in want:
            recorded = k in ('losses','values','validate')
            close(r[name][k], want[k], 1e-6 if recorded else 1e-9 if name in exact else 1e-7)
        assert all(map(torch.equal, r[name]['state'], ranks[0][name]['state']))
