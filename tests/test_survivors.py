"Ranks die, in processes of the launcher: those that are left start again, and the run is the one that nobody disturbed"
import json,os,signal,subprocess,sys
from pathlib import Path
import pytest,torch

root = Path(__file__).parent.parent
pytestmark = pytest.mark.slow # and those that are long are run before a release

def at(event, epoch=1, i=1, training=True):
    "A point of a fit"
    return [event,epoch,i,training]

def dying(callback, point, how='SIGKILL'):
    "A callback of the class `callback` that does `how` at `point`, if there is one"
    class Die(callback):
        order = 20
        def act(self):
            inner = point[0] in ('before_batch','after_pred','before_backward','after_backward','before_step','after_step','after_batch')
            if self.epoch!=point[1] or inner and (self.iter!=point[2] or self.training!=point[3]): return
            if how=='raise': raise ZeroDivisionError('on purpose')
            os.kill(os.getpid(), getattr(signal, how))
    if point: setattr(Die, point[0], Die.act)
    return Die()

def data(n):
    g = torch.Generator().manual_seed(n)
    return [*zip(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g))]

def net():
    from torch import nn
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))

def train(folder, plan, kind='', how='SIGKILL'):
    "On each rank; `plan`: by the number of ranks, by rank, a point at which it does `how`. Leaves what should be equal"
    from learnerdist.all import (Callback,Checkpoint,CSVLogger,DataLoaders,GradientAccumulation,GradientClip,Learner,
                                 ReduceLROnPlateauCallback,TfmdDL,accuracy,num_distrib,rank_distrib)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    bs = 5 if 'per rank' in kind else 63 if 'odd' in kind else 60
    point = plan.get(f'{num_distrib()}', {}).get(f'{rank_distrib()}')
    dls = DataLoaders(TfmdDL(data(660), bs, shuffle=True), TfmdDL(data(70), bs))
    learn = Learner(dls, net(), torch.nn.CrossEntropyLoss(), torch.optim.AdamW, lr=.01, metrics=accuracy, path=folder)
    class Count(Callback): # steps that the user's own callback has heard of
        fit_state,n = ('n',),0
        def after_step(self): self.n += 1
    cbs,count = [dying(Callback, point, how),GradientClip(5.),CSVLogger()],Count()
    if 'checkpoint' in kind: cbs.append(Checkpoint('ckpt', every=2, resume=True))
    if 'accumulate' in kind: cbs.append(GradientAccumulation(120//num_distrib()))
    if 'plateau' in kind: cbs.append(ReduceLROnPlateauCallback(patience=0, threshold=.5))
    with learn.distrib_ctx(split_batches='per rank' not in kind, shard='sharded' in kind or None, seed=3):
        (learn.fit if 'plain' in kind or 'plateau' in kind else learn.fit_one_cycle)(3, cbs=[*cbs,count])
        preds = [o.tolist() for o in learn.get_preds(cbs=dying(Callback, point and point[0]=='predict' and ['after_pred',2,1,False]))]
    rec = learn.recorder
    res = dict(weights=[o.tolist() for o in learn.model.state_dict().values()], losses=rec.losses, values=rec.values, lrs=rec.lrs,
               iters=rec.iters, preds=preds, norms=cbs[1].norms, n=count.n, world=num_distrib())
    (Path(folder)/f'{rank_distrib()}.json').write_text(json.dumps(res))

def launch(folder, plan=(), *args, nproc=3, policy='shrink', options=(), script=__file__):
    "Exit status, what each rank has left, and what was printed"
    folder.mkdir(parents=True, exist_ok=True)
    cmd = [sys.executable,'-m','learnerdist.launch','--nproc',nproc,'--on-failure',policy,*options]
    cmd += [script,folder,json.dumps(dict(plan)),*args]
    drop = 'RANK','WORLD_SIZE','LOCAL_RANK','MASTER_PORT'
    env = {k:v for k,v in os.environ.items() if k not in drop} | dict(PYTHONPATH=str(root))
    res = subprocess.run([*map(str, cmd)], env=env, capture_output=True, text=True, timeout=150)
    return res.returncode,{int(o.stem): json.loads(o.read_text()) for o in folder.glob('[0-9].json')},res.stdout+res.stderr

def flat(o): return [n for i in o for n in flat(i)] if isinstance(o, list) else [o]

def check(folder, got, ref, n_left, said=()):
    code,ranks,text = got
    assert code==0 and len(ranks)==n_left, text
    for o in said: assert o in text, text
    for o in ranks.values():
        for k in ('weights','losses','values','lrs','iters','preds','norms'):
            a,b = flat(o[k]),flat(ref[0][k])
            assert len(a)==len(b) and max((abs(x-y) for x,y in zip(a, b)), default=0)<1e-9, (k,text)
        assert o['n']==ref[0]['n'] and o['world']==n_left
    csv = (folder/'history.csv').read_text().splitlines()
    assert len(csv)==4 and [o[0] for o in csv]==['e','0','1','2']

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    "What ranks come to without a death, by kind"
    known = {}
    def _undisturbed(kind=''):
        if kind not in known: known[kind] = launch(tmp_path_factory.mktemp('ref'), (), kind)[1]
        return known[kind]
    return _undisturbed

def again(n, of): return f'all start again, with {n} of {of} ranks'

# plans: by the number of ranks, who dies where. 60 samples of a global batch divide among 6 to 1 ranks, 11 batches an epoch
five_of_six = [
    {6: {0: at('before_backward', 0, 0)}, 5: {1: at('after_train', 0)}, 4: {3: at('after_pred', 1, 0, False)}, 3: {0: at('after_epoch', 1)},
     2: {1: at('after_step', 2, 9)}},
    {6: {5: at('before_fit', 0)}, 5: {0: at('before_train', 0)}, 4: {2: at('after_batch', 2, 9), 1: at('after_batch', 2, 9)},
     2: {0: at('predict')}}]

@pytest.mark.long
@pytest.mark.parametrize('plan', five_of_six)
def test_deaths_of_five_of_six(plan, tmp_path, undisturbed):
    said = again(5, 6),again(1, 2),'going on in epoch 2 after step 30, from the state in memory'
    check(tmp_path, launch(tmp_path, plan, nproc=6), undisturbed(), 1, said)

def test_two_at_once_then_rank_0(tmp_path, undisturbed):
    plan = {4: {1: at('before_backward', 2, 9), 2: at('before_backward', 2, 9)}, 2: {0: at('predict')}}
    said = again(2, 4),again(1, 2),'going on in epoch 2 after step 30','this fit was done already, after 33 steps'
    check(tmp_path, launch(tmp_path, plan, nproc=4), undisturbed(), 1, said)

@pytest.mark.long
@pytest.mark.parametrize('kind', ['accumulate','plateau'])
def test_callbacks_go_on(kind, tmp_path, undisturbed):
    check(tmp_path, launch(tmp_path, {3: {1: at('before_backward', 2, 9)}}, kind), undisturbed(kind), 2, [again(2, 3)])

def test_a_checkpoint_takes_the_place_of_the_implied_one(tmp_path, undisturbed):
    got = launch(tmp_path, {3: {0: at('before_backward', 1, 1)}}, 'checkpoint')
    check(tmp_path, got, undisturbed(), 2, ['going on in epoch 1 after step 12, from the checkpoint'])
    saved = sorted(o for o in (tmp_path/'ckpt').iterdir() if o.is_dir())
    assert len(saved)==2 and saved[-1].name=='epoch_0003-step_00000033', saved
    assert {json.loads((o/'manifest.json').read_text())['config']['ranks'] for o in saved}=={2}

@pytest.mark.long
def test_a_sharded_model(tmp_path, undisturbed):
    got = launch(tmp_path, {3: {1: at('before_backward', 2, 9)}}, 'sharded')
    check(tmp_path, got, undisturbed('sharded'), 2, ['going on in epoch 2 after step 30, from the state in memory'])

@pytest.mark.long
def test_a_batch_size_per_rank(tmp_path):
    "660 samples: 10 steps of 15 are in the state in memory; then 51 of 10 samples, and 66 in each of the other epochs"
    code,ranks,text = launch(tmp_path, {3: {1: at('before_backward', 0, 12)}}, 'plain per rank')
    assert code==0 and len(ranks)==2, text
    assert 'batch_size 15 then, 10 now' in text, text
    assert ranks[0]['weights']==ranks[1]['weights'] and ranks[0]['iters']==[61,127,193], ranks[0]['iters']

@pytest.mark.long
def test_a_global_batch_that_those_that_are_left_do_not_divide(tmp_path):
    "660 samples in batches of 63 are 11 steps, in batches of 62, too"
    code,ranks,text = launch(tmp_path, {3: {1: at('before_backward', 2, 9)}}, 'plain odd')
    assert code==0 and len(ranks)==2 and 'batch_size 63 then, 62 now' in text, text
    assert ranks[0]['weights']==ranks[1]['weights'] and ranks[0]['iters']==[11,22,33], ranks[0]['iters']

@pytest.mark.long
def test_a_schedule_by_steps_needs_the_global_batch(tmp_path):
    code,ranks,text = launch(tmp_path, {3: {1: at('before_backward', 1, 1)}}, 'per rank')
    assert code and not ranks and 'with a scheduler for' in text, text

def test_an_exception_ends_the_run(tmp_path):
    code,ranks,text = launch(tmp_path, {3: {1: at('before_backward')}}, '', 'raise')
    assert code==1 and not ranks and 'rank 1 failed first: ZeroDivisionError: on purpose' in text and 'start again' not in text, text

def test_all_die(tmp_path):
    code,ranks,text = launch(tmp_path, {2: dict.fromkeys(range(2), at('before_fit', 0))}, nproc=2)
    assert code==137 and not ranks and 'start again' not in text, text

def test_the_default_is_to_end(tmp_path):
    code,ranks,text = launch(tmp_path, {3: {1: at('before_backward')}}, policy='restart')
    assert code==137 and not ranks and 'rank 1 failed first: ended by SIGKILL' in text and 'start again' not in text, text

@pytest.mark.parametrize('options,why', [(['--max-restarts','1'],'--max-restarts 1, which starts as many ranks again'),
    (['--nnodes','2','--rdzv-endpoint','127.0.0.1:29501'],'it is for the ranks of one machine')])
def test_what_does_not_go_together(options, why, tmp_path):
    code,_,text = launch(tmp_path, options=options)
    assert code==2 and '--on-failure shrink: ' in text and why in text, text

@pytest.mark.long
def test_random_points():
    cmd = [sys.executable,str(root/'tools/survivors.py'),'--kills','6','--seed','5']
    res = subprocess.run(cmd, env={**os.environ, 'PYTHONPATH': str(root)}, capture_output=True, text=True)
    assert res.returncode==0, res.stdout

def test_a_log_that_is_right_is_not_written_again(tmp_path):
    from types import SimpleNamespace
    from learnerdist.all import CSVLogger
    cb = CSVLogger('log.csv')
    cb.learn = SimpleNamespace(path=tmp_path, recorder=SimpleNamespace(metric_names=['epoch','loss','time']))
    cb.open()
    assert (tmp_path/'log.csv').read_text()=='epoch,loss\n' # at once, since others may read it
    cb.written = 'epoch,loss\n0,1.5\n'
    cuts,truncate = [],cb.file.truncate
    same = {k: getattr(cb.file, k) for k in ('seek','write','flush','close')}
    cb.file = SimpleNamespace(truncate=lambda: cuts.append(truncate()), **same)
    cb.written = cb.written
    assert not cuts
    cb.written = 'epoch,loss\n'
    assert len(cuts)==1 and cb.written=='epoch,loss\n'

if __name__=='__main__': train(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:])
