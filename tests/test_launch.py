"The launcher as a command, in processes of its own; run() from scripts, from here, and from within a rank"
import fcntl,io,json,os,pty,re,select,signal,socket,stat,subprocess,sys,termios
from pathlib import Path
from types import SimpleNamespace
import pytest
from helpers import Fork,Waiting,environment,free_port,launcher,root,shutdown_in,start,write
from torch.distributed.run import get_args_parser
from learnerdist.core.hosts import foreign_rank
from learnerdist.core.stacks import describe_error
from learnerdist.launch.cli import _choose_nproc,get_parser,guess,run_target
from learnerdist.launch import agent,main,processes,run,watch
from learnerdist.launch.forkserver import Output
from learnerdist.launch.watch import Cause,Rank,explain,failures

# Says where and how it runs, without importing torch. Draws without a seed, and warns
script = '''
import json,os,random,stat,sys,warnings
import numpy as np
from pathlib import Path
from types import SimpleNamespace
warnings.warn('a library warns')
draws = [random.random(), np.random.rand(), list({f'word {i}' for i in range(50)})]
store = Path(os.environ.get('LEARNERDIST_INIT_METHOD', '')[7:]).parent # where ranks of one machine meet
keys = 'RANK','WORLD_SIZE','LOCAL_RANK','LOCAL_WORLD_SIZE','CUDA_VISIBLE_DEVICES','OMP_NUM_THREADS','MASTER_ADDR'
port = f"{int(os.environ['MASTER_PORT']):04X}"
sockets = [o.split()[1:4] for f in ('tcp', 'tcp6') for o in open(f'/proc/net/{f}')]
listens = [a.split(':')[0] for a,_,state in sockets if a.endswith(f':{port}') and state == '0A']
met = None
if 'meet' in sys.argv:
    with process_group(): met = all_sum(torch.ones(1)).item()
json.dump(dict(env={k: os.environ.get(k) for k in keys}, argv=sys.argv, path=sys.path[0], name=__name__, file=__file__,
    draws=draws, store=[oct(stat.S_IMODE(os.stat(store).st_mode)), store.name[:12]], listens=listens, met=met,
    main=sys.modules['__main__'].__dict__ is globals()), open(f"{sys.argv[1]}/{os.environ['RANK']}.json", 'w'))
'''

meeting = f'import torch\nfrom learnerdist.core.collectives import all_sum\nfrom learnerdist.core.env import process_group\n{script}'

pytestmark = pytest.mark.slow

# Fails on rank 1, in a function, while rank 0 waits: by an exception, then by a crash. It runs in forks of the server
failing = '''import torch
import ctypes,os,signal,sys,threading
def train(attempt):
    mark = f"{os.path.dirname(sys.argv[0])}/{attempt}.mark" # rank 0 has spoken
    if os.environ['RANK'] != '1': open(mark, 'w').close() or threading.Event().wait()
    while not os.path.exists(mark): threading.Event().wait(.01)
    if attempt == '0':
        raise ValueError('a bad batch')
    ctypes.string_at(0)
print('I am', os.environ['RANK'])
train(os.environ['TORCHELASTIC_RESTART_COUNT'])
'''

# Tells a FIFO that it is there, then waits; so does its child
waiting = '''import torch
import ctypes,os,signal,sys,threading
import time
how,rank = sys.argv[2] if len(sys.argv) > 2 else '',os.environ['RANK']
child = os.fork()
if not child:
    if how == 'raise': signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    signal.pause()
def put_off(*_):
    if os.waitpid(child, os.WNOHANG) == (0, 0): sys.exit(75) # it was not ended at the same time
if how == 'put off': signal.signal(signal.SIGTERM, put_off)
if how == 'usr1': signal.signal(signal.SIGUSR1, put_off)
if how == 'say': print('rank', rank, 'on a terminal' if sys.stdout.isatty() else 'on no terminal')
try: # a signal may come as soon as the FIFO is closed
    with open(sys.argv[1], 'w') as f: f.write(f'{os.getpid()} {child}\\n')
    if how == 'in C' and rank == '1': # it does not come back to Python to hear of a signal
        while ctypes.PyDLL(None).sleep(100): pass
    if how == 'raise': # when the other rank has said who it is, too
        open(f'{sys.argv[1]}.{rank}', 'w').close()
        while not all(os.path.exists(f'{sys.argv[1]}.{r}') for r in '01'): time.sleep(.01)
        raise KeyError(rank)
    threading.Event().wait()
except KeyboardInterrupt:
    end = time.monotonic() + 7*(rank == '0')
    while how == 'saves' and time.monotonic() < end: threading.Event().wait(.1) # what it saves takes long; rank 1 ends before
    if how == 'saves': open(f'{sys.argv[1]}.{rank}', 'w').close()
    raise
'''

noisy = sys.executable,'-W','default','-m','learnerdist.launch' # would warn of files and sockets that are left open

def messages(folder): return [json.loads(o.read_text()) for o in sorted(folder.glob('*.json'))]

def test_two_launches_side_by_side_run_as_under_python(tmp_path):
    "A script, and a module on chosen GPUs. Ranks meet in a folder of their own, and draw alike"
    (a,b),mine = (tmp_path/'a', tmp_path/'b'),['--nproc', '3', '-m', 'x y', '--n', '9'] # --n is no abbreviation of ours
    for o in (a, b): o.mkdir()
    file = write(tmp_path, meeting)
    write(tmp_path, script, 'my_train.py')
    gpus = environment(CUDA_VISIBLE_DEVICES='4,5,6', OMP_NUM_THREADS='3', PYTHONPATH=f'{root}:{tmp_path}')
    runs = start('--nproc', 2, 'train.py', a, *mine, 'meet', cwd=tmp_path),start('--gpus', '0,2', '-m', 'my_train', b, '-m', env=gpus)
    said,told = (o.result() for o in runs)
    assert said.returncode == told.returncode == 0, said.stderr+told.stderr
    assert all(said.stderr.count(o) == 1 for o in ('OMP_NUM_THREADS','Warning','UserWarning: a library warns')), said.stderr
    assert 'OMP_NUM_THREADS' not in told.stderr
    for r,o in enumerate(messages(a)):
        assert o['argv'][1:] == [str(a), *mine, 'meet'] and Path(o['argv'][0]).name == 'train.py'
        assert (o['path'], o['name'], o['file'], o['main']) == (str(tmp_path), '__main__', str(file), True)
        assert [o['env'][k] for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')] == [str(r), '2', str(r), '127.0.0.1']
        assert int(o['env']['OMP_NUM_THREADS']) >= 1
        assert o['listens'] == ['0100007F'] # at MASTER_PORT, on 127.0.0.1 alone
    assert [(o['env']['CUDA_VISIBLE_DEVICES'], o['env']['OMP_NUM_THREADS']) for o in messages(b)] == [('4,6', '3')]*2
    assert all(o['argv'][1:] == [str(b), '-m'] and o['name'] == '__main__' and o['main'] for o in messages(b))
    (zero,one),(other,_) = messages(a),messages(b)
    assert zero['draws'] == one['draws'] and zero['draws'][0] != other['draws'][0]
    assert zero['store'] == one['store'] == ['0o700','learnerdist-'] and zero['met'] == 2

def test_each_attempt_is_reported(tmp_path):
    "By the command: an exception, and after a restart a crash. What the user wants of the output is done, and nothing else is left"
    file = write(tmp_path, failing)
    log = tmp_path/'log'
    options = '--nproc','2','--max-restarts','1','--log-dir',log,'--redirects','1:1',file
    res = subprocess.run([*noisy, *map(str, options)], env=environment(TMPDIR=str(tmp_path)), capture_output=True, text=True, timeout=120)
    assert res.returncode == 139 and res.stdout == 'I am 0\n'*2 and 'Warning' not in res.stderr
    trace, = log.glob('*.txt')
    first = f'learnerdist.launch: rank 1 failed first: ValueError: a bad batch ({file}:8)\n'
    second = f'learnerdist.launch: rank 1 failed first: ended by SIGSEGV (Segmentation fault, {file}:9 in train: ctypes.string_at(0))\n'
    outer = f'  File "{file}", line 11, in <module>\n    train(os.environ[\'TORCHELASTIC_RESTART_COUNT\'])\n' # the innermost last
    inner = f'  File "{file}", line {{}}, in train\n    {{}}\n'
    said = first+outer+inner.format(8, "raise ValueError('a bad batch')")
    said += f'learnerdist.launch: all tracebacks: {trace} (--verbose prints them)\nlearnerdist.launch: restart 1 of 1\n'
    said += second+outer+inner.format(9, 'ctypes.string_at(0)')
    assert res.stderr.partition('processes\n')[2] == said # after the line on OMP_NUM_THREADS
    assert trace.read_text().startswith(f'rank 1:\nTraceback (most recent call last):\n  File "{file}", line 11, in <module>')
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600 # nor can its name be foreseen
    assert [o.read_text() for o in sorted(log.glob('*/*/1/stdout.log'))] == ['I am 1\n']*2
    assert {o.name for o in tmp_path.iterdir()} == {'train.py','log','0.mark','1.mark'}

def test_a_report_is_short(ended):
    "The last three frames, of which the innermost stands at the end"
    frames = [(__file__,i+1,'f') for i in range(9)]
    many = [ended(r, 1, kind='ValueError', message='Oops\n'*40, time=r, frames=frames) for r in range(30)]
    lines = '\n'.join(explain(failures(many))).splitlines()
    assert len(lines) <= 16 and [o.split(', ')[1] for o in lines if 'File "' in o] == ['line 3','line 2','line 1']

def test_tracebacks_that_cannot_be_written(ended, tmp_path):
    "The report comes without them, and a restart follows; each report has a file of its own"
    args = get_parser().parse_args(['x.py'])
    job = watch.Job(args, [], None, tmp_path)
    args.log_dir = tmp_path/'none'
    job.ranks.append(ended(1, 1, kind='ValueError', message='Oops', time=1.))
    line,why = job.explain()
    assert line.startswith('rank 1 failed first: ValueError: Oops') and re.match('no file of all tracebacks .*none.*--verbose', why)
    args.log_dir.mkdir()
    for _ in range(2): assert len(job.explain()) == 2
    assert [o.read_text() for o in args.log_dir.iterdir()] == ['rank 1:\n']*2

def test_a_report_of_what_is_no_text(ended, tmp_path):
    "A file name that is no UTF-8, in a message; an exception whose `str` fails"
    args = get_parser().parse_args(['--log-dir', str(tmp_path/'log'), 'x.py'])
    (tmp_path/'log').mkdir()
    job = watch.Job(args, [], None, tmp_path)
    job.ranks.append(ended(1, 1, kind='OSError', message='no \udce9.jpg', trace='OSError: no \udce9.jpg', time=1.))
    assert job.explain()[1].startswith('all tracebacks: ')
    assert [o.read_text() for o in (tmp_path/'log').glob('*.txt')] == ['rank 1:\nOSError: no \\udce9.jpg']
    class NoText(Exception):
        def __str__(self): raise TypeError
    assert describe_error(NoText())['message'] == '<exception str() failed>'

def test_output_that_nobody_reads(monkeypatch):
    "As after `| head`: the launcher goes on, and a rank that prints there gets the error"
    class Closed:
        def write(self, text): raise BrokenPipeError
    monkeypatch.setattr(sys, 'stdout', Closed())
    out = Output('', 'stdout')
    os.write(out.writer, b'y\n')
    os.close(out.writer)
    assert out.show()
    out.close()

@pytest.mark.parametrize('encoding,shown', [
    ('utf-8',b'\xe2\x94\x81\\xe9'), ('latin-1',b'\xe2\x94\x81\xe9'), ('ascii',rb'\xe2\x94\x81\xe9')])
def test_output_in_another_encoding(encoding, shown, monkeypatch):
    "The launcher shows what it can; it ended by an error, and the run with it"
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(io.BytesIO(), encoding))
    out = Output('[r1] ', 'stdout')
    os.write(out.writer, b'\xe2\x94\x81\xe9') # UTF-8, and a byte of another one
    os.close(out.writer)
    out.close()
    assert sys.stdout.buffer.getvalue()==b'[r1] '+shown+b'\n'

def test_output_that_never_ends():
    "A process that a rank has left prints on, faster than the launcher reads"
    class Again:
        n = 0
        def write(self, text):
            self.n += 1
            if self.n<9: os.write(out.writer, b'y\n')
        def close(self): os.close(out.writer)
    out = Output('', file=Again())
    os.write(out.writer, b'y\n')
    out.close()
    assert out.file.n==1

def test_the_label_stands_after_the_last_return(capsys):
    "Where a terminal shows it: what a bar has drawn before is overwritten"
    out = Output('[r1] ', 'stdout')
    os.write(out.writer, b'1%|# \r2%|## \r\n1%|# \rdone\nplain\r\n')
    os.close(out.writer)
    out.close()
    assert capsys.readouterr().out == '1%|# \r[r1] 2%|## \n1%|# \r[r1] done\n[r1] plain\n'

def test_an_unknown_host_is_said_at_once(tmp_path):
    ours,theirs = os.pipe()
    proc = start('--nnodes', 2, '--rdzv-endpoint', 'no-such-host.invalid:29555', '--nproc', 1, write(tmp_path, ''), outs=[0,1,theirs])
    os.close(theirs)
    with open(ours) as said:
        line = next(o for o in said if 'OMP_NUM' not in o)
        assert line.startswith('learnerdist.launch: this machine does not know no-such-host.invalid, or no way to it')
        proc.send_signal(signal.SIGTERM) # while it waits in C++
        assert proc.wait(20) == -signal.SIGTERM and 'Traceback' not in said.read()

def test_labels_where_torch_has_no_option_for_them(tmp_path):
    "As torch 2.13: several ranks could not start there"
    args = get_parser().parse_args(['x.py'])
    vars(args).pop('log_line_prefix_template', None)
    out = watch.Job(args, [], None, tmp_path)._output(1, dict(RANK='1'), 'stdout', '', {})
    os.close(out.writer)
    out.close()
    assert out.label == '[r1] '

def test_a_port_that_another_program_has(tmp_path, monkeypatch):
    "It takes connections, and never answers: the launcher says so, and ends"
    monkeypatch.setattr(agent, 'unanswered_s', -.5)
    with socket.create_server(('127.0.0.1', 0)) as server:
        at = f'127.0.0.1:{server.getsockname()[1]}'
        options = '--nnodes','2','--nproc','1','--rdzv-endpoint',at,'--rdzv-conf','read_timeout=1','--no-fork-server'
        res = start(*options, write(tmp_path, '')).result()
    assert res.returncode == 1 and f'learnerdist.launch: {at} does not answer as a rendezvous: another program has' in res.stderr

def test_another_launch_had_this_endpoint(tmp_path, monkeypatch):
    "torchrun's agent takes this launch for a spare machine, and leaves without an error when the other one is done"
    monkeypatch.setattr(agent.Agent, 'run', lambda self: None)
    at = f'127.0.0.1:{free_port()}'
    res = start('--nproc', 1, '--rdzv-endpoint', at, '--no-fork-server', write(tmp_path, '')).result()
    assert res.returncode == 1 and f'{at}; does another launch have it? Then give each its own --rdzv-endpoint' in res.stderr

wrong = '''import asyncio,os,signal,sys,threading
if os.environ['RANK'] == '2':
    if sys.argv[1] == 'SIGTERM': os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[1] == 'interrupt': os.kill(os.getpid(), signal.SIGINT)
    if sys.argv[1] == 'empty': sys.exit('')
    sys.excepthook = lambda *a: print('my hook', a[1])
    threading.Thread(target=threading.Event().wait).start() # Python's end waits for it
    raise asyncio.CancelledError('no')
if sys.argv[1] == 'in C' and os.environ['RANK'] == '0': signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Event().wait()
'''

@pytest.mark.parametrize('how,messages,status', [
    ('interrupt','KeyboardInterrupt:  (',130), ('empty','SystemExit:  (',1),
    pytest.param('SIGTERM','ended by SIGTERM',143, marks=pytest.mark.long), ('in C','CancelledError: no',1)])
def test_the_rank_that_failed_is_named(how, messages, status, tmp_path):
    "And not one that torchrun ends because of it, by SIGTERM, or by SIGKILL where it does not hear that"
    res = start('--nproc', 3, *shutdown_in(1), write(tmp_path, wrong), how, env=environment(TMPDIR=str(tmp_path))).result()
    lines = [o for o in res.stderr.splitlines() if ' failed ' in o]
    first = f'learnerdist.launch: rank 2 failed first: {messages}'
    assert res.returncode == status and len(lines) == 1 and lines[0].startswith(first), res.stderr
    assert res.stdout == '[r2] my hook no\n'*(how == 'in C')

@pytest.fixture
def ended(tmp_path):
    "Makes a rank that has ended"
    def f(r, code, is_killed=False, **report):
        folder = tmp_path/str(r)
        folder.mkdir(exist_ok=True)
        known = dict(code=code, trace='', cause=Cause.raised, frames=[('x.py',3,'f')])
        if report: (folder/'error.json').write_text(json.dumps(known | report))
        res = Rank(FakeRank(code), dict(RANK=str(r)), folder)
        res.seen,res.is_killed = 10.,is_killed
        return res
    return f

def heads(ended): return [o.splitlines()[0] for o in explain(failures(ended))]

def test_first_failure_is_the_first_in_time(ended):
    a,b = ended(0, 1, kind='ValueError', message='Oops 0', time=10.2),ended(2, 3, kind='KeyError', message='2', time=10.1)
    first,second = 'rank 2 failed first: KeyError: 2 (x.py:3)','rank 0 failed too: ValueError: Oops 0 (x.py:3)'
    assert heads([a,b]) == [first,second] and failures([a,b])[0].code == 3
    noticed = ended(1, 1, kind='RuntimeError', message='Connection closed by peer', time=10.0, cause=Cause.noticed)
    assert heads([a,b,noticed]) == [first,second]
    assert heads([ended(3, 4)]) == ['rank 3 failed first: ended with exit status 4, without an exception']
    torchs = ended(4, 1)
    (torchs.folder/'error.json').write_text('{"message": {"message": "as torch.distributed.elastic records it"}}')
    assert heads([torchs]) == ['rank 4 failed first: ended with exit status 1, without an exception']
    message = 'rank 5 failed with KeyError: 3\n\non rank 5:\nTraceback …'
    later = ended(0, 1, kind='RankError', message=message, time=10.2, cause=Cause.noticed)
    assert heads([later]) == ['rank 5 failed with KeyError: 3']

def test_what_somebody_kills_is_the_cause_and_what_the_launcher_ends_is_not(ended):
    raised = ended(1, 1, kind='ValueError', message='Oops', time=10.2)
    lines = ['rank 0 failed first: ended by SIGKILL (out of memory, or killed)','rank 1 failed too: ValueError: Oops (x.py:3)']
    assert heads([ended(0, -9),raised]) == lines
    assert heads([ended(0, -9, True),raised]) == ['rank 1 failed first: ValueError: Oops (x.py:3)']
    assert heads([ended(0, -15, True),ended(2, -15)]) == ['rank 2 failed first: ended by SIGTERM']
    # A peer whose connection is gone may abort in C++
    lines = ['rank 1 failed first: ValueError: Oops (x.py:3)','rank 0 failed too: ended by SIGABRT']
    assert heads([ended(0, -6),raised]) == lines

def start_waiting(folder, *options, how='wait', **kw):
    "A launcher whose two ranks wait, each with a child"
    text = waiting if how == 'in C' else waiting.removeprefix('import torch\n') # forks, and new interpreters
    return Waiting(folder, text, '--nproc', 2, *options, args=[how], **kw)

def pids_of(run): return [*map(int, sum(run.lines(2), []))]

def all_end(pids):
    "Whether all these processes end"
    assert len(pids) == 4
    fds = []
    for p in pids:
        try: fds.append(os.pidfd_open(p))
        except ProcessLookupError: pass
    ended = [bool(select.select([o], [], [], 30)[0]) for o in fds]
    for o in fds: os.close(o)
    return all(ended)

has_signals = '--signals-to-handle' in get_args_parser().format_help() # an option of torch 2.9

def ignore_hup(): signal.signal(signal.SIGHUP, signal.SIG_IGN)

def test_no_process_is_left_after_a_signal(tmp_path):
    # SIGINT finds ranks that wait in C; ranks that save have torchrun's 30 seconds to shut down; children of those that raise hear no
    # signal; those of a comparison with one process end with it; the first signal of the last one is ignored as under nohup, and its
    # ranks put their work off; so do those of a signal that the options name
    cases = {'in C': (signal.SIGINT,130), 'saves': (signal.SIGINT,130), 'raise': (None,1), 'killed': (signal.SIGKILL,-9),
             'verify': (signal.SIGTERM,-15), 'ended': (signal.SIGTERM,143), 'put off': (signal.SIGHUP,75)}
    if has_signals: cases['usr1'] = signal.SIGUSR1,75
    runs = {}
    for how in cases:
        options = ['--max-restarts',2,*shutdown_in(2)]*(how not in ('saves','raise'))
        if how == 'verify': options += ['--verify',2]
        if how == 'usr1': options += ['--signals-to-handle','SIGTERM,SIGUSR1']
        runs[how] = start_waiting(tmp_path/how, *options, how=how, begin=ignore_hup if how=='put off' else int)
    pids = {how: pids_of(o) for how,o in runs.items()}
    for how,(sig,_) in cases.items():
        if sig: runs[how].proc.send_signal(sig)
    runs['put off'].proc.send_signal(signal.SIGTERM)
    assert {how: o.proc.wait(60) for how,o in runs.items()} == {how: status for how,(_,status) in cases.items()}
    assert all((tmp_path/f'saves/fifo.{r}').exists() for r in range(2))
    assert all(all_end(o) for o in pids.values())

# --- ranks that leave, and ranks that do not ----------------------------------------------------------------------

failing_alone = """
import os
if os.environ['RANK'] == '1': import no_such_module
from learnerdist.core.env import process_group
with process_group(): pass
"""

def test_a_rank_that_fails_before_the_group_is_heard_on_other_machines(tmp_path):
    "One rank to a launcher, so that no other rank of its own machine hears it; the first launcher runs the store"
    file,at = write(tmp_path, failing_alone),f'127.0.0.1:{free_port()}'
    agents = [start('--nnodes', 2, '--nproc', 1, '--rdzv-endpoint', at, '--rdzv-conf', f'is_host={i == 0}', file) for i in range(2)]
    found = [o.result() for o in agents]
    messages = [o.stderr for o in found]
    assert [o.returncode for o in found] == [1,1], messages
    assert sum('learnerdist.launch: rank 1 failed first: ModuleNotFoundError' in o for o in messages) == 1, messages
    assert sum('learnerdist.launch: rank 1 failed with ModuleNotFoundError: No module named' in o for o in messages) == 1, messages

class FakeRank:
    "What a launcher holds of a rank's process"
    pid = os.getpid()
    def __init__(self, code=None): self.code = code
    def poll(self): return self.code

def test_terminal_shows_rank_0_as_it_is_and_its_end_ends_all(tmp_path):
    ours,theirs = pty.openpty()
    def at_terminal():
        os.close(ours)
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
    run = start_waiting(tmp_path, how='say', begin=at_terminal, outs=[theirs]*3)
    os.close(theirs)
    shown = b''
    def has_all(): return b'on a terminal' in shown and b'on no terminal' in shown
    while not has_all() and select.select([ours], [], [], 60)[0]: shown += os.read(ours, 999)
    lines = shown.decode().splitlines()
    assert 'rank 0 on a terminal' in lines and '[r1] rank 1 on no terminal' in lines
    pids = pids_of(run)
    os.close(ours)
    assert run.proc.wait(60) == 129 and all_end(pids)

@pytest.mark.parametrize('args,words', [
    (['--nproc', '0', __file__], '--nproc 0: give a whole number from 1 up'), (['--nproc', 'two', __file__], '--nproc two: give a'),
    (['--plan', '0', __file__], '--plan 0: give a whole number from 1 up'),
    (['--logs-specs', 'mine', __file__], '--logs-specs mine'),
    (['--signals-to-handle', 'SIGTERM,SIGKILL', __file__], 'signals-to-handle SIGTERM,SIGKILL'*has_signals),
    (['--gpus', '0,0', __file__], "'0,0' is no list of GPUs"), (['--gpus', '', __file__], "'' is no list of GPUs"),
    (['--nproc', '2', '--nproc-per-node', '3', __file__], '--nproc 2 and --nproc-per-node 3 differ'),
    (['--nproc-per-node', 'many', __file__], 'many'), (['--nproc-per-node', '0', __file__], '--nproc 0: give'),
    (['--gpus', '1,3', __file__], '--gpus 1,3: 3 visible here (CUDA_VISIBLE_DEVICES=4,5,6)'),
    (['--nnodes', '2', __file__], '--nnodes 2 without --rdzv-endpoint HOST:PORT'),
    (['--nnodes', '0', __file__], '--nnodes 0: give a whole number'), (['--nnodes', '3:2', __file__], '--nnodes 3:2: give'),
    (['--max-restarts', '-1', __file__], '--max-restarts -1: give 0 or more'), (['--wait', '-5', __file__], '--wait -5: give 0 seconds'),
    (['--master-port', '99999999', __file__], '--master-port 99999999: give a port'),
    (['--log-dir', f'{__file__}/logs', __file__], 'Not a directory'),
    (['--on-failure', 'shrink', '--max-restarts', '1', __file__], '--max-restarts 1, which starts as many ranks again'),
    (['--on-failure', 'shrink', '--nnodes', '2', '--rdzv-endpoint', 'a:1', __file__], 'it is for the ranks of one machine'),
    (['--debug-rank', '1', '--nnodes', '2', '--rdzv-endpoint', 'a:1', __file__], 'it is for the ranks of one machine'),
    (['--debug-rank', '2', '--nproc', '2', __file__], '--debug-rank 2: give a rank from 0 to 1'),
    (['--debug-rank', '1', '--nproc', '2', __file__], '--debug-rank 1: standard input is no terminal'),
    (['no_such.py'], "no script 'no_such.py' here"), (['--no-such-option', __file__], 'no-such-option'), ([], 'required')])
def test_bad_command_line(args, words, capsys, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,5,6')
    with pytest.raises(SystemExit) as e: main(args)
    assert e.value.code == 2 and words in capsys.readouterr().err

def rank_times(k): return os.environ.get('RANK'), int(os.environ.get('RANK', 7))*k + 1

def nested(k): return run(rank_times, k, nproc=3)

def test_run():
    "A rank starts no more ranks, one process none"
    assert run(nested, 5, nproc=2) == ('0', 1) and run(rank_times, 5, nproc=1) == (None, 36)
    for o in (0, -1, 2.0, 'all'):
        with pytest.raises(ValueError, match='nproc='): run(rank_times, 1, nproc=o)

@pytest.mark.parametrize('args,gpus,n', [
    ([], '', 1), (['--nproc','3'], '', 3), ([], '4,5,6', 3), (['--nproc','auto'], '4,5,6', 3),
    (['--nproc-per-node','auto'], '', 1), (['--nproc-per-node=2'], '4,5,6', 2),
    (['--nproc','1'], '4,5,6', 1), (['--gpus','0,2'], '4,5,6', 2), (['--gpus','0,2','--nproc','auto'], '4,5,6', 2)])
def test_nproc_follows_the_visible_gpus(args, gpus, n, monkeypatch):
    "A number that is given is read before torch is imported, too"
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', gpus)
    monkeypatch.setattr('torch.accelerator.device_count', lambda: len([*filter(None, os.environ['CUDA_VISIBLE_DEVICES'].split(','))]))
    args = [*args,'x.py']
    given = {'1','3','--nproc-per-node=2'} & {*args}
    assert guess(args) == ((['x.py'],n) if given else (None,0))
    assert _choose_nproc(get_parser().parse_args(args)) == n
    if 'auto' in args: assert processes.count_nproc('auto') == n # of `run`

slurm = dict(SLURM_JOB_ID='5', SLURM_STEP_ID='0', SLURM_PROCID='1', SLURM_NTASKS='4', SLURM_NNODES='2', SLURM_NODEID='0', SLURM_LOCALID='1',
             SLURM_JOB_NODELIST='localhost')

@pytest.mark.parametrize('env,args,words', [
    ({}, ['--nproc', '2'], 'SLURM_NTASKS=4 and SLURM_NNODES=2: srun starts each rank: leave out the launcher'),
    (dict(SLURM_NTASKS='2'), ['--nnodes', '3'], '--nnodes=3 and SLURM_NNODES=2 differ'),
    (dict(SLURM_NTASKS='2', WORLD_SIZE='2'), ['--nproc', '2'], 'WORLD_SIZE=2 and SLURM_NNODES x --nproc=4 differ'),
    (dict(SLURM_JOB_NODELIST=''), [], 'neither SLURM_JOB_NODELIST nor MASTER_ADDR'), (dict(SLURM_NTASKS='many'), [], "SLURM_NTASKS='many'"),
    (dict(SLURM_PROCID='4'), [], 'SLURM_PROCID=4, but SLURM_NTASKS=4')])
def test_what_contradicts_slurm(env, args, words, capsys, monkeypatch):
    for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'): monkeypatch.delenv(k, raising=False)
    for k,v in (slurm | env).items(): monkeypatch.setenv(k, v)
    with pytest.raises(SystemExit) as e: main([*args, __file__])
    assert e.value.code == 2 and words in capsys.readouterr().err

@pytest.mark.parametrize('name,value,words', [('WORLD_SIZE','2','SLURM_NTASKS=4 differ'), ('LOCAL_RANK','0','SLURM_LOCALID=1 differ')])
def test_what_contradicts_slurm_without_the_launcher(name, value, words):
    with pytest.raises(ValueError, match=f'{name}={value} and {words}'): foreign_rank(slurm | {name: value})

def test_launchers_that_mpirun_starts(capsys, monkeypatch):
    "Each would train alone, and write the same files"
    monkeypatch.delenv('RANK', raising=False)
    for k,n in dict(RANK=1, SIZE=2, LOCAL_RANK=1, LOCAL_SIZE=2).items(): monkeypatch.setenv(f'OMPI_COMM_WORLD_{k}', str(n))
    with pytest.raises(SystemExit): main(['--nproc', '2', '--no-fork-server', __file__])
    assert '2 processes run this launcher, each alone: let mpirun run the script itself' in capsys.readouterr().err

def test_slurm_by_task_and_by_node(tmp_path):
    "Two tasks on one node are two ranks, without the launcher; on two nodes (which are this machine) agents with two ranks each"
    (a,b),file = (tmp_path/'a', tmp_path/'b'),write(tmp_path, script)
    for o in (a, b): o.mkdir()
    alone = write(tmp_path, f'from learnerdist.core.env import read_launcher\nread_launcher()\n{meeting}', 'alone.py')
    ports = [dict(MASTER_PORT=str(free_port())) for _ in range(2)]
    tasks = [dict(SLURM_PROCID=r, SLURM_NTASKS=2, SLURM_LOCALID=r, SLURM_NODEID=0, SLURM_NNODES=1) for r in range(2)]
    nodes = [dict(SLURM_PROCID=n, SLURM_NTASKS=2, SLURM_LOCALID=0, SLURM_NODEID=n) for n in range(2)]
    def env(o, port): return environment(**slurm | {k: str(v) for k,v in o.items()} | port)
    runs = [Fork(run_target, [str(alone),str(a),'meet'], env=env(o, ports[0])) for o in tasks]
    runs += [start('--nproc', 2, file, b, env=env(o, ports[1])) for o in nodes]
    found = [o.result() for o in runs]
    assert [o.returncode for o in found] == [0]*4, found
    keys = 'RANK','WORLD_SIZE','LOCAL_RANK','LOCAL_WORLD_SIZE'
    assert [[int(o['env'][k]) for k in keys] for o in messages(a)] == [[0,2,0,2], [1,2,1,2]]
    assert [[int(o['env'][k]) for k in keys] for o in messages(b)] == [[0,4,0,2], [1,4,1,2], [2,4,0,2], [3,4,1,2]]
    assert [o['met'] for o in messages(a)] == [2.]*2

def test_run_of_a_closure_needs_cloudpickle(monkeypatch):
    k = 3
    monkeypatch.setitem(sys.modules, 'cloudpickle', None) # as if it were not installed
    with pytest.raises(ValueError, match='pip install cloudpickle'): run(lambda: k, nproc=2)

def test_help_begins_with_our_options(capsys):
    def printed(option):
        with pytest.raises(SystemExit): main([option])
        return capsys.readouterr().out
    ours,whole = printed('--help'),printed('--help-all')
    assert all(o in ours for o in ('--nproc N','--gpus 0,2','--wait SECONDS','python -m learnerdist.launch --nproc 2 train.py'))
    assert '--rdzv-backend' in whole and '--rdzv-backend' not in ours and whole.count('--nproc N ')==1
    assert 'learnerdist 0.' in printed('--version')

debugged = '''import torch
from learnerdist.all import all_sum,process_group,rank_distrib
with process_group(timeout_s=.5):
    value = torch.tensor(rank_distrib()+41)
    breakpoint()
    print('sum', all_sum(value).item())
'''

@pytest.mark.long
def test_a_rank_has_the_terminal_and_the_others_wait(tmp_path):
    "breakpoint() on a pseudoterminal: rank 0 passes it, and waits for longer than its timeout"
    ours,theirs = pty.openpty()
    file = write(tmp_path, debugged)
    at = dict(stdin=theirs, stdout=theirs, stderr=theirs)
    proc = subprocess.Popen([*launcher,'--nproc','2','--debug-rank','1',file], env=environment(), **at)
    os.close(theirs)
    def until(text):
        shown = ''
        while text not in shown and proc.poll() is None:
            if select.select([ours], [], [], .1)[0]: shown += os.read(ours, 4096).decode()
        return shown
    assert 'all_sum(value)' in until('(Pdb) ') # the next line
    assert until('waits for the other ranks').count('(Pdb)')==0
    os.write(ours, b'p value\n')
    assert 'tensor(42)' in until('(Pdb) ')
    os.write(ours, b'c\n')
    assert '[r0] sum 83' in until('[r0] sum 83') and proc.wait(60)==0
    os.close(ours)

@pytest.mark.parametrize('rank', [0,1])
def test_a_store_that_has_ended_with_rank_0_is_not_waited_for(rank):
    "On another machine rank 0 may still import; here no rank runs"
    env = dict(WORLD_SIZE='3', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()))
    ranks = [SimpleNamespace(rank=rank+i, env=env, seen=0, proc=SimpleNamespace(poll=lambda: 1)) for i in range(2)]
    assert [watch.Watch(ranks)._notify_others(o, 0) for o in ranks]==[rank==0]*2
