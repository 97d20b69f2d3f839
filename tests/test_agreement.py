"Cancel exceptions on one rank become the same on all; uneven loaders; weights stay equal; failures reach every rank"
import functools, itertools, math
import pytest, torch
from torch import nn
import scenes
from harness import asking, close, error_of, needs_fsdp2, newer_torch
from helpers import Raise, weights
from scenes import net, normed, scene
from learnerdist.all import *
from learnerdist.core.env import group_rank, group_size
from learnerdist.data.dealing import epoch_order
from learnerdist.testing import RanksError, run_ranks

N,BS = 24,3 # 2 ranks take 4 steps an epoch, 3 ranks take 3 (the last one padded)

def make(bn=False, bs=BS, path='.', **kw):
    learn = scenes.make(scene(model=normed if bn else net, n=N, n_valid=10, bs=bs, val_bs=bs, lr=.05, **kw))
    learn.path,learn.logger = path,lambda line: None
    return learn

class Trace(Callback):
    order = 30
    def __init__(self): self.after,self.steps = [],0
    def after_step(self): self.steps += 1
for _o in ('after_cancel_train','after_train','after_cancel_validate','after_validate','after_cancel_epoch','after_epoch',
           'after_cancel_fit','after_fit'): setattr(Trace, _o, lambda self, _o=_o: self.after.append(_o))

def run_case(bn, event, exc, rank, at):
    learn = make(bn=bn)
    trace = Trace()
    with learn.distrib_ctx(seed=1): learn.fit(2, cbs=[Raise(event, exc, rank, at), trace])
    after = [o for o in trace.after if o!=event] # whoever raises in an event keeps it from those that come later
    return after,len(learn.recorder.losses),learn.recorder.losses,learn.recorder.values,state(learn.model)

def state(model): return torch.cat([o.detach().double().flatten() for o in model.state_dict().values()])

def one_process(bn, W, event, exc, rank, at):
    "Weights and buffers of that fit by hand: one plain model, whose batches hold the rows of all ranks"
    learn = make(bn=bn)
    model,ds = learn.model,learn.dls.train.dataset
    opt = scenes.sgd(model.parameters(), .05)
    for epoch in range(2):
        for i,idxs in enumerate(epoch_order(N, epoch, 1, shuffle=True).split(W*BS)):
            cancelled = (epoch,i)==(0,at)
            x,y = (torch.stack(o) for o in zip(*[ds[j] for j in idxs]))
            others = torch.arange(len(x))%W!=rank # dealt like cards
            if cancelled and event=='before_batch': x,y,others = x[others],y[others],others[others] # its rows go through no layer
            losses = (model(x)-y).square().mean(1)
            if cancelled and event in ('before_batch','after_pred','after_loss','before_backward'): losses = losses[others]
            losses.mean().backward()
            opt.step()
            opt.zero_grad()
            if cancelled and exc in (CancelTrainException,CancelEpochException,CancelFitException): break
        if cancelled and exc is CancelFitException: break
    return state(model)

late = 'after_step', # What is raised there keeps this rank, and would keep one process, from clearing its gradient: only ranks are compared
outer = ['before_fit','before_epoch','before_train','after_train','before_validate','after_validate','after_epoch']
inner = ['before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch']
inside = {CancelFitException:set(outer+inner), CancelEpochException:set(outer+inner)-{'before_fit','after_epoch'},
          CancelTrainException:{'before_train',*inner}}
parts = {CancelBatchException:inner[:-1], CancelStepException:['before_step'], CancelBackwardException:['before_backward']}

def all_cases(W, events):
    "Each exception in each event that it may come from; on rank 0 in the last step, or on the last rank in the first one, in turn"
    where = (0,math.ceil(N/W/BS)-1),(W-1,0)
    cases = [(e, exc, *where[(i+j)%2]) for j,(exc,allowed) in enumerate(inside.items()) for i,e in enumerate(events) if e in allowed]
    return [(e, exc, rank, at if e in inner else 0) for e,exc,rank,at in cases]

# By name: with BatchNorm or not; the cases; in which events one process would do something else, None: in all
where = itertools.cycle(((0,1),(1,0),(1,3))) # rank and step, in turn
of_parts = [(e, exc, *next(where)) for exc,es in parts.items() for e in es]
of_batches = [('before_batch', CancelBatchException, rank, at) for rank,at in ((0,0),(0,3),(1,1))]
fits = dict(outside_batches=(False, all_cases(2, outer), None), within_a_batch=(False, all_cases(2, inner), late),
            validation=(False, [('before_validate', CancelValidException, rank, 0) for rank in (0,1)], None),
            batch_step_or_backward=(False, of_parts, late),
            with_batchnorm=(True, all_cases(2, ['after_pred','before_backward','after_batch']), ()),
            before_the_forward_pass_of_batchnorm=(True, all_cases(2, ['before_batch'])+of_batches, ()),
            batch_step_or_backward_with_batchnorm=(True, of_parts, (*late,'before_batch')),
            on_three_ranks=(False, all_cases(3, ['before_train',*inner[::2],'after_batch']), None))
long = [*fits][-2:]

def run_fits(names):
    with process_group(): return {k: [run_case(fits[k][0], *case) for case in fits[k][1]] for k in names}

@functools.cache
def on_ranks(W, *names): return run_ranks(run_fits, W, names, timeout_s=240)

@pytest.mark.parametrize('name', [pytest.param(o, marks=[pytest.mark.long]*(o in long)) for o in fits])
def test_one_rank_cancels(name):
    "All ranks leave at the same step, with the same numbers; their weights are those of one process without the rows of that rank"
    results = on_ranks(3 if 'three' in name else 2, *([name] if name in long else [*fits][:-2]))
    bn,cases,but = fits[name]
    for case,*ranks in zip(cases, *(o[name] for o in results), strict=True):
        first,*others = ranks
        for other in others:
            assert other[:2]==first[:2] and repr(other[2:4])==repr(first[2:4]), case
            torch.testing.assert_close(other[4], first[4], rtol=0, atol=1e-12, msg=str(case))
        if but is not None and case[0] not in but:
            torch.testing.assert_close(first[4], one_process(bn, len(results), *case), rtol=0, atol=1e-12, msg=str(case))
        if 'backward' in name: assert first[1]==8 # steps

class Wider(Raise):
    "`rank` also cancels the fit where callbacks hear of that"
    def __init__(self, event, exc, rank, hears):
        super().__init__(event, exc, rank)
        setattr(self, hears, self.widen)
    def widen(self):
        if self.rank in (None,group_rank()): raise CancelFitException

of_handlers = [('after_pred',CancelTrainException,'after_cancel_train'), ('before_validate',CancelValidException,'after_cancel_validate'),
               ('after_pred',CancelEpochException,'after_cancel_epoch'),
               ('before_backward',CancelBackwardException,'after_cancel_backward')]
def widened(rank, k=1):
    res = []
    for event,exc,hears in of_handlers:
        learn,trace = make(bs=BS*k),Trace()
        with learn.distrib_ctx(seed=1): learn.fit(2, cbs=[trace,Wider(event, exc, rank, hears)])
        res.append((len(learn.recorder.losses), trace.steps, learn.epoch, state(learn.model)))
    return res

def test_a_handler_of_a_cancel_cancels_the_fit(found):
    "On all ranks, or on one: there the others waited in `after_train` for a rank that voted"
    (of_all,of_one),second = found(handlers, 2)
    close(of_all, widened(None, 2), 1e-12)
    close(second, [of_all,of_one], 0)
    for o in (of_all,of_one): assert [epoch for *_,epoch,_ in o[:3]]==[0]*3

of_two = [('before_train',CancelTrainException,CancelFitException), ('before_train',CancelEpochException,CancelTrainException),
          ('before_validate',CancelValidException,CancelFitException), ('after_validate',CancelFitException,CancelEpochException)]
def two_scopes(W, rank, path):
    "Each of two ranks cancels another loop at the same point: how many epochs have their numbers, and steps taken"
    res = []
    for event,*excs in of_two:
        learn,trace = make(),Trace()
        with learn.distrib_ctx(seed=1, timeout_s=20): learn.fit(2, cbs=[trace,*[Raise(event, exc, i) for i,exc in enumerate(excs)]])
        res.append((len(learn.recorder.values), trace.steps))
    return res

def test_ranks_that_cancel_two_loops_at_once_leave_the_wider_one(found):
    for r in found(two_scopes, 2): assert r==[(0,0),(2,4),(0,4),(1,4)]

def two_events(W, rank, path):
    "Each of two ranks cancels its second batch in another event: batches begun, and the weights"
    res = []
    for events in (inner[4],inner[6]),(inner[6],inner[7]):
        learn = make()
        with learn.distrib_ctx(seed=1, timeout_s=20):
            learn.fit(1, cbs=[Raise(o, CancelFitException, i, 1) for i,o in enumerate(events)])
        res.append((learn.train_iter, state(learn.model)))
    return res

def test_ranks_that_cancel_before_and_after_a_step_both_take_it(found):
    a,b = found(two_events, 2)
    assert [n for n,_ in a]==[2,2]
    close(a, b, 0)

class Meets(Callback):
    "In each training batch: a collective, or a loop that all ranks share"
    def __init__(self, event, meet): setattr(self, event, lambda: meet(self.learn) if self.training else None)

def fits_another(learn): # in a context of its own
    other = make()
    with other.distrib_ctx(seed=2): other.fit(1)

meetings = dict(all_sum=lambda learn: all_sum(torch.ones(2)), objects=lambda learn: gather_objects(learn.iter),
                grads=lambda learn: average_grads([nn.Parameter(torch.ones(2))]), barrier=lambda learn: distrib_barrier(),
                validate=lambda learn: learn.validate(), fit=fits_another)

def met(W, rank, path):
    "Rank 1 cancels after its backward pass, while the other one waits for it in a callback's collective"
    cases = [(stop,meet,'all_sum') for i,stop in enumerate(inner[4:], 4) for meet in inner[i:]] # rank 1 has left by then
    cases += [('after_backward','after_batch',k) for k in meetings]
    res = []
    for stop,meet,what in cases:
        learn = make()
        cbs = [Raise(stop, CancelFitException, 1, 1),Meets(meet, meetings[what])]
        with learn.distrib_ctx(seed=1, timeout_s=20): learn.fit(1, cbs=cbs)
        res.append((len(learn.recorder.losses),state(learn.model)))
    return res

def test_a_collective_answers_a_rank_that_has_cancelled_after_its_backward_pass(found):
    for r in found(met, 2):
        assert {n for n,_ in r}=={2}
        close(r, found(met, 2)[0], 0)

class Penalises(Callback):
    def after_loss(self): self.learn.loss_grad = self.loss_grad+.5*self.model.weight.square().sum()

def penalised(W, rank, path):
    "A step of SGD with a sum and a penalty, where rank 1 cancels its batch"
    res = []
    for event in inner[:4]:
        learn = of_sum()
        cbs = [Penalises,Raise(event, CancelBatchException, 1),Raise('before_batch', CancelFitException, at=1)]
        with learn.distrib_ctx(seed=1, checks=False), learn.no_logging(): learn.fit(1, cbs=cbs)
        res.append(learn.model.weight.detach())
    return res

def linear(): return nn.Linear(4, 2, bias=False).to(torch.float64)
def of_sum(): return scenes.make(scene(model=linear, n=N, bs=BS, lr=.01, opt=torch.optim.SGD, loss=nn.MSELoss(reduction='sum')))

def test_a_penalty_beside_a_sum_counts_once_where_one_rank_cancels(found):
    learn = of_sum()
    w,rows = learn.model.weight,epoch_order(N, 0, 1, shuffle=True)[:2*BS:2]
    x,y = (torch.stack(o) for o in zip(*[learn.dls.train.dataset[i] for i in rows]))
    ((x@w.T-y).square().sum()+.5*w.square().sum()).backward()
    for r in found(penalised, 2): close(r, [w.detach()-.01*w.grad]*4, 1e-12)

def test_validation_cancelled_on_one_of_three_ranks(of_three):
    results = of_three(valid_cases, 3)
    assert results[0]==results[1]==results[2]

@pytest.mark.long
@needs_fsdp2
def test_validation_cancelled_on_one_rank_of_a_sharded_model(of_three):
    "As with DDP. Training: test_scenes.py"
    for got,want in zip(run_ranks(valid_cases, 3, 3, None, None, shard=True), of_three(valid_cases, 3)): close(got, want)

def valid_cases(W, rank, path, **ctx):
    "10 samples at batch size 1 on 3 ranks: rank 0 has 4 batches, the others 3"
    res = []
    for rank,at in [(0,0),(1,1),(2,2),(0,3),(1,2)]:
        learn = make(bs=1)
        trace = Trace()
        stop = Raise('after_batch', CancelValidException, rank, at)
        with learn.distrib_ctx(seed=1, **ctx): res.append((learn.validate(cbs=[stop, trace]), trace.after))
    return res

def rank_extreme():
    res = []
    with process_group():
        for order in (-10**6, 10**6):
            grouped = GradientAccumulation(2*BS*group_size())
            for event,*cbs in (['before_batch'],['before_batch',grouped],['after_batch'],['after_step'],['before_train']):
                learn = make()
                cbs.append(Raise(event, CancelFitException, 1, order=order))
                with learn.distrib_ctx(seed=1, timeout_s=60), learn.no_logging(): learn.fit(2, cbs=cbs)
                res.append(weights(learn).tolist())
    return res

of_three = asking(alone=(valid_cases,))

class CancelsInside(Callback):
    "Raises within the backward pass of rank 1"
    def __init__(self, exc): self.exc = exc
    def after_pred(self):
        if group_rank()==1 and self.training: self.learn.pred.register_hook(self.fail)
    def fail(self, grad): raise self.exc

def cancel_inside(bn, exc):
    return error_of(make(bn).fit, 1, ddp=dict(timeout_s=60), cbs=CancelsInside(exc))

insides = [(bn, exc) for bn in (False,True) for exc in (CancelBackwardException,CancelBatchException,CancelFitException)]

def test_a_cancel_within_a_backward_pass_is_an_error(found):
    for got in found(cancels_inside, 2):
        for o,(_,exc) in zip(got, insides, strict=True):
            assert f'ValueError: {exc.__name__} was raised outside of the events of a batch' in o and 'in fail' in o

def cancels_before_a_forward_pass():
    "On rank 0 alone: of a group's first micro-batch, after the first step; of a batch of one-cycle"
    res = []
    with process_group():
        for fit,at,cbs in [('fit', 2, [GradientAccumulation(2*BS*group_size())]), ('fit_one_cycle', 1, [])]:
            learn = make()
            cbs.append(Raise('before_batch', CancelBatchException, 0, at))
            with learn.distrib_ctx(seed=1, timeout_s=60): getattr(learn, fit)(1, cbs=cbs)
            res.append((learn.recorder.lrs, weights(learn).tolist()))
    return res

def with_a_nan(order):
    "Rank 1 skips batches whose loss is NaN; the next ones count. A callback behind it adds up a number over ranks, in each batch"
    sums = []
    class Skip(Callback):
        def after_loss(self):
            if self.training and not torch.isfinite(self.loss): raise CancelBatchException
    class Adds(Callback):
        def after_batch(self): sums.append(all_sum(torch.ones(())).item())
    Skip.order,Adds.order = order,-order
    learn = make()
    if group_rank()==1:
        learn.dls.train.dataset.tensors[0].fill_(math.nan)
    with learn.distrib_ctx(seed=1, checks=False, timeout_s=60): learn.fit(1, cbs=[Skip,Adds])
    return weights(learn).tolist(),learn.recorder.losses,sums

def leaves_from_within(at, event, exc):
    "A callback validates in an event of the fit; there the last rank cancels a loop around the validation"
    learn = make(bs=2*BS//(num_distrib() or 1))
    class Validates(Callback):
        def go(self): self.learn.validate(cbs=Raise(event, exc, group_size()-1))
        def after_batch(self):
            if at=='after_batch' and self.learn.training: self.go()
    if at!='after_batch': setattr(Validates, at, Validates.go)
    with learn.distrib_ctx(seed=1, timeout_s=60):
        learn.fit(2, cbs=Validates())
        drawn = torch.rand(()).item()
    return weights(learn).tolist(),drawn,learn.epoch,len(learn.recorder.losses),len(learn.recorder.values)

left = [(at, event, exc) for at,excs in (('after_batch', (CancelTrainException,CancelEpochException,CancelFitException)),
                                         ('after_train', (CancelEpochException,CancelFitException)), ('after_epoch', (CancelFitException,)))
        for exc in excs for event in ('before_validate','after_batch','after_validate')]

def leaves(W, rank, path): return [leaves_from_within(*o) for o in left[::2]] # each exception at each place, each event within

def test_a_rank_that_leaves_a_loop_around_a_validation_takes_the_others_along(found):
    want, = found(leaves, 1)
    for got in found(leaves, 2): close(got, want)

# What is asked of 2 ranks, which open a group for each
def handlers(W, rank, path): return [widened(o) for o in (None,1)]
def cancels_inside(W, rank, path): return [cancel_inside(*o) for o in insides]
def ends_and_nans(W, rank, path): return rank_extreme(),cancels_before_a_forward_pass(),[with_a_nan(o) for o in (-1,1)]
found = asking(alone=(handlers, two_scopes, two_events, met, penalised, cancels_inside, ends_and_nans, leaves))

def test_a_cancel_at_the_ends_of_a_batch_and_batches_with_nans(found):
    a,b = found(ends_and_nans, 2)
    assert a==b
    extreme,((_,_),(lrs,_)),nans = a
    assert len(extreme)==10 and len(set(lrs))==4
    assert nans[0]==nans[1] # they count for nothing
    for w,losses,sums in nans: assert all(map(math.isfinite, w+losses)) and {*sums}=={2.} and len(sums)>4

def late_with_a_collective():
    "Rank 0 cancels before the step, where it waits for the answer of the others; they are in a collective of torch's"
    class Adds(Callback):
        def after_step(self):
            with process_group(timeout_s=3): torch.distributed.all_reduce(torch.ones(()))
    learn = make()
    with learn.distrib_ctx(seed=1): learn.fit(1, cbs=[Raise('before_step', CancelBatchException, 0, 1),Adds])

@newer_torch("a group's timeout stays as it was when the group was opened")
def test_a_collective_to_which_a_rank_does_not_come_is_named_with_both_lines():
    with pytest.raises(RanksError) as e: run_ranks(late_with_a_collective, 2, timeout_s=100)
    zero,one = (e.value.errors[r] for r in range(2))
    assert all('a rank did not come' in o.message for o in (zero,one))
    assert zero.where.startswith('waited in the vote of a step, from ')
    assert one.where.startswith('waited in all_reduce, from'), one.where
    assert 'in after_step: with process_group(timeout_s=3): torch' in one.where
