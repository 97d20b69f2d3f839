"As test_survivors, with fastai's Learner, imported as documented: its recorder, schedule, optimizers, callbacks that save and log"
import json,sys
from pathlib import Path
import pytest,torch
from test_survivors import again,at,check,data,dying,five_of_six,flat,launch,net

pytestmark = pytest.mark.slow # and those that are long are run before a release

def optimizer(kind):
    from functools import partial
    from fastai.optimizer import Adam,OptimWrapper,ranger
    return partial(OptimWrapper, opt=torch.optim.AdamW) if 'torch' in kind else ranger if 'ranger' in kind else Adam

def train(folder, plan, kind='', how='SIGKILL'):
    "On each rank; `plan`: by the number of ranks, by rank, a point at which it does `how`. Leaves what should be equal"
    from fastai.vision.all import (Callback,CSVLogger,DataLoader,DataLoaders,EarlyStoppingCallback,F1Score,GradientAccumulation,
                                   GradientClip,Learner,Recorder,ReduceLROnPlateau,SaveModelCallback,ShowGraphCallback)
    from learnerdist.fastai import Checkpoint,num_distrib,rank_distrib
    import fastai.learner
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    fastai.learner.tensor = torch.tensor # so that the smooth loss is float64, too
    bs,point = 5 if 'per rank' in kind else 60,plan.get(f'{num_distrib()}', {}).get(f'{rank_distrib()}')
    dls = DataLoaders(DataLoader(data(660), bs=bs, shuffle=True, num_workers=0), DataLoader(data(70), bs=bs, num_workers=0))

    class Count(Callback): # steps that the user's own callback has heard of, and batches that it has seen begin
        order,fit_state,n,began = 5,('n','began'),0,0
        def before_batch(self): self.began += self.training
        def after_step(self): self.n += 1

    def accuracy(pred, targ): return (pred.argmax(-1)==targ).double().mean()
    learn = Learner(dls, net(), loss_func=torch.nn.CrossEntropyLoss(), opt_func=optimizer(kind), lr=.01,
                    metrics=[accuracy,F1Score(average='macro')], path=folder)
    cbs,count = [dying(Callback, point, how),GradientClip(5.),CSVLogger(),SaveModelCallback(),ShowGraphCallback()],Count()
    cbs.append(EarlyStoppingCallback(patience=9))
    if 'checkpoint' in kind: cbs.append(Checkpoint('ckpt', every=2, resume=True))
    if 'accumulate' in kind: cbs.append(GradientAccumulation((100 if 'many' in kind else 72)//num_distrib()))
    if 'plateau' in kind: cbs.append(ReduceLROnPlateau(patience=0, min_delta=1.))
    if 'train_metrics' in kind: learn.remove_cb(Recorder).add_cb(Recorder(train_metrics=True))
    with learn.distrib_ctx(split_batches='per rank' not in kind, seed=3):
        (learn.fit if 'plain' in kind or 'plateau' in kind else learn.fit_one_cycle)(3, cbs=[*cbs,count])
        rec = learn.recorder
        res = dict(norms=[], losses=[float(o) for o in rec.losses], values=[[float(v) for v in o] for o in rec.values],
                   lrs=[float(o) for o in rec.lrs], iters=[*rec.iters],
                   rest=[[float(o) for o in getattr(rec, 'hps', {}).get('mom', ())], float(rec.smooth_loss.value)])
        res['preds'] = [o.tolist() for o in learn.get_preds()] # which resets the recorder
    res |= dict(weights=[o.tolist() for o in learn.model.state_dict().values()], n=count.n, began=count.began,
                world=num_distrib(), logger=learn.logger is print)
    (Path(folder)/f'{rank_distrib()}.json').write_text(json.dumps(res))

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    "What ranks come to without a death, by kind"
    known = {}
    def _undisturbed(kind=''):
        if kind not in known: known[kind] = run(tmp_path_factory.mktemp('ref'), (), kind)[1]
        return known[kind]
    return _undisturbed

def run(folder, plan=(), *args, **kw): return launch(folder, plan, *args, script=__file__, **kw)

def same(folder, got, ref, n_left, said=()):
    check(folder, got, ref, n_left, said)
    for o in got[1].values():
        assert max(abs(a-b) for a,b in zip(flat(o['rest']), flat(ref[0]['rest']), strict=True))<1e-9
        assert (o['began'],o['logger'])==(ref[0]['began'],True)
    assert sorted(o.name for o in folder.iterdir() if o.suffix!='.json')==['history.csv','models'], 'a file is left'

@pytest.mark.long
@pytest.mark.parametrize('kind', ['','torch','ranger'])
def test_deaths_of_five_of_six(kind, tmp_path, undisturbed):
    same(tmp_path, run(tmp_path, five_of_six[0], kind, nproc=6), undisturbed(kind), 1, [again(5, 6),again(1, 2)])

def test_two_at_once_one_of_them_rank_0(tmp_path, undisturbed):
    plan = {4: {0: at('before_backward', 2, 9), 2: at('before_backward', 2, 9)}}
    same(tmp_path, run(tmp_path, plan, nproc=4), undisturbed(), 2, ['going on in epoch 2 after step 30, from the state in memory'])

@pytest.mark.long
@pytest.mark.parametrize('kind', ['accumulate','plateau'])
def test_callbacks_go_on(kind, tmp_path, undisturbed):
    same(tmp_path, run(tmp_path, {3: {1: at('before_backward', 2, 9)}}, kind), undisturbed(kind), 2, [again(2, 3)])

@pytest.mark.long
def test_a_checkpoint_takes_the_place_of_the_implied_one(tmp_path, undisturbed):
    got = run(tmp_path, {3: {0: at('before_backward', 1, 1)}}, 'checkpoint')
    check(tmp_path, got, undisturbed(), 2, ['going on in epoch 1 after step 12, from the checkpoint'])

@pytest.mark.long
def test_metrics_of_training(tmp_path, undisturbed):
    "A warning says that those of an epoch are without the batches before a restart"
    code,ranks,text = run(tmp_path, {3: {1: at('before_backward', 2, 9)}}, 'train_metrics')
    assert code==0 and 'train_metrics: those of this epoch are without its first 8 batches' in text, text
    a,b = ranks[0]['values'],undisturbed('train_metrics')[0]['values']
    assert max(abs(x-y) for i in range(2) for x,y in zip(a[i], b[i]))<1e-9 and abs(a[2][0]-b[2][0])<1e-9

@pytest.mark.long
def test_a_batch_size_per_rank(tmp_path):
    "A schedule by the part of the fit that is done"
    code,ranks,text = run(tmp_path, {3: {1: at('before_backward', 0, 12)}}, 'per rank')
    assert code==0 and len(ranks)==2 and 'batch_size 15 then, 10 now' in text, text
    assert ranks[0]['weights']==ranks[1]['weights'] and ranks[0]['iters']==[61,127,193], ranks[0]['iters']

if __name__=='__main__': train(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:])
