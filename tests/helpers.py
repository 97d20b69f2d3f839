"What several files train on, how they start a launcher, a server of files, and the code on a page of the docs"
import os,random,re,signal,socket,subprocess,sys,threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from learnerdist.all import Callback, group_rank, group_size
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
    return {k:v for k,v in os.environ.items() if k not in drop} | dict(PYTHONPATH=str(root)) | kw

def launch(*args, env=None, cwd=None, command=launcher):
    return subprocess.run([*command, *map(str, args)], env=environment(**(env or {})), cwd=cwd, capture_output=True, text=True, timeout=600)

def write(folder, text, name='train.py'):
    (folder/name).parent.mkdir(parents=True, exist_ok=True)
    (folder/name).write_text(text)
    return folder/name

def free_port():
    "Outside of the range from which the system takes ports for connections"
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as s:
            if s.connect_ex(('127.0.0.1', port)): return port
