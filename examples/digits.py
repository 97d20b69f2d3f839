"""Handwritten digits, on as many processes as the launcher starts:

    python -m learnerdist.launch --nproc 2 examples/digits.py

The same run on one process, at the same global batch size: `python examples/digits.py --bs 64`"""
# ruff: noqa: F403,F405
import argparse

import torch
from learnerdist.all import *
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

def get_dls(bs):
    "Loaders over the 1,797 images of 8×8 pixels that come with scikit-learn: 1,400 to train on, 397 to validate"
    digits = load_digits()
    x,y = torch.tensor(digits.images, dtype=torch.float32)[:,None]/16,torch.tensor(digits.target)
    train,valid = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).split(1400)
    return DataLoaders.from_dsets(TensorDataset(x[train], y[train]), TensorDataset(x[valid], y[valid]), bs=bs)

def conv(n_in, n_out, stride=2):
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU())

def digits_net():
    return nn.Sequential(conv(1, 16, stride=1), conv(16, 32), conv(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

def sgd(params, lr): return torch.optim.SGD(params, lr=lr, momentum=.9)

def parse_args():
    p = argparse.ArgumentParser(description='Train a small conv net on handwritten digits')
    p.add_argument('--epochs', type=int, default=5)
    p.add_argument('--bs', type=int, default=32, help='batch size of each process')
    p.add_argument('--lr', type=float, default=.1, help='highest rate of the cycle')
    p.add_argument('--seed', type=int, default=42, help='of the first weights and of the shuffling')
    return p.parse_args()

def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    learn = Learner(get_dls(args.bs), digits_net(), nn.CrossEntropyLoss(), opt_func=sgd, metrics=accuracy)
    with learn.distrib_ctx(seed=args.seed): learn.fit_one_cycle(args.epochs, args.lr)
    if rank_distrib()==0: print(f'accuracy {learn.final_record[-1]:.4f}')

if __name__=='__main__': main()
