"""A small GPT that learns to count, sharded over as many processes as the launcher starts:

    python -m learnerdist.launch --nproc 2 examples/sharded_gpt.py

`shard=dict(blocks=Block)` spreads it: each rank has a part of the weights, and gathers a block at a time. The same run
on one process, at the same global batch size: `python examples/sharded_gpt.py --bs 32`"""
# ruff: noqa: F403,F405
import argparse

import torch
from learnerdist.all import *
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

chars = '0123456789,\n'

def lines():
    "Three numbers that follow each other, such as '107,108,109', for each of 998, in random order: numbers of characters `(998, 12)`"
    order = torch.randperm(998, generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor([[chars.index(c) for c in f'{i:03d},{i+1:03d},{i+2:03d}\n'] for i in order])

class Block(nn.Module):
    def __init__(self, n, heads):
        super().__init__()
        self.heads,self.norm1,self.norm2 = heads,nn.LayerNorm(n),nn.LayerNorm(n)
        self.qkv,self.out = nn.Linear(n, 3*n),nn.Linear(n, n)
        self.mlp = nn.Sequential(nn.Linear(n, 4*n), nn.GELU(), nn.Linear(4*n, n))
    def attend(self, x):
        q,k,v = (o.unflatten(-1, (self.heads,-1)).transpose(1, 2) for o in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    def forward(self, x):
        x = x+self.attend(self.norm1(x))
        return x+self.mlp(self.norm2(x))

class GPT(nn.Module):
    def __init__(self, n=64, layers=4, heads=4, length=16):
        super().__init__()
        self.chars,self.places = nn.Embedding(len(chars), n),nn.Embedding(length, n)
        self.blocks,self.norm = nn.ModuleList([Block(n, heads) for _ in range(layers)]),nn.LayerNorm(n)
        self.head = nn.Linear(n, len(chars), bias=False)
        self.apply(lambda m: nn.init.normal_(m.weight, std=.02) if isinstance(m, (nn.Linear,nn.Embedding)) else None)
        self.head.weight = self.chars.weight # tied
    def forward(self, x):
        x = self.chars(x)+self.places(torch.arange(x.shape[1], device=x.device))
        for o in self.blocks: x = o(x)
        return self.head(self.norm(x))

def answers(pred, y): return (pred.argmax(-1)[:,3:]==y[:,3:]).all(1).float().mean() # whether the second and third number are right
def loss_of(pred, y): return F.cross_entropy(pred.flatten(0, 1), y.flatten())

def complete(model, text):
    "`text`, and the characters that the model adds until the end of the line"
    while text[-1]!='\n' and len(text)<12:
        with torch.no_grad(): text += chars[model(torch.tensor([[chars.index(c) for c in text]]))[0,-1].argmax()]
    return text.strip()

def main():
    p = argparse.ArgumentParser(description='Train a small GPT to count')
    p.add_argument('--epochs', type=int, default=8)
    p.add_argument('--bs', type=int, default=16, help='batch size of each process')
    args = p.parse_args()
    torch.manual_seed(42)
    train,valid = [TensorDataset(o[:,:-1], o[:,1:]) for o in lines().split(800)]
    learn = Learner(DataLoaders.from_dsets(train, valid, bs=args.bs, device='cpu'), GPT(), loss_of, metrics=answers)
    with learn.distrib_ctx(seed=1, shard=dict(blocks=Block)):
        learn.fit_one_cycle(args.epochs, 3e-3)
        learn.save('gpt') # a file of the whole model
    if is_rank0(): print(complete(learn.model.eval(), '346,'))

if __name__=='__main__': main()
