"As test_survivors, with fastai's Learner: its recorder, schedule, optimizers, callbacks that save, log, mix and accumulate"
import gc,json,os,signal,sys
from pathlib import Path
import pytest,torch
from test_survivors import at,check,launch,links

pytestmark = pytest.mark.slow # and those that are long are run before a release

def optimizer(kind):
    from functools import partial
    from fastai.optimizer import Adam,OptimWrapper,ranger
    return partial(OptimWrapper, opt=torch.optim.AdamW) if 'torch' in kind else ranger if 'ranger' in kind else Adam

def train(folder, plan, kind='', how='SIGKILL'):
    "On each rank; `plan`: from local ranks to points at which they do `how`. Leaves what should be equal"
    import fastai.learner
    from fastai.callback.mixup import MixUp
    from fastai.callback.progress import CSVLogger,ShowGraphCallback
    from fastai.callback.tracker import EarlyStoppingCallback,SaveModelCallback
    from fastai.callback.training import GradientAccumulation,GradientClip
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner,Recorder
    from fastai.losses import CrossEntropyLossFlat
    from fastai.metrics import F1Score
    from torch import nn
    from learnerdist.all import local_rank,num_distrib
    from learnerdist.fastai import Checkpoint
    from learnerdist.learner.callback import Callback
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if 'mixup' not in kind: fastai.learner.tensor = torch.tensor # so that the smooth loss is float64, too; fastai's losses are float32
    g = torch.Generator().manual_seed(0)
    def data(n): return [*zip(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g))]
    bs,point = 5 if 'per rank' in kind else 60,plan.get(str(local_rank()))
    dls = DataLoaders(DataLoader(data(200), bs=bs, shuffle=True, num_workers=0), DataLoader(data(70), bs=bs, num_workers=0))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))

    class Die(Callback):
        order = 20
        def __getattribute__(self, k): # at any event
            if point and k==point[0] and 'learn' in vars(self): vars(self)['done'] = act(vars(self)['learn'], vars(self).get('done'))
            return object.__getattribute__(self, k)
    def act(learn, done):
        inner = point[0] in ('before_batch','after_pred','before_backward','after_backward','before_step','after_step','after_batch')
        if done or learn.epoch!=point[1] or inner and (learn.iter!=point[2] or learn.training!=point[3]): return done
        os.kill(os.getpid(), getattr(signal, how))
        return True
    if point: setattr(Die, point[0], lambda self: None)

    class Count(Callback): # steps that the user's own callback has heard of, and batches that it has seen begin
        order,fit_state,n,began = 5,('n','began'),0,0
        def before_batch(self): self.began += self.training
        def after_step(self): self.n += 1

    def accuracy(pred, targ): return (pred.argmax(-1)==targ).double().mean()
    loss = CrossEntropyLossFlat() if 'mixup' in kind else nn.CrossEntropyLoss()
    learn = Learner(dls, net, loss_func=loss, opt_func=optimizer(kind), lr=.01, metrics=[accuracy,F1Score(average='macro')], path=folder)
    cbs,count = [Die(),GradientClip(5.),CSVLogger(),SaveModelCallback(),EarlyStoppingCallback(patience=9),ShowGraphCallback()],Count()
    if 'checkpoint' in kind: cbs.append(Checkpoint('ckpt', every=2))
    if 'accumulate' in kind: cbs.append(GradientAccumulation(100//num_distrib()))
    if 'mixup' in kind: cbs.append(MixUp())
    if 'train_metrics' in kind: learn.remove_cb(Recorder).add_cb(Recorder(train_metrics=True))
    with learn.distrib_ctx(split_batches='per rank' not in kind, seed=3, timeout_s=3 if how=='SIGSTOP' else None):
        (learn.fit if 'plain' in kind else learn.fit_one_cycle)(3, cbs=[*cbs, count])
    rec = learn.recorder
    gc.collect()
    res = dict(weights=[o.tolist() for o in net.state_dict().values()], losses=[float(o) for o in rec.losses],
               values=[[float(v) for v in o] for o in rec.values], lrs=[float(o) for o in rec.lrs], iters=[*rec.iters],
               n=count.n, began=count.began, world=num_distrib(), left=[o for o in map(str, links()) if 'learnerdist' in o],
               rest=[[float(o) for o in getattr(rec, 'hps', {}).get('mom', ())], float(rec.smooth_loss.value)],
               logger=learn.logger is print, loss=type(learn.loss_func).__name__)
    (Path(folder)/f'{local_rank()}.json').write_text(json.dumps(res))

if __name__=='__main__': train(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:])
