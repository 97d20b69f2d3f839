"Every test runs in a leak check; tests marked `cuda` are skipped where there is no GPU"
from gpus import visible # first
import functools
import gc
import os
import signal
import pytest,torch
from leaks import leak_check
from harness import changed, module_state
from learnerdist.launch import processes
from fastai_lines import table # noqa: F401

# A shell's job in the background ignores SIGINT, and one of nohup SIGHUP: tests send both to their processes, which would inherit that
for o,handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(o)==signal.SIG_IGN: signal.signal(o, handler)

# What the server of this process's ranks has imported, beyond what others have, if this process has it: else each rank imports it
processes._heavy += ['fastai.vision.all','fastai.text.all','fastai.tabular.all','fastai.collab','mlflow','s3fs','moto.server']

torch.set_num_threads(1) # of this process; those of ranks are set by what starts them

# Gloo's thread asks again and again for a lock that another thread holds. On few cores, where that one has lost its core to what it woke,
# this took a sixth of all CPU. With this policy a thread that wakes up takes no core from one that runs; what a test starts inherits it
if hasattr(os, 'SCHED_BATCH'): os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "With `-n 2`, the tests of a file that share what is run once a module go to one worker"
    from xdist.scheduler import LoadScopeScheduling
    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition('::')[0]
            return file if shares(config.rootpath/file) else nodeid
    return Scheduler(config, log)

def pytest_pycollect_makeitem(collector, obj):
    "A function that a file has imported is no test of that file: fastai's star has `test_eq` and others"
    module = getattr(collector, 'module', None)
    if module and getattr(obj, '__module__', module.__name__)!=module.__name__: return []

@functools.cache
def shares(file): return any(o in file.read_text() for o in ("scope='module'", '@functools.cache', '= asking('))

@pytest.fixture(autouse=True)
def no_leak():
    "A test leaves no variables, processes or groups, and no state in a module of the package"
    before = module_state()
    with leak_check(): yield
    assert changed(before)=={}

def pytest_collection_finish(session):
    "What is imported by now stays: no garbage collection looks at it"
    gc.freeze()

def pytest_collection_modifyitems(items):
    if visible: return
    skip = pytest.mark.skip(reason='no GPU here')
    for o in items:
        if 'cuda' in o.keywords: o.add_marker(skip)

@pytest.fixture(autouse=True, scope='module')
def default_dtype():
    "A module that works in float64 leaves float32 behind"
    old = torch.get_default_dtype()
    yield
    torch.set_default_dtype(old)
