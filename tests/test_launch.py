"The launcher as a command, in processes of its own; run() from scripts, from here, and from within a rank"
import json,os,select,signal,subprocess,sys
from pathlib import Path
import pytest
from learnerdist.launch import _explain,main,run
from learnerdist.processes import RanksError

root = Path(__file__).parent.parent
launcher = sys.executable,'-m','learnerdist.launch'

# Says where and how it runs, without importing torch
script = '''
import json,os,sys
keys = 'RANK','WORLD_SIZE','LOCAL_RANK','CUDA_VISIBLE_DEVICES','OMP_NUM_THREADS','MASTER_ADDR'
json.dump(dict(env={k: os.environ.get(k) for k in keys}, argv=sys.argv, path=sys.path[0], name=__name__, file=__file__,
    main=sys.modules['__main__'].__dict__ is globals()), open(f"{sys.argv[1]}/{os.environ['RANK']}.json", 'w'))
'''

# Fails on rank 1, in a function, while rank 0 waits
failing = '''
import os,signal,sys,threading
def train(how):
    if os.environ['RANK'] != '1': threading.Event().wait()
    if how == 'raise': raise ValueError('a bad batch')
    if how == 'exit': sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)
train(sys.argv[1])
'''

# Tells a FIFO that it is there, then waits; so does its child
waiting = '''
import os,subprocess,sys,threading
child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
with open(sys.argv[1], 'w') as f: f.write(f'{os.getpid()} {child.pid}\\n')
threading.Event().wait()
'''

def environment(**kw):
    drop = 'CUDA_VISIBLE_DEVICES','OMP_NUM_THREADS','RANK','WORLD_SIZE','LOCAL_RANK'
    return {k:v for k,v in os.environ.items() if k not in drop} | dict(PYTHONPATH=str(root)) | kw

def launch(*args, env=None, cwd=None, command=launcher):
    return subprocess.run([*command, *map(str, args)], env=environment(**(env or {})), cwd=cwd, capture_output=True, text=True, timeout=120)

def write(folder, text, name='train.py'):
    (folder/name).write_text(text)
    return folder/name

def said(folder): return [json.loads(o.read_text()) for o in sorted(folder.glob('*.json'))]

def test_script_runs_as_under_python(tmp_path):
    file = write(tmp_path, script)
    mine = ['--nproc', '3', '-m', 'x y', '--n', '9'] # --n is no abbreviation of ours
    res = launch('--nproc', 2, 'train.py', tmp_path, *mine, cwd=tmp_path)
    assert res.returncode == 0, res.stderr
    assert res.stderr.count('OMP_NUM_THREADS') == 1
    for r,o in enumerate(said(tmp_path)):
        assert o['argv'][1:] == [str(tmp_path), *mine] and Path(o['argv'][0]).name == 'train.py'
        assert (o['path'], o['name'], o['file'], o['main']) == (str(tmp_path), '__main__', str(file), True)
        assert [o['env'][k] for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')] == [str(r), '2', str(r), '127.0.0.1']
        assert int(o['env']['OMP_NUM_THREADS']) >= 1
    assert len(said(tmp_path)) == 2

def test_module_and_visible_gpus(tmp_path):
    write(tmp_path, script, 'my_train.py')
    env = dict(CUDA_VISIBLE_DEVICES='4,5,6', OMP_NUM_THREADS='3', PYTHONPATH=f'{root}:{tmp_path}')
    res = launch('--gpus', '0,2', '-m', 'my_train', tmp_path, '-m', cwd=root, env=env)
    assert res.returncode == 0, res.stderr
    assert [(o['env']['CUDA_VISIBLE_DEVICES'], o['env']['OMP_NUM_THREADS']) for o in said(tmp_path)] == [('4,6', '3')]*2
    assert all(o['argv'][1:] == [str(tmp_path), '-m'] and o['name'] == '__main__' and o['main'] for o in said(tmp_path))

def test_console_script_and_two_at_once(tmp_path):
    file,folders = write(tmp_path, script),[tmp_path/'a', tmp_path/'b']
    for o in folders: o.mkdir()
    command = sys.executable,'-c','import sys; from learnerdist.launch import main; sys.exit(main())'
    runs = [subprocess.Popen([*c, '--nproc', '2', file, o], env=environment()) for c,o in zip((launcher, command), folders)]
    assert [o.wait(120) for o in runs] == [0, 0]
    assert [[o['env']['RANK'] for o in said(f)] for f in folders] == [['0', '1']]*2

@pytest.mark.parametrize('how,status,words', [
    ('raise', 1, 'rank 1 failed first: ValueError: a bad batch ({file}:5)'),
    ('exit', 3, 'rank 1 failed first: SystemExit: 3 ({file}:6)'),
    ('kill', 137, 'rank 1 failed first: ended by SIGKILL (probably out of memory)')])
def test_failing_rank_is_named(tmp_path, how, status, words):
    file = write(tmp_path, failing)
    res = launch('--nproc', 2, file, how, env=dict(TMPDIR=str(tmp_path)))
    assert res.returncode == status
    assert words.format(file=file) in res.stderr and 'failed too' not in res.stderr
    if how == 'raise': assert res.stderr.count(f'Traceback (most recent call last):\n  File "{file}", line 8, in <module>') == 1
    assert os.listdir(tmp_path) == ['train.py']

def test_first_failure_is_the_first_in_time(tmp_path):
    class Failure:
        def __init__(self, r, exitcode): self.exitcode,self.error_file = exitcode,str(tmp_path/str(r)/'error.json')
    def report(r, time):
        (tmp_path/str(r)).mkdir(exist_ok=True)
        (tmp_path/str(r)/'error.json').write_text(json.dumps(dict(rank=r, time=time, code=1, text=f'Oops {r}')))
    report(0, 10.2)
    report(2, 10.1)
    # Rank 2 wrote its report first, but torchrun saw rank 0 end, and ended rank 2
    assert _explain({0: Failure(0, 1)}) == (['rank 2 failed first: Oops 2', 'rank 0 failed too: Oops 0'], 1)
    assert _explain({0: Failure(0, 1), 1: Failure(1, -11), 3: Failure(3, -15)}) == (
        ['rank 1 failed first: ended by SIGSEGV', 'rank 2 failed too: Oops 2', 'rank 0 failed too: Oops 0'], 139)

def start_waiting(folder, *command):
    "A process whose two ranks wait, and the ids of those ranks and of their children"
    fifo = folder/'fifo'
    os.mkfifo(fifo)
    proc = subprocess.Popen([*command, str(write(folder, waiting)), str(fifo)], env=environment(), stderr=subprocess.DEVNULL)
    fd,said = os.open(fifo, os.O_RDWR),b''
    while said.count(b'\n') < 2 and select.select([fd], [], [], 60)[0]: said += os.read(fd, 99)
    os.close(fd)
    return proc,[*map(int, said.split())]

def all_end(pids, timeout_s=30):
    "Whether all these processes end"
    assert len(pids) == 4
    fds = []
    for p in pids:
        try: fds.append(os.pidfd_open(p))
        except ProcessLookupError: pass
    ended = [bool(select.select([o], [], [], timeout_s)[0]) for o in fds]
    for o in fds: os.close(o)
    return all(ended)

@pytest.mark.parametrize('sig,status', [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_process_is_left(tmp_path, sig, status):
    proc,pids = start_waiting(tmp_path, *launcher, '--nproc', '2')
    proc.send_signal(sig)
    assert proc.wait(60) == status
    assert all_end(pids)

@pytest.mark.parametrize('args,words', [
    (['--nproc', '0', 'x.py'], "'0' is no number of processes"), (['--nproc', 'two', 'x.py'], "'two' is no number of processes"),
    (['--gpus', '0,0', 'x.py'], "'0,0' is no list of GPUs"), (['--gpus', '', 'x.py'], "'' is no list of GPUs"),
    (['--nproc', '2', '--nproc-per-node', '3', __file__], '--nproc 2 and --nproc-per-node 3 differ'),
    (['--nproc-per-node', 'many', __file__], 'many'), (['--nproc-per-node', '0', __file__], '--nproc-per-node 0'),
    (['--gpus', '1,3', __file__], '--gpus 1,3: 3 visible here (CUDA_VISIBLE_DEVICES=4,5,6)'),
    (['no_such.py'], "no script 'no_such.py' here"), (['--no-such-option', __file__], 'no-such-option'), ([], 'required')])
def test_bad_command_line(args, words, capsys, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,5,6')
    with pytest.raises(SystemExit) as e: main(args)
    assert e.value.code == 2 and words in capsys.readouterr().err

def rank_times(k):
    if os.environ.get('RANK') == '1' and k is None: raise ValueError('no factor on rank 1')
    return os.environ.get('RANK'), int(os.environ.get('RANK', 7))*(k or 1) + 1

def nested(k): return run(rank_times, k, nproc=3)

def test_run_returns_what_rank_0_returned():
    assert run(rank_times, 5, nproc=2) == ('0', 1)
    assert run(nested, 5, nproc=2) == ('0', 1)  # a rank starts no more ranks

def test_run_alone_starts_nothing(): assert run(rank_times, 5, nproc=1) == (None, 36)

def test_run_raises_a_ranks_error():
    with pytest.raises(RanksError, match="rank 1 failed: ValueError: no factor on rank 1\nTraceback") as e: run(rank_times, None, nproc=2)
    assert list(e.value.errors) == [1]

@pytest.mark.parametrize('nproc', [0, -1, 2.0, 'all'])
def test_run_bad_nproc(nproc):
    with pytest.raises(ValueError, match='nproc='): run(rank_times, 1, nproc=nproc)

# Starts its own ranks; within a launched rank it starts none
starter = '''
import os,sys
from learnerdist.launch import run
class Result:
    def __init__(self, n): self.n = n
def main(k): return Result(k*int(os.environ['WORLD_SIZE']))
if __name__ == '__main__': print('got', run(main, 21, nproc=2).n, flush=True)
'''

def test_run_from_a_script(tmp_path):
    file = write(tmp_path, starter)
    res = launch(file, command=[sys.executable])
    assert (res.returncode, res.stdout) == (0, 'got 42\n'), res.stderr
    res = launch('--nproc', 3, file)
    assert res.returncode == 0 and res.stdout == 'got 63\n'*3, res.stderr

def test_interrupt_ends_the_ranks_of_run(tmp_path):
    code = 'import runpy,sys; from learnerdist.launch import run; sys.argv.pop(0); run(runpy.run_path, sys.argv[0], nproc=2)'
    proc,pids = start_waiting(tmp_path, sys.executable, '-c', code)
    proc.send_signal(signal.SIGINT)
    assert proc.wait(60) in (1, 130, -signal.SIGINT)
    assert all_end(pids)
