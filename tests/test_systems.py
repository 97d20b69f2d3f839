"""Systems that lack what Linux has, by taking it away: on macOS there is no /proc, on Windows no fork, no process groups, no Unix signals.
Neither system has run this code; what can be shown here is that nothing else is asked for, and what is said"""
import os,subprocess,sys
import pytest,torch

train = '''
import os,sys,time,torch
from torch import nn
from torch.utils.data import DataLoader,TensorDataset
from learnerdist.all import *
from learnerdist.launch import ranks

def main(fault=None):
    torch.set_num_threads(1)
    x = torch.linspace(-1, 1, 64).reshape(16, 4)
    dls = DataLoaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4))
    torch.manual_seed(0)
    learn = Learner(dls, nn.Linear(4, 1), loss_func=nn.MSELoss(), opt_func=torch.optim.SGD)
    with learn.no_logging(), learn.distrib_ctx(timeout_s=8 if fault else 60, split_batches=True):
        learn.fit(1, .1)
        if fault and rank_distrib()==1: exec(fault)
        learn.fit(1, .1)
    return round(learn.final_record[1], 5)
'''

macos = '''
import builtins,io,os,signal,sys
def without_proc(func):
    def _func(path, *args, **kw):
        if str(path).startswith('/proc'): raise FileNotFoundError(2, 'No such file or directory', str(path))
        return func(path, *args, **kw)
    return _func
for module,names in ((builtins,['open']), (io,['open']), (os,['listdir','readlink','stat','scandir','lstat'])):
    for o in names: setattr(module, o, without_proc(getattr(module, o)))
for module,names in ((signal,['SIGRTMIN','SIGRTMAX']), (os,['pidfd_open','sched_getaffinity'])):
    for o in names: vars(module).pop(o, None)
'''

# After torch is imported, which on this system needs some of it
windows = '''
import faulthandler,os,signal,socket,sys,torch,torch.distributed.run,torch.utils.data,torch._dynamo,multiprocessing.forkserver
everywhere = 'SIGINT','SIGTERM','SIGABRT','SIGFPE','SIGILL','SIGSEGV','SIG_DFL','SIG_IGN'
unix = [o for o in vars(signal) if o.startswith('SIG') and o not in everywhere]
for module,names in ((signal,[*unix,'pthread_sigmask','pthread_kill','sigwait','setitimer','alarm']), (socket,['AF_UNIX']),
                     (faulthandler,['register','unregister']), (os,['fork','setsid','killpg','getpgid','setpgid']),
                     (os,['register_at_fork','sched_getaffinity','pidfd_open'])):
    for o in names: delattr(module, o)
for o in ('fcntl','resource','pwd','grp','termios'): sys.modules[o] = None
'''

def python(path, *args, code=None, **files):
    "What `python` prints, with the files `name.py`, and their folder, on its path"
    for name,text in files.items(): (path/f'{name}.py').write_text(text)
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(path),*sys.path])}
    cmd = [sys.executable, *(['-c', code] if code else args)]
    return subprocess.run(cmd, cwd=path, env=env, capture_output=True, text=True, timeout=200)

@pytest.fixture(scope='module')
def loss():
    "The validation loss of one process, on this system"
    n,space = torch.get_num_threads(),{}
    exec(train, space)
    res = space['main']()
    torch.set_num_threads(n)
    return res

called = """
if __name__=='__main__':
    with ranks(2) as r:
        print(r.run(main))
        r.run(main, {!r})
"""

@pytest.mark.long
@pytest.mark.parametrize('fault,messages', [
    ('time.sleep(60)', 'it is not asked where there is no /proc'),
    pytest.param('os._exit(3)', 'rank 1 failed: ProcessDied: ended with exit status 3', marks=pytest.mark.long)])
def test_macos_trains_and_fails(fault, messages, loss, tmp_path):
    res = python(tmp_path, 'train.py', sitecustomize=macos, train=train+called.format(fault))
    assert res.stdout==f'{loss}\n' and res.returncode==1 and messages in res.stderr, res.stderr

no_groups = '2 processes: linux has no process groups: use Linux, macOS, WSL 2'
starts = '''
import windows,train
from learnerdist.launch import ranks,run
from learnerdist.launch.cli import main
from learnerdist.testing import run_ranks
print(train.main())
for start in (lambda: run(print, nproc=2), lambda: ranks(2), lambda: run_ranks(print, 2)):
    try: start()
    except ValueError as e: print(e)
main(['--nproc', '2', 'windows.py'])
'''
def test_windows_trains_on_one_process_and_cannot_start_ranks(loss, tmp_path):
    res = python(tmp_path, code=starts, windows=windows, train=train)
    assert res.stdout.splitlines()==[f'{loss}',*[no_groups]*3] and res.returncode==2, res.stderr
    assert res.stderr.endswith(f'error: {no_groups}\n'), res.stderr
