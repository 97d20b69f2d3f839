"""Ranks die, in processes of the launcher: those that are left start again, and the run is the one that nobody disturbed. Ours, and
fastai's Learner, imported as documented, with its recorder, schedule, optimizers, callbacks that save and log"""
import json,os,signal,subprocess,sys
from functools import partial
from pathlib import Path
import torch,learnerdist.all # noqa: F401 # first, so that ranks are forks of a process that has them
import pytest
import helpers
from helpers import flat,root
from learnerdist.testing import run_ranks

pytestmark = pytest.mark.slow # and those that are long are run before a release

def at(event, epoch=1, i=1, training=True):
    "A point of a fit"
    return [event,epoch,i,training]

def dying(callback, point, how='SIGKILL', folder='', n=1, W=0):
    "A callback of the class `callback` that does `how` at `point`, if there is one, where `n` of `W` ranks die at once"
    class Die(callback):
        order = 20
        def act(self):
            inner = point[0] in ('before_batch','after_pred','before_backward','after_backward','before_step','after_step','after_batch')
            if self.epoch!=point[1] or inner and (self.iter!=point[2] or self.training!=point[3]): return
            die_together(Path(folder), getattr(signal, how), n, W)
    if point: setattr(Die, point[0], Die.act)
    return Die()

def die_together(folder, how, n, W):
    "The last of `n` ranks that comes here ends all of them: a launcher that sees one death first would end the others itself"
    (folder/f'{W}-{os.getpid()}.json').touch()
    pids = {int(o.stem.split('-')[1]) for o in folder.glob(f'{W}-*.json')}
    if len(pids)<n: signal.pause()
    for o in sorted(pids, key=lambda o: o==os.getpid()): os.kill(o, how)

def data(n):
    g = torch.Generator().manual_seed(n)
    return [*zip(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g))]

def net():
    from torch import nn
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))

def ours(folder, kind, bs, n_acc):
    "Learner, callbacks, the class of callbacks and of checkpoints; datasets are such that there is a batch for each of 6 ranks"
    import learnerdist.all as l
    dls = l.DataLoaders(l.TfmdDL(data(660), bs, shuffle=True), l.TfmdDL(data(70), 10))
    learn = l.Learner(dls, net(), torch.nn.CrossEntropyLoss(), torch.optim.AdamW, lr=.01, metrics=l.accuracy, path=folder)
    cbs = [l.GradientClip(5.),l.CSVLogger()]
    if 'accumulate' in kind: cbs.append(l.GradientAccumulation(n_acc))
    if 'plateau' in kind: cbs.append(l.ReduceLROnPlateauCallback(patience=0, threshold=.5))
    return learn,cbs,l.Callback,l.Checkpoint

def fastais(folder, kind, bs, n_acc):
    import fastai.learner,fastai.vision.all as f
    from fastai.optimizer import Adam,OptimWrapper,ranger
    from learnerdist.fastai import Checkpoint
    fastai.learner.tensor = torch.tensor # so that the smooth loss is float64, too
    opt = partial(OptimWrapper, opt=torch.optim.AdamW) if 'torch' in kind else ranger if 'ranger' in kind else Adam
    dls = f.DataLoaders(f.DataLoader(data(660), bs=bs, shuffle=True, num_workers=0), f.DataLoader(data(70), bs=10, num_workers=0))
    def accuracy(pred, targ): return (pred.argmax(-1)==targ).double().mean()
    learn = f.Learner(dls, net(), loss_func=torch.nn.CrossEntropyLoss(), opt_func=opt, lr=.01,
                      metrics=[accuracy,f.F1Score(average='macro')], path=folder)
    cbs = [f.GradientClip(5.),f.CSVLogger(),f.SaveModelCallback(),f.ShowGraphCallback(),f.EarlyStoppingCallback(patience=9)]
    if 'accumulate' in kind: cbs.append(f.GradientAccumulation(n_acc))
    if 'plateau' in kind: cbs.append(f.ReduceLROnPlateau(patience=0, min_delta=1.))
    return learn,cbs,f.Callback,Checkpoint

def train(folder, plan, kind='', how='SIGKILL'):
    "On each rank; `plan`: by the number of ranks, by rank, a point at which it does `how`. Leaves what should be equal"
    from learnerdist.all import num_distrib,rank_distrib
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    W,is_fastai = max(num_distrib(), 1),'fastai' in kind
    points = plan.get(f'{W}', {})
    point = points.get(f'{rank_distrib()}')
    bs = 63 if 'odd' in kind else 60
    learn,cbs,Callback,Checkpoint = (fastais if is_fastai else ours)(folder, kind, bs, 72 if is_fastai else 120) # of all ranks
    class Count(Callback): # steps that the user's own callback has heard of, and batches that it has seen begin
        order,fit_state,n,began = 5,('n','began'),0,0
        def before_batch(self): self.began += self.training
        def after_step(self): self.n += 1
    count = Count()
    cbs += [count,dying(Callback, point, how, folder, sum(o==point for o in points.values()), W)]
    if 'checkpoint' in kind: cbs.append(Checkpoint('ckpt', every=2, resume=True))
    kw = {} if is_fastai else dict(shard='sharded' in kind or None)
    with learn.distrib_ctx(split_batches=True, seed=3, **kw):
        (learn.fit if 'plain' in kind or 'plateau' in kind else learn.fit_one_cycle)(3, cbs=cbs)
        rec,floats = learn.recorder,lambda o: [float(v) for v in o]
        res = dict(losses=floats(rec.losses), values=[floats(o) for o in rec.values], lrs=floats(rec.lrs), iters=[*rec.iters], rest=[])
        if is_fastai: res['rest'] = floats([*getattr(rec, 'hps', {}).get('mom', ()),rec.smooth_loss.value])
        at_predict = point and point[0]=='predict' and ['after_pred',2,1,False]
        kw = {} if is_fastai else dict(cbs=dying(Callback, at_predict, folder=folder, W=W))
        preds = learn.get_preds(**kw) # which resets fastai's recorder
    res |= dict(weights=[o.tolist() for o in learn.model.state_dict().values()], preds=[o.tolist() for o in preds], n=count.n,
                began=count.began, world=W, logger=learn.logger is print or not is_fastai)
    (Path(folder)/f'{rank_distrib()}.json').write_text(json.dumps(res))

def launch(folder, plan=(), *args, nproc=3, policy='shrink', script=__file__):
    "Exit status, what each rank has left, and what was printed"
    folder.mkdir(parents=True, exist_ok=True)
    env = dict(PYTHONPATH=f'{root}:{root/"tests"}')
    if 'fastai' in ' '.join(args): # its import takes 9 s: so ranks are forks of a process that has it
        script = folder/'fastai_script.py'
        script.write_text('import fastai.vision.all,learnerdist.fastai\nimport test_survivors\ntest_survivors.main()\n')
    res = helpers.launch('--nproc', nproc, '--on-failure', policy, script, folder, json.dumps(dict(plan)), *args, env=env)
    return res.returncode,results(folder),res.stdout+res.stderr

def results(folder): return {int(o.stem): json.loads(o.read_text()) for o in folder.glob('[0-9].json')}

def check(folder, got, ref, n_left, messages=()):
    code,ranks,text = got
    assert code==0 and len(ranks)==n_left, text
    for o in messages: assert o in text, text
    for o in ranks.values():
        for k in ('weights','losses','values','lrs','iters','preds','rest'):
            a,b = flat(o[k]),flat(ref[0][k])
            assert len(a)==len(b) and max((abs(x-y) for x,y in zip(a, b)), default=0)<1e-9, (k,text)
        assert (o['n'],o['began'],o['world'])==(ref[0]['n'],ref[0]['began'],n_left) and o['logger']
    csv = (folder/'history.csv').read_text().splitlines()
    assert len(csv)==4 and [o[0] for o in csv]==['e','0','1','2']
    left = {o.name for o in folder.iterdir() if o.suffix not in ('.json','.py') and not o.name.startswith('epoch_')}-{'ckpt'}
    assert left<={'history.csv','models'}, 'a file is left'

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    "What one process comes to, by kind"
    known = {}
    def _undisturbed(kind):
        folder = tmp_path_factory.mktemp('ref')
        if kind not in known: run_ranks(train, 3 if 'sharded' in kind else 1, folder, {}, kind)
        return known.setdefault(kind, results(folder))
    return _undisturbed

def again(n, of): return f'all start again, with {n} of {of} ranks'

# plans: by the number of ranks, who dies where. 60 samples of a global batch divide among 6 to 1 ranks, 11 batches an epoch
late = at('before_backward', 2, 9)
five_of_six = [
    {6: {0: at('before_backward', 0, 0)}, 5: {1: at('after_train', 0)}, 4: {3: at('after_pred', 1, 0, False)}, 3: {0: at('after_epoch', 1)},
     2: {1: at('after_step', 2, 9)}},
    {6: {5: at('before_fit', 0)}, 5: {0: at('before_train', 0)}, 4: {2: at('after_batch', 2, 9), 1: at('after_batch', 2, 9)},
     2: {0: at('predict')}}]

@pytest.mark.long
@pytest.mark.parametrize('kind,i', [('',0),('',1),('fastai torch',0),('fastai ranger',0)])
def test_deaths_of_five_of_six(kind, i, tmp_path, undisturbed):
    messages = again(5, 6),again(1, 2),'going on in epoch 2 after step 30, from the state in memory'
    check(tmp_path, launch(tmp_path, five_of_six[i], kind, nproc=6), undisturbed(kind), 1, messages)

@pytest.mark.parametrize('kind,plan,n_left,messages', [
    ('', {3: {0: late}, 2: {0: at('predict')}}, 1,
        [again(2, 3),again(1, 2),'going on in epoch 2 after step 30','this fit was done already, after 33 steps']),
    *(pytest.param(*o, marks=pytest.mark.long) for o in (
        ('fastai', {3: {0: late, 2: late}}, 1, [again(1, 3),'going on in epoch 2 after step 30, from the state in memory']), # two at once
        ('', {4: {1: late, 2: late}, 2: {0: at('predict')}}, 1, [again(2, 4),again(1, 2)]),
        ('checkpoint', {3: {0: at('before_backward', 1, 1)}}, 2, ['going on in epoch 1 after step 12, from the checkpoint']),
        ('fastai checkpoint', {3: {0: at('before_backward', 1, 1)}}, 2, ['going on in epoch 1 after step 12, from the checkpoint']),
        *((f'{k}{o}', {3: {1: late}}, 2, [again(2, 3)]) for o in ('accumulate','plateau') for k in ('','fastai ')),
        ('sharded', {3: {1: late}}, 2, ['going on in epoch 2 after step 30, from the state in memory']),
        ('plain odd', {3: {1: late}}, 2, [again(2, 3)])))]) # batches of 63: 21 samples a rank, then 32 and 31
def test_the_run_is_that_of_one_process(kind, plan, n_left, messages, tmp_path, undisturbed):
    if not kind: # another fit has saved states in the learner's folder
        learn,_,_,Checkpoint = ours(tmp_path, kind, 60, None)
        with learn.no_logging(): learn.fit(1, cbs=Checkpoint('.'))
        assert [*tmp_path.glob('epoch_*')]
    check(tmp_path, launch(tmp_path, plan, kind, nproc=max(plan)), undisturbed(kind.replace('checkpoint', '').strip()), n_left, messages)
    if kind!='checkpoint': return
    saved = sorted(o for o in (tmp_path/'ckpt').iterdir() if o.is_dir())
    assert len(saved)==2 and saved[-1].name=='epoch_0003-step_00000033', saved
    assert {json.loads((o/'manifest.json').read_text())['config']['ranks'] for o in saved}=={2}

ends = '''import os,signal,sys,threading
if os.environ['RANK'] not in sys.argv[3]: threading.Event().wait()
if sys.argv[4] == 'raise': raise ZeroDivisionError('on purpose')
os.kill(os.getpid(), signal.SIGKILL)
'''

@pytest.mark.parametrize('policy,dying,how,status,messages', [('shrink','1','raise',1,'ZeroDivisionError: on purpose'),
    *(pytest.param(*o, 'kill', 137, 'ended by SIGKILL', marks=pytest.mark.long) for o in (('shrink','01'),('restart','1')))])
def test_what_ends_the_run(policy, dying, how, status, messages, tmp_path):
    "An exception, which would come again; the death of all; a death, without the option"
    (tmp_path/'ends.py').write_text(ends)
    code,_,text = launch(tmp_path, {}, dying, how, nproc=2, policy=policy, script=tmp_path/'ends.py')
    # ranks that die one after the other are two deaths: the second ends the run
    assert code==status and text.count('start again')<=(dying=='01'), text
    assert any(f'rank {o} failed first: {messages}' in text for o in dying), text

@pytest.mark.long
def test_random_points():
    cmd = [sys.executable,str(root/'tools/survivors.py'),'--kills','6','--seed','5']
    res = subprocess.run(cmd, env={**os.environ, 'PYTHONPATH': str(root)}, capture_output=True, text=True)
    assert res.returncode==0, res.stdout

def main(): train(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:])

if __name__=='__main__': main()
