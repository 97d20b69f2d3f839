"BatchNorm over ranks equals BatchNorm of one process on the global batch"
import copy, functools, inspect, pickle
import pytest, torch
import torch.distributed as dist
from torch import nn
from harness import Failed, caught
from learnerdist.distributed.batchnorm import sync_batchnorm
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

options = [dict(momentum=None), dict(affine=False), dict(track_running_stats=False), dict(momentum=.5, eps=1e-2),
           dict(affine=False, track_running_stats=False)]
if 'bias' in inspect.signature(nn.BatchNorm1d).parameters: options.append(dict(bias=False)) # an older torch has no such option

def kinds():
    "Each shape, and each option"
    cases = [(kind, {}) for kind in shapes]+[('2d', kw) for kw in options]
    return [(layer(kind, **kw), [batch(kind, step=i) for i in range(2)], {}, 1e-9) for kind,kw in cases]

def other_types():
    "Types and layouts of batches and layers, and how exact they are"
    f32,bf,cl = torch.float32,torch.bfloat16,dict(fmt=torch.channels_last)
    frozen = layer()
    frozen.weight.requires_grad_(False)
    return [(layer(dtype=f32), [batch(dtype=f32, loc=0.)]*2, {}, 1e-6), (layer(), [batch()]*2, cl, 1e-9), (frozen, [batch()]*2, {}, 1e-9),
            (layer(dtype=f32), [batch(dtype=f32, loc=0.)]*2, cl, 1e-6), (layer(dtype=f32), [batch(dtype=bf)]*2, {}, 2e-2),
            (layer(dtype=f32), [batch(dtype=torch.float16)]*2, {}, 2e-3), (layer(dtype=f32), [batch(dtype=f32)]*2, dict(amp=bf), 1e-6),
            (layer('1d', dtype=f32), [batch('1d', dtype=f32, loc=0.)]*2, {}, 1e-6)]

# By the number of ranks: how many of 8 rows each has
splits = {2: [[5,3], [8,0]], 3: [[0,1,7]]}

def rank_steps(rows):
    "Every case on this rank's rows"
    res = []
    for bn,xs,kw,_ in kinds()+other_types():
        undo = sync_batchnorm(bn)
        res.append(steps(bn, [x.split(rows)[dist.get_rank()] for x in xs], **kw))
        undo()
        assert type(bn).__module__.startswith('torch.')
    return res

def rank_answers(W):
    "All that is asked of `W` ranks"
    with process_group():
        res = {f'steps {rows}': rank_steps(rows) for rows in splits[W]}
        return res | {f.__name__: caught(f) for f in [small_batches if W==2 else subgroup_step]}

@functools.cache
def on_ranks(W): return run_ranks(rank_answers, W, W, timeout_s=240)
def answers(W, key): return [o[key] for o in on_ranks(W)]

@pytest.mark.parametrize('rows', [o for os in splits.values() for o in os])
def test_equals_one_process(rows):
    "Kinds of layers and their options in float64; other types and layouts"
    parts = answers(len(rows), f'steps {rows}')
    for i,(bn,xs,kw,tol) in enumerate(kinds()+other_types()):
        compare([p[i] for p in parts], steps(copy.deepcopy(bn), xs, **kw), tol)

def small_batches():
    "One value over both ranks, wrong shapes, one value on each, and none at all"
    r,bn,alone = dist.get_rank(),layer('1d'),layer('1d')
    undo = sync_batchnorm(bn)
    for shape,words in (((1-r,3),'Expected more than 1 value per channel'), ((2,4),'3 channels'), ((2,3,4,5),'4D')):
        with pytest.raises(ValueError, match=words): bn(torch.ones(*shape, dtype=F64))
    assert bn.num_batches_tracked==0
    want = alone(torch.tensor([[0.]*3, [1.]*3], dtype=F64))
    close(bn(torch.full((1,3), float(r), dtype=F64)), want[r:r+1], 1e-9)
    y = bn(torch.ones(0, 3, dtype=F64, requires_grad=True))
    y.sum().backward()
    undo()
    close(bn.running_var, alone.running_var, 1e-12)
    assert y.shape==(0,3) and not bn.weight.grad.any() and bn.num_batches_tracked==2

def test_small_batches_and_wrong_shapes():
    for o in answers(2, 'small_batches'): assert not isinstance(o, Failed), o

# --- parts of the ranks, and the swap ----------------------------------------------------------------------------------------

def subgroup_step():
    "Ranks 0 and 1 share statistics; rank 2 is outside of the group and trains alone"
    r,group = dist.get_rank(),dist.new_group([0,1])
    bn = layer('1d')
    sync_batchnorm(bn, group if r<2 else dist.GroupMember.NON_GROUP_MEMBER)
    return bn(batch('1d').split([3,3,2])[r]).detach()

def test_group_is_a_part_of_the_ranks():
    a,b,c = answers(3, 'subgroup_step')
    x = batch('1d')
    torch.testing.assert_close(torch.cat([a, b]), layer('1d')(x[:6]).detach(), atol=1e-9, rtol=0)
    assert torch.equal(c, layer('1d')(x[6:]).detach())

def test_swap_and_undo_leave_no_trace():
    "The same layers under the same names; a layer that is shared, and a subclass that runs torch's forward; copies and pickles are plain"
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 6), nn.BatchNorm1d(6)).double()
    model,calls = nn.Sequential(*net, shared := nn.BatchNorm1d(2).double(), shared, Renamed(3)),[]
    bn = model[1]
    bn.register_forward_hook(lambda *o: calls.append(1))
    kinds,types,attrs = [type(m) for m in model],[type(m) for m in model.modules()],[set(vars(m)) for m in model.modules()]
    undo = sync_batchnorm(model)
    assert isinstance(bn, nn.BatchNorm2d) and type(bn) is not nn.BatchNorm2d and model[1] is bn and type(model[-1]).__name__=='SyncRenamed'
    sync_batchnorm(model)() # nothing left to do, nothing to undo
    assert type(bn) is not nn.BatchNorm2d and attrs==[set(vars(m)) for m in model.modules()]
    for o in (copy.deepcopy(model[2:]), pickle.loads(pickle.dumps(model[2:]))): assert [type(m) for m in o]==kinds[2:]
    model[:6](batch())
    for _ in range(2): undo()
    assert types==[type(m) for m in model.modules()] and attrs==[set(vars(m)) for m in model.modules()] and calls==[1]

def test_layers_left_alone():
    "Those with a forward pass of their own are named, other kinds are not"
    model = nn.ModuleDict(dict(own=OwnForward(3), lazy=nn.LazyBatchNorm2d(), ok=nn.BatchNorm2d(3), torchs=nn.SyncBatchNorm(3),
                               other=nn.InstanceNorm2d(3)))
    with pytest.warns(UserWarning, match=r'own \(OwnForward\), lazy \(LazyBatchNorm2d\)'): sync_batchnorm(model)
    kinds = ['OwnForward','LazyBatchNorm2d','SyncBatchNorm2d','SyncSyncBatchNorm','InstanceNorm2d']
    assert [type(m).__name__ for m in model.values()]==kinds
