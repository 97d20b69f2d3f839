"The page of messages: the code of an entry leads to its message before, and to none after; the command that prints it; the last count"
import os,random,re,subprocess,sys,time,warnings
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
import numpy as np,pytest,torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader,IterableDataset,Sampler,Subset,TensorDataset,get_worker_info
from learnerdist import all as ours,command
from learnerdist.all import Callback,DataLoaders,Learner
from learnerdist.command import entries,main
from learnerdist.testing import run_ranks

root = Path(__file__).parent.parent
page = (root/'docs/messages.md').read_text()
shown = ['not-uploaded','micro-batches','repeated-samples'] # They need a network or a memory that fails, or a loader of another library
names = dict(vars(ours), np=np, torch=torch, nn=nn, F=F, random=random, time=time, Path=Path, islice=islice, Sampler=Sampler,
             DataLoader=DataLoader, IterableDataset=IterableDataset, get_worker_info=get_worker_info)

def examples():
    "From each code to its lines before and after"
    for code,text in re.findall(r'^## `([\w-]+)`\n(.*?)^```\n', page, re.M|re.S):
        before,after = text.partition('```python\n# before\n')[2].split('# after\n')
        yield code,before,after

class Numbers(IterableDataset):
    "Samples, dealt out among workers"
    def __iter__(self):
        info = get_worker_info()
        return islice(samples, info.id, None, info.num_workers)

samples = [(torch.randn(4, generator=torch.Generator().manual_seed(i)),i%3) for i in range(21)]

def codes_of(code, text, path):
    "The codes of the messages that an example leads to, and their texts"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.ReLU(), nn.Linear(8, 3))
            self.register_buffer('seen', torch.zeros(4))
            self.h = torch.zeros(4)
        def forward(self, x): return self.layers(x)
    for seed in (torch.manual_seed,random.seed,np.random.seed): seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.arange(24)%3)
    learn = Learner(DataLoaders.from_dsets(data, data, bs=4), Net(), nn.CrossEntropyLoss(), path=path)
    made = dict(names, learn=learn, model=learn.model, stream=Numbers(), items=samples)
    given = {*made}
    with warnings.catch_warnings(record=True) as found, learn.no_logging():
        warnings.simplefilter('always')
        try:
            exec(text, made)
            made = {k: v for k,v in made.items() if k not in given}
            opts = dict(global_bs=8, max_bs=2) if code=='batchnorm-parts' else {}
            if 'fit(' not in text: fit(made, learn, Net, data, opts)
        except (ValueError,RuntimeError) as e: found.append(SimpleNamespace(message=e))
    texts = [str(o.message)[:400] for o in found]
    return {o for text in texts for o in re.findall(r'^\[([a-z-]+)\]', text)},texts

def fit(made, learn, Net, data, opts):
    "A fit with what an example has defined"
    if 'forward' in made: Net.forward = made['forward']
    learn.loss_func = made.get('loss_func', learn.loss_func)
    train = made.get('train')
    if 'rows' in made: train = DataLoader(Subset(data, made['rows'].tolist()), 4)
    if 'Shuffled' in made: train = DataLoader(data, 4, sampler=made['Shuffled']())
    if 'Stream' in made: train = DataLoader(made['Stream'](), 4, num_workers=2)
    if train is not None: learn.dls = DataLoaders(train, learn.dls[1])
    learn.add_cb(type('Example', (Callback,), {k: v for k,v in made.items() if k.startswith(('before_','after_'))})())
    with learn.distrib_ctx(**opts): learn.fit(1)

def all_examples(path):
    "What each rank hears, by code: before, after"
    return {k: [codes_of(k, o, path) for o in (before,after)] for k,before,after in examples() if k not in shown}

@pytest.mark.long
def test_examples(tmp_path):
    first,second = run_ranks(all_examples, 2, tmp_path, timeout_s=240)
    for k,(before,after) in first.items():
        assert k in before[0]|second[k][0][0] and not after[0]|second[k][1][0], (k,before,after,second[k])

def test_each_entry_is_short():
    found = [*examples()]
    assert len(found)==page.count('\n## ')-1 and all(1<=len(o.splitlines())<=4 for _,*both in found for o in both)

def test_explain(capsys):
    assert main(['explain','[loss-not-mean]'])==0
    out = capsys.readouterr().out
    assert out.startswith('[loss-not-mean]\nWe split a batch') and '](' not in out
    assert '    loss_func.n_items = lambda p, t: W[t].sum()' in out
    assert main(['explain'])==0 and {*entries()}=={o.split()[0] for o in capsys.readouterr().out.splitlines()}
    remedies = {('explain','loss-mean'): 'mean loss-not-mean', ('explain','x y'): 'lists the codes', ('doktor',): 'you mean doctor'}
    for args,words in remedies.items(): assert main(args)==2 and words in capsys.readouterr().err

counting = """
import sys,warnings
from learnerdist.core.stacks import warn
if 'quiet' in sys.argv: warnings.filterwarnings('ignore')
for o in ('loss-not-mean','repeated-samples','loss-not-mean'): warn(o, 'Text')
"""

@pytest.mark.parametrize('args,env,counts', [([],{},True), ([],dict(RANK='1'),False), (['quiet'],{},False)])
def test_the_end_counts_warnings(args, env, counts, tmp_path):
    (tmp_path/'a.py').write_text(counting)
    env = os.environ|dict(PYTHONPATH=str(root))|env
    p = subprocess.run([sys.executable,'a.py',*args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    lines = p.stderr.splitlines()
    assert lines[-1:]==['2 warnings: loss-not-mean, repeated-samples']*counts if counts else 'warnings:' not in p.stderr, p.stderr

def test_doctor(capsys, monkeypatch):
    "A check that fails is a line of the block, and the exit status"
    monkeypatch.setattr(command, '_checks', {k: v for k,v in command._checks.items() if k!='hello'}) # ranks start in other tests
    assert main(['doctor'])==0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1]=='```text' and lines[-1]=='```' and f'torch {torch.__version__.split("+")[0]}' in lines[2]
    monkeypatch.setattr(os, 'access', lambda path, mode: path!='/dev/shm')
    assert main(['doctor'])==1 and '/dev/shm   FAILED: PermissionError: /dev/shm cannot be written' in capsys.readouterr().out

@pytest.mark.long
def test_doctor_starts_ranks(): assert command.hello().startswith('2 ranks have added up')
