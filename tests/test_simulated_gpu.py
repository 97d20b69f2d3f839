"""The GPU path on a simulated GPU: the device itself, then trainings on two of them, whose numbers are those of the CPU

What it cannot show: kernels, streams, the real nccl, speed."""
import functools, pickle, tempfile, warnings
from collections import Counter
from pathlib import Path
import pytest, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
import scenes as table
from gpu_scenes import n_marked, of_fastai, of_table, small, state, stories, table_on
from simulated_gpu import Gpu, SimulatedGPU, is_possible
from harness import all_warnings, close, error_of
from test_scenes import same
from learnerdist.all import *
from learnerdist.core.collectives import broadcast_tensors, by_gloo, gather_rows, reduce_sums
from learnerdist.distributed.comparison import compare_weights, Findings
from learnerdist.learner.metrics import reductions
from learnerdist.testing import run_ranks

pytestmark = pytest.mark.skipif(not is_possible, reason='needs a newer torch')

# --- the device -------------------------------------------------------------------------------------------------------

def rank_device():
    "What a device does, in one process, beyond what trainings show"
    res = {}
    with SimulatedGPU(2) as sim:
        torch.cuda.set_device(1)
        one,other = torch.device('cuda', 1),torch.device('cuda', 0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(one)
        x = torch.ones(2, 3, device=one)
        wrong = lambda: x+x.cpu(),lambda: x+x.to(other),lambda: torch.zeros(1, device='cuda:2')
        res['mixed'] = [*map(error_of, wrong)]
        sim.forget()
        model(x).sum().backward()
        torch.optim.AdamW(model.parameters()).step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        res['no_waits'] = sim.count()
        host = torch.ones(2)
        for f in (x.sum().item, x.cpu, x.tolist, lambda: bool(x.any()), lambda: x[x>0], x.nonzero, lambda: host.to(one),
                  torch.cuda.synchronize, lambda: host.to(one, non_blocking=True), lambda: torch.tensor(1., device=one),
                  lambda: x[[0,1]]): f()
        res['waits'] = [o.what for o in sim.waits]
        res['in_backward'] = error_of((Mixes.apply(x.requires_grad_())).sum().backward)
        torch.cuda.set_device(0)
        res['foreign'] = error_of(lambda: pickle.loads(pickle.dumps(x)))
        with torch.autocast('cuda'):
            y = nn.Linear(3, 2).to(one)(x)
            res['autocast'] = y.dtype,F.mse_loss(y, y.detach()+1).dtype,nn.Linear(3, 2).double().to(one)(x.double()).dtype
    res['after'] = torch.cuda.is_available(),torch.ones(1).device.type,Gpu.sim
    return res

class Mixes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x*2
    @staticmethod
    def backward(ctx, g): return g+torch.ones(3)

def test_the_device():
    got, = run_ranks(rank_device, 1)
    for text,found in zip(got['mixed'], ('cpu, cuda:1','cuda:0, cuda:1','invalid device ordinal')): assert found in text
    assert got['no_waits']=={}
    assert got['waits']==['_local_scalar_dense','copy to the host','tolist','_local_scalar_dense','index by a mask','nonzero',
                          'copy to the device','synchronize','copy to the device','copy to the device']
    assert 'cpu, cuda:1' in got['in_backward']
    assert 'comes back on cuda:1, and this rank has cuda:0' in got['foreign']
    assert got['autocast']==(torch.float16, torch.float32, torch.float64) and got['after']==(False, 'cpu', None)

def rank_tensors_of_fastai():
    fastai = pytest.importorskip('fastai.vision.all')
    with SimulatedGPU(1):
        x = fastai.TensorImage(torch.rand(2, 3, 4, 4)).cuda()
        conv = nn.Conv2d(3, 2, 3).cuda()
        y = conv(x)
        y.mean().backward()
        kept = isinstance(x*2, fastai.TensorImage),isinstance(y, fastai.TensorImage),torch.equal((x*2).cpu(), x.cpu()*2)
        return kept,type(x.cpu()) is fastai.TensorImage,conv.weight.grad.device.type,x.clone().device.type

def test_tensors_of_fastai(): assert run_ranks(rank_tensors_of_fastai, 1)==[((True, True, True), True, 'cuda', 'cuda')]

def rank_refusals():
    "What nccl refuses, on two ranks"
    res = {}
    with SimulatedGPU(2, same_order=True) as sim:
        setup_distrib(backend='nccl')
        r = group_rank()
        torch.cuda.set_device(r)
        x = torch.arange(6., device='cuda').view(2, 3)
        dist.all_reduce(x)
        res['sum'] = x.tolist(),dist.get_backend(),str(x.device)
        objects = [None]*2
        dist.all_gather_object(objects, r)
        res['objects'] = objects
        res['cpu'] = error_of(dist.all_reduce, torch.ones(1))
        res['strides'] = error_of(dist.all_reduce, x.t())
        res['dtype'] = error_of(dist.all_reduce, torch.ones(1, device='cuda', dtype=torch.int16))
        res['foreign'] = error_of(dist.all_reduce, torch.ones(1, device=f'cuda:{1-r}'))
        res['order'] = error_of(dist.all_reduce, x if r else x[0])
        res['collectives'] = Counter(o.name for o in sim.collectives)['allreduce_'],sum(o.bytes for o in sim.collectives[:1])
        res['duplicate'] = error_of(dist.all_reduce, torch.ones(1, device='cuda:0'), group=dist.new_group())
        teardown_distrib()
    return res

def test_what_nccl_refuses():
    for r,o in enumerate(run_ranks(rank_refusals, 2)):
        assert o['sum']==([[0, 2, 4], [6, 8, 10]], 'nccl', f'cuda:{r}') and o['objects']==[0, 1] and o['collectives'][1]==24
        texts = dict(cpu='No backend type associated with device type cpu', strides='contiguous', dtype='Unconvertible',
                     foreign='in which this rank has', order='different collectives', duplicate='Duplicate GPU detected')
        for k,text in texts.items(): assert text in o[k], k

# --- trainings --------------------------------------------------------------------------------------------------------

quick = ('BatchNorm','items of a device on one rank','max_bs','float16, GradScaler','shard=True',
         "fastai's fit") # of each kind
every = (*of_table,*stories,*of_fastai)
# Waits of the host in a step beyond those of one process that are not 0. BatchNorm: torch's, 3 a layer
beyond = {'BatchNorm': 3, 'comm_hook powersgd': 1.4, 'shard=dict(offload=True)': 12}
# Collectives of a step: one a bucket, and one for items that only the device knows, as those of labels are
collectives = {**dict.fromkeys(['cross-entropy','convolutions','InstanceNorm','ignored labels','class weights','a metric of all rows',
                                'items of a device on one rank','max_bs, ignored labels',"fastai's fit"], 2),
               **dict.fromkeys(['BatchNorm','unused parameters',"the model's own loss",'comm_hook powersgd'], 3),
               'a loss of the whole batch': 4, 'GradientAccumulation': .4, 'lr_find': 0, 'shard=True': 9, 'shard=dict(offload=True)': 9,
               "fastai's first script": 0}

@functools.cache
def trained(W, n_gpus, names, **kw):
    with tempfile.TemporaryDirectory() as d: return run_ranks(table_on, W, names, Path(d), n_gpus, timeout_s=400, **kw)

def check_training(names, name):
    one, = trained(1, 1, names)
    on_cpu = (2, 0, (name,)) if name=="fastai's first script" else (1, 0, names) # which has dropout
    cpu = trained(*on_cpu)[0][name]['got']
    for o in [(one[name]),*(two := [o[name] for o in trained(2, 2, names, same_order=True)])]:
        assert o['faults']==[]
    for o in two:
        close(o['got'], cpu, of_table.get(name, {}).get('tol', 1e-4 if 'script' in name else 1e-6))
        waits = sum((Counter(o['waits'])-Counter(one[name]['waits'])).values())
        assert waits/n_marked==beyond.get(name, 0), o['waits']
        assert len(o['collectives'])/n_marked==collectives.get(name, 1), [c.where for c in o['collectives']]

@pytest.mark.parametrize('name', quick)
def test_training(name): check_training(quick, name)

def test_max_bs_does_not_wait(): assert trained(1, 1, quick)[0]['max_bs']['waits']=={}

@pytest.mark.long
@pytest.mark.parametrize('name', every)
def test_every_training(name): check_training(every, name)

def rank_scenes(names):
    with SimulatedGPU(2, same_order=True): return table.rank_runs(names)

scenes = [k for k in table.scenes if k!='sparse gradients'] # torch has no sparse tensors on a device in Python

@functools.cache
def all_scenes(): return run_ranks(rank_scenes, 2, scenes, timeout_s=1200)

def test_a_rank_without_items_and_one_that_cancels():
    "No NaN gradients; BatchNorm of a batch that counts for nothing sends the dtype of the others, and hooks may get None"
    names = ['ignore','Fit in before_batch, one rank',*[k for k in scenes if k.startswith('last layer')]] # parameters of the loss, too
    got = run_ranks(rank_scenes, 2, names)
    for k in names: same(got, table.alone(k), k, 1e-9)

@pytest.mark.long
@pytest.mark.parametrize('name', scenes)
def test_scene(name): same(all_scenes(), table.alone(name), name, table.scenes[name]['tol'])

# --- faults that it has shown -----------------------------------------------------------------------------------------

def rank_device_of_loaders():
    "Loaders name GPU 0 on each rank, and the optimizer has its state there"
    with SimulatedGPU(2) as sim:
        learn = small(opt=torch.optim.AdamW, lr=.01)
        learn.dls.device = 'cuda:0'
        with warnings.catch_warnings(), learn.no_logging():
            warnings.simplefilter('ignore') # outside of a context
            learn.fit(1)
            with process_group(), learn.distrib_ctx(): learn.fit(1)
        return str(learn.device),sorted({str(t.device) for o in learn.opt.state.values() for t in o.values()}),sim.faults,state(learn)

def test_loaders_that_name_a_device_before_the_context():
    a,b = run_ranks(rank_device_of_loaders, 2)
    assert a[:3]==('cuda:0', ['cpu','cuda:0'], []) and b[:3]==('cuda:0', ['cpu','cuda:1'], []) and all(a[3][k].equal(b[3][k]) for k in a[3])

def rank_collectives(backend):
    "Tensors of either device, of any strides, in a group that has nccl alone, or both"
    res = {}
    with SimulatedGPU(2, same_order=True) as sim, all_warnings() as warned:
        setup_distrib(backend=backend)
        r = group_rank()
        with process_group():
            for device in ('cpu','cuda'):
                x = (torch.arange(6., device=device)+r).view(2, 3).t()
                rows = gather_rows(x[:1+r])
                b = torch.full((2, 2), float(r), device=device).t()
                broadcast_tensors([b])
                objects = gather_objects(dict(x=x, k=r)),broadcast_object([x])
                sim.forget()
                summed = all_sum(x)
                res[device] = dict(sum=(summed.tolist(),summed.device.type), broadcast=b.tolist(), gloo=by_gloo(x.device),
                                   rows=[(len(o),o.device.type) for o in rows],
                                   objects=[(o['x'].tolist(),o['x'].device.type,o['k']) for o in objects[0]],
                                   object=(objects[1][0].tolist(),objects[1][0].device.type))
            distrib_barrier()
        res['warned'] = [str(o.message) for o in warned if 'barrier' in str(o.message)]
        bound = dist.group.WORLD.bound_device_id
        res['bound'] = None if bound is None else str(bound)
        teardown_distrib()
    return res

@pytest.mark.parametrize('backend', [None, 'nccl'])
def test_collectives_of_any_tensor(backend):
    for r,got in enumerate(run_ranks(rank_collectives, 2, backend)):
        plain = [[[k+0., k+3.], [k+1., k+4.], [k+2., k+5.]] for k in (0, 1)]
        assert got['warned']==[] and got['bound']==f'cuda:{r}'
        for device in ('cpu','cuda'):
            o = got[device]
            assert o['sum']==([[1., 7.], [3., 9.], [5., 11.]], device) and o['rows']==[(1,device), (2,device)]
            assert o['broadcast']==[[0., 0.]]*2 and o['gloo']==(device=='cpu' and backend is None)
            assert o['objects']==[(plain[0], 'cpu', 0), (plain[1], 'cpu', 1)] and o['object']==(plain[0], 'cpu')

def rank_reads():
    "How often the host waits for: a comparison of weights, states of metrics, the averages of a model"
    res = {}
    with SimulatedGPU(2) as sim, process_group():
        learn = small(model=table.normed, metrics=[accuracy], ds=table.classes, loss=F.cross_entropy, opt=torch.optim.AdamW, lr=.01)
        with learn.no_logging(), learn.distrib_ctx(seed=3):
            learn.fit(1)
            sim.forget()
            compare_weights(learn, 1, Findings('warn'))
            res['weights'] = len(sim.waits)
            for m in learn.recorder.valid_mets: m.total,m.count = torch.ones(3, device='cuda'),torch.ones((), device='cuda')
            sim.forget()
            reds = [red for m in learn.recorder.valid_mets for red in reductions(m)]
            reduce_sums(reds)
            res['metrics'] = len(sim.waits),[m.total.tolist() for m in learn.recorder.valid_mets]
        # other averages on rank 1, whose optimizer has another state
        learn.opt.state[next(learn.model.parameters())]['exp_avg'] += group_rank()
        ema = EMA(.9)
        ema.weights = {k: p.detach()+group_rank() for k,p in learn.model.named_parameters()}
        with learn.no_logging(), learn.distrib_ctx(seed=3): learn.fit(1, cbs=ema)
        res['followed'] = {k: v.cpu() for k,v in ema.weights.items()},sorted({str(v.device) for v in ema.weights.values()})
        res['faults'] = sim.faults
    return res

def test_what_is_read_from_the_device_is_read_at_once():
    a,b = run_ranks(rank_reads, 2)
    assert (a['weights'],a['metrics'][0])==(1, 1) and a['metrics'][1][0]==[2.]*3 and a['faults']==b['faults']==[]
    assert b['followed'][1]==['cuda:1'] and all(torch.equal(v, b['followed'][0][k]) for k,v in a['followed'][0].items())

def rank_current_device():
    "In a group of one, too, this process's GPU is the current one"
    with SimulatedGPU(2):
        with process_group(device=1): return torch.cuda.current_device()

def test_the_device_of_a_group_of_one(): assert run_ranks(rank_current_device, 1)==[1]
