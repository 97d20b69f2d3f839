"Ranks die, in processes of the launcher: the others go on without them, and the run is the one that nobody disturbed"
import gc,json,os,signal,subprocess,sys,time
from pathlib import Path
import pytest,torch
from learnerdist.core.compat import torch_version

root = Path(__file__).parent.parent
pytestmark = pytest.mark.slow # and those that are long are run before a release

def at(event, epoch=1, i=1, training=True):
    "A point of a fit"
    return [event,epoch,i,training]

def dying(point, how):
    "A callback that does `how` at `point`, if there is one"
    from learnerdist.learner.callback import Callback
    class Die(Callback):
        order = 20
        def __getattribute__(self, k): # at any event
            if point and k==point[0] and 'learn' in vars(self): vars(self)['done'] = act(vars(self)['learn'], vars(self).get('done'))
            return object.__getattribute__(self, k)
    def act(learn, done):
        inner = point[0] in ('before_batch','after_pred','before_backward','after_backward','before_step','after_step','after_batch')
        if done or learn.epoch!=point[1] or inner and (learn.iter!=point[2] or learn.training!=point[3]): return done
        if how=='raise': raise ZeroDivisionError('on purpose')
        sig,_,wake = how.partition(' ') # wake: seconds after which it comes back to life by itself
        if wake: subprocess.Popen(['sh','-c',f'sleep {wake}; kill -CONT {os.getpid()}'])
        os.kill(os.getpid(), getattr(signal, sig))
        return True
    if point: setattr(Die, point[0], lambda self: None)
    return Die()

def train(folder, plan, kind='', how='SIGKILL'):
    "On each rank; `plan`: from local ranks to points at which they do `how`. Leaves what should be equal"
    from torch import nn
    from torch import distributed as dist
    from learnerdist.checkpoint import survivors
    from learnerdist.core import env,generations
    from learnerdist.all import (Callback,Checkpoint,CSVLogger,DataLoaders,GradientAccumulation,GradientClip,Learner,TfmdDL,accuracy,
                                 local_rank,num_distrib)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    def data(n): return [*zip(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g))]
    attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])
    bs,point = 5 if 'per rank' in kind else 60,plan.get(f'{local_rank()}'+' again'*attempt)
    dls = DataLoaders(TfmdDL(data(200), bs, shuffle=True), TfmdDL(data(70), bs))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))

    class Count(Callback): # steps that the user's own callback has heard of
        fit_state,n = ('n',),0
        def after_step(self): self.n += 1

    learn = Learner(dls, net, nn.CrossEntropyLoss(), torch.optim.AdamW, lr=.01, metrics=accuracy, path=folder)
    cbs,count = [dying(point, how), GradientClip(5.), CSVLogger()],Count()
    if 'checkpoint' in kind: cbs.append(Checkpoint('ckpt', every=2))
    if 'again' in kind and local_rank()==0 and not (Path(folder)/'killed').exists(): # before it has asked for all to be started again
        def kill():
            (Path(folder)/'killed').touch()
            os.kill(os.getpid(), signal.SIGKILL)
        generations.is_rank0 = kill
    if 'nccl' in kind: # gloo's groups in its place; the host waits for the exchange before each step
        survivors.nccl_groups,torch.cuda.synchronize = lambda: [o or dist.group.WORLD for o in env._ours],lambda: time.sleep(.3)
    if 'memory' in kind: cbs.append(Checkpoint('ckpt', every=1, in_memory=True, resume=True))
    if 'accumulate' in kind: cbs.append(GradientAccumulation(120//num_distrib()))
    kw = dict(split_batches='per rank' not in kind, shard='sharded' in kind or None, seed=3, timeout_s=3 if 'SIGSTOP' in how else None)
    with learn.distrib_ctx(**kw): (learn.fit if 'plain' in kind else learn.fit_one_cycle)(3, cbs=[*cbs, count])
    rec = learn.recorder
    gc.collect()
    res = dict(weights=[o.tolist() for o in net.state_dict().values()], losses=rec.losses, values=rec.values, lrs=rec.lrs, iters=rec.iters,
               n=count.n, world=num_distrib(), left=[o for o in map(str, links()) if 'learnerdist' in o])
    (Path(folder)/f'{local_rank()}.json').write_text(json.dumps(res))

def launch(folder, plan=(), *args, nproc=3, policy='shrink', options=(), script=__file__):
    "Exit status, what each rank has left, and what was printed"
    folder.mkdir(parents=True, exist_ok=True)
    cmd = [sys.executable,'-m','learnerdist.launch','--nproc',nproc,'--on-failure',policy,*options]
    cmd += [script,folder,json.dumps(dict(plan)),*args]
    drop = 'RANK','WORLD_SIZE','LOCAL_RANK','MASTER_PORT'
    env = {k:v for k,v in os.environ.items() if k not in drop} | dict(PYTHONPATH=str(root))
    res = subprocess.run([*map(str, cmd)], env=env, capture_output=True, text=True, timeout=150)
    return res.returncode,{int(o.stem): json.loads(o.read_text()) for o in folder.glob('[0-9].json')},res.stdout+res.stderr

def links():
    "What this process has open"
    return [o.readlink() for o in Path('/proc/self/fd').iterdir() if o.is_symlink()]

def flat(o): return [n for i in o for n in flat(i)] if isinstance(o, list) else [o]

def check(folder, got, ref, n_left, said=''):
    code,ranks,text = got
    assert code==0 and len(ranks)==n_left, text
    assert said in text, text
    for o in ranks.values():
        for k in ('weights','losses','values','lrs','iters'):
            a,b = flat(o[k]),flat(ref[0][k])
            assert len(a)==len(b) and max(abs(x-y) for x,y in zip(a, b))<1e-9, (k,text)
        assert o['n']==ref[0]['n'] and o['world']==n_left and not o['left']
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

# plans: one rank after another, each at another point. 60 samples of a global batch divide among 6 to 1 ranks
five_of_six = [
    {0: at('before_backward', 0, 0), 1: at('after_pred', 0, 2), 2: at('after_train', 0), 3: at('after_pred', 1, 0, False),
     4: at('after_epoch', 1)},
    {5: at('before_fit', 0), 4: at('before_train', 0), 3: at('after_backward', 0, 3), 2: at('after_step', 1, 2),
     0: at('after_validate', 1)},
    {1: at('before_epoch', 1), 0: at('before_batch', 1, 3), 2: at('before_step', 1, 3), 3: at('before_validate', 1),
     5: at('after_batch', 2, 0)}]

@pytest.mark.long
@pytest.mark.parametrize('plan', five_of_six)
def test_deaths_of_five_of_six(plan, tmp_path, undisturbed):
    check(tmp_path, launch(tmp_path, plan, nproc=6), undisturbed(), 1, 'with 1 ranks: global batches of 60 samples as before')

@pytest.mark.long
def test_two_at_once(tmp_path, undisturbed):
    plan = {1: at('before_backward'), 2: at('before_backward'), 0: at('before_train', 2)}
    check(tmp_path, launch(tmp_path, plan, nproc=4), undisturbed(), 1)

@pytest.mark.long
def test_a_group_of_micro_batches_is_done_again(tmp_path, undisturbed):
    ref = undisturbed('accumulate') # a step after the batches 1 and 3 of each epoch
    check(tmp_path, launch(tmp_path, {1: at('before_backward', 1, 3)}, 'accumulate'), ref, 2)

def test_the_new_rank_0_writes_checkpoints(tmp_path, undisturbed):
    check(tmp_path, launch(tmp_path, {0: at('before_backward', 1, 1)}, 'checkpoint'), undisturbed(), 2)
    saved = sorted(o.name for o in (tmp_path/'ckpt').iterdir())
    assert len(saved)==2 and saved[-1]=='epoch_0003-step_00000012', saved
    assert {json.loads((tmp_path/'ckpt'/o/'manifest.json').read_text())['config']['ranks'] for o in saved}=={2}

def test_all_die_in_the_end(tmp_path, undisturbed):
    "The states in memory are those of two ranks, for three that are started again, one of which dies in the same epoch"
    both = at('before_backward', 1, 2)
    plan = {1: at('before_backward', 0, 2), 0: both, 2: both, '1 again': at('before_backward', 1, 3)}
    got = launch(tmp_path, plan, 'memory', options=['--max-restarts','1'])
    check(tmp_path, got, undisturbed(), 2, 'going on in epoch 1 after step 6, from the state in memory')

@pytest.mark.long
def test_a_death_while_the_others_wait_for_a_gpu(tmp_path, undisturbed):
    "What was exchanged is not used, since it may be wrong: the step is made again"
    got = launch(tmp_path, {1: at('after_backward', 1, 1)}, 'nccl')
    check(tmp_path, got, undisturbed(), 2, 'going on in epoch 1 after step 5 with 2 ranks')

said_again = 'all ranks are started again after step {}, with those that have died'

def test_the_dead_are_replaced(tmp_path, undisturbed):
    "Two at once, after the next state in memory: the last run has all ranks"
    both = at('after_pred', 1, 1)
    got = launch(tmp_path, {1: both, 2: both}, 'memory', nproc=4, policy='replace')
    check(tmp_path, got, undisturbed(), 4, said_again.format(6))
    assert 'going on in epoch 1 after step 6, from the state in memory' in got[2] and 'Warning' not in got[2], got[2]

@pytest.mark.long
def test_one_dies_before_it_has_asked_for_the_others(tmp_path, undisturbed):
    "The one that is left alone asks after its next step"
    got = launch(tmp_path, {1: at('before_backward', 0, 2)}, 'memory again', policy='replace')
    check(tmp_path, got, undisturbed(), 3, said_again.format(4))
    assert 'going on in epoch 0 after step 3 with 1 ranks' in got[2], got[2]

@pytest.mark.long
def test_the_dead_of_the_last_step_are_not_replaced(tmp_path, undisturbed):
    got = launch(tmp_path, {1: at('after_epoch', 2)}, 'memory', policy='replace')
    check(tmp_path, got, undisturbed(), 2)
    assert 'started again' not in got[2]

@pytest.mark.long
def test_without_states_in_memory_the_dead_are_not_replaced(tmp_path, undisturbed):
    got = launch(tmp_path, {1: at('before_backward', 1, 1)}, policy='replace')
    check(tmp_path, got, undisturbed(), 2, 'those that have died are not replaced: give the fit a Checkpoint(…, in_memory=True')

@pytest.mark.long
def test_a_death_where_a_checkpoint_has_brought_the_fit(tmp_path, undisturbed):
    "Into a validation: what was trained on before it is not trained on again"
    point = at('after_pred', 1, 0, False)
    plan = {0: point, 1: point, 2: point, '1 again': point}
    got = launch(tmp_path, plan, 'memory', options=['--max-restarts','1'])
    check(tmp_path, got, undisturbed(), 2, 'going on in epoch 1 after step 8, from the state in memory')

@pytest.mark.long
def test_a_batch_size_per_rank(tmp_path):
    code,ranks,text = launch(tmp_path, {1: at('before_backward', 1, 1)}, 'plain per rank')
    assert code==0 and len(ranks)==2, text
    assert 'global batches of 10 samples, before 15' in text
    assert ranks[0]['weights']==ranks[2]['weights']
    assert len(ranks[0]['losses'])==14 + 1+19 + 20 # 200 samples: 13⅓ steps of 15; then one of 15, and 18.5 of 10; 20 of 10

@pytest.mark.long
def test_a_schedule_by_steps_needs_the_global_batch(tmp_path):
    code,ranks,text = launch(tmp_path, {1: at('before_backward', 1, 1)}, 'per rank')
    assert code and not ranks
    assert '2 ranks are left and cannot go on by themselves, since a schedule was made for' in text, text

def test_an_exception_ends_the_run(tmp_path):
    code,ranks,text = launch(tmp_path, {1: at('before_backward')}, '', 'raise')
    assert code==1 and not ranks and 'rank 1 failed first: ZeroDivisionError: on purpose' in text, text

@pytest.mark.long
@pytest.mark.skipif(torch_version<(2,6), reason='a torch without FSDP2')
def test_a_sharded_model_is_started_again(tmp_path, undisturbed):
    begin = time.monotonic()
    got = launch(tmp_path, {1: at('before_backward')}, 'sharded', options=['--max-restarts','1'])
    check(tmp_path, got, undisturbed('sharded'), 3, 'restart 1 of 1')
    assert got[2].count('cannot go on by themselves, since a part of the model is gone: it is sharded')>=2 and time.monotonic()-begin<100

@pytest.mark.long
def test_a_rank_that_is_stopped(tmp_path, undisturbed):
    check(tmp_path, launch(tmp_path, {1: at('before_backward')}, '', 'SIGSTOP'), undisturbed(), 2, 'rank 1 ended by SIGKILL')

@pytest.mark.long
@pytest.mark.parametrize('wake', [1,2.9,3,3.05,3.1,3.2,4])
@pytest.mark.parametrize('event', ['before_backward','after_epoch'])
def test_a_rank_that_comes_back_to_life(event, wake, tmp_path, undisturbed):
    "While the others give it up after 3 s, or after that: it is one of them, or it ends. Whoever comes to the end has the right numbers"
    code,ranks,text = got = launch(tmp_path, {0: at(event)}, '', f'SIGSTOP {wake}')
    if code==0: check(tmp_path, got, undisturbed(), 3 if wake==1 else len(ranks), '' if len(ranks)==3 else 'rank 0 ended by SIGKILL')
    else: assert 2.8<wake<4 and not ranks and 'failed first' in text, text # it came back just then, and all end

def test_a_rank_without_which_others_have_gone_on_ends(tmp_path):
    "Also one that the launcher has not killed: at its first word to the others it reads that it is none of them"
    code = """if 1:
        import json,os,sys
        from types import SimpleNamespace
        import torch.distributed as dist
        from learnerdist.core import env
        from learnerdist.checkpoint.survivors import Survivors
        os.environ.update(LOCAL_RANK='1', RANK='1', WORLD_SIZE='3')
        env._stores['root'] = store = dist.HashStore()
        store.set('members', json.dumps([1, [0,2]]))
        Survivors._go_on(SimpleNamespace())
        print('it goes on')"""
    res = subprocess.run([sys.executable,'-c',code], env={**os.environ, 'PYTHONPATH': str(root)}, capture_output=True, text=True)
    assert res.returncode==-signal.SIGKILL and not res.stdout, res.stdout+res.stderr

def test_the_default_is_to_end(tmp_path):
    code,ranks,text = launch(tmp_path, {1: at('before_backward')}, policy='restart')
    assert code==137 and not ranks and 'rank 1 failed first: ended by SIGKILL' in text and 'left' not in text, text

@pytest.mark.long
def test_several_machines_restart(tmp_path):
    code,ranks,text = launch(tmp_path, {}, options=['--nnodes','1','--rdzv-endpoint','127.0.0.1:0','--rdzv-backend','c10d'])
    assert code==0 and len(ranks)==3 and '--on-failure shrink is for the ranks of one machine: restart' in text, text

@pytest.mark.long
def test_random_points():
    cmd = [sys.executable,str(root/'tools/survivors.py'),'--kills','10','--seed','5']
    res = subprocess.run(cmd, env={**os.environ, 'PYTHONPATH': str(root)}, capture_output=True, text=True)
    assert res.returncode==0, res.stdout

def test_a_log_that_is_right_is_not_written_again(tmp_path):
    "Other ranks read it, for the case that rank 0 dies, at the place of a fit where rank 0 loads it for the second time"
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
