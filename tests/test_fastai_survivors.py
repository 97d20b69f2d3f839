"As test_survivors, with fastai's Learner: its recorder, schedule, optimizers, callbacks that save, log, mix and accumulate"
import gc,json,sys
from pathlib import Path
import pytest,torch
from test_survivors import at,check,dying,five_of_six,flat,launch,links
from learnerdist.testing import run_ranks

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
    torch.set_default_dtype(torch.float32 if 'mixup' in kind else torch.float64)
    torch.set_num_threads(1)
    if 'mixup' not in kind: fastai.learner.tensor = torch.tensor # so that the smooth loss is float64, too; fastai's losses are float32
    g = torch.Generator().manual_seed(0)
    def data(n): return [*zip(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g))]
    bs,point = 5 if 'per rank' in kind else 60,plan.get(str(local_rank()))
    dls = DataLoaders(DataLoader(data(200), bs=bs, shuffle=True, num_workers=0), DataLoader(data(70), bs=bs, num_workers=0))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))

    class Count(Callback): # steps that the user's own callback has heard of, and batches that it has seen begin
        order,fit_state,n,began = 5,('n','began'),0,0
        def before_batch(self): self.began += self.training
        def after_step(self): self.n += 1

    def accuracy(pred, targ): return (pred.argmax(-1)==targ).double().mean()
    loss = CrossEntropyLossFlat() if 'mixup' in kind else nn.CrossEntropyLoss()
    learn = Learner(dls, net, loss_func=loss, opt_func=optimizer(kind), lr=.01, metrics=[accuracy,F1Score(average='macro')], path=folder)
    cbs = [dying(point, how),GradientClip(5.),CSVLogger(),SaveModelCallback(),EarlyStoppingCallback(patience=9),ShowGraphCallback()]
    count = Count()
    if 'checkpoint' in kind: cbs.append(Checkpoint('ckpt', every=2))
    if 'accumulate' in kind: cbs.append(GradientAccumulation((100 if 'many' in kind else 72)//num_distrib()))
    if 'mixup' in kind: cbs.append(MixUp())
    if 'train_metrics' in kind: learn.remove_cb(Recorder).add_cb(Recorder(train_metrics=True))
    with learn.distrib_ctx(split_batches='per rank' not in kind, seed=3, timeout_s=3 if how=='SIGSTOP' else None):
        (learn.fit if 'plain' in kind else learn.fit_one_cycle)(3, cbs=[*cbs, count])
    rec = learn.recorder
    learn.metrics[1].reset() # it has rows of all ranks in memory that they share
    gc.collect()
    res = dict(weights=[o.tolist() for o in net.state_dict().values()], losses=[float(o) for o in rec.losses],
               values=[[float(v) for v in o] for o in rec.values], lrs=[float(o) for o in rec.lrs], iters=[*rec.iters],
               n=count.n, began=count.began, world=num_distrib(), left=[o for o in map(str, links()) if 'learnerdist' in o],
               rest=[[float(o) for o in getattr(rec, 'hps', {}).get('mom', ())], float(rec.smooth_loss.value)],
               logger=learn.logger is print, loss=type(learn.loss_func).__name__)
    (Path(folder)/f'{local_rank()}.json').write_text(json.dumps(res))

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    "What ranks come to without a death, by kind"
    known = {}
    def _undisturbed(kind=''):
        if kind not in known: known[kind] = run(tmp_path_factory.mktemp('ref'), (), kind)[1]
        return known[kind]
    return _undisturbed

def run(folder, plan=(), *args, **kw): return launch(folder, plan, *args, script=__file__, **kw)

def same(folder, got, ref, n_left, said=''):
    check(folder, got, ref, n_left, said)
    for o in got[1].values():
        assert max(abs(a-b) for a,b in zip(flat(o['rest']), flat(ref[0]['rest']), strict=True))<1e-9
        assert (o['began'],o['logger'],o['loss'])==(ref[0]['began'],True,ref[0]['loss'])
    assert sorted(o.name for o in folder.iterdir() if o.suffix!='.json')==['history.csv','models'], 'a file is left'

@pytest.mark.long
@pytest.mark.parametrize('kind', ['','torch','ranger'])
@pytest.mark.parametrize('plan', five_of_six)
def test_deaths_of_five_of_six(plan, kind, tmp_path, undisturbed):
    same(tmp_path, run(tmp_path, plan, kind, nproc=6), undisturbed(kind), 1, 'with 1 ranks: global batches of 60 samples as before')

def test_two_at_once_one_of_them_rank_0(tmp_path, undisturbed):
    plan = {0: at('before_backward'), 2: at('before_backward'), 1: at('before_train', 2)}
    same(tmp_path, run(tmp_path, plan, nproc=4), undisturbed(), 1)

@pytest.mark.long
def test_a_group_of_micro_batches_is_done_again(tmp_path, undisturbed):
    ref = undisturbed('accumulate') # a step after the batches 1 and 3 of each epoch
    same(tmp_path, run(tmp_path, {1: at('before_backward', 1, 3)}, 'accumulate'), ref, 2)

@pytest.mark.long
def test_what_is_lost_is_said(tmp_path):
    code,ranks,text = run(tmp_path, {1: at('before_backward', 1, 0)}, 'accumulate too many')
    assert code==0 and len(ranks)==2 and 'gradients of' in text and 'samples are lost: GradientAccumulation' in text, text

@pytest.mark.long
def test_metrics_of_training(tmp_path, undisturbed):
    ref = undisturbed('train_metrics')
    whole = run(tmp_path/'a', {1: at('before_epoch', 1)}, 'train_metrics')
    same(tmp_path/'a', whole, ref, 2)
    code,ranks,text = run(tmp_path/'b', {1: at('before_backward', 1, 2)}, 'train_metrics')
    said = 'train_metrics: those of this epoch are without its first 2 batches'
    assert code==0 and said in text and said not in whole[2], text
    a,b = ranks[0]['values'],ref[0]['values']
    assert abs(a[1][0]-b[1][0])<1e-9 and a[1][1]!=b[1][1] and max(abs(x-y) for x,y in zip(a[2], b[2]))<1e-9

@pytest.mark.long
def test_mixed_samples(tmp_path):
    code,ranks,text = run(tmp_path, {1: at('before_backward', 1, 1), 0: at('after_pred', 1, 3)}, 'mixup')
    assert code==0 and len(ranks)==1 and 'Traceback' not in text, text
    assert (ranks[2]['loss'],ranks[2]['n'],len(ranks[2]['losses']))==('CrossEntropyLossFlat',12,12)

@pytest.mark.long
def test_the_new_rank_0_writes_checkpoints(tmp_path, undisturbed):
    check(tmp_path, run(tmp_path, {0: at('before_backward', 1, 1)}, 'checkpoint'), undisturbed(), 2)
    saved = sorted(o.name for o in (tmp_path/'ckpt').iterdir())
    assert len(saved)==2 and saved[-1]=='epoch_0003-step_00000012', saved

@pytest.mark.long
def test_a_batch_size_per_rank(tmp_path):
    code,ranks,text = run(tmp_path, {1: at('before_backward', 1, 1)}, 'per rank') # a schedule by the part of the fit that is done
    assert code==0 and len(ranks)==2, text
    assert 'global batches of 10 samples, before 15' in text
    assert ranks[0]['weights']==ranks[2]['weights'] and len(ranks[0]['losses'])==14 + 1+19 + 20

@pytest.mark.long
def test_a_rank_that_is_stopped(tmp_path, undisturbed):
    same(tmp_path, run(tmp_path, {0: at('before_backward')}, '', 'SIGSTOP'), undisturbed(), 2, 'rank 0 ended by SIGKILL')

def header(folder):
    "What each rank reads of the log when the first epoch begins"
    from fastai.callback.core import Callback
    from fastai.callback.progress import CSVLogger
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    import learnerdist.fastai # noqa: F401
    found,data = [],[*zip(torch.randn(8, 2), torch.randn(8, 1))]
    class Read(Callback):
        def before_train(self): found.append((folder/'history.csv').read_text())
    dls = DataLoaders(*[DataLoader(data, bs=2, num_workers=0)]*2)
    learn = Learner(dls, torch.nn.Linear(2, 1), loss_func=torch.nn.MSELoss(), path=folder)
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[CSVLogger(),Read()])
    return found

def test_other_ranks_can_read_the_log_at_once(tmp_path):
    "One of them may have to write it; `train_loss` and what follows is fastai's header"
    assert run_ranks(header, 2, tmp_path)==[['epoch,train_loss,valid_loss,time\n']]*2

if __name__=='__main__': train(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:])
