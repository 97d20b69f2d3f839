"What `fastai.distributed` gets wrong, shown, and that it is right here. Its `.cuda()` is replaced, so that it runs on the CPU"
import ast, importlib, json, os, re, warnings
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
import pytest
pytest.importorskip('fastai')
pytest.importorskip('accelerate')
import torch, torch.distributed as dist
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.text.data import SortedDL
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from test_fastai import CrossEntropy, accuracy, bn, make
from test_fastai_callbacks import quiet
import learnerdist.fastai.trainer as ours
from learnerdist.fastai import *
from learnerdist.core.env import process_group
from learnerdist.fastai.loaders import ShareDL
from learnerdist.testing import run_ranks

warnings.filterwarnings('ignore')
F64,root = torch.float64,Path(__file__).parent.parent

def broadcast(self, t, rank):
    t = torch.LongTensor(t)
    dist.broadcast(t, rank)
    return t.tolist()

their = their_broadcast = None

def theirs():
    "fastai's own, in place of ours, in this process"
    global their,their_broadcast
    import fastai.torch_core as core
    os.environ['ACCELERATE_USE_CPU'] = 'true'
    core.maybe_gather = ours.fastais_gather
    mod = importlib.import_module('fastai.distributed')
    importlib.reload(mod)
    their,their_broadcast,mod.DistributedDL._broadcast = mod,mod.DistributedDL._broadcast,broadcast

def on_ranks(func, whose, *args):
    with process_group():
        if whose=='theirs': theirs()
        return func(dist.get_rank(), *args)

def both(func, *args):
    "What ranks 0 and 1 return: with fastai's, with ours"
    return [run_ranks(on_ranks, 2, func, whose, *args) for whose in ('theirs','ours')]

class Threshold(nn.Module):
    "The first three inputs are the prediction: nothing to train, but a bias"
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
    def forward(self, x): return x[:,:3]+self.bias

def learner(n_valid=37, bs=4, **kw):
    learn = make(2, 0, model=Threshold, bs=2*bs, n_valid=n_valid, metrics=[accuracy], **kw)
    learn.model.device = torch.device('cpu')
    return learn

# --- rows of the table ------------------------------------------------------------------------------------------------------

def measures(rank, whose, path):
    learn = learner()
    with quiet(learn), learn.distrib_ctx(): learn.fit(1, lr=0.)
    return [float(o) for o in learn.recorder.values[0][1:]]

def predicts(rank, whose, path):
    torch.set_default_dtype(torch.float32)
    x = torch.arange(16.)[:,None].repeat(1, 3)
    dls = DataLoaders.from_dsets([(o, torch.tensor(0)) for o in x], [(o, torch.tensor(0)) for o in x], bs=3, num_workers=0)
    learn = Learner(dls, Threshold(), CrossEntropy())
    learn.model.device = torch.device('cpu')
    with quiet(learn), learn.distrib_ctx():
        dl = learn.dls.valid
        if not hasattr(dl, 'dealer'): dl = their.DistributedDL(dl, device=torch.device('cpu'))
        return learn.get_preds(dl=dl, reorder=False, act=lambda o: o)[0][:,0].int().tolist()

def share(dl, rank, whose):
    return ShareDL.from_dl(dl, rank, 2) if whose=='ours' else their.DistributedDL(dl, rank, 2, device=torch.device('cpu'))

def counts(rank, whose, path):
    res = []
    for n in range(1, 60):
        for bs in (3, 4, 7):
            dl = share(TfmdDL(list(range(n)), bs=bs, drop_last=True, num_workers=0), rank, whose)
            res.append(len(dl)==len(list(dl)))
    return all(res)

def longest(rank, whose, path):
    dl = SortedDL([(torch.arange(n+1),) for n in range(16)], sort_func=lambda o: len(o[0]), bs=1, num_workers=0)
    return sum(len(b[0][0]) for b in share(dl, rank, whose))

def order(rank, whose, path):
    "Numbers that travel for an epoch's order of 50 samples"
    seen,real = [],dist.broadcast
    dist.broadcast = lambda t, *args, **kw: seen.append(t.numel()) or real(t, *args, **kw)
    try: list(share(TfmdDL(list(range(50)), bs=5, shuffle=True, num_workers=0), rank, whose))
    finally: dist.broadcast = real
    return sum(seen)

def on_cpu(rank, whose, path):
    "Whether a loader, and opening the group, do without CUDA"
    if whose=='theirs': their.DistributedDL._broadcast = their_broadcast
    try: list(share(TfmdDL(list(range(8)), bs=2, num_workers=0), rank, whose))
    except (AssertionError,RuntimeError) as e: loads = 'CUDA' in str(e) or 'NVIDIA' in str(e) or str(e)
    else: loads = True
    finally:
        if whose=='theirs': their.DistributedDL._broadcast = broadcast
    if whose=='ours': return loads,setup_distrib().type
    try: their.setup_distrib(0)
    except (AssertionError,RuntimeError,AttributeError) as e: return 'no CUDA' if loads is True else loads,type(e).__name__

def logged(rank, whose, path):
    learn = make(2, 0, metrics=[], path=path)
    learn.model.device = torch.device('cpu')
    with quiet(learn), learn.distrib_ctx(): learn.fit(1, cbs=CSVLogger(append=True))
    dist.barrier()
    return len((path/'history.csv').read_text().splitlines()) # a header and a line

def reduces(rank, whose, path):
    learn = make(2, 0, bs=16, n=96, metrics=[])
    learn.model.device = torch.device('cpu')
    calls = []
    class Hooked(Callback):
        order = 2000
        def before_train(self):
            ddp = getattr(vars(self.learn).get('wrapper'), 'ddp', self.learn.model) # ours; or fastai's
            if isinstance(ddp, DistributedDataParallel): ddp.register_comm_hook(calls, hook)
    with quiet(learn), learn.distrib_ctx(): learn.fit(1, cbs=[GradientAccumulation(16),Hooked])
    return len(calls)

def hook(calls, bucket):
    calls.append(1)
    fut = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
    return fut.then(lambda f: f.value()[0])

def ignores(rank, whose, path):
    "Whether an option with no effect is taken in silence"
    try:
        with make(2, 0, metrics=[]).distrib_ctx(gradient_accumulation_steps=4): return True
    except ValueError: return False

def leaves(rank, whose, path):
    "Whether BatchNorm layers stay converted after a fit"
    learn = make(2, 0, model=bn, metrics=[])
    learn.model.device = torch.device('cpu')
    with quiet(learn), learn.distrib_ctx():
        if whose=='ours': learn.fit(1)
        else: # DDP refuses torch's SyncBatchNorm on the CPU
            cb = learn.distributed_trainer
            cb.accelerator.prepare = lambda m: SimpleNamespace(module=m, device=torch.device('cpu'))
            cb.before_fit(), cb.after_fit()
    return any('Sync' in type(m).__name__ for m in learn.model.modules())

parts = measures,predicts,counts,longest,order,on_cpu,logged,reduces,ignores,leaves

def all_parts(rank, whose, path):
    (path/whose).mkdir(exist_ok=True)
    return {f.__name__: f(rank, whose, path/whose) for f in parts}

def test_what_is_wrong_there_is_right_here(tmp_path):
    learn = learner()
    with quiet(learn): true = [float(o) for o in learn.validate()]
    wrong,right = [run_ranks(on_ranks, 2, all_parts, whose, whose, tmp_path) for whose in ('theirs','ours')]
    for a,b in zip(wrong, right):
        assert b['measures']==pytest.approx(true, abs=1e-7) and any(abs(o-t)>1e-4 for o,t in zip(a['measures'], true))
        assert b['predicts']==list(range(16))!=a['predicts']
        assert b['counts'] and not a['counts']
        assert b['order']==0 and a['order']==50
        assert b['on_cpu']==(True,'cpu') and a['on_cpu'][0]=='no CUDA' and a['on_cpu'][1] is not None
        assert (b['logged'],a['logged'])==(2,4)
        assert (b['reduces'],a['reduces'])==(3,6)
        assert a['ignores'] and not b['ignores']
        assert a['leaves'] and not b['leaves']
    lens = [abs(r[0]['longest']-r[1]['longest']) for r in (wrong,right)]
    assert lens==[64,8]

class Fails(Callback):
    def after_loss(self): raise KeyError('here')

def fails(rank):
    learn = make(2, 0, metrics=[])
    learn.model.device = torch.device('cpu')
    try:
        with quiet(learn), learn.distrib_ctx(): learn.fit(1, cbs=Fails)
    except KeyError: pass
    except Exception: pass # the other rank's
    return isinstance(learn.model, DistributedDataParallel),any(type(o) is not TfmdDL for o in learn.dls.loaders)

def test_an_exception_leaves_no_trace():
    wrong,right = both(fails)
    assert right==[(False,False)]*2 and wrong==[(True,True)]*2

def alone(whose):
    "Whether the trainer stays on one process that a launcher started"
    if whose=='theirs':
        theirs()
        dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    learn = make(1, 0, metrics=[])
    with learn.distrib_ctx(): pass
    return any('Distributed' in type(cb).__name__ for cb in learn.cbs)

def test_one_process_of_a_launcher_gets_its_learner_back():
    assert [run_ranks(alone, 1, whose) for whose in ('theirs','ours')]==[[True],[False]]

def finds(rank, path):
    torch.manual_seed(0)
    learn = make(2, 0, metrics=[], path=path)
    learn.model.device = torch.device('cpu')
    before = [p.detach().clone() for p in learn.model.parameters()]
    with quiet(learn), learn.distrib_ctx(): learn.lr_find(num_it=12, stop_div=False, show_plot=False, suggest_funcs=None)
    return all(torch.equal(a, b) for a,b in zip(before, learn.model.parameters()))

def test_lr_find_restores_every_rank(tmp_path):
    assert run_ranks(on_ranks, 2, finds, 'ours', tmp_path)==[True,True]
    assert run_ranks(on_ranks, 2, finds, 'theirs', tmp_path)==[True,False] # rank 1 has nothing to reload

def downloads(): raise OSError('no disk')

def first(rank, whose, path):
    "Rank 0 fails; does the other one hear of it while rank 0 is still there?"
    store = dist.FileStore(str(path/whose), 2)
    call = rank0_first if whose=='ours' else their.rank0_first
    try: call(downloads)
    except Exception as e: what = type(e).__name__,'no disk' in str(e)
    if rank: store.set('heard', 'yes')
    try: store.wait(['heard'], timedelta(seconds=1 if whose=='theirs' else 60)) # theirs would wait as long as it likes
    except RuntimeError: return what,'alone'
    return what,'heard'

def test_rank0_first_tells_the_others(tmp_path):
    assert run_ranks(on_ranks, 2, first, 'ours', 'ours', tmp_path)==[(('OSError',True),'heard'), (('RankError',True),'heard')]
    zero,one = run_ranks(on_ranks, 2, first, 'theirs', 'theirs', tmp_path)
    assert zero==(('OSError',True),'alone') and not one[0][1]

def test_there_is_a_launcher():
    assert find_spec('fastai.launch') is None and find_spec('learnerdist.launch')

def test_every_option_of_theirs_is_taken_or_an_error_and_is_in_the_docs():
    page = json.loads((root/'nbs/tutorials/from_fastai_distributed.ipynb').read_text())
    named = {*re.findall(r'`(\w+)[=`]', '\n'.join(''.join(o['source']) for o in page['cells']))}
    lib = find_spec('accelerate').submodule_search_locations[0]
    source = ast.parse(Path(lib, 'accelerator.py').read_text()) # not imported, as it changes the environment
    init = next(f for c in source.body if getattr(c, 'name', '')=='Accelerator' for f in c.body if getattr(f, 'name', '')=='__init__')
    options = {o.arg for o in init.args.args} - {'self'}
    assert {'device_placement','dataloader_config'} < options and options <= named
    learn = make()
    for o in options-{'split_batches','mixed_precision'}: # the latter is an option of DDP's
        with pytest.raises(ValueError, match=o): learn.to_distributed(**{o: 1})
