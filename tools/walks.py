"How many of the package's functions run for a step, and for a fit's first sample, on 2 ranks: `python tools/walks.py`"
import sys
from collections import Counter

import torch
from torch import nn
from torch.utils.data import DataLoader,Dataset

from learnerdist.all import Callback,DataLoaders,Learner
from learnerdist.testing import run_ranks

class Calls:
    "Counts calls of the package's functions, by file and name"
    def __init__(self): self.n = Counter()
    def __call__(self, frame, event, arg):
        code = frame.f_code
        if event=='call' and '/learnerdist/' in code.co_filename and not code.co_filename.endswith('testing.py'):
            self.n[code.co_filename.rpartition('/learnerdist/')[2],code.co_name] += 1
    def __enter__(self):
        sys.setprofile(self)
        return self
    def __exit__(self, *_): sys.setprofile(None)
    def figures(self): return sum(self.n.values()),len({*self.n}),len({file for file,_ in self.n}),sorted(self.n.items())

class Rows(Dataset):
    "Rows with labels; stops counting at the first that is read"
    calls,figures = None,None
    def __len__(self): return 64
    def __getitem__(self, i):
        if self.calls is not None and self.figures is None:
            self.calls.__exit__()
            self.figures = self.calls.figures()
        return torch.full((3,), float(i)),i%2

class Step(Callback):
    "Counts from the end of a training loop's second batch to the end of its third"
    order,calls,figures = 10000,None,None
    def after_batch(self):
        if self.calls is not None and self.figures is None:
            self.calls.__exit__()
            self.figures = self.calls.figures()
        if self.training and self.iter==1: self.calls = Calls().__enter__()

def walk(what):
    "The figures of rank 0: calls, functions, modules, and the calls of each function"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows,step = Rows(),Step()
    dls = DataLoaders(DataLoader(rows, 8, shuffle=True))
    learn = Learner(dls, nn.Linear(3, 2), nn.CrossEntropyLoss(), cbs=step if what=='step' else None)
    with learn.distrib_ctx(), learn.no_logging():
        if what=='index': rows.calls = Calls().__enter__()
        learn.fit(1)
    return (step if what=='step' else rows).figures

walks = dict(step='a step', index='a fit until its first sample')

if __name__=='__main__':
    for what,name in walks.items():
        calls,functions,files,each = run_ranks(walk, 2, what)[0]
        print(f'{name} on 2 ranks: {calls} calls of {functions} functions in {files} modules')
        if '-v' in sys.argv: print(*(f'  {n:4} {file}: {f}' for (file,f),n in each), sep='\n')
