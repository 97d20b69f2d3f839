"States in the launcher's folder in memory: ranks are killed and started again, and the run is the one that nobody disturbed"
import torch # first, so that ranks are forks, as those of a user's script. This word lets them have torch._dynamo, too: Learner
import functools,gc,json,os,re,signal,sys,time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from learnerdist.core.files import launch_folder
from learnerdist.checkpoint import snapshot
from learnerdist.checkpoint.snapshot import snapshots
from learnerdist.checkpoint.where import Memory
from learnerdist.distributed.comparison import digest
from learnerdist.testing import run_ranks
from learnerdist.all import Callback,Checkpoint,DataLoaders,Preempted,rank_distrib
import pytest
import test_checkpoint as checkpoint
from helpers import free_port,launch,root

slow = pytest.mark.slow

def at(event, epoch=0, i=1, training=True, ranks=(1,)):
    "A point of a fit, where ranks are killed"
    return [event,epoch,i,training,ranks]

class Die(Callback):
    "Kills ranks at a point, as if by the system; notes the steps that are done"
    order,launcher = 990,None
    def __init__(self, folder, point, attempt):
        self.folder,self.attempt = folder,attempt
        if not point: return
        self.event,self.at_epoch,self.at_iter,self.when,self.ranks = point
        if self.event!='commit': return setattr(type(self), self.event, lambda self: self.act())
        publish = snapshot._publish # all is written but the name
        def publish_or_die(tmp, folder, info):
            "At a step of the state, since the fit goes on while it is written"
            due = rank_distrib() in self.ranks and info['epoch']>=self.at_epoch and info['step']>=self.at_iter
            if due and vars(self).get('learn'): self.die()
            publish(tmp, folder, info)
        snapshot._publish = publish_or_die
    def act(self):
        inner = self.event in ('after_pred','after_backward','before_batch','after_step')
        if rank_distrib() not in self.ranks or self.epoch<self.at_epoch: return
        if inner and (self.iter<self.at_iter or self.training!=self.when): return
        self.die()
    def die(self):
        if self.launcher: (self.folder/'lost').touch()
        if self.launcher: os.kill(self.launcher, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    def after_batch(self):
        if self.training and rank_distrib()==0:
            with open(self.folder/'steps', 'a') as f: f.write(f'{self.attempt} {self.train_iter}\n')

def sharded(folder, cbs=(), **kw):
    "What should be equal, of a sharded model"
    torch.manual_seed(3)
    learn = checkpoint.learner(folder, model=torch.nn.Sequential(*[torch.nn.Linear(6, o) for o in (6,6,3)]))
    with learn.distrib_ctx(shard=True, seed=3): learn.fit(1, cbs=[Checkpoint('ckpt', **kw), *cbs], resume=True)
    model,opt,rec = digest(learn.model.state_dict()),digest(learn.opt.state_dict()),learn.recorder
    return dict(model=model, opt=opt, losses=rec.losses, values=rec.values)

as_all = dict(LEARNERDIST_SEED='1', OMP_NUM_THREADS='1') # more threads add up in another order

def train(folder, plan, kind, kw):
    "On each rank; `plan`: by attempt, a point"
    folder,attempt = Path(folder),os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
    if 'LEARNERDIST_MEMORY' in os.environ and rank_distrib()==0:
        (folder/'memory').write_text(os.environ['LEARNERDIST_MEMORY'])
        with open(folder/'open', 'a') as f: f.write(f'{len(os.listdir(f"/proc/{os.getppid()}/fd"))}\n') # the launcher's
    def tell(self, found):
        if rank_distrib()==0: print(f'in {self.at["phase"]} after step {self.at["step"]}, from {found.folder}', flush=True)
    Checkpoint._report_start = tell
    if 'three fits' in kind: checkpoint.fit(folder/'first', n_epoch=1, every=1, in_memory=True)
    die = Die(folder, plan.get(attempt), attempt)
    if 'machine' in kind: die.ranks = [0,1]*(kind=='machine 1')
    if plan.get('launcher') and kind=='machine 1': die.launcher = os.getppid()
    cbs = [die, *[checkpoint.At(2, checkpoint.kill)]*('SIGTERM' in kind)]
    res = dict(plain=checkpoint.fit(folder, 'plain', cbs, **kw))
    if 'three fits' in kind: res['sharded'] = sharded(folder/'sharded', [Die(folder, plan.get(f'sharded {attempt}'), attempt)], **kw)
    if rank_distrib()==0: (folder/'result.json').write_text(json.dumps(res))

def run(folder, plan=(), kind='', nproc=2, options=(), **kw):
    "Exit status, the result of rank 0, and what was printed"
    folder.mkdir(parents=True, exist_ok=True)
    env = dict(PYTHONPATH=f'{root}:{root/"tests"}', **as_all)
    plan = dict(enumerate(plan)) if isinstance(plan, (list,tuple)) else plan
    launcher = '--nproc',nproc,'--max-restarts',len(plan),*options
    res = launch(*launcher, __file__, folder, json.dumps(plan), kind, json.dumps(kw), env=env)
    file = folder/'result.json'
    return res.returncode,json.loads(file.read_text()) if file.exists() else None,res.stdout+res.stderr

def lost(folder):
    "By attempt but the first: how many steps were done again"
    by = {}
    for o in (folder/'steps').read_text().splitlines(): by.setdefault(int(o.split()[0]), []).append(int(o.split()[1]))
    known = sorted(by)
    return [by[a][-1]-by[b][0]+1 for a,b in zip(known, known[1:])]

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    "What rank 0 comes to without a death and without a launcher, by the number of ranks"
    @functools.cache
    def _undisturbed(nproc=2): return without_launcher(checkpoint.fit, nproc, tmp_path_factory.mktemp('ref'))
    return _undisturbed

def without_launcher(func, nproc, *args, **kw):
    return json.loads(json.dumps(run_ranks(func, nproc, *args, **dict(every='epoch') | kw, env=as_all)[0]))

def same(a, b): return a is not None and [k for k in a if a[k]!=b[k]]==[]

def run_alone(path, cbs=(), **kw):
    "In this process, which keeps the memory, too"
    return checkpoint.fit(path, ctx=False, cbs=cbs, **kw)

@pytest.mark.parametrize('background', [False,True])
def test_alone(tmp_path, background):
    alone = functools.partial(run_alone, background=background)
    whole = alone(tmp_path/'whole')
    with launch_folder():
        with pytest.raises(ZeroDivisionError): alone(tmp_path/'a', [checkpoint.At(11, checkpoint.fail)], every=3, in_memory=True)
        states = Memory(str(tmp_path/'a/ckpt'))
        assert states.newest().info['place']['step']==9 and not (tmp_path/'a/ckpt').exists()
        assert same(whole, alone(tmp_path/'a', every=3, in_memory=True))
        assert states.newest().info['place']['phase']=='done' and len(snapshots(states.folder))==1
        with pytest.warns(UserWarning, match='no state in memory has all its parts'): # as when another machine has none
            with pytest.MonkeyPatch.context() as m:
                m.setattr('learnerdist.checkpoint.where.gather_objects', lambda o: [o,[]] if o else [o])
                with pytest.raises(ZeroDivisionError): alone(tmp_path/'a', [checkpoint.At(1, checkpoint.fail)], every=3, in_memory=True)
        n = [len(os.listdir('/proc/self/fd'))]
        for _ in range(3):
            alone(tmp_path/'b', every=3, in_memory=2)
            gc.collect()
            n.append(len(os.listdir('/proc/self/fd')))
        assert n[1]==n[-1], n
        assert not snapshots(Memory(str(tmp_path/'b/ckpt')).folder) # there is a file

@pytest.mark.parametrize('step,name', [(4,'epoch_0000-step_00000004'), (9,'epoch_0000-step_00000009')])
def test_a_signal_alone_leaves_a_file(tmp_path, step, name):
    "In an epoch, or in its last step, without a validation"
    learn,cb = checkpoint.learner(tmp_path),checkpoint.At(step, checkpoint.kill)
    learn.dls,cb.order = DataLoaders(learn.dls.train),0
    with launch_folder(), pytest.raises(Preempted, match=f'saved in .* after step {step}'):
        learn.fit(1, cbs=[cb,Checkpoint('ckpt', every=1, in_memory=True)])
    assert [o.name for o in snapshots(tmp_path/'ckpt')]==[name]

def test_options(tmp_path):
    for o in (0,-1,'10',1.5):
        with pytest.raises(ValueError, match=f'in_memory={o!r}'): Checkpoint('a', in_memory=o)
    with pytest.warns(UserWarning, match='in_memory=3: only ranks that .* States go to files only, every=5'):
        run_alone(tmp_path, every=5, in_memory=3)
    assert (tmp_path/'ckpt').exists()

# 5 steps an epoch on 2 ranks, 3 on 3
everywhere = [at('after_pred', 0, 2), at('commit', 0, 2, ranks=[0]), at('after_train', 0, ranks=[0,1,2]), at('after_pred', 0, 0, False),
              at('after_backward', 1, 1, ranks=[0]), at('after_step', 1, 2), at('after_epoch', 1)]

@slow
def test_killed_in_three_fits(tmp_path, undisturbed):
    "The first one was done, and stays so; the last one is of a sharded model"
    plan = {'0': everywhere[1], '1': everywhere[3], 'sharded 2': at('commit', 0, 2, ranks=[0])}
    code,res,text = run(tmp_path, plan, 'three fits', every='epoch', in_memory=1)
    assert code==0 and same(undisturbed(), res['plain']) and same(without_launcher(sharded, 2, tmp_path/'ref'), res['sharded']), text
    found = re.findall(r'in (\w+) after step (\d+), from (the state in memory)?', text)
    memory = 'the state in memory'
    done = ('done','5',memory)
    assert found==[done, ('train','1',memory), done, ('validate','5',memory), done, ('done','10',''), ('train','1',memory)], text
    n = [*map(int, (tmp_path/'open').read_text().split())] # a restart leaves nothing open in the launcher
    assert len(n)==4 and n[-1]<=n[1], n
    assert max(lost(tmp_path))<=1 and not Path((tmp_path/'memory').read_text()).exists()

@pytest.mark.long
@pytest.mark.parametrize('nproc,kw', [(2, dict(every=2, in_memory=True)), (3, dict(every='epoch', in_memory=1, background=True))])
def test_killed_everywhere(nproc, kw, tmp_path, undisturbed):
    code,res,text = run(tmp_path, everywhere, nproc=nproc, **kw)
    assert code==0 and same(undisturbed(nproc), res['plain']), text
    assert text.count('the state in memory')==len(everywhere), text
    assert max(lost(tmp_path))<=2 and not Path((tmp_path/'memory').read_text()).exists()
    assert (tmp_path/'ckpt').exists()==('epoch'==kw['every'])

@pytest.mark.long
def test_two_machines(tmp_path, undisturbed):
    "Each keeps its own ranks' states. One that is lost takes its part along, and files are used"
    for lost,messages in (False,'from the state in memory'),(True,'no state in memory has all its parts'):
        folder,port = tmp_path/f'{lost}',free_port()
        options = ['--nnodes','2','--rdzv-endpoint',f'127.0.0.1:{port}','--rdzv-backend','c10d','--max-restarts','2']
        plan = {'0': at('after_backward', 1, 2), 'launcher': lost}
        with ThreadPoolExecutor(3) as pool:
            args = [[*options,'--rdzv-conf',f'is_host={i==0}'] for i in range(3)]
            both = [pool.submit(run, folder, plan, f'machine {i}', 1, args[i], every=3, in_memory=1, background=True) for i in range(2)]
            if lost: both.append(pool.submit(again, folder, plan, args[2]))
            found = [o.result() for o in both]
        text = '\n'.join(o[2] for o in found)
        assert [o[0] for o in found].count(0)==2 and same(undisturbed(), found[0][1]['plain']) and messages in text, text

def again(folder, plan, options):
    "Another machine comes in place of the lost one"
    while not (folder/'lost').exists(): time.sleep(.05)
    return run(folder, plan, 'machine 2', 1, options, every=3, in_memory=1, background=True)

if __name__=='__main__': train(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
