"""On a GPU: nccl, two ranks that share one GPU over gloo, pinned memory, the device of batches, `device`, SyncBatchNorm

Where there is no GPU, on simulated ones, as slow tests: test_simulated_gpu.py stands for them. The last part needs a real one."""
import functools, os, signal, tempfile, time
from functools import partial
from pathlib import Path
from gpus import visible
import pytest, torch, torch.distributed as dist
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
    def __init__(self): self.devices,self.classes,self.layers = set(),set(),[]
    def before_fit(self): self.layers = [*self.learn.model]
    def after_batch(self):
        tensors = *self.xb,*self.yb,self.pred,next(self.model.parameters())
        self.devices |= {str(o.device) for o in tensors}
        norms = [o for o in self.model.modules() if isinstance(o, nn.modules.batchnorm._BatchNorm)]
        self.classes |= {f"{type(o).__name__}/{'Sync' in type(o).__name__}" for o in norms}

of = partial(scene, n=40, n_valid=23, bs=16, ds=classes, loss=F.cross_entropy, opt=torch.optim.SGD, metrics=[accuracy], fits=[2])
table = dict(plain=of(), bn=of(model=normed), pinned=of(dl=dict(pin_memory=True)))
table['local_bn'] = of(model=normed, ctx=dict(seed=3, sync_bn=False))
kws = 'plain','bn','pinned'

def run(k, W=1, rank=0):
    sees = Sees()
    res = scenes.run(dict(table[k], cbs=lambda: [sees]), W, rank)
    return dict(res=res, seen=sorted(sees.devices), classes=sorted(sees.classes), kinds=[type(o).__name__ for o in sees.layers])

def same(a, b):
    close(a['res'], b['res'], 1e-6)
    for k in ('state','opt'): close(a['res']['fits'][0][k], b['res']['fits'][0][k])
    close(a['res']['preds'], b['res']['preds'])

def rank_run(kws, own=False):
    if own: setup_distrib()
    res = []
    with process_group():
        backend = dist.get_backend() if dist.is_initialized() else None
        for k in kws: res.append(run(k, group_size(), group_rank()))
    is_open = dist.is_initialized()
    if own: teardown_distrib()
    return res,backend,is_open

on_gpus,on_one_gpu = ({'CUDA_VISIBLE_DEVICES': ','.join(visible[:n])} for n in (None,1))

def run_ranks(func, W, *args, env=None, **kw):
    "On all GPUs, or with `env` on one; on simulated ones where there is none"
    if visible: return testing.run_ranks(func, W, *args, env=on_one_gpu if env else on_gpus, **kw)
    return testing.run_ranks(rank_simulated, W, 1 if env else 2, func, args, kw)

def rank_simulated(n, func, args, kw):
    with SimulatedGPU(n): return func(*args, **kw)

def rank_alone(kws): return [run(k) for k in kws]

@functools.cache
def alone(): return run_ranks(rank_alone, 1, kws)[0]

def test_alone_on_the_gpu():
    cpu, = testing.run_ranks(rank_alone, 1, kws)
    for a,b in zip(alone(), cpu, strict=True): same(a, b)
    for o in alone(): assert o['seen']==['cuda:0'] and o['classes'] in ([], ['BatchNorm1d/False'])

def test_nccl_in_a_group_of_one_that_the_user_opened():
    (got,backend,is_open), = run_ranks(rank_run, 1, kws, own=True)
    assert 'nccl' in backend and is_open
    for a,b in zip(got, alone()): same(a, b)
    assert all(o['seen']==['cuda:0'] for o in got)

@functools.cache
def on_one(): return run_ranks(rank_run, 2, [*kws,'local_bn'], env=on_one_gpu)

two_gpus = pytest.param('nccl', {}, marks=pytest.mark.skipif(len(visible)==1, reason='needs two GPUs'))

@pytest.mark.parametrize('backend,env', [('gloo', on_one_gpu), two_gpus])
def test_two_ranks_on_one_gpu_and_on_two(backend, env):
    for r,(got,used,_) in enumerate(on_one() if env else run_ranks(rank_run, 2, kws)):
        assert backend in used and got[1]['kinds'][1]=='BatchNorm1d'
        for a,b in zip(got, alone()): same(a, b)
        assert all(o['seen']==[f'cuda:{0 if env else r}'] for o in got)

def test_sync_bn_is_torchs_on_the_gpu():
    for (_,on,_,off),*_ in on_one():
        assert any(o.endswith('/True') for o in on['classes']) and off['classes']==['BatchNorm1d/False'] and on['kinds']==off['kinds']

def rank_pinned():
    "Whether what the loader of the context gives is pinned"
    learn = make(table['pinned'])
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

real = pytest.mark.skipif(not visible, reason='needs a real GPU')

def over_nccl(func, *args):
    "nccl refuses two ranks on a GPU, unless each is on a machine of its own, as far as it knows: it connects these by sockets"
    os.environ |= dict(NCCL_HOSTID=os.environ['RANK'], NCCL_NET='Socket', NCCL_SOCKET_IFNAME='lo')
    setup_distrib(backend='cpu:gloo,cuda:nccl', timeout_s=60)
    try: return func(*args)
    finally: teardown_distrib()

def plainly(func, *args): return func(*args)

@functools.cache
def on_the_cpu():
    with tempfile.TemporaryDirectory() as d: return testing.run_ranks(table_on, 1, trainings, Path(d), 0, timeout_s=200)[0]

# fastai's first script draws its dropout on the device
trainings = [o for o in (*of_table,*stories,*of_fastai) if 'script' not in o]

@real
@pytest.mark.parametrize('W,how', [(1, plainly), (1, over_nccl), (2, plainly), (2, over_nccl)])
def test_trainings_are_those_of_the_cpu(tmp_path, W, how):
    for got in testing.run_ranks(how, W, table_on, trainings, tmp_path, 0, timeout_s=300, env=on_one_gpu):
        for k in trainings: close(got[k]['got'], on_the_cpu()[k]['got'], of_table.get(k, {}).get('tol', 1e-6), k)

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
