"Schedules and trackers on several ranks decide what one process at W·bs decides, and every rank goes back to the same weights"
from functools import partial
from pathlib import Path
import pytest, torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from helpers import weights
from learnerdist.all import (Callback, CancelEpochException, CancelFitException, CancelStepException, DataLoaders,
                             EarlyStoppingCallback, Learner, RankError, ReduceLROnPlateauCallback, SaveModelCallback, Scheduler,
                             TerminateOnNaNCallback, TfmdDL, TrackerCallback,
                             distrib_barrier, group_rank, group_size, process_group, rank_distrib, warm_up)
from learnerdist.testing import run_ranks

N,BS = 24,12 # 2 steps an epoch, on 2 ranks at 6 each and on 3 ranks at 4

def data(n=N, seed=0):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    return list(zip(x, x.sum(1, keepdim=True)*.5+.1))

def make(path='.', lr=.1, momentum=0., items=None, shuffle=True, **kw):
    torch.manual_seed(group_rank()) # rank 0's weights are everyone's
    model = nn.Sequential(nn.Linear(3,4), nn.ReLU(), nn.Linear(4,1)).double()
    bs = BS//group_size()
    dls = DataLoaders(TfmdDL(items or data(), bs, shuffle=shuffle), TfmdDL(data(10, 1), bs), path=path)
    learn = Learner(dls, model, nn.MSELoss(), partial(torch.optim.SGD, momentum=momentum), lr=lr, **kw)
    learn.logger = lambda line: None
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

class Raise(Callback):
    "Raise `exc` in `event`, the `at`-th time that it comes (in training), on `rank` only (None: on all)"
    run_valid = False
    def __init__(self, event, exc, rank, at=0, order=0):
        self.exc,self.rank,self.at,self.order,self.seen = exc,rank,at,order,0
        setattr(self, event, self.act)
    def act(self):
        self.seen += 1
        if self.rank in (None,group_rank()) and self.seen==self.at+1: raise self.exc

def result(learn):
    rec = learn.recorder
    distrib_barrier() # rank 0 has written its files
    return dict(values=[list(o) for o in rec.values], lrs=list(rec.lrs), weights=weights(learn), files=files(learn), shots=learn.shots,
                n_steps=len(rec.losses))

def fit(path, n_epoch=8, learn=None, **kw):
    learn = learn or make(path)
    cbs = [Snapshots(),*kw.pop('cbs')]
    with learn.distrib_ctx(seed=3):
        learn.fit(n_epoch, cbs=cbs, **kw)
        return result(learn)

# --- cases: the same on one process and on several ---------------------------------------------------------------------------

def early(path): return fit(path, cbs=[downhill_then_up(), EarlyStoppingCallback(patience=2)])
def early_first(path): return fit(path, cbs=[EarlyStoppingCallback(min_delta=100.), downhill_then_up()])
def best(path): return fit(path, cbs=[downhill_then_up(), SaveModelCallback()])
def best_with_opt(path): return fit(path, learn=make(path, momentum=.5), cbs=[downhill_then_up(), SaveModelCallback(with_opt=True)])
def best_and_early(path): return fit(path, cbs=[EarlyStoppingCallback(patience=2), SaveModelCallback(fname='best'), downhill_then_up()])
def top(path): return fit(path, cbs=[downhill_then_up(), SaveModelCallback(keep=3)])
def every(path): return fit(path, 4, cbs=[downhill_then_up(), SaveModelCallback(every_epoch=2)])
def at_end(path): return fit(path, 4, cbs=[downhill_then_up(2), SaveModelCallback(at_end=True)])
def plateau(path): return fit(path, cbs=[ReduceLROnPlateauCallback(factor=.5, patience=0, threshold=.02), Scheduler(warm_up(2))])
def ramp(path): return fit(path, 4, cbs=[Scheduler(warm_up(4, partial(StepLR, step_size=2, gamma=.1), start=.2))])
def all_cancel_a_step(path):
    return fit(path, 3, cbs=[Scheduler(partial(StepLR, step_size=1, gamma=.5)), Raise('before_step', CancelStepException, None, at=2)])
def epoch_not_measured(path):
    return fit(path, cbs=[downhill_then_up(), Raise('before_train', CancelEpochException, None, at=1), EarlyStoppingCallback(patience=2),
                          SaveModelCallback()])

def two_fits(path, **kw):
    learn = make(path)
    cbs = [downhill_then_up(), SaveModelCallback(keep=2, **kw), EarlyStoppingCallback(patience=2, **kw)]
    learn.add_cbs(cbs)
    first = fit(path, 8, learn, cbs=[])
    second = fit(path, 8, learn, cbs=[], lr=.01)
    return dict(second, first=first)

def two_fits_going_on(path): return two_fits(path, reset_on_fit=False)

cases = {f.__name__:f for f in (early, early_first, best, best_with_opt, best_and_early, top, every, at_end, plateau, ramp,
                                all_cancel_a_step, epoch_not_measured, two_fits, two_fits_going_on)}

def run_cases(path):
    with process_group(): return {k:f(Path(path)/k) for k,f in cases.items()}

@pytest.fixture(scope='module')
def alone(tmp_path_factory): return run_cases(tmp_path_factory.mktemp('alone'))

@pytest.fixture(scope='module', params=[2,pytest.param(3, marks=pytest.mark.long)])
def ranks(request, tmp_path_factory): return run_ranks(run_cases, request.param, tmp_path_factory.mktemp('ranks'))

def close(a, b): torch.testing.assert_close(as_tensor(a), as_tensor(b), rtol=1e-9, atol=1e-9, equal_nan=True)
def as_tensor(o):
    if torch.is_tensor(o): return o
    return torch.tensor([[float('nan') if v is None else v for v in r] if isinstance(r, list) else r for r in o], dtype=torch.double)

@pytest.mark.parametrize('name', list(cases))
def test_like_one_process_and_equal_on_all_ranks(alone, ranks, name):
    want = alone[name]
    for r in (o[name] for o in ranks):
        assert len(r['values'])==len(want['values']) and r['files']==want['files'] and r['n_steps']==want['n_steps']
        for k in ('values','lrs','weights'): close(r[k], want[k])
        assert torch.equal(r['weights'], ranks[0][name]['weights']) and r['values']==ranks[0][name]['values']

def valid_losses(r): return [o[1] for o in r['values']]

def test_stops_after_two_epochs_that_are_no_better(alone):
    r = alone['early']
    losses = valid_losses(r)
    assert len(losses)==5 and losses[0]>losses[1]>losses[2]<losses[3]<losses[4]
    assert len(valid_losses(alone['early_first']))==2

@pytest.mark.parametrize('name', ['best','best_and_early','best_with_opt'])
def test_best_weights_come_back(alone, ranks, name):
    for r in (alone[name],*(o[name] for o in ranks)):
        i = min(range(len(r['values'])), key=valid_losses(r).__getitem__)
        assert i==2 and torch.equal(r['weights'], r['shots'][i]) and len(r['files'])==1
    assert alone['best_and_early']['files']==['best.pth'] and len(alone['best_and_early']['values'])==5

def test_files_of_every_epoch_or_of_the_end(alone):
    assert alone['every']['files']==['model_0.pth','model_2.pth']
    assert alone['at_end']['files']==['model.pth']
    for k in ('every','at_end'): assert torch.equal(alone[k]['weights'], alone[k]['shots'][-1])

def test_rates_by_hand(alone):
    close(alone['ramp']['lrs'], [.02,.04,.06,.08,.1,.1,.01,.01])
    close(alone['all_cancel_a_step']['lrs'], [.1,.05,.025,.025,.0125,.00625])

def test_an_epoch_without_a_number_decides_nothing(alone):
    r = alone['epoch_not_measured']
    assert valid_losses(r)[1] is None and len(r['values'])==5 and torch.equal(r['weights'], r['shots'][1])

def test_second_fit_forgets_or_goes_on(alone):
    r,first = alone['two_fits'],alone['two_fits']['first']
    assert len(first['values'])==5 and first['files']==['model_1.pth','model_2.pth']
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
            for order in (0,60,80): # before the tracker, and after it
                cancel = Raise('after_epoch', CancelFitException, rank, at=2, order=order)
                res['cancel',rank,order] = fit(path/f'cancel{rank}{order}', cbs=[cancel, SaveModelCallback()])
            cbs = [Raise('after_loss', CancelFitException, rank, at=5), SaveModelCallback()]
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
        for order in (0,60,80):
            r = res[0]['cancel',rank,order]
            assert len(r['values'])==3 and torch.equal(r['weights'], r['shots'][2]) and r['files']==['model.pth']
        assert torch.equal(res[0]['after_loss',rank]['weights'], res[0]['after_loss',rank]['shots'][1])
        for r in res: close(r['step',rank]['lrs'], [.1,.05,.025,.0125,.00625,.003125]) # the others have taken the steps

# --- NaN ----------------------------------------------------------------------------------------------------------------------

def spoilt(bad):
    items = data()
    for i in bad: items[i] = items[i][0]*float('inf'),items[i][1]
    return items

def nan_cases(path):
    res = []
    with process_group():
        for bad in ([17],[12,13,14]): # the second step: one rank's batch, and every rank's
            learn = make(path, items=spoilt(bad), shuffle=False)
            res.append(fit(path, learn=learn, cbs=[TerminateOnNaNCallback(), SaveModelCallback()]))
    return res

def weights_by_hand(ranks_of_steps, world_size):
    "Plain SGD; at each step the mean of these ranks' gradients"
    learn = make()
    for i,ranks in enumerate(ranks_of_steps):
        b = data()[i*BS:(i+1)*BS]
        for r in ranks:
            x,y = (torch.stack(o) for o in zip(*b[r::world_size]))
            (learn.loss_func(learn.model(x), y)/len(ranks)).backward()
        learn.prepare(.1)
        learn.opt.step()
        learn.opt.zero_grad()
    return weights(learn)

@pytest.mark.parametrize('n', [pytest.param(2, marks=pytest.mark.long),3])
def test_nan_on_one_rank_ends_all_before_it_spreads(n, tmp_path):
    res = run_ranks(nan_cases, n, tmp_path)
    for r in res:
        for a,b in zip(r, res[0]): assert torch.equal(a['weights'], b['weights']) and a['values']==[] and a['files']==[]
    close(res[0][0]['weights'], weights_by_hand([range(n), [r for r in range(n) if r!=17%n]], n))
    close(res[0][1]['weights'], weights_by_hand([range(n)], n))

def test_nan_only_in_validation_goes_on():
    learn = make()
    learn.dls.loaders[1] = TfmdDL(spoilt([3]), 4)
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
    partial(TrackerCallback, min_delta=-.1), partial(SaveModelCallback, keep=0), partial(SaveModelCallback, keep=2, every_epoch=True),
    partial(ReduceLROnPlateauCallback, patience=-1), partial(ReduceLROnPlateauCallback, mode='max'),
    partial(ReduceLROnPlateauCallback, lr=1.), partial(warm_up, 0), partial(warm_up, 3, start=2.), partial(Scheduler, StepLR, by='batch')])
def test_options(make_cb):
    with pytest.raises((ValueError,TypeError)): make_cb()
