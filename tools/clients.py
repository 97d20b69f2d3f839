"""Train with the libraries that users have, on one process and on 2 and 3: `python tools/clients.py [NAME ...] [--write]`

A client is a quick start of a library on data made here. One process takes batches of W·b, W processes take batches of b. Compared are the
weights, recorded losses and values, what `validate` gives, and predictions. A row is *same*, *warned* (it differs, and a warning says why),
*error* (with its message) or *missing* (not installed). A difference without a warning, or an error that is not expected, makes the exit
status 1. `--write` puts the rows into docs/clients.md. `pip install 'learnerdist[clients]'` has the libraries."""
import argparse
import contextlib
import io
import os
import sys
import tempfile
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnerdist.testing import run_ranks
from sweep import distance

page = Path(__file__).parent.parent/'docs/clients.md'
begin, end = '<!-- tools/clients.py --write -->\n', '<!-- end -->\n'
clients = {}

def client(packages, about, tol=1e-9, **expected):
    "Register a function of (batch size, world size) that makes a learner. `expected`: `verdict`, `why`, `epochs`"
    def register(func):
        row = dict(make=func, packages=packages.split(), about=about, tol=tol, verdict='same', why='', epochs=2)
        clients[func.__name__] = row | expected
        return func
    return register

def ours(train, valid, model, loss_func, bs, W, lr=.05, **kw):
    "A learner of learnerdist over two data sets; the batch size of validation is one process's"
    from learnerdist.all import DataLoaders, Learner
    collate = kw.pop('collate_fn', None)
    dls = DataLoaders(DataLoader(train, bs, collate_fn=collate, shuffle=kw.pop('shuffle', True)), DataLoader(valid, 8, collate_fn=collate))
    return Learner(dls, model, loss_func, lambda ps, lr: torch.optim.SGD(ps, lr), lr=lr, **kw)

def images(n, size=32, seed=0):
    "Pictures `(n,3,size,size)` and their classes of 3"
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, size, size, generator=g), torch.randint(3, (n,), generator=g)

def texts(n, length=7, words=50, seed=0):
    "Words `(n,length)`"
    return torch.randint(1, words, (n, length), generator=torch.Generator().manual_seed(seed))

def pictures(n): return TensorDataset(*images(n))

# --- models -------------------------------------------------------------------------------------------------------------------

@client('timm', '`create_model`, BatchNorm, cross-entropy')
def timm_model(bs, W):
    import timm
    return ours(pictures(24), pictures(9), timm.create_model('resnet10t', num_classes=3), nn.CrossEntropyLoss(), bs, W)

@client('segmentation-models-pytorch', '`Unet` with its `DiceLoss` over the batch', verdict='warned',
        why='Dice over a batch is no mean over samples: `gather_with_grad`')
def smp_dice(bs, W):
    import segmentation_models_pytorch as smp
    x, _ = images(24)
    data = TensorDataset(x, (x[:, :1] > 0).to(x.dtype))
    model = smp.Unet('resnet18', encoder_weights=None, classes=1)
    return ours(data, data, model, smp.losses.DiceLoss('binary'), bs, W)

@client('segmentation-models-pytorch', '`Unet` with its `SoftBCEWithLogitsLoss`')
def smp_bce(bs, W):
    import segmentation_models_pytorch as smp
    x, _ = images(24)
    data = TensorDataset(x, (x[:, :1] > 0).to(x.dtype))
    return ours(data, data, smp.Unet('resnet18', encoder_weights=None, classes=1), smp.losses.SoftBCEWithLogitsLoss(), bs, W,
                lr=1e-4)

@client('monai', '`UNet`, its `DiceLoss` of each sample')
def monai_unet(bs, W):
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet
    x, _ = images(24, 16)
    data = TensorDataset(x, (x[:, :1] > 0).to(x.dtype))
    model = UNet(spatial_dims=2, in_channels=3, out_channels=1, channels=(4, 8), strides=(2,))
    return ours(data, data, model, DiceLoss(sigmoid=True), bs, W)

class Boxes(torch.utils.data.Dataset):
    "Pictures with one or two boxes, as torchvision's detectors take them"
    def __init__(self, n): self.x, self.n = images(n, 48)[0].sigmoid(), n
    def __len__(self): return self.n
    def __getitem__(self, i):
        boxes = torch.tensor([[4., 4., 20.+i%5, 24.], [10., 8., 40., 44.]])[:1+i%2].to(self.x.dtype)
        return self.x[i], dict(boxes=boxes, labels=torch.ones(len(boxes), dtype=torch.long))

def as_lists(samples): return tuple(map(list, zip(*samples)))

def twice(samples):
    "Inputs, which hold the targets, in place of targets too"
    xs, ys = as_lists(samples)
    return (xs, ys), xs

class Detector(nn.Module):
    "A detector that gives its losses, added up: in evaluation too, where torchvision's give boxes"
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, xs_ys):
        xs, ys = xs_ys
        self.model.train()
        losses = sum(self.model(xs, ys).values())
        self.model.train(self.training)
        return losses

@client('torchvision', '`FasterRCNN`: its losses, by a wrapper', verdict='warned',
        why='it draws anchors at random, and counts them over the batch')
def detection(bs, W):
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU())
    body.out_channels = 8
    anchors = AnchorGenerator(((8, 16, 32),), ((1.,),))
    model = FasterRCNN(body, 2, rpn_anchor_generator=anchors, min_size=48, max_size=48, box_detections_per_img=4)
    return ours(Boxes(12), Boxes(4), Detector(model), lambda loss, xs: loss, bs, W, lr=.001, collate_fn=twice)

# --- transformers -------------------------------------------------------------------------------------------------------------

def bert(cls, **kw):
    from transformers import BertConfig
    size = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16)
    cfg = BertConfig(vocab_size=50, **size, hidden_dropout_prob=0., attention_probs_dropout_prob=0., **kw)
    return cls(cfg)

class Logits(nn.Module):
    "A transformer of words to logits"
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x): return self.model(input_ids=x).logits

@client('transformers', '`BertForSequenceClassification`')
def text_classification(bs, W):
    from transformers import BertForSequenceClassification
    data = TensorDataset(texts(24), texts(24)[:, 0] % 3)
    return ours(data, data, Logits(bert(BertForSequenceClassification, num_labels=3)), nn.CrossEntropyLoss(), bs, W)

def tags():
    "Words, and a class for each, with -100 behind the end of a text"
    x = texts(24)
    past = torch.arange(7) >= torch.arange(24)[:, None] % 6+2
    return TensorDataset(x, (x % 3).masked_fill(past, -100))

def over_tokens(pred, y): return F.cross_entropy(pred.flatten(0, 1), y.flatten())

@client('transformers', '`BertForTokenClassification`, labels of -100 in uneven numbers')
def token_classification(bs, W):
    from transformers import BertForTokenClassification
    return ours(tags(), tags(), Logits(bert(BertForTokenClassification, num_labels=3)), over_tokens, bs, W)

def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    size,drops = dict(n_positions=16, n_embd=16, n_layer=2, n_head=2),dict(resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, **size, **drops, bos_token_id=0, eos_token_id=0))

class OwnLoss(nn.Module):
    "A transformer that computes its loss"
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x): return self.model(input_ids=x, labels=x)

def just_words(samples): return (torch.stack([o[0] for o in samples]),)*2

@client('transformers', '`GPT2LMHeadModel`: the model computes its loss', tol=1e-5)
def causal_lm(bs, W): return ours(TensorDataset(texts(24)), TensorDataset(texts(9)), OwnLoss(gpt2()), None, bs, W, collate_fn=just_words)

@client('transformers', '`gradient_checkpointing_enable`', tol=1e-5)
def gradient_checkpointing(bs, W):
    model = gpt2()
    model.gradient_checkpointing_enable()
    return ours(TensorDataset(texts(24)), TensorDataset(texts(9)), OwnLoss(model), None, bs, W, collate_fn=just_words)

@client('peft transformers', '`LoraConfig` on GPT-2', tol=1e-5)
def lora(bs, W):
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(gpt2(), LoraConfig(r=4, target_modules=['c_attn'], lora_dropout=0., fan_in_fan_out=True))
    return ours(TensorDataset(texts(24)), TensorDataset(texts(9)), OwnLoss(model), None, bs, W, collate_fn=just_words)

# --- losses, graphs, metrics --------------------------------------------------------------------------------------------------

def embedder(): return nn.Sequential(nn.Flatten(), nn.Linear(3*64, 8))

@client('pytorch-metric-learning', '`NTXentLoss` over the global batch, by `gather_with_grad`')
def metric_learning(bs, W):
    from learnerdist.all import gather_with_grad
    from pytorch_metric_learning.losses import NTXentLoss
    loss = NTXentLoss()
    def of_all(pred, y): return loss(gather_with_grad(pred), gather_with_grad(y))
    of_all.n_items = 'whole'
    data = TensorDataset(*images(24, 8))
    return ours(data, data, embedder(), of_all, bs, W)

@client('pytorch-metric-learning', '`ContrastiveLoss` of each rank\'s batch', verdict='warned',
        why='pairs of one rank only: `gather_with_grad`')
def metric_learning_by_rank(bs, W):
    from pytorch_metric_learning.losses import ContrastiveLoss
    data = TensorDataset(*images(24, 8))
    return ours(data, data, embedder(), ContrastiveLoss(), bs, W)

class GraphNet(nn.Module):
    "A graph to classes"
    def __init__(self):
        super().__init__()
        from torch_geometric.nn import GCNConv
        self.conv, self.out = GCNConv(4, 8), nn.Linear(8, 3)
    def forward(self, b):
        from torch_geometric.nn import global_mean_pool
        return self.out(global_mean_pool(self.conv(b.x, b.edge_index).relu(), b.batch))

@client('torch-geometric', '`Batch` objects: targets by an attribute of the input')
def graphs(bs, W):
    from torch_geometric.data import Batch, Data
    g = torch.Generator().manual_seed(0)
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    data = [Data(x=torch.randn(3+i%4, 4, generator=g), edge_index=edges, y=torch.tensor([i%3])) for i in range(24)]
    return ours(data, data[:9], GraphNet(), lambda pred, b: F.cross_entropy(pred, b.y), bs, W,
                collate_fn=lambda b: (lambda o: (o, o))(Batch.from_data_list(b)))

@client('torchmetrics', '`MetricCollection`, `MulticlassAUROC`')
def torch_metrics(bs, W):
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
    both = MetricCollection([MulticlassAccuracy(3), MulticlassAUROC(3)])
    data = TensorDataset(*images(24, 8))
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    return ours(data, data, model, nn.CrossEntropyLoss(), bs, W, metrics=[both, MulticlassAUROC(3)])

# --- data ---------------------------------------------------------------------------------------------------------------------

def table(n): return [dict(x=[float(i%7), float(i%3), 1.], y=i%2) for i in range(n)]
def x_and_y(rows): return torch.tensor([o['x'] for o in rows]).to(torch.get_default_dtype()), torch.tensor([int(o['y']) for o in rows])
def linear(): return nn.Linear(3, 2)

@client('datasets', 'a `Dataset` of rows')
def hf_map(bs, W):
    from datasets import Dataset
    return ours(Dataset.from_list(table(24)), Dataset.from_list(table(9)), linear(), nn.CrossEntropyLoss(), bs, W, collate_fn=x_and_y)

@client('datasets', 'an `IterableDataset`')
def hf_stream(bs, W):
    from datasets import Dataset
    data = Dataset.from_list(table(24)).to_iterable_dataset()
    return ours(data, Dataset.from_list(table(9)), linear(), nn.CrossEntropyLoss(), bs, W, collate_fn=x_and_y, shuffle=None)

def dealt(items, W, bs):
    "Rows of 6 files of 4, in the order in which W ranks read them that take every W-th file and batches of `bs`"
    own = [[o for k in range(r, 6, W) for o in items[4*k:4*k+4]] for r in range(W)]
    return [o for i in range(0, len(items)//W, bs) for r in range(W) for o in own[r][i:i+bs]]

@client('datasets', '`split_dataset_by_node`, one epoch: in others it deals files in another way', epochs=1)
def hf_split(bs, W):
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node
    if W > 1:
        data = Dataset.from_list(table(24)).to_iterable_dataset(num_shards=6)
        data = split_dataset_by_node(data, int(os.environ['RANK']), W)
    else: data = Dataset.from_list(dealt(table(24), bs//2, 2)).to_iterable_dataset()
    return ours(data, Dataset.from_list(table(9)), linear(), nn.CrossEntropyLoss(), bs, W, collate_fn=x_and_y, shuffle=None)

def shards(folder, rows):
    "Six tar files of WebDataset with 4 samples each"
    import webdataset as wds
    for k in range(6):
        with wds.TarWriter(f'{folder}/{k}.tar') as f:
            for i in range(4*k, 4*k+4): f.write({'__key__': f'{i:03}', 'x.pth': torch.tensor(rows[i]['x']), 'y.cls': rows[i]['y']})
    return f'{folder}/{{0..5}}.tar'

def of_tar(rows): return torch.stack([o[0] for o in rows]).to(torch.get_default_dtype()), torch.tensor([o[1] for o in rows])

@client('webdataset', 'a `WebDataset` of 6 files')
def web(bs, W):
    import webdataset as wds
    data = wds.WebDataset(shards(tempfile.mkdtemp(), table(24)), shardshuffle=False, nodesplitter=lambda o: o)
    data = data.decode().to_tuple('x.pth', 'y.cls')
    return ours(data, TensorDataset(*x_and_y(table(9))), linear(), nn.CrossEntropyLoss(), bs, W, shuffle=None, collate_fn=pairs)

def pairs(rows): return of_tar(rows)

@client('webdataset', '`split_by_node`')
def web_split(bs, W):
    import webdataset as wds
    rows = table(24) if W > 1 else dealt(table(24), bs//2, 2)
    data = wds.WebDataset(shards(tempfile.mkdtemp(), rows), shardshuffle=False, nodesplitter=wds.split_by_node)
    data = data.decode().to_tuple('x.pth', 'y.cls')
    return ours(data, TensorDataset(*x_and_y(table(9))), linear(), nn.CrossEntropyLoss(), bs, W, shuffle=None, collate_fn=pairs)

@client('mosaicml-streaming', '`StreamingDataset`, which deals samples itself')
def mosaic(bs, W):
    import numpy as np
    from learnerdist.all import broadcast_object, distrib_barrier, setup_distrib
    from streaming import MDSWriter, StreamingDataset
    setup_distrib()
    folder = broadcast_object(tempfile.mkdtemp())+'/data'
    if not int(os.environ.get('RANK', 0)):
        with MDSWriter(out=folder, columns=dict(x='ndarray:float32', y='int')) as f:
            for o in table(24): f.write(dict(x=np.float32(o['x']), y=o['y']))
    distrib_barrier()
    data = StreamingDataset(local=folder, batch_size=bs, shuffle=False, num_canonical_nodes=1)
    return ours(data, table(9), linear(), nn.CrossEntropyLoss(), bs, W, shuffle=None, collate_fn=x_and_y)

@client('torchdata', '`StatefulDataLoader`')
def stateful(bs, W):
    from learnerdist.all import DataLoaders, Learner
    from torchdata.stateful_dataloader import StatefulDataLoader
    data = TensorDataset(*x_and_y(table(24)))
    dls = DataLoaders(StatefulDataLoader(data, bs, shuffle=True), DataLoader(data, 8))
    return Learner(dls, linear(), nn.CrossEntropyLoss(), lambda ps, lr: torch.optim.SGD(ps, lr), lr=.05)

# --- fastai's family ----------------------------------------------------------------------------------------------------------

def series(n=24, channels=2, length=16):
    import numpy as np
    g = np.random.RandomState(0)
    return g.randn(n, channels, length).astype('float32'), np.array(list('ab'))[np.arange(n)%2], g.randn(n).astype('float32')

def split(n=24): return list(range(n-9)), list(range(n-9, n))

def of_tsai(kind, arch, y, bs, **kw):
    import learnerdist.fastai  # noqa: F401
    import tsai.basics as ts
    with contextlib.redirect_stdout(io.StringIO()):
        tfms = [None, ts.TSClassification()] if kind=='TSClassifier' else [None, ts.TSRegression()]
        kw = dict(tfms=tfms) | kw | dict(splits=split(), arch=arch, bs=[bs, 8], num_workers=0, device='cpu', opt_func=ts.SGD)
        return getattr(ts, kind)(series()[0], y, **kw)

@client('tsai', '`TSClassifier`, `FCN`', tol=1e-5)
def tsai_fcn(bs, W): return of_tsai('TSClassifier', 'FCN', series()[1], bs)

@client('tsai', '`TSClassifier`, `InceptionTime`', tol=1e-5)
def tsai_inception(bs, W): return of_tsai('TSClassifier', 'InceptionTime', series()[1], bs)

@client('tsai', '`TSForecaster`, `TSTPlus`', tol=1e-5)
def tsai_forecast(bs, W):
    x = series()[0]
    size = dict(n_layers=1, d_model=8, d_ff=8, n_heads=2, dropout=0., fc_dropout=0.)
    return of_tsai('TSForecaster', 'TSTPlus', x[:, :, -3:], bs, arch_config=size, tfms=[None, None])

@client('tsai', '`get_X_preds` of a `TSClassifier`', tol=1e-5)
def tsai_preds(bs, W):
    learn = tsai_fcn(bs, W)
    learn.predictions = lambda: learn.get_X_preds(series()[0][:9], bs=4)[0]
    return learn

def fastais(items, bs, model, lr=.01, **kw):
    "A fastai learner over samples; the last 9 are for validation"
    import learnerdist.fastai  # noqa: F401
    from fastai.basics import SGD, DataLoaders, Learner
    from fastai.data.load import DataLoader
    load = DataLoader(items[:-9], bs=bs, shuffle=True, num_workers=0), DataLoader(items[-9:], bs=8, num_workers=0)
    return Learner(DataLoaders(*load, device='cpu'), model, loss_func=nn.MSELoss(), opt_func=SGD, lr=lr, **kw)

def views(name, make, bs):
    "A learner of self_supervised, with views that are not drawn: a picture, and its mirror image"
    from importlib import import_module

    from fasttransform import Pipeline
    module, x = import_module(f'self_supervised.vision.{name}'), images(33)[0]
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    mirror = [Pipeline([], split_idx=0), Pipeline([lambda o: o.flip(-1)], split_idx=0)]
    model = getattr(module, f'create_{name}_model')(encoder, hidden_size=8, projection_size=4)
    return fastais([*zip(x, torch.zeros(33))], bs, model, lr=.001, cbs=make(module, mirror))

@client('self_supervised', '`SimCLR`', tol=1e-5, verdict='warned', why='pairs of one rank only: `gather_with_grad`')
def simclr(bs, W): return views('simclr', lambda m, augs: m.SimCLR(augs), bs)

@client('self_supervised', '`SimCLR`, its loss by `gather_with_grad`', tol=1e-5)
def simclr_of_all(bs, W):
    from learnerdist.all import gather_with_grad
    def make(m, augs):
        class OfAll(m.SimCLR):
            def before_batch(self):
                super().before_batch()
                self.learn.xb = self.learn.xb[0].unflatten(0, (2, -1)).transpose(0, 1),  # two views of each sample
            def lf(self, pred, *yb):
                pred = gather_with_grad(pred).transpose(0, 1).flatten(0, 1)
                return super().lf(pred, torch.arange(len(pred)).roll(len(pred)//2))
            lf.n_items = 'whole'
        return OfAll(augs)
    learn = views('simclr', make, bs)
    learn.model = Each(learn.model)
    return learn

class Each(nn.Module):
    "A model of views, for samples of two views"
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x): return self.model(x.flatten(0, 1)).unflatten(0, (-1, 2))

@client('self_supervised', '`MOCO`', tol=1e-5, verdict='warned', why='pairs of one rank only, and a queue for each rank')
def moco(bs, W): return views('moco', lambda m, augs: m.MOCO(augs, K=12), bs)

@client('self_supervised', '`BYOL`, with `sync_batchnorm` for its target', tol=1e-4)
def byol(bs, W):
    from learnerdist.all import sync_batchnorm
    def make(m, augs):
        class Synced(m.BYOL):
            def before_fit(self):
                super().before_fit()
                sync_batchnorm(self.target_model)
        return Synced(augs)
    return views('byol', make, bs)

@client('timm fastai', '`vision_learner` with a model of timm', tol=1e-5)
def timm_by_fastai(bs, W):
    import learnerdist.fastai  # noqa: F401
    from fastai.vision.all import SGD, vision_learner
    base = fastais([*zip(*images(33))], bs, nn.Identity())
    base.dls.c = 3
    return vision_learner(base.dls, 'resnet10t', pretrained=False, normalize=False, loss_func=nn.CrossEntropyLoss(), opt_func=SGD, lr=.01,
                          ps=0.)

@client('fast_tabnet', '`TabNetModel`', tol=1e-5)
def tabnet(bs, W):
    import learnerdist.fastai  # noqa: F401
    import pandas as pd
    from fast_tabnet.core import TabNetModel
    from fastai.tabular.all import SGD, Categorify, CategoryBlock, CrossEntropyLossFlat, Learner, Normalize, TabularPandas, get_emb_sz
    df = pd.DataFrame(dict(a=[float(i%7) for i in range(33)], b=[f'{i%4}' for i in range(33)], y=[i%2 for i in range(33)]))
    to = TabularPandas(df, [Categorify, Normalize], ['b'], ['a'], 'y', CategoryBlock(), splits=split(33))
    model = TabNetModel(get_emb_sz(to), 1, 2, n_d=4, n_a=4, n_steps=2)
    return Learner(to.dataloaders(bs=bs, val_bs=8, device='cpu'), model, CrossEntropyLossFlat(), opt_func=SGD, lr=.01)

def cyclegan_of(bs, opt_func):
    import learnerdist.fastai  # noqa: F401
    import numpy as np
    from PIL import Image
    from upit.data.unpaired import get_dls
    from upit.models.cyclegan import CycleGAN
    from upit.train.cyclegan import cycle_learner
    g, folder = np.random.RandomState(0), tempfile.mkdtemp()
    for i in range(24): Image.fromarray(g.randint(0, 255, (16, 16, 3), dtype='uint8')).save(f'{folder}/{i:02}.png')
    dls = get_dls(folder, folder, load_size=16, crop_size=16, bs=bs, num_workers=0, batch_tfms={})
    return cycle_learner(dls, CycleGAN(n_features=4, disc_layers=1, gen_blocks=1), opt_func=opt_func, show_imgs=False, lr=.001)

@client('upit', '`cycle_learner`', tol=1e-5, verdict='error', why='`weights-differ`: see "A second optimizer" below')
def cyclegan(bs, W):
    from fastai.optimizer import SGD
    return cyclegan_of(bs, SGD)

@client('upit', '`cycle_learner` with `average_grads`', tol=1e-4)
def cyclegan_shared(bs, W):
    from fastai.optimizer import Optimizer, sgd_step
    from learnerdist.all import average_grads
    def shared(p, **kw): average_grads([p])
    shared.order = -1
    return cyclegan_of(bs, lambda ps, lr: Optimizer(ps, [shared, sgd_step], lr=lr))

@client('fastMONAI', '`MedImageDataLoaders`, regression', tol=1e-5)
def fastmonai(bs, W):
    import learnerdist.fastai  # noqa: F401
    import numpy as np
    import pandas as pd
    import torchio
    from fastai.basics import RegressionBlock
    from fastMONAI.vision_all import SGD, Learner, MedImageDataLoaders
    x, folder = images(33, 8)[0], tempfile.mkdtemp()
    for i in range(33): torchio.ScalarImage(tensor=x[i][None].float()).save(f'{folder}/{i:02}.nii.gz')
    df = pd.DataFrame(dict(file=[f'{folder}/{i:02}.nii.gz' for i in range(33)], age=np.arange(33.)/33, valid=[i >= 24 for i in range(33)]))
    dls = MedImageDataLoaders.from_df(df, fn_col='file', label_col='age', y_block=RegressionBlock(), valid_col='valid', bs=bs, val_bs=8,
                                      num_workers=0, device='cpu')
    model = nn.Sequential(nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 1))
    return Learner(dls, model, opt_func=SGD, lr=.01)

# --- running and comparing ----------------------------------------------------------------------------------------------------

def outcome(name, bs, W):
    "What a client's run gives on this process, by name; `W=0`: alone"
    c = clients[name]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.double if c['tol'] < 1e-8 else torch.float32)
    os.chdir(tempfile.mkdtemp())
    with warnings.catch_warnings(record=True) as seen, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter('always')
        try:
            torch.manual_seed(0)
            import random

            import numpy as np
            random.seed(0)
            np.random.seed(0)
            learn = c['make'](bs, W)
            with learn.distrib_ctx(seed=0), learn.no_logging():
                learn.fit(c['epochs'])
                losses = [float(o) for o in learn.recorder.losses]
                values = [*learn.validate()] if name not in without_values else []
                preds = [] if name in without_preds else learn.predictions() if hasattr(learn, 'predictions') else learn.get_preds()[0]
            res = dict(weights=[p.detach().clone() for p in learn.model.state_dict().values()], values=values, preds=preds, losses=losses)
        except Exception as e: res = dict(error=f'{type(e).__name__}: {e}')
        finally: torch.set_default_dtype(torch.float32)
    return res | dict(said=[str(o.message) for o in seen if str(o.message).startswith('[')])

without_values = 'cyclegan', 'cyclegan_shared'
without_preds = 'detection', 'causal_lm', 'gradient_checkpointing', 'lora', *without_values

def installed(name):
    try: return version(name)
    except PackageNotFoundError: return None

def judge(name, alone, ranks):
    "(verdict, detail) of a run on some ranks"
    errors = [o['error'] for o in [alone, *ranks] if 'error' in o]
    if errors: return 'error', errors[0].split('\n')[0][:200]
    off = {k: max(distance(o[k], alone[k]) for o in ranks) for k in ('losses', 'values', 'preds', 'weights')}
    said = sorted({o.split(']')[0][1:] for r in ranks for o in r['said']})
    worst = max(off, key=off.get)
    if off[worst] <= clients[name]['tol']: return 'same', ', '.join(said)
    return 'warned' if said else 'DIFFERENT', ', '.join([*said, *(f'{k} by {v:.1g}' for k, v in off.items() if v > clients[name]['tol'])])

def rows_of(names, worlds=(2, 3), bs=2):
    "A row for each client: (name, versions, about, verdict by world size, detail)"
    for name in names:
        c = clients[name]
        versions = {p: installed(p) for p in c['packages']}
        if None in versions.values():
            yield name, versions, c, {}, 'not installed'
            continue
        res, details = {}, []
        for W in worlds:
            try: ranks = run_ranks(outcome, W, name, bs, W, timeout_s=300)
            except Exception as e: ranks = [dict(error=f'{type(e).__name__}: {e}', said=[])]
            alone = run_ranks(outcome, 1, name, bs*W, 1, timeout_s=300)[0]
            res[W], detail = judge(name, alone, ranks)
            details.append(detail)
        yield name, versions, c, res, '; '.join(dict.fromkeys(filter(None, details)))

def line(name, versions, c, res, detail):
    what = ' '.join(f'{p} {v or "-"}' for p, v in versions.items())
    verdict = ' / '.join(dict.fromkeys(res.values())) or 'missing'
    return f'| {what} | {c["about"]} | {verdict} | {c["why"] or detail} |'

def write(new):
    "Put rows, by what they are about, into the page's table, whose other rows stay"
    head, _, rest = page.read_text().partition(begin)
    old, _, rest = rest.partition(end)
    known = {o.split(' | ')[1]: o for o in old.splitlines()[2:]} | new
    rows = [known[o['about']] for o in clients.values() if o['about'] in known]
    page.write_text('\n'.join([head+begin+'| library | what | on 2 and 3 processes | |', '|---|---|---|---|', *rows, end+rest]))

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('names', nargs='*', help=', '.join(clients))
    p.add_argument('--write', action='store_true')
    args = p.parse_args()
    if unknown := {*args.names}-{*clients}: p.error(f'no client is called {", ".join(sorted(unknown))}')
    bad, new = [], {}
    for name, versions, c, res, detail in rows_of(args.names or clients):
        new[c['about']] = line(name, versions, c, res, detail)
        print(f'{name}: {res} {detail}', flush=True)
        if {*res.values()}-{c['verdict']}: bad.append(name)
        if args.write: write(new)
    if bad: print('not as expected:', *bad)
    return bool(bad)

if __name__=='__main__': sys.exit(main())
