"Schedules and trackers on several ranks decide what one process at W·bs decides, and every rank goes back to the same weights"
from functools import partial
from pathlib import Path
import pytest, torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import TensorDataset
import scenes
from harness import close
from helpers import Raise, weights
from scenes import draws, scene
from learnerdist.all import *
from learnerdist.testing import run_ranks

def sums(n):
    x = draws(n, 3, dtype=scenes.F64)
    return TensorDataset(x, x.sum(1, keepdim=True)*.5+.1)
def small(): return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
# 2 steps an epoch, on 2 ranks at 6 each and on 3 ranks at 4
c = scene(ds=sums, model=small, n=24, n_valid=10, bs=12)

def make(path='.', **kw):
    learn = scenes.make(dict(c, opt=partial(torch.optim.SGD, **kw)), group_size(), group_rank())
    learn.path,learn.logger = path,lambda line: None
    return learn

def files(learn): return sorted(o.name for o in Path(learn.path).rglob('*') if o.is_file())

def downhill_then_up(n=3):
    "The loss falls for `n` epochs, and rises from then on"
    return Scheduler(partial(LambdaLR, lr_lambda=lambda epoch: 1. if epoch<n else -1.), by='epoch')

class Refuse(Callback):
    "Cancel these steps on `rank`, however often they are tried"
    def __init__(self, steps, rank): self.steps,self.rank = steps,rank
    def before_step(self):
        if group_rank()==self.rank and self.train_iter in self.steps: raise CancelStepException

class Snapshots(Callback):
    "The weights at the end of each epoch"
    order = 200
    def before_fit(self): self.learn.shots = []
    def before_validate(self): self.shots.append(weights(self.learn))

def result(learn):
    rec = learn.recorder
    distrib_barrier() # rank 0 has written its files
    return dict(values=[list(o) for o in rec.values], lrs=list(rec.lrs), weights=weights(learn), files=files(learn), shots=learn.shots,
                n_steps=len(rec.losses))

def fit(path, n_epoch=6, learn=None, **kw):
    learn = learn or make(path)
    cbs = [Snapshots(),*kw.pop('cbs')]
    with learn.distrib_ctx(seed=3):
        learn.fit(n_epoch, cbs=cbs, **kw)
        return result(learn)

# --- cases: the same on one process and on several ---------------------------------------------------------------------------

def early_first(path): return fit(path, cbs=[EarlyStoppingCallback(min_delta=100.), downhill_then_up()])
def best_with_opt(path): return fit(path, learn=make(path, momentum=.5), cbs=[downhill_then_up(), SaveModelCallback(with_opt=True)])
def best_and_early(path): return fit(path, cbs=[EarlyStoppingCallback(patience=2), SaveModelCallback(fname='best'), downhill_then_up()])
def top(path): return fit(path, cbs=[downhill_then_up(), SaveModelCallback(keep=3)])
def plateau(path): return fit(path, cbs=[ReduceLROnPlateauCallback(factor=.5, patience=0, threshold=.02), Scheduler(warm_up(2))])
def ramp(path): return fit(path, 4, cbs=[Scheduler(warm_up(4, partial(StepLR, step_size=2, gamma=.1), start=.2))])
def all_cancel_a_step(path):
    return fit(path, 3, cbs=[Scheduler(partial(StepLR, step_size=1, gamma=.5)), Raise('before_step', CancelStepException, at=2)])
def epoch_not_measured(path):
    return fit(path, cbs=[downhill_then_up(), Raise('before_train', CancelEpochException, at=1, order=0), EarlyStoppingCallback(patience=2),
                          SaveModelCallback()])

def two_fits(path, **kw):
    learn = make(path)
    cbs = [downhill_then_up(), SaveModelCallback(keep=2, **kw), EarlyStoppingCallback(patience=2, **kw)]
    learn.add_cbs(cbs)
    first = fit(path, learn=learn, cbs=[])
    second = fit(path, learn=learn, cbs=[], lr=.01)
    return dict(second, first=first)

def two_fits_going_on(path): return two_fits(path, reset_on_fit=False)

cases = {f.__name__:f for f in (early_first, best_with_opt, best_and_early, top, plateau, ramp,
                                all_cancel_a_step, epoch_not_measured, two_fits, two_fits_going_on)}

def run_cases(path):
    with process_group(): return {k:f(Path(path)/k) for k,f in cases.items()}

@pytest.fixture(scope='module')
def alone(tmp_path_factory): return run_cases(tmp_path_factory.mktemp('alone'))

@pytest.fixture(scope='module', params=[2,pytest.param(3, marks=pytest.mark.long)])
def ranks(request, tmp_path_factory): return run_ranks(run_cases, request.param, tmp_path_factory.mktemp('ranks'))

@pytest.mark.parametrize('name', list(cases))
def test_like_one_process_and_equal_on_all_ranks(alone, ranks, name):
    want = alone[name]
    for r in (o[name] for o in ranks):
        assert len(r['values'])==len(want['values']) and r['files']==want['files'] and r['n_steps']==want['n_steps']
        for k in ('values','lrs','weights'): close(r[k], want[k])
        assert torch.equal(r['weights'], ranks[0][name]['weights']) and r['values']==ranks[0][name]['values']

def valid_losses(r): return [o[1] for o in r['values']]

@pytest.mark.parametrize('name', ['best_and_early','best_with_opt'])
def test_best_weights_come_back(alone, ranks, name):
    for r in (alone[name],*(o[name] for o in ranks)):
        i = min(range(len(r['values'])), key=valid_losses(r).__getitem__)
        assert i==2 and torch.equal(r['weights'], r['shots'][i]) and len(r['files'])==1
    assert alone['best_and_early']['files']==['best.pth'] and len(alone['best_and_early']['values'])==5

def test_rates_by_hand(alone):
    close(alone['ramp']['lrs'], [.02,.04,.06,.08,.1,.1,.01,.01])
    close(alone['all_cancel_a_step']['lrs'], [.1,.05,.025,.025,.0125,.00625])

def test_an_epoch_without_a_number_decides_nothing(alone):
    r = alone['epoch_not_measured']
    assert valid_losses(r)[1] is None and len(r['values'])==5 and torch.equal(r['weights'], r['shots'][1])

def test_second_fit_forgets_or_goes_on(alone):
    r,first = alone['two_fits'],alone['two_fits']['first']
    best = sorted(range(5), key=valid_losses(first).__getitem__)[:2]
    assert len(first['values'])==5 and first['files']==[f'model_{i}.pth' for i in sorted(best)]
    assert r['lrs'][0]==.01 and len(r['values'])==5 and len(r['files'])==2
    on = alone['two_fits_going_on']
    assert len(on['files'])==2 and all(int(o[6:-4])>=5 for o in on['files']) # the second fit improves on the first, in names of its own

def one_rank_cases(path):
    "What happens on all ranks when rank 0, or the last one, has something that the others have not"
    path,res = Path(path),{}
    with process_group():
        for rank in (0,group_size()-1):
            stop = [EarlyStoppingCallback(patience=2)] if group_rank()==rank else []
            res['stop',rank] = fit(path/f'stop{rank}', cbs=[downhill_then_up(), *stop, SaveModelCallback()])
            for order in (0,80): # before the tracker, and after it
                cancel = Raise('after_epoch', CancelFitException, rank, at=2, order=order)
                res['cancel',rank,order] = fit(path/f'cancel{rank}{order}', cbs=[cancel, SaveModelCallback()])
            cbs = [Raise('after_loss', CancelFitException, rank, at=5, run_valid=False), SaveModelCallback()]
            res['after_loss',rank] = fit(path/f'loss{rank}', cbs=cbs)
            cbs = [Refuse((1,2,3), rank), Scheduler(partial(StepLR, step_size=1, gamma=.5))]
            res['step',rank] = fit(path/f'step{rank}', 3, cbs=cbs)
        return res

def test_one_rank_alone_decides_for_all(tmp_path):
    n = 2
    res = run_ranks(one_rank_cases, n, tmp_path)
    for k,want in res[0].items():
        for r in res:
            assert torch.equal(r[k]['weights'], want['weights']), k
            assert (len(r[k]['values']),r[k]['lrs'][:3],r[k]['files'])==(len(want['values']),want['lrs'][:3],want['files']), k
    for rank in (0,n-1):
        r = res[0]['stop',rank]
        assert len(r['values'])==5 and torch.equal(r['weights'], r['shots'][2])
        for order in (0,80):
            r = res[0]['cancel',rank,order]
            assert len(r['values'])==3 and torch.equal(r['weights'], r['shots'][2]) and r['files']==['model.pth']
        assert torch.equal(res[0]['after_loss',rank]['weights'], res[0]['after_loss',rank]['shots'][1])
        for r in res: close(r['step',rank]['lrs'], [.1,.05,.025,.0125,.00625,.003125]) # the others have taken the steps

# --- NaN ----------------------------------------------------------------------------------------------------------------------

def spoilt(bad, n=24, **kw):
    "A loader, of which these samples are infinite"
    x,y = sums(n).tensors
    x[bad] *= float('inf')
    return TfmdDL(TensorDataset(x, y), 12//group_size(), **kw)

def nan_cases(path):
    res = []
    with process_group():
        for bad in ([17],[12,13,14]): # the second step: one rank's batch, and every rank's
            learn = make(path)
            learn.dls.loaders[0] = spoilt(bad)
            res.append(fit(path, learn=learn, cbs=[TerminateOnNaNCallback(), SaveModelCallback()]))
    return res

def weights_by_hand(ranks_of_steps, world_size):
    "Plain SGD; at each step the mean of these ranks' gradients"
    learn = make()
    for i,ranks in enumerate(ranks_of_steps):
        for r in ranks:
            x,y = (o[i*12+r:(i+1)*12:world_size] for o in sums(24).tensors)
            (learn.loss_func(learn.model(x), y)/len(ranks)).backward()
        learn.prepare(.1)
        learn.opt.step()
        learn.opt.zero_grad()
    return weights(learn)

def test_nan_on_one_rank_ends_all_before_it_spreads(tmp_path):
    n = 3
    res = run_ranks(nan_cases, n, tmp_path)
    for r in res:
        for a,b in zip(r, res[0]): assert torch.equal(a['weights'], b['weights']) and a['values']==[] and a['files']==[]
    close(res[0][0]['weights'], weights_by_hand([range(n), [r for r in range(n) if r!=17%n]], n))
    close(res[0][1]['weights'], weights_by_hand([range(n)], n))

def test_nan_only_in_validation_goes_on():
    learn = make()
    learn.dls.loaders[1] = spoilt([3], 10)
    r = fit('.', 3, learn, cbs=[TerminateOnNaNCallback(), TrackerCallback()])
    assert len(r['values'])==3 and not hasattr(learn, 'tracker')

# --- what the user got wrong --------------------------------------------------------------------------------------------------

def bad_monitor(ranks):
    learn = make()
    before = list(learn.cbs)
    cbs = [EarlyStoppingCallback('acuracy')] if rank_distrib() in ranks else []
    try:
        with learn.distrib_ctx(): learn.fit(1, cbs=cbs)
    except (ValueError,RankError) as e: return type(e).__name__,str(e),learn.cbs==before

def bad_monitors(): return bad_monitor((0,1)),bad_monitor((1,))

def test_unknown_monitor():
    (both0,other),(both1,mine) = run_ranks(bad_monitors, 2)
    for kind,msg,clean in (both0,both1):
        assert kind=='ValueError' and "'acuracy' is none of ['train_loss', 'valid_loss']" in msg and clean
    assert mine[0]=='ValueError' and other[0]=='RankError' and 'rank 1 failed with ValueError' in other[1] and "'acuracy'" in other[1]

@pytest.mark.parametrize('make_cb', [partial(EarlyStoppingCallback, patience=-1), partial(EarlyStoppingCallback, patience=0),
    partial(TrackerCallback, min_delta=-.1), partial(SaveModelCallback, keep=0),
    partial(ReduceLROnPlateauCallback, patience=-1), partial(ReduceLROnPlateauCallback, mode='max'),
    partial(ReduceLROnPlateauCallback, lr=1.), partial(warm_up, 0), partial(warm_up, 3, start=2.), partial(Scheduler, StepLR, by='batch')])
def test_options(make_cb):
    with pytest.raises((ValueError,TypeError)): make_cb()
