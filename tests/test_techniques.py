"One-flag fits, rates that grow with the ranks, metrics, logs, times, memory: on 2 ranks as in one process"
import csv
from pathlib import Path
import pytest, torch
from torch import nn
import scenes
from harness import asking, close
from scenes import F64, picture
from helpers import weights
from learnerdist.all import *
from learnerdist.core.env import in_group

def make(dtype=F64, metrics=(), path='.', cbs=None, n=24):
    "A global batch of 8, in 3 steps an epoch"
    c = picture(model=small, n=n, bs=8, dtype=dtype, metrics=metrics)
    learn = scenes.make(c, num_distrib() or 1, rank_distrib()).add_cbs(cbs)
    learn.path,learn.lines = Path(path),[]
    learn.logger = learn.lines.append
    return learn

def small(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3))

# --- flags of a fit -----------------------------------------------------------------------------------------------------------

class Kinds(Callback):
    "The type within the model, its wrapper, and the number of ranks, in training"
    run_valid = False
    def before_fit(self): self.learn.kinds = set()
    def after_pred(self):
        half = torch.get_autocast_dtype('cpu') if torch.is_autocast_enabled('cpu') else None
        self.kinds.add((str(half), type(getattr(self.learn.wrapper, 'ddp', self.learn.model)).__name__, group_size()))

opts = dict(seed=3)
flag_fits = {'ddp': lambda o: o.fit(2, ddp=opts), 'cycle': lambda o: o.fit_one_cycle(2, ddp=opts),
             'amp': lambda o: o.fit(2, ddp=opts, amp='fp16'), 'amp_cycle': lambda o: o.fit_one_cycle(2, .05, amp='fp16', ddp=opts),
             'clip_acc': lambda o: o.fit(2, ddp=opts, amp='fp16', cbs=[GradientClip(.3),GradientAccumulation(8)])}

def flagged(W, rank, path):
    "In float64, where scaling by a power of two is exact"
    res = {}
    for k,f in flag_fits.items():
        learn = make(cbs=Kinds)
        before = list(learn.cbs),learn.model,list(learn.dls.loaders)
        f(learn)
        kept = (list(learn.cbs),learn.model,list(learn.dls.loaders))==before and not in_group()
        res[k] = weights(learn),sorted(learn.kinds),kept,learn.recorder.values
    half = make(torch.float32, cbs=Kinds)
    half.fit(1, ddp=True, amp=True)
    return res,sorted(half.kinds)

def test_flags_on_ranks_are_the_fit_alone(found):
    (alone,kinds), = found(flagged, 1)
    assert kinds==[('torch.bfloat16','Sequential',1)]
    for res,kinds in found(flagged, 2):
        assert kinds==[('torch.bfloat16','DistributedDataParallel',2)]
        for k,(w,seen,kept,values) in res.items():
            want = alone[k]
            close(w, want[0])
            close([o[:2] for o in values], [o[:2] for o in want[3]])
            half = 'None' if k in ('ddp','cycle') else 'torch.float16'
            assert seen==[(half,'DistributedDataParallel',2)] and want[1]==[(half,'Sequential',1)] and kept and want[2], k

def test_scale_goes_on_from_fit_to_fit():
    learn = make(torch.float32)
    learn.fit(2, amp='fp16')
    first = learn.last_amp.state_dict()
    learn.fit(2, amp='fp16')
    assert learn.last_amp.state_dict()['_growth_tracker']==first['_growth_tracker']+6
    learn.fit(1, amp='bf16')
    assert learn.last_amp.state_dict()=={}

# --- metrics, logs: one call on ranks ---------------------------------------------------------------------------------

class Mine(LogWriter):
    "A user's logger"
    def open(self): self.rows = []
    def log_epoch(self, row): self.rows.append(row)
    def close(self): self.rows.append('closed')

def of_classes():
    import torchmetrics
    return [accuracy,torchmetrics.ConfusionMatrix(task='multiclass', num_classes=3)]

def logged(W, rank, path):
    cbs = [Mine(),CSVLogger(append=True),TensorBoardLogger(),EarlyStoppingCallback('accuracy', min_delta=5., patience=2),Timer()]
    learn = make(metrics=of_classes(), path=path/f'logs {W}')
    with learn.distrib_ctx(seed=3):
        for _ in range(2): learn.fit(5, cbs=cbs)
    own = learn.path if not rank_distrib() else learn.path/'1'
    files = sorted(str(o.relative_to(learn.path)).partition('.tfevents')[0] for o in own.rglob('*') if o.is_file())
    told = [o for o in learn.lines if isinstance(o, str)]
    values = [[v.tolist() if torch.is_tensor(v) else v for v in o] for o in learn.recorder.values]
    return dict(values=values, rows=getattr(cbs[0], 'rows', None), files=files, told=told, steps=cbs[2].n_steps,
                names=learn.recorder.metric_names, losses=learn.recorder.losses)

def test_logs_are_rank_0s(found):
    "Why a fit has stopped, a log of one's own, and files"
    alone,(zero,one),path = found(logged, 1)[0],found(logged, 2),found.path/'logs 2'
    assert len(alone['values'])==3 and len(zero['told'])==2 and one['told']==[]
    assert zero['told'][0].startswith('stopped after epoch 2: accuracy 0.')
    assert 'no better than' in zero['told'][0] and zero['told']==alone['told']
    assert [type(o) for o in zero['rows']]==[dict,dict,dict,str] and one['rows'] is None
    assert [*zero['rows'][0]]==zero['names'][:-1] and [o['epoch'] for o in zero['rows'][:3]]==[0,1,2]
    close([o['valid_loss'] for o in zero['rows'][:3]], [o[1] for o in alone['values']])
    assert zero['files']==alone['files']==['history.csv',*['tensorboard/events.out']*2] and one['files']==[] and one['steps']==0
    head,*rows = csv.reader((path/'history.csv').read_text().splitlines())
    assert head==zero['names'][:-1] and [o[0] for o in rows]==['0','1','2']*2 and rows[0][-1].startswith('[[')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(path/'tensorboard')).Reload()
    losses,valid = events.Scalars('step/loss'),events.Scalars('epoch/valid_loss')
    assert [o.step for o in losses]==[*range(1, 19)] and [o.step for o in valid]==[*range(1, 7)] and zero['steps']==18
    close([o.value for o in losses[9:]], zero['losses'], 1e-6)
    close([o.value for o in valid[3:]], [o[1] for o in zero['values']], 1e-6)
    assert {'step/lr','epoch/accuracy','epoch/samples_per_s'}<={*events.Tags()['scalars']}
    assert not any('confusion' in o for o in events.Tags()['scalars'])

def timed(W, rank, path):
    res = []
    for cbs in ([],[GradientAccumulation(8)]):
        learn,timer = make(n=23),Timer() # one sample is read twice, and not counted
        with learn.distrib_ctx(): learn.fit(2, cbs=[timer,*cbs])
        res += timer.times
    return res

def test_times_on_ranks(found):
    for o in found(timed, 2):
        for t in o:
            assert t['comm']>0 and t['data']>0 and t['step']>0 and t['data']+t['step']+t['comm']==pytest.approx(t['total'])
            assert t['samples_per_s']*t['total']==pytest.approx(23)

found = asking(alone=(flagged, logged, timed))
