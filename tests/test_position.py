"Resuming in the middle of an epoch: which samples are read again, and that all draws are those of the whole run"
import random
from pathlib import Path
import numpy as np
import pytest, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler
from helpers import At
from test_checkpoint import ToDouble
from learnerdist.all import Checkpoint, DataLoaders, Learner, TfmdDL
from learnerdist.distributed.comparison import digest
from learnerdist.testing import run_ranks

N,BS = 32,4 # 8 batches

class Noisy(Dataset):
    "Samples with noise of all three streams; it counts the reads of each, in its workers too"
    def __init__(self, n=N): self.n,self.reads = n,torch.zeros(n, dtype=torch.int64).share_memory_()
    def __len__(self): return self.n
    def __getitem__(self, i):
        self.reads[i] += 1
        return torch.full((3,), i/self.n)+.1*torch.rand(3)+random.random()+np.random.rand(),torch.tensor([i/self.n], dtype=torch.double)

class NoisyStream(Noisy, IterableDataset):
    def __iter__(self): return (self[i] for i in range(self.n))

class SavesPlace(IterableDataset):
    "A stream of items `self[i]` that saves its place, as data sets of Hugging Face do"
    i,start = 0,0
    def state_dict(self): return dict(i=self.i)
    def load_state_dict(self, state): self.start = state['i']
    def __iter__(self):
        self.i,self.start = self.start,0
        while self.i<self.n:
            self.i += 1
            yield self[self.i-1]

class Placed(SavesPlace, NoisyStream): "Its samples are shuffled in a buffer"

class Drawing(Sampler):
    "It draws from the global stream between two reads"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __iter__(self): return (torch.randint(self.n, ()).item() for _ in range(self.n))

class Unknown:
    "A loader that nobody knows"
    def __init__(self, ds): self.dataset,self.i,self.start = ds,0,0
    def __len__(self): return N//BS
    def __iter__(self):
        self.i,self.start = self.start,0
        while self.i<N//BS:
            items = [self.dataset[self.i*BS+j] for j in range(BS)]
            self.i += 1
            yield [torch.stack(o) for o in zip(*items)]

class Stateful(Unknown):
    "A loader that knows its place, as torchdata's StatefulDataLoader does"
    def state_dict(self): return dict(i=self.i)
    def load_state_dict(self, state): self.start = state['i']

class Generating(DataLoader):
    "One whose iterator begins late"
    def __iter__(self): yield from super().__iter__()

def loader(kind):
    ds,n = Noisy(),2 if 'workers' in kind else 0
    if kind=='weighted': return DataLoader(ds, BS, sampler=WeightedRandomSampler(torch.arange(N)+1., N))
    if kind=='replaced': return DataLoader(ds, BS, sampler=RandomSampler(ds, True, generator=torch.Generator().manual_seed(2)))
    if kind=='drawing': return DataLoader(ds, BS, sampler=Drawing(N))
    if kind=='stream': return DataLoader(NoisyStream(), BS)
    if kind=='placed': return DataLoader(Placed(), BS)
    if kind in ('stateful','unknown'): return (Stateful if kind=='stateful' else Unknown)(ds)
    if kind=='generating': return Generating(ds, BS, shuffle=True)
    noise = lambda b: [b[0]*random.random(),b[1]]
    return TfmdDL(ds, BS, shuffle=True, num_workers=n, persistent_workers='persistent' in kind, after_batch=noise)

def fit(path, kind, every=1000, stop=None, ctx=False, n_epoch=2):
    "What the run came to, and how often samples were read"
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    dl = loader(kind)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(.2), nn.Linear(8, 1)).double()
    learn = Learner(DataLoaders(dl), model, nn.functional.mse_loss, torch.optim.SGD, lr=.01, path=path)
    learn.logger,cbs = lambda line: None,[*([Checkpoint('ckpt', every)] if every else []), *([At(stop)] if stop else [])]
    learn.add_cb(ToDouble)
    if ctx:
        with learn.distrib_ctx(split_batches=True, checks=False): learn.fit(n_epoch, cbs=cbs, resume=True)
    else: learn.fit(n_epoch, cbs=cbs, resume=bool(every))
    vars(dl).pop('_iterator', None) # or persistent workers end when the garbage collector finds them, after 10 s
    drawn = None if ctx else (torch.rand(1).item(),random.random(),np.random.rand())
    return (digest(model.state_dict()),learn.recorder.losses,drawn),int(dl.dataset.reads.sum())

def resumed(path, kind, ctx=False):
    "After all but one of the batches of the first epoch of two: does the run end alike, and how many samples of that epoch were read?"
    path = Path(path)
    whole,n = fit(path/'whole', kind, ctx=ctx)
    try: fit(path/'cut', kind, N//BS-1, N//BS, ctx=ctx)
    except ZeroDivisionError: pass
    again,n_again = fit(path/'cut', kind, ctx=ctx)
    if not ctx: assert fit(path/'plain', kind, every=None)[0]==whole
    return again==whole,n_again-n//2

indexed = ['shuffled','weighted','replaced','drawing','generating','workers',pytest.param('workers persistent', marks=pytest.mark.long)]

@pytest.mark.parametrize('kind', [*indexed,'stateful','placed','stream','unknown'])
def test_alone_a_checkpoint_changes_nothing(kind, tmp_path):
    "Nor does a restart; what was trained on is read again, unless the loader or the stream knows its place"
    assert resumed(tmp_path, kind)==(True,BS if kind in ('stateful','placed') else N)

def in_one(path): return [resumed(path/kind, kind, True) for kind in kinds_in_one]
kinds_in_one = ['replaced','drawing','workers','placed']

def test_in_a_context_nothing_is_read_again(tmp_path):
    assert run_ranks(in_one, 1, tmp_path)==[[(True,BS)]*len(kinds_in_one)]

def test_two_ranks(tmp_path):
    assert run_ranks(resumed, 2, str(tmp_path), 'shuffled', True)==[(True,BS//2)]*2

class Numbers(SavesPlace):
    "0, 1, …; it counts what it reads, and draws a number for each"
    def __init__(self, n): self.n,self.reads = n,0
    def __getitem__(self, i):
        self.reads += 1
        return torch.tensor([float(i)]),torch.rand(1)
