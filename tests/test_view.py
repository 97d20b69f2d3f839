"Of one rank: a profile of some steps"
import json
import pytest
from torch import nn
from torch.nn import functional as F
from helpers import data
from learnerdist.all import DataLoaders, Learner, Profile, TfmdDL
from learnerdist.testing import run_ranks

def rank_profile(path):
    profile = Profile(start=2, n=2, rank=1, file='p.json')
    learn = Learner(DataLoaders(TfmdDL(data(), 4)), nn.Linear(4, 2).double(), F.mse_loss, cbs=profile, path=path)
    with learn.no_logging(), learn.distrib_ctx(seed=1): learn.fit(2)
    return profile.table

def test_profile(tmp_path):
    tables = run_ranks(rank_profile, 2, tmp_path)
    assert tables[0] is None and 'aten::' in tables[1]
    events = json.loads((tmp_path/'p.json').read_text())['traceEvents']
    assert sum(o['name']=='Optimizer.step#AdamW.step' for o in events)==2
    for bad in (dict(n=0), dict(start=-1)):
        with pytest.raises(ValueError, match='at least one step'): Profile(**bad)
