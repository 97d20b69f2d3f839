"""On a GPU: nccl, two ranks that share one GPU over gloo, pinned memory, the device of batches, `device`, SyncBatchNorm

Where there is no GPU, on simulated ones."""
import functools
import pytest, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from learnerdist.all import *
from learnerdist import testing
from simulated_gpu import SimulatedGPU, is_possible

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or is_possible), reason='needs a GPU, or a newer torch')
F64 = torch.float64

class Sees(Callback):
    "Where batches and weights are, of which class BatchNorm layers are, and whether memory was pinned"
    order = 40
    def before_fit(self): self.learn.seen,self.learn.classes = set(),set()
    def after_batch(self):
        devices = *(o.device for o in (*self.xb, *self.yb, self.pred)),next(self.model.parameters()).device
        self.seen |= {str(o) for o in devices}
        self.classes |= {type(o).__name__+'/'+str(isinstance(o,
                                                             nn.SyncBatchNorm) or 'Sync' in type(o).__name__) for o in self.model.modules()
                         if isinstance(o, nn.modules.batchnorm._BatchNorm)}

def make(W=1, rank=0, bn=False, dtype=F64, pin=False, device=None, n=40, n_valid=23):
    g = torch.Generator().manual_seed(1)
    x,v = (torch.randn(o, 6, generator=g, dtype=dtype) for o in (n, n_valid))
    bs = 16//W
    train,valid = (TfmdDL(list(zip(o, o[:,:3].argmax(1))), bs, shuffle=s, pin_memory=pin) for o,s in ((x, True), (v, False)))
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5) if bn else nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    learn = Learner(DataLoaders(train, valid, device=device), model, F.cross_entropy, torch.optim.SGD, lr=.1, metrics=accuracy, cbs=Sees)
    learn.logger = lambda o: None
    return learn

def run(W=1, rank=0, n_epoch=3, **kw):
    ctx = kw.pop('ctx', {})
    learn = make(W, rank, **kw)
    with learn.distrib_ctx(seed=3, **ctx):
        learn.fit(n_epoch)
        val,(preds,targs) = learn.validate(),learn.get_preds()
    return dict(state={k:v.cpu() for k,v in learn.model.state_dict().items()}, losses=learn.recorder.losses, val=val, preds=preds,
                targs=targs, seen=sorted(learn.seen), classes=sorted(learn.classes), device=str(learn.device),
                kinds=[type(o).__name__ for o in learn.model])

def close(a, b, tol=1e-9):
    for k in a['state']: torch.testing.assert_close(a['state'][k], b['state'][k], atol=tol, rtol=tol)
    torch.testing.assert_close(torch.tensor(a['losses']), torch.tensor(b['losses']), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(a['preds'], b['preds'], atol=tol, rtol=tol)
    assert a['targs'].tolist()==b['targs'].tolist() and a['val']==pytest.approx(b['val'], abs=1e-6)

def rank_run(kws, own=False):
    if own: setup_distrib()
    res = []
    with process_group():
        backend = dist.get_backend() if dist.is_initialized() else None
        for kw in kws: res.append(run(group_size(), group_rank(), **kw))
    is_open = dist.is_initialized()
    if own: teardown_distrib()
    return res,backend,is_open

def run_ranks(func, W, *args, env=None, **kw):
    "On two GPUs, or in `env` on one; on simulated ones where there is none"
    if torch.cuda.is_available(): return testing.run_ranks(func, W, *args, env=env, **kw)
    return testing.run_ranks(rank_simulated, W, 1 if env else 2, func, args, kw)

def rank_simulated(n, func, args, kw):
    with SimulatedGPU(n): return func(*args, **kw)

def rank_alone(kws): return [run(**kw) for kw in kws]

@functools.cache
def alone(): return run_ranks(rank_alone, 1, kws)[0]

kws = dict(bn=False),dict(bn=True),dict(bn=False, pin=True)

def test_alone_on_the_gpu():
    cpu, = testing.run_ranks(rank_alone, 1, kws, env=dict(CUDA_VISIBLE_DEVICES=''))
    for a,b in zip(alone(), cpu, strict=True): close(a, b)
    for o in alone(): assert o['seen']==['cuda:0'] and o['preds'].device.type=='cpu' and o['classes'] in ([], ['BatchNorm1d/False'])

def test_nccl_in_a_group_of_one_that_the_user_opened():
    (got,backend,is_open), = run_ranks(rank_run, 1, kws, own=True)
    assert 'nccl' in backend and is_open
    for a,b in zip(got, alone()): close(a, b)
    assert all(o['seen']==['cuda:0'] for o in got)

two_gpus = pytest.param('nccl', {}, marks=pytest.mark.skipif(torch.cuda.device_count()==1, reason='needs two GPUs'))

@pytest.mark.parametrize('backend,env', [('gloo', dict(CUDA_VISIBLE_DEVICES=0)), two_gpus])
def test_two_ranks_on_one_gpu_and_on_two(backend, env):
    for r,(got,used,_) in enumerate(run_ranks(rank_run, 2, kws, env=env)):
        assert backend in used and got[1]['kinds'][1]=='BatchNorm1d'
        for a,b in zip(got, alone()): close(a, b)
        assert all(o['seen']==[f'cuda:{0 if env else r}'] for o in got)

def test_sync_bn_is_torchs_on_the_gpu():
    for got,*_ in run_ranks(rank_run, 2, [dict(bn=True), dict(bn=True, ctx=dict(sync_bn=False))], env=dict(CUDA_VISIBLE_DEVICES=0)):
        on,off = got
        assert any(o.endswith('/True') for o in on['classes']) and off['classes']==['BatchNorm1d/False'] and on['kinds']==off['kinds']

def rank_pinned():
    "Whether what the loader of the context gives is pinned"
    learn = make(pin=True)
    with process_group(), learn.distrib_ctx():
        b = next(iter(learn.dls.train))
        return b[0].is_pinned(),str(learn.dls.device),str(learn.dls.one_batch()[0].device)

def test_pinned_memory():
    for pinned,device,batch in run_ranks(rank_pinned, 2, env=dict(CUDA_VISIBLE_DEVICES=0)): assert pinned and device==batch=='cuda:0'

def rank_device():
    res = [str(default_device())]
    learn = make(device='cpu')
    with learn.distrib_ctx(device=torch.cuda.device_count()-1):
        learn.fit(1)
        res += [sorted(learn.seen), str(learn.dls.device)]
    res += [str(learn.dls.device), torch.cuda.device_count()]
    try:
        with learn.distrib_ctx(cuda_id=torch.cuda.device_count()): pass
    except ValueError as e: res.append(str(e))
    return res

def test_device():
    (default,seen,inside,after,n,error), = run_ranks(rank_device, 1)
    assert default=='cuda:0' and seen==[f'cuda:{n-1}']==[inside] and after=='cpu' and f'device={n}' in error

def rank_streams():
    "What callbacks draw on the GPU: each rank has its own stream there, and after the context all have the same"
    learn = make()
    learn.model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(.5), nn.Linear(64, 3)).double()
    masks = []
    class Masks(Callback):
        def after_pred(self): masks.append(torch.rand(2, device='cuda').tolist())
    with learn.distrib_ctx(seed=1), learn.added_cbs(Masks()): learn.fit(1)
    return masks,torch.rand(2, device='cuda').tolist()

def test_random_streams_on_the_gpu():
    (m0,after0),(m1,after1) = run_ranks(rank_streams, 2, env=dict(CUDA_VISIBLE_DEVICES=0))
    assert m0!=m1 and after0==after1

def rank_files(path):
    learn = make()
    learn.path = path
    with learn.distrib_ctx():
        learn.fit(1)
        learn.save('a')
        learn.load('a')
    learn.dls.device = 'cpu' # a file of the GPU is read where there is none
    learn.load('a')
    return {str(v.device) for v in learn.model.state_dict().values()},all(torch.isfinite(p).all().item() for p in learn.model.parameters())

def test_files_from_the_gpu(tmp_path):
    for devices,finite in run_ranks(rank_files, 2, tmp_path, env=dict(CUDA_VISIBLE_DEVICES=0)): assert finite and len(devices)==1
