"A fork server that stays after its command: what it starts, when it is left alone, and what ends"
import bz2,os,random,re,resource,signal,subprocess,sys,time
from pathlib import Path
import pytest
from learnerdist.launch.client import ask,circumstances,folder,how_to_stay,keep_s
from learnerdist.launch.imports import FirstImports
from learnerdist.launch.resident import Read,noted_files
from test_forkserver import about,left,root,told,write

launcher = sys.executable,'-m','learnerdist.launch'
pytestmark = pytest.mark.skipif(not hasattr(os, 'pidfd_open'), reason='ranks are forks on Linux only')

def env_of(folder, **env):
    drop = 'PYTHONHASHSEED','OMP_NUM_THREADS','RANK','WORLD_SIZE','LOCAL_RANK','MASTER_PORT'
    mine = dict(PYTHONPATH=str(root), XDG_RUNTIME_DIR=str(folder), MARK=str(folder))
    return {k: v for k,v in os.environ.items() if k not in drop} | mine | env

def start(folder, *args, s='60', cwd=None, **env):
    return subprocess.Popen([*launcher,'--nproc','2','--keep-server',s,*map(str, args)], env=env_of(folder, **env), cwd=cwd or folder,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def launch(folder, *args, text='', **kw):
    "(exit status, output, what was said on stderr, whether it came from a server that had stayed)"
    proc = start(folder, *args, **kw)
    out,err = proc.communicate(text, timeout=120)
    return proc.returncode,out,err,'stays' not in err

def at(folder): return folder/f'learnerdist-{os.getuid()}'/'server'

def wait_for(is_so, timeout_s=60):
    end = time.monotonic()+timeout_s
    while not (res := is_so()) and time.monotonic()<end: time.sleep(.02)
    assert res
    return res

def leave_one(folder, *args, **kw):
    res = launch(folder, *args, **kw)
    assert res[0]==0 and not res[3], res[2]
    wait_for(at(folder).exists)

@pytest.fixture
def place(tmp_path, monkeypatch):
    "A folder for a script and for the server's socket. No process may be left"
    yield tmp_path
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path))
    assert ask(['--keep-server','0'])==0 and left(tmp_path)==[] and not at(tmp_path).exists()

# --- what it starts -----------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_its_ranks_are_what_python_starts(place):
    "As `test_a_fork_is_what_python_starts`, after a command that has stayed"
    script,seen = write(place, text=about),{}
    (place/'out').mkdir()
    for s in ('60','60','0'):
        code,out,err,seen_one = launch(place, *(['--no-fork-server'] if s=='0' else []), script, 'out', 'workers', s=s)
        assert code==0, err
        assert sorted(out.splitlines())==['[r1] exit hook of 1','exit hook of 0']
        seen[s] = told(place/'out')
        if s!='0': wait_for(at(place).exists)
    assert seen_one and [o[0] for o in seen['60']]==[True]*2 and [o[0] for o in seen['0']]==[False]*2
    for (_,_,a),(_,_,b) in zip(seen['60'], seen['0']): assert {k: (v,b[k]) for k,v in a.items() if v!=b[k]}=={}

asks = '''import torch
import gc,os,sys
if os.environ['RANK']=='0': print(sys.stdin.read(), gc.get_freeze_count()>0, sys.argv[1:], os.getcwd(), os.getppid(), os.environ['SHLVL'])
print('on stderr', file=sys.stderr)
if 'fails' in sys.argv: raise KeyError('no data')
if 'exits' in sys.argv: sys.exit(3)
'''

@pytest.mark.slow
def test_input_output_arguments_and_status(place):
    script = write(place, text=asks)
    leave_one(place, script, 'a', text='one', SHLVL='1')
    outs = [launch(place, script, *o, text='two', SHLVL='2') for o in (['b'],['fails'],['exits'])]
    assert all(o[3] for o in outs) and [o[0] for o in outs]==[0,1,3]
    for o,arg in zip(outs, ('b','fails','exits')): assert re.fullmatch(rf"two True \['{arg}'\] {place} [0-9]+ 2\n", o[1])
    assert len({o[1].split()[-2] for o in outs})==1 # one server
    assert all(o[2].count('on stderr')==2 for o in outs)
    assert 'failed first: KeyError: ' in outs[1][2] and 'train.py:5' in outs[1][2] and 'failed first: SystemExit: 3' in outs[2][2]

# --- when it is left alone ----------------------------------------------------------------------------------------------------

uses = 'import torch\nimport lib,own\nimport os\nif os.environ["RANK"]=="0": print(lib.value, own.name)\n'
reads = '''import os
from pathlib import Path
here = Path(__file__).parent
value = (here/'settings.txt').read_text(), os.path.exists(here/'new.txt') and open(here/'new.txt').read()
try: open(here/'later.txt').close()
except OSError: pass
'''

def change_env(place): return dict(LR='.1')
def change_module(place): (place/'my-packages/lib.py').write_text(reads+'value = "changed"')
def change_settings(place): (place/'my-packages/settings.txt').write_text('b')
def add_file(place): (place/'my-packages/later.txt').write_text('b')
def hide_module(place): (place/'lib.py').write_text('value = "the user\'s own"')
def change_script(place): (place/'train.py').write_text('import torch\nimport wave\n'+uses.partition('\n')[2])
def change_own(place):
    (place/'own.py').write_text('name = "changed"')
    return True
def edit_script(place):
    (place/'train.py').write_text((place/'train.py').read_text()+'print("edited")')
    return True
def install(place): (place/'my-packages/other.py').write_text('')
def ignore(place): return dict(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
def limit(place): return dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
def mask(place): return dict(preexec_fn=lambda: os.umask(0o77) and None)
def nice(place): return dict(preexec_fn=lambda: os.nice(1) and None)
changes = change_own,edit_script,change_env,change_module,change_settings,add_file,hide_module,change_script,install,ignore,limit,mask,nice

@pytest.mark.long
def test_a_server_that_differs_is_left_alone(place):
    "For each change: the next command imports for itself, and leaves a server that the one after it uses"
    write(place, 'own.py', 'name = ""'), write(place, 'my-packages/settings.txt', 'a'), write(place, 'my-packages/lib.py', reads)
    paths,script = f"{root}:{place/'my-packages'}",write(place, text=uses)
    def run(env):
        prepare = env.pop('preexec_fn', None)
        res = subprocess.run([*launcher,'--nproc','2','--keep-server','60',script], env=env_of(place, PYTHONPATH=paths, **env), cwd=place,
                             capture_output=True, text=True, preexec_fn=prepare, timeout=120)
        assert res.returncode==0, res.stderr
        return res.stdout,'stays' not in res.stderr
    assert run({})[1] is False
    for change in changes:
        wait_for(at(place).exists)
        before = run({})
        assert before[1], change
        inode = at(place).stat().st_ino
        env = change(place) or {}
        if env is True: # what is the user's own is read anew by each rank
            out,same = run({})
            assert same and out!=before[0], change
            continue
        out,same = run({**env})
        assert not same, change
        wait_for(lambda old=inode: at(place).exists() and at(place).stat().st_ino!=old)
        assert run({**env})==(out,True), change
        if env: assert run({})[1] is False

def test_circumstances(monkeypatch, tmp_path):
    "What counts, of the parts that a test can change without a process"
    args = ['--nproc','2','train.py']
    here = circumstances(args)
    assert circumstances([*args,'--lr','3'])==here==circumstances(['--nproc=2','--max-restarts','3','train.py'])
    monkeypatch.setenv('SHLVL', '77')
    assert circumstances(args)==here!=circumstances(['--nproc','3','train.py'])
    assert len({here, circumstances(['--nproc','2','other.py']), circumstances(['--nproc','2','-m','train'])})==3
    monkeypatch.setattr(sys, 'warnoptions', ['error'])
    assert circumstances(args)!=here
    monkeypatch.undo()
    monkeypatch.setenv('A', 'b')
    assert circumstances(args)!=here
    monkeypatch.delenv('A')
    monkeypatch.chdir(tmp_path)
    assert circumstances(args)!=here

def test_seconds(monkeypatch):
    assert keep_s(['--nproc','2','train.py','--keep-server','3']) is None and keep_s(['--keep-server=3','-m','a'])==3
    monkeypatch.setenv('PET_KEEP_SERVER', '7')
    assert keep_s(['train.py'])==7 and keep_s(['--keep-server','0','train.py'])==0
    monkeypatch.setenv('SLURM_PROCID', '0')
    assert keep_s(['--keep-server','3','train.py']) is None # the job's end is the end of all its processes

@pytest.mark.parametrize('s', ['-1','nan','inf','soon'])
def test_no_seconds(s, tmp_path):
    res = subprocess.run([*launcher,'--keep-server',s,write(tmp_path)], env=env_of(tmp_path), capture_output=True, text=True)
    assert res.returncode==2 and f"{s!r} is no number of seconds" in res.stderr and left(tmp_path)==[]

def test_a_folder_that_others_can_enter_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path))
    with folder() as own: assert os.stat(own).st_mode&0o777==0o700
    at(tmp_path).parent.chmod(0o755)
    with pytest.raises(PermissionError, match='chmod 700'), folder(): pass
    with pytest.raises(PermissionError): how_to_stay(['--keep-server','3','train.py'])
    at(tmp_path).parent.rmdir()
    os.symlink(tmp_path, at(tmp_path).parent)
    with pytest.raises(OSError), folder(): pass

def test_notes_of_files(tmp_path):
    a,b,c,d = (tmp_path/o for o in 'abcd')
    b.write_text('')
    bz2.open(d, 'w').close()
    found,opened,before = set(),open,(Path.open,bz2._builtin_open)
    with noted_files(found):
        with pytest.raises(OSError): open(a)
        b.read_text(), c.write_text('')
        bz2.open(d).close() # it has its `open` by another name
        sys.modules[__name__].kept = open
    assert found=={str(a),str(b),str(d)} and sys.modules[__name__].kept is opened is open
    assert (Path.open,bz2._builtin_open)==before
    script = write(tmp_path, text='import torch')
    args,now = [str(script)],time.time_ns()+10**9
    first = FirstImports(args, sys.path)
    read = Read({*found,str(script)}, args, first, now)
    assert read.holds() and not Read(found, args, first, 0).holds() # files are younger than the imports
    script.write_text('import torch\nprint(1)')
    assert read.holds() # the user's own are read anew
    script.write_text('import torch\nimport wave')
    assert not read.holds()
    script.write_text('import torch')
    assert read.holds()
    a.write_text('')
    assert not read.holds()

# --- ends ---------------------------------------------------------------------------------------------------------------------

waits = '''import torch
import os,sys,threading
if len(sys.argv)>1:
    print(os.getpid(), flush=True)
    threading.Event().wait()
'''

def parent(pid): return int(re.search(r'PPid:\t(\d+)', Path(f'/proc/{pid}/status').read_text())[1])

more_signals = ('TERM',143),('USR1',-10)

@pytest.mark.slow
@pytest.mark.parametrize('sig,status', [('INT',130), ('KILL',-9), *(pytest.param(*o, marks=pytest.mark.long) for o in more_signals)])
def test_signals_to_the_command(sig, status, place):
    script = write(place, text=waits)
    leave_one(place, script)
    proc = start(place, script, 'wait')
    pid = proc.stdout.readline()
    proc.send_signal(getattr(signal, f'SIG{sig}'))
    assert proc.wait(60)==status
    wait_for(lambda: not Path(f'/proc/{int(pid.split()[-1])}').exists())
    proc.communicate()
    assert launch(place, script)[::3]==(0,True) # the server stays, for the next one

@pytest.mark.slow
@pytest.mark.parametrize('who', ['server','resident'])
def test_the_end_of_the_server(who, place):
    script = write(place, text=waits)
    leave_one(place, script)
    proc = start(place, script, 'wait')
    pid = int(proc.stdout.readline().split()[-1])
    server = parent(pid)
    os.kill(server if who=='server' else resident_of(server), signal.SIGKILL)
    assert proc.wait(60)==(137 if who=='server' else -9)
    wait_for(lambda: not Path(f'/proc/{pid}').exists())
    proc.communicate()
    assert launch(place, script)[::3]==(0,False)
    wait_for(lambda: launch(place, script)[::3]==(0,True))

def resident_of(server):
    "The one of its forks that leads no session"
    found = [int(o) for o in Path(f'/proc/{server}/task/{server}/children').read_text().split()]
    return next(o for o in found if os.getsid(o)!=o)

@pytest.mark.slow
def test_it_ends_by_itself(place):
    "After the seconds, counted from the end of the last command"
    script = write(place, text=waits)
    proc = start(place, script, 'wait', s='1')
    proc.stdout.readline()
    wait_for(at(place).exists)
    time.sleep(2)
    assert at(place).exists()
    proc.terminate()
    assert 'stays for 1 s' in proc.communicate()[1]
    assert left(place, 30)==[] and not at(place).exists()

@pytest.mark.slow
def test_two_first_commands_at_once(place):
    "One server is left of two, and none that nobody finds"
    script = write(place, text=waits)
    for o in [start(place, script, LR=lr) for lr in '12']: assert o.communicate(timeout=120) and o.returncode==0
    wait_for(at(place).exists)
    time.sleep(3) # the other one may come later

@pytest.mark.slow
def test_an_idle_one_ends_by_a_signal(place):
    script = write(place, text='import torch\nimport os\nprint(os.getppid())')
    code,out,_,_ = launch(place, script)
    wait_for(at(place).exists)
    time.sleep(.5) # it has been idle for a while
    os.kill(resident_of(int(out.split()[-1])), signal.SIGTERM)
    assert code==0 and left(place, 10)==[]
    at(place).unlink()

@pytest.mark.slow
def test_closed_input_and_exit_hooks(place):
    "Without an input or an output a command is its own launcher. Exit hooks of a library run in ranks only"
    write(place, 'my-packages/lib.py', 'import atexit,os\natexit.register(lambda: print("hook of", os.environ.get("RANK")))')
    script,paths = write(place, text='import torch\nimport lib\nimport sys\nprint(sys.stdin is None)'),f"{root}:{place/'my-packages'}"
    leave_one(place, script, PYTHONPATH=paths)
    code,out,_,same = launch(place, script, PYTHONPATH=paths)
    assert (code,same)==(0,True) and sorted(out.splitlines())==['False','[r1] False','[r1] hook of 1','hook of 0']
    args = ' '.join(map(str, [*launcher,'--nproc','2','--keep-server','60',script,'<&-']))
    res = subprocess.run(['sh','-c',args], env=env_of(place, PYTHONPATH=paths), cwd=place, capture_output=True, text=True, timeout=60)
    assert res.returncode==0 and '\nTrue\n' in '\n'+res.stdout, res

@pytest.mark.slow
def test_nothing_stays(place):
    "It says so, and is as without the option"
    code,out,err,_ = launch(place, write(place, text='import os\nos.environ["A"] = "b"\nimport torch\nprint(os.environ["RANK"])'))
    assert code==0 and sorted(out.splitlines())==['0','[r1] 1'] and 'nothing stays, since the script does not begin with imports' in err

@pytest.mark.slow
def test_a_server_that_does_not_answer(place):
    script = write(place, text=waits)
    leave_one(place, script)
    proc = start(place, script, 'wait')
    resident = resident_of(parent(int(proc.stdout.readline().split()[-1])))
    os.kill(resident, signal.SIGSTOP)
    with open(place/'said', 'w') as f:
        args = [*launcher,'--nproc','2','--keep-server','60',script]
        assert subprocess.run(args, env=env_of(place), cwd=place, stdin=subprocess.DEVNULL, stdout=f, stderr=f, timeout=60).returncode==1
    assert f'kill -9 {resident}' in (place/'said').read_text()
    os.kill(resident, signal.SIGCONT)
    proc.terminate()
    proc.communicate()

@pytest.mark.slow
def test_two_commands_at_once_and_a_third_that_differs(place):
    script = write(place, text=waits)
    leave_one(place, script)
    procs = [start(place, script, 'wait') for _ in range(2)]
    for o in procs: o.stdout.readline()
    assert launch(place, script, LR='.1')[::3]==(0,False) # its server takes the place of the other one, which goes when these two end
    for o in procs:
        assert o.poll() is None
        o.terminate()
        assert o.wait(60)==143
        o.communicate()
    wait_for(at(place).exists)
    assert launch(place, script, LR='.1')[::3]==(0,True)

@pytest.mark.slow
def test_a_restart_comes_from_it(place):
    script = write(place, text='import torch\nimport os,signal\nprint(os.getppid())\n'
                               'if os.environ["TORCHELASTIC_RESTART_COUNT"]=="0": os.kill(os.getpid(), signal.SIGKILL)')
    code,_,err,_ = launch(place, '--max-restarts', '1', script)
    assert code==0, err
    wait_for(at(place).exists)
    code,out,err,same = launch(place, '--max-restarts', '1', script)
    assert (code,same)==(0,True) and 'restart 1 of 1' in err and len({o.split()[-1] for o in out.splitlines()})==1

@pytest.mark.long
def test_a_hundred_starts_and_kills(place):
    "Every second command is killed, at any time; none waits, and the server is the same in the end"
    script,rng,pids = write(place, text=waits),random.Random(0),set()
    leave_one(place, script)
    inode = at(place).stat().st_ino
    for _ in range(100):
        start_s = time.monotonic()
        code,_,err,same = launch(place, script)
        assert (code,same)==(0,True), err
        pids.add(round(time.monotonic()-start_s, 1))
        proc = start(place, script, 'wait')
        time.sleep(rng.random()*.6)
        proc.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        _,err = proc.communicate(timeout=60)
        starting = re.search('^(Fatal Python error|Could not import runpy)', err, re.M) # Ctrl-C while Python itself starts
        assert proc.returncode in (-9,-15,-2,130,143) or starting, err
    assert at(place).stat().st_ino==inode and max(pids)<30
