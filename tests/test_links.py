"Votes by sockets and by gloo: a rank that is slow, or leaves first; two learners at once; predictions and losses that travel or are kept"
import threading
import pytest, torch
from torch.nn import functional as F
import scenes
from scenes import F32, classes, scene
from learnerdist.all import Callback, CancelTrainException, group_rank, process_group
from learnerdist.distributed.vote_links import GlooLinks, SocketLinks
from learnerdist.testing import run_ranks

pytestmark = pytest.mark.slow

ways = pytest.mark.parametrize('env,way', [({}, SocketLinks), (dict(LOCAL_WORLD_SIZE='1'), GlooLinks)]) # the second: as on several machines

def make(n=12):
    kw = dict(n=n, n_valid=n, bs=2, val_bs=2, shuffle=False)
    return scenes.make(scene(ds=classes, loss=F.cross_entropy, dtype=F32, **kw))

class Late:
    "Rank 1 hears what the others have told it when they have long gone on"
    def __enter__(self):
        self.old = {o: o.receive for o in (SocketLinks, GlooLinks)}
        def late(links, n, n_bytes):
            if group_rank()==1: threading.Event().wait(.02)
            return self.old[type(links)](links, n, n_bytes)
        for o in self.old: o.receive = late
    def __exit__(self, *exc):
        for o,receive in self.old.items(): o.receive = receive

def rank_late():
    with Late():
        alone = in_contexts()
        with process_group(timeout_s=20): within = in_contexts()
    return (alone,within),two_learners()

def in_contexts():
    for _ in range(2):
        learn = make()
        with learn.distrib_ctx(seed=1, timeout_s=20), learn.no_logging():
            learn.fit(1)
            way = type(learn.runner.links)
        del learn
    return way

class Others(Callback):
    "Evaluate another learner while this one's vote has been cast and not read"
    order = 2000
    def __init__(self, other): self.other,self.got = other,[]
    def after_batch(self):
        if self.training and self.iter==0: self.got.append(self.other.validate())

class Cancel(Callback):
    def before_batch(self):
        if self.training and self.iter==1 and group_rank()==0: raise CancelTrainException

def two_learners():
    a,b = make(),make(9)
    want = b.validate()
    cb = Others(b)
    with process_group(), a.distrib_ctx(seed=1, timeout_s=20), b.distrib_ctx(seed=1, timeout_s=20), a.no_logging():
        a.fit(2, cbs=[cb,Cancel])
    return want,cb.got,len(a.recorder.losses)

@ways
def test_a_rank_that_hears_late_and_two_learners_at_once(env, way):
    for found,(want,got,n) in run_ranks(rank_late, 3, env=env):
        assert found==(way, way)
        assert n and got and all(o==pytest.approx(want, rel=1e-6) for o in got)

class Smooth(Callback):
    "Keeps a running loss in a tensor of its own"
    order,mean = 40,torch.zeros(())
    def after_batch(self):
        if not self.training: return
        self.mean = self.mean if self.iter else torch.zeros(())
        self.learn.loss = self.mean.mul_(.5).add_(self.learn.loss, alpha=.5)

def test_a_loss_that_its_owner_writes_into():
    plain,smooth = make(),make().add_cb(Smooth)
    for o in (plain, smooth):
        with o.no_logging(): o.fit(1)
    want,mean = [],0.
    for o in plain.recorder.losses:
        mean = .5*mean+.5*o
        want.append(mean)
    assert smooth.recorder.losses==pytest.approx(want, rel=1e-6)
