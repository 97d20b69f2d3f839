"""Accumulation, mixed precision, clipping, seeds and Lookahead beside what plain torch does, and what is sent; that
ranks do what one process does is in the table of scenes"""
import itertools
from contextlib import suppress
import numpy as np, pytest, torch
from torch import nn
from torch.optim import SGD
from harness import close
from helpers import weights
from scenes import F32, F64, Cancels, look, make, net, points, scene, sgd
from learnerdist.all import Callback, group_rank, group_size, process_group
from learnerdist.core.random import set_seed
from learnerdist.learner.callback import CancelBatchException, CancelEpochException, CancelFitException, CancelTrainException, inner_events
from learnerdist.learner.techniques import GradientAccumulation, GradientClip, Lookahead, MixedPrecision, steps_per_epoch
from learnerdist.testing import run_ranks

class Stepped(Callback):
    "In which batches a step was taken"
    order = 90
    def before_fit(self): self.learn.stepped,self.cancelled = [],False
    def before_step(self): self.cancelled = False
    def after_cancel_step(self): self.cancelled = True
    def after_step(self):
        if not self.cancelled: self.stepped.append((self.epoch,self.iter))

def learner(W=1, **kw):
    learn = make(scene(**kw), W)
    learn.logger = lambda line: None
    return learn.add_cb(Stepped())

def fitted(*cbs, n_epoch=2, **kw):
    learn = learner(**kw)
    with learn.distrib_ctx(seed=3): learn.fit(n_epoch, cbs=cbs)
    return learn

def torchs_step(model, opt, x, y, before_step=lambda: None):
    nn.functional.mse_loss(model(x), y).backward()
    before_step()
    opt.step()
    opt.zero_grad()

def ahead(**kw): return Lookahead(SGD([nn.Parameter(torch.ones(1))], .1), **kw)

@pytest.mark.parametrize('func,kw', [
    (GradientAccumulation, dict(n_acc=0)), (MixedPrecision, dict(dtype='fp8')), (MixedPrecision, dict(dtype=F32)),
    (MixedPrecision, dict(dtype=16)), (GradientClip, dict(max_norm=0)), (GradientClip, dict(max_norm=-1.)),
    *((ahead, o) for o in (dict(k=0), dict(alpha=0.), dict(alpha=1.1))),
    (lambda **kw: learner().fit(1, cbs=MixedPrecision('bf16', **kw)), dict(init_scale=2.))])
def test_options_that_are_wrong(func, kw):
    with pytest.raises(ValueError, match=next(iter(kw))): func(**kw)

# --- accumulation -----------------------------------------------------------------------------------------------------

def test_a_group_of_one_keeps_what_is_accumulated():
    "A process group that one process has opened changes nothing"
    alone = weights(fitted(GradientAccumulation(16), bs=4, n=44))
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    try: close(weights(fitted(GradientAccumulation(16), bs=4, n=44)), alone)
    finally: torch.distributed.destroy_process_group()

def test_steps_of_an_epoch():
    "Its last batch steps"
    learn = fitted(GradientAccumulation(20), bs=8, n=44)
    assert learn.stepped==[(0,2),(0,5),(1,2),(1,5)] and steps_per_epoch(learn)==6
    for bs,n_acc,drop_last in itertools.product([1, 3, 11, 44], [1, 7, 100], [False, True]):
        learn = learner(bs=bs, n=44, dl=dict(drop_last=drop_last))
        with learn.added_cbs(GradientAccumulation(n_acc)):
            learn.fit(1)
            assert len(learn.stepped)==steps_per_epoch(learn), (bs,n_acc)

class Mine(list):
    "Split by its user"
    rank = property(lambda self: group_rank())
    num_replicas = property(lambda self: group_size())

def rank_uneven(sizes_of, n_acc):
    "Each rank has batches of its own sizes"
    with process_group():
        learn,ends = learner(),np.cumsum([0,*sizes_of[group_rank()]])
        x,y = (o.to(F64)[24*group_rank():] for o in points(48).tensors)
        parts = [(x[a:b], y[a:b]) for a,b in zip(ends, ends[1:])]
        learn.dls.loaders[0] = Mine(parts)
        with learn.distrib_ctx(seed=3), learn.added_cbs(GradientAccumulation(n_acc)): learn.fit(1)
        return learn.stepped,weights(learn),parts

def test_ranks_with_batches_of_different_sizes_step_together():
    "They count the samples of all ranks; by hand, over the mean of these samples"
    res = run_ranks(rank_uneven, 2, [[5,5,5,5,1],[2,2,9,2,2]], 14)
    learn = learner()
    opt = sgd(learn.model.parameters(), .1)
    for g in (slice(0, 2),slice(2, 3),slice(3, 5)):
        torchs_step(learn.model, opt, *(torch.cat([b[i] for *_,p in res for b in p[g]]) for i in (0, 1)))
    for steps,w,_ in res:
        assert steps==[(0,1),(0,2),(0,4)]
        close(w, weights(learn))

def test_group_of_a_loop_left_early_is_dropped():
    learn = fitted(GradientAccumulation(24), Cancels('before_batch', CancelTrainException, at=4), bs=8)
    assert learn.stepped==[(0,2),(1,2)] and all(p.grad is None for p in learn.model.parameters())
    learn = learner(bs=8)
    cbs = [Cancels('before_batch', KeyError('x'), at=4),GradientAccumulation(24)]
    with pytest.raises(KeyError): learn.fit(1, cbs=cbs)
    assert all(p.grad is None for p in learn.model.parameters())

# --- mixed precision --------------------------------------------------------------------------------------------------

def test_types_of_evaluation():
    "Those of a fit are in the notebook"
    learn,inside = learner(dtype=F32).to_bf16(),set()
    learn.model[0].register_forward_hook(lambda m,i,o: inside.add(o.dtype))
    learn.validate()
    assert learn.get_preds()[0].dtype==F32 and inside=={torch.bfloat16}

class After(Callback):
    "Whether autocast is on where it should be off"
    order,seen = 200,False
    def look(self): self.seen |= torch.is_autocast_enabled('cpu')
    after_batch = before_validate = after_train = after_fit = look

from_batch = CancelBatchException,CancelTrainException,CancelEpochException,CancelFitException,KeyError

@pytest.mark.parametrize('error', from_batch)
def test_autocast_is_left_however_a_batch_ends(error):
    for event,order in itertools.product([o for o in inner_events if 'cancel' not in o], [-5, 95]):
        if (event,error)==('after_batch', CancelBatchException): continue # there is no batch to cancel any more
        learn,after,raising = learner(dtype=F32, bs=24).to_fp16(init_scale=16.),After(),Cancels(event, error, at=0)
        raising.order = order
        with suppress(KeyError): learn.fit(1, cbs=[raising,after])
        assert not after.seen and not torch.is_autocast_enabled('cpu'), (event,order)
        learn.fit(1)
        assert weights(learn).isfinite().all()

@pytest.mark.parametrize('order', [0, 95])
def test_gradients_of_a_cancelled_batch_join_the_next_ones_at_their_scale(order):
    "A callback that cancels at `before_step` keeps the gradients; before unscaling or after it, they are not mixed up"
    cancel = Cancels('before_step', CancelBatchException, at=0)
    cancel.order = order
    a,b = (fitted(cancel, *o, dtype=F32, bs=24) for o in ((),(MixedPrecision('fp16', init_scale=16.),)))
    close(weights(a), weights(b), 3e-3)

def test_scaler_goes_on_from_its_state():
    kw = dict(dtype=F32, bs=24)
    learn,other = learner(**kw).to_fp16(init_scale=64., growth_interval=3),learner(**kw).to_fp16(growth_interval=3)
    assert learn.mixed_precision.state_dict()=={}
    learn.fit(2)
    state = learn.mixed_precision.state_dict()
    assert (state['scale'],state['_growth_tracker'])==(128., 1)
    other.mixed_precision.load_state_dict(state)
    assert other.mixed_precision.state_dict()==state
    for o in (other,learn): o.fit(2)
    assert other.mixed_precision.state_dict()==learn.mixed_precision.state_dict()!=state
    other.mixed_precision.load_state_dict({})
    assert other.mixed_precision.state_dict()['scale']==256.

def test_set_seed(monkeypatch):
    "That draws repeat themselves is in the notebook"
    cudnn = torch.backends.cudnn
    for k,v in dict(deterministic=False, benchmark=True).items(): monkeypatch.setattr(cudnn, k, v)
    set_seed(1)
    assert not cudnn.deterministic and cudnn.benchmark
    set_seed(1, reproducible=True)
    assert cudnn.deterministic and not cudnn.benchmark

def one_step(learn, opt, i=0): torchs_step(learn.model, opt, *(o[i:i+8].to(F64) for o in points(48).tensors))

def test_lookahead_saved_and_loaded(tmp_path):
    "In mid-course: two steps after the slow weights have moved"
    a,b = (learner(opt=look) for _ in range(2))
    for o in (a,b): o.path = tmp_path
    a.prepare(.1)
    for i in range(5): one_step(a, a.opt, i)
    a.save('x')
    b.load('x')
    assert b.opt.param_groups[0]['n_steps']==5
    for p,q in zip(a.model.parameters(), b.model.parameters()): assert torch.equal(a.opt.state[p]['slow'], b.opt.state[q]['slow'])
    for o in (a,b):
        for i in range(4): one_step(o, o.opt, i)
    assert torch.equal(weights(a), weights(b))
    fresh = Lookahead(SGD(net().parameters(), .1))
    fresh.load_state_dict(Lookahead(SGD(net().parameters(), .2)).state_dict()) # before the first step
    assert fresh.param_groups[0]['lr']==.2 and not fresh.state
