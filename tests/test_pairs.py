"Two at a time of what may happen in a fit: on 2 ranks each pair is what it is on one process, and `verify` says so"
import itertools
import pytest, torch
from torch.utils._pytree import tree_map
from harness import Failed, caught, close
from scenes import Cancels, make, net, normed, result, run, scene
from helpers import At
from simulated_gpu import SimulatedGPU, is_possible
from learnerdist.all import EMA, Callback, CancelBatchException, Checkpoint, group_rank, group_size, process_group
from learnerdist.testing import run_ranks
from learnerdist.verify import verify

class Validates(Callback):
    "In a training batch of each epoch"
    def before_fit(self): self.seen = []
    def after_batch(self):
        if self.training and self.iter==1: self.seen += [self.learn.validate(),self.learn.get_preds()[0]]

class Fits(Callback):
    "Another learner in a training batch of each epoch, in a context of its own"
    def before_fit(self): self.seen = []
    def after_batch(self):
        if not self.training or self.iter!=2: return
        other = scene(n=30, ctx=dict(seed=4), fits=[1])
        with torch.random.fork_rng(): self.seen.append(run(other, group_size(), group_rank())['fits'])

def cancels(): return Cancels('before_backward', CancelBatchException, at=3)
def average(): return EMA(.7, evaluate=True)
# What is added to a fit of two epochs of 4 steps: settings of a scene, or a callback. 37 samples: rank 1 repeats one in the last step
traits = dict(repeated=dict(n=37, model=net), validates=Validates, fits=Fits, cancelled=cancels, checkpoint=None, ema=average)
pairs = [*itertools.combinations(traits, 2)]

def learner(names, path='.'):
    "The learner of these traits, and its callbacks"
    added = [traits[k] for k in names if traits[k]]
    settings = [o for o in added if isinstance(o, dict)]
    learn = make(scene(**dict(model=normed) | (settings[0] if settings else {})), group_size(), group_rank())
    learn.path,learn.logger = path,lambda line: None
    return learn,[o() for o in added if not isinstance(o, dict)]

def fit(names, path='.', *more):
    "A fit of two epochs; plain data"
    with process_group(): # a fit that fails closes it
        learn,cbs = learner(names, path)
        with learn.distrib_ctx(seed=3):
            learn.fit(2, cbs=[*cbs,*more])
            res = dict(result(learn), preds=learn.get_preds())
    for cb in cbs:
        if isinstance(cb, EMA): res['average'] = dict(cb.weights)
        elif isinstance(cb, (Validates,Fits)): res[cb.name] = cb.seen
    return res

def interrupted(names, path):
    "A fit that has failed in its second epoch, and goes on from its checkpoint"
    path = path/'-'.join(names)
    with pytest.raises(ZeroDivisionError): fit(names, path, Checkpoint('ckpt', 1), At(7))
    res = fit(names, path, Checkpoint('ckpt', 1, resume=True))
    return {k: v for k,v in res.items() if k not in ('validates','fits')} # what was seen before is not there any more

def rank_pairs(path):
    def one(names): return interrupted(names, path) if 'checkpoint' in names else fit(names)
    with process_group(): pass # the store of the launch is opened
    return {k: caught(one, k) for k in pairs}

def rank_pairs_on_gpus(path):
    with SimulatedGPU(2, same_order=True): return tree_map(to_host, rank_pairs(path))
def to_host(o): return o.cpu() if isinstance(o, torch.Tensor) else o

gpus = pytest.param(rank_pairs_on_gpus, marks=[pytest.mark.long,pytest.mark.skipif(not is_possible, reason='needs a newer torch')])
@pytest.fixture(scope='module', params=[rank_pairs,gpus], ids=['cpu','simulated gpu'])
def ranks(request, tmp_path_factory): return run_ranks(request.param, 2, tmp_path_factory.mktemp('pairs'), timeout_s=300)

@pytest.mark.parametrize('names', pairs, ids='-'.join)
def test_pair(ranks, names):
    want = fit(names)
    for r in ranks:
        assert not isinstance(r[names], Failed), r[names]
        for k,got in r[names].items(): close(got, want[k])

def test_verify():
    "With all of them but a checkpoint, for which test_verify has a test"
    res = verify(fit, tuple(traits))
    assert res.same and {*res.largest}>={'gradients','weights','loss','predictions'}, res
