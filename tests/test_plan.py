"`--plan`: each figure within 5 % of what real ranks hold, send and write; both Learners, replicated and sharded; nothing is written"
from functools import partial
from pathlib import Path
from unittest.mock import patch
import pytest,torch
import torch.distributed as dist
from fastai.basics import DataLoader as FastaiDataLoader,DataLoaders as FastaiDataLoaders,Learner as FastaiLearner
from torch import nn
from learnerdist.all import *
import learnerdist.fastai # noqa: F401
from learnerdist.core.compat import fsdp_on_cpu,tree_leaves
from learnerdist.core.shards import local_part
from learnerdist.learner.losses import batch_rows
from learnerdist.launch import cli
from learnerdist.core.env import planned_group
from learnerdist.plan import Traffic,plan
from learnerdist.testing import run_ranks

N,BS = 220,16

class Half(nn.Module):
    "Blocks to shard, buffers, a frozen weight, a size that does not divide"
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(100, 150), nn.ReLU(), nn.Linear(150, 100)) for _ in range(3)])
        self.norm,self.head = nn.BatchNorm1d(100),nn.Linear(100, 10)
        self.blocks[0][0].bias.requires_grad_(False)
    def forward(self, x): return self.head(self.norm(self.blocks(x)))

def make(kind='ours', path='.', cbs=()):
    torch.manual_seed(0)
    data = [(torch.zeros(100),i%10) for i in range(N)]
    if kind=='fastai':
        dls = FastaiDataLoaders(*[FastaiDataLoader(data, bs=BS, shuffle=True, num_workers=0) for _ in range(2)])
        learn = FastaiLearner(dls, Half(), nn.CrossEntropyLoss(), path=path, cbs=[*cbs])
        learn.remove_cb(learn.progress) if hasattr(learn, 'progress') else None
    else: learn = Learner(DataLoaders.from_dsets(data, data[:10], bs=BS), Half(), nn.CrossEntropyLoss(), path=path, cbs=[*cbs])
    learn.logger = lambda *args: None
    return learn

class Measure(Callback):
    "What this rank's tensors take up; what it gives to torch's collectives from the end of the second step to that of the third"
    order = 10**9-1
    def __init__(self): self.sent,self.n,self.rows,self.taken,self.seen = {},0,0,{},0
    def after_backward(self): self.grads = sum(local_part(p.grad).nbytes for p in self.model.parameters() if p.grad is not None)
    def after_step(self): self.n += 1
    def after_batch(self):
        if not self.training: return
        self.rows += batch_rows(self.learn)
        if self.n==self.seen: return # accumulated
        self.seen = self.n
        if self.n==3:
            state = [t for t in tree_leaves(self.opt.state_dict()) if isinstance(t, torch.Tensor)]
            self.taken = dict(weights=sum(local_part(p).nbytes for p in self.model.parameters()), gradients=self.grads, **self.sent,
                              buffers=sum(b.nbytes for b in self.model.buffers()), optimizer=sum(local_part(t).nbytes for t in state),
                              rows=self.rows)
        self.sent.clear()
        self.rows = 0

    def patched(self, names, kind, which):
        name = next(o for o in names.split() if hasattr(dist, o)) # the first is newer
        old = getattr(dist, name)
        def f(*args, **kw):
            self.add(kind, [*args,*kw.values()][which].nbytes)
            return old(*args, **kw)
        return patch.object(dist, name, f)
    def add(self, kind, n): self.sent[kind] = self.sent.get(kind, 0)+n
    def hook(self, group, bucket):
        t = bucket.buffer()
        self.add('all-reduce', t.nbytes)
        return old_reduce(t.div_(dist.get_world_size()), group=group, async_op=True).get_future().then(lambda f: f.value()[0])

old_reduce = dist.all_reduce
def real(kind, path, ctx, acc):
    cb = Measure()
    learn = make(kind, path, [cb,*acc])
    kw = {'comm_hook': cb.hook} if 'shard' not in ctx else {}
    with cb.patched('all_reduce', 'all-reduce', 0), cb.patched('all_gather_single all_gather_into_tensor', 'all-gather', 0), \
         cb.patched('reduce_scatter_single reduce_scatter_tensor', 'reduce-scatter', 1):
        with learn.distrib_ctx(checks=False, **ctx, **kw):
            steps = len(learn.dls.train)
            learn.fit(1, cbs=Checkpoint('ckpt'))
    files = {o.name: o.stat().st_size for o in path.glob('ckpt/*/*.pt')}
    return cb.taken|dict(steps=steps), files

cases = [(2,'ours',{},0), (2,'fastai',{},0), (4,'ours',{},0), (2,'ours',{},2*BS)]
cases += [(2,'ours',dict(shard=True),0), (4,'ours',dict(shard=dict(replicas=2)),0), (2,'fastai',dict(shard=True),0)]*fsdp_on_cpu

# Accumulation has the arithmetic of 2 ranks, replicas of a sharded model that of 4, and a sharded fastai learner that of a whole one
@pytest.mark.parametrize('W,kind,ctx,acc', [pytest.param(*o, marks=[pytest.mark.long]*(i<3)+[pytest.mark.slow]*(o[0]==4))
                                            for i,o in enumerate(cases)])
def test_real_ranks(tmp_path, W, kind, ctx, acc):
    acc = [GradientAccumulation(acc)] if acc else []
    def train():
        with (learn := make(kind, tmp_path/'none', acc)).distrib_ctx(**ctx): learn.fit(1, cbs=Checkpoint('none'))
    found = plan(train, W)
    assert not (tmp_path/'none').exists()
    taken,files = run_ranks(real, W, kind, tmp_path, ctx, acc)[0]
    sharded = 'shard' in ctx
    got = {k: o[sharded] for k,o in found.memory.items()}|found.n_bytes|dict(rows=found.samples, steps=found.steps)
    taken['steps'] = -(-taken['steps']//found.batches)
    assert got.pop("DDP's copy")==(0 if sharded else got['gradients'])
    assert {*got}=={*taken}
    for k,v in taken.items(): assert got[k]==pytest.approx(v, rel=.05), (k,got[k],v)
    if sharded: assert any(k.startswith('rows_0 … rows_') for k in found.files)
    else: assert found.files==pytest.approx(files, rel=.05, abs=3000) # the Recorder and the callbacks are in a state, too
    assert sum(found.files.values())==pytest.approx(sum(files.values()), rel=.05)

def test_one_row_of_all_ranks():
    "As torch's SyncBatchNorm gathers its statistics on a GPU"
    got = torch.zeros(1, 6)
    with planned_group(2), Traffic() as traffic: dist.all_gather_into_tensor(got, torch.ones(3))
    assert got.sum()==6 and traffic.n_bytes=={'all-gather': got.nbytes}

def fit(learn, **kw):
    with learn.distrib_ctx(**kw): learn.fit(1)

def test_what_does_not_divide():
    found = plan(lambda: fit(make()), 7)
    assert 'of 220, the last step has 108' in str(found) and found.steps==2
    many = plan(lambda: fit(make()), 1000)
    assert 'of 220, the last step has 220' in str(many) and many.steps==1
    dial = plan(lambda: fit(make(), global_bs=28, max_bs=2), 7)
    assert (dial.samples,dial.batches,dial.steps)==(4, 1, -(-220//28))
    with pytest.raises(ValueError, match='nothing to plan'): plan(lambda: make().fit(1), 2)
    whole,plain = [plan(partial(fit, make(), comm_hook=o), 2).n_bytes['all-reduce'] for o in ('powersgd',None)]
    assert whole==plain

script = """
import sys
from test_plan import *
learn = make(path=sys.argv[1], cbs=[CSVLogger(), EarlyStoppingCallback()])
learn.path.mkdir()
assert num_distrib()==256 and rank_distrib()==0 and rank0_first(lambda: 1)==1
with learn.distrib_ctx(): learn.fit_one_cycle(3, amp='bf16', cbs=[Checkpoint('ckpt'),SaveModelCallback()])
learn.save('end')
"""

def test_command(tmp_path, monkeypatch, capsys):
    "The launcher's, but in this process, where torch is there"
    (tmp_path/'a.py').write_text(script)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert cli.main(['--plan', '256', str(tmp_path/'a.py'), str(tmp_path/'here')])==0
    assert 'rank 0 of 256' in capsys.readouterr().out
    assert not [*(tmp_path/'here').iterdir()]
