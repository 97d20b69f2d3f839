"What the launcher said, which device and backend follow from it, and groups that are opened and closed"
import errno, fcntl, gc, os, re, shlex, socket, subprocess, sys, tempfile, warnings, pytest, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from learnerdist.all import *
from learnerdist.core import hosts
from learnerdist.core.files import memory, own_folder
import learnerdist.core.env as env
from learnerdist.core.env import close_group, current_group, in_group, local_size, shared_store
from learnerdist.distributed.failure import failing_together
from learnerdist.launch import forkserver
from learnerdist.launch.processes import is_rank
from learnerdist.testing import run_ranks
from helpers import free_port

variables = 'RANK','WORLD_SIZE','LOCAL_RANK','LOCAL_WORLD_SIZE'

@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for k in variables: monkeypatch.delenv(k, raising=False)

@pytest.fixture
def taken_port():
    with socket.socket() as s:
        s.bind(('', 0))
        s.listen()
        yield str(s.getsockname()[1])

def launched(monkeypatch, **kw):
    for k,v in kw.items(): monkeypatch.setenv(k, v)

@pytest.mark.parametrize('kw,want', [
    (dict(RANK='5', WORLD_SIZE='8', LOCAL_RANK='1', LOCAL_WORLD_SIZE='4'), (5, 8, 1, 4)), (dict(RANK='3', WORLD_SIZE='4'), (3, 4, 3, 4)),
    (dict(RANK='0', WORLD_SIZE='1'), (0, 1, 0, 1)), (dict(RANK='', WORLD_SIZE=''), (0, 0, 0, 1)), (dict(RANK='2', WORLD_SIZE='4',
        LOCAL_RANK='0'), (2, 4, 0, 4))])
def test_what_the_launcher_said(monkeypatch, kw, want):
    launched(monkeypatch, **kw)
    assert (rank_distrib(),num_distrib(),local_rank(),local_size())==want and is_rank0()==(want[0]==0)

@pytest.fixture
def gpus(monkeypatch):
    "As if there were so many GPUs"
    def f(n, kind='cuda'):
        monkeypatch.setattr(torch.accelerator, 'is_available', lambda: n>0)
        monkeypatch.setattr(torch.accelerator, 'device_count', lambda: n)
        monkeypatch.setattr(env, 'built_for', lambda: torch.device(kind))
    return f

def test_devices(monkeypatch, gpus):
    gpus(0)
    assert default_device()==torch.device('cpu')
    with pytest.raises(ValueError, match='device=0, but 0 GPUs'): default_device(device=0)
    gpus(2)
    assert default_device()==torch.device('cuda', 0) and default_device(device=1)==torch.device('cuda', 1)
    for one in (1,'1','cuda:1',torch.device('cuda', 1)): assert default_device(device=one)==torch.device('cuda', 1)
    for bad in (2,-1,'cpu','cuda','xpu:1'):
        with pytest.raises(ValueError, match=f'device={bad!r}, but 2 GPUs'): default_device(device=bad)
    launched(monkeypatch, RANK='5', WORLD_SIZE='8', LOCAL_RANK='1')
    assert default_device()==torch.device('cuda', 1)
    launched(monkeypatch, LOCAL_RANK='3') # more ranks than GPUs share them
    assert default_device()==torch.device('cuda', 1)
    gpus(2, 'xpu')
    assert default_device()==torch.device('xpu', 1)
    launched(monkeypatch, RANK='', WORLD_SIZE='')
    gpus(1, 'mps')
    assert default_device()==torch.device('mps', 0)
    launched(monkeypatch, RANK='1', WORLD_SIZE='2')
    with pytest.warns(UserWarning, match='cpu-ranks. ranks cannot exchange tensors of mps, and train on the CPU'):
        assert default_device()==torch.device('cpu')

cards = {('a 1','a 2'): 'cpu:gloo,cuda:nccl', ('a 1','cpu'): 'gloo', ('a 1','a 1'): 'gloo',
         ('cpu','cpu'): 'gloo', ('a 1','b 1'): 'cpu:gloo,cuda:nccl'}

def rank_backends():
    "What ranks open, when each sees one GPU and has the card that is named; nccl refuses two ranks on one GPU"
    names = []
    with pytest.MonkeyPatch.context() as m:
        m.setattr(dist, 'init_process_group', lambda backend, **kw: names.append(backend))
        m.setattr(env, '_use', lambda device: torch.device('cuda'))
        for own in cards:
            m.setattr(env, 'gpu_id', lambda device, own=own: own[int(os.environ['RANK'])])
            setup_distrib()
    return names

def test_all_ranks_open_the_same(): assert run_ranks(rank_backends, 2)==[[*cards.values()]]*2

def rank_groups():
    device,r = setup_distrib(),rank_distrib()
    assert (in_group(),group_rank(),group_size(),device.type,dist.get_backend())==(True,r,2,'cpu','gloo') and setup_distrib()==device
    outer = dist.group.WORLD
    with process_group() as d:
        own = current_group()
        assert own not in (outer,None) and (group_rank(),group_size(),d)==(r,2,device)
        with process_group(): assert current_group() is own
        assert current_group() is own and in_group()
    assert in_group() and dist.group.WORLD is outer and current_group() is None # it is left open
    dist.barrier()
    for _ in range(2): teardown_distrib()
    assert (in_group(),group_rank(),group_size())==(False,0,1)
    for _ in range(2): # one after the other
        with process_group():
            t = torch.ones(1)
            dist.all_reduce(t)
        assert t.item()==2 and not in_group()
    with pytest.raises(KeyError), process_group(): raise KeyError
    assert not in_group() and current_group() is None
    with process_group():
        close_group()
        assert not in_group()
    with process_group(): teardown_distrib() # the user closes it under our hands
    assert not in_group() and current_group() is None
    with process_group(): assert group_size()==2

def test_groups(): run_ranks(rank_groups, 2)

ompi = dict(OMPI_COMM_WORLD_RANK='1', OMPI_COMM_WORLD_SIZE='2', OMPI_COMM_WORLD_LOCAL_RANK='1', OMPI_COMM_WORLD_LOCAL_SIZE='2')
step = dict(SLURM_PROCID='1', SLURM_NTASKS='2', SLURM_LOCALID='1', SLURM_NODEID='0', SLURM_NNODES='1', SLURM_STEP_ID='0', SLURM_JOB_ID='7')

@pytest.mark.parametrize('kw', [ompi, dict(PMI_RANK='1', PMI_SIZE='2', MPI_LOCALRANKID='1', MPI_LOCALNRANKS='2'), step,
    dict(PMIX_RANK='1', PMIX_SIZE='2', PMIX_LOCAL_RANK='1', PMIX_LOCAL_SIZE='2'),
    step | dict(PMIX_RANK='1'), step | dict(PMI_RANK='1', PMI_SIZE='2'), # srun --mpi=pmix, --mpi=pmi2
    dict(step, SLURM_NTASKS='3', SLURM_PROCID='0', **ompi)]) # mpirun within a step
def test_other_launchers(monkeypatch, kw):
    with monkeypatch.context() as m:
        m.setattr(os, 'environ', {**os.environ, **kw})
        m.setattr(hosts.foreign_rank, '__defaults__', (os.environ,))
        assert (rank_distrib(),num_distrib(),local_rank(),local_size())==(1, 2, 1, 2) and 'RANK' not in os.environ # they only read
        assert is_rank() # so that `run` starts no ranks of ranks
        env.read_launcher()
        assert os.environ['RANK']=='1' and os.environ['MASTER_ADDR']=='127.0.0.1' and os.environ['MASTER_PORT'].isdigit()

def test_what_cannot_be_completed(monkeypatch):
    launched(monkeypatch, PMIX_RANK='0')
    assert (rank_distrib(),num_distrib())==(0, 0)
    with pytest.raises(ValueError, match='PMIX_SIZE is not set'), process_group(): pass

where = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT='29500')

@pytest.mark.parametrize('kw,words', [
    (dict(where, RANK='2', WORLD_SIZE='2'), "RANK='2' and WORLD_SIZE='2': set RANK to 0 ... WORLD_SIZE-1, or neither to train alone"),
    (dict(where, RANK='-1', WORLD_SIZE='2'), "RANK='-1'"), (dict(where, RANK='0', WORLD_SIZE='x'), 'WORLD_SIZE='),
    (dict(where, RANK='1'), "RANK='1' and WORLD_SIZE=''"), (dict(where, WORLD_SIZE='2'), "RANK='' and WORLD_SIZE='2'"),
    (dict(RANK='0', WORLD_SIZE='2', MASTER_PORT='29500'), "MASTER_ADDR='' and MASTER_PORT='29500': set the machine of rank 0"),
    (dict(RANK='0', WORLD_SIZE='2', MASTER_ADDR='a'), "MASTER_PORT='': set the machine of rank 0 and a free port there"),
    (dict(where, RANK='0', WORLD_SIZE='2', MASTER_PORT='99999'), "MASTER_PORT='99999'")])
def test_variables_that_are_wrong(monkeypatch, kw, words):
    "An error before anything waits, from a context of a learner and of a script"
    for k in where: monkeypatch.delenv(k, raising=False)
    launched(monkeypatch, **kw)
    for context in (process_group, lambda: failing_together(print)):
        with pytest.raises(ValueError, match=re.escape(words)), context(): pass
    assert not in_group()

def rank_misnamed():
    if rank_distrib()==1: os.environ['WORLD_SIZE'] = '2'
    with process_group(): pass

def test_ranks_that_contradict():
    "Two of one number are in the notebook"
    found = run_ranks(rank_misnamed, 3, errors='return')
    assert all(re.search(r'WORLD_SIZE=\d on rank \d, but \d on', f'{o}') for o in found), found

def test_the_store_cannot_be_opened(monkeypatch, taken_port):
    launched(monkeypatch, RANK='0', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=taken_port)
    with pytest.raises(dist.DistNetworkError, match='rank 0 cannot listen: is there another rank 0, or is the port taken'): shared_store()
    launched(monkeypatch, RANK='1', MASTER_PORT=str(free_port()))
    words = r'rank 1 cannot reach rank 0: MASTER_ADDR:MASTER_PORT=127.0.0.1:\d+'
    with pytest.raises(dist.DistNetworkError, match=words): shared_store(timeout_s=1)

@pytest.mark.parametrize('kw', [ # salloc, a batch script, an interactive step
    dict(SLURM_NTASKS='2', SLURM_NNODES='1'), dict(SLURM_NNODES='2'), dict(step, ENVIRONMENT='BATCH', SLURM_STEP_ID=''),
    dict(step, SLURM_STEP_ID=str(0xfffffffa))])
def test_an_allocation_without_a_step_is_said(monkeypatch, kw):
    launched(monkeypatch, **kw)
    with pytest.warns(UserWarning, match='=2, but this process trains alone: start it by srun'), process_group(): assert group_size()==1

@pytest.mark.parametrize('kw', [dict(), dict(step, SLURM_NTASKS='1', PMIX_RANK='0'), dict(SLURM_NTASKS='1', SLURM_NNODES='1')])
def test_one_task_is_alone(monkeypatch, kw):
    launched(monkeypatch, **kw)
    with warnings.catch_warnings(), process_group():
        warnings.simplefilter('error')
        assert (rank_distrib(),num_distrib(),group_size())==(0, 0, 1)

def test_the_process_that_has_set_a_variable():
    "All ranks of mpirun have the same, also if each has a shell of its own"
    code = 'import os; from learnerdist.core import hosts; print(os.getppid(), hosts._starter("PMI_RANK"))'
    command,env = f'{sys.executable} -c {shlex.quote(code)}; true',{**os.environ, 'PMI_RANK': '0'}
    shell,starter = map(int, subprocess.run(command, shell=True, env=env, capture_output=True, text=True).stdout.split())
    assert starter==os.getpid()!=shell

def rank_by_hand(file):
    "As of `torch.multiprocessing.spawn`: a group without RANK in the environment"
    rank = int(os.environ['RANK'])
    for k in variables: del os.environ[k]
    dist.init_process_group('gloo', init_method=f'file://{file}', rank=rank, world_size=2)
    res = rank_distrib(),num_distrib(),local_rank()
    dist.barrier()
    dist.destroy_process_group()
    return *res,rank_distrib(),num_distrib()

def test_the_rank_of_a_group(tmp_path): assert run_ranks(rank_by_hand, 2, tmp_path/'store')==[(r, 2, r, 0, 0) for r in range(2)]

def rank_waits():
    "Rank 1 comes when the other one has said that it waits"
    say = env._print_once
    def messages(*args):
        say(*args)
        shared_store().set('messages', 'yes')
    env._print_once = messages
    env.waits.after_s = .1
    with process_group():
        if rank_distrib()==1: assert env.wait_key(shared_store(), 'messages', 60)
        all_sum(torch.ones(1))

@pytest.mark.slow
def test_a_long_wait_is_said(capfd):
    run_ranks(rank_waits, 2)
    messages = capfd.readouterr().err
    assert re.search(r'rank 0 waits for the other ranks in all_sum \(\S+test_env.py:\d+ in rank_waits: .*all_sum\(.*\), which', messages)

class Collects(Dataset):
    "Its sample is the number of objects that the garbage collector has freed in a worker"
    def __len__(self): return 1
    def __getitem__(self, i): return gc.collect()

def worker_after_group():
    "A group that is garbage when a loader's worker is forked"
    gc.disable()
    with process_group():
        garbage = [dist.group.WORLD]
        garbage.append(garbage)
    del garbage
    try: return [o.item() for o in DataLoader(Collects(), num_workers=1, timeout=20)]
    finally: gc.enable()

def test_a_worker_does_not_destroy_a_group_of_its_process():
    "There the destructor waits for ever for threads that a fork does not have"
    run_ranks(worker_after_group, 2)

@pytest.mark.parametrize('why', ['ENOTSUP','ENOLCK','ENOSYS'])
def test_folders_where_there_are_no_locks(why, tmp_path, monkeypatch):
    "As on some Lustre and NFS: one folder, which is removed at the end; what others have left may be in use"
    def flock(fd, how): raise OSError(getattr(errno, why), 'no locks')
    monkeypatch.setattr(fcntl, 'flock', flock)
    with own_folder(tmp_path) as a, own_folder(tmp_path) as b: assert {*tmp_path.iterdir()}=={a,b}
    assert [*tmp_path.iterdir()]==[]

def test_a_rank_begins_where_there_is_no_room(tmp_path, monkeypatch):
    "A launch has its folder in memory; else nobody asks this rank where it is"
    def full(*args): raise OSError(errno.ENOSPC, 'No space left on device')
    with own_folder() as path: assert str(path.parent)==(memory() or tempfile.gettempdir())
    monkeypatch.setattr(forkserver, 'report_folder', lambda: tmp_path)
    monkeypatch.setattr(forkserver, 'leave_stacks', full)
    forkserver.begin_rank(0)

@pytest.mark.skipif(not hasattr(socket, 'TCP_USER_TIMEOUT'), reason='Linux')
def test_connections_to_other_machines_end_when_these_vanish():
    "Of this process's sockets those that lead to another address than 127.0.0.1; others are left alone"
    with (socket.create_server(('127.0.0.2', 0)) as server, socket.create_connection(server.getsockname()) as far,
          socket.create_server(('127.0.0.1', 0)) as door, socket.create_connection(door.getsockname()) as near,
          socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp):
        udp.connect(server.getsockname())
        hosts.keep_alive()
        silent = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for s in (far,near)]
        assert silent==[20_000,0] and far.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
