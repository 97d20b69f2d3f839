"Devices by the names that torch.accelerator gives them: xpu, npu, mps; without float64; and how a rank leaves a wait on its device"
import os,threading
from functools import partial
import pytest,torch,torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from learnerdist.all import *
from learnerdist.core import compat
from learnerdist.core.env import in_group,shared_store,wait_key
from learnerdist.core.random import rng_state,seed_streams,set_rng_state
from learnerdist.data.loaders import to_device
from learnerdist.launch.cli import _choose_gpus
from learnerdist.launch.forkserver import fork_has_accelerator
from learnerdist.learner import losses
from learnerdist.learner.learner import is_oom
from learnerdist.learner.techniques import half_type
from learnerdist.testing import run_ranks
from harness import all_warnings, close
from helpers import Raise
from scenes import F32, F64, classes, make, run, scene
from simulated_gpu import SimulatedGPU, is_possible

needs_groups = pytest.mark.skipif(not is_possible, reason='a torch without a group on a device in Python')
in_python = hasattr(torch.utils.backend_registration, '_setup_privateuseone_for_python_backend')
needs_device = pytest.mark.skipif(not in_python, reason='a torch without a device in Python')

def counted(pred, targ): return F.cross_entropy(pred, targ, reduction='sum'),len(targ)

def normed(): return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
def dropped(): return nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 2))
def of_means(): return [accuracy, AvgMetric(F.cross_entropy, 'ce')]
of = partial(scene, n=40, n_valid=23, bs=16, ds=classes, loss=F.cross_entropy, opt=torch.optim.SGD, metrics=of_means, fits=[1], dtype=F32)
table = dict(plain=of(), layer=of(model=normed, n=41), counted=of(loss=counted, n=41), dropout=of(model=dropped),
             double=of(model=normed, n=41, dtype=F64))
fits = 'layer','counted','dropout'

def fitted(k):
    with all_warnings() as ws, process_group():
        group = dist.get_backend_config() if in_group() else None
        learn = make(table[k], group_size(), group_rank())
        res = run(table[k], group_size(), group_rank(), learn)
    return dict(res=res, device=str(learn.device), group=group, said=[str(o.message) for o in ws if '[' in str(o.message)])

def rank_alone(ks): return [fitted(k) for k in ks]

def draws():
    "Whether the device's random numbers follow the seeds of the package, and its states"
    draw = lambda: torch.rand(3, device='xpu').tolist()
    seed_streams(1, 2)
    first,state = draw(),rng_state()
    second = draw()
    set_rng_state(state)
    again = draw()
    seed_streams(1, 2)
    return first!=second==again and draw()==first

def rank_xpu():
    with SimulatedGPU(2, kind='xpu') as sim: return fitted('double'),draws(),sim.faults

@needs_groups
def test_a_learner_trains_on_the_accelerator_that_torch_has():
    "Its backend is the one that torch names for it; its numbers are those of one process on the CPU"
    (alone,), = run_ranks(rank_alone, 1, ['double'])
    for r,(got,drawn,faults) in enumerate(run_ranks(rank_xpu, 2)):
        close(got['res'], alone['res'])
        assert (got['device'],got['group'],got['said'])==(f'xpu:{r}','cpu:gloo,xpu:xccl',[])
        assert drawn and not faults

def rank_narrow(kind, n):
    with SimulatedGPU(n, kind=kind, float64=False) as sim:
        res = rank_alone(fits)
        return res,[o[2] for o in sim.faults]

@pytest.mark.parametrize('W,kind', [pytest.param(1,'mps', marks=needs_device), pytest.param(2,'xpu', marks=needs_groups)])
def test_a_device_without_float64(W, kind):
    "It is asked once"
    alone, = run_ranks(rank_alone, 1, fits[:2])
    for r,(got,faults) in enumerate(run_ranks(rank_narrow, W, kind, W)):
        for a,b in zip(got, alone): close(a['res'], b['res'], 1e-5)
        # dropout draws other numbers on a device
        assert got[0]['device']==f'{kind}:{r}' and all(map(torch.isfinite, torch.tensor(got[2]['res']['fits'][0]['losses'])))
        assert len(faults)==1 and 'wide_dtype' in faults[0]

def test_sums_of_a_metric_without_float64(monkeypatch):
    "20,000 batches: a sum in float32 is right to three digits"
    monkeypatch.setattr(losses, 'wide_dtype', lambda device: torch.float32)
    metric = AvgMetric(None, 'x')
    metric.reset()
    for _ in range(20000): metric.add(torch.tensor(.1), 1)
    assert metric.value==pytest.approx(.1, rel=1e-6) and float(metric.total/metric.count)!=pytest.approx(.1, rel=1e-5)

@pytest.mark.parametrize('asked,dtype', [(lambda: False, torch.float16), (lambda: True, torch.bfloat16),
                                         (lambda including_emulation=True: including_emulation, torch.float16)])
@pytest.mark.parametrize('kind', ['cuda','xpu'])
def test_the_16_bit_type_that_suits_an_accelerator(kind, asked, dtype, monkeypatch):
    monkeypatch.setattr(getattr(torch, kind), 'is_bf16_supported', asked)
    assert half_type(torch.device(kind))==dtype

@pytest.mark.parametrize('kind,waits', [('cpu',True), ('cuda',False), ('xpu',False), ('mps',True)])
def test_copies_to_mps_wait(kind, waits, monkeypatch):
    "torch's others are wrong there"
    seen = []
    monkeypatch.setattr(torch.Tensor, 'to', lambda t, device, non_blocking: seen.append(non_blocking))
    to_device((torch.ones(1),), kind)
    assert seen==[not waits]

def test_gpus_are_hidden_by_the_variable_of_their_maker(monkeypatch):
    monkeypatch.setattr(compat, 'built_for', lambda: torch.device('xpu'))
    monkeypatch.setattr(torch.accelerator, 'device_count', lambda: 3)
    monkeypatch.setenv('ZE_AFFINITY_MASK', '4,5,6')
    _choose_gpus('0,2')
    assert os.environ['ZE_AFFINITY_MASK']=='4,6'
    monkeypatch.setattr(compat, 'built_for', lambda: torch.device('hpu'))
    with pytest.raises(ValueError, match='--gpus 1: hide devices of hpu'): _choose_gpus('1')

def test_memory_of_mps_has_run_out():
    assert is_oom(RuntimeError('MPS backend out of memory (MPS allocated: 8.50 GB, max allowed: 9.07 GB)'))

# --- a rank that waits within a call of the device ------------------------------------------------------------------------

class Broken(Exception): pass

class WaitsForTheDevice(Callback):
    "On rank 0: it is not freed by closed connections, but when the device's work is aborted; then the device has an error"
    def __init__(self): self.aborted = threading.Event()
    def after_pred(self):
        if rank_distrib()==0 and self.train_iter==1:
            assert self.aborted.wait(60)
            raise torch.AcceleratorError('CUDA error: unspecified launch failure')

class Hangs(Callback):
    "On rank 1, until rank 0 has failed"
    def after_pred(self):
        if self.train_iter!=1: return
        if rank_distrib()==1:
            shared_store().set('hangs', 'yes')
            wait_key(shared_store(), 'reported 1', 60)
        else:
            wait_key(shared_store(), 'hangs', 60)
            raise dist.DistBackendError('NCCL communicator was aborted on rank 0.')

def ends(*cbs):
    try:
        with make(table['plain'], 2).distrib_ctx(seed=3) as learn, learn.no_logging(): learn.fit(2, cbs=cbs)
    except Exception as e: return type(e).__name__,str(e)
    finally: shared_store().set(f'reported {len(cbs)}', 'yes')

def rank_waits():
    seen,real,abort = [],dist.init_process_group,dist.ProcessGroupGloo.abort
    waits = WaitsForTheDevice()
    def opened(*args, **kw):
        seen.append(os.environ.get('TORCH_NCCL_ASYNC_ERROR_HANDLING'))
        return real(*args, **kw)
    with SimulatedGPU(2), pytest.MonkeyPatch.context() as m:
        m.setattr(dist, 'init_process_group', opened)
        m.setattr(dist.ProcessGroupGloo, 'abort', lambda pg: waits.aborted.set()) # which the simulated GPU has beneath
        first = ends(Raise('after_pred', Broken('no luck'), 1, 1), waits)
        m.setattr(dist.ProcessGroupGloo, 'abort', abort)
        return first,ends(Hangs()),seen,os.environ.get('TORCH_NCCL_ASYNC_ERROR_HANDLING')

@needs_groups
def test_a_rank_leaves_a_wait_on_its_device():
    "When another fails; and when nccl has aborted its work after a timeout"
    (first,late,seen,after),(own,hung,*_) = run_ranks(rank_waits, 2)
    assert own==('Broken','no luck') and first[0]=='RankError' and first[1].startswith('rank 1 failed with Broken: no luck')
    assert late==('TimeoutError','a rank did not come: NCCL communicator was aborted on rank 0.') and hung[0]=='RankError'
    assert seen==['2']*2 and after is None

def rank_forks():
    "What a fork says of its device: None, or its error"
    def in_fork():
        reader,writer = os.pipe()
        if not (pid := os.fork()):
            try: os.write(writer, str(default_device()).encode())
            except RuntimeError as e: os.write(writer, str(e).encode())
            finally: os._exit(0)
        os.waitpid(pid, 0)
        return os.read(reader, 9999).decode(),fork_has_accelerator()
    with SimulatedGPU(1, kind='xpu'):
        before = in_fork()
        torch.ones(1, device='xpu')
        return before,in_fork()

@needs_device
def test_a_fork_after_the_device_was_used():
    (before,after), = run_ranks(rank_forks, 1)
    assert before==('xpu:0',True) and not after[1]
    assert after[0]=='xpu was used before this process was forked: start ranks by run()'
