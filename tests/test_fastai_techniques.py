"What fastai has no equivalent of, on its learner: torch's schedulers, scaled rates, hooks, top-k files, times, batch sizes"
import contextlib, pytest
from torch.optim.lr_scheduler import MultiStepLR
from fastai.basics import *
from fastai.callback.hook import hook_output
from scenes import picture
from test_fastai_scenes import fastais
from learnerdist.core.env import num_distrib,rank_distrib
from learnerdist.fastai import distrib_barrier
from learnerdist.learner.metrics import top_k_accuracy
from learnerdist.learner.schedule import SaveModelCallback,Scheduler,warm_up
from learnerdist.testing import run_ranks
from learnerdist.distributed.profiling import Timer

drops = partial(MultiStepLR, milestones=[3], gamma=.3)

def small(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3))
def make(lr=.02, path='.'):
    c = picture(model=small, n=24, n_valid=11, bs=8, lr=lr, opt=partial(torch.optim.SGD, momentum=.9))
    learn = fastais(c, num_distrib() or 1, rank_distrib())
    learn.metrics,learn.path = [AvgMetric(partial(top_k_accuracy, k=2))],Path(path)
    return learn

class Rates(Callback):
    order = 90
    def before_fit(self): self.lrs = []
    def before_step(self): self.lrs.append(self.opt.hypers[-1]['lr'])

def runs(path):
    res = {}
    for k,ctx in {'plain': {}, 'bf16': dict(comm_hook='bf16')}.items():
        learn = make(.04, Path(path)/k)
        cbs = [Scheduler(warm_up(3, drops, start=.5), by='epoch'), SaveModelCallback('valid_loss', keep=2), Timer(), Rates()]
        with learn.no_logging(), learn.distrib_ctx(seed=3, **ctx):
            learn.fit(8, cbs=cbs)
            distrib_barrier()
        ws,marks = torch.cat([p.detach().flatten() for p in learn.model.parameters()]),{k for g in learn.opt.opt.param_groups for k in g}
        res[k] = dict(weights=ws, rates=cbs[3].lrs, files=sorted(o.name for o in learn.path.rglob('*.pth')), times=cbs[2].times,
                      marked='initial_lr' in marks, values=[list(o) for o in learn.recorder.values])
    return res,diverged(Path(path)/'nan')

def test_fastais_learner(tmp_path):
    want,diverges = runs(tmp_path/'one')
    torch.testing.assert_close(torch.tensor(want['plain']['rates'][::3]), torch.tensor([.02,.04*2/3,.04*5/6,.04,.04,.04,.012,.012]))
    for res,got in run_ranks(runs, 2, tmp_path/'two'):
        for k,tol in (('plain', 1e-9),('bf16', 1e-2)):
            a,b = res[k],want[k]
            torch.testing.assert_close(a['weights'], b['weights'], atol=tol, rtol=tol)
            torch.testing.assert_close(torch.tensor(a['rates']), torch.tensor(b['rates']), atol=1e-9, rtol=1e-9)
            assert len(a['files'])==2 and not a['marked'] and not b['marked']
            assert all(t['data']+t['step']+t['comm']==pytest.approx(t['total']) and t['comm']>0 for t in a['times']) and len(a['times'])==8
        # a loss of NaN is recorded, and is the worst
        assert [o==o for o in got[0]]==[True,False,False] and got[0][0]==pytest.approx(diverges[0][0]) and got[1].isfinite().all()
        torch.testing.assert_close(got[1], diverges[1], atol=1e-9, rtol=1e-9)
        assert res['plain']['files']==want['plain']['files'] and not torch.equal(res['bf16']['weights'], res['plain']['weights'])

class Skip(nn.Module):
    "As fastai's U-Net, it reads what a hook has kept of a layer"
    def __init__(self):
        super().__init__()
        self.body,self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, 6)),nn.Linear(6, 3)
        self.kept = hook_output(self.body, detach=False)
    def forward(self, x):
        self.body(x.float())
        return self.head(self.kept.stored)

def squares(p, y): return ((p-nn.functional.one_hot(y, 3))**2).sum()/len(y)
def skips():
    learn = make()
    learn.model,learn.loss_func,learn.metrics = Skip(),squares,[]
    with warnings.catch_warnings(record=True) as seen, learn.no_logging(), learn.distrib_ctx(seed=3):
        warnings.simplefilter('always')
        learn.fit(1)
    return [str(o.message) for o in seen if str(o.message)[:1]=='[']

def test_a_loss_is_checked_where_the_model_reads_hooks(): assert run_ranks(skips, 2)==[[],[]]

def test_fastais_own_optimizers_are_of_another_kind():
    learn = make()
    learn.opt_func = SGD
    with contextlib.redirect_stdout(None), pytest.raises(ValueError, match='opt_func=OptimWrapper'): learn.fit(1, cbs=Scheduler(warm_up(2)))

class Diverge(Callback):
    "Training predicts NaN from epoch 1 on"
    run_valid = False
    def after_pred(self):
        if self.epoch: self.learn.pred = self.pred*float('nan')

def diverged(path):
    learn = make(path=path)
    with learn.no_logging(), learn.distrib_ctx(seed=3): learn.fit(3, cbs=[Diverge(), SaveModelCallback('train_loss')])
    return [o[0] for o in learn.recorder.values],torch.cat([p.detach().flatten() for p in learn.model.parameters()])
