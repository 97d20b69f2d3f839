"run_ranks: what comes back, what an error says, and that nothing is left; leak_check"
import multiprocessing as mp,os,pickle,signal,subprocess,sys,threading
from functools import partial
from multiprocessing import connection
from pathlib import Path
import pytest,torch,torch.distributed as dist
from leaks import leak_check
from learnerdist.testing import RanksError,run_ranks

def rank(): return int(os.environ['RANK'])

def join():
    url,n = os.environ['LEARNERDIST_INIT_METHOD'],int(os.environ['WORLD_SIZE'])
    dist.init_process_group('gloo', init_method=url, rank=rank(), world_size=n)

def summed(x):
    join()
    t = x*(rank()+1)
    dist.all_reduce(t)
    dist.destroy_process_group()
    return dict(sum=t, threads=torch.get_num_threads())

def environment(): return dict(os.environ), os.getcwd(), sys.path

def fails(*ranks, code=None):
    if rank() not in ranks: return rank()
    if code is not None: sys.exit(code)
    raise KeyError(f'rank {rank()}')

def first_of_two():
    "Rank 1 fails first, rank 0 after it"
    theirs = Path(os.environ['TORCHELASTIC_ERROR_FILE']).parent.parent/'1/error.json'
    while rank() == 0 and not theirs.exists(): threading.Event().wait(.01)
    raise ValueError(f'rank {rank()}')

def leaves_child():
    return subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']).pid

def start_method(): return mp.get_start_method()

def unpicklable(): return threading.Lock()

def test_results_by_rank():
    res = run_ranks(summed, 3, torch.ones(2, dtype=torch.float64))
    assert [(o['sum'].tolist(),o['threads']) for o in res] == [([6,6],1)]*3

def test_environment_of_a_rank(monkeypatch, tmp_path):
    monkeypatch.setenv('LD_TEST_A', 'parent')
    monkeypatch.setenv('MASTER_PORT', '1234')
    monkeypatch.chdir(tmp_path)
    (e0,cwd,path),(e1,*_) = run_ranks(environment, 2, env=dict(LD_TEST_B=3))
    for r,e in enumerate((e0, e1)):
        assert [e[k] for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')] == [str(r), '2', str(r), '2']
        assert (e['LD_TEST_A'], e['LD_TEST_B']) == ('parent', '3') and 'MASTER_PORT' not in e
    assert e0['LEARNERDIST_INIT_METHOD'] == e1['LEARNERDIST_INIT_METHOD'] and e0['LEARNERDIST_INIT_METHOD'].startswith('file:///')
    assert cwd == str(tmp_path) and set(sys.path) <= set(path)
    assert not Path(e0['LEARNERDIST_INIT_METHOD'][7:]).parent.exists()

def test_closures_and_partials():
    k = 5
    assert run_ranks(lambda x: x*k + rank(), 2, 10) == [50, 51]
    assert run_ranks(partial(max, 3), 1, 4) == [4]

def test_error_names_the_first_rank():
    with pytest.raises(RanksError) as e: run_ranks(first_of_two, 2)
    assert list(e.value.errors) == [1, 0]
    kind,message,trace,*_ = e.value.errors[1]
    assert (kind, message) == ('ValueError', 'rank 1') and 'in first_of_two' in trace
    assert str(e.value).startswith('rank 1 failed: ValueError: rank 1\nTraceback') and 'rank 0 failed: ValueError: rank 0' in str(e.value)
    assert pickle.loads(pickle.dumps(e.value)).errors == e.value.errors

def test_sys_exit():
    assert run_ranks(fails, 1, 0, code=0) == [None]
    assert run_ranks(fails, 1, 0, code=3, errors='return')[0][:2] == ('SystemExit', '3')

# A death without a report is in the notebook and in test_failure.py

def test_children_of_a_rank_end_with_it():
    pid, = run_ranks(leaves_child, 1)
    try: fd = os.pidfd_open(pid)
    except ProcessLookupError: return
    assert connection.wait([fd], 10) == [fd]
    os.close(fd)

def test_loaders_of_a_rank_start_their_workers_as_anywhere():
    assert run_ranks(start_method, 1) == [mp.get_start_method()]

def test_result_that_cannot_travel():
    assert 'pickle' in run_ranks(unpicklable, 1, errors='return')[0].message

def test_bad_arguments():
    with pytest.raises(ValueError, match='nproc=0'): run_ranks(rank, 0)
    with pytest.raises(ValueError, match="errors='warn'"): run_ranks(rank, 1, errors='warn')

def test_leak_check_names_what_is_left():
    with pytest.raises(AssertionError, match='LD_LEAK.*process group'), leak_check():
        os.environ['LD_LEAK'] = '1'
        dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized() and 'LD_LEAK' not in os.environ
    with pytest.raises(AssertionError, match='child processes'), leak_check():
        child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
    assert child.wait() == -signal.SIGKILL
