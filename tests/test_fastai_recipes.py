"What scripts and other libraries do with fastai: timm, fastxtend, fasttransform, folds, self-supervision, pictures of any size"
import copy, warnings
from importlib.util import find_spec
from pathlib import Path
import pytest
pytest.importorskip('fastai')
import numpy as np, torch
from fastai.callback.core import Callback
from fastai.data.block import DataBlock, TransformBlock
from fastai.data.core import Datasets
from fastai.data.transforms import IndexSplitter
from fastai.metrics import Dice, foreground_acc
from fastai.optimizer import SGD
from fastcore.basics import noop
from fastai.vision.all import ImageDataLoaders, Resize, SegmentationDataLoaders, unet_learner, vision_learner
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18
from test_fastai import close, ctx, data, floats, history, make, on_ranks, per_rank, same
from test_fastai_apps import Loss, ToDouble, label_of, pictures, recorded, seeds, without_dropout
from test_fastai_metrics import in_files
from learnerdist.core.env import group_rank
from learnerdist.fastai import *
from learnerdist.testing import run_ranks
from fastai_lines import shows

warnings.filterwarnings('ignore')
torch.set_num_threads(1)
pytestmark = pytest.mark.slow
F64 = torch.float64

# --- other libraries --------------------------------------------------------------------------------------------------------

def picture_dls(W, path):
    kw = dict(valid_pct=.25, seed=1, bs=per_rank(12, W), num_workers=0, device='cpu', item_tfms=Resize(32))
    return ImageDataLoaders.from_path_func(path, sorted((path/'images').iterdir()), label_of, **kw)

def of_timm(W, rank, path):
    "A model by its name, cut and given a head by fastai"
    seeds(W)
    learn = vision_learner(picture_dls(W, path), 'test_resnet', pretrained=False, normalize=False, opt_func=SGD, cbs=ToDouble,
                           loss_func=Loss())
    without_dropout(learn.model.double())
    with ctx(learn, W):
        learn.fine_tune(1, 1e-3)
        return recorded(learn),learn.get_preds()

def test_timm(tmp_path):
    pytest.importorskip('timm')
    same(of_timm, pictures(tmp_path, 32), tol=1e-5, lines=["7 timm: `vision_learner(dls, 'test_resnet')`, `fine_tune`"])

def of_fastxtend(W, rank):
    "Its moving average of weights, which validates in place of the model"
    from fastxtend.callback.ema import EMACallback
    learn = make(W, rank, metrics=[])
    with ctx(learn, W):
        learn.fit(2, cbs=EMACallback(decay=.9))
        return history(learn),learn.get_preds(),[*learn.model_ema.parameters()]

def test_fastxtend():
    "In processes of their own, also alone: fastxtend gives every learner another callback"
    if find_spec('fastxtend') is None: pytest.skip('no fastxtend here')
    want, = run_ranks(without_context, 1, of_fastxtend)
    for W in (1,2,3):
        for got in run_ranks(on_ranks, W, of_fastxtend): close(got, want, 1e-6 if W>1 else 0)
        shows('6 fastxtend: `EMACallback`', W, 1e-6 if W>1 else 0)

def without_context(func): return func(0, 0)

# --- data -------------------------------------------------------------------------------------------------------------------

def scaled():
    from fasttransform import Transform
    class Scaled(Transform):
        "Learns the mean and the spread of the training set; one method for each type"
        def setups(self, items): self.mean,self.std = (getattr(torch.stack([*items]), o)(0) for o in ('mean','std'))
        def encodes(self, o:torch.Tensor): return (o-self.mean)/self.std
        def decodes(self, o:torch.Tensor): return o*self.std+self.mean
    class Shifted(Transform):
        "Of batches, in training only"
        order,split_idx = 3,0
        def encodes(self, b:tuple): return b[0]+.1,*b[1:]
    return Scaled,Shifted

class Label:
    "The class of sample `i`"
    def __init__(self, y): self.y = y
    def __call__(self, i): return int(self.y[i])

def transformed(W, rank):
    Scaled,Shifted = scaled()
    torch.manual_seed(0)
    x,y = data(133)
    torch.set_default_dtype(F64)
    scale = Scaled()
    dsets = Datasets([*range(133)], [[x.__getitem__,scale],[Label(y),lambda o: torch.tensor(o)]], splits=[[*range(96)],[*range(96, 133)]])
    dls = dsets.dataloaders(bs=per_rank(24, W), num_workers=0, device=torch.device('cpu'), after_batch=[Shifted()])
    learn = make(W, rank, metrics=[])
    learn.dls = dls
    with ctx(learn, W):
        learn.fit(2)
        return history(learn),learn.get_preds(with_input=True),scale.mean,learn.dls.one_batch()[0].shape[1]

def folds(W, rank):
    "A learner and a context for each fold; what is left out is predicted by the model that has not seen it"
    x,y = data(61)
    torch.set_default_dtype(F64)
    res,held = [],torch.zeros(61, 3)
    for k in range(3):
        torch.manual_seed(k)
        idxs = [*range(k, 61, 3)]
        block = DataBlock([TransformBlock,TransformBlock], splitter=IndexSplitter(idxs), get_x=x.__getitem__, get_y=y.__getitem__)
        dls = block.dataloaders([*range(61)], bs=per_rank(12, W), num_workers=0, device=torch.device('cpu'))
        learn = make(W, rank, metrics=[])
        learn.dls = dls
        with ctx(learn, W):
            learn.fit(2)
            held[idxs] = learn.get_preds()[0]
        res.append(history(learn))
    return res,held,(held.argmax(1)==y).double().mean()

# --- self-supervision -------------------------------------------------------------------------------------------------------

class Views(nn.Module):
    "An encoder, a target that follows it, and a predictor"
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))
        self.predictor,self.target = nn.Linear(5, 5),copy.deepcopy(self.encoder).requires_grad_(False)
    def forward(self, a, b): return tuple(self.predictor(self.encoder(o)) for o in (a, b))

class BYOL(Callback):
    "Two views of each sample, a target that follows the encoder, and an optimizer of its own for the predictor"
    order = 9
    def before_fit(self):
        self.learn.loss_func = self.loss
        self.opt2 = torch.optim.SGD(self.learn.model.predictor.parameters(), lr=.2, momentum=.9)
    def before_batch(self):
        a,b = self.x.flip(1),self.x*.9
        self.learn.xb = a,b
        with torch.no_grad(): self.learn.yb = self.model.target(b),self.model.target(a)
    def loss(self, pred, *targs): return sum(2-2*F.cosine_similarity(*o) for o in zip(pred, targs)).mean().float()
    def after_step(self):
        self.opt2.step()
        self.opt2.zero_grad()
        with torch.no_grad():
            for p,q in zip(self.model.target.parameters(), self.model.encoder.parameters()): p.lerp_(q, .1)

def self_supervised(W, rank):
    learn = make(W, rank, model=Views, metrics=[], splitter=lambda m: [list(m.encoder.parameters())])
    byol = BYOL()
    with ctx(learn, W): learn.fit(3, cbs=byol)
    return history(learn),[o['momentum_buffer'] for o in byol.opt2.state.values()]

def recipes(W, rank): return dict(tfms=transformed(W, rank), folds=folds(W, rank), byol=self_supervised(W, rank))

def test_recipes():
    pytest.importorskip('fasttransform')
    same(recipes, tol=1e-6, lines=dict(
        tfms='4 fasttransform: a transform that learns from the training set, one of batches in training only',
        folds='4 `DataBlock` with an `IndexSplitter` for each of K folds, a context for each; predictions of what was left out',
        byol='6 BYOL-like: two views, a target model, an optimizer of its own for the predictor'))

# --- pictures of any size ---------------------------------------------------------------------------------------------------

def sized_pictures(path, n=11):
    "Of three sizes"
    g = np.random.RandomState(0)
    for kind in ('images','masks'): (path/kind).mkdir()
    for i in range(n):
        h,w = [(32, 48),(48, 32),(64, 32)][i%3]
        img,mask = g.randint(0, 80, (h, w, 3)).astype('uint8'),np.zeros((h, w), 'uint8')
        mask[8:24, 4:20+i] = 1
        img[mask>0] += 120
        Image.fromarray(img).save(path/'images'/f'{i:02}_x.png')
        Image.fromarray(mask).save(path/'masks'/f'{i:02}.png')
    return path

def mask_of(o): return Path(o).parent.parent/'masks'/f'{Path(o).stem[:2]}.png'

def pixels(pred, targ): return (pred.argmax(1)==targ).double().mean()

def full_size(W, rank, path):
    "Trains on pictures of one size, one at a time; then validates and predicts each at its own size, into files"
    seeds(W)
    files = sorted((path/'images').iterdir())
    kw = dict(valid_pct=.3, seed=1, bs=per_rank(6, W), num_workers=0, device='cpu', item_tfms=Resize(32, 'squish')) # no random crop
    small = SegmentationDataLoaders.from_label_func(path, files, mask_of, codes=['no','yes'], **kw)
    large = SegmentationDataLoaders.from_label_func(path, files, mask_of, codes=['no','yes'], **dict(kw, bs=1, item_tfms=None))
    learn = unet_learner(small, resnet18, pretrained=False, normalize=False, metrics=[Dice(),foreground_acc,pixels],
                         opt_func=SGD, loss_func=Loss(axis=1), cbs=ToDouble)
    learn.model.double()
    out = path/f'out-{W}'
    with ctx(learn, W):
        learn.fit(1, 1e-2)
        trained = recorded(learn)
        if not group_rank(): (out/'raw').mkdir(parents=True)
        distrib_barrier()
        learn.get_preds(dl=large.test_dl(files), act=noop, save_preds=out/'raw')
        valid = floats(learn.validate(dl=large.valid)),[[*o] for o in learn.get_preds(dl=large.valid, act=noop)]
        masks = [o.argmax(0) for o in learn.get_preds(dl=large.test_dl(files), act=noop)[0]]
        if not group_rank():
            for f,o in zip(files, masks): Image.fromarray(o.byte().numpy()).save(out/f.name)
        distrib_barrier()
    return trained,valid,[*in_files(out/'raw').values()],[np.asarray(Image.open(o)).tolist() for o in sorted(out.glob('*.png'))]

@pytest.mark.long
def test_full_size(tmp_path):
    same(full_size, sized_pictures(tmp_path), tol=1e-5, lines=[
        '7 semantic segmentation, trained at one size; validated and predicted at full size, one picture at a time, into files'])
