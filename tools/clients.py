"""Train with the libraries that users have, on one process and on 2 and 3: `python tools/clients.py [NAME ...] [--write]`

A client is a quick start of a library on data made here. One process takes batches of W·b, W processes take batches of b. Compared are the
weights, recorded losses and values, what `validate` gives, and predictions. A row is *same*, *warned* (it differs, and a warning says why),
*error*, *differs* (without a warning, and `verify` finds it) or *missing* (not installed). What is not as the row says makes the exit
status 1. `--write` puts the rows into docs/clients.md. `pip install 'learnerdist[clients]'` has most of the libraries."""
import argparse
import contextlib
import io
import os
import random
import re
import sys
import tempfile
import warnings
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerdist.testing import run_ranks
from sweep import distance, harmless

page = Path(__file__).parent.parent/'docs/clients.md'
begin, end = '<!-- tools/clients.py --write -->\n', '<!-- end -->\n'

class Wrapped(nn.Module):
    "A model that is called by `call(model, *inputs)`"
    def __init__(self, model, call):
        super().__init__()
        self.model, self.call = model, call
    def forward(self, *xs): return self.call(self.model, *xs)

def ours(train, model, bs, loss_func=nn.CrossEntropyLoss(), valid=None, lr=.05, loader=DataLoader, shuffle=True, collate_fn=None, **kw): # noqa: B008
    "A learner of learnerdist over a data set; the batch size of validation is one process's"
    from learnerdist.all import DataLoaders, Learner
    dls = DataLoaders(loader(train, bs, collate_fn=collate_fn, shuffle=shuffle), DataLoader(valid or train, 8, collate_fn=collate_fn))
    return Learner(dls, model, loss_func, lambda ps, lr: torch.optim.SGD(ps, lr), lr=lr, **kw)

def images(n=24, size=32):
    "Pictures `(n,3,size,size)` and their classes of 3"
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, size, size, generator=g), torch.randint(3, (n,), generator=g)

def pictures(*args): return TensorDataset(*images(*args))

# --- models -------------------------------------------------------------------------------------------------------------------

def timm_model(bs):
    import timm
    return ours(pictures(), timm.create_model('test_resnet', num_classes=3), bs)

def masks(size=32):
    "Pictures and where they are positive"
    x, _ = images(24, size)
    return TensorDataset(x, (x[:, :1] > 0).to(x.dtype))

def unet(bs, loss, *args, **kw):
    import segmentation_models_pytorch as smp
    return ours(masks(), smp.Unet('resnet18', encoder_weights=None, classes=1), bs, getattr(smp.losses, loss)(*args), **kw)

def monai_unet(bs):
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet
    return ours(masks(16), UNet(spatial_dims=2, in_channels=3, out_channels=1, channels=(4, 8), strides=(2,)), bs, DiceLoss(sigmoid=True))

class Boxes(torch.utils.data.Dataset):
    "Pictures with one or two boxes, as torchvision's detectors take them"
    def __init__(self, n): self.x, self.n = images(n, 48)[0].sigmoid(), n
    def __len__(self): return self.n
    def __getitem__(self, i):
        boxes = torch.tensor([[4., 4., 20.+i%5, 24.], [10., 8., 40., 44.]])[:1+i%2].to(self.x.dtype)
        return self.x[i], dict(boxes=boxes, labels=torch.ones(len(boxes), dtype=torch.long))

def as_lists(samples):
    "Inputs, which hold the targets, in place of targets too"
    xs, ys = map(list, zip(*samples))
    return (xs, ys), xs

def losses_of(detector, xs_ys):
    "Its losses, added up: in evaluation too, where torchvision's detectors give boxes"
    training = detector.training
    try: return sum(detector.train()(*xs_ys).values())
    finally: detector.train(training)

def detection(bs):
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU())
    body.out_channels = 8
    anchors = AnchorGenerator(((8, 16, 32),), ((1.,),))
    model = FasterRCNN(body, 2, rpn_anchor_generator=anchors, min_size=48, max_size=48, box_detections_per_img=4)
    return ours(Boxes(12), Wrapped(model, losses_of), bs, lambda loss, xs: loss, Boxes(4), .001, collate_fn=as_lists)

# --- transformers -------------------------------------------------------------------------------------------------------------

def texts(n=24, length=7, words=50): return torch.randint(1, words, (n, length), generator=torch.Generator().manual_seed(0))
def logits(model, x): return model(input_ids=x).logits

def bert(bs, kind, y, loss_func=nn.CrossEntropyLoss()): # noqa: B008
    import transformers
    size = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16)
    cfg = transformers.BertConfig(vocab_size=50, **size, hidden_dropout_prob=0., attention_probs_dropout_prob=0., num_labels=3)
    return ours(TensorDataset(texts(), y), Wrapped(getattr(transformers, f'BertFor{kind}')(cfg), logits), bs, loss_func)

def tags():
    "A class for each word, with -100 behind the end of a text"
    past = torch.arange(7) >= torch.arange(24)[:, None] % 6+2
    return (texts() % 3).masked_fill(past, -100)
def over_tokens(pred, y): return F.cross_entropy(pred.flatten(0, 1), y.flatten())

def just_words(samples): return (torch.stack([o[0] for o in samples]),)*2
def with_labels(model, x): return model(input_ids=x, labels=x)

def gpt2(bs, change):
    "A model that computes its loss; `change` makes it another one"
    from transformers import GPT2Config, GPT2LMHeadModel
    size, drops = dict(n_positions=16, n_embd=16, n_layer=2, n_head=2), dict(resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.)
    model = change(GPT2LMHeadModel(GPT2Config(vocab_size=50, **size, **drops, bos_token_id=0, eos_token_id=0)))
    return ours(TensorDataset(texts()), Wrapped(model, with_labels), bs, None, TensorDataset(texts(9)), collate_fn=just_words)

def as_it_is(model): return model

def checkpointed(model):
    model.gradient_checkpointing_enable()
    return model

def lora(model):
    from peft import LoraConfig, get_peft_model
    return get_peft_model(model, LoraConfig(r=4, target_modules=['c_attn'], lora_dropout=0., fan_in_fan_out=True))

# --- losses, graphs, metrics --------------------------------------------------------------------------------------------------

def flat(n_out): return nn.Sequential(nn.Flatten(), nn.Linear(3*64, n_out))

def pairs_of_all(bs):
    from learnerdist.all import gather_with_grad
    from pytorch_metric_learning.losses import NTXentLoss
    loss = NTXentLoss()
    def of_all(pred, y): return loss(gather_with_grad(pred), gather_with_grad(y))
    of_all.n_items = 'whole'
    return ours(pictures(24, 8), flat(8), bs, of_all)

def pairs_of_a_rank(bs):
    from pytorch_metric_learning.losses import ContrastiveLoss
    return ours(pictures(24, 8), flat(8), bs, ContrastiveLoss())

def graphs(bs):
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool
    g, edges = torch.Generator().manual_seed(0), torch.tensor([[0, 1, 2], [1, 2, 0]])
    data = [Data(x=torch.randn(3+i%4, 4, generator=g), edge_index=edges, y=torch.tensor([i%3])) for i in range(24)]
    def classes(m, b): return m[1](global_mean_pool(m[0](b.x, b.edge_index).relu(), b.batch))
    model = Wrapped(nn.ModuleList([GCNConv(4, 8), nn.Linear(8, 3)]), classes)
    return ours(data, model, bs, lambda pred, b: F.cross_entropy(pred, b.y), data[:9], collate_fn=lambda b: (Batch.from_data_list(b),)*2)

def torch_metrics(bs):
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
    both = MetricCollection([MulticlassAccuracy(3), MulticlassAUROC(3)])
    return ours(pictures(24, 8), flat(3), bs, metrics=[both, MulticlassAUROC(3)])

# --- data ---------------------------------------------------------------------------------------------------------------------

def n_ranks(): return int(os.environ.get('WORLD_SIZE', 1))

def table(n=24): return [dict(x=[float(i%7), float(i%3), 1.], y=i%2) for i in range(n)]
def x_and_y(rows):
    xs, ys = zip(*(o.values() if isinstance(o, dict) else o for o in rows))
    return torch.stack([torch.as_tensor(o) for o in xs]).to(torch.get_default_dtype()), torch.tensor([int(o) for o in ys])
def linear(): return nn.Linear(3, 2)
def of_rows(data, bs, shuffle=None, **kw): return ours(data, linear(), bs, valid=table(9), collate_fn=x_and_y, shuffle=shuffle, **kw)

def as_read(bs, splits):
    "Rows of 6 files of 4; for one process, if ranks split the files, in the order of ranks that take every W-th file and batches of bs/W"
    items, W = table(), bs//2
    if not splits or n_ranks() > 1: return items
    own = [[o for k in range(r, 6, W) for o in items[4*k:4*k+4]] for r in range(W)]
    return [o for i in range(0, len(items)//W, 2) for r in range(W) for o in own[r][i:i+2]]

def hf_rows(bs, splits=False):
    "A stream of rows; on several ranks split by `split_dataset_by_node`, or not"
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node
    data = Dataset.from_list(as_read(bs, splits))
    if not splits or n_ranks()==1: return of_rows(data.to_iterable_dataset(), bs)
    return of_rows(split_dataset_by_node(data.to_iterable_dataset(num_shards=6), int(os.environ['RANK']), n_ranks()), bs)

def hf_map(bs):
    from datasets import Dataset
    return of_rows(Dataset.from_list(table()), bs, True)

def web(bs, splits):
    "A `WebDataset` of six tar files with 4 samples each"
    import webdataset as wds
    rows, folder = as_read(bs, splits), tempfile.mkdtemp()
    for k in range(6):
        with wds.TarWriter(f'{folder}/{k}.tar') as f:
            for i in range(4*k, 4*k+4): f.write({'__key__': f'{i:03}', 'x.pth': torch.tensor(rows[i]['x']), 'y.cls': rows[i]['y']})
    data = wds.WebDataset(f'{folder}/{{0..5}}.tar', shardshuffle=False, nodesplitter=wds.split_by_node if splits else lambda o: o)
    return of_rows(data.decode().to_tuple('x.pth', 'y.cls'), bs)

def mosaic(bs):
    from learnerdist.all import broadcast_object, distrib_barrier, rank_distrib, setup_distrib
    from streaming import MDSWriter, StreamingDataset
    setup_distrib()
    folder = broadcast_object(tempfile.mkdtemp())+'/data'
    if not rank_distrib():
        with MDSWriter(out=folder, columns=dict(x='ndarray:float32', y='int')) as f:
            for o in table(): f.write(dict(x=np.float32(o['x']), y=o['y']))
    distrib_barrier()
    return of_rows(StreamingDataset(local=folder, batch_size=bs, shuffle=False, num_canonical_nodes=1), bs)

def stateful(bs):
    from torchdata.stateful_dataloader import StatefulDataLoader
    return of_rows(table(), bs, True, loader=StatefulDataLoader)

# --- fastai's family ----------------------------------------------------------------------------------------------------------

def series(n=24, channels=2, length=16):
    g = np.random.RandomState(0)
    return g.randn(n, channels, length).astype('float32'), np.array(list('ab'))[np.arange(n)%2], g.randn(n).astype('float32')

def split(n): return list(range(n-9)), list(range(n-9, n))
small = dict(n_layers=1, d_model=8, d_ff=8, n_heads=2, dropout=0.)
patches = small | dict(patch_len=4, stride=4, attn_dropout=0.)

def of_tsai(bs, kind, arch, cbs=None, **kw):
    "A learner of tsai for classes, numbers, or the last 3 steps"
    import learnerdist.fastai  # noqa: F401
    import tsai.basics as ts
    x, classes, numbers = series()
    y, tfm = {'TSClassifier': (classes, ts.TSClassification), 'TSRegressor': (numbers, ts.TSRegression),
              'TSForecaster': (x[:, :, -3:], ts.TSForecasting)}[kind]
    with contextlib.redirect_stdout(io.StringIO()):
        return getattr(ts, kind)(x, y, tfms=[None, tfm()], splits=split(24), arch=arch, bs=[bs, 8], num_workers=0, device='cpu',
                                 opt_func=ts.SGD, cbs=cbs and cbs(), **kw)

def tsai_preds(bs):
    learn = of_tsai(bs, 'TSClassifier', 'FCN')
    learn.predictions = lambda: learn.get_X_preds(series()[0][:9], bs=4)[0]
    return learn

def mvp():
    from tsai.callback.MVP import MVP
    return MVP(save_best=False, dropout=0.)

def fastais(items, bs, model, lr=.01, loss_func=nn.MSELoss(), **kw): # noqa: B008
    "A fastai learner over samples; the last 9 are for validation"
    import learnerdist.fastai  # noqa: F401
    from fastai.basics import SGD, DataLoaders, Learner
    from fastai.data.load import DataLoader
    load = DataLoader(items[:-9], bs=bs, shuffle=True, num_workers=0), DataLoader(items[-9:], bs=8, num_workers=0)
    dls = DataLoaders(*load, device='cpu')
    return Learner(dls, model, loss_func=loss_func, opt_func=SGD, lr=lr, **kw)

def views(bs, name, make):
    "A learner of self_supervised, with views that are not drawn: a picture, and its mirror image"
    from importlib import import_module

    from fasttransform import Pipeline
    module, x = import_module(f'self_supervised.vision.{name}'), images(33)[0]
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    mirror = [Pipeline([], split_idx=0), Pipeline([lambda o: o.flip(-1)], split_idx=0)]
    model = getattr(module, f'create_{name}_model')(encoder, hidden_size=8, projection_size=4)
    return fastais([*zip(x, torch.zeros(33))], bs, model, lr=.001, cbs=make(module, mirror))

def simclr(m, augs): return m.SimCLR(augs)
def moco(m, augs): return m.MOCO(augs, K=12)
def byol(m, augs): return m.BYOL(augs)

def simclr_of_all(m, augs):
    from learnerdist.all import gather_with_grad
    class OfAll(m.SimCLR):
        def before_batch(self):
            super().before_batch()
            self.learn.xb = self.learn.xb[0].unflatten(0, (2, -1)).transpose(0, 1),  # two views of each sample
        def lf(self, pred, *yb):
            pred = gather_with_grad(pred).transpose(0, 1).flatten(0, 1)
            return super().lf(pred, torch.arange(len(pred)).roll(len(pred)//2))
        lf.n_items = 'whole'
    return OfAll(augs)

def of_views(model, x): return model(x.flatten(0, 1)).unflatten(0, (-1, 2))

def all_views(bs):
    learn = views(bs, 'simclr', simclr_of_all)
    learn.model = Wrapped(learn.model, of_views)
    return learn

def synced_byol(m, augs):
    from learnerdist.all import sync_batchnorm
    class Synced(m.BYOL):
        def before_fit(self):
            super().before_fit()
            sync_batchnorm(self.target_model)
    return Synced(augs)

def in_double(learn):
    "A fastai learner in float64; its tables and its recorder are in float32"
    from fastai.basics import Callback
    class Doubled(Callback):
        def before_batch(self): self.learn.xb = tuple(o.double() if o.is_floating_point() else o for o in self.xb)
    learn.model.double()
    learn.loss_func = lambda p, y: F.cross_entropy(p, y.flatten().long()).float()
    learn.add_cb(Doubled())
    return learn

def timm_by_fastai(bs):
    from fastai.vision.all import SGD, vision_learner
    dls = fastais([*zip(*images(33))], bs, nn.Identity()).dls
    dls.c = 3
    return in_double(vision_learner(dls, 'test_resnet', pretrained=False, normalize=False, loss_func=nn.MSELoss(), opt_func=SGD, lr=1e-4,
                                    ps=0.))

def tabnet(bs, **kw):
    from fast_tabnet.core import TabNetModel
    from fastai.tabular.all import SGD, Categorify, CategoryBlock, Learner, Normalize, TabularPandas, get_emb_sz, pd
    import learnerdist.fastai  # noqa: F401
    df = pd.DataFrame(dict(a=series(33)[2], b=[f'{i%4}' for i in range(33)], y=[i%2 for i in range(33)]))
    to = TabularPandas(df, [Categorify, Normalize], ['b'], ['a'], 'y', CategoryBlock(), splits=split(33))
    model = TabNetModel(get_emb_sz(to), 1, 2, n_d=4, n_a=4, n_steps=2, **kw)
    return in_double(Learner(to.dataloaders(bs=bs, val_bs=8, device='cpu'), model, opt_func=SGD, lr=.001))

def cyclegan(bs, shared=False):
    import learnerdist.fastai  # noqa: F401
    from fastai.optimizer import Optimizer, sgd_step
    from learnerdist.all import average_grads
    from PIL import Image
    from upit.data.unpaired import get_dls
    from upit.models.cyclegan import CycleGAN
    from upit.train.cyclegan import cycle_learner
    g, folder = np.random.RandomState(0), tempfile.mkdtemp()
    for i in range(24): Image.fromarray(g.randint(0, 255, (16, 16, 3), dtype='uint8')).save(f'{folder}/{i:02}.png')
    dls = get_dls(folder, folder, load_size=16, crop_size=16, bs=bs, num_workers=0, batch_tfms={})
    def averaged(p, **kw): average_grads([p])
    averaged.order = -1
    steps = [averaged, sgd_step] if shared else [sgd_step]
    model = CycleGAN(n_features=4, disc_layers=1, gen_blocks=1)
    return cycle_learner(dls, model, opt_func=lambda ps, lr: Optimizer(ps, steps, lr=lr), show_imgs=False, lr=.001)

def fastmonai(bs):
    import learnerdist.fastai  # noqa: F401
    import torchio
    from fastai.basics import RegressionBlock
    from fastMONAI.vision_all import SGD, Learner, MedImageDataLoaders, pd
    x, folder = images(33, 8)[0], tempfile.mkdtemp()
    for i in range(33): torchio.ScalarImage(tensor=x[i][None].float()).save(f'{folder}/{i:02}.nii.gz')
    df = pd.DataFrame(dict(file=[f'{folder}/{i:02}.nii.gz' for i in range(33)], age=np.arange(33.)/33, valid=[i >= 24 for i in range(33)]))
    dls = MedImageDataLoaders.from_df(df, fn_col='file', label_col='age', y_block=RegressionBlock(), valid_col='valid', bs=bs, val_bs=8,
                                      num_workers=0, device='cpu')
    model = nn.Sequential(nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 1))
    return Learner(dls, model, opt_func=SGD, lr=.01)

# --- the rows -----------------------------------------------------------------------------------------------------------------

rows = {}

def row(packages, name, make, about, verdict='same', why='', tol=1e-9, double=None, epochs=2, compare='losses values preds weights'):
    "What `make`, a function of the batch size, has to give; to `tol`, and in float64 if that is small"
    rows[name] = dict(packages=packages.split(), make=make, about=about, verdict=verdict, why=why, tol=tol,
                      double=tol < 1e-6 if double is None else double, epochs=epochs, compare=compare.split())

single, enlarged = partial(row, tol=1e-5), partial(row, tol=1e-4)
smp, of_a_rank = 'segmentation-models-pytorch', 'pairs of one rank only: `gather_with_grad`'
no_preds, weights_only = dict(compare='losses values weights'), dict(compare='losses weights')

row('timm', 'timm', timm_model, '`create_model`, BatchNorm, cross-entropy')
row(smp, 'smp_dice', lambda bs: unet(bs, 'DiceLoss', 'binary'), '`Unet` with its `DiceLoss` over the batch', 'warned',
    'Dice over a batch is no mean over samples: `gather_with_grad`')
row(smp, 'smp_bce', lambda bs: unet(bs, 'SoftBCEWithLogitsLoss', lr=1e-4), '`Unet` with its `SoftBCEWithLogitsLoss`')
row('monai', 'monai', monai_unet, '`UNet`, its `DiceLoss` of each sample')
row('torchvision', 'detection', detection, '`FasterRCNN`: its losses, by a wrapper', 'warned',
    'it draws anchors at random, and counts them over the batch', **no_preds)
row('transformers', 'texts', lambda bs: bert(bs, 'SequenceClassification', texts()[:, 0] % 3), '`BertForSequenceClassification`')
row('transformers', 'tokens', lambda bs: bert(bs, 'TokenClassification', tags(), over_tokens),
    '`BertForTokenClassification`, labels of -100 in uneven numbers')
single('transformers', 'causal_lm', lambda bs: gpt2(bs, as_it_is), '`GPT2LMHeadModel`: the model computes its loss', **no_preds)
single('transformers', 'checkpointed', lambda bs: gpt2(bs, checkpointed), '`gradient_checkpointing_enable`', **no_preds)
single('peft transformers', 'lora', lambda bs: gpt2(bs, lora), '`LoraConfig` on GPT-2', **no_preds)
row('pytorch-metric-learning', 'pairs_of_all', pairs_of_all, '`NTXentLoss` over the global batch, by `gather_with_grad`')
row('pytorch-metric-learning', 'pairs_of_a_rank', pairs_of_a_rank, "`ContrastiveLoss` of each rank's batch", 'warned', of_a_rank)
row('torch-geometric', 'graphs', graphs, '`Batch` objects: targets by an attribute of the input')
row('torchmetrics', 'torchmetrics', torch_metrics, '`MetricCollection`, `MulticlassAUROC`')
row('datasets', 'hf_map', hf_map, 'a `Dataset` of rows')
row('datasets', 'hf_stream', hf_rows, 'an `IterableDataset`')
row('datasets', 'hf_split', lambda bs: hf_rows(bs, True),
    '`split_dataset_by_node`, one epoch: in others it deals files in another way', epochs=1)
row('webdataset', 'web', lambda bs: web(bs, False), 'a `WebDataset` of 6 files')
row('webdataset', 'web_split', lambda bs: web(bs, True), '`split_by_node`')
row('mosaicml-streaming', 'mosaic', mosaic, '`StreamingDataset`, which deals samples itself')
row('torchdata', 'stateful', stateful, '`StatefulDataLoader`')
single('tsai', 'tsai_fcn', lambda bs: of_tsai(bs, 'TSClassifier', 'FCN'), '`TSClassifier`, `FCN`')
single('tsai', 'tsai_inception', lambda bs: of_tsai(bs, 'TSClassifier', 'InceptionTime'), '`TSClassifier`, `InceptionTime`')
single('tsai', 'tsai_regressor', lambda bs: of_tsai(bs, 'TSRegressor', 'InceptionTimePlus'), '`TSRegressor`, `InceptionTimePlus`')
single('tsai', 'tsai_forecaster', lambda bs: of_tsai(bs, 'TSForecaster', 'TSTPlus', arch_config=small), '`TSForecaster`, `TSTPlus`')
single('tsai', 'tsai_patches', lambda bs: of_tsai(bs, 'TSForecaster', 'PatchTST', arch_config=patches), '`TSForecaster`, `PatchTST`')
single('tsai', 'tsai_preds', tsai_preds, '`get_X_preds` of a `TSClassifier`')
single('tsai', 'tsai_mvp', lambda bs: of_tsai(bs, 'TSClassifier', 'TSTPlus', mvp, arch_config=small),
       '`MVP`: masks drawn for a batch', 'warned', 'it averages over masked points, and draws them for each batch', **no_preds)
single('self_supervised', 'simclr', lambda bs: views(bs, 'simclr', simclr), '`SimCLR`', 'warned', of_a_rank)
single('self_supervised', 'simclr_of_all', all_views, '`SimCLR`, its loss by `gather_with_grad`')
single('self_supervised', 'moco', lambda bs: views(bs, 'moco', moco), '`MOCO`', 'warned',
       'pairs of one rank only, and a queue for each rank')
enlarged('self_supervised', 'byol', lambda bs: views(bs, 'byol', byol), '`BYOL`', 'warned', 'BatchNorm of its target: `sync_batchnorm`')
enlarged('self_supervised', 'byol_synced', lambda bs: views(bs, 'byol', synced_byol), '`BYOL`, with `sync_batchnorm` for its target')
row('timm fastai', 'timm_by_fastai', timm_by_fastai, '`vision_learner` with a model of timm', tol=1e-6, double=True)
row('fast_tabnet', 'tabnet', tabnet, '`TabNetModel`, whose ghost batches of 128 hold the global batch', tol=1e-6, double=True)
row('fast_tabnet', 'tabnet_ghosts', lambda bs: tabnet(bs, virtual_batch_size=2), '`TabNetModel(virtual_batch_size=2)`', 'differs',
    'ghost batches are parts of a batch, and here of a rank\'s batch; `verify` finds it', tol=1e-6, double=True)
single('upit', 'cyclegan', cyclegan, '`cycle_learner`', 'error', 'see "A second optimizer" below', **weights_only)
enlarged('upit', 'cyclegan_shared', lambda bs: cyclegan(bs, True), '`cycle_learner` with `average_grads`', **weights_only)
single('fastMONAI', 'fastmonai', fastmonai, '`MedImageDataLoaders`, regression')

# --- running and comparing ----------------------------------------------------------------------------------------------------

def made(name, bs):
    "A row's learner, from the same draws each time"
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch.set_default_dtype(torch.double if rows[name]['double'] else torch.float32)
    return rows[name]['make'](bs)

def outcome(name, bs):
    "What a row's run gives on this process, by name, or its error; and what was warned of"
    res, want = {}, rows[name]['compare']
    os.chdir(tempfile.mkdtemp())
    with warnings.catch_warnings(record=True) as seen, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter('always')
        try:
            learn = made(name, bs)
            with learn.distrib_ctx(seed=0), learn.no_logging():
                learn.fit(rows[name]['epochs'])
                res['losses'] = [float(o) for o in learn.recorder.losses]
                if 'values' in want: res['values'] = [*learn.validate()]
                if 'preds' in want: res['preds'] = learn.predictions() if hasattr(learn, 'predictions') else learn.get_preds()[0]
            res['weights'] = [p.detach().clone() for p in learn.model.state_dict().values()]
        except Exception as e: res['error'] = f'{type(e).__name__}: {e}'
        finally: torch.set_default_dtype(torch.float32)
    return res | dict(messages=[str(o.message) for o in seen])

def outcomes(names, bs):
    "Of several rows, one after the other"
    torch.set_num_threads(1)
    return {o: outcome(o, bs) for o in names}

def codes(texts): return sorted({o for t in texts for o in re.findall(r'\[([a-z-]+)\] ', t)})

def judge(name, alone, ranks):
    "(verdict, codes of the warnings, differences) of a run on some ranks"
    errors, r = [o['error'] for o in [alone, *ranks] if 'error' in o], rows[name]
    if errors: return 'error', codes(errors), '' if codes(errors) else errors[0].split('\n')[0][:200]
    off = {k: max(distance(o[k], alone[k]) for o in ranks) for k in r['compare']}
    messages = codes(t for o in ranks for t in o['messages'])
    far = ', '.join(f'{k} by {v:.1g}' for k, v in off.items() if not v <= r['tol'])
    if not far: return 'same', messages, ''
    return 'warned' if {*messages}-{*harmless} else 'differs', messages, far

def found_by_verify(name, W, bs):
    "Whether `verify` finds that a row differs"
    from learnerdist.verify import verify
    return not verify(partial(made, name, bs), nproc=W, steps=4, dtype='keep').same

def installed(package):
    try: return version(package)
    except PackageNotFoundError: return None

def run_rows(names, worlds=(2, 3), bs=2):
    "(name, verdict, last column) for each row, run together; the verdict is *missing* if a package is"
    lacks = {o: [p for p in rows[o]['packages'] if not installed(p)] for o in names}
    some, found = [o for o in names if not lacks[o]], {o: [] for o in names}
    for W in worlds if some else ():
        alone, *ranks = run_ranks(outcomes, 1, some, bs*W, timeout_s=600)+run_ranks(outcomes, W, some, bs, timeout_s=600)
        for o in some:
            verdict, messages, far = judge(o, alone[o], [r[o] for r in ranks])
            if verdict==rows[o]['verdict']=='differs' and not found_by_verify(o, W, bs): verdict = 'DIFFERS, and verify does not find it'
            found[o].append((verdict, messages, far))
    for o in names: yield o, *shown(o, found[o], lacks[o])

def shown(name, found, lacks):
    "(verdict, last column) of a row"
    if lacks: return 'missing', ''
    r, verdict = rows[name], ' / '.join(dict.fromkeys(o for o, _, _ in found))
    messages = ', '.join(f'`{o}`' for o in dict.fromkeys(o for _, messages, _ in found for o in messages))
    detail = '; '.join(dict.fromkeys(o for *_, o in found if o)) if verdict!=r['verdict'] else r['why']
    return verdict, ': '.join(filter(None, [messages, detail]))

def line(name, verdict, detail):
    what = ' '.join(f'{p} {installed(p) or "-"}' for p in rows[name]['packages'])
    return f'| {what} | {rows[name]["about"]} | {verdict} | {detail} |'

def documented():
    "Lines of the page's table, by what they are about"
    lines = page.read_text().partition(begin)[2].partition(end)[0].splitlines()[2:]
    return {o.split(' | ')[1]: o for o in lines}

def write(new):
    "Put lines, by what they are about, into the page's table, whose other lines stay"
    (head, _, rest), known = page.read_text().partition(begin), documented() | new
    lines = [known[o['about']] for o in rows.values() if o['about'] in known]
    head += begin+'| library | what | on 2 and 3 processes | |\n|---|---|---|---|'
    page.write_text('\n'.join([head, *lines, end+rest.partition(end)[2]]))

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('names', nargs='*', help=', '.join(rows))
    p.add_argument('--write', action='store_true')
    args = p.parse_args()
    if unknown := {*args.names}-{*rows}: p.error(f'no row is called {", ".join(sorted(unknown))}')
    bad = []
    for _, names in groupby(args.names or rows, lambda o: rows[o]['packages']):
        for name, verdict, detail in run_rows([*names]):
            print(f'{name}: {verdict} {detail}', flush=True)
            if verdict!=rows[name]['verdict']: bad.append(name)
            if args.write: write({rows[name]['about']: line(name, verdict, detail)})
    if bad: print('not as expected:', *bad)
    return bool(bad)

if __name__=='__main__': sys.exit(main())
