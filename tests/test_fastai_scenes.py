"Scenes of the table with fastai's Learner: some on 2 ranks, and before a release each on 3, are what they are on one process"
import pytest
from fastai.basics import *
from learnerdist.fastai import *
from learnerdist.testing import run_ranks
from harness import close
from helpers import OneFloat
from scenes import make, of_table, rank_runs, scenes
from scenes import run as scenes_run

warnings.filterwarnings('ignore')

# Those without callbacks of ours
exact = ('linear','conv','lstm','adam','bn','bn_adam','bn_frozen','bn_cumulative','no_sync_bn','split','find_unused',
         'static','view','one_valid','valid_bs','InstanceNorm','contrastive','a scripted loss','inputs changed in place',
         'no validation data')
# Samples that fill no batch, or parts that are not equal, or items, weigh a loss that fastai's Recorder wants in float32
rounded = ('ignore','45 samples','5 samples','47, drop_last','label','weights','focal','attribute','graph','bce','mse','tokens',
           'counted','conv_37_drop','split_11','targets changed in place')

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
    learn = Learner(dls, ours.model, OneFloat(ours.loss_func), opt, lr=c['lr'], splitter=splitter)
    return learn.remove_cb(learn.progress)

def run(c, W=1, rank=0):
    res = scenes_run(c, W, rank, fastais(c, W, rank))
    fit, = res.pop('fits')
    return fit | res

# By number of ranks: one of each kind of what the engine's adapter does; before a release all
names = {2: ('bn','find_unused','static','InstanceNorm','contrastive','inputs changed in place','no validation data',
             'ignore','focal','graph','counted',
             'split_11','targets changed in place'), 3: exact+rounded}

@functools.cache
def on_ranks(W): return run_ranks(rank_runs, W, names[W], of_table, run, timeout_s=300)

@pytest.mark.parametrize('W,name', [pytest.param(W, k, marks=[pytest.mark.long]*(W==3)) for W,ks in names.items() for k in ks])
def test_scene(W, name):
    want = run(scenes[name])
    for r in (ranks := [o[name] for o in on_ranks(W)]):
        for k in want:
            recorded = k in ('losses','values','final','validate')
            close(r[k], want[k], 1e-6 if recorded else 1e-9 if name in exact else 1e-7)
        close(r['state'], ranks[0]['state'], 0)
