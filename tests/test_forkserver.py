"Ranks that are forks of the launcher's server: what they are, what is left to them, and what ends when"
import ast,json,os,signal,subprocess,sys,time
from pathlib import Path
import pytest
from helpers import Waiting,environment,launch,root,write
from learnerdist.core.files import launch_folder
from learnerdist.launch import forkserver
from learnerdist.launch.forkserver import ForkServer,command,first_lines,known

pytestmark = pytest.mark.skipif(not hasattr(os, 'memfd_create'), reason='ranks are forks on Linux only')

# --- what may be imported in advance ------------------------------------------------------------------------------------------

@pytest.fixture
def first(tmp_path, monkeypatch):
    "The modules of files that a script imports first, by name"
    monkeypatch.setattr(forkserver, 'known', known | {'lib'})
    def _first(files, *argv):
        for k,v in files.items(): write(tmp_path, v, k)
        argv = argv or (str(tmp_path/'train.py'),)
        nodes,_ = first_lines(argv, [str(tmp_path),str(tmp_path/'site-packages'),*sys.path])
        return [ast.unparse(o) for o in nodes]
    return _first

@pytest.mark.parametrize('text,found', [
    ('from __future__ import annotations\nimport csv, wave as w\nfrom lib import a as b, c', 'all'),
    *((f'import csv\n{o}\nimport lib', 'import csv') for o in (
        'os.environ["A"] = os.environ["B"]','sys.path[0] = "b"','try: import lib\nexcept ImportError: pass','import no_such_module',
        'import pytest','import own','from . import own','class A(B, k=f()): pass','lr = 1e-3','with a: pass')),
    ('import os\nos.environ[\'A\'] = \'b\'\nimport csv', 'all'), ('def broken(:', ''), ('import lib.part', 'all')])
def test_imports_before_anything_else(text, found, first):
    "Of known packages; what comes after any other statement, or an import of the user's own, is left to the ranks"
    lib = {'site-packages/lib/__init__.py': '', 'site-packages/lib/part.py': 'f()', 'own.py': ''}
    assert first({'train.py': text, **lib})==(text if found=='all' else found).splitlines()

def test_imports_of_a_module(first):
    files = {'pack/__init__.py': 'import csv', 'pack/train.py': 'from colorsys import *\nimport this', 'pack/__main__.py': 'import wave'}
    assert first(files, '-m', 'pack')==['import csv','import wave']
    assert first({}, '-m', 'pack.train')==['import csv','from colorsys import *','import this']
    assert first({'pack/__init__.py': 'import csv\nprint(3)'}, '-m', 'pack.train')==['import csv']
    assert first({'csv.py': '', 'a.py': 'import csv'}, 'no_such.py')==first({}, '-m', 'no_such')==[]

about = '''import torch
import atexit,gc,json,logging,multiprocessing,os,pathlib,pickle,random,re,signal,sys,threading
import numpy
import reads
class Data(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, i): return i
def fds():
    links = [f'/proc/self/fd/{o}' for o in os.listdir('/proc/self/fd')]
    return sorted(re.sub('[0-9]+|/[^ ]*/', '', os.readlink(o)) for o in links if os.path.exists(o))
def late():
    main_thread.join()
    print('late', type(pickle.loads(pickle.dumps(Data()))) is Data, flush=True)
def status(*keys): return {k: v for k,v in (o.split(':\\t') for o in open('/proc/self/status').read().splitlines()) if k in keys}
def read(how): return list(torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=how))[2].item()
if __name__=='__main__':
    atexit.register(print, 'exit hook of', os.environ['RANK'])
    main,old = sys.modules['__main__'],os.umask(18)
    torchs = 'TORCHELASTIC_ERROR_FILE','TORCHELASTIC_RUN_ID','MASTER_PORT','LEARNERDIST_MEMORY','LEARNERDIST_INIT_METHOD'
    forked = '--serve' in open('/proc/self/cmdline').read().split('\\0')
    workers = sys.argv[2:] if forked and os.environ['RANK']=='1' else ()
    res = dict(
        flags=str(sys.flags), argv=sys.argv, path=sys.path, warn=sys.warnoptions, options=sys._xoptions, hash=hash('a'), cwd=os.getcwd(),
        main=main.__dict__ is globals(), spec=str(main.__spec__).split('0x')[0], names=[__file__,__name__,__package__], umask=old,
        env={k: v for k,v in os.environ.items() if k not in torchs}, environ=type(os.environ).__name__, fds=fds(),
        status=status('SigBlk','SigIgn','SigCgt','Threads','Cpus_allowed'), leads=os.getpid()==os.getpgrp()==os.getsid(0),
        signals=[str(signal.getsignal(o)).partition(' at ')[0] for o in signal.valid_signals()],
        threads=[o.name for o in threading.enumerate()], n_threads=torch.get_num_threads(), gc=gc.isenabled(), level=logging.root.level,
        process=[str(multiprocessing.parent_process()),multiprocessing.current_process().name,multiprocessing.active_children()],
        draws=[random.random(),numpy.random.rand(),torch.rand(()).item()],
        streams=[(o.name,o.line_buffering,o.isatty()) for o in (sys.stdin,sys.stdout,sys.stderr)],
        started=[o for o in getattr(sys, 'orig_argv', []) if not o.isdigit()], read=[*map(read, workers)],
        reads=[reads.rank==os.environ['RANK'],reads.pid==os.getpid()])
    key = multiprocessing.current_process().authkey.hex()
    pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(json.dumps([forked,key,res]))
    main_thread = threading.main_thread()
    threading.Thread(target=late).start()
    if os.environ['RANK']=='1': sys.exit()
'''

def told(folder): return [json.loads((folder/str(r)).read_text()) for r in range(2)]

@pytest.mark.slow
@pytest.mark.parametrize('how,workers', [('script',['fork','spawn']), pytest.param('module',['forkserver'], marks=pytest.mark.long)])
def test_a_fork_is_what_python_starts(how, workers, tmp_path):
    """What a rank can see of itself is the same with and without the server, but for its ids; and it has workers. Each rank imports
    packages that are not known for itself: this one reads the rank when it is imported"""
    write(tmp_path/'my-packages', 'import os\nrank,pid = os.environ.get("LOCAL_RANK"),os.getpid()', 'reads.py')
    target = [write(tmp_path, about)] if how=='script' else ['-m',write(tmp_path, about, 'pack/train.py') and 'pack.train']
    options,seen = ['--nproc','2'] if how=='script' else ['--nproc','2','--redirects','3'],[]
    env = dict(OWN='1', LEARNERDIST_SEED='7', PYTHONPATH=f"{root}:{tmp_path/'my-packages'}")
    env['OPENBLAS_NUM_THREADS'] = '1' # numpy's import starts its threads; in a fork they begin with its first work
    for server in ([],['--no-fork-server']):
        (tmp_path/'out').mkdir(exist_ok=True)
        res = launch(*options, *server, *target, 'out', *workers, cwd=tmp_path, env=env)
        assert res.returncode==0, res.stderr
        said = ['[r1] exit hook of 1','[r1] late True','exit hook of 0','late True']
        if how=='script': assert sorted(res.stdout.splitlines())==said, res.stderr
        seen.append(told(tmp_path/'out'))
    forked,others = seen
    assert [o[0] for o in forked]==[True]*2 and [o[0] for o in others]==[False]*2
    assert len({o[1] for o in forked})==2 # not one key for all ranks
    assert [o[2]['read'] for o in forked]==[[],[2]*len(workers)] and all(o[2]['reads']==[True,True] for o in forked)
    for (_,_,a),(_,_,b) in zip(forked, others): assert {k: (v,b[k]) for k,v in a.items() if k!='read' and v!=b[k]}=={}

@pytest.mark.long # it changes with their versions
@pytest.mark.parametrize('name', sorted(o for o in known if o not in sys.stdlib_module_names))
def test_known_packages_may_be_forked(name):
    "None of them reads the rank when it is imported, starts threads that a fork would lack, opens files, or starts processes"
    code = f'''import os
class Noted(type(os.environ)):
    asked = set()
    def __getitem__(self, k):
        self.asked.add(k)
        return super().__getitem__(k)
os.environ.__class__,fds = Noted,len(os.listdir('/proc/self/fd'))
try: import {name}
except ImportError: raise SystemExit(77)
ranks = [o for o in Noted.asked if o.startswith(('RANK','LOCAL_','WORLD_SIZE','GROUP_','MASTER_','TORCHELASTIC_'))]
pid = os.fork()
if not pid: os._exit(0) # OpenBLAS ends its threads before a fork
os.waitpid(pid, 0)
n = len(os.listdir('/proc/self/task'))
assert n==1 and not ranks and len(os.listdir('/proc/self/fd'))==fds, (n, ranks)
try: os.waitid(os.P_ALL, 0, os.WEXITED|os.WNOHANG)
except ChildProcessError: pass
else: raise AssertionError('a child')'''
    res = subprocess.run([sys.executable,'-c',code], capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=str(root)))
    if res.returncode==77: pytest.skip(f'{name} is not installed')
    assert res.returncode==0, res.stderr

@pytest.mark.slow
def test_a_fork_that_is_not_adopted_is_an_error(monkeypatch):
    "It was waited for without end"
    monkeypatch.setattr(forkserver, '_is_child', lambda pid: False)
    monkeypatch.setattr(forkserver, 'adopt_s', .1)
    server = ForkServer()
    server.prepare(['--modules','torch'], os.environ)
    try:
        with pytest.raises(TimeoutError, match='is no child of this one after 0.1 s'):
            server.start([*command,'--version'], dict(os.environ), [0,1,2])
    finally:
        server.close()
        os.waitpid(-1, 0)

# --- ends ---------------------------------------------------------------------------------------------------------------------

ends = '''import torch
import os,sys,threading
how, = [o for o in open('/proc/self/cmdline').read().split('\\0') if o in ('--serve','--worker')]
with open(sys.argv[1], 'w') as f: f.write(f'{os.getpid()} {how} {os.environ["LEARNERDIST_MEMORY"]}\\n')
threading.Event().wait()
'''

def waiting(folder, *options):
    (folder/'tmp').mkdir()
    return Waiting(folder, ends, *options, env=environment(MARK=str(folder), TMPDIR=str(folder/'tmp')))

def rank_of(run):
    "The process id of the only rank, and how it started"
    (pid,how,_), = run.lines(1)
    return int(pid),how

def left(tmp_path):
    "Processes of this run, after waiting for those that end"
    def has(o):
        try: return f'MARK={tmp_path}'.encode() in (o/'environ').read_bytes().split(b'\0')
        except OSError: return False
    end = time.monotonic()+20
    while (res := [o.name for o in Path('/proc').glob('[0-9]*') if has(o)]) and time.monotonic()<end: time.sleep(.05)
    return res

@pytest.mark.slow
def test_no_rank_outlives_its_launcher(tmp_path):
    "Nor does its folder in memory for long: the next launch removes it"
    run = waiting(tmp_path, '--nproc', 2)
    lines,end = run.lines(2),time.monotonic()+20
    pids,folder = [int(pid) for pid,*_ in lines],Path(lines[0][2])
    def parents(): return [int(Path(f'/proc/{o}/stat').read_text().rpartition(')')[2].split()[1]) for o in pids]
    while parents()!=[run.proc.pid]*2 and time.monotonic()<end: time.sleep(.01) # a rank may begin before its first parent ends
    assert parents()==[run.proc.pid]*2 # it has adopted them
    run.proc.kill()
    assert (run.proc.wait(),left(tmp_path))==(-9,[])
    assert folder.stat().st_mode&0o777==0o700 and not [*(tmp_path/'tmp').iterdir()] # which may be full
    with launch_folder(): assert not folder.exists()

@pytest.mark.slow
def test_restarts_come_from_the_server_as_long_as_it_lives(tmp_path):
    "A rank is killed; then the server and a rank; then a rank of those that were started again, and nothing is left"
    run = waiting(tmp_path, '--nproc', 1, '--max-restarts', 2)
    first,how = rank_of(run)
    children = Path(f'/proc/{run.proc.pid}/task/{run.proc.pid}/children').read_text().split()
    server, = {*map(int, children)}-{first}
    for o in ('TERM','INT','HUP','USR1'): os.kill(server, getattr(signal, f'SIG{o}')) # as a batch system sends them to all
    os.kill(first, signal.SIGKILL)
    second,again = rank_of(run)
    os.kill(server, signal.SIGKILL)
    os.kill(second, signal.SIGKILL)
    third,last = rank_of(run)
    assert (how,again,last)==('--serve','--serve','--worker')
    os.kill(third, signal.SIGKILL)
    res = run.proc.result()
    err = res.stderr
    assert (res.returncode,left(tmp_path))==(137,[]), err
    assert err.count('rank 0 failed first: ended by SIGKILL')==3 and 'restart 1 of 2' in err and 'restart 2 of 2' in err, err
