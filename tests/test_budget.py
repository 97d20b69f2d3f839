"What a step and a batch of validation may take, counted: calls of Python functions. Times would depend on the machine"
import sys
from pathlib import Path
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from learnerdist.all import DataLoaders, DistributedDL, Learner, ProgressCallback, accuracy, group_rank, group_size, process_group
from learnerdist.core.env import in_group
from learnerdist.testing import run_ranks

BS = 4

def calls_in(func):
    "How many Python functions `func` calls, by it or by what it calls, in this thread"
    n = 0
    def count(frame, event, arg):
        nonlocal n
        n += event=='call'
    sys.setprofile(count)
    try: func()
    finally: sys.setprofile(None)
    return n

def data(n_batches):
    g = torch.Generator().manual_seed(n_batches)
    n = BS*group_size()*n_batches
    return DataLoader(TensorDataset(torch.randn(n, 3, generator=g), torch.randint(4, (n,), generator=g)), BS)

def model(): return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))

def ours(n_batches):
    learn = Learner(DataLoaders(data(n_batches), data(n_batches)), model(), F.cross_entropy, torch.optim.SGD, lr=.1, metrics=accuracy)
    learn.remove_cb(ProgressCallback)
    with learn.distrib_ctx(seed=1), learn.no_logging():
        learn.fit(1) # whatever is imported and made at first
        both = calls_in(lambda: learn.fit(1))
        return both,calls_in(learn.validate)

def bare(n_batches):
    m = model()
    opt,ddp = torch.optim.SGD(m.parameters(), lr=.1),DistributedDataParallel(m) if in_group() else m
    dl = DistributedDL.from_dl(data(n_batches), group_rank(), group_size())
    def train():
        for x,y in dl:
            F.cross_entropy(ddp(x), y).backward()
            opt.step()
            opt.zero_grad()
    @torch.no_grad()
    def valid(): return [accuracy(m(x), y)*len(y)+F.cross_entropy(m(x), y) for x,y in dl]
    train()
    return calls_in(train)+calls_in(valid),calls_in(valid)

def rank_calls(learner_calls):
    "Python calls of a training step and of a batch of validation beyond those of a loop written by hand"
    with process_group():
        few,many = [[a-b for a,b in zip(learner_calls(n), bare(n))] for n in (4, 12)]
        both,valid = ((b-a)/8 for a,b in zip(few, many))
        return both-valid,valid

# What our Learner adds: its events, the callbacks that answer them, the recorder and its metrics, and on several ranks the items that a
# loss counts, added up over ranks, the mean of gradients in shared memory, what is trained, and the vote.
# A change that needs more says so here, and in benchmarks/README.md what it costs. Streams are seeded once more, for what is drawn after a
# backward pass: 6 calls
@pytest.mark.parametrize('W,step,batch', [(1, 73, 48), (2, 127, 66)])
def test_python_calls(W, step, batch):
    for steps,batches in run_ranks(rank_calls, W, ours):
        assert step/2<steps<=step and batch/2<batches<=batch

def rank_walks(tools):
    sys.path.insert(0, tools)
    from walks import walk, walks
    return [walk(o) for o in walks]

def test_walks():
    "What a reader follows on 2 ranks: calls of the package's functions in a step, and until the first sample; and in how many modules"
    (step,_,files,_),(index,_,more,_) = run_ranks(rank_walks, 2, str(Path(__file__).parent.parent/'tools'))[0]
    # a data set's own random generators are looked for at an epoch's first sample; what ranks compare at the beginning takes the links of
    # votes, whose rows Python sends: 46 calls in place of 8 collectives. Those of the model, the loss and callbacks: 96 calls
    assert step<=121 and files<=13 and index<=550 and more<=25
