"""Loaders, streams and samplers that go their own way: whole batches, streams that split themselves, counts of an epoch, lengths that are
estimates, a sampler that looks at the training"""
import re
from contextlib import nullcontext
from itertools import chain, islice
import pytest, torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, default_collate, get_worker_info
from harness import all_warnings, asking, on_2_and_3
from helpers import OneFloat
from learnerdist.all import Callback, DataLoaders, Learner, gather_objects, num_distrib, rank_distrib
from learnerdist.data.distributed_dl import reindexed

pytestmark = pytest.mark.slow

N = 22

def row(i): return torch.tensor([i/N, 1.], dtype=torch.double),torch.tensor([i/N], dtype=torch.double)

class Stream(IterableDataset):
    "All numbers; `how` the user splits it: not at all, or as torch's documentation does"
    def __init__(self, how, n=N): self.how,self.n = how,n
    def __iter__(self):
        info = get_worker_info()
        workers,worker = (info.num_workers,info.id) if info and self.how else (1,0)
        rank,world = (rank_distrib(),max(num_distrib(), 1)) if self.how=='by rank' else (0,1)
        return map(row, islice(range(self.n), rank*workers+worker, None, world*workers))

class Once(IterableDataset):
    "May be read once"
    def __init__(self): self.it = map(row, range(N))
    def __iter__(self): return self.it

class Rewinds(IterableDataset):
    "Is its own iterator, and begins again at each `iter`"
    n_begun = 0
    def __iter__(self):
        self.i,self.n_begun = 0,self.n_begun+1
        assert self.n_begun<9, 'it never ends'
        return self
    def __next__(self):
        if self.i==N: raise StopIteration
        self.i += 1
        return row(self.i-1)

class OwnLoader(Rewinds):
    "The same, of batches: a loader of the user's"
    def __next__(self): return default_collate([super().__next__()])

class Deaf(DataLoader):
    "Reads its data set by itself, and no sampler"
    def __iter__(self): return iter([[t[i:i+self.batch_size] for t in self.dataset.tensors] for i in range(0, N, self.batch_size)])

class Slices(DataLoader):
    "Reads a slice from each batch's first index on, as tsai's does"
    def __iter__(self): return ([t[b[0]:b[0]+self.batch_size] for t in self.dataset.tensors] for b in self.batch_sampler)

class Seen(Callback):
    "What this rank has trained on, with weight"
    def before_fit(self): self.seen = []
    def before_batch(self):
        if self.training and not self.learn.repeated: self.seen += (self.xb[0][:,0]*N).round().int().tolist()

def fit(dl, n=1, cbs=(), ctx=True):
    "Weights, the samples of all ranks, sorted, and warnings"
    torch.manual_seed(0)
    net,seen = nn.Linear(2, 1).double(),Seen()
    learn = Learner(DataLoaders(dl), net, nn.MSELoss(), lambda ps, lr: torch.optim.SGD(ps, lr=.1))
    context = learn.distrib_ctx(seed=1) if ctx else nullcontext()
    with all_warnings() as messages, context, learn.no_logging():
        learn.fit(n, cbs=[seen,*cbs])
        every = sorted(sum(gather_objects(seen.seen), []))
    return net.weight.detach(),every,[str(o.message) for o in messages if o.category is UserWarning]

def bs(): return 4//max(num_distrib(), 1) if max(num_distrib(), 1)!=3 else 2
def data(): return TensorDataset(*map(torch.stack, zip(*map(row, range(N)))))

def streams(*_):
    "By kind and number of workers"
    n = dict(zip((None,'by worker','by rank'), (N,N,36))) # a stream that splits itself has to have as many batches on each rank
    return {(how,w): fit(DataLoader(Stream(how, n[how]), bs(), num_workers=w)) for how in n for w in (0,2)}

def others(*_):
    return dict(once=fit(DataLoader(Once(), bs())), rewinds=fit(DataLoader(Rewinds(), bs())), slices=fit(Slices(data(), bs())),
                few=fit(DataLoader(Stream(None, 10), 1, num_workers=2)))

@on_2_and_3
def test_each_sample_of_a_stream_counts_once(W, found):
    (one,),ranks = found(streams, 1),found(streams, W)
    for k in one:
        for r,got in enumerate(ranks):
            how,workers = k
            times = workers if workers and not how else 1
            assert got[k][1]==one[k][1] and len(one[k][1])==times*(36 if how=='by rank' else N), k
            split = [o for o in got[k][2] if 'Stream gives each rank another first sample' in o]
            assert len(split)==(k[0]=='by rank' and r==0)
            assert len([o for o in got[k][2] if 'repeat' in o])==(times>1 and r==0)
            if W==2 and k==(None,0): torch.testing.assert_close(got[k][0], one[k][0], rtol=0, atol=1e-12)

@on_2_and_3
def test_loaders_that_read_in_their_own_way(W, found):
    one, = found(others, 1)
    for got in found(others, W):
        for k in ('once','rewinds','slices'):
            assert got[k][1]==[*range(N)]
            if W==2: torch.testing.assert_close(got[k][0], one[k][0], rtol=0, atol=1e-12)
        assert got['few'][1]==sorted(2*[*range(10)])

def test_a_loader_that_is_its_own_iterator(): assert fit(OwnLoader(), 2)[1]==sorted(2*[*range(N)])

def evaluated(how, workers):
    "A validation loss and predictions over a stream, and whether it was found to be split"
    torch.manual_seed(0)
    learn = Learner(DataLoaders(data_loader(), DataLoader(Stream(how, N), 3, num_workers=workers)), nn.Linear(2, 1).double(), nn.MSELoss())
    with all_warnings() as messages, learn.distrib_ctx(seed=1), learn.no_logging():
        loss = learn.validate()[0]
        targs = (learn.get_preds()[1]*N).round().int().flatten().tolist()
    return loss,sorted(targs),any('another first sample' in str(o.message) for o in messages)

def data_loader(): return DataLoader(data(), 2)

def all_evaluated(W, *_):
    return {o: evaluated(*o) for o in [(None,0),('by rank',0),*[('by rank',2)]*(W==2)]}

@on_2_and_3
def test_evaluation_of_a_stream_that_splits_itself(W, found):
    one, = found(all_evaluated, 1)
    for r,got in enumerate(found(all_evaluated, W)):
        for (how,w),(loss,targs,found) in got.items():
            alone = one[how,0]
            assert targs==alone[1]==[*range(N)] and loss==pytest.approx(alone[0]), (how,w)
            assert found==(how is not None and r==0)

class Halves(DataLoader):
    "Splits itself among ranks, which nothing can know: it gives a rank every W-th of the batches that it was dealt"
    def __iter__(self): return islice(super().__iter__(), rank_distrib(), None, max(num_distrib(), 1))

class Headed(Stream):
    "Says how long it is, and splits itself among ranks; its first samples are the same"
    def __init__(self): super().__init__('by rank', N-1)
    def __len__(self): return N
    def __iter__(self): return chain([row(0)], super().__iter__())

class Ignores:
    "Is registered by a function that does not split it"
    batch_size,dataset = 2,None
    def __len__(self): return N//2
    def __iter__(self): return iter(DataLoader(data(), 2))

def whole(dl, dealer):
    dealer.order(range(N), False)
    return Ignores()

def sampler(n, rank=0): return DataLoader(data(), 2, sampler=DistributedSampler(range(N), n, rank))
LIARS = dict(deaf=(lambda: Deaf(data(), 2), 'rank . has seen 11 batches of a Deaf in this epoch, and .* are its own: if it skips'),
    halves=(lambda: Halves(data(), 2), 'rank . has seen 3 batches of a Halves in this epoch, and 6 are its own'),
    headed=(lambda: DataLoader(Headed(), 2), 'rank . has seen 1[12] of the 22 samples of a Headed: its length is wrong, or it splits'),
    ignores=(Ignores, 'rank . has seen 11 batches of a Ignores in this epoch, and 6 are its own'),
    split=(lambda: sampler(4), 'a sampler deals rank 0 of 4 its samples, and rank 0 of 2 reads them'),
    rank=(lambda: sampler(2), 'a sampler deals rank 0 of 2 its samples, and rank 1 of 2 reads them'))

def wrong(*_):
    "The error of each liar, on this rank"
    reindexed.register(Ignores, whole)
    res = {}
    for k,(make,_) in LIARS.items():
        try: fit(make())
        except Exception as e: res[k] = f'{e} {e.__cause__}'
    return res

def test_a_wrong_count_is_an_error(found):
    assert found(wrong, 1)==[{}]
    ranks = found(wrong, 2)
    for k,(_,match) in LIARS.items(): assert any(re.search(match, o.get(k, '')) for o in ranks), k

# --- samplers of the user's: their length is an estimate, or they look at the training ------------------------------------------

class Tokens:
    "Batches of up to 12 tokens, `joined` to one; `length` is what it gives as their number"
    def __init__(self, length, joined=1): self.length,self.joined = length,joined
    def __len__(self): return -(-self.length//self.joined)
    def batches(self):
        b,n = [],0
        for i in range(N):
            if n+1+i*7%5>12:
                yield b
                b,n = [],0
            b,n = [*b,i],n+1+i*7%5
        yield b
    def __iter__(self):
        it = self.batches()
        while bs := [*islice(it, self.joined)]: yield sum(bs, [])

class Guessed:
    "All places, backwards; `length` is what it gives as their number"
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __iter__(self): return iter(range(N)[::-1])

def of_samples(length, workers): return fit(DataLoader(data(), 12//max(num_distrib(), 1), sampler=Guessed(length), num_workers=workers), 2)

def estimates(W, *_):
    "By the length that is given; there are 7 batches of tokens and 22 samples. One process joins the batches of `W` ranks"
    joined = W if num_distrib()<2 else 1
    tokens = {('tokens',o): fit(DataLoader(data(), batch_sampler=Tokens(o, joined)), 2) for o in (1,7,20)}
    return tokens | {('samples',*o): of_samples(*o) for o in ((5,0),(7,1),(100,0))}

@on_2_and_3
def test_lengths_that_are_estimates(W, found):
    one,ranks = estimates(W),found(estimates, W)
    for k,(weights,places,_) in one.items():
        assert places==sorted(2*[*range(N)]), k
        for r in ranks: assert r[k][1]==places and (r[k][0]-weights).abs().max()<1e-9, k

class Widening:
    "Draws from the first `k` samples only, which a callback changes"
    def __init__(self): self.k,self.g = 6,torch.Generator().manual_seed(3)
    def __len__(self): return 96
    def __iter__(self):
        for _ in range(96): yield int(torch.randint(self.k, (1,), generator=self.g))
class Widen(Callback):
    def __init__(self, sampler): self.sampler = sampler
    def after_step(self): self.sampler.k = min(N, 6+2*self.learn.train_iter)

def widening(*_, ctx=True):
    sampler = Widening()
    return fit(DataLoader(data(), 12//max(num_distrib(), 1), sampler=sampler), 2, [Widen(sampler)], ctx)

@pytest.mark.parametrize('W', [1,2])
def test_a_sampler_that_looks_at_the_training(W, found):
    weights,places,_ = widening(ctx=False)
    for w,seen,_ in found(widening, W): assert seen==places and (w-weights).abs().max()<1e-9

# --- fastai's -----------------------------------------------------------------------------------------------------------------

def fit_sliced(shuffle):
    "A loader like tsai's: `do_item` passes indices on, and `create_batch` reads a slice from the first one"
    from fastai.data.core import DataLoaders as FastaiDataLoaders, TfmdDL
    from fastai.learner import Learner as FastaiLearner
    import learnerdist.fastai # noqa: F401
    class Sliced(TfmdDL):
        def do_item(self, i): return i or 0
        def create_batch(self, b):
            if self.shuffle: return default_collate([self.dataset[i] for i in b])
            return tuple(t[b[0]:min(self.n, b[0]+self.bs)] for t in self.dataset.tensors)
    torch.manual_seed(0)
    net = nn.Linear(2, 1).double()
    train,valid = Sliced(data(), bs=bs(), shuffle=shuffle, num_workers=0),Sliced(data(), bs=5, num_workers=0)
    learn = FastaiLearner(FastaiDataLoaders(train, valid), net, OneFloat(nn.MSELoss()), lr=.1)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=1):
        learn.fit(1)
        loss = learn.recorder.values[-1][1]
        preds,targs = learn.get_preds()
    return net.weight.detach(),(targs*N).round().int().flatten().tolist(),loss

def sliced(*_): return [fit_sliced(o) for o in (False,True)]

def test_fastai_loaders_that_slice(found):
    for got in found(sliced, 2):
        for (weights,targs,loss),one in zip(got, found(sliced, 1)[0]):
            torch.testing.assert_close(weights, one[0], rtol=0, atol=1e-9)
            assert targs==one[1]==[*range(N)] and loss==pytest.approx(one[2])

def of_lists(kind):
    "Weights after a fit on a list of batches, which rank 0 alone has used before the context; and the batches of this rank"
    from fastai.data.core import DataLoaders as FastaiDataLoaders
    from fastai.learner import Learner as FastaiLearner
    import learnerdist.fastai # noqa: F401
    torch.manual_seed(0)
    net,train,valid = nn.Linear(2, 1).double(),[*DataLoader(data(), 1)],[*DataLoader(data(), 5)]
    if num_distrib()<2: train = [[torch.cat(o) for o in zip(*train[i:i+2])] for i in range(0, N, 2)]
    kw = dict(lr=.1, opt_func=torch_sgd, metrics=distance)
    if kind=='fastai': learn = FastaiLearner(FastaiDataLoaders(train, valid), net, OneFloat(nn.MSELoss()), **kw)
    else: learn = Learner(DataLoaders(train, valid), net, nn.MSELoss(), lambda ps, lr: torch.optim.SGD(ps, lr=.1), metrics=distance)
    with learn.no_logging():
        if not rank_distrib(): learn.validate() # a cache that only rank 0 has
        with learn.distrib_ctx(seed=1):
            learn.fit(1)
            values,n = [float(o) for o in learn.validate()],len(learn.dls.train)
    return net.weight.detach(),values,n

def distance(p, t): return (p-t).abs().mean()

def torch_sgd(ps, lr):
    from fastai.optimizer import SGD
    return SGD(ps, lr)

def lists(*_): return {k: of_lists(k) for k in ('ours','fastai')}

found = asking(alone=(streams, others, all_evaluated, estimates, widening, sliced, lists, wrong))

def test_lists_of_batches_and_a_rank_that_has_validated_alone(found):
    one, = found(lists, 1)
    for got in found(lists, 2):
        for k in one:
            torch.testing.assert_close(got[k][0], one[k][0], rtol=0, atol=1e-9)
            assert got[k][1]==pytest.approx(one[k][1]) and got[k][2]==one[k][2]==N//2, k
