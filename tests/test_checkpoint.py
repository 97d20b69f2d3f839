"""A fit that goes on from a checkpoint ends as one that nobody interrupted: to the bit on as many ranks. On other numbers of
ranks: test_bits.py, test_sharded_files.py, test_fastai_checkpoint.py; what is left of an epoch then: test_dealing.py"""
import json,os,random,shutil,signal,time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
import pytest, torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR,ExponentialLR,StepLR
from torch.utils.data import DataLoader, Dataset
from helpers import At,Stream,fail,kill
from learnerdist.checkpoint import checkpoint,snapshot
from learnerdist.distributed.comparison import digest
from learnerdist.all import *
from learnerdist.checkpoint.checkpoint import preempted_status
from learnerdist.testing import run_ranks

N = 70

class Shaken(Dataset):
    "Samples that differ each time that they are read, by torch's and Python's random streams"
    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.x,self.y = torch.randn(n, 6, generator=g),torch.randint(3, (n,), generator=g)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i].roll(random.randint(0, 1))+.1*torch.randn(6),self.y[i]

def loader(kind):
    ds,n_workers = Shaken(N-30*('few' in kind)),2 if 'workers' in kind else 0
    if 'stream' in kind: return DataLoader(Stream(ds), 8, num_workers=n_workers)
    return TfmdDL(ds, 8, shuffle=True, num_workers=n_workers)

def net():
    layers = [nn.Linear(6, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Dropout(.2), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3)]
    return nn.Sequential(*layers)

def cancel(): raise CancelFitException

def learner(path, kind='plain', model=None, opt=torch.optim.Adam):
    torch.manual_seed(3)
    random.seed(3)
    learn = Learner(DataLoaders(loader(kind), TfmdDL(Shaken(20, 1), 8)), model or net(), nn.CrossEntropyLoss(), opt, lr=.01,
                    metrics=accuracy, path=path)
    learn.logger = lambda line: None
    return learn

def fit(path, kind='plain', cbs=(), every=1, keep=1000, ctx=True, n_epoch=2, **kw):
    "Train with all that has a state; returns all that should be equal"
    learn,ema = learner(path, kind),EMA(.7, evaluate=True)
    trackers = [EarlyStoppingCallback(patience=9), SaveModelCallback(keep=2), ReduceLROnPlateauCallback(patience=0)]
    trackers_and_logs = [*trackers, CSVLogger(), Scheduler(lambda o: CosineAnnealingLR(o, 12))]
    cbs = [Checkpoint('ckpt', every, keep, **kw), GradientClip(), ema, *trackers_and_logs, *cbs]
    if 'accumulate' in kind: cbs.append(GradientAccumulation(20))
    with learn.distrib_ctx(bucket_cap_mb=.002) if ctx else nullcontext(): learn.fit(n_epoch, cbs=cbs, resume=True)
    rec = learn.recorder
    return dict(model=digest(learn.model.state_dict()), opt=digest(learn.opt.state_dict()), average=digest(ema.weights), values=rec.values,
                losses=rec.losses,
                lrs=rec.lrs, iters=rec.iters, best=[(cb.best,cb.best_epoch) for cb in trackers], wait=trackers[0].wait,
                kept=[o[:2] for o in trackers[1].kept], csv=(Path(path)/'history.csv').read_text(),
                streams=None if ctx else (torch.rand(1).item(),random.random()))

def differing(a, b): return [k for k in a if a[k]!=b[k]]

def start_at(path, source, name):
    "A run's folder as it was when checkpoint `name` was the last"
    if rank_distrib()==0:
        shutil.copytree(source, path, ignore=lambda d,names: [o for o in names if o.startswith('epoch_') and o!=name])
    rank0_first(lambda: None)
    return path

def resumed_everywhere(path, kind, ctx, names=None, fit=fit):
    "What differs from the whole run, for each place where it might have been interrupted"
    whole = fit(path/'whole', kind, ctx=ctx)
    rank0_first(lambda: None)
    names = names or sorted(o.name for o in (path/'whole/ckpt').iterdir())
    return {o: differing(whole, fit(start_at(path/o, path/'whole', o), kind, ctx=ctx, every='epoch')) for o in names}

@pytest.mark.parametrize('kind,n', [('plain few',11),('stream few accumulate',5)])
def test_every_place_alone(kind, n, tmp_path):
    found = resumed_everywhere(tmp_path, kind, ctx=False)
    assert len(found)==n and not any(found.values()), found

class Tempered(nn.Module):
    "A loss that learns, and counts, beside what is frozen"
    def __init__(self):
        super().__init__()
        self.scale,self.frozen = nn.Parameter(torch.ones(())),nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer('n', torch.zeros(()))
    def forward(self, pred, y):
        self.n += pred.requires_grad
        return nn.functional.cross_entropy(self.scale*pred, y)

def test_a_loss_that_learns_and_lazy_layers_go_on(tmp_path):
    def train(path, cbs=()):
        learn = learner(path, model=nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3)))
        learn.loss_func = loss = Tempered()
        learn.splitter = lambda m: [*m.parameters(), loss.scale]
        learn.fit(2, cbs=[Checkpoint('ckpt', every=4), *cbs], resume=True)
        return learn
    whole = train(tmp_path/'whole')
    with pytest.raises(ZeroDivisionError): train(tmp_path/'cut', [At(14, fail)])
    again = train(tmp_path/'cut')
    for a,b in ((whole.model,again.model), (whole.loss_func,again.loss_func)): assert digest(a.state_dict())==digest(b.state_dict())
    assert whole.recorder.losses==again.recorder.losses and whole.loss_func.scale!=1 and whole.loss_func.n==18
    state = torch.load(sorted((tmp_path/'cut/ckpt').iterdir())[-1]/'state.pt')
    assert [*state['loss']]==['loss_func.scale','loss_func.n']
    more = learner(tmp_path/'cut', model=nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3), nn.LazyLinear(3)))
    with pytest.raises(ValueError, match='3.weight: missing in the checkpoint, any shape here'):
        more.fit(2, cbs=Checkpoint('ckpt'), resume=True)

def test_a_sum_is_validated_at_the_same_scale_after_a_resume(tmp_path):
    "That of a full step, also if a short one is all that is left of the epoch"
    def values(path, cbs=()):
        learn = Learner(DataLoaders(TfmdDL(Shaken(20), 8), TfmdDL(Shaken(6, 1), 3)), net(), nn.CrossEntropyLoss(reduction='sum'), path=path)
        with learn.no_logging(), learn.distrib_ctx(seed=1): learn.fit(1, cbs=[Checkpoint('c', 1),*cbs], resume=True)
        return learn.recorder.values[0]
    torch.manual_seed(1)
    want = values(tmp_path/'whole')
    torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError): values(tmp_path/'cut', [At(3, fail)])
    assert values(tmp_path/'cut')==want

mid,end = 'epoch_0000-step_00000003','epoch_0001-step_00000005'

def on_two_ranks(path):
    path = Path(path)
    res = {kind: resumed_everywhere(path/kind, kind, True, [name]) for kind,name in
           [('plain',end), ('plain workers',mid), ('stream accumulate',mid)]}
    whole = fit(path/'plain/whole') # is done
    return res | {f'stop {k}': stopped(path/k, whole, *v) for k,v in
                  dict(training=([1],2,True), validation=([0,1],5,False), end=([0],5,True)).items()}

def stopped(path, whole, ranks, step, training, fit=fit):
    "A signal to some ranks: how all of them ended, where, and what differs after the rerun"
    try: fit(path, cbs=[At(step, kill, training)] if rank_distrib() in ranks else (), every='epoch')
    except Preempted as e: code = e.code
    else: code = 0
    rank0_first(lambda: None)
    saved = [(o.name, json.loads((o/'manifest.json').read_text())['place']['phase']) for o in (path/'ckpt').glob('epoch_*')]
    return code,saved,differing(whole, fit(path, every='epoch'))

def test_two_ranks(tmp_path):
    a,b = run_ranks(on_two_ranks, 2, str(tmp_path), timeout_s=400)
    assert a==b
    for kind in ('plain','plain workers','stream accumulate'): assert not any(a.pop(kind).values()), (kind,a)
    assert a=={'stop training': (preempted_status, [('epoch_0000-step_00000002','train')], []),
               'stop validation': (preempted_status, [('epoch_0000-step_00000005','validate')], []),
               'stop end': (preempted_status, [('epoch_0000-step_00000005','validate')], [])}

def on_three_ranks(path): return resumed_everywhere(Path(path), 'plain', True, ['epoch_0000-step_00000001','epoch_0000-step_00000002'])

def test_three_ranks(tmp_path):
    "As on several machines: there DDP's buckets, which it rebuilds after its first step, decide in which order it adds up"
    for found in run_ranks(on_three_ranks, 3, str(tmp_path), env=dict(LOCAL_WORLD_SIZE='1')): assert not any(found.values()), found

def alone_or_not(path, ctx, stop=None, every='epoch'):
    learn = learner(path, model=nn.Linear(6, 3).double(), opt=torch.optim.SGD)
    learn.add_cb(ToDouble)
    with learn.distrib_ctx(split_batches=True, seed=1) if ctx else nullcontext():
        try: learn.fit(2, cbs=[Checkpoint('ckpt', every), *([At(stop, fail)] if stop else [])], resume=True)
        except ZeroDivisionError: pass
    return learn.model.state_dict(),torch.tensor(learn.recorder.losses)

class ToDouble(Callback):
    def before_batch(self): self.learn.xb = tuple(o.double() for o in self.learn.xb)

@pytest.mark.parametrize('first', [False, True])
def test_a_fit_begun_alone_goes_on_in_a_context_and_back(first, tmp_path):
    "Between two epochs. In mid-epoch it is refused, since another order of samples follows from the seed of a context"
    alone_or_not(tmp_path/'mid', first, 5, every=3)
    with pytest.raises(ValueError, match=f"step_00000003 was made in mid-epoch {'in' if first else 'without'} a context.*every='epoch'"):
        alone_or_not(tmp_path/'mid', not first)
    alone_or_not(tmp_path/'end', first, 14)
    shutil.copytree(tmp_path/'end', tmp_path/'same')
    ended = alone_or_not(tmp_path/'end', not first)
    assert len(ended[1])==18
    if not first: torch.testing.assert_close(run_ranks(alone_or_not, 2, tmp_path/'same', True)[0], ended, rtol=0, atol=1e-9)

def saved(path, **kw):
    fit(path, ctx=False, n_epoch=1, every=3, **kw)
    return sorted((path/'ckpt').iterdir())

def again(path, **kw): return fit(path, ctx=False, n_epoch=1, every='epoch', **kw)

def damage(file, how):
    data = file.read_bytes()
    if how=='missing': file.unlink()
    else: file.write_bytes(data[:-3] if how=='truncated' else data[:-3]+b'???')

def test_a_bad_checkpoint_is_named_and_the_one_before_is_used(tmp_path):
    "Files with other damage are in test_fuzz"
    first,*others = saved(tmp_path/'a')
    whole = again(tmp_path/'whole')
    for name,how in [('state.pt','truncated'),('model.pt','corrupt'),('manifest.json','missing')]:
        path = tmp_path/how
        shutil.copytree(tmp_path/'a', path)
        for o in others[:-1]: shutil.rmtree(path/'ckpt'/o.name)
        damage(path/'ckpt'/others[-1].name/name, how)
        with pytest.warns(UserWarning, match=f'{others[-1].name}/{name}.*going on from .*{first.name}, which is older'):
            assert differing(whole, again(path))==[]
    for o in (path/'ckpt').iterdir(): damage(o/'manifest.json', 'truncated')
    with pytest.raises(ValueError, match='no checkpoint in .* is good: .*To start over, use another folder'): again(path)

def resume(path, **kw):
    learn = learner(path, **kw)
    learn.fit(1, cbs=Checkpoint('ckpt'), resume=True)
    return learn

def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    *_,last = saved(tmp_path)
    messages = r'of another model. 0.weight: \(30, 6\) in the checkpoint, \(3, 6\) here; .*1.bias: \(30,\) in the checkpoint, missing here'
    with pytest.raises(ValueError, match=messages): resume(tmp_path, model=nn.Sequential(nn.Linear(6, 3)))
    with pytest.raises(ValueError, match='with the state of Adam, and this fit uses SGD'): resume(tmp_path, opt=torch.optim.SGD)
    with pytest.warns(UserWarning, match='has the state of .*csv_logger.*, which this fit does not have'): learn = resume(tmp_path)
    with pytest.raises(ValueError, match='of fit number 1 of its script, and this is number 2: give each another folder'):
        learn.fit(1, cbs=Checkpoint('ckpt'), resume=True)
    info = {k:v for k,v in json.loads((last/'manifest.json').read_text()).items() if k!='crc32'} | dict(format=99)
    (last/'manifest.json').write_text(json.dumps(info | dict(crc32=snapshot._crc(info))))
    with pytest.raises(ValueError, match='has format 99, and this learnerdist reads 6'): again(tmp_path)
    with pytest.raises(ValueError, match='give the fit a Checkpoint'): learn.fit(1, resume=True)
    for kw in (*(dict(every=o) for o in (0, -1, 2.5, 'step', True, timedelta())), dict(keep=0)):
        with pytest.raises(ValueError, match=f'{[*kw][0]}='): Checkpoint('ckpt', **kw)

def test_what_an_optimizer_and_a_schedule_of_another_kind_would_read(tmp_path):
    def train(sched): learner(tmp_path).fit(2, cbs=[Checkpoint('ckpt'), Scheduler(sched), At(10, fail)], resume=True)
    with pytest.raises(ZeroDivisionError): train(lambda o: StepLR(o, 3))
    message = 'state is that of a StepLR, and this fit uses ExponentialLR'
    with pytest.raises(ValueError, match=message): train(lambda o: ExponentialLR(o, .9))
    learn = learner(tmp_path)
    learn.model[0].requires_grad_(False)
    before = digest(learn.model.state_dict())
    with pytest.raises(ValueError, match=r'of \[8\] parameters .in each group., and this fit has \[6\]: freeze and split as then'):
        learn.fit(2, cbs=Checkpoint('ckpt'), resume=True)
    assert digest(learn.model.state_dict())==before

def test_one_that_was_passed_over_does_not_crowd_out_the_next(tmp_path):
    _,second,*others = saved(tmp_path)
    for o in others: shutil.rmtree(o)
    damage(second/'model.pt', 'truncated')
    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match='going on from'):
        fit(tmp_path, ctx=False, n_epoch=1, every=4, cbs=[At(5, fail)], keep=1)
    assert sorted(int(o.name[-8:]) for o in (tmp_path/'ckpt').iterdir() if o.is_dir())==[4,6]

def test_a_folder_that_is_moved_in_a_fit(tmp_path, recwarn):
    fit(tmp_path, ctx=False, cbs=[At(5, lambda: (tmp_path/'ckpt').rename(tmp_path/'moved'))])
    assert not [o for o in recwarn if 'not-saved' in str(o.message)]

def full(*args): raise OSError(28, 'No space left on device')

@pytest.mark.parametrize('background', [False, True])
def test_no_room_is_an_error_and_the_last_good_one_stays(background, tmp_path, monkeypatch):
    whole = again(tmp_path/'whole')
    messages = 'No space left on device: the checkpoint was not written; earlier ones are as they were. Start again with resume=True'
    with monkeypatch.context() as m, pytest.raises(OSError, match=messages) as e:
        filled = At(5, lambda: (filled.learn.checkpoint.files.wait(), m.setattr(snapshot, 'save_sealed', full)))
        fit(tmp_path/'a', ctx=False, n_epoch=1, every=3, background=background, cbs=[filled])
    assert [o.name for o in (tmp_path/'a/ckpt').iterdir()]==[mid] and e.value.filename.startswith(f'{tmp_path}/a/ckpt/')
    assert differing(whole, again(tmp_path/'a'))==[]

def killed_while_saving(path, background):
    "At the second checkpoint, before it gets its name"
    os.environ.pop('WORLD_SIZE'), os.environ.pop('RANK')
    def rename(self, target):
        if 'step_00000006' in str(target): kill(signal.SIGKILL)
        return os.rename(self, target)
    Path.rename = rename
    fit(path, ctx=False, n_epoch=1, every=3, background=background)

@pytest.mark.parametrize('background', [False, True])
def test_killed_while_saving(background, tmp_path):
    failure = run_ranks(killed_while_saving, 1, tmp_path/'a', background, errors='return')[0]
    assert failure.kind=='ProcessDied' and 'SIGKILL' in failure.message
    left = sorted(o.name for o in (tmp_path/'a/ckpt').iterdir() if o.name!='.lock')
    assert left[1:]==[mid] and left[0].startswith('.epoch_0000-step_00000006') and left[0].endswith('.tmp')
    assert differing(again(tmp_path/'whole'), again(tmp_path/'a', keep=1))==[]
    assert [o.name for o in (tmp_path/'a/ckpt').iterdir()]==['epoch_0001-step_00000009']

def test_what_is_kept_and_when(tmp_path):
    "9 steps in an epoch"
    def names(every, keep, **kw):
        fit(tmp_path/f'{every}-{keep}', ctx=False, every=every, keep=keep, **kw)
        return [f'{int(o.name[6:10])}-{int(o.name[-8:])}' for o in sorted((tmp_path/f'{every}-{keep}/ckpt').iterdir())]
    assert names('epoch', 9)==['1-9','2-18']
    assert names('epoch', 1)==['2-18']
    assert names(4, 3)==['1-12','1-16','2-18']
    assert names(4, 9, cbs=[At(6, cancel)])==['0-4','1-6'] # a fit that was cancelled is done
    each_step = [f'{(i-1)//9}-{i}' for i in range(1, 19)]
    assert names(timedelta(microseconds=1), 99, background=True)==[*each_step[:9],'1-9',*each_step[9:],'2-18']

class Tick(Callback):
    "One second for each training step, on a clock that stands still meanwhile"
    order,now = 800,0.
    def after_batch(self): self.now += self.training

def test_a_time_is_from_one_checkpoint_to_the_next(tmp_path, monkeypatch):
    tick = Tick()
    monkeypatch.setattr(checkpoint, 'time', SimpleNamespace(**vars(time) | dict(monotonic=lambda: tick.now)))
    fit(tmp_path, ctx=False, every=timedelta(seconds=4), cbs=[tick])
    assert [int(o.name[-8:]) for o in sorted((tmp_path/'ckpt').iterdir())]==[4,8,12,16,18] # the last at the end of the fit

def test_a_fit_that_is_done_is_not_done_again(tmp_path):
    first = fit(tmp_path, ctx=False, every='epoch')
    assert differing(first, fit(tmp_path, ctx=False, cbs=[At(18, fail)]))==[]
