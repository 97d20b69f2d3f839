"The arithmetic of all ranks, in one process"
from itertools import product
import numpy as np, pytest, torch
from learnerdist.shard import batch_count, check_rank, deal, epoch_order, mix_seed, share, share_len, undeal

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

def test_share_frees_the_whole_order():
    order = epoch_order(1000, shuffle=True)
    for pad in (True, False): assert share(order, 3, 10, pad).untyped_storage().nbytes() == 100*8

def test_undeal():
    for n,W in SIZES:
        rows = torch.rand(n, 3)
        parts = [share(rows, r, W, pad=False) for r in range(W)]
        assert torch.equal(undeal(parts), rows)
        assert undeal([p.tolist() for p in parts]) == rows.tolist()
        if 0<n<W: assert torch.equal(undeal([p if len(p) else torch.empty(0) for p in parts]), rows)

@pytest.mark.parametrize('lens', [[1,2], [3,1], [2,2,1,2]])
def test_undeal_refuses_what_was_not_dealt(lens):
    with pytest.raises(ValueError, match=str(lens).replace('[', r'\[')): undeal([torch.zeros(o) for o in lens])

def test_deal_reads_once_and_no_further():
    read = []
    def stream():
        for i in range(100): read.append(i); yield i
    it = deal(stream(), 1, 4)
    assert [next(it), next(it)] == [1, 5]
    assert read == list(range(6))

@pytest.mark.parametrize('n,bs,drop_last,expect', [
    (0,4,False,0), (0,4,True,0), (3,4,False,1), (3,4,True,0), (4,4,False,1), (4,4,True,1), (9,4,False,3), (9,4,True,2)])
def test_batch_count(n, bs, drop_last, expect): assert batch_count(n, bs, drop_last) == expect

@pytest.mark.parametrize('rank,W', [(-1,2), (2,2), (0,0), (0,-1), (1.,2), ('0',1), (None,1), (False,True)])
def test_rank_out_of_range(rank, W):
    for f in (lambda: check_rank(rank, W), lambda: share([1], rank, W), lambda: deal([1], rank, W), lambda: share_len(1, rank, W)):
        with pytest.raises(ValueError, match=f'rank={rank!r} with world_size={W!r}'): f()

def test_bad_numbers():
    with pytest.raises(ValueError, match='bs=0'): batch_count(3, 0)
    with pytest.raises(ValueError, match='n=-1'): epoch_order(-1)

def test_orders_differ_by_seed_and_epoch_and_touch_no_global_stream():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    orders = {tuple(epoch_order(30, e, s, True).tolist()) for e in range(10) for s in range(-5, 5)}
    assert len(orders)==100 and torch.equal(torch.get_rng_state(), state)

def test_mix_seed_low_bits_are_even():
    "Each of the 32 low bits, over small seeds and epochs, is set about half of the time"
    seeds = np.array([mix_seed(s, e) for s in range(64) for e in range(64)], dtype=np.uint64)
    assert len(set(seeds.tolist()))==4096 and seeds.max() < 2**63
    bits = [(seeds >> np.uint64(i) & np.uint64(1)).mean() for i in range(32)]
    assert .45 < min(bits) and max(bits) < .55

@pytest.mark.parametrize('ints', [(), (0,), (-1, 2), (2**70, 3)])
def test_mix_seed_takes_any_integers(ints):
    assert 0 <= mix_seed(*ints) < 2**63
    assert mix_seed(*ints) != mix_seed(*ints, 0)
