"Orders, data and draws that would differ between ranks: found and named, or the same by construction"
import random, re, threading, time
from pathlib import Path
from types import SimpleNamespace
import fastai.basics as fb, learnerdist.fastai, numpy as np, pandas as pd, pytest, torch # noqa: F401
from fastai.callback.data import WeightedDL
from torch import nn
from torch.optim.swa_utils import update_bn
from harness import all_warnings, asking, error_of, on_2_and_3
from helpers import Stream
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, TensorDataset, default_collate
from learnerdist.all import Callback, DataLoaders, Learner, TfmdDL, gather_objects, group_rank, num_distrib, rank_distrib

pytestmark = pytest.mark.slow

N = 24
X = torch.arange(N, dtype=torch.double)[:,None]/N
def data(): return TensorDataset(X, X)
def size(): return max(num_distrib(), 1)

class Seen(Callback):
    "What this rank has trained on"
    def before_fit(self): self.seen = []
    def after_batch(self):
        if self.training: self.seen += [round(o, 6) for o in self.xb[0][:,0].tolist()]

def fitted(train, valid=None, n=1, cbs=(), **ctx):
    "What all ranks have trained on; what was raised, and warned of"
    net,seen = nn.Linear(1, 1).double(),Seen()
    learn = Learner(DataLoaders(train, valid), net, nn.MSELoss(), lambda ps, lr: torch.optim.SGD(ps, lr=.1))
    error,every = '',[]
    with all_warnings() as messages, learn.no_logging():
        try:
            with learn.distrib_ctx(seed=1, timeout_s=60, **ctx):
                learn.fit(n, cbs=[seen,*cbs])
                every = sum(gather_objects(seen.seen), [])
        except Exception as e: error = f'{type(e).__name__}: {e}'
    return len({*every}),error,[str(o.message) for o in messages if o.category is UserWarning]

# --- the order ---

class Own:
    "Draws from a generator of its own"
    def __len__(self): return N
    def __iter__(self): return iter(np.random.default_rng().permutation(N).tolist())

class Hard:
    "A sampler whose weights this rank has computed"
    def __len__(self): return N
    def __iter__(self): return iter(torch.multinomial(torch.arange(1., N+1)**group_rank(), N).tolist())

class Lists(Own):
    def __len__(self): return N//4
    def __iter__(self): return iter(np.random.default_rng().permutation(N).reshape(-1, 4).tolist())

def of_fastai():
    class Shuffles(fb.TfmdDL):
        def shuffle_fn(self, idxs): return np.random.default_rng().permutation(idxs).tolist()
    items = [(o,o) for o in X.float()]
    weights = np.arange(1, N+1)**float(rank_distrib())
    res = []
    for dl in (Shuffles(items, bs=4, shuffle=True), WeightedDL(items, bs=4, shuffle=True, wgts=weights)):
        learn = fb.Learner(fb.DataLoaders(dl, fb.TfmdDL(items, bs=4)), nn.Linear(1, 1), nn.MSELoss())
        with learn.no_bar(), learn.no_logging(): res.append(error_of(learn.fit, 1, ddp=dict(seed=1, checks='error')))
    return res

def orders(W, rank, path):
    "By kind of sampler; in evaluation"
    makes = dict(own=dict(sampler=Own()), hard=dict(sampler=Hard()),
                 batches=dict(batch_sampler=BatchSampler(Own(), 4, False)), lists=dict(batch_sampler=Lists()))
    res = {k: fitted(DataLoader(data(), **o), checks='error') for k,o in makes.items()}
    res['warned'] = fitted(DataLoader(data(), **makes['own']))
    res['alike'] = fitted(DataLoader(data(), 4, shuffle=True), n=2, checks='error')
    res['valid'] = fitted(DataLoader(data(), 4), DataLoader(data(), 4, sampler=Own()))
    return res,of_fastai()

def test_orders_that_differ(found):
    for r,(got,errors) in enumerate(found(orders, 2)):
        assert got['alike']==(N,'',[])
        assert got['valid'][1].startswith('RuntimeError: [different-orders] Own gives each rank another order')
        n,error,messages = got['warned']
        assert n<N and not error and len(messages)==(r==0) and all(o.startswith('[different-orders] ') for o in messages), messages
        for k in ('own','hard','batches','lists'): assert got[k][1].startswith('ValueError: [different-orders] '), (k,got[k])
        for o,kind in zip(errors, ('Shuffles','WeightedDL'), strict=True):
            assert o.startswith(f'ValueError: [different-orders] {kind} gives'), o

# --- draws ---

rng = np.random.default_rng(0)
def of_streams(): return torch.rand(()).item()+np.random.rand()+random.random()

class Noisy(Dataset):
    "Draws noise from the global streams, or from a generator of its own, of the class, the module, a transform, a closure"
    shared = random.Random(3)
    def __init__(self, kind):
        self.kind,self.own,self.tfms = kind,np.random.default_rng(0),[Jitter(kind)]
        old,self._torch = np.random.RandomState(2),torch.Generator() if kind=='torch' else None # torch's cannot be sent
        if kind=='around': self.around = lambda: old.rand()
    def noise(self):
        return dict(own=self.own.random, torch=lambda: torch.rand((), generator=self._torch).item(), shared=self.shared.random,
                    module=rng.random, around=getattr(self, 'around', None), tfm=self.tfms[0].draw, streams=of_streams)[self.kind]()
    def __len__(self): return N
    def __getitem__(self, i): return X[i],X[i]+self.noise()
class AtOnce(Noisy):
    def __getitems__(self, idxs): return [self[i] for i in idxs]
class Bare(Dataset):
    "Without a generator of its own: its samples are read at once until that has drawn"
    def __len__(self): return N
    def __getitem__(self, i): return X[i],X[i]+of_streams()
    __getitems__ = AtOnce.__getitems__
class Jitter:
    def __init__(self, kind): self.rng = random.Random(0)
    def draw(self): return self.rng.random()
    def __call__(self, o): return o[0],o[1]+self.draw()
def jitter(o): return o[0],o[1]+of_streams()

class Targets(Callback):
    "The noise of each sample, by epoch"
    def before_fit(self): self.noise = {}
    def before_batch(self):
        if not self.training or self.learn.repeated: return
        for x,y in zip(self.xb[0], self.yb[0]): self.noise[self.epoch,round(float(x), 6)] = float(y-x)

def noise_of(train):
    "Of all ranks"
    targets = Targets()
    learn = Learner(DataLoaders(train), nn.Linear(1, 1).double(), nn.MSELoss(), lambda ps, lr: torch.optim.SGD(ps, lr=.1), cbs=targets)
    with learn.distrib_ctx(seed=1, checks='error'), learn.no_logging():
        learn.fit(2)
        every = gather_objects(targets.noise)
    return {k: v for o in every for k,v in o.items()}

def of_fastai_noise(bs):
    "By kind of loader. Its transforms get the elements of a tuple, of which the target has a class"
    class FastaiTargets(fb.Callback): before_fit,before_batch = Targets.before_fit,Targets.before_batch
    class Target(torch.Tensor): pass
    class Jitters(fb.Transform):
        def encodes(self, o:Target): return o+of_streams()
    items = [(o,o.as_subclass(Target)) for o in X]
    kinds = dict(fastai=dict(dataset=Noisy('tfm'), shuffle=True),
                 fastai_workers=dict(dataset=Noisy('streams'), shuffle=True, num_workers=1),
                 lists=dict(dataset=fb.TfmdLists(range(N), lambda i: Noisy('streams')[i]), shuffle=True),
                 item=dict(dataset=items, shuffle=True, after_item=Jitters()),
                 fastai_stream=dict(dataset=Stream(items), n=N, after_item=Jitters()))
    res = {}
    for k,kw in kinds.items():
        targets = FastaiTargets()
        dls = fb.DataLoaders(fb.TfmdDL(bs=bs, **dict(num_workers=0) | kw), fb.TfmdDL(Noisy('tfm'), bs=bs, num_workers=0))
        learn = fb.Learner(dls, nn.Linear(1, 1).double(), lambda p, t: ((p-t)**2).mean().float(), cbs=targets)
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=1):
            learn.fit(2)
            res[k] = {k: v for o in gather_objects(targets.noise) for k,v in o.items()}
    return res

class Iterators:
    "A batch sampler whose batches may be read once"
    def __init__(self, bs): self.bs = bs
    def __len__(self): return N//self.bs
    def __iter__(self): return (iter(range(i, i+self.bs)) for i in range(0, N, self.bs))

kinds = 'own','torch','shared','module','around','tfm','streams'
def noises(W, rank, path):
    bs = 8//size()
    makes = {k: lambda k=k: DataLoader(Noisy(k), bs, shuffle=True) for k in kinds}
    makes |= dict(workers=lambda: DataLoader(Noisy('module'), bs, num_workers=1), once=lambda: DataLoader(AtOnce('own'), bs),
        after=lambda: TfmdDL(data(), bs, after_item=Jitter('')),
        stream=lambda: TfmdDL(Stream([(o,o) for o in X]), bs, after_item=Jitter('')),
        streams_workers=lambda: DataLoader(Noisy('streams'), bs, shuffle=True, num_workers=2),
        at_once=lambda: DataLoader(AtOnce('streams'), bs),
        bare=lambda: DataLoader(Bare(), bs),
        subset=lambda: DataLoader(Subset(Noisy('streams'), range(N)[::-1]), bs, shuffle=True),
        tensors=lambda: TfmdDL(data(), bs, shuffle=True, after_item=jitter),
        batches=lambda: TfmdDL(data(), batch_sampler=Iterators(bs), after_item=jitter))
    return {k: noise_of(f()) for k,f in makes.items()} | of_fastai_noise(bs)

@on_2_and_3
def test_what_is_drawn_for_a_sample(W, found):
    "Is the same at any number of ranks and workers, from the global streams or generators of data sets, and another one in each epoch"
    (one,),ranks = found(noises, 1),found(noises, W)
    for k,want in one.items():
        assert len(want)==2*N and len({*want.values()})==2*N, k
        for o in ranks: assert o[k]==want, k

# --- data ---

def drawn(): return X[torch.randperm(N, generator=torch.Generator().manual_seed(rank_distrib()))] # as if without a seed

class Data(Dataset):
    "Rows that each rank has drawn, where the comparison has to look for them"
    def __init__(self, kind):
        self.kind,rows = kind,drawn()
        self._rows = rows if kind=='private' else X
        if kind=='frame': self._frame = pd.DataFrame(rows.numpy())
        if kind=='closure': self.rows = lambda i: rows[i]
        if kind=='within': self.store = SimpleNamespace(deep=SimpleNamespace(rows=[rows.numpy()]))
        if kind=='slots': self.slots = Slots(rows)
        # what differs by rank, and is no data
        self._cache,self._made,self._lock,self.rank_folder = {},time.time(),threading.Lock(),Path(f'/tmp/{rank_distrib()}')
    def __len__(self): return N
    def row(self, i):
        if self.kind=='frame': return torch.tensor(self._frame.iloc[i].to_numpy())
        if self.kind=='within': return torch.tensor(self.store.deep.rows[0][i])
        return self.slots.rows[i] if self.kind=='slots' else self.rows(i) if self.kind=='closure' else self._rows[i]
    def __getitem__(self, i):
        if self.kind=='global': return the_rows[i],the_rows[i]
        self._cache[i] = self.row(i)
        return self._cache[i],self._cache[i]
    def set_epoch(self, epoch):
        if self.kind=='redrawn' and epoch: self._rows = drawn()

class Slots:
    __slots__ = 'rows',
    def __init__(self, rows): self.rows = rows

def different(W, rank, path):
    global the_rows
    the_rows = drawn()
    kinds = 'alike','private','frame','closure','within','slots','global','redrawn'
    res = {k: fitted(DataLoader(Data(k), 4), n=1+(k=='redrawn'), checks='error') for k in kinds}
    return res|dict(warned=[fitted(DataLoader(Data(k), 4), n=2) for k in ('private','redrawn')])

def test_data_that_differ(found):
    for r,got in enumerate(found(different, 2)):
        assert got.pop('alike')==(N,'',[])
        for _,error,messages in got.pop('warned'):
            assert not error and len(messages)==(r==0) and all(o.startswith('[different-data] ') for o in messages), (error,messages)
        for k,(_,error,_) in got.items():
            assert error.startswith('ValueError: [different-data] '), (k,error)
            assert k=='redrawn' or re.search(r'training data\[\d+\]: #', error), (k,error)

# --- a share that is read by hand ---

class Looks(Callback):
    "At a batch of the loaders in a fit"
    def before_fit(self):
        for dl in self.dls: next(iter(dl))

def by_hand(W, rank, path):
    "What update_bn makes of a rank's share, and of all data; warnings"
    res,net = [],nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double()
    dls = DataLoaders(DataLoader(data(), 4, shuffle=True), DataLoader(data(), 4))
    learn = Learner(dls, net, nn.MSELoss(), torch.optim.SGD, cbs=Looks())
    with all_warnings() as messages, learn.distrib_ctx(seed=1), learn.no_logging():
        for read in (lambda: learn.dls.train.all_data(), lambda: learn.dls.train, lambda: learn.dls.valid):
            learn.fit(1)
            update_bn(read(), net)
            res.append((net[0].running_mean.item(),len([o for o in messages if '[read-by-hand]' in str(o.message)])))
    return res

def test_a_share_that_is_read_by_hand(found):
    (a,b),mean = found(by_hand, 2),X.mean().item()
    assert abs(a[0][0]-mean)<1e-9 and a[0][0]==b[0][0] and a[1][0]!=b[1][0] and a[2][0]!=b[2][0]
    assert [n for _,n in a]==[0,1,2] and [n for _,n in b]==[0,0,0]

# --- batches without a good sample ---

def good(b):
    "Samples that are not bad; None without any"
    b = [o for o in b if round(float(o[0])*N)%8 not in bad]
    return default_collate(b) if b else None
bad = (1,3,5) # on two ranks with 2 samples in a batch: rank 1 has no sample in each second step, the first one among them
def skipping(workers=0):
    torch.manual_seed(0)
    net,seen = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double(),Seen()
    dl = TfmdDL(data(), 4//size(), collate_fn=good, num_workers=workers, after_batch=lambda b: [b[0],2*b[1]])
    learn = Learner(DataLoaders(dl), net, nn.MSELoss(), lambda ps, lr: torch.optim.SGD(ps, lr=.1), cbs=seen)
    with learn.distrib_ctx(seed=1, checks='error'), learn.no_logging(): learn.fit(2)
    return [o.tolist() for o in net.state_dict().values()],learn.recorder.losses

def with_and_without_workers(W, rank, path): return [skipping(),skipping(1)]
found = asking(alone=(orders, noises, different, by_hand, with_and_without_workers))

def test_a_rank_without_a_good_sample(found):
    one = skipping()
    for got in sum(found(with_and_without_workers, 2), []):
        for a,b in zip([*one[0],one[1]], [*got[0],got[1]]): np.testing.assert_allclose(a, b, rtol=1e-9)
