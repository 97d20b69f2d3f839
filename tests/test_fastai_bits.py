"fastai's Learner has the same bits on any number of ranks: a vision learner with `aug_transforms` and MixUp, by fastai's own optimizer"
import pytest, warnings
pytest.importorskip('fastai')
import numpy as np, torch
from fastai.vision.all import (CategoryBlock, CrossEntropyLossFlat, DataBlock, ImageBlock, MixUp, PILImage, RandomSplitter,
                               accuracy, aug_transforms, resnet18, vision_learner)
from learnerdist.core.env import process_group
from learnerdist.fastai import *
from learnerdist.testing import run_ranks
from harness import close
from torch.utils._pytree import tree_leaves

warnings.filterwarnings('ignore')

def picture(i): return PILImage.create(np.random.default_rng(int(i)).integers(0, 255, (20,20,3), dtype=np.uint8))
def label(i): return 'abc'[int(i)%3]
def run(mixed=True):
    torch.set_num_threads(1)
    block = DataBlock((ImageBlock,CategoryBlock), get_x=picture, get_y=label, splitter=RandomSplitter(seed=1),
                      batch_tfms=aug_transforms(size=16))
    dls = block.dataloaders(list(range(44)), bs=6, num_workers=0, device='cpu')
    torch.manual_seed(0)
    learn = vision_learner(dls, resnet18, pretrained=False, normalize=False, metrics=accuracy, loss_func=CrossEntropyLossFlat(),
                           cbs=[MixUp()] if mixed else [])
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=3, global_bs=12, max_bs=3):
        learn.fit(2, lr=1e-3)
        preds = learn.get_preds()
    rec = learn.recorder
    return dict(state=dict(learn.model.state_dict()), opt=tree_leaves(learn.opt.state_dict()), losses=[float(o) for o in rec.losses],
                values=[[*o] for o in rec.values], preds=[o.as_subclass(torch.Tensor) for o in preds])
def just_mixed():
    with process_group(): return [run()]
def both():
    with process_group(): return [run(), run(False)]

@pytest.mark.slow
@pytest.mark.parametrize('W,runs', [(2, just_mixed), pytest.param(4, both, marks=pytest.mark.long)], ids=[2,4])
def test_vision_learner(W, runs):
    want = runs()
    for r in run_ranks(runs, W, timeout_s=300): close(r, want, 0)
