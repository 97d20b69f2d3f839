"States and files at addresses of other file systems: whole or not there, whatever fails; memory:// here, a server of S3 for several ranks"
import io, json, os, re, signal, threading, warnings
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
import pytest
from helpers import At
from learnerdist.all import (Callback, Checkpoint, Learner, Preempted, SaveModelCallback, distrib_barrier, group_rank)
from learnerdist.checkpoint import snapshot
from learnerdist.core import remote
from learnerdist.core.files import launch_folder
from learnerdist.core.shards import full_tensor
from learnerdist.core.remote import RemoteError, as_path
from learnerdist.fastai import load_learner
from learnerdist.testing import run_ranks
from test_files import fastai_learner
import test_sharded as sharded
from harness import all_warnings, close, in_group, needs_fsdp2
from test_sharded import Net, case, make

fsspec = pytest.importorskip('fsspec')
calls = 'put_file','get_file','cat_file','find','info','size','rm'

@pytest.fixture(scope='module')
def server():
    res = pytest.importorskip('moto.server').ThreadedMotoServer('127.0.0.1', 0, verbose=False)
    res.start()
    yield 'http://%s:%d' % res.get_host_and_port()
    res.stop()

@pytest.fixture
def s3(server, monkeypatch, request):
    "The address of a new bucket"
    for k,v in dict(ENDPOINT_URL=server, ACCESS_KEY_ID='a', SECRET_ACCESS_KEY='b', DEFAULT_REGION='us-east-1').items():
        monkeypatch.setenv(f'AWS_{k}', v)
    name = re.sub(r'[^a-z0-9]+', '-', request.node.name).strip('-')[:60]
    fs = pytest.importorskip('s3fs').S3FileSystem()
    fs.mkdir(name)
    fs.invalidate_cache()
    return f's3://{name}'

@pytest.fixture
def memory(monkeypatch):
    "An empty file system in memory, without pauses between attempts"
    monkeypatch.setattr(remote, 'pauses', (0,0,0))
    fs = fsspec.filesystem('memory')
    fs.store.clear()
    return fs

def train(at, path='.', stop=None, shard=False, **kw): return sharded.train(path, shard, stop, at, Net, **kw)

def stopped(at, stop, *args, **kw):
    with pytest.raises(ZeroDivisionError): train(at, *args, cbs=[At(stop)], **kw)

def names(at): return [o.name for o in snapshot.snapshots(as_path(at))]

# --- one process ------------------------------------------------------------------------------------------------------------

def test_a_fit_goes_on_as_from_a_local_folder(memory, tmp_path):
    "To the bit, with the same states there; a folder may be copied from one to the other. That of ranks is on S3"
    at = 'memory://runs/a'
    whole = train('ck', tmp_path/'whole')
    for o in ('ck',at): stopped(o, 7, tmp_path)
    assert names(at)==names(tmp_path/'ck')==['epoch_0001-step_00000004','epoch_0001-step_00000006']
    with pytest.raises(ValueError, match='holds checkpoints of another run'): train(at, resume=False)
    there = as_path(at)
    there.fs.get(there.path+'/', f'{tmp_path}/down/', recursive=True)
    there.fs.put(f'{tmp_path}/ck/', (there.parent/'b').path+'/', recursive=True)
    for o in (at, str(there.parent/'b'), tmp_path/'ck', tmp_path/'down'):
        close(train(o), whole, 0)
        assert names(o)[-1]=='epoch_0003-step_00000009' and len(names(o))==2
        learn = make(case(model=Net)).load(o)
        close(dict(learn.model.state_dict()), whole['w'], 0)
    assert [o for o in there.files() if not o.startswith('epoch_')]==[]

@pytest.mark.parametrize('parts', ['../'*12, '/', 'a/b', 7])
def test_a_manifest_that_leads_out_of_its_folder(parts, memory, tmp_path, monkeypatch):
    "Is no manifest: nothing is written elsewhere"
    if isinstance(parts, str) and parts[-1:]=='/': parts += f'{tmp_path}/elsewhere'.lstrip('/')
    at = as_path('memory://run')/'epoch_0000-step_00000001'
    info = dict(epoch=0, step=1)
    snapshot.write_snapshot(at, dict(model={}, state={}), info)
    found = json.loads((at/'manifest.json').read_bytes())
    for o in ('model.pt','state.pt'): memory.store[f'{at.path}/{parts}/{o}'] = memory.store[f"{at.path}/{found['parts']}/{o}"]
    del found['crc32']
    found['parts'] = parts
    memory.pipe_file(f'{at.path}/manifest.json', json.dumps(found|dict(crc32=snapshot._crc(found))).encode())
    with pytest.raises(ValueError, match='manifest.json is no manifest'): make(case(model=Net)).load('memory://run')
    assert not (tmp_path/'elsewhere').exists()
    with pytest.raises(ValueError, match="path='/run/../x': an address has no"): as_path('memory://run/../x')

def test_the_best_models_and_a_second_fit_at_an_address(memory, tmp_path):
    "`keep` removes what is no longer among the best. `fine_tune` with a `Checkpoint`, and what is loaded then: of its last fit"
    learn = make(case(model=Net))
    learn.splitter = lambda m: [[p] for p in m.parameters()]
    with learn.no_logging():
        learn.fit(4, cbs=SaveModelCallback(fname='memory://best/m', monitor='train_loss', keep=2))
        assert sorted(as_path('memory://best').files())==['m_2.pth','m_3.pth']
        learn.fine_tune(1, cbs=Checkpoint('memory://tuned'))
    assert {o.partition('/')[0] for o in as_path('memory://tuned').files()}=={'epoch_0001-step_00000004','fit_2'}
    close(dict(make(case(model=Net)).load('memory://tuned').model.state_dict()), dict(learn.model.state_dict()), 0)

def test_a_learner_has_a_local_folder(tmp_path, monkeypatch):
    "A `Path` would drop a slash of an address, and be a folder named s3:"
    monkeypatch.chdir(tmp_path)
    ours = make(case(model=Net))
    with pytest.raises(ValueError, match="path='memory://run': give a local folder, and addresses to save"):
        Learner(ours.dls, ours.model, ours.loss_func, path='memory://run')
    for learn in (ours,fastai_learner('.')):
        learn.path = Path('s3://bucket/run')
        for f in (learn.save, learn.load, getattr(learn, 'export', learn.save)):
            with pytest.raises(ValueError, match='a Path drops a slash of an address: give addresses as text'): f('a')
        with pytest.raises(ValueError, match='a Path drops a slash'): learn.fit(1, cbs=Checkpoint('a'))
    assert os.listdir()==[]

def test_a_memory_that_each_rank_has_for_itself(memory, monkeypatch):
    "Is refused: nobody else reads it, and a restart would find nothing"
    for k,v in dict(RANK='0', WORLD_SIZE='2').items(): monkeypatch.setenv(k, v)
    with pytest.raises(ValueError, match=r"path='memory://r': each rank has its own.*in_memory=10"): as_path('memory://r')

def test_beside_states_in_memory(memory, tmp_path):
    "The newer one is taken"
    with launch_folder():
        whole = train('ck', tmp_path, in_memory=1)
        stopped('memory://r', 8, in_memory=1)
        assert names('memory://r')[-1]=='epoch_0001-step_00000006'
        messages = io.StringIO()
        with redirect_stdout(messages): close(train('memory://r', in_memory=1, quiet=False), whole, 0)
    assert 'after step 7, from the state in memory' in messages.getvalue() and len(names('memory://r'))==2

class Faults:
    "Counts the calls of a file system, and lets `act` take the place of those in `when`"
    def __init__(self, fs, act=None, when=(), names=calls):
        self.n,self.done = 0,[]
        for k in names: setattr(fs, k, self.wrapped(fs, k, getattr(fs, k), act, when))
    def wrapped(self, fs, k, f, act, when):
        def g(*args, **kw):
            self.n += 1
            self.done.append((k,args))
            return act(f, k, fs, *args) if self.n in when else f(*args, **kw)
        return g

def unplug(fs):
    for k in calls: vars(fs).pop(k, None)

def refuse(f, *args): raise ConnectionResetError('cut')
def halve(f, k, fs, *args):
    "A transfer ends in the middle, without an error"
    if k=='put_file': return fs.pipe_file(args[1], Path(args[0]).read_bytes()[:-7])
    f(*args)
    if k=='get_file': os.truncate(args[1], os.path.getsize(args[1])-7)
    else: refuse(f)

small = dict(n=24, n_epoch=2, keep=1) # 4 steps, a state after 2 and 4

def with_faults(fs, act, i, **kw):
    "A fit in which call `i` fails, or all from there on; (the end, whether there was such a call)"
    found = Faults(fs, act, i)
    try: return train('memory://r', **small, **kw),found.n>=i[0]
    finally: unplug(fs)

@pytest.mark.slow
def test_each_call_fails_once_and_is_made_again(memory, tmp_path):
    "No error, no warning, and the same end: of each fifth call of a fit, and of one that goes on; two kinds of errors by turns"
    whole = train('ck', tmp_path, **small)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for stop in (None,3):
            i,there = 0,True
            while there:
                memory.store.clear()
                if stop: stopped('memory://r', stop, **small)
                i += 5
                res,there = with_faults(memory, (refuse,halve)[i%2], [i])
                close(res, whole, 0, f'{stop}, {i}')
            assert i>(12 if stop else 25)

def test_the_network_goes_down_at_any_call(memory, tmp_path):
    "Before training that is an error; later the fit goes on with a warning, and what was whole stays so"
    whole,ends,there = train('ck', tmp_path, **small),[],True
    while there:
        memory.store.clear()
        with all_warnings() as messages:
            try: res,there = with_faults(memory, refuse, range(5*len(ends)+1, 999))
            except RemoteError: res = None
        assert {str(o.message)[:14] for o in messages}<={'[not-uploaded]'}
        if res: close(res, whole, 0)
        ends.append((len(messages) if res else 'error',len(names('memory://r'))))
        if len(ends)%3: continue
        close(train('memory://r', **small), whole, 0)
        assert len(names('memory://r'))<=2 and not snapshot.snapshots(as_path('memory://r'), False) # unfinished ones
    assert ends[0]==('error',0) and ends[-1]==(0,1) and {o for o,n in ends}=={'error',3,2,1,0}, ends
    assert all(n>0 for o,n in ends if o in (0,1))

def test_what_cannot_be_written_is_an_error_before_training(s3, memory, monkeypatch):
    for at,messages in [(f'{s3}-none/r', 'bucket'), ('nosuch://a', 'nosuch'), (Path('s3://a/b'), 'as text')]:
        with pytest.raises((OSError,ValueError), match=messages): train(at, cbs=[At(1)])
    def denied(*args): raise PermissionError('no')
    monkeypatch.setattr(memory, 'put_file', denied, raising=False)
    with pytest.raises(RemoteError, match='memory://.*PermissionError: no'): train('memory://r', cbs=[At(1)])

def test_what_cannot_succeed_is_tried_once(memory, monkeypatch):
    monkeypatch.setattr(remote, 'pauses', (60,60,60))
    for error in (TypeError,ValueError,KeyError,AttributeError,NotImplementedError,PermissionError):
        def info(path, error=error): raise error('no')
        monkeypatch.setattr(memory, 'info', info)
        with pytest.raises(RemoteError, match=f'memory:///run/a: {error.__name__}'): as_path('memory://run/a').exists()
    pytest.importorskip('s3fs')
    for address,why in {'s3://':'give a folder or a file', 'nope://run':'nope://run: .*not known.*such as s3://bucket'}.items():
        with pytest.raises(ValueError, match=why): as_path(address)

def test_two_states_are_on_the_way_at_most(memory, tmp_path):
    "Training does not wait for an upload, the third state does; SIGTERM waits for all"
    whole,go,seen = train('ck', tmp_path, every=1),threading.Event(),[]
    def slow(f, *args):
        assert go.wait(60)
        return f(*args[2:])
    class Seen(Callback):
        def after_batch(self):
            if not self.training: return
            seen.append(len(self.learn.checkpoint.files.pending))
            if self.train_iter==3: go.set()
            if self.train_iter==6: os.kill(os.getpid(), signal.SIGTERM)
    Faults(memory, slow, range(3, 99), ['put_file'])
    messages = 'is saved in memory:.* after step 6, and goes on from there'
    with pytest.raises(Preempted, match=messages): train('memory://r', every=1, cbs=[Seen()])
    unplug(memory)
    assert seen[:3]==[0,1,2] and max(seen)==2 and names('memory://r')[-1]=='epoch_0001-step_00000006'
    close(train('memory://r', every=1), whole, 0)

# --- several processes, a server of S3 --------------------------------------------------------------------------------------

def goes_on(at, shard, stop=None, faults=None):
    "On a rank: the run, its warnings, and what this rank has downloaded"
    fs = as_path(at).fs
    found = Faults(fs, *(faults or {}).get(group_rank(), ()))
    with all_warnings() as messages:
        res = train(at, shard=shard, stop=stop)
    return res,[str(o.message) for o in messages],[args[0].rpartition('/')[2] for k,args in found.done if k=='get_file']

@pytest.mark.slow
@needs_fsdp2
@pytest.mark.parametrize('shard', [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.long)])
def test_ranks_go_on_from_s3(shard, s3, tmp_path):
    "And on other numbers of ranks. A rank reads its rows only; one copy of what all need is downloaded to a machine"
    whole = run_ranks(in_group, 2, train, 'ck', tmp_path, None, shard)
    with pytest.raises(Exception, match='on purpose'): run_ranks(in_group, 2, goes_on, f'{s3}/a', shard, 5)
    fs = as_path(s3).fs
    for W in (1,3): fs.copy(as_path(f'{s3}/a').path, as_path(f'{s3}/{W}').path, recursive=True)
    found = run_ranks(in_group, 2, goes_on, f'{s3}/a', shard)
    close([o[0] for o in found], whole, 0)
    read = [o[2] for o in found]
    assert sorted(sum(read, []))==['model.pt',*(['rows_0.pt','rows_1.pt'] if shard else []),'state.pt']
    if shard: assert [f'rows_{i}.pt' in o for i,o in enumerate(read)]==[True,True]
    for W in (1,3):
        for o in run_ranks(in_group, W, goes_on, f'{s3}/{W}', shard and W>1): close(o[0], whole[0])

def refused_on(rank, n):
    "Uploads of a rank fail from the n-th on"
    return {rank: (refuse,range(n, 999),['put_file'])}

@pytest.mark.long
@needs_fsdp2
def test_a_rank_that_cannot_upload_does_not_end_the_run(s3):
    "Rank 0 warns, and names the rank; the state before is the newest, and good"
    whole = run_ranks(in_group, 2, goes_on, f'{s3}/w', True)
    for rank in (0,1):
        at = f'{s3}/{rank}'
        res = run_ranks(in_group, 2, without_pauses, at, refused_on(rank, (6,2)[rank])) # in the second of 5 states
        messages = res[0][1]
        close([o[0] for o in res], [o[0] for o in whole], 0)
        assert len(messages)==4 and not res[1][1]
        assert all(o.startswith('[not-uploaded]') and 'cut' in o and ('rank 1 failed' in o)==rank for o in messages)
        assert names(at)==['epoch_0000-step_00000002']
        close([o[0] for o in run_ranks(in_group, 2, goes_on, at, True)], [o[0] for o in whole], 0)
        assert names(at)[-1]=='epoch_0003-step_00000009' and not snapshot.snapshots(as_path(at), False)

def without_pauses(at, faults, shard=True):
    remote.pauses = 0,0,0
    return goes_on(at, shard, faults=faults)

def killed(at, shard, kill):
    rank,n,after = kill
    def end(f, k, fs, *args):
        if after: f(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    fs = as_path(at).fs
    if group_rank()==rank: Faults(fs, end, [n], ['put_file','rm'])
    return train(at, shard=shard, keep=1)

@pytest.mark.slow
@needs_fsdp2
@pytest.mark.parametrize('W,kills', [
    pytest.param(1, [(0,5,False),(0,8,False),(0,8,True),(0,9,True)], marks=pytest.mark.long),
    (2, [(1,2,False)]), pytest.param(2, [(0,6,False),(0,11,True)], marks=pytest.mark.long)])
def test_killed_in_each_phase(W, kills, s3, tmp_path):
    "Before or after a part, a manifest, or its removal. The newest state is whole, and no part stays for ever"
    whole = run_ranks(in_group, W, train, 'ck', tmp_path, shard=W>1)
    for kill in kills:
        at = f'{s3}/{"-".join(map(str, kill))}'
        with pytest.raises(Exception, match='SIGKILL'): run_ranks(in_group, W, killed, at, W>1, kill)
        there = names(at)
        found = snapshot.newest_good(as_path(at))
        assert not there and found is None or found.folder.name==there[-1] and not found.bad
        close(run_ranks(in_group, W, train, at, shard=W>1, keep=1), whole, 0)
        assert {o.partition('/')[0] for o in as_path(at).files()}=={'epoch_0003-step_00000009'}

# --- files ------------------------------------------------------------------------------------------------------------------

def file_of(at, fastai=False, ctx=True, **options):
    "Saved, loaded and loaded again, by fastai's Learner exported, too, on each rank; the weights each time"
    learn,new = [fastai_learner('.') if fastai else make(case(model=Net)) for _ in 'ab']
    names = [f'{at}/m',*([] if fastai else [f'{at}/m.safetensors'])]
    found = []
    with learn.distrib_ctx(**options) if ctx else nullcontext():
        learn.fit(1)
        for o in names:
            learn.save(o)
            found += [whole_of(learn.model),whole_of(learn.load(o).model)]
    if fastai:
        learn.export(f'{at}/e.pth')
        distrib_barrier()
        found.append(whole_of(load_learner(f'{at}/e.pth').model))
    found.append(whole_of(new.load(names[0]).model))
    return found

def whole_of(model): return {k: full_tensor(p).detach().clone() for k,p in model.state_dict().items()}

def same_weights(found):
    assert len(found)>3
    for o in found[1:]: close(o, found[0], 0)

@pytest.mark.parametrize('fastai', [False, True])
def test_files_in_memory(fastai, memory):
    same_weights(file_of('memory://files', fastai))
    assert sorted(as_path('memory://files').files())==(['e.pth','m.pth'] if fastai else ['m.pth','m.safetensors'])
    with pytest.raises(FileNotFoundError, match='none'): make(case(model=Net)).load('memory://files/none')

@pytest.mark.slow
@needs_fsdp2
@pytest.mark.parametrize('fastai,options', [(False,dict(shard=True)), (True,{}), pytest.param(False, {}, marks=pytest.mark.long)])
def test_files_on_s3_of_two_ranks(fastai, options, s3):
    "What rank 0 has saved is there for the other rank's load"
    for o in run_ranks(in_group, 2, file_of, f'{s3}/files', fastai, **options): same_weights(o)
