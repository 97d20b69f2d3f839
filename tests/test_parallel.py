"The DataParallel wrapper comes with a fit and goes with it"
from gpus import visible
import pytest, torch
from torch import nn
from torch.nn.parallel import DataParallel
import learnerdist.distributed.data_parallel as par
from learnerdist.learner.callback import Callback
from learnerdist.data.loaders import DataLoaders
from learnerdist.core.env import process_group
from learnerdist.learner.learner import Learner
from learnerdist.distributed.data_parallel import ParallelTrainer, parallel_ids
from learnerdist.testing import run_ranks

def cuda(i=None): return torch.device('cuda', i)
cpu = torch.device('cpu')

class Spy(Callback):
    "Notes the type of the model at each event it answers, and raises what it is told to"
    order = 99
    def __init__(self, error=None, at='after_batch'): self.seen,self.error,self.at = {},error,at
    def note(self, event):
        self.seen[event] = type(self.model)
        if self.error and event==self.at: raise self.error
    def before_fit(self): self.note('before_fit')
    def after_batch(self): self.note('after_batch')
    def after_fit(self): self.note('after_fit')

class Early(Spy): order = -100

def make(tmp_path=None, cbs=None):
    torch.manual_seed(1)
    x = torch.arange(8.)[:, None]/8
    return Learner(DataLoaders([(x, 3*x)]*3, [(x, 3*x)]), nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD, lr=.1, cbs=cbs, path=tmp_path)

@pytest.fixture
def two_gpus(monkeypatch):
    "The choice of GPUs says two; without GPUs, DataParallel then calls the plain model"
    monkeypatch.setattr(par, 'parallel_ids', lambda ids, device, n: [0,1] if ids is None else ids)

def names(learn): return [type(o).__name__ for o in learn.cbs]

# --- which GPUs -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('ids,device,n,want', [
    ([1,0], cuda(0), 2, [0,1]), (['cuda:0', cuda(2)], cuda(2), 3, [2,0]), ([1], cuda(1), 2, []), ([0,1,7], cpu, 0, [])])
def test_ids(ids, device, n, want): assert parallel_ids(ids, device, n)==want

@pytest.mark.parametrize('ids,msg', [
    ([0,2], r'names \[2\], but 2 GPUs'), ([-1], r'\[-1\]'), (['cuda'], 'None'), ([1,1], 'twice'), (5, r'\[5\]'), ([1], 'cpu')])
def test_bad_ids(ids, msg):
    with pytest.raises(ValueError, match=msg): parallel_ids(ids, cpu, 2)

def test_bad_ids_are_refused_at_once_and_change_nothing(monkeypatch):
    learn = make()
    cbs = list(learn.cbs)
    monkeypatch.setattr(torch.accelerator, 'device_count', lambda: 2)
    for f in (learn.to_parallel, lambda ids: learn.parallel_ctx(ids).__enter__(), ParallelTrainer):
        with pytest.raises(ValueError, match=r'\[3\]'): f([0,3])
    assert learn.cbs==cbs
    learn.to_parallel([0,1])
    with pytest.raises(ValueError, match=r'\[9\]'): learn.to_parallel([9])
    assert learn.parallel_trainer.device_ids==[0,1]

# --- the wrapper --------------------------------------------------------------------------------------------------------------

def test_wrapped_for_the_fit_only(two_gpus, tmp_path):
    spy,early = Spy(),Early()
    learn = make(tmp_path, [spy, early])
    model,plain = learn.model,make()
    plain.fit(2)
    assert learn.to_parallel() is learn and learn.model is model
    learn.fit(1)
    learn.fit(1)
    assert spy.seen==dict(before_fit=DataParallel, after_batch=DataParallel, after_fit=nn.Linear)
    assert early.seen['before_fit'] is nn.Linear
    assert learn.model is model and torch.equal(model.weight, plain.model.weight)
    assert learn.detach_parallel() is learn and 'ParallelTrainer' not in names(learn)
    learn.fit(1)
    assert spy.seen['before_fit'] is nn.Linear

def test_files_have_plain_keys_during_the_fit_too(two_gpus, tmp_path):
    class SaveEach(Callback):
        def after_epoch(self): self.learn.save('during', with_opt=False)
    learn = make(tmp_path, SaveEach).to_parallel()
    learn.fit(1)
    learn.save('after', with_opt=False)
    for o in ('during', 'after'): assert set(torch.load(tmp_path/f'models/{o}.pth', weights_only=True))=={'weight', 'bias'}
    learn.load('during')

@pytest.mark.parametrize('at', ['before_fit', 'after_batch', 'after_fit'])
@pytest.mark.parametrize('error', [KeyError('x'), KeyboardInterrupt()])
def test_an_exception_leaves_no_trace(two_gpus, error, at):
    learn = make()
    model,cbs = learn.model,list(learn.cbs)
    with pytest.raises(type(error)):
        with learn.parallel_ctx(): learn.fit(1, cbs=Spy(error, at))
    assert learn.model is model and learn.cbs==cbs

def test_body_that_detaches_and_nested_contexts(two_gpus):
    learn = make().to_parallel([0,1])
    with learn.parallel_ctx([0,1,2]):
        assert learn.parallel_trainer.device_ids==[0,1,2]
        learn.detach_parallel()
    assert names(learn).count('ParallelTrainer')==1 and learn.parallel_trainer.device_ids==[0,1]

def test_a_wrapper_of_the_users_stays(two_gpus):
    learn = make()
    learn.model = wrapped = DataParallel(learn.model)
    with learn.parallel_ctx(): learn.fit(1)
    assert learn.model is wrapped

def in_two_ranks():
    old,par.parallel_ids = par.parallel_ids,lambda *args: [0,1]
    try:
        with process_group():
            with pytest.raises(ValueError, match='one of 2 ranks'), make().parallel_ctx() as learn: learn.fit(1)
    finally: par.parallel_ids = old

def test_several_gpus_in_each_of_several_ranks_are_refused(): run_ranks(in_two_ranks, 2)

def rank_two_gpus():
    plain,spy = make(),Spy()
    plain.fit(2)
    learn = make(cbs=spy)
    with learn.parallel_ctx(): learn.fit(2)
    return spy.seen['after_batch'] is DataParallel,learn.model.weight.cpu(),plain.model.weight.cpu()

@pytest.mark.cuda
@pytest.mark.skipif(len(visible)<2, reason='needs two GPUs')
def test_two_gpus_train_the_same_weights():
    (is_parallel,got,want), = run_ranks(rank_two_gpus, 1, env=dict(CUDA_VISIBLE_DEVICES=','.join(visible)))
    assert is_parallel
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
