"What a test leaves behind"
import gc,os,signal
from contextlib import contextmanager,suppress
from multiprocessing import connection,resource_tracker
from pathlib import Path
import torch.distributed as dist
from learnerdist.launch.processes import server

of_imports = 'PYTEST_','KMP_','TORCHINDUCTOR_','TRITON_','CUDA_MODULE_LOADING' # set by libraries when they are imported

def environment(): return {k:v for k,v in os.environ.items() if not k.startswith(of_imports)}

def runs(pid):
    with suppress(OSError): return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]!='Z'

def children():
    "Ids of this process's children, without the fork server and the helper process of `multiprocessing`"
    helpers,res = {server.proc and server.proc.pid, resource_tracker._resource_tracker._pid},set()
    for o in Path('/proc/self/task').glob('*/children'):
        with suppress(OSError): res |= {*map(int, o.read_text().split())}
    return {*filter(runs, res-helpers)}

def new_children(before):
    "Children that are not in `before`, after waiting for those that are about to end"
    if children()-before: gc.collect() # ends the workers of loaders without references
    for pid in children()-before:
        with suppress(OSError), open(os.pidfd_open(pid)) as f: connection.wait([f], 2)
    return children()-before

@contextmanager
def leak_check():
    "Cleans up, and raises AssertionError, if its body leaves environment variables, a process group or child processes behind"
    env,kids = environment(),children()
    yield
    now,leaked = environment(),new_children(kids)
    changed = sorted(k for k in env|now if env.get(k)!=now.get(k))
    has_group = dist.is_initialized()
    if has_group: dist.destroy_process_group()
    for k in changed: os.environ.pop(k, None)
    os.environ.update({k: env[k] for k in changed if k in env})
    for pid in leaked: os.kill(pid, signal.SIGKILL)
    assert not (changed or has_group or leaked), f'left behind: {changed}{", an open process group"*has_group}, child processes {leaked}'
