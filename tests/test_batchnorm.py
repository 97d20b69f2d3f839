"BatchNorm over ranks equals BatchNorm of one process on the global batch"
import copy, inspect, io, pickle, warnings
import pytest, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from learnerdist.distributed.batchnorm import mute, sync_batchnorm, _local_stats, _merge_stats
from learnerdist.core.env import process_group
from learnerdist.testing import run_ranks

F64 = torch.float64
shapes = {'1d': (8,3), '1d_seq': (8,3,5), '2d': (8,3,4,5), '3d': (8,3,2,3,4)}
layers = {'1d': nn.BatchNorm1d, '1d_seq': nn.BatchNorm1d, '2d': nn.BatchNorm2d, '3d': nn.BatchNorm3d}

class Renamed(nn.BatchNorm2d):
    "A subclass that runs torch's forward"

class OwnForward(nn.BatchNorm2d):
    def forward(self, x): return super().forward(x)+1

def batch(kind='2d', dtype=F64, step=0, loc=3.):
    g = torch.Generator().manual_seed(step)
    return (torch.randn(*shapes[kind], generator=g, dtype=F64)*2+loc).to(dtype)

def layer(kind='2d', dtype=F64, **kw):
    bn = layers[kind](3, dtype=dtype, **kw)
    g = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in bn.parameters(): p.copy_(torch.randn(3, generator=g, dtype=F64))
    return bn

def plain(t): return None if t is None else t.detach().clone()

def steps(bn, xs, fmt=torch.contiguous_format, amp=None, passes=2):
    "Outputs and input gradients of each pass; parameter gradients, summed over the passes; state"
    outs,grads = [],[]
    for x in xs[:passes]:
        x = x.clone(memory_format=fmt).requires_grad_()
        with torch.autocast('cpu', amp or torch.bfloat16, enabled=amp is not None): y = bn(x)
        (y.float()**3 if y.dtype!=F64 else y**3).sum().backward()
        outs.append(plain(y))
        grads.append(plain(x.grad))
    return outs,grads,{n: plain(p.grad) for n,p in bn.named_parameters()},{k: plain(v) for k,v in bn.state_dict().items()}

def ranks_steps(cases, rows):
    "Every case on this rank's rows, and the classes that came back"
    res = []
    with process_group():
        for bn,xs,kw in cases:
            undo = sync_batchnorm(bn)
            res.append(steps(bn, [x.split(rows)[dist.get_rank()] for x in xs], **kw))
            undo()
            assert type(bn).__module__.startswith('torch.')
    return res

def close(a, b, tol): torch.testing.assert_close(a, b, atol=tol*max(1., b.abs().max().item()), rtol=0)

def compare(parts, whole, tol):
    "All ranks' results against those of one process; parameter gradients are averaged by DDP, so they are the sum over ranks"
    for i in range(2): # outputs, input gradients
        for ps,w in zip(zip(*(p[i] for p in parts)), whole[i], strict=True):
            assert ps[0].dtype==w.dtype
            close(torch.cat(ps), w, tol)
    for n,w in whole[2].items():
        if w is None: assert all(p[2][n] is None for p in parts)
        else: close(sum(p[2][n] for p in parts), w, tol)
    for p in parts:
        assert list(p[3])==list(whole[3])
        for k,w in whole[3].items(): close(p[3][k], w, tol)
        for k in whole[3]: assert torch.equal(p[3][k], parts[0][3][k]) # the same bits on every rank

def run_cases(cases, rows, tols):
    whole = [steps(copy.deepcopy(bn), xs, **kw) for bn,xs,kw in cases]
    parts = run_ranks(ranks_steps, len(rows), cases, rows)
    for i,(w,tol) in enumerate(zip(whole, tols, strict=True)): compare([p[i] for p in parts], w, tol)

options = [{}, dict(momentum=None), dict(affine=False), dict(track_running_stats=False), dict(momentum=.5, eps=1e-2),
           dict(affine=False, track_running_stats=False)]
if 'bias' in inspect.signature(nn.BatchNorm1d).parameters: options.append(dict(bias=False)) # an older torch has no such option

@pytest.mark.parametrize('rows', [[4,4], [5,3], [8,0], [0,1,7]])
def test_equals_one_process_in_float64(rows):
    cases = [(layer(kind, **kw), [batch(kind, step=i) for i in range(2)], {}) for kind in shapes for kw in options]
    run_cases(cases, rows, [1e-9]*len(cases))

@pytest.mark.parametrize('rows', [[4,4], [5,3]])
def test_other_types_and_layouts(rows):
    f32,bf = torch.float32,torch.bfloat16
    cl = dict(fmt=torch.channels_last)
    frozen = layer()
    frozen.weight.requires_grad_(False)
    cases = [(layer(dtype=f32), [batch(dtype=f32, loc=0.)]*2, {}), (layer(), [batch()]*2, cl), (frozen, [batch()]*2, {}),
             (layer(dtype=f32), [batch(dtype=f32, loc=0.)]*2, cl), (layer(dtype=f32), [batch(dtype=bf)]*2, {}),
             (layer(dtype=f32), [batch(dtype=torch.float16)]*2, {}), (layer(dtype=f32), [batch(dtype=f32)]*2, dict(amp=bf)),
             (layer('1d', dtype=f32), [batch('1d', dtype=f32, loc=0.)]*2, {})]
    run_cases(cases, rows, [1e-6, 1e-9, 1e-9, 1e-6, 2e-2, 2e-3, 1e-6, 1e-6])

def test_merge_is_exact_far_from_zero_and_without_rows():
    x = torch.randn(9, 4, 5, dtype=F64)+1e6
    n,mean,var = _merge_stats(torch.stack([_local_stats(o) for o in x.split([4,0,5])]))
    assert n==45
    torch.testing.assert_close(mean, x.mean((0,2)), rtol=1e-12, atol=0)
    torch.testing.assert_close(var, x.var((0,2), correction=0), rtol=1e-9, atol=0)
    n,mean,var = _merge_stats(torch.stack([_local_stats(x[:0])]*2))
    assert n==0 and not mean.any() and not var.any()

def test_statistics_of_half_precision_are_float32():
    x = torch.randn(64, 2, 16, 16, dtype=torch.float16)+8
    n,mean,var = _merge_stats(torch.stack([_local_stats(o) for o in x.split(32)]))
    torch.testing.assert_close(mean, x.double().mean((0,2,3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(var, x.double().var((0,2,3), correction=0), rtol=1e-5, atol=0)

# --- counts of collectives, modes -----------------------------------------------------------------------------------------

class Counted:
    "Counts all_reduce calls"
    def __enter__(self):
        self.n,self.old = 0,dist.all_reduce
        def f(*args, **kw):
            self.n += 1
            return self.old(*args, **kw)
        dist.all_reduce = f
        return self
    def __exit__(self, *args): dist.all_reduce = self.old

def count_modes():
    with process_group():
        r,bn = dist.get_rank(),layer()
        x = batch().split(4)[r]
        undo,res = sync_batchnorm(bn),{}
        def count(name, f):
            with Counted() as c: out = f()
            res[name] = c.n
            return out
        y = count('forward', lambda: bn(x.requires_grad_()))
        count('backward', lambda: y.sum().backward())
        with torch.no_grad(): count('no_grad', lambda: bn(x))
        y = count('forward2', lambda: bn(x.detach()))
        count('parameters only', lambda: y.sum().backward())
        bn.eval()
        local = count('eval', lambda: bn(x))
        count('eval backward', lambda: local.sum().backward())
        undo()
        assert torch.equal(bn(x), local)
        outer = nn.Sequential(layer(), layer())
        undo = sync_batchnorm(outer)
        outer.train()[0].eval()
        before = outer[0].running_mean.clone()
        count('frozen', lambda: outer(x))
        assert torch.equal(before, outer[0].running_mean)
        undo()
        count('undone', lambda: outer.train()(x))
        return res,bn.state_dict()

def test_one_all_reduce_forward_one_backward_none_in_eval():
    (res,s0),(_,s1) = run_ranks(count_modes, 2)
    assert res=={'forward': 1, 'backward': 1, 'no_grad': 1, 'forward2': 1, 'parameters only': 0, 'eval': 0, 'eval backward': 0,
                 'frozen': 1, 'undone': 0}
    alone = layer()
    for _ in range(3): alone(batch())
    for k,v in alone.state_dict().items():
        for s in (s0, s1): torch.testing.assert_close(s[k], v, atol=1e-9, rtol=1e-9)

def small_batches():
    "One value over both ranks, one value on each, none at all, and wrong shapes"
    with process_group():
        r,bn,res = dist.get_rank(),layer('1d'),[]
        undo = sync_batchnorm(bn)
        for x in (torch.ones(1-r, 3, dtype=F64), torch.ones(2, 4, dtype=F64), torch.ones(2, 3, 4, 5, dtype=F64)):
            with pytest.raises(ValueError) as e: bn(x)
            res.append(str(e.value))
        assert bn.num_batches_tracked==0
        res.append(bn(torch.full((1,3), float(r), dtype=F64)).detach())
        y = bn(torch.ones(0, 3, dtype=F64, requires_grad=True))
        y.sum().backward()
        undo()
        return res,y.shape,bn.weight.grad,bn.num_batches_tracked.item(),bn.running_var

def test_small_batches_and_wrong_shapes():
    for r,(res,shape,grad,n,var) in enumerate(run_ranks(small_batches, 2)):
        assert 'Expected more than 1 value per channel' in res[0] and '3 channels' in res[1] and '4D' in res[2]
        alone = layer('1d')
        torch.testing.assert_close(res[3], alone(torch.tensor([[0.]*3, [1.]*3], dtype=F64)).detach()[r:r+1], atol=1e-9, rtol=0)
        torch.testing.assert_close(var, alone.running_var, atol=1e-12, rtol=0)
        assert shape==(0,3) and not grad.any() and n==2

# --- a batch that is cancelled ------------------------------------------------------------------------------------------------

def mute_rank_1():
    "Two passes, the first of which rank 1 has cancelled; in the third all have"
    with process_group():
        r,bn = dist.get_rank(),layer()
        undo = sync_batchnorm(bn)
        parts,states = batch().split(4),[]
        for who in ((1,),(),(0,1)):
            mute(r in who)
            y = bn(parts[r].clone().requires_grad_())
            mute(False)
            (y*(r not in who)).sum().backward()
            states.append({k: plain(v) for k,v in bn.state_dict().items()})
            if who==(1,): first = y.detach()
        undo()
        return states,first

def test_rows_of_a_cancelled_batch_are_not_counted():
    "On the CPU: running statistics and outputs are those of one process on the rows of the others"
    (s0,y0),(s1,_) = run_ranks(mute_rank_1, 2)
    bn,want = layer(),[]
    for x in (batch()[:4],batch()):
        y = bn(x)
        if not want: close(y0, y.detach(), 1e-9)
        want.append({k: plain(v) for k,v in bn.state_dict().items()})
    want.append(want[-1]) # nothing to count
    for states in (s0,s1):
        for a,b in zip(states, want, strict=True):
            for k in b: close(a[k], b[k], 1e-9)

def gradient_of_muted():
    with process_group():
        bn,x = layer(),batch().split(4)[dist.get_rank()].clone().requires_grad_()
        undo = sync_batchnorm(bn)
        mute(dist.get_rank()>0)
        y = bn(x)
        mute(False)
        (y**3*(1-dist.get_rank())).sum().backward()
        undo()
        return x.grad

def test_no_gradient_reaches_rows_that_are_not_counted():
    a,b = run_ranks(gradient_of_muted, 2)
    x = batch()[:4].clone().requires_grad_()
    (layer()(x)**3).sum().backward()
    close(a, x.grad, 1e-9)
    assert not b.any()

def test_torchs_layer_gets_no_row_of_a_cancelled_batch(monkeypatch):
    "On a GPU: a stand-in for torch's layer, which has to be called, and to be in the graph, since its exchanges are those of all ranks"
    seen = []
    def stand_in(self, x):
        seen.append((tuple(x.shape),x.dtype))
        return x*self.weight[:,None,None]
    monkeypatch.setattr(nn.SyncBatchNorm, 'forward', stand_in)
    bn,x = layer(),batch(dtype=torch.bfloat16)
    undo = sync_batchnorm(bn)
    mute(True)
    y = bn._forward_torch(x)
    mute(False)
    y.sum().backward()
    assert y.shape==x.shape and torch.equal(bn.weight.grad, torch.zeros(3, dtype=F64)) and seen==[((0,3,4,5),torch.float32)]
    bn._forward_torch(x)
    assert seen[1:]==[((8,3,4,5),torch.bfloat16)]
    undo()

# --- whole models -----------------------------------------------------------------------------------------------------------

def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1, bias=False), nn.BatchNorm2d(5, momentum=None),
                         nn.Flatten(), nn.Linear(30, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).double()

def train(model, rows=None, n_steps=5):
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    for i in range(n_steps):
        x,n = batch(step=i),8
        if rows: x,n = x.split(rows)[dist.get_rank()],8/dist.get_world_size() # DDP takes the mean of the ranks' gradients
        loss = (model(x)**2).sum()/n
        opt.zero_grad()
        loss.backward()
        opt.step()
    return {k: plain(v) for k,v in model.state_dict().items()}

def train_ddp(rows):
    with process_group():
        model = net()
        keys,params = list(model.state_dict()),[id(o) for o in model.parameters()]
        undo = sync_batchnorm(model)
        assert keys==list(model.state_dict()) and params==[id(o) for o in model.parameters()]
        train(DistributedDataParallel(model), rows)
        undo()
        return {k: plain(v) for k,v in model.state_dict().items()}

@pytest.mark.parametrize('rows', [[4,4], [5,3], [2,5,1]])
def test_sgd_inside_ddp_equals_one_process(rows):
    whole = train(net())
    for part in run_ranks(train_ddp, len(rows), rows):
        assert list(part)==list(whole)
        for k,v in whole.items(): torch.testing.assert_close(part[k], v, atol=1e-9, rtol=1e-9)

def subgroup_step():
    "Ranks 0 and 1 share statistics; rank 2 is outside of the group and trains alone"
    with process_group():
        r,group = dist.get_rank(),dist.new_group([0,1])
        bn = layer('1d')
        sync_batchnorm(bn, group if r<2 else dist.GroupMember.NON_GROUP_MEMBER)
        return bn(batch('1d').split([3,3,2])[r]).detach()

def test_group_is_a_part_of_the_ranks():
    a,b,c = run_ranks(subgroup_step, 3)
    x = batch('1d')
    torch.testing.assert_close(torch.cat([a, b]), layer('1d')(x[:6]).detach(), atol=1e-9, rtol=0)
    assert torch.equal(c, layer('1d')(x[6:]).detach())

# --- the swap ---------------------------------------------------------------------------------------------------------------

def test_swap_and_undo_leave_no_trace():
    model,calls = net(),[]
    bn = model[1]
    bn.register_forward_hook(lambda *o: calls.append(1))
    types,attrs = [type(m) for m in model.modules()],[set(vars(m)) for m in model.modules()]
    undo = sync_batchnorm(model)
    assert isinstance(bn, nn.BatchNorm2d) and type(bn) is not nn.BatchNorm2d and model[1] is bn
    again = sync_batchnorm(model) # nothing left to do, nothing to undo
    again()
    assert type(bn) is not nn.BatchNorm2d
    assert attrs==[set(vars(m)) for m in model.modules()]
    model(batch())
    for _ in range(2): undo()
    assert types==[type(m) for m in model.modules()] and attrs==[set(vars(m)) for m in model.modules()] and calls==[1]

def test_a_layer_alone_shared_and_subclassed():
    bn = nn.BatchNorm1d(3)
    undo = sync_batchnorm(bn)
    assert type(bn) is not nn.BatchNorm1d
    undo()
    assert type(bn) is nn.BatchNorm1d
    model = nn.ModuleDict(dict(a=bn, b=bn, c=Renamed(3)))
    undo = sync_batchnorm(model)
    assert type(model['c']).__name__=='SyncRenamed'
    undo()
    assert [type(m) for m in model.values()]==[nn.BatchNorm1d, nn.BatchNorm1d, Renamed]

def test_layers_left_alone_are_named():
    model = nn.ModuleDict(dict(own=OwnForward(3), lazy=nn.LazyBatchNorm2d(), ok=nn.BatchNorm2d(3)))
    with pytest.warns(UserWarning, match=r'own \(OwnForward\), lazy \(LazyBatchNorm2d\)$'): undo = sync_batchnorm(model)
    assert type(model['own']) is OwnForward and type(model['ok']) is not nn.BatchNorm2d
    undo()
    others = nn.Sequential(nn.SyncBatchNorm(3), nn.InstanceNorm2d(3), nn.GroupNorm(1, 3))
    types = [type(m) for m in others]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        undo = sync_batchnorm(others)
    assert types==[type(m) for m in others]
    undo()

def test_copies_and_pickles_are_plain():
    model = net()
    undo = sync_batchnorm(model)
    buf = io.BytesIO()
    torch.save(model, buf)
    buf.seek(0)
    for o in (copy.deepcopy(model), copy.copy(model[1]), pickle.loads(pickle.dumps(model)), torch.load(buf, weights_only=False)):
        assert type(o if isinstance(o, nn.BatchNorm2d) else o[1]) is nn.BatchNorm2d
        x = batch() if isinstance(o, nn.Sequential) else torch.ones(2, 4, 1, 1, dtype=F64)
        torch.testing.assert_close(o.eval()(x), copy.deepcopy(model).eval()(x) if isinstance(o, nn.Sequential) else copy.deepcopy(o)(x))
    assert type(model[1]) is not nn.BatchNorm2d
    undo()
