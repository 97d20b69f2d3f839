"""ResNet18 on FashionMNIST, on as many processes as the launcher starts:

    python -m learnerdist.launch --nproc 2 examples/fashion_mnist.py --root ~/data

The first run downloads 30 MB to the root, on rank 0 alone. `--bs` is the size of the global batch, so that any number
of processes gives the same curve."""
# ruff: noqa: F403,F405
import argparse
from functools import partial

import torch
from learnerdist.all import *
from torch import nn
from torch.nn.functional import interpolate
from torch.utils.data import Subset, TensorDataset
from torchvision.datasets import FashionMNIST
from torchvision.models import resnet18

def get_data(root):
    "Training and validation set as torchvision gives them; what is in `root` already is not downloaded"
    return [FashionMNIST(root, train=train, download=True) for train in (True, False)]

def as_tensors(ds, limit):
    "The first `limit` samples: images `(n,28,28)` as bytes, classes `(n,)`"
    res = TensorDataset(ds.data, ds.targets)
    return Subset(res, range(min(limit, len(res)))) if limit else res

def to_rgb(b, size):
    "Grey bytes `(bs,28,28)` as floats from -1 to 1 in three channels, `(bs,3,size,size)`"
    x,y = b
    x = x[:,None]/127.5-1
    if size!=x.shape[-1]: x = interpolate(x, size=(size,size), mode='bilinear', antialias=True)
    return x.expand(-1, 3, -1, -1),y

def sgd(params, lr): return torch.optim.SGD(params, lr=lr, momentum=.9)

def parse_args(args):
    p = argparse.ArgumentParser(description='Train ResNet18 on FashionMNIST')
    p.add_argument('--root', default='data', help='folder that holds the data set, or will')
    p.add_argument('--epochs', type=int, default=10)
    p.add_argument('--bs', type=int, default=128, help='batch size of all processes together')
    p.add_argument('--lr', type=float, default=.001)
    p.add_argument('--limit', type=int, help='samples of each set to use; default: all')
    p.add_argument('--resize', type=int, default=28, help='pixels along a side of the images')
    p.add_argument('--seed', type=int, default=42, help='of the first weights and of the shuffling')
    return p.parse_args(args)

def main(args=None):
    args = parse_args(args)
    train,valid = (as_tensors(ds, args.limit) for ds in rank0_first(get_data, args.root))
    dls = DataLoaders.from_dsets(train, valid, bs=args.bs, after_batch=partial(to_rgb, size=args.resize))
    torch.manual_seed(args.seed)
    learn = Learner(dls, resnet18(num_classes=10), nn.CrossEntropyLoss(), opt_func=sgd, lr=args.lr, metrics=accuracy)
    with learn.distrib_ctx(seed=args.seed, split_batches=True): learn.fit(args.epochs)
    return learn.final_record

if __name__=='__main__': main()
