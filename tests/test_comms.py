"Collectives against values by hand; `rank0_first` in order, and after failures"
import os,threading,time
from pathlib import Path
import pytest, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from harness import asking
from helpers import free_port
from learnerdist.all import *
from learnerdist.core.collectives import gather_rows
from learnerdist.core.env import shared_store,wait_key
from learnerdist.testing import run_ranks

def rank_collectives():
    "By `process_group`, and in a group of the user's"
    for own in (False,True): collectives(own)

def collectives(own):
    if own: setup_distrib()
    with process_group():
        r,W = group_rank(),group_size()
        k,t = W*(W+1)//2,torch.arange(6.).view(2, 3)
        mine = t*(r+1)
        assert all_sum(mine).equal(t*k) and mine.equal(t*(r+1)) and all_sum(mine.T).equal(t.T*k)
        assert all_sum(torch.tensor([r+1, 2**40])).tolist()==[k,W*2**40]
        assert all_sum(torch.tensor(r+1.5, dtype=torch.float64)).item()==k+W*.5
        assert all_mean(torch.tensor(float([6, 1, 2][r])), [3, 1, 0][r]).item()==9/4
        assert all_mean(torch.tensor([[1., 2.]])*r, 1).shape==(1,2)
        rows = [torch.arange(i*2.).view(i, 2)+10*i for i in range(W)] # no row on rank 0
        assert [o.tolist() for o in gather_rows(rows[r])]==[o.tolist() for o in rows]
        got = gather_rows(rows[r], dst=1)
        assert got is None if r!=1 else [o.tolist() for o in got]==[o.tolist() for o in rows]
        assert [o.tolist() for o in gather_rows(torch.ones(r+1, dtype=torch.bool))]==[[True]*(i+1) for i in range(W)]
        assert [o.shape for o in gather_rows(torch.zeros(0, 2, 3))]==[(0,2,3)]*W
        halves = gather_rows(torch.ones(1, dtype=torch.bfloat16)*r)
        assert {o.dtype for o in halves}=={torch.bfloat16} and [o.item() for o in halves]==[*range(W)]
        assert not gather_rows(torch.ones(1, requires_grad=True))[0].requires_grad
        assert gather_objects({'rank': r, 'big': 'x'*r*1000 if r else None})[-1]['rank']==W-1
        assert broadcast_object(['a', r] if r==0 else None)==['a',0]
        distrib_barrier()
    assert dist.is_initialized()==own
    if own: teardown_distrib()

def test_values_by_hand(): run_ranks(rank_collectives, 3)

# --- rank0_first: order, failures, groups -----------------------------------------------------------------------------------

def note(folder, fail=(), error=ValueError):
    "Leaves a mark, and says whose marks were there"
    there = sorted(o.name for o in folder.iterdir())
    if rank_distrib() in fail: raise error(f'rank {rank_distrib()} on purpose')
    (folder/str(rank_distrib())).touch()
    return there

def meet(folder, n):
    "Returns once all the others are here as well: rank 0 first, the others together"
    if rank_distrib()==0: return
    (folder/f'm{rank_distrib()}').touch()
    while len(list(folder.glob('m*')))<n-1: threading.Event().wait(.01)

def rank_order(W, rank, path):
    folder = make_folder(path/'order')
    there = rank0_first(note, folder)
    rank0_first(meet, make_folder(folder/'meet'), 3)
    return there

def test_rank_0_first_then_the_others_together(found):
    res = found(rank_order, 3)
    assert res[0]==[] and all('0' in o for o in res[1:])

def dawdle():
    "Rank 2 gives the others a second to return before it has"
    if rank_distrib()==2: return wait_key(shared_store(), 'returned', 1)

def rank_waits(W, rank, path):
    early = rank0_first(dawdle)
    shared_store().set('returned', 'yes')
    return early

def test_nobody_returns_before_all_are_done(found): assert found(rank_waits, 3)==[None]*3

errors = (0,ValueError),(0,KeyboardInterrupt),(0,SystemExit),(1,ValueError)
failures = [([rank], own, error) for own in (False,True) for rank,error in errors]

def rank_failures(W, rank, path):
    "One after the other, without a group and in one of the user's"
    return [rank_failure(make_folder(path/str(i)), *o) for i,o in enumerate(failures)]

found = asking(alone=(rank_order, rank_waits, rank_failures))

def make_folder(path):
    path.mkdir(exist_ok=True)
    return path

def rank_failure(folder, fail, own, error):
    if own: setup_distrib()
    try: res = 'fine',rank0_first(note, folder, fail, error)
    except BaseException as e: res = type(e).__name__,str(e).split('\n')[0],'in note' in str(e),getattr(e, 'rank', None)
    is_open = dist.is_initialized()
    if own: teardown_distrib()
    return res,is_open

def test_failure_on_rank_0_reaches_all_and_on_another_rank_strands_nobody(found):
    for ([rank],own,error),res in zip(failures, zip(*found(rank_failures, 3)), strict=True):
        (zero,*_),(one,*_),(two,*_) = res
        assert [o[1] for o in res]==[own]*3
        if rank: assert one[0]=='ValueError' and zero==('fine', []) and two[0]=='fine'
        else:
            assert zero[:2]==(error.__name__,'rank 0 on purpose')
            assert one==two==('RankError', f'rank 0 failed with {error.__name__}: rank 0 on purpose', True, 0)

def dies(): os._exit(3)

def rank_dies():
    try: rank0_first(dies if rank_distrib()==0 else int)
    except RuntimeError as e: return type(e).__name__,getattr(e, 'rank', None)

def test_rank_0_dies_over_tcp():
    "Its store dies with it"
    port = free_port()
    res = run_ranks(rank_dies, 2, env=dict(LEARNERDIST_INIT_METHOD='env://', MASTER_ADDR='127.0.0.1', MASTER_PORT=port), errors='return')
    assert res[0].kind=='ProcessDied' and res[1]==('RankError', 0)

def rank_longer_than_timeout(folder):
    "Rank 0's call may outlast the timeout of collectives"
    with process_group(), process_group(timeout_s=1): return rank0_first(waits, folder)

def waits(folder):
    if rank_distrib()==0:
        t_end = time.monotonic()+2 # nothing to wait for but the clock itself: the timeout is one
        while time.monotonic()<t_end: threading.Event().wait(.1)
        (folder/'done').touch()
    return (folder/'done').exists()

def test_longer_than_the_groups_timeout(tmp_path): assert run_ranks(rank_longer_than_timeout, 2, tmp_path)==[True, True]

def rank_saves_alone(folder):
    learn = Learner(DataLoaders(TfmdDL([1., 2.], 2), path=Path(folder)), nn.Linear(1, 1), F.mse_loss)
    return learn.save('a').exists()

@pytest.mark.parametrize('address', [True, False])
def test_rank_0_saves_while_no_other_rank_is_near(tmp_path, address):
    "Under a launcher other than torchrun, rank 0 hosts the store: it must not wait for the others"
    env = dict(LEARNERDIST_INIT_METHOD='env://', WORLD_SIZE=2, RANK=0)
    if address: env |= dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=free_port())
    assert run_ranks(rank_saves_alone, 1, tmp_path, env=env)==[True]
