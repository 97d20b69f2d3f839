"What a resumed fit says, and what it refuses before anything is trained"
import os,signal
from collections import defaultdict,deque,namedtuple
from concurrent.futures import ThreadPoolExecutor,wait
from pathlib import Path
import numpy as np
import pytest, torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR
from helpers import At, fail
from learnerdist.all import (Callback, CancelEpochException, CancelFitException, Checkpoint, DataLoaders, EarlyStoppingCallback, Learner,
                             RankError, Scheduler, TfmdDL)
from learnerdist.checkpoint.callback_state import load_states,state_of_rank,states_of
from learnerdist.checkpoint.snapshot import snapshots
from learnerdist.distributed.comparison import digest
from learnerdist.testing import run_ranks

def learner(path, n=40, bs=8, opt=torch.optim.SGD, lr=.1, loss=None):
    torch.manual_seed(1)
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(2))
    items = [*zip(x, x.sum(1, keepdim=True))]
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(.2), nn.Linear(5, 1))
    learn = Learner(DataLoaders(TfmdDL(items, bs, shuffle=True), TfmdDL(items[:8], bs)), model, loss or nn.MSELoss(), opt, lr=lr, path=path)
    learn.lines = []
    learn.logger = learn.lines.append
    return learn

def fit(path, n_epoch=2, resume=True, stop=None, every='epoch', cbs=(), one_cycle=False, **kw):
    learn = learner(path, **kw)
    cbs = [Checkpoint('ckpt', every, 100), *cbs, *([At(stop)] if stop else [])]
    try: (learn.fit_one_cycle if one_cycle else learn.fit)(n_epoch, cbs=cbs, resume=resume)
    except ZeroDivisionError: pass
    return learn

def cosine(n): return Scheduler(lambda o: CosineAnnealingLR(o, n))
def messages(learn): return [o for o in learn.lines if isinstance(o, str)]
def names(path): return [o.name for o in snapshots(path/'ckpt')]
def same(a, b): return digest(a.model.state_dict())==digest(b.model.state_dict()) and a.recorder.losses==b.recorder.losses

# --- whose checkpoints ------------------------------------------------------------------------------------------------------

def test_a_folder_of_another_run_is_refused(tmp_path):
    first,learn = fit(tmp_path, 3),learner(tmp_path)
    before,weights = names(tmp_path),digest(learn.model.state_dict())
    with pytest.raises(ValueError, match='ckpt holds checkpoints of another run, .*step_00000015.*resume=True, or use another folder'):
        learn.fit(2, cbs=Checkpoint('ckpt'))
    assert digest(learn.model.state_dict())==weights and names(tmp_path)==before and 'checkpoint' not in vars(learn)
    assert same(fit(tmp_path, 3), first)

def test_resume_names_a_folder(tmp_path):
    "As a `Checkpoint` of this folder"
    whole = fit(tmp_path/'whole', 3)
    stopped = learner(tmp_path)
    with pytest.raises(ZeroDivisionError): stopped.fit(3, cbs=At(7), resume='ckpt')
    learn = learner(tmp_path)
    learn.fit(3, resume=tmp_path/'ckpt')
    assert same(learn, whole) and 'after step 5' in messages(learn)[0] and 'checkpoint' not in vars(learn)
    with pytest.raises(ValueError, match='path=7: give a folder, or an address'): learn.fit(1, resume=7)
    with pytest.raises(ValueError, match='2 Checkpoints in one fit'): learn.fit(1, cbs=Checkpoint('b'), resume='ckpt')

def tuned(path, stop=None):
    learn = learner(path)
    learn.splitter = lambda m: [m[0].parameters(),m[2].parameters()]
    learn.fine_tune(2, cbs=[Checkpoint('ckpt', resume=True),*([stop] if stop else [])])
    return learn

class InFit(Callback):
    "Fails after these steps of the n-th fit"
    def __init__(self, n, step): self.left,self.step = n,step
    def before_fit(self): self.left -= 1
    def after_batch(self):
        if self.left==0 and self.train_iter==self.step: raise ZeroDivisionError

@pytest.mark.parametrize('n,step', [(1,3),(2,8)])
def test_fine_tune_goes_on(n, step, tmp_path):
    "In either of its two fits, each of which has a folder"
    whole = tuned(tmp_path/'whole')
    with pytest.raises(ZeroDivisionError): tuned(tmp_path, InFit(n, step))
    learn = tuned(tmp_path)
    assert same(learn, whole) and sorted(os.listdir(tmp_path/'ckpt'))[-1]=='fit_2'
    assert digest(learner(tmp_path).load('ckpt').model.state_dict())==digest(whole.model.state_dict())

class Wait(Callback):
    "Until this process is killed"
    def before_train(self):
        Path('here.tmp').write_text(f'{os.getpid()}')
        os.rename('here.tmp', 'here')
        signal.pause()

def holds(path):
    "In a process that is no rank"
    os.chdir(path)
    for k in ('RANK','WORLD_SIZE'): del os.environ[k]
    fit(path, cbs=[Wait()])

def test_a_folder_in_use_is_refused(tmp_path):
    "The lock says whose it is, and ends with the process, also if that is killed"
    with ThreadPoolExecutor() as pool:
        ends = pool.submit(run_ranks, holds, 1, tmp_path, errors='return')
        while not (tmp_path/'here').exists(): assert not wait([ends], .01).done, ends.result()
        pid = int((tmp_path/'here').read_text())
        try:
            with pytest.raises(ValueError, match=f'ckpt is in use by another run: process {pid} on .*, since 20'): fit(tmp_path)
        finally: os.kill(pid, signal.SIGKILL)
        assert 'SIGKILL' in ends.result()[0].message
    fit(tmp_path)
    assert [o.name for o in (tmp_path/'ckpt').iterdir() if o.is_file()]==[]

def test_metrics_of_training_of_a_part_of_an_epoch(tmp_path):
    "fastai's, with `train_metrics`: a warning says which batches they are without"
    recorder = pytest.importorskip('fastai.learner').Recorder
    import test_fastai_checkpoint as theirs
    class Fails(theirs.Callback):
        def after_batch(self):
            if self.train_iter==3: fail()
    for cbs in ([Fails()],[]):
        learn = theirs.learner(tmp_path).remove_cb(recorder).add_cb(recorder(train_metrics=True))
        with pytest.raises(ZeroDivisionError) if cbs else pytest.warns(UserWarning, match='of this epoch are without its first 2 batches'):
            with learn.distrib_ctx(): learn.fit(1, cbs=[*cbs,theirs.Checkpoint('ckpt', 2, resume=True)])

class Interrupts(Callback):
    "A failure, and then Ctrl-C while the fit waits for its last checkpoint"
    def after_batch(self):
        def wait(*args): raise KeyboardInterrupt
        self.learn.checkpoint.files.wait = wait
        raise ZeroDivisionError

def test_ctrl_c_while_the_end_waits_for_a_checkpoint(tmp_path):
    "The folder is free for others, and the handlers of signals are the earlier ones"
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt): fit(tmp_path, cbs=[Interrupts()])
    assert signal.getsignal(signal.SIGTERM) is before and not (tmp_path/'ckpt/.lock').exists()

# --- what is warned of -----------------------------------------------------------------------------------------------------------

def lines_of_ranks(path):
    "What two runs say, and the error of one that would begin anew"
    res = []
    for resume in (True,True,False):
        learn = learner(path)
        try:
            with learn.distrib_ctx(seed=1): learn.fit(2, cbs=Checkpoint('ckpt'), resume=resume)
        except (ValueError,RankError) as e: res.append((type(e).__name__,'holds checkpoints of another run' in str(e)))
        else: res.append([o.split(':')[0] for o in messages(learn)])
    return res

def test_rank_0_says_it_and_all_ranks_refuse(tmp_path):
    assert run_ranks(lines_of_ranks, 2, tmp_path)==[[[],['this fit was done already, after 6 steps'],('ValueError',True)],
                                                    [[],[],('RankError',True)]]

def test_differences_are_one_warning(tmp_path):
    fit(tmp_path, stop=7)
    with pytest.warns(UserWarning) as found: fit(tmp_path, lr=.2, bs=10, loss=nn.L1Loss())
    assert [str(o.message).partition('this one: ')[2].partition('. The')[0] for o in found]==[
        'loss MSELoss then, L1Loss now; lr 0.1 then, 0.2 now; batch_size 8 then, 10 now']

# --- data, schedules, epochs ------------------------------------------------------------------------------------------------

def test_another_data_set(tmp_path):
    fit(tmp_path/'mid', stop=4, every=3)
    for n in (80, 24, 8):
        messages = f'in the midst of an epoch of 40 samples, and the data set has {n} now'
        with pytest.raises(ValueError, match=messages): fit(tmp_path/'mid', n=n)
    fit(tmp_path/'end', stop=7)
    with pytest.warns(UserWarning, match='samples 40 then, 80 now'): learn = fit(tmp_path/'end', n=80)
    assert len(learn.recorder.losses)==5+10

@pytest.mark.parametrize('cbs', [[], [Scheduler(lambda o: StepLR(o, 4))], [Scheduler(lambda o: LambdaLR(o, lambda i: .9**i))]])
def test_more_epochs_where_nothing_depends_on_their_number(cbs, tmp_path):
    fit(tmp_path/'a', 2, cbs=cbs)
    learn,whole = fit(tmp_path/'a', 4, cbs=cbs),fit(tmp_path/'b', 4, cbs=cbs)
    assert same(learn, whole) and [o[1:] for o in learn.recorder.values]==[o[1:] for o in whole.recorder.values]
    fit(tmp_path/'c', 3, cbs=cbs, stop=8, every=2)
    assert same(fit(tmp_path/'c', 4, cbs=cbs), whole)
    with pytest.raises(ValueError, match='of a fit of 4 epochs, and this one has 3'): fit(tmp_path/'a', 3, cbs=cbs)

def test_more_epochs_of_a_schedule(tmp_path):
    fit(tmp_path/'a', 2, one_cycle=True)
    messages = 'with a scheduler for total_steps=10, and that of this fit is for total_steps=20.*begin another fit after learn.load'
    with pytest.raises(ValueError, match=messages): fit(tmp_path/'a', 4, one_cycle=True)
    fit(tmp_path/'b', 2, cbs=[cosine(10)])
    with pytest.raises(ValueError, match='for T_max=10, and that of this fit is for T_max=20'): fit(tmp_path/'b', 4, cbs=[cosine(20)])

def test_a_fit_that_was_cancelled_stays_done(tmp_path):
    stopper = lambda: EarlyStoppingCallback(min_delta=1e9)
    fit(tmp_path, 9, cbs=[stopper()])
    n = len(fit(tmp_path, 9, cbs=[stopper()]).recorder.values)
    learn = fit(tmp_path, 12, cbs=[stopper()])
    assert n<9 and len(learn.recorder.values)==n and 'done already' in messages(learn)[0]

class Nested(Callback):
    "Validates in an event, and keeps the losses"
    fit_state = 'got',
    def __init__(self, event, order):
        self.order,self.got = order,[]
        setattr(self, event, self.act)
    def act(self): self.got = [*self.got,self.learn.validate()[0]]

@pytest.mark.parametrize('order', [0,950])
@pytest.mark.parametrize('event', ['before_epoch','after_train','after_epoch'])
def test_a_validation_that_a_callback_starts_is_not_that_of_the_epoch(event, order, tmp_path):
    "Stopped after a state between training and validation"
    first,cut,again = [Nested(event, order) for _ in range(3)]
    whole = fit(tmp_path/'whole', 3, cbs=[first])
    fit(tmp_path/'cut', 3, cbs=[cut], every=10, stop=11)
    assert names(tmp_path/'cut')==['epoch_0001-step_00000010']
    learn = fit(tmp_path/'cut', 3, cbs=[again], every=10)
    assert same(learn, whole) and again.got==first.got and len(first.got)==3
    assert [o[1:] for o in learn.recorder.values]==[o[1:] for o in whole.recorder.values]

class CancelValidation(Callback):
    def __init__(self, exc): self.exc = exc
    def after_batch(self):
        if not self.learn.training and self.learn.epoch==0: raise self.exc

def test_a_validation_that_is_cancelled(tmp_path):
    "Later states are those of their place; a fit stays done"
    whole = fit(tmp_path/'whole', cbs=[CancelValidation(CancelEpochException)])
    fit(tmp_path/'cut', every=1, stop=8, cbs=[CancelValidation(CancelEpochException)])
    assert names(tmp_path/'cut')[-1]=='epoch_0001-step_00000007'
    assert same(fit(tmp_path/'cut', cbs=[CancelValidation(CancelEpochException)]), whole)
    fit(tmp_path/'fit', every=1, cbs=[CancelValidation(CancelFitException)])
    assert names(tmp_path/'fit')[-1]=='epoch_0001-step_00000005'

class Rates(Callback):
    "The learning rate of each step"
    def before_fit(self): self.learn.rates = []
    def before_step(self): self.learn.rates.append(self.opt.param_groups[0]['lr'])

def one_cycle_on_ranks(path, split, stop):
    learn = learner(path)
    try:
        with learn.distrib_ctx(seed=1, split_batches=split):
            learn.fit_one_cycle(2, cbs=[Rates(), Checkpoint('ckpt', 2, 9), *([At(stop)] if stop else [])], resume=True)
    except ZeroDivisionError: pass
    return len(learn.recorder.losses),learn.rates

def test_one_cycle_on_another_number_of_ranks(tmp_path):
    "3 steps an epoch on 2 ranks, 5 on one: the cycle goes on at the same part of the fit, and ends with it. With `split_batches` 5 on each"
    whole = run_ranks(one_cycle_on_ranks, 2, tmp_path/'whole', False, None)[0][1]
    run_ranks(one_cycle_on_ranks, 2, tmp_path/'a', False, 3) # a state after step 2
    n,rates = one_cycle_on_ranks(tmp_path/'a', False, None)
    assert n==8 and len(whole)==6 and rates==[whole[i] for i in (2,2,3,3,4,5)]
    # stopped a second time, after a state between two steps of the cycle
    run_ranks(one_cycle_on_ranks, 2, tmp_path/'c', False, 3)
    one_cycle_on_ranks(tmp_path/'c', False, 5)
    assert one_cycle_on_ranks(tmp_path/'c', False, None)[1]==[whole[i] for i in (3,3,4,5)]
    run_ranks(one_cycle_on_ranks, 2, tmp_path/'b', True, 3)
    assert one_cycle_on_ranks(tmp_path/'b', True, None)[0]==10

def two_fits(path, stop=None):
    learn = learner(path)
    cb = Checkpoint('ckpt', 1, resume=True)
    try:
        with learn.distrib_ctx(seed=1, split_batches=True):
            learn.fit(1, cbs=[cb, *([At(stop)] if stop else [])])
            learn.fit_one_cycle(2, cbs=cb)
    except ZeroDivisionError: pass
    return len(learn.recorder.lrs)

def test_a_schedule_after_a_fit_that_went_on_in_its_last_epoch(tmp_path):
    "As fine_tune's, which counts the steps of whole epochs"
    run_ranks(two_fits, 2, tmp_path, 3)
    assert two_fits(tmp_path)==10

def test_load_the_weights_of_a_checkpoint(tmp_path):
    "Damaged ones are in test_fuzz"
    learn = fit(tmp_path, 2)
    for o in ('ckpt', 'ckpt/epoch_0002-step_00000010', tmp_path/'ckpt'):
        other = learner(tmp_path)
        assert digest(other.load(o).model.state_dict())==digest(learn.model.state_dict()) and other.opt is None
    first = learner(tmp_path).load('ckpt/epoch_0001-step_00000005').model.state_dict()
    assert digest(first)!=digest(learn.model.state_dict())
    (tmp_path/'empty').mkdir()
    with pytest.raises(ValueError, match='empty is no checkpoint, and holds none'): learn.load('empty')

# --- the state of callbacks -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('value', [defaultdict(int), deque(), {1}, namedtuple('Pair', 'a b')(1, 2), object(),
                                   np.datetime64('2026-01-01'), np.array(['a'])])
def test_a_state_that_would_not_come_back_is_refused(value, tmp_path):
    class Odd(Callback):
        fit_state = 'value',
        def before_fit(self): self.value = value
    with pytest.raises(ValueError, match=f'odd.value: a {type(value).__name__} is no plain data: keep numbers'):
        fit(tmp_path, cbs=[Odd()])

def test_numbers_of_numpy_come_back_in_their_types(tmp_path):
    class Numbers(Callback):
        fit_state = 'value',
        value = [np.float32(.1),{'a': np.int64(3)},np.bool_(True),np.complex64(1+2j),np.float64(.1),np.array(2.)]
    class Nothing(Numbers): name,value = 'numbers',None
    fit(tmp_path, cbs=[Numbers()])
    again = Nothing()
    fit(tmp_path, cbs=[again])
    assert repr(again.value)==repr(Numbers.value)

class InPlace(Callback):
    "Counts in validation, in place"
    fit_state = 'n','tensor'
    def before_fit(self): self.n,self.tensor = np.zeros(1),torch.zeros(1)
    def after_batch(self):
        if self.training: return
        self.n += 1
        self.tensor += 1

def test_a_state_is_that_of_its_moment(tmp_path):
    "SIGTERM comes within a validation loop, which is done again from its beginning"
    class Kill(Callback):
        def after_batch(self):
            if not self.training and self.epoch==0: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit): fit(tmp_path, cbs=[InPlace(),Kill()])
    cb = InPlace()
    fit(tmp_path, cbs=[cb])
    assert (cb.n.item(),cb.tensor.item())==(2,2)

def test_a_file_sets_only_what_fit_state_names():
    cb = InPlace()
    cb.before_fit()
    load_states([cb], dict(in_place=dict(n=3, fname='elsewhere', learn=5)), 'fit_state')
    assert cb.n==3 and 'fname' not in vars(cb) and cb.learn is None and states_of([cb], 'fit_state')['in_place']['n']==3

def test_the_state_of_a_callback_that_rank_0_alone_has():
    "A restart with fewer ranks"
    states = [dict(a=dict(seen=torch.tensor(2.)), b=dict(n=torch.tensor(5.))),dict(a=dict(seen=torch.tensor(1.)))]
    assert [state_of_rank(states, r) for r in (0,1)]==[dict(a=dict(seen=3.), b=dict(n=5.)),dict(a=dict(seen=0.), b=dict(n=0.))]
