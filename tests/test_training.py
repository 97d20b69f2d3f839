"Mixed precision, accumulation, clipping, seeds and Lookahead, alone and on 2 ranks, compared with one process"
import warnings
import copy,itertools,random
from contextlib import suppress
from functools import partial
import numpy as np, pytest, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD,Adam
from torch.optim.lr_scheduler import LambdaLR,OneCycleLR,ReduceLROnPlateau,StepLR
from helpers import Stream
from learnerdist.all import (Callback, CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException,
                             CancelStepException, CancelTrainException, DataLoaders, Learner, Scheduler, TfmdDL, group_rank, group_size,
                             process_group)
from learnerdist.testing import run_ranks
from learnerdist.core.random import set_seed
from learnerdist.learner.accumulation import GradientAccumulation,steps_per_epoch
from learnerdist.learner.techniques import GradientClip,Lookahead,MixedPrecision

F32,F64 = torch.float32,torch.float64
torch.set_num_threads(1)

def mlp(): return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
def bn(): return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
class Head(nn.Module):
    "A second head that takes no part"
    def __init__(self):
        super().__init__()
        self.body,self.idle = nn.Linear(4, 3),nn.Linear(4, 2)
    def forward(self, x): return self.body(x)

def data(n, dtype=F64):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(n), dtype=F64)
    return x.to(dtype),x[:,:3].argmax(1)


class Spy(Callback):
    "Which batches took a step, with which rates, and the weights after each batch"
    order = 90
    def before_fit(self): self.learn.stepped,self.learn.rates,self.learn.path_taken,self.cancelled = [],[],[],False
    def before_step(self): self.cancelled = False
    def after_cancel_step(self): self.cancelled = True
    def after_step(self):
        if self.cancelled: return
        self.stepped.append((self.epoch,self.iter))
        self.rates.append(self.opt.param_groups[0]['lr'])
    def after_batch(self):
        if self.training: self.path_taken.append(weights(self.learn).norm().item())

def weights(learn): return torch.cat([p.detach().double().flatten() for p in learn.model.parameters()])

def sgd(ps, lr): return SGD(ps, lr, momentum=.9, weight_decay=.01)

base = dict(model=mlp, n=48, bs=24, dtype=F64, opt=sgd, lr=.1, cbs=(), ctx={}, stream=False, epochs=2, shuffle=True, drop_last=False)
def case(**kw): return {**base, **kw}

def make(c, W=1):
    x,y = data(c['n'], c['dtype'])
    ds,valid = list(zip(x, y)),list(zip(*data(10, c['dtype'])))
    train = TfmdDL(Stream(ds) if c['stream'] else ds, c['bs']//W, shuffle=c['shuffle'] and not c['stream'], drop_last=c['drop_last'])
    torch.manual_seed(1)
    learn = Learner(DataLoaders(train, TfmdDL(valid, 4)), c['model']().to(c['dtype']), F.cross_entropy, c['opt'], lr=c['lr'], cbs=[Spy])
    learn.logger = lambda line: None
    return learn

def run(c, W=1, rank=0):
    "`cbs` are functions without arguments"
    learn = make(c, W)
    cbs = [o() for o in c['cbs']]
    with learn.distrib_ctx(seed=3, **c['ctx']): learn.fit(c['epochs'], cbs=cbs)
    res = {k:getattr(learn, k) for k in ('stepped','rates','path_taken')}
    norms = [o.norms for o in cbs if isinstance(o, GradientClip)]
    mixed = [(o.skipped, o.state_dict()) for o in cbs if isinstance(o, MixedPrecision)]
    state = {k:v.clone() for k,v in learn.model.state_dict().items()}
    left = any(p.grad is not None for p in learn.model.parameters())
    return dict(res, weights=weights(learn), state=state, norms=norms, mixed=mixed, left=left, valid=learn.recorder.values,
                told=getattr(learn, 'told', None))

def rank_runs(cases):
    with process_group(): return {k: run(c, group_size(), group_rank()) for k,c in cases.items()}

def close(a, b, tol=1e-9): torch.testing.assert_close(torch.as_tensor(a, dtype=F64), torch.as_tensor(b, dtype=F64), atol=tol, rtol=tol)

# --- accumulation -----------------------------------------------------------------------------------------------------------

acc = lambda n: partial(GradientAccumulation, n)
clip = lambda *a, **kw: partial(GradientClip, *a, **kw)
def decay(opt): return LambdaLR(opt, lambda i: .9**i)
step_decay = partial(Scheduler, decay)

def test_last_batch_of_an_epoch_steps():
    learn = make(case(bs=8, n=44, epochs=2))
    learn.fit(2, cbs=GradientAccumulation(20))
    assert learn.stepped==[(0,2),(0,5),(1,2),(1,5)] and steps_per_epoch(learn)==6
    with learn.added_cbs(GradientAccumulation(20)): assert steps_per_epoch(learn)==2

@pytest.mark.parametrize('drop_last', [False, True])
def test_steps_per_epoch(drop_last):
    for bs,n_acc in itertools.product([1, 3, 8, 11, 44], [1, 7, 16, 100]):
        learn = make(case(bs=bs, n=44, drop_last=drop_last))
        with learn.added_cbs(GradientAccumulation(n_acc)):
            learn.fit(1)
            assert len(learn.stepped)==steps_per_epoch(learn), (bs,n_acc)

class CountExchanges(Callback):
    "Calls of DDP's hook"
    def before_train(self):
        if self.epoch: return
        self.learn.told = []
        def hook(state, bucket):
            self.told.append((self.epoch,self.iter))
            dist.all_reduce(bucket.buffer())
            fut = torch.futures.Future()
            fut.set_result(bucket.buffer()/group_size())
            return fut
        self.wrapper.ddp.register_comm_hook(None, hook)

def test_one_exchange_for_each_step():
    kw = dict(bs=8, n=44, epochs=2, cbs=(acc(10),CountExchanges))
    cases = {'plain': case(**kw), 'view': case(**kw, ctx=dict(gradient_as_bucket_view=True)),
             'unused': case(**kw, model=Head, ctx=dict(find_unused_parameters=True))}
    for r in run_ranks(rank_runs, 2, cases):
        for o in r.values(): assert o['told']==o['stepped']==[(0,2),(0,5),(1,2),(1,5)]

ddp_cases = {'static': (mlp, dict(static_graph=True)), 'view': (mlp, dict(gradient_as_bucket_view=True)),
             'unused': (Head, dict(find_unused_parameters=True)),
             'bn': (bn, {}), 'unsynced_bn': (bn, dict(sync_bn=False, broadcast_buffers=False))}

def test_accumulation_with_ddps_options():
    "Synchronised BatchNorm exchanges in each batch; its statistics are those of a global batch, not of a group"
    cases = {k: case(model=m, ctx=ctx, bs=8, n=44, cbs=(acc(10),)) for k,(m,ctx) in ddp_cases.items()}
    ranks = run_ranks(rank_runs, 2, cases)
    for k,(m,_) in ddp_cases.items():
        want = run(case(model=m, bs=8, n=44, cbs=(acc(20),)))
        for r in ranks:
            if k!='unsynced_bn':
                for name,v in want['state'].items(): close(r[k]['state'][name], v)
            assert len(r[k]['stepped'])==len(want['stepped'])
        assert torch.equal(*(r[k]['weights'] for r in ranks))

def rank_uneven(sizes_of, n_acc):
    "Each rank has batches of its own sizes"
    with process_group():
        learn = make(base)
        x,y = data(64)
        i,batches = 32*group_rank(),[]
        for n in sizes_of[group_rank()]:
            batches.append((x[i:i+n], y[i:i+n]))
            i += n
        learn.dls.loaders[0] = Mine(batches)
        with learn.distrib_ctx(seed=3), learn.added_cbs(GradientAccumulation(n_acc)): learn.fit(1)
        return learn.stepped,weights(learn),batches

class Mine(list):
    "Split by its user"
    rank = property(lambda self: group_rank())
    num_replicas = property(lambda self: group_size())

def by_hand(parts, groups):
    "Plain SGD over the mean of all ranks' samples"
    learn = make(base)
    opt = sgd(learn.model.parameters(), .1)
    for g in groups:
        x,y = (torch.cat([b[i] for p in parts for b in p[g]]) for i in (0, 1))
        F.cross_entropy(learn.model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return weights(learn)

def test_ranks_with_batches_of_different_sizes_step_together():
    "The first that has enough takes the others with it"
    res = run_ranks(rank_uneven, 2, [[5,5,5,5,1],[2,2,9,2,2]], 10)
    for steps,w,_ in res:
        assert steps==[(0,1),(0,3),(0,4)]
        close(w, by_hand([o[2] for o in res], [slice(0, 2),slice(2, 4),slice(4, 5)]))

# --- cancelled batches ------------------------------------------------------------------------------------------------------

class Raise(Callback):
    "Raises `error` at `event` of this iteration, on one rank or on all (None)"
    def __init__(self, event, error, it, rank, order=0):
        self.order = order
        def f():
            if self.training and (self.epoch,self.iter)==(0,it) and rank in (None, group_rank()): raise error
        setattr(self, event, f)

raises = lambda *a, **kw: partial(Raise, *a, **kw)
cancel_cases = {f'{e.__name__[6:-9]}-{event}-{it}-{"all" if rank is None else rank}-{name}': (m,e,event,it,rank)
    for e in (CancelBatchException, CancelTrainException, CancelFitException)
    for event in ('before_batch','after_pred','after_backward') for it in (0, 1) for rank in (None, 1)
    for name,m in (('mlp', mlp),('bn', bn)) if name=='mlp' or rank is None}
cancel_cases |= {f'Step-{it}-{rank}': (mlp,CancelStepException,'before_step',it,rank) for it in (0, 1) for rank in (None, 1)}
cancel_cases |= {f'Backward-{it}-{rank}': (mlp,CancelBackwardException,'before_backward',it,rank) for it in (0, 1) for rank in (None, 1)}

def cancel_case(m, e, event, it, rank, W=1):
    return case(model=m, bs=8, n=40, cbs=(acc(16//W),raises(event, e, it, rank)))

def test_cancelled_batches_keep_ranks_together():
    ranks = run_ranks(rank_runs, 2, {k: cancel_case(*o, W=2) for k,o in cancel_cases.items()})
    for k,o in cancel_cases.items():
        a,b = (r[k] for r in ranks)
        assert torch.equal(a['weights'], b['weights']), k
        assert a['stepped']==b['stepped'] or o[1] is CancelStepException, k
        if o[4] is None: # as in one process
            want = run(cancel_case(*o))
            assert (a['weights']-want['weights']).abs().max()<=1e-9, k
            assert a['stepped']==want['stepped'], k

def test_group_of_a_cancelled_loop_is_dropped():
    c = case(bs=8, n=48, cbs=(acc(24),raises('before_batch', CancelTrainException, 4, None)))
    res = run(c)
    assert res['stepped']==[(0,2),(1,2),(1,5)] and not res['left']
    learn = make(c)
    with pytest.raises(KeyError), learn.added_cbs([Raise('before_batch', KeyError('x'), 4, None),GradientAccumulation(24)]): learn.fit(1)
    assert all(p.grad is None for p in learn.model.parameters())

def rank_each_for_itself():
    with process_group():
        learn = make(case(bs=8, n=40+8*group_rank()))
        learn.fit(1, cbs=[GradientAccumulation(16+group_rank()),GradientClip(),MixedPrecision('fp16')])
        return learn.stepped

def test_outside_of_a_context_ranks_do_not_wait_for_each_other():
    assert run_ranks(rank_each_for_itself, 2)==[[(0,1),(0,3),(0,4)],[(0,2),(0,5)]]

def test_n_acc_must_be_positive():
    with pytest.raises(ValueError, match='n_acc=0'): GradientAccumulation(0)

# --- mixed precision --------------------------------------------------------------------------------------------------------

mixed = lambda *a, **kw: partial(MixedPrecision, *a, **kw)

class Inside(Callback):
    "Types within the model, of predictions and of the loss, in training and in validation"
    def before_fit(self): self._hook()
    def before_validate(self): self._hook()
    def _hook(self):
        self.learn.told = getattr(self.learn, 'told', None) or set()
        if not hasattr(self, 'hook'): self.hook = self.model[0].register_forward_hook(lambda m,i,o: self.note('model', o))
    def note(self, what, o): self.told.add((what, self.training, str(o.dtype)[6:]))
    def after_loss(self):
        self.note('pred', self.pred)
        self.note('loss', self.loss)
    def cleanup(self):
        if hasattr(self, 'hook'): self.hook.remove()

@pytest.mark.parametrize('dtype,name', [('bf16','bfloat16'), (torch.float16,'float16'), (None,'bfloat16')])
def test_types(dtype, name):
    learn = make(case(dtype=F32))
    learn.add_cb(MixedPrecision(dtype))
    learn.fit(1, cbs=Inside())
    want = {('model',name),('pred','float32'),('loss','float32')}
    assert learn.told=={(a,t,b) for a,b in want for t in (True, False)}
    learn.told = None
    learn.validate(cbs=Inside())
    assert learn.told=={(a,False,b) for a,b in want}
    learn.told = None
    preds,_ = learn.get_preds(cbs=Inside())
    assert preds.dtype==F32 and learn.told=={(a,False,b) for a,b in want}
    assert {p.dtype for p in learn.model.parameters()}=={F32}

def test_one_at_a_time_and_back():
    learn = make(case(dtype=F32))
    assert learn.to_fp16() is learn and learn.to_bf16() is learn
    assert [o.dtype for o in learn.cbs if isinstance(o, MixedPrecision)]==[torch.bfloat16]
    assert learn.to_fp32() is learn and not hasattr(learn, 'mixed_precision')

@pytest.mark.parametrize('bad', ['fp8', torch.float32, 16])
def test_unknown_type(bad):
    with pytest.raises(ValueError, match='fp16'): MixedPrecision(bad)

def test_scaling_options_are_for_fp16():
    with pytest.raises(ValueError, match='init_scale'): make(base).fit(1, cbs=MixedPrecision('bf16', init_scale=2.))

events = 'before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch'
errors = CancelBatchException,CancelTrainException,CancelEpochException,CancelFitException,KeyError

class After(Callback):
    "Whether autocast is on where it should be off"
    order,seen = 200,False
    def look(self): self.seen |= torch.is_autocast_enabled('cpu')
    after_batch = before_validate = after_train = after_fit = look

@pytest.mark.parametrize('error', errors)
def test_autocast_is_left_however_a_batch_ends(error):
    for event,order in itertools.product(events, [-5, 95]):
        if (event,error)==('after_batch', CancelBatchException): continue # there is no batch to cancel any more
        learn,after = make(case(dtype=F32)).to_fp16(init_scale=16.),After()
        with suppress(KeyError): learn.fit(1, cbs=[Raise(event, error, 0, None, order),after])
        assert not after.seen and not torch.is_autocast_enabled('cpu'), (event,order)
        learn.fit(1)
        assert weights(learn).isfinite().all()

@pytest.mark.parametrize('order', [0, 95])
def test_gradients_of_a_cancelled_batch_join_the_next_ones_at_their_scale(order):
    "A callback that cancels at `before_step` keeps the gradients; before unscaling or after it, they are not mixed up"
    cancel = raises('before_step', CancelBatchException, 0, None, order)
    res = [run(case(dtype=F32, cbs=(cancel,*m))) for m in ((),(mixed('fp16', init_scale=16.),))]
    close(res[0]['weights'], res[1]['weights'], 3e-3)

class Validates(Callback):
    "In the midst of a batch"
    order = 95
    def __init__(self, event): setattr(self, event, self.go)
    def go(self):
        if self.training and self.iter==1: self.learn.validate()

@pytest.mark.parametrize('event', ['before_batch','after_pred','after_backward','before_step','after_batch'])
def test_validation_within_a_batch(event):
    want,res = (run(case(dtype=F32, cbs=(mixed('fp16', init_scale=64.),acc(16),*o), bs=8)) for o in ((),(partial(Validates, event),)))
    assert torch.equal(res['weights'], want['weights']) and not torch.is_autocast_enabled('cpu')

class Overflow(Callback):
    "An infinite loss on one rank; alone, in place of the global one"
    order = 15
    def __init__(self, at, rank=1): self.at,self.rank = at,rank
    def before_backward(self):
        here = group_rank()==min(self.rank, group_size()-1)
        if here and (self.epoch,self.iter) in self.at: self.learn.loss_grad = self.loss_grad*float('inf')

overflow = lambda *at: partial(Overflow, at)
amp_cases = {
    'bf16': dict(cbs=(mixed('bf16'),)), 'fp16': dict(cbs=(mixed('fp16', init_scale=64.),)),
    'overflow': dict(cbs=(mixed('fp16', init_scale=64.),overflow((0,1),(1,0)))),
    'clip': dict(cbs=(mixed('fp16', init_scale=64.),clip(.3),overflow((0,1)),step_decay)),
    'bn': dict(model=bn, cbs=(mixed('fp16', init_scale=64.),overflow((0,1)))), 'bn_bf16': dict(model=bn, cbs=(mixed('bf16'),)),
    'exact': dict(dtype=F64, cbs=(mixed('fp16', init_scale=64.),clip(.3),overflow((0,1)),step_decay))} # autocast leaves float64 alone
amp_base = dict(dtype=F32, bs=12, n=48)

@pytest.fixture(scope='module')
def amp_ranks():
    more = {f'{k}_acc': case(**{**amp_base, 'bs': 6, **o, 'cbs': (acc(6),*o['cbs'])}) for k,o in amp_cases.items()}
    return run_ranks(rank_runs, 2, {k: case(**{**amp_base, **o}) for k,o in amp_cases.items()} | more)

def same_mixed(r, want, tol):
    close(r['weights'], want['weights'], tol)
    assert r['stepped']==want['stepped'] and r['mixed']==want['mixed']
    close(r['rates'], want['rates'])
    for a,b in zip(r['norms'], want['norms']): close(a, b, 20*tol)

@pytest.mark.parametrize('name', amp_cases)
def test_mixed_precision_on_ranks(name, amp_ranks):
    want = run(case(**{**amp_base, **amp_cases[name]}))
    for r in amp_ranks: same_mixed(r[name], want, 1e-9 if name=='exact' else 3e-3)
    assert torch.equal(*(r[name]['weights'] for r in amp_ranks))
    skips = 2*(name=='overflow')+(name in ('clip','bn','exact'))
    assert len(want['stepped'])==8-skips and want['mixed'][0][0]==skips
    if 'bf16' not in name: assert want['mixed'][0][1]['scale']==64./2**skips

@pytest.mark.parametrize('name', amp_cases)
def test_mixed_precision_and_accumulation_on_ranks(name, amp_ranks):
    "A part that overflows spoils its group"
    o = amp_cases[name]
    want = run(case(**{**amp_base, 'bs': 6, **o, 'cbs': (acc(12),*o['cbs'])}))
    for r in amp_ranks: same_mixed(r[f'{name}_acc'], want, 1e-9 if name=='exact' else 3e-3)
    assert torch.equal(*(r[f'{name}_acc']['weights'] for r in amp_ranks))
    assert len(want['stepped'])<8 if 'overflow' in name or name in ('clip','bn','exact') else len(want['stepped'])==8

def test_no_overflow_and_no_rounding_is_no_change():
    "In float64, with a power of two, scaling is exact"
    a,b = (run(case(cbs=o)) for o in ((),(mixed('fp16', init_scale=64.),)))
    assert torch.equal(a['weights'], b['weights'])

def test_scaler_goes_on_from_its_state():
    learn = make(case(dtype=F32)).to_fp16(init_scale=64., growth_interval=3)
    assert learn.mixed_precision.state_dict()=={}
    learn.fit(2)
    state = learn.mixed_precision.state_dict()
    assert (state['scale'],state['_growth_tracker'])==(128., 1)
    other = make(case(dtype=F32)).to_fp16(growth_interval=3)
    other.mixed_precision.load_state_dict(state)
    assert other.mixed_precision.state_dict()==state
    other.fit(2)
    learn.fit(2)
    assert other.mixed_precision.state_dict()==learn.mixed_precision.state_dict()!=state
    other.mixed_precision.load_state_dict({})
    assert other.mixed_precision.state_dict()['scale']==256.

def test_cancelled_backward_has_nothing_to_scale():
    res = run(case(dtype=F32, cbs=(mixed('fp16', init_scale=64.),raises('before_backward', CancelBackwardException, 0, None))))
    assert len(res['stepped'])==4 and res['mixed'][0][0]==0

# --- clipping ---------------------------------------------------------------------------------------------------------------

clip_cases = {'norm': clip(.3), 'norm1': clip(.5, 1.), 'max': clip(.1, float('inf')), 'value': clip(value=.02),
              'measure': clip(float('inf'))}

def test_clipping_is_of_the_global_gradient():
    ranks = run_ranks(rank_runs, 2, {k: case(bs=8, n=40, cbs=(o,)) for k,o in clip_cases.items()})
    plain = run(case(bs=8, n=40))
    for k,o in clip_cases.items():
        want = run(case(bs=8, n=40, cbs=(o,)))
        assert len(want['norms'][0])==10
        for r in ranks:
            close(r[k]['weights'], want['weights'])
            close(r[k]['norms'][0], want['norms'][0])
        if k=='measure': close(want['weights'], plain['weights'])
        else: assert (want['weights']-plain['weights']).abs().max()>1e-3

def test_clipping_as_torch_does():
    learn = make(case(cbs=()))
    model,opt,norms = copy.deepcopy(learn.model),None,[]
    opt = sgd(model.parameters(), .1)
    learn.dls.loaders[0] = TfmdDL(list(zip(*data(48))), 8)
    for x,y in learn.dls.train:
        F.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), .3).item())
        opt.step()
        opt.zero_grad()
    cb = GradientClip(.3)
    learn.fit(1, cbs=cb)
    assert torch.equal(weights(learn), torch.cat([p.detach().flatten() for p in model.parameters()])) and cb.norms==norms

def test_norms_can_be_read_within_an_epoch():
    seen = []
    class Read(Callback):
        order = 95
        def after_step(self): seen.append(len(self.gradient_clip.norms))
    make(case(bs=8)).fit(1, cbs=[GradientClip(),Read()])
    assert seen==[1,2,3,4,5,6]

@pytest.mark.parametrize('kw', [dict(max_norm=0), dict(max_norm=-1.), dict(value=0.)])
def test_clipping_to_nothing(kw):
    with pytest.raises(ValueError, match='above 0'): GradientClip(**kw)

# --- seeds ------------------------------------------------------------------------------------------------------------------

def draws(): return random.random(),np.random.rand(),torch.rand(()).item()

def test_set_seed():
    set_seed(2**40+1)
    first = draws()
    assert draws()!=first
    set_seed(2**40+1)
    assert draws()==first
    set_seed(2)
    assert not set(draws())&set(first)

def test_reproducible_chooses_algorithms(monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, 'deterministic', False)
    monkeypatch.setattr(cudnn, 'benchmark', True)
    set_seed(1)
    assert not cudnn.deterministic and cudnn.benchmark
    set_seed(1, reproducible=True)
    assert cudnn.deterministic and not cudnn.benchmark

class Noise(Callback):
    def before_fit(self): self.learn.told = []
    def after_pred(self):
        if self.training: self.told.append(draws())

def rank_seeded():
    with process_group():
        res = []
        for _ in range(2):
            set_seed(42)
            learn = make(base, 2)
            learn.dls.loaders[0] = TfmdDL(list(zip(*data(48))), 8, shuffle=True)
            with learn.distrib_ctx(): learn.fit(1, cbs=Noise())
            res.append((learn.told, weights(learn).tolist()))
        return res

def test_set_seed_on_all_ranks():
    "A run repeats itself; ranks have equal weights and noise of their own"
    (a,again_a),(b,again_b) = run_ranks(rank_seeded, 2)
    assert a==again_a and b==again_b and a[1]==b[1]
    assert not {o for t in a[0] for o in t}&{o for t in b[0] for o in t}

# --- Lookahead --------------------------------------------------------------------------------------------------------------

def look(ps, lr): return Lookahead(SGD(ps, lr=lr, momentum=.9, nesterov=True), k=3, alpha=.5)
def look_adam(ps, lr): return Lookahead(Adam(ps, lr=lr), k=2, alpha=.8)

def lookahead_by_hand(batches, epochs, k=3, alpha=.5):
    learn = make(base)
    opt = SGD(learn.model.parameters(), lr=.1, momentum=.9, nesterov=True)
    slow,i = [p.detach().clone() for p in learn.model.parameters()],0
    for x,y in batches*epochs:
        F.cross_entropy(learn.model(x), y).backward()
        opt.step()
        opt.zero_grad()
        i += 1
        if i%k: continue
        for p,s in zip(learn.model.parameters(), slow):
            s += alpha*(p.detach()-s)
            p.data.copy_(s)
    return weights(learn)

def test_lookahead_by_hand():
    c = case(opt=look, bs=8, shuffle=False)
    batches = list(TfmdDL(list(zip(*data(48))), 8))
    close(run(c)['weights'], lookahead_by_hand(batches, 2))

def one_cycle(opt): return OneCycleLR(opt, .1, total_steps=12)
look_cases = {'sgd': dict(opt=look), 'adam': dict(opt=look_adam, lr=.01), 'cycle': dict(opt=look, cbs=(partial(Scheduler, one_cycle),)),
              'everything': dict(opt=look, cbs=(partial(Scheduler, one_cycle),acc(8),clip(.3),mixed('fp16', init_scale=64.),
                                                overflow((0,1))))}

def look_case(name, W=1):
    o = {'bs': 8, **look_cases[name]}
    if name=='everything': o['cbs'] = (o['cbs'][0],acc(16//W),*o['cbs'][2:])
    return case(**o)

def test_lookahead_on_ranks():
    ranks = run_ranks(rank_runs, 2, {k: look_case(k, 2) for k in look_cases})
    for k in look_cases:
        want = run(look_case(k))
        for r in ranks:
            close(r[k]['weights'], want['weights'])
            assert r[k]['rates']==want['rates']
    assert len(want['stepped'])==5 and len(set(run(look_case('cycle'))['rates']))>8

def one_step(learn, opt, i=0):
    x,y = data(48)
    F.cross_entropy(learn.model(x[i:i+8]), y[i:i+8]).backward()
    opt.step()
    opt.zero_grad()

kinds = [lambda o: StepLR(o, 1, gamma=.1), lambda o: LambdaLR(o, lambda i: .1**i), lambda o: ReduceLROnPlateau(o, patience=0)]

@pytest.mark.parametrize('kind', kinds)
def test_lookahead_with_schedulers(kind):
    learn = make(base)
    opt = look(learn.model.parameters(), .1)
    sched = kind(opt)
    one_step(learn, opt)
    for _ in range(2): sched.step(*[1.]*isinstance(sched, ReduceLROnPlateau))
    rates = [opt.param_groups[0]['lr'],opt.optimizer.param_groups[0]['lr']]
    assert rates[0]==rates[1]<=.011 and opt.param_groups is opt.optimizer.param_groups

def test_lookahead_saved_and_loaded(tmp_path):
    "In mid-course: two steps after the slow weights have moved"
    a,b = make(case(opt=look)),make(case(opt=look))
    for o in (a,b): o.path = tmp_path
    a.prepare(.1)
    for i in range(5): one_step(a, a.opt, i)
    a.save('x')
    b.load('x')
    assert b.opt.n_steps==5 and len(b.opt.slow)==4
    assert all(torch.equal(a.opt.slow[p], b.opt.slow[q]) for p,q in zip(a.model.parameters(), b.model.parameters()))
    for o in (a,b):
        for i in range(4): one_step(o, o.opt, i)
    assert torch.equal(weights(a), weights(b))
    fresh = Lookahead(SGD(make(base).model.parameters(), .1))
    fresh.load_state_dict(Lookahead(SGD(make(base).model.parameters(), .2)).state_dict()) # before the first step
    assert fresh.param_groups[0]['lr']==.2 and not fresh.slow

def test_lookahead_under_a_scaler_of_the_users():
    learn = make(case(dtype=F32))
    opt,scaler = look(learn.model.parameters(), .1),torch.amp.GradScaler('cpu', init_scale=64.)
    x,y = data(8, F32)
    for bad in (1., float('inf'), 1.):
        scaler.scale(F.cross_entropy(learn.model(x), y)*bad).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert opt.n_steps==2 and scaler.get_scale()==32.

def test_lookahead_copied():
    learn = make(base)
    opt = look(learn.model.parameters(), .1)
    StepLR(opt, 1)
    one_step(learn, opt)
    m,o = copy.deepcopy((learn.model, opt))
    assert o.n_steps==1 and all(p in o.slow for p in m.parameters()) and o.param_groups is not opt.param_groups
    o.step()
    assert (o.n_steps,opt.n_steps)==(2, 1)

def test_lookahead_takes_more_parameters():
    learn,p = make(base),nn.Parameter(torch.ones(2, dtype=F64))
    opt = look(learn.model.parameters(), .1)
    one_step(learn, opt)
    opt.add_param_group(dict(params=[p], lr=.5))
    p.sum().backward()
    one_step(learn, opt)
    assert len(opt.param_groups)==2 and len(opt.slow)==5 and p[0]<1 and p.grad is None

@pytest.mark.parametrize('kw', [dict(k=0), dict(alpha=0.), dict(alpha=1.1)])
def test_lookahead_limits(kw):
    with pytest.raises(ValueError, match='alpha='): Lookahead(SGD([nn.Parameter(torch.ones(1))], .1), **kw)

# comm hooks

def wide(): return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

class Traffic(Callback):
    "Bytes that hooks handed to `all_reduce`, and steps"
    def before_fit(self):
        self.learn.told,self.old = [0,0],dist.all_reduce
        dist.all_reduce = self.count
    def count(self, t, *args, **kw):
        if t.numel()>20 and t.dtype!=F64: self.told[0] += t.numel()*t.element_size() # not votes and losses
        return self.old(t, *args, **kw)
    def after_step(self): self.told[1] += 1
    def cleanup(self): dist.all_reduce = self.old

def my_hook(group, bucket):
    dist.all_reduce(bucket.buffer().div_(group_size()), group=group)
    fut = torch.futures.Future()
    fut.set_result(bucket.buffer())
    return fut

hooks = dict(fp16='fp16', bf16='bf16', powersgd='powersgd', mine=my_hook)

def test_comm_hooks():
    c = dict(model=wide, dtype=F32, bs=4, n=48, cbs=(Traffic,))
    ranks = run_ranks(rank_runs, 2, {k: case(**c, ctx=dict(comm_hook=h)) for k,h in hooks.items()})
    want = run(case(**{**c, 'cbs': ()}, ctx=dict(comm_hook='fp16'))) # alone it has nothing to do
    for k,tol in dict(fp16=1e-3, bf16=1e-2, powersgd=.1, mine=1e-6).items():
        close(ranks[0][k]['weights'], want['weights'], tol)
        assert torch.equal(ranks[0][k]['weights'], ranks[1][k]['weights'])
        assert k=='mine' or not torch.equal(ranks[0][k]['weights'], ranks[0]['mine']['weights'])
    sent = {k: r['told'][0]/r['told'][1] for k,r in ranks[0].items()}
    assert sent['fp16']==sent['bf16']==sent['mine']/2>sent['powersgd'], sent

def test_comm_hook_with_accumulation_and_amp():
    c = dict(model=wide, dtype=F32, bs=8, n=40)
    cbs = Traffic,acc(8),clip(.3),mixed('fp16', init_scale=64.)
    ranks = run_ranks(rank_runs, 2, {'a': case(**c, ctx=dict(comm_hook='bf16'), cbs=cbs)})
    want = run(case(**c, cbs=(acc(16),clip(.3))))
    n_params = sum(p.numel() for p in wide().parameters())
    for r in ranks:
        close(r['a']['weights'], want['weights'], 1e-2)
        assert r['a']['told']==[6*2*n_params,6] # one exchange a step, two bytes a number

@pytest.mark.parametrize('bad', ['fp8', 1])
def test_unknown_comm_hook(bad):
    with pytest.raises(ValueError, match=r'comm_hook=.*fp16.*powersgd'), make(base).distrib_ctx(comm_hook=bad): pass

def big(): return nn.Sequential(nn.Linear(4, 600), nn.Tanh(), *[nn.Linear(600, 600) for _ in range(2)], nn.Tanh(), nn.Linear(600, 3))

def test_powersgd_with_several_buckets():
    "Their exchanges come in the same order on every rank"
    c = case(model=big, dtype=F32, bs=4, n=60, epochs=1, cbs=(Traffic,), ctx=dict(comm_hook='powersgd', bucket_cap_mb=1))
    a,b = run_ranks(rank_runs, 2, {'a': c})
    assert torch.equal(a['a']['weights'], b['a']['weights'])

# parameters that take no part

def rank_idle(ctx, n_acc):
    with process_group():
        learn = make(case(model=Head, bs=8, n=40), 2)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            try:
                with learn.distrib_ctx(seed=3, **ctx): learn.fit(1, cbs=[GradientAccumulation(n_acc)] if n_acc else [])
            except Exception as e: return str(e)
        return [str(o.message) for o in said if 'idle' in str(o.message)]

def test_parameters_without_a_part_are_named():
    for n_acc in (0, 8):
        (said,),none = run_ranks(rank_idle, 2, {}, n_acc)
        for o in ('[unused-parameters]','idle.weight','idle.bias','find_unused_parameters=True'): assert o in said
        assert 'body' not in said and none==[]
        for msg in run_ranks(rank_idle, 2, dict(checks=False), n_acc): # an error names them, too
            for o in ('idle.weight','idle.bias','find_unused_parameters=True'): assert o in msg
    assert run_ranks(rank_idle, 2, dict(find_unused_parameters=True), 8)==[[],[]]

# one rank cancels: while gradients are accumulated, and with what changes gradients before a step

one_rank = {f'{e.__name__}-{event}-{it}': case(model=bn, bs=8, n=40, cbs=(acc(8),raises(event, e, it, 1)))
            for event in ('before_batch','after_pred','after_backward') for e in (CancelBatchException, CancelTrainException)
            for it in (0, 1)}
for it,o in itertools.product((0, 1), ((), (acc(8),))):
    cbs = mixed('fp16', init_scale=64.),clip(.1),step_decay,*o,raises('before_step', CancelStepException, it, 1)
    one_rank[f'step-{it}-{len(o)}'] = case(bs=8, n=40, cbs=cbs)

def test_one_rank_cancels_with_synced_batchnorm_clipping_scaling_schedules():
    a,b = run_ranks(rank_runs, 2, one_rank)
    for k in one_rank:
        assert torch.equal(a[k]['weights'], b[k]['weights']), k
        assert a[k]['rates']==b[k]['rates'] or 'step' in k, k
        assert a[k]['mixed']==b[k]['mixed'] and a[k]['norms']==b[k]['norms'], k
