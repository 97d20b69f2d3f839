"What several files train on, a server of files, and the code on a page of the docs"
import re,threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from learnerdist.all import group_size

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

class Stream(IterableDataset):
    "Knows no length"
    def __init__(self, items): self.items = items
    def __iter__(self): return iter(self.items)

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
