"DistributedDL: the shares of all ranks, in one process"
from collections import Counter
from pathlib import Path
import math, random, re
from functools import partial
import numpy as np, pandas as pd, pytest, torch
from torch.utils.data import (BatchSampler, ChainDataset, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler,
                              SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, get_worker_info)
from helpers import Stream
from learnerdist.data.loaders import TfmdDL
from learnerdist.data.distributed_dl import DistributedDL, in_order, is_split, reindexed, set_epoch, shared_rng
from learnerdist.data.dealing import epoch_order, undeal

root = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

def ranks(dl, W, epoch=None, **kw):
    "Every rank's share of a loader. What ranks drew before differs, as in a real run"
    res = [DistributedDL.from_dl(dl, r, W, **kw) for r in range(W)]
    if epoch is not None: [o.set_epoch(epoch) for o in res]
    return res

def disturb():
    for f in (torch.rand, np.random.rand, lambda n: random.random()): f(1)

def read(dls):
    "Each rank's batches as lists, the global streams moving in between"
    res = []
    for dl in dls:
        disturb()
        res.append([b.tolist() if hasattr(b, 'tolist') else b for b in dl])
        if len(dls)>1: disturb()
    return res

def rows(parts): return [[o for b in part for o in b] for part in parts]
def flat(parts): return sum(rows(parts), [])
def plain(b): return b          # a collate function that keeps lists

# --- samplers ---

class GlobalDraws:
    "Yields from all three global streams, one at a time"
    def __init__(self, n): self.n = n
    def __iter__(self):
        for _ in range(self.n): yield from (random.randrange(100), int(np.random.randint(100)), int(torch.randint(100, (1,))))
    def __len__(self): return 3*self.n

class Epochs:
    epoch = 0
    def set_epoch(self, epoch): self.epoch = epoch
    def __iter__(self): return iter([100*self.epoch+i for i in range(5)])
    def __len__(self): return 5

class Anything(Dataset):
    "Any key is its own sample"
    def __getitem__(self, k): return k
    def __len__(self): return 1000

SAMPLERS = {
    'weighted': lambda: WeightedRandomSampler(torch.rand(50, generator=torch.Generator().manual_seed(0)), 31),
    'weighted with a generator': lambda: WeightedRandomSampler(torch.ones(50), 31, generator=torch.Generator().manual_seed(5)),
    'replacement': lambda: RandomSampler(range(20), replacement=True, num_samples=33),
    'part': lambda: RandomSampler(range(20), num_samples=7),
    'subset': lambda: SubsetRandomSampler([3, 1, 4, 15, 9, 26, 5]),
    'global draws': lambda: GlobalDraws(9),
    'list': lambda: [5, 3, 3, 8],
    'keys': lambda: ['a', ('b', 1), 'c', None, 2.5],
    'one': lambda: [7],
    'none': lambda: [],
}

@pytest.mark.parametrize('kind', SAMPLERS)
@pytest.mark.parametrize('W', [1, 3])
def test_user_samplers(kind, W):
    make = SAMPLERS[kind]
    sampler = make()
    g = getattr(sampler, 'generator', None)
    with shared_rng(4, 6, generators=[g] if g else []): alone = list(sampler)
    dl = DataLoader(Anything(), 2, sampler=make(), collate_fn=plain)
    for _ in range(2):                               # twice: the sampler's own generator must not move
        whole = read(ranks(dl, W, 6, seed=4, pad=False))
        assert undeal(rows(whole))==alone
    dls = ranks(dl, W, 6, seed=4)
    got = read(dls)
    longer = alone+[alone[i%len(alone)] for i in range(-len(alone)%W if alone else 0)]
    assert rows(got) == [longer[r::W] for r in range(W)]
    assert [len(o) for o in dls] == [len(o) for o in got]
    assert Counter(alone)-Counter(flat(got)) == Counter()

def test_epoch_reaches_samplers_and_data_sets():
    sampler = Epochs()
    a = ranks(DataLoader(Anything(), 2, sampler=sampler), 2, 3)
    assert rows(read(a)) == [[300,302,304], [301,303,300]]
    b = ranks(DataLoader(Anything(), batch_sampler=BatchSampler(sampler, 3, True)), 2, 1)
    assert rows(read(b)) == [[100,102,104], [101,103,100]]
    ds = Anything()
    ds.set_epoch = lambda e: setattr(ds, 'seen', e)
    ranks(DataLoader(ds), 1, 8)
    assert ds.seen==8

class Buckets(BatchSampler):
    "A subclass: its batches belong together"

@pytest.mark.parametrize('W', [1, 3])
def test_batch_samplers_are_dealt_by_the_batch(W):
    batches = [[0,1], [2,3], [4,5], [6]]
    for bs in (Buckets(SequentialSampler(range(7)), 2, False), batches):
        dls = ranks(DataLoader(range(7), batch_sampler=bs), W)
        assert read(dls) == [(batches+batches[:-4%W])[r::W] for r in range(W)]
        assert [(o.unit, len(o), o.n_total) for o in dls] == [('batch', -(-4//W), 4)]*W
        assert undeal(read(ranks(dls[0].source, W, pad=False))) == batches

# --- streams ---

class Whole(IterableDataset):
    "Does not know of workers; shuffles by the global streams, at the start and on the way"
    def __init__(self, n, shuffle=False): self.start,self.end,self.shuffle = 0,n,shuffle
    def order(self):
        items = list(range(self.start, self.end))
        if self.shuffle: random.shuffle(items)
        return items
    def __iter__(self):
        items = self.order()
        while items: yield items.pop(int(torch.randint(len(items), (1,))) if self.shuffle else 0)

class Own(Whole):
    "Splits itself, in a generator"
    def order(self):
        info = get_worker_info()
        items = list(range(self.end) if info is None else range(info.id, self.end, info.num_workers))
        if self.shuffle: random.shuffle(items)
        return items

def init_range(worker_id):
    "The idiom of torch's documentation"
    info = get_worker_info()
    ds = info.dataset
    start,end = ds.start,ds.end
    per_worker = math.ceil((end-start)/info.num_workers)
    ds.start = start+worker_id*per_worker
    ds.end = min(ds.start+per_worker, end)

STREAMS = {
    'whole': (lambda n: Whole(n), None), 'whole, shuffled': (lambda n: Whole(n, True), None), 'own': (lambda n: Own(n), None),
    'own, shuffled': (lambda n: Own(n, True), None),
    'init range': (lambda n: Whole(n), init_range),
    'chain': (lambda n: ChainDataset([Whole(n//2), Stream(range(n//2, n))]), None),
}

def test_streams_in_this_process():
    "Without batches, and one after the other. tests/test_dealing.py shows lengths, padding and what is left out"
    assert read(ranks(DataLoader(Whole(5), None), 2, 1))==[[0,2,4], [1,3,0]]
    assert read(ranks(DataLoader(STREAMS['chain'][0](5), 2), 2, 1, pad=False))==[[[0,2],[4]], [[1,3]]]

@pytest.mark.parametrize('kind,n,W,pad', [
    ('init range', 11, 2, False), ('whole, shuffled', 11, 3, True), ('own, shuffled', 11, 3, True), ('init range', 5, 2, True),
    ('own', 1, 2, True), ('whole', 2, 3, True)])
def test_streams_with_workers(kind, n, W, pad):
    "Each worker reads what it reads in one process: all of a stream that does not split itself"
    make,init = STREAMS[kind]
    dls = ranks(DataLoader(make(n), 2, num_workers=2, worker_init_fn=init), W, 1, pad=pad)
    got,times = read(dls),1 if kind.startswith(('own','init')) else 2
    if pad: assert len({len(o) for o in got})==1 and len({len(o) for o in rows(got)})==1 and set(flat(got))==set(range(n))
    else: assert sorted(flat(got))==sorted(times*[*range(n)])
    assert dls[0].n is None
    with pytest.raises(TypeError, match='2 workers'): len(dls[0])

@pytest.mark.parametrize('kind,workers', [('whole, shuffled',0), ('own, shuffled',2)])
def test_global_batches_of_streams_do_not_depend_on_world_size(kind, workers):
    make,init = STREAMS[kind]
    def steps(W, bs):
        dls = ranks(DataLoader(make(24), bs, num_workers=workers, worker_init_fn=init), W, 1)
        return [undeal(list(step)) for step in zip(*read(dls))]
    assert steps(2, 2)==steps(1, 4) and (workers or steps(4, 1)==steps(1, 4))

class EpochStream(IterableDataset):
    "A data set that is told the epoch, and shuffles by the global stream too"
    epoch = 0
    def set_epoch(self, epoch): self.epoch = epoch
    def __iter__(self): return iter([1000*self.epoch+i for i in torch.randperm(12).tolist()])

@pytest.mark.parametrize('workers', [0, 2])
def test_streams_see_new_epochs(workers):
    dls = ranks(DataLoader(EpochStream(), 2, num_workers=workers, persistent_workers=workers>0), 2)
    epochs = []
    for e in (0, 1, 0, 2):
        for o in dls: o.set_epoch(e)
        epochs.append(rows(read(dls)))
        assert sorted(sum(epochs[-1], [])) == sorted(max(workers, 1)*[1000*e+i for i in range(12)])
    assert epochs[0]==epochs[2] and [o%1000 for o in epochs[1][0]]!=epochs[0][0]

# --- settings ---

class Extra(DataLoader):
    def __init__(self, extra): super().__init__(range(8), 2, num_workers=0); self.extra = extra
    def __iter__(self): return (b+100 for b in super().__iter__())

def init(worker_id): pass

def test_settings_are_kept():
    g = torch.Generator().manual_seed(4)
    kw = dict(num_workers=1, collate_fn=plain, timeout=7, worker_init_fn=init, generator=g, prefetch_factor=3, persistent_workers=True,
              multiprocessing_context='forkserver', drop_last=True, in_order=False)
    dl = DataLoader(range(8), 2, **kw)
    a,b = ranks(dl, 2)
    for o in (a, b):
        for k in set(kw)-{'generator', 'multiprocessing_context'}: assert getattr(o, k) == kw[k]
        assert o.multiprocessing_context is dl.multiprocessing_context and o.batch_size==2 and o.dataset==range(8)
    assert a.generator is g and b.generator is not g and b.generator.initial_seed()!=4
    assert b.generator.initial_seed()==ranks(dl, 2)[1].generator.initial_seed()

def test_subclass_and_its_methods_are_kept():
    dl = ranks(Extra('x'), 2)[1]
    assert type(dl.dl) is Extra and dl.extra=='x' and [b.tolist() for b in dl]==[[102,103],[106,107]] # whole batches
    assert not hasattr(dl, 'nope')

@pytest.mark.parametrize('kw,expect', [
    (dict(bs=3), [[0,2,4],[6]]), (dict(batch_size=3, drop_last=True), [[0,2,4]]), (dict(num_workers=1), [[0,2],[4,6]]),
    (dict(sampler=[5,1,7]), [[5,7]]), (dict(collate_fn=len), [2,2]), (dict(bs=None), [0,2,4,6]), (dict(batch_sampler=[[1],[2,3]]), [[1]])])
def test_settings_can_be_changed(kw, expect):
    dl = TfmdDL(range(8), 2)
    assert read([DistributedDL.from_dl(dl, 0, 2, **kw)])[0]==expect
    assert dl.bs==2 and len(dl)==4 and [b.tolist() for b in dl][0]==[0,1]

def test_transforms_and_data_frames():
    df = pd.DataFrame(dict(a=range(5), b=range(10, 15)))
    assert [torch.cat(list(o)).tolist() for o in ranks(TfmdDL(df, 2), 2)] == [[[0,10],[2,12],[4,14]], [[1,11],[3,13],[0,10]]]
    assert read(ranks(TfmdDL(range(4), 2, after_item=str, after_batch=tuple, collate_fn=plain), 2)) == [[('0','2')], [('1','3')]]

def test_built_directly():
    dl = DistributedDL(range(10), 1, 3, bs=2, shuffle=True, seed=5, pad=False, drop_last=True, collate_fn=plain)
    assert (dl.rank, dl.world_size, dl.seed, dl.pad, dl.epoch, dl.unit, dl.n, dl.n_total, dl.bs) == (1, 3, 5, False, 0, 'row', 3, 10, 2)
    assert list(dl) == [epoch_order(10, 0, 5, True)[1::3].tolist()[:2]]
    assert list(dl.new(range(3), shuffle=False, drop_last=False)) == [[0,1],[2]] # over all the data
    assert DistributedDL(['a','b'], 0, 1, batch_size=1).one_batch()==['a']

def test_persistent_workers_reshuffle_and_one_batch_leaves_them_alone():
    dls = ranks(TfmdDL(list(range(12)), 2, shuffle=True, num_workers=1, persistent_workers=True), 2)
    for e in (0, 1):
        for o in dls: o.set_epoch(e)
        its = [iter(o) for o in dls]
        got = [[next(it).tolist()] for it in its]
        assert dls[0].one_batch().tolist()==got[0][0]
        for part,it in zip(got, its): part += [b.tolist() for b in it]
        assert undeal(rows(got)) == epoch_order(12, e, 0, True).tolist()
        assert dls[0].source._iterator is None

# --- already split, other kinds, errors ---

@pytest.mark.parametrize('dl', [
    DataLoader(range(9), sampler=DistributedSampler(range(9), 2, 1)),
    DataLoader(range(9), batch_sampler=BatchSampler(DistributedSampler(range(9), 2, 1), 2, False)),
    DataLoader(range(9), batch_sampler=Buckets(DistributedSampler(range(9), 2, 1), 2, False)), DistributedDL(range(9), 1, 2)],
    ids=['sampler', 'batch sampler', 'in a batch sampler', 'DistributedDL'])
def test_already_split(dl):
    assert is_split(dl) and DistributedDL.from_dl(dl, 1, 2) is dl
    with pytest.raises(ValueError, match='bs: this .* is split already'): DistributedDL.from_dl(dl, 1, 2, bs=3)
    set_epoch(dl, 4)
    inner = dl if isinstance(dl, DistributedDL) else getattr(dl.batch_sampler, 'sampler', None)
    assert inner.epoch==4
    ds = Whole(4)
    assert not is_split(DataLoader(ds))
    ds.splits_by_rank = True
    assert is_split(DataLoader(ds))

class Plain:
    "Batches made in its own way: each rank reads all of them"
    def __iter__(self): return (torch.rand(2) for _ in range(7))
    def __len__(self): return 7

def test_a_loader_of_an_unknown_kind():
    with pytest.raises(ValueError, match='a Plain cannot be split.*register'): ranks(Plain(), 2)
    with pytest.raises(ValueError, match='a Plain cannot be read in order'): in_order(Plain())
    with pytest.raises(ValueError, match='bs: settings of a Plain'): ranks(Plain(), 2, bs=2)

@pytest.mark.parametrize('make', [
    lambda: TfmdDL(range(20), 3, after_batch=lambda b: torch.rand(len(b))),
    lambda: DataLoader(range(20), 3, collate_fn=lambda b: torch.rand(len(b))), Plain])
def test_what_is_drawn_while_a_batch_is_evaluated_does_not_depend_on_the_ranks(make):
    one,*more = [read([DistributedDL.by_batch(make(), r, W, 5, True) for r in range(W)]) for W in (1,2,3)]
    assert len({str(b) for b in one[0]})==7 # nothing is drawn twice
    for W,shares in enumerate(more, 2): assert shares==[one[0][r::W] for r in range(W)]

@pytest.mark.parametrize('args,kw,match', [
    ((2, 2), {}, 'rank=2 with world_size=2'), ((-1, 2), {}, 'rank=-1'), ((0, 0), {}, 'world_size=0'),
    ((False, True), {}, 'rank=False with world_size=True'), ((0, 1), dict(bs=0), 'batch_size=0'),
    ((0, 1), dict(seed=1.5), r'seed=1\.5'), ((0, 1), dict(seed=None), 'seed=None')])
def test_bad_input(args, kw, match):
    with pytest.raises(ValueError, match=match): DistributedDL.from_dl(DataLoader(range(3)), *args, **kw)
    with pytest.raises(ValueError, match=match): DistributedDL(range(3), *args, **kw)

@pytest.mark.parametrize('make', [TfmdDL, partial(DistributedDL, rank=0, world_size=1)])
def test_no_setting_is_ignored(make):
    with pytest.raises(TypeError, match="'btach'"): make(range(3), btach=1)
    with pytest.raises(TypeError, match="'btach'"): DistributedDL.from_dl(DataLoader(range(3)), 0, 1, btach=1)

@pytest.mark.parametrize('make', [
    lambda: DataLoader(range(5), 2, shuffle=True, drop_last=True),
    lambda: DataLoader(range(5), 2, sampler=WeightedRandomSampler(torch.ones(5), 9)),
    lambda: DataLoader(range(5), 2, sampler=SubsetRandomSampler([4,2,0,1,3])),
    lambda: DataLoader(range(5), batch_sampler=Buckets([4,4], 2, True)),
    lambda: DataLoader(range(5), batch_sampler=BatchSampler(SubsetRandomSampler([4,2,0,1,3]), 2, True)),
    lambda: DataLoader(range(5), 2, sampler=DistributedSampler(range(5), 2, 0)), lambda: TfmdDL(range(5), 2, shuffle=True, drop_last=True),
    lambda: DistributedDL(range(5), 1, 2, bs=2, shuffle=True, drop_last=True), lambda: DataLoader(Whole(5), 2, drop_last=True)])
def test_in_order(make): assert [b.tolist() for b in in_order(make())]==[[0,1],[2,3],[4]]

class Blocks:
    "A loader of a library that torch does not know"
    def __init__(self, ds, order, bs, shuffle=False): self.ds,self.order,self.bs,self.shuffle = ds,order,bs,shuffle
    def __len__(self): return -(-len(self.order)//self.bs)
    def __iter__(self):
        found = [self.ds[i] for i in self.order]
        for i in range(0, len(found), self.bs): yield found[i:i+self.bs]

def test_the_example_of_contributing():
    "Training is dealt in the order of the epoch, an evaluation in whole batches in the loader's own"
    code = re.search(r'```python\n(@reindexed.*?)```', (root/'CONTRIBUTING.md').read_text(), re.S).group(1)
    exec(code, dict(reindexed=reindexed, in_order=in_order, Blocks=Blocks))
    for shuffle in (False,True):
        dl,order = Blocks([*range(11)], range(11), 3, shuffle),[*epoch_order(11, 0, 0, shuffle=shuffle).tolist(),0]
        shares = ranks(dl, 2, 0)
        assert flat(shares)==order[::2]+order[1::2] and [(len(o),o.n,o.n_total) for o in shares]==[(2,6,11)]*2
    dl.shuffle = False # as a loader for validation
    assert read([DistributedDL.by_batch(dl, r, 2) for r in range(2)])==[[[0,1,2],[6,7,8]], [[3,4,5],[9,10]]]
    assert [*in_order(dl)]==[*dl]
