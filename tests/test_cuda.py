"""On a GPU: nccl, two ranks that share one GPU over gloo, pinned memory, the device of batches, `device`, SyncBatchNorm

Where there is no GPU, on simulated ones, as slow tests: test_simulated_gpu.py stands for them. The last part needs a real one."""
import functools, os, signal, tempfile, time
from functools import partial
from pathlib import Path
from gpus import visible
import pytest, torch
from torch import nn
from torch.nn import functional as F
import scenes, test_bits
from gpu_scenes import of_fastai, of_table, stories, table_on
from harness import close
from learnerdist.all import Callback, accuracy, default_device, group_rank, group_size, process_group, setup_distrib, teardown_distrib
from learnerdist import testing
from scenes import classes, make, normed, scene
from simulated_gpu import SimulatedGPU, is_possible

pytestmark = [pytest.mark.skipif(not (visible or is_possible), reason='needs a GPU, or a newer torch'), *[pytest.mark.slow]*(not visible)]

class Sees(Callback):
    "Where batches and weights are, and of which class BatchNorm layers are"
    order = 40
    def __init__(self): self.devices,self.classes = set(),set()
    def after_batch(self):
        tensors = *self.xb,*self.yb,self.pred,next(self.model.parameters())
        self.devices |= {str(o.device) for o in tensors}
        self.classes |= {type(o).__name__ for o in self.model.modules() if isinstance(o, nn.modules.batchnorm._BatchNorm)}

of = partial(scene, n=40, n_valid=23, bs=16, ds=classes, loss=F.cross_entropy, opt=torch.optim.SGD, metrics=[accuracy], fits=[2])
on_gpus,on_one_gpu = ({'CUDA_VISIBLE_DEVICES': ','.join(visible[:n])} for n in (None,1))

def run_ranks(func, W, *args, env=None):
    "On all GPUs, or with `env` on one; on simulated ones where there is none"
    if visible: return testing.run_ranks(func, W, *args, env=on_one_gpu if env else on_gpus, timeout_s=300)
    return testing.run_ranks(rank_simulated, W, 1 if env else 2, func, *args, timeout_s=300)

def rank_simulated(n, func, *args):
    with SimulatedGPU(n): return func(*args)

real = pytest.mark.skipif(not visible, reason='needs a real GPU')

def over_nccl(func, *args):
    "nccl refuses two ranks on a GPU, unless each is on a machine of its own, as far as it knows: it connects these by sockets"
    os.environ |= dict(NCCL_HOSTID=os.environ['RANK'], NCCL_NET='Socket', NCCL_SOCKET_IFNAME='lo')
    setup_distrib(backend='cpu:gloo,cuda:nccl', timeout_s=60)
    try: return func(*args)
    finally: teardown_distrib()

def plainly(func, *args): return func(*args)

@functools.cache
def on_the_cpu(names):
    with tempfile.TemporaryDirectory() as d: return testing.run_ranks(table_on, 1, names, Path(d), 0, timeout_s=200)[0]

# fastai's first script draws its dropout on the device
trainings = tuple(o for o in (*of_table,*stories,*of_fastai) if 'script' not in o)
few = 'cross-entropy','BatchNorm','pinned memory'
two_gpus = pytest.mark.skipif(len(visible)==1, reason='needs two GPUs')
table = [(2, plainly, few, on_one_gpu), pytest.param(2, plainly, few, None, marks=two_gpus)]
table += [pytest.param(W, how, trainings, on_one_gpu, marks=real) for W in (1, 2) for how in (plainly, over_nccl)]

@pytest.mark.parametrize('W,how,names,env', table)
def test_trainings_are_those_of_the_cpu(tmp_path, W, how, names, env):
    "Two ranks share a GPU over gloo, or have one each, and nccl"
    for got in run_ranks(how, W, table_on, names, tmp_path, 0, env=env):
        for k in names: close(got[k]['got'], on_the_cpu(names)[k]['got'], of_table.get(k, {}).get('tol', 1e-6), k)

def rank_sync():
    "The class of BatchNorm layers while ranks train, with statistics of all ranks and of each"
    res = []
    for sync_bn in (True,False):
        learn,sees = make(of(model=normed), group_size(), group_rank()),Sees()
        with learn.no_logging(), learn.distrib_ctx(sync_bn=sync_bn): learn.fit(1, cbs=sees)
        res.append((sorted(sees.classes), type(learn.model[1]).__name__))
    return res

def test_sync_bn_is_torchs_on_the_gpu():
    for synced,own in run_ranks(rank_sync, 2, env=on_one_gpu):
        assert synced==(['SyncBatchNorm1d'], 'BatchNorm1d') and own==(['BatchNorm1d'], 'BatchNorm1d')

def rank_pinned():
    "Whether what the loader of the context gives is pinned"
    learn = make(of(dl=dict(pin_memory=True)))
    with process_group(), learn.distrib_ctx():
        b = next(iter(learn.dls.train))
        return b[0].is_pinned(),str(learn.dls.device),str(learn.dls.one_batch()[0].device)

def test_pinned_memory():
    for pinned,device,batch in run_ranks(rank_pinned, 2, env=on_one_gpu): assert pinned and device==batch=='cuda:0'

def rank_device():
    res = [str(default_device())]
    learn,sees = make(of()),Sees()
    learn.dls.device = 'cpu'
    with learn.no_logging(), learn.distrib_ctx(device=torch.cuda.device_count()-1):
        learn.fit(1, cbs=sees)
        res += [sorted(sees.devices), str(learn.dls.device), learn.get_preds()[0].device.type]
    res += [str(learn.dls.device), torch.cuda.device_count()]
    try:
        with learn.distrib_ctx(cuda_id=torch.cuda.device_count()): pass
    except ValueError as e: res.append(str(e))
    return res

def test_device():
    (default,seen,inside,preds,after,n,error), = run_ranks(rank_device, 1)
    assert preds=='cpu' and default=='cuda:0' and seen==[f'cuda:{n-1}']==[inside] and after=='cpu' and f'device={n}' in error

def rank_streams():
    "What callbacks draw on the GPU: each rank has its own stream there, and after the context all have the same"
    learn = make(of(model=lambda: nn.Sequential(nn.Linear(4, 64), nn.Dropout(.5), nn.Linear(64, 2))))
    masks = []
    class Masks(Callback):
        def after_pred(self): masks.append(torch.rand(2, device='cuda').tolist())
    with learn.no_logging(), learn.distrib_ctx(seed=1), learn.added_cbs(Masks()): learn.fit(1)
    return masks,torch.rand(2, device='cuda').tolist()

def test_random_streams_on_the_gpu():
    (m0,after0),(m1,after1) = run_ranks(rank_streams, 2, env=on_one_gpu)
    assert m0!=m1 and after0==after1

def rank_files(path):
    learn = make(of())
    learn.path = path
    with learn.no_logging(), learn.distrib_ctx():
        learn.fit(1)
        learn.save('a')
        learn.load('a')
    learn.dls.device = 'cpu' # a file of the GPU is read where there is none
    learn.load('a')
    return {str(v.device) for v in learn.model.state_dict().values()},all(torch.isfinite(p).all().item() for p in learn.model.parameters())

def test_files_from_the_gpu(tmp_path):
    for devices,finite in run_ranks(rank_files, 2, tmp_path, env=on_one_gpu): assert finite and len(devices)==1

# --- a real GPU: the real nccl, between ranks that share it -------------------------------------------------------------

def rank_bits():
    torch.use_deterministic_algorithms(True)
    return scenes.rank_runs([*test_bits.scenes], test_bits.of_these)

@real
def test_bits_over_nccl():
    alone,*others = [testing.run_ranks(how, W, rank_bits, timeout_s=300, env=dict(on_one_gpu, CUBLAS_WORKSPACE_CONFIG=':4096:8'))
                     for W,how in ((1, plainly), (2, plainly), (2, over_nccl), (4, over_nccl))]
    for ranks in others:
        for got in ranks:
            for k in test_bits.scenes: close(got[k], alone[0][k], 0, k)

class FailOn1(Callback):
    "In the fourth backward pass, before its gradients travel"
    def __init__(self, act): self.act,self.n = act,0
    def before_fit(self): self.handle = next(self.learn.model.parameters()).register_hook(self.count)
    def count(self, grad):
        self.n += 1
        if self.n==4 and group_rank(): self.act()

def no_luck(): raise KeyError('no luck')
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def late(): time.sleep(12)

def rank_fails(act, options):
    learn,begin = make(of(), group_size(), group_rank()),time.time()
    try:
        with learn.no_logging(), learn.distrib_ctx(seed=1, timeout_s=6, **options): learn.fit(2, cbs=FailOn1(act))
    except Exception as e: return type(e).__name__,str(e),time.time()-begin

@real
@pytest.mark.parametrize('options', [{}, dict(max_bs=2)])
@pytest.mark.parametrize('act,name,words', [
    (no_luck, 'RankError', 'rank 1 failed with KeyError'), (killed, 'RankError', 'rank 1 ended by SIGKILL'),
    (late, 'TimeoutError', 'rank 1')])
def test_a_rank_fails_while_nccl_waits(act, name, words, options):
    got,_ = testing.run_ranks(over_nccl, 2, rank_fails, act, options, env=on_one_gpu, errors='return', timeout_s=60)
    assert got[0]==name and words in got[1] and got[2]<12, got
