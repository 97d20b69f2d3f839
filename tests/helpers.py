"What several files train on, how they start a launcher, a server of files, and the code on a page of the docs"
import gc,os,random,re,select,signal,socket,subprocess,sys,tempfile,threading,traceback
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from gpus import hidden
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from learnerdist.all import Callback, group_rank, group_size
from learnerdist.launch import main
from learnerdist.launch.cli import get_parser
from learnerdist.launch.forkserver import Process
from learnerdist.launch.processes import server
from learnerdist.learner.callback import inner_events

def data(n=48, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 4, generator=g, dtype=torch.double),
                         torch.randn(n, 2, generator=g, dtype=torch.double))

def net(n_in=4, n_out=2, seed=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out)).double()

def size(): return 12//group_size() # a global batch of 12
def sgd(ps, lr): return torch.optim.SGD(ps, lr=.05, momentum=.9)
def weights(learn): return torch.cat([p.detach().reshape(-1) for p in learn.model.parameters()])

def fail(): raise ZeroDivisionError('on purpose')
def kill(num=signal.SIGTERM): os.kill(os.getpid(), num)

class At(Callback):
    "Does something after a batch of training, or of validation: the one at this step of the fit"
    order = 950
    def __init__(self, step, act=fail, training=True): self.step,self.act,self.when = step,act,training
    def after_batch(self):
        if self.train_iter==self.step and self.training==self.when: self.act()

class Raise(Callback):
    "Raise `exc` in `event`, the `at`-th time that it comes, on `rank` only; None: on all"
    def __init__(self, event, exc, rank=None, at=0, order=None, run_valid=True):
        self.exc,self.rank,self.at,self.seen,self.run_valid = exc,rank,at,0,run_valid
        # what comes later in the event that raises is not told: outside of batches let the recorder be first
        default = 70 if event not in inner_events else 20
        self.order = default if order is None else order
        setattr(self, event, self.act)
    def act(self):
        self.seen += 1
        if self.rank in (None,group_rank()) and self.seen==self.at+1: raise self.exc

class Stream(IterableDataset):
    "Knows no length"
    def __init__(self, items): self.items = items
    def __iter__(self): return iter(self.items)

class Of(nn.Module):
    "A model of one function, of itself and of the inputs, around layers"
    def __init__(self, func, **layers):
        super().__init__()
        self.func = func
        for k,m in layers.items(): setattr(self, k, m)
    def forward(self, *xs): return self.func(self, *xs)

class OneFloat(nn.Module):
    "A loss in float32, which fastai's Recorder asks for; its gradients are in float64 all the same"
    def __init__(self, func):
        super().__init__()
        self.func = func
        if hasattr(func, 'n_items'): self.n_items = func.n_items
    def forward(self, *args): return self.func(*args).float()

def flat(o): return [v for i in o for v in flat(i)] if isinstance(o, list) else [o]
def blocks(path): return re.findall(r'^```python\n(.*?)^```', path.read_text(), re.M|re.S)

@contextmanager
def serve(folder):
    "A server of `folder` on a port that is free; yields its address and, as they come, the files that are fetched"
    fetched = []
    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args): super().__init__(*args, directory=folder)
        def log_message(self, *args):
            probe = self.headers.get('Method')=='HEAD' # so torchvision asks first where a redirection leads
            if not probe: fetched.append(self.path.strip('/'))
    with ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try: yield f'http://127.0.0.1:{server.server_port}/',fetched
        finally:
            server.shutdown()
            thread.join()

root = Path(__file__).parent.parent
launcher = sys.executable,'-m','learnerdist.launch'

def environment(**kw):
    "Of a process that no launcher has started"
    drop = 'PYTHONHASHSEED CUDA_VISIBLE_DEVICES OMP_NUM_THREADS RANK WORLD_SIZE LOCAL_RANK MASTER_PORT LEARNERDIST_MEMORY'.split()
    return {k:v for k,v in os.environ.items() if k not in drop} | hidden | dict(PYTHONPATH=str(root)) | kw

class Fork:
    """A process that calls a function: a fork of this one, which has imported torch. So the launcher starts without the 3 s of CPU
    of a new interpreter"""
    def __init__(self, func, *args, env=None, cwd=None, outs=(), begin=int):
        "env: its environment; outs: descriptors in place of files for what it prints; begin: what it calls first"
        self.files = [] if outs else [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
        self.args = func,args,env or environment(),cwd
        self.pid = os.fork()
        if not self.pid: self._run(begin, outs or [0,*[o.fileno() for o in self.files]])
        self.proc = Process(self.pid)

    def _run(self, begin, outs):
        status = 1
        func,args,env,cwd = self.args
        try:
            gc.freeze()
            for i,o in enumerate(outs): os.dup2(o, i)
            sys.stdin,sys.stdout,sys.stderr = [open(i, 'rw'[i>0], closefd=False) for i in range(3)]
            server.__init__() # that of the parent's ranks is not this process's child
            begin()
            os.environ.clear()
            os.environ.update(dict(TORCH_CPP_LOG_LEVEL='ERROR') | env) # as the command does
            if cwd: os.chdir(cwd)
            status = func(*args) or 0
        except SystemExit as e: status = e.code or 0
        except BaseException: traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)

    def poll(self): return self.proc.poll()
    def kill(self): self.send_signal(signal.SIGKILL)
    def send_signal(self, sig):
        if self.poll() is None: os.kill(self.pid, sig)

    def wait(self, timeout=120):
        if self.poll() is None and not connection.wait([self.proc.sentinel], timeout): self.kill()
        return self.proc.wait()

    def result(self, timeout=120):
        "Once it has ended: exit status, and what was printed"
        status = self.wait(timeout)
        texts = []
        for o in self.files:
            o.seek(0)
            texts.append(o.read().decode())
            o.close()
        return subprocess.CompletedProcess(self.args, status, *texts)

def start(*args, **kw):
    "The launcher, with these arguments; see `Fork`"
    return Fork(main, [*map(str, args)], **kw)

def shutdown_in(seconds):
    "The option of the launcher, where this torch has it (2.12): else ranks that do not end are killed after 30 s"
    has_option = hasattr(get_parser().parse_args(['x.py']), 'shutdown_timeout')
    return ['--shutdown-timeout',seconds] if has_option else []

def launch(*args, env=None, cwd=None):
    "What the launcher comes to: `returncode`, `stdout`, `stderr`"
    return start(*args, env=environment(**(env or {})), cwd=cwd).result(600)

def as_script(file, monkeypatch):
    "What `python file` does, in this process: ranks that it starts import the file, but for what its guard keeps from them"
    main = ModuleType('__main__')
    main.__file__ = str(file)
    monkeypatch.setitem(sys.modules, '__main__', main)
    exec(compile(file.read_text(), file, 'exec'), vars(main))

def write(folder, text, name='train.py'):
    (folder/name).parent.mkdir(parents=True, exist_ok=True)
    (folder/name).write_text(text)
    return folder/name

class Waiting:
    "A launcher whose ranks write lines to a FIFO, the first argument of their script, and wait"
    def __init__(self, folder, text, *options, args=(), **kw):
        folder.mkdir(exist_ok=True)
        fifo = folder/'fifo'
        os.mkfifo(fifo)
        self.pipe = open(os.open(fifo, os.O_RDWR), 'rb', buffering=0)
        self.proc = start(*options, write(folder, text), fifo, *args, **kw)

    def lines(self, n):
        "The next `n`, in words"
        text = b''
        while text.count(b'\n')<n:
            ready,*_ = select.select([self.pipe,self.proc.proc.sentinel], [], [], 120)
            assert self.pipe in ready, f'ended, or silent for 120 s. {self.proc.result(0).stderr}'
            text += self.pipe.read(99)
        return [o.split() for o in text.decode().splitlines()]

def free_port():
    "Outside of the range from which the system takes ports for connections"
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as s:
            if s.connect_ex(('127.0.0.1', port)): return port
