"One view over ranks: whose seconds, who is waited for and in what, MFU, a profile of some steps"
import json, time, warnings
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from learnerdist.all import *
from learnerdist.distributed.timer import slowest_rank
from learnerdist.testing import run_ranks

class Sleepy(Dataset):
    "One rank reads slowly"
    def __init__(self, n, secs): self.n,self.secs = n,secs
    def __len__(self): return self.n
    def __getitem__(self, i):
        if self.secs and group_rank()==1: time.sleep(self.secs)
        return torch.full((6,), i/self.n),i%3

class SlowStep(Callback):
    def after_pred(self):
        if group_rank()==1 and self.training: time.sleep(.15)

def learner(secs=0, bs=4, n=64, cbs=(), path=None):
    data = TfmdDL(Sleepy(n, secs), bs)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return Learner(DataLoaders(data), model, F.cross_entropy, cbs=[Timer,*cbs], path=path).remove_cb(ProgressCallback)

def rank_slow(where, W):
    learn = learner(n=32*W, secs=.05 if where=='data' else 0, cbs=[SlowStep] if where=='step' else [])
    with warnings.catch_warnings(record=True) as found, process_group():
        warnings.simplefilter('always')
        with learn.no_logging(), learn.distrib_ctx(seed=1, checks=False): learn.fit(2)
        told = [str(o.message) for o in found if 'the others wait' in str(o.message)]
        return learn.recorder.rank_times,learn.recorder.straggler,told,learn.recorder.times

@pytest.mark.parametrize('where,W', [('data', 2), ('step', 3)])
def test_the_rank_that_is_waited_for(where, W):
    res = run_ranks(rank_slow, W, where, W)
    for r,(rows,line,told,own) in enumerate(res):
        assert len(rows)==2 and all(len(o)==W for o in rows) and rows==res[0][0]
        for e in range(2):
            assert rows[e][1][where]>.8 and all(o[where]<.4*rows[e][1][where] for i,o in enumerate(rows[e]) if i!=1)
            assert own[e]['data']==pytest.approx(rows[e][r]['data']) and own[e]['comm']==pytest.approx(rows[e][r]['comm'], abs=.05)
            assert all(o['comm']>.4*rows[e][1][where] for i,o in enumerate(rows[e]) if i!=1)
        assert f"rank 1, which is slower in {dict(data='loading data', step='its step')[where]}" in line
        assert len(told)==(r==0) and (r or 'epoch 0: the others wait' in told[0])

def test_the_line():
    fast,even = dict(data=.1, step=.5, comm=.9, total=1.5),dict(data=.1, step=1.3, comm=.1, total=1.5)
    assert slowest_rank([even, even]) is None and slowest_rank([fast]) is None
    assert 'for rank 0, which is slower in its step (1.30 s, the others 0.50 s)' in slowest_rank([even, fast, fast])
    assert 'wait 0.90 of 1.50 s (60%) for rank 1, which is slower in the exchange' in slowest_rank([fast, dict(fast, comm=0.), fast])
    assert slowest_rank([even, dict(fast, total=0.)]) is None and slowest_rank([even, fast], least_s=1.) is None

def rank_mfu(path, compiled):
    cbs = [FlopCount(peak=1e10), Profile(start=2, n=2, rank=1, file='p.json')]
    learn = learner(cbs=cbs, path=path)
    if compiled: learn.compile(backend='eager')
    with learn.no_logging(), learn.distrib_ctx(seed=1): learn.fit(2)
    return learn.flop_count.per_sample,learn.recorder.mfu,[o['samples_per_s'] for o in learn.recorder.times],learn.profile.table

def test_mfu_and_profile(tmp_path):
    by_hand = 2*6*16*2+2*16*3*3 # forward and gradients of both weights, and of the second layer's input
    for r,(n,mfu,rate,table) in enumerate(run_ranks(rank_mfu, 2, tmp_path, True)):
        assert n==pytest.approx(by_hand, rel=.01) and mfu==pytest.approx([o*by_hand/2e10 for o in rate], rel=.01)
        assert (table is None)==(r==0) and (r==0 or 'aten::' in table)
    events = json.loads((tmp_path/'p.json').read_text())['traceEvents']
    assert sum(o['name']=='Optimizer.step#AdamW.step' for o in events)==2
    with pytest.raises(ValueError, match='FlopCount'): learner().recorder.mfu # noqa: B018
    for bad in (dict(n=0), dict(start=-1)):
        with pytest.raises(ValueError, match='at least one step'): Profile(**bad)
    with pytest.raises(ValueError, match='peak='): FlopCount(0)
