"The arithmetic of all ranks, in one process"
from itertools import product
import pytest, torch
from learnerdist.data import sharding
from learnerdist.data.sharding import batch_count,check_rank, deal, epoch_order, mix_seed, permuted, share, share_chunks, share_len, undeal

SIZES = list(product(range(0, 41), range(1, 8)))

def by_hand(items, W, pad, base=None):
    "Every rank's share, by appending to one long list and dealing it"
    n = len(items)
    base = items if base is None else base
    longer = list(items) + [base[i%n] for i in range(-n%W if pad and n else 0)]
    return [longer[r::W] for r in range(W)]

@pytest.mark.parametrize('pad', [True, False])
def test_share_of_epoch_order(pad):
    for n,W in SIZES:
        assert all(torch.equal(share(range(n), r, W, pad), share(epoch_order(n), r, W, pad)) for r in range(W))
        for shuffle in (False, True):
            order = epoch_order(n, 3, 5, shuffle)
            got = [share(order, r, W, pad, base=range(n)) for r in range(W)]
            assert [o.tolist() for o in got] == by_hand(order.tolist(), W, pad, range(n))
            assert all(o.dtype==torch.int64 for o in got)
            assert [len(o) for o in got] == [share_len(n, r, W, pad) for r in range(W)]

@pytest.mark.parametrize('pad', [True, False])
def test_share_of_any_order(pad):
    for n,W in SIZES:
        items = [100+7*i%n for i in range(n)] if n else []
        expect = by_hand(items, W, pad)
        assert [share(items, r, W, pad) for r in range(W)] == expect
        assert [share(torch.tensor(items), r, W, pad).tolist() for r in range(W)] == expect
        assert [list(deal(iter(items), r, W, pad)) for r in range(W)] == expect

def test_undeal():
    for n,W in SIZES:
        rows = torch.rand(n, 3)
        parts = [share(rows, r, W, pad=False) for r in range(W)]
        assert torch.equal(undeal(parts), rows)
        assert undeal([p.tolist() for p in parts]) == rows.tolist()
        if 0<n<W: assert torch.equal(undeal([p if len(p) else torch.empty(0) for p in parts]), rows)

def test_deal_reads_once_and_no_further():
    read = []
    def stream():
        for i in range(100): read.append(i); yield i
    it = deal(stream(), 1, 4)
    assert [next(it), next(it)] == [1, 5]
    assert read == list(range(6))

def test_bad_numbers():
    with pytest.raises(ValueError, match="rank=False with world_size=True"): check_rank(False, True)
    with pytest.raises(ValueError, match='bs=0'): batch_count(3, 0)

def test_orders_differ_by_seed_and_epoch_and_touch_no_global_stream():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    orders = {tuple(epoch_order(30, e, s, True).tolist()) for e in range(10) for s in range(-5, 5)}
    assert len(orders)==100 and torch.equal(torch.get_rng_state(), state)

# What a seed gave in version 0.1. A run that is repeated, or goes on from a checkpoint, reads its samples in this order, so that neither
# a change of ours nor a newer torch may give another one
golden_small = [674,495,327,669,717,154,628,49],[111,652,329,680,789,105,332,828]
golden_large = [866101,613190,737674,591474,510771,159114,820329,693648],[987379,749193,459616,176568,178748,555824,158029,315706]
golden_huge = [638653779980,927661102833,628284739181,180327383237],[335576328729,640546697068,290507398109,731587598248] # by divisions

def test_the_order_of_a_seed_is_for_good():
    assert mix_seed(1, 2, 3)==4269688639849333996
    small = epoch_order(1000, epoch=3, seed=5, shuffle=True)
    assert (small[:8].tolist(),small[-8:].tolist())==golden_small
    n = 2**20+3
    assert n>sharding.large>1000
    for large in (permuted(torch.arange(n), n, 5, 3),epoch_order(n, epoch=3, seed=5, shuffle=True)):
        assert (large[:8].tolist(),large[-8:].tolist())==golden_large
    n = 2**40+1
    assert (permuted(torch.arange(4), n, 5, 3).tolist(),permuted(torch.arange(n-4, n), n, 5, 3).tolist())==golden_huge

@pytest.mark.parametrize('ints', [(), (0,), (-1, 2), (2**70, 3)])
def test_mix_seed_takes_any_integers(ints):
    assert 0 <= mix_seed(*ints) < 2**63
    assert mix_seed(*ints) != mix_seed(*ints, 0)

# --- orders too large to hold ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('n', [1, 2, 3, 10, 255, 256, 257, 4097, 99_999])
def test_permuted_is_a_permutation(n):
    orders = [permuted(torch.arange(n), n, s, 0) for s in range(3)]
    assert all(torch.equal(o.sort()[0], torch.arange(n)) for o in orders)
    if n>9: assert not any(torch.equal(a, b) for a,b in [orders[:2],orders[1:]])

def test_permuted_needs_no_other_place():
    n = 3*10**6
    places = torch.randint(n, (40, 50))
    assert torch.equal(permuted(places, n, 7), permuted(torch.arange(n), n, 7)[places])

@pytest.mark.parametrize('n', [2**31-1, 2**40+1, 10**18//2])
def test_permuted_of_huge_n_stays_in_range(n):
    got = permuted(torch.arange(n-10_000, n), n, 1)
    assert got.min()>=0 and got.max()<n and len(got.unique())==10_000

def z_score(counts, expected):
    "How many standard deviations a chi-square statistic is from its mean"
    return ((counts-expected)**2/expected).sum().sub(counts.numel()-1).div((2*(counts.numel()-1))**.5).item()

def test_permuted_is_uniform():
    "Over 400 seeds: where a place goes, how far apart two neighbours go, and which comes first; randperm has the same scores"
    n,bins = 2**20,64
    i = torch.cat([torch.arange(4096), torch.arange(n-4096, n)])
    got = torch.stack([permuted(i, n, s) for s in range(400)])
    cells = torch.bincount((got//(n//bins)*bins+torch.arange(len(i))//(len(i)//bins)).flatten(), minlength=bins*bins).double()
    gaps = torch.bincount(((got[:,1:]-got[:,:-1])%n//(n//4096)).flatten(), minlength=4096).double()
    assert abs(z_score(cells, cells.sum()/bins**2))<5 and abs(z_score(gaps, gaps.sum()/4096))<5
    rises = (got[:,1:]>got[:,:-1]).double().mean()
    assert abs(rises-.5)<5*(1/12/got.numel())**.5

@pytest.mark.parametrize('shuffle', [True, False])
def test_chunks_of_a_share(shuffle, monkeypatch):
    for large in (1, 1<<20):
        monkeypatch.setattr(sharding, 'large', large)
        for n,W in SIZES[::3]:
            order = epoch_order(n, 3, 5, shuffle)
            for r,pad in product(range(W), (True, False)):
                for start in (0, n//3, n):
                    chunks = [*share_chunks(n, r, W, pad, shuffle, 3, 5, start, size=3)]
                    want = share(order[start:], r, W, pad, base=range(n))
                    assert torch.equal(torch.cat([want[:0], *chunks]), want) and all(len(o)<=3 for o in chunks)
