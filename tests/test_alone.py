"One process: every public call works without a launcher, and costs no group and no wrapper"
import contextlib,io,warnings
import pytest, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import learnerdist.all as everything
from learnerdist.all import *
from learnerdist.core.collectives import gather_rows
from learnerdist.core.env import in_group
from learnerdist.launch import run
from learnerdist.learner.losses import mean_over
from learnerdist.testing import run_ranks

@pytest.fixture(params=['no variable','world of one'])
def alone(request, monkeypatch):
    "The environment of a plain script, or of a launcher that starts one process"
    for k in ('RANK','WORLD_SIZE','LOCAL_RANK','LOCAL_WORLD_SIZE','MASTER_ADDR','MASTER_PORT'): monkeypatch.delenv(k, raising=False)
    if request.param=='world of one':
        monkeypatch.setenv('WORLD_SIZE', '1')
        monkeypatch.setenv('RANK', '0')
    return request.param

class Spy(Callback):
    "Types and groups at each event, and the samples"
    order = 40
    def __init__(self): self.types,self.groups,self.samples = set(),set(),[]
    def _note(self):
        self.types.add(type(getattr(self.learn.wrapper, 'ddp', self.model))) # what the loop calls
        self.groups.add(dist.is_initialized())
    def before_fit(self): self._note()
    def before_train(self): self.samples.append([])
    def after_batch(self):
        self._note()
        if self.training: self.samples[-1] += self.xb[0][:,0].tolist()

def make(path, n=22, cbs=None, bs=4):
    torch.manual_seed(0)
    x = torch.arange(n*1.)[:,None].repeat(1, 3)
    y = torch.arange(n)%2
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return Learner(DataLoaders(TfmdDL(TensorDataset(x, y), bs, shuffle=True), TfmdDL(TensorDataset(x, y), 5), path=path), model,
                   F.cross_entropy,
                   torch.optim.SGD, metrics=[accuracy, AccumMetric(lambda p,t: (p.argmax(-1)==t).double().mean(), name='same')], cbs=cbs)

def test_split_batches_of_a_batch_sampler(alone):
    "One process has nothing to split"
    ds = TensorDataset(torch.ones(6, 3), torch.arange(6)%2)
    learn = Learner(DataLoaders(torch.utils.data.DataLoader(ds, batch_sampler=[[0,1,2],[3,4],[5]])), nn.Linear(3, 2), F.cross_entropy,
                    torch.optim.SGD)
    with learn.distrib_ctx(split_batches=True): learn.fit(1)
    assert len(learn.recorder.losses)==3

class Zipped:
    "Inputs of one loader, targets of another"
    def __init__(self, *dls): self.dls = dls
    def __len__(self): return min(map(len, self.dls))
    def __iter__(self): return ((x,y) for (x,_),(_,y) in zip(*self.dls))

def test_a_loader_of_any_kind(alone, tmp_path):
    def weights(ctx):
        learn = make(tmp_path)
        learn.dls = DataLoaders(*[Zipped(*[torch.utils.data.DataLoader(learn.dls[i].dataset, 4) for _ in range(2)]) for i in range(2)])
        with learn.distrib_ctx() if ctx else contextlib.nullcontext(): learn.fit(2)
        return [o.tolist() for o in learn.model.parameters()],learn.recorder.values
    assert weights(True)==weights(False)

def test_every_call(alone, tmp_path, capsys):
    spy = Spy()
    learn = make(tmp_path, cbs=[spy, CSVLogger()])
    learn.fit(1)
    learn.fit_one_cycle(1)
    learn.save('a')
    learn.load('a')
    with learn.parallel_ctx(): learn.fit(1)
    learn.to_parallel().fit(1)
    learn.detach_parallel()
    with learn.distrib_ctx(sync_bn=True, find_unused_parameters=True) as same:
        assert same is learn
        learn.fit(2)
        loss,acc,same_acc = learn.validate()
        preds,targs = learn.get_preds()
        learn.save('b')
        learn.load('b')
        assert learn.predict(torch.zeros(3)).shape==(2,)
    learn.to_distributed().fit(1)
    learn.detach_distributed()
    with learn.distrib_ctx(split_batches=True): learn.fit(1)
    assert spy.types=={nn.Sequential} and spy.groups=={False}
    assert targs.tolist()==[i%2 for i in range(22)] and preds.shape==(22, 2)
    assert acc==pytest.approx((preds.argmax(-1)==targs).float().mean().item(), abs=1e-7)==same_acc
    assert loss==pytest.approx(F.cross_entropy(preds, targs).item(), abs=1e-6)
    assert len((tmp_path/'history.csv').read_text().splitlines())==2 # the last fit's
    assert capsys.readouterr().out.count('epoch ')==7

def test_functions(alone):
    assert rank_distrib()==0 and local_rank()==0 and num_distrib()==(1 if alone=='world of one' else 0)
    assert (group_rank(),group_size(),in_group())==(0, 1, False)
    distrib_barrier()
    t = torch.ones(2)
    assert all_sum(t) is t and all_mean(t, 1).tolist()==[1, 1] and gather_rows(t)[0] is t and gather_objects(3)==[3]
    assert broadcast_object(3)==3
    assert rank0_first(max, 3, 4)==4 and run(max, 3, 4)==4
    with process_group() as device: assert device==default_device() and not in_group()
    undo = sync_batchnorm(nn.BatchNorm1d(2))
    undo()
    DistributedTrainer()

def quiet(): return contextlib.redirect_stdout(io.StringIO())

def test_outside_a_context_the_order_is_torchs(tmp_path):
    spy = Spy()
    learn = make(tmp_path, cbs=spy)
    torch.manual_seed(9)
    with quiet(): learn.fit(1)
    torch.manual_seed(9)
    assert spy.samples==[[v for b in learn.dls.train for v in b[0][:,0].tolist()]]

def rank_outside(folder):
    "Two real ranks outside a context: each trains by itself, rank 0 alone prints and writes"
    rank,out = rank_distrib(),io.StringIO()
    learn = make(folder/str(rank), cbs=[CSVLogger()])
    torch.manual_seed(5)
    with contextlib.redirect_stdout(out):
        learn.fit(2)
        preds = learn.get_preds()[0]
    learn.path = folder
    learn.save('m')
    return out.getvalue(),preds.tolist(),(folder/str(rank)/'history.csv').exists(),dist.is_initialized(),learn.load('m') is learn

def test_two_ranks_outside_a_context(tmp_path):
    learn = make(tmp_path)
    torch.manual_seed(5)
    with quiet(): learn.fit(2)
    want = learn.get_preds()[0].tolist()
    for r,(out,preds,file,is_open,loaded) in enumerate(run_ranks(rank_outside, 2, tmp_path, timeout_s=60)):
        assert preds==want and bool(out)==file==(r==0) and not is_open and loaded

def test_names_that_stay():
    import learnerdist.distributed as d
    names = '''ParallelTrainer DistributedTrainer DistributedDL setup_distrib teardown_distrib rank0_first rank_distrib
        num_distrib distrib_barrier'''
    methods = '''to_parallel detach_parallel parallel_ctx to_distributed detach_distributed distrib_ctx fit fit_one_cycle validate get_preds
        predict save load add_cb add_cbs remove_cb remove_cbs added_cbs no_bar no_logging'''
    assert {*names.split()}<={*d.__all__} and all(hasattr(everything, k) for k in names.split())
    assert all(hasattr(Learner, k) for k in methods.split())

def test_a_scripted_module_can_be_the_loss():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # torch.jit is deprecated
        assert mean_over(torch.jit.script(nn.MSELoss())).kind=='unknown'

def test_class_weights_with_small_integers_as_targets():
    over = mean_over(nn.CrossEntropyLoss(torch.tensor([1.,3.])))
    for dtype in (torch.int8,torch.uint8,torch.int16,torch.int64): assert over.count(None, torch.tensor([0,1,1], dtype=dtype))==7
