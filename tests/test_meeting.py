"Collectives that callbacks call: ranks that have cancelled a batch come to them, and one that is elsewhere is named at once"
import time
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import learnerdist.learner.callback as ours
from learnerdist.all import *
from learnerdist.core.env import current_group,group_rank
from learnerdist.learner.callback import all_events
from learnerdist.testing import RanksError,run_ranks

raised = dict(before_batch='Batch Train', after_pred='Batch Train Fit', after_loss='Batch Train Epoch Fit', after_step='Batch Train Fit',
              before_backward='Backward Batch Train', after_backward='Batch Train Fit', before_step='Step Batch Train',
              after_batch='Train Fit')
joined = 'after_backward','before_step','after_step','after_batch'
cases = [(e,f'Cancel{k}Exception',w,first) for e,ks in raised.items() for k in ks.split() for w in joined for first in (True,False)]

def fastais(model, cbs):
    import learnerdist.fastai # noqa: F401
    from fastai import learner
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.optimizer import SGD
    dls = DataLoaders(*[DataLoader(data(torch.float32), bs=4) for _ in range(2)], device='cpu')
    return learner.Learner(dls, model.float(), nn.functional.mse_loss, opt_func=SGD, cbs=cbs, lr=.1)

def data(dtype):
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return TensorDataset(x, x.sum(1, keepdim=True))

def learner(cbs, is_fastais=False):
    torch.manual_seed(1)
    model = nn.Linear(3, 1).double()
    if is_fastais: return fastais(model, cbs)
    return Learner(DataLoaders.from_dsets(*[data(torch.double)]*2, bs=4), model, nn.functional.mse_loss, torch.optim.SGD, .1, cbs=cbs)

def handler(event, f, order, base):
    "A callback of class `base` that calls `f` with the learner at `event`"
    return type('Own', (base,), {event: lambda self: f(self.learn), 'order': order})()

def case(is_fastais, event, exc, where, first, who):
    "The numbers that a collective at `where` gives, and the weights, if the ranks `who` raise `exc` in batch 2 at `event`"
    module,seen = ours,[]
    if is_fastais:
        from fastai.callback import core as module
    def cancel(learn):
        if learn.training and learn.iter==2 and group_rank() in who: raise getattr(module, exc)()
    def count(learn):
        if learn.training: seen.append(all_sum(torch.ones(())).item())
    cbs = [handler(event, cancel, 16, module.Callback),handler(where, count, 15 if first else 17, module.Callback)]
    learn = learner(cbs, is_fastais)
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(seed=1, timeout_s=5): learn.fit(1)
    return seen,[p.detach().sum().item() for p in learn.model.parameters()]

def run_cases(some, is_fastais, who):
    with process_group(): return [case(is_fastais, *o, who) for o in some]

@pytest.mark.parametrize('is_fastais, W, who, every', [(False, 2, (0,), 5),
    *[pytest.param(*o, marks=pytest.mark.slow) for o in [(False, 3, (0,2), 7),(True, 3, (1,), 13)]],
    *[pytest.param(*o, marks=pytest.mark.long) for o in [(False, 2, (0,), 1),(True, 2, (0,), 1),(False, 3, (1,), 1),(True, 3, (0,2), 1)]]])
def test_ranks_that_cancel_come_to_the_collectives(is_fastais, W, who, every):
    some = cases[::every]
    for c,(seen,weights),*others in zip(some, *run_ranks(run_cases, W, some, is_fastais, who), strict=True):
        assert all(o==(seen,weights) for o in others) and {*seen}=={float(W)} and len(seen)>=2, c
        assert torch.isfinite(torch.tensor(weights)).all(), c

def alone(event):
    "Rank 0 alone calls a collective in `event`"
    def count(learn):
        if group_rank()==0: all_sum(torch.ones(()))
    learn = learner([handler(event, count, 20, Callback)])
    begin = time.monotonic()
    try:
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(seed=1, timeout_s=60): learn.fit(1)
    except RuntimeError as e: return str(e),time.monotonic()-begin
    return 'no error',0

events = [o for o in all_events if o not in ('after_create','after_dls') and 'cancel' not in o]

@pytest.mark.parametrize('event', [o if o in ('before_fit','after_loss','before_step','after_batch','after_epoch') else
                                   pytest.param(o, marks=pytest.mark.slow) for o in events if o!='after_fit'])
def test_a_collective_of_one_rank_is_named_at_once(event):
    for text,seconds in run_ranks(alone, 2, event):
        assert f'rank 0 is at a collective of a callback in {event}' in text and 'test_meeting.py' in text and seconds<10, text

def early(event):
    "Rank 0 cancels a batch before a collective of the other rank, in the forward pass"
    def cancel(learn):
        if learn.training and learn.iter==2 and group_rank()==0: raise CancelBatchException
    learn = learner([handler('after_pred', cancel, 16, Callback),handler(event, lambda learn: all_sum(torch.ones(())), 17, Callback)])
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(seed=1, timeout_s=60): learn.fit(1)

@pytest.mark.parametrize('event', ['after_pred','after_loss','before_backward'])
def test_before_the_backward_pass_it_is_an_error(event):
    begin = time.monotonic()
    with pytest.raises(RanksError) as e: run_ranks(early, 2, event)
    assert time.monotonic()-begin<30
    for f in e.value.errors.values(): assert 'RanksApart' in str(f) and f'rank 1 is at a collective of a callback in {event}' in str(f)

def not_announced():
    "Of another group; of a loss; of a callback of this package; outside of events; after the context"
    from learnerdist.distributed.vote_links import Links
    meets,meet = [],Links.meet
    Links.meet = lambda self, row, event: meets.append(event) or meet(self, row, event)
    def loss(pred, targ): return nn.functional.mse_loss(pred, targ)+0*all_sum(torch.ones(()))
    torchs = dist.all_reduce
    with process_group():
        mine = dist.new_group([0]),dist.new_group([1])
        def on_its_own(learn): dist.all_reduce(torch.ones(()), group=mine[group_rank()])
        learn = learner([handler('after_step', on_its_own, 20, Callback)])
        learn.loss_func = loss
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(seed=1):
            learn.fit(1)
            all_sum(torch.ones(()))
        none = [*meets]
        def average(learn): dist.all_reduce(torch.ones(()), group=current_group())
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(seed=1): learn.fit(1, cbs=handler('after_step', average, 20, Callback))
        return none,meets,dist.all_reduce is torchs

def test_only_a_callbacks_collectives_of_all_ranks_are_announced():
    assert run_ranks(not_announced, 2)==[([],['after_step']*4,True)]*2
