"What a newcomer gets wrong in the first hour, and what is said then"
import re,subprocess,sys,warnings

import pytest,torch
from torch import nn
from torch.utils.data import TensorDataset

from helpers import as_script
from learnerdist.all import Checkpoint,DataLoaders,EMA,Learner,SaveModelCallback,TfmdDL,is_rank0
from learnerdist.launch.processes import RankObject
from learnerdist.plan import plan
from learnerdist.testing import RanksError,run_ranks

x = torch.linspace(-3, 3, 24)[:,None]
ds = TensorDataset(x, x.sin())

def learner(*loaders, **kw):
    torch.manual_seed(1)
    loaders = loaders or (TfmdDL(ds, 8),TfmdDL(ds, 8))
    learn = Learner(DataLoaders(*loaders), **(dict(model=nn.Linear(1, 1), loss_func=nn.MSELoss()) | kw))
    learn.logger = lambda line: None
    return learn

class Number: "No number"

def say_empty(): learner(TfmdDL([], 2), TfmdDL(ds, 8)).fit(1)

def test_warnings():
    with pytest.warns(UserWarning, match='has no batch: nothing is trained') as found: say_empty()
    assert found[0].filename==__file__ # the user's line, not ours

class Graph:
    "A batch object, as of PyTorch Geometric"
    def to(self, *args, **kwargs): return self

class OnGraph(nn.Linear):
    def __init__(self): super().__init__(1, 1)
    def forward(self, g): return dict(loss=super().forward(torch.ones(1, 1)).mean())

def in_context(*args, **kw):
    with learner().distrib_ctx(*args, **kw): pass

cases = dict(
    data_set=(lambda: DataLoaders(ds, ds), ValueError, r'a TensorDataset is a data set, no loader: DataLoaders.from_dsets'),
    metric=(lambda: learner(metrics=lambda p,t: [1]).fit(1), ValueError, r'the metric <lambda> returned \[1\]: let it return a number'),
    metric_object=(lambda: learner(metrics=lambda p,t: Number()).fit(1), ValueError, 'let it return a number'),
    metric_rows=(lambda: learner(metrics=lambda p,t: p-t).fit(1), ValueError, 'let it return a number'),
    no_valid=(lambda: learner(TfmdDL(ds, 8)).validate(), IndexError, 'no loader 1 among 1: .* give `valid`'),
    no_valid_preds=(lambda: learner(TfmdDL(ds, 8)).get_preds(), IndexError, 'give `valid`'),
    no_valid_best=(lambda: learner(TfmdDL(ds, 8)).fit(1, cbs=SaveModelCallback()), ValueError, 'there is no validation data'),
    lr=(lambda: learner().fit_one_cycle(1, lr=.1), TypeError, "no option 'lr'; the rate of a fit with a schedule of its own is 'lr_max'"),
    epochs=(lambda: learner().fit(-1), ValueError, 'n_epoch=-1: give a whole number'),
    epochs_text=(lambda: learner().fit('3'), ValueError, "n_epoch='3': give a whole number"),
    epochs_part=(lambda: learner().fit(1.5), ValueError, 'n_epoch=1.5: give a whole number'),
    start=(lambda: learner().fit(1, start_epoch=-1), ValueError, 'start_epoch=-1: give a whole number'),
    cycle=(lambda: learner().fit_one_cycle('3'), ValueError, "n_epoch='3': give a whole number"),
    cycle_start=(lambda: learner().fit_one_cycle(1, .1, pct_start=2.), ValueError, 'pct_start=2.0: give a fraction'),
    lr_text=(lambda: learner(lr='0.1').fit(1), ValueError, "lr='0.1': give a number, a slice"),
    lr_below_0=(lambda: learner().fit(1, -1.), ValueError, 'lr=-1.0: give a number'),
    lr_nan=(lambda: learner().fit(1, float('nan')), ValueError, 'lr=nan: give a number'),
    lr_open=(lambda: learner(lr=slice(None)).fit(1), ValueError, 'lr=None: give a number'),
    dls=(lambda: Learner(None, nn.Linear(1, 1)), ValueError, 'dls=None: give `DataLoaders`'),
    model=(lambda: learner(model=len), ValueError, 'model=.*: give a torch.nn.Module'),
    loss=(lambda: learner(loss_func='mse'), ValueError, "loss_func='mse': give a function or a class"),
    opt=(lambda: learner(opt_func='sgd'), ValueError, "opt_func='sgd': give a function or a class"),
    metric_number=(lambda: learner(metrics=3), ValueError, 'metrics=3: give a function or a class'),
    reset=(lambda: learner().fit(1, reset_opt='no'), ValueError, "reset_opt='no': give True or False"),
    path=(lambda: learner(path=3), ValueError, 'path=3: give a folder'),
    splitter=(lambda: learner(splitter=3), ValueError, 'splitter=3: give a function or a class'),
    callback=(lambda: learner(cbs=[3]), ValueError, '3 is no callback: give a `Callback`'),
    no_loss=(lambda: learner(loss_func=lambda p,t: None).fit(1), ValueError, 'the loss is None: let loss_func return a tensor'),
    many_losses=(lambda: learner(loss_func=lambda p,t: p-t).fit(1), ValueError, r'the loss is of shape \(8, 1\): let loss_func return'),
    no_targets=(lambda: learner([Graph()]*2, model=OnGraph(), loss_func=None).fit(1), ValueError, 'Graph, has no targets'),
    shard=(lambda: in_context(shard='yes'), ValueError, "shard='yes': give True, or a dict of options"),
    batch_size=(lambda: in_context(16), ValueError, 'sync_bn=16: give True or False'),
    lbfgs=(lambda: learner(opt_func=torch.optim.LBFGS).fit(1), ValueError, 'LBFGS needs the loss several times a step'),
    huge=(lambda: in_context(global_bs=10**20), ValueError, 'global_bs=10{20}: give the number of samples in a step'),
    endless=(lambda: in_context(timeout_s=float('inf')), ValueError, 'timeout_s=inf: give seconds'),
    decay=(lambda: EMA('.9'), ValueError, "decay='.9': give a number from 0 up, and below 1"),
    evaluate=(lambda: EMA(evaluate='no'), ValueError, "evaluate='no': give True or False"),
    folder=(lambda: Checkpoint(5), ValueError, 'path=5: give a folder, or an address'),
    background=(lambda: Checkpoint('run', background='no'), ValueError, "background='no': give True or False"),
    averages=(lambda: learner().fit(1, cbs=[EMA(.9),EMA(.99)]), ValueError, '2 EMAs in one fit, of which learn.ema is the last'),
    remote=(lambda: RankObject(1).recorder, AttributeError, r'recorder: the object is on the ranks.*r.run\(lambda o: o.recorder, …\)'),
    plan=(lambda: plan(lambda: 0, 0), ValueError, 'n=0: give a number of ranks from 1 up'))

options = dict(sync_bn='no', split_batches='no', sample_seeds='no', find_unused_parameters='no', bucket_cap_mb=-1, seed=True,
               check_every=0, timeout_s=-1, checks='yes', comm_hook='x', mixed_precision='bf16', param_to_hook_all_reduce='x',
               delay_all_reduce_named_params=True)
cases |= {k: (lambda k=k, v=v: in_context(**{k: v}), ValueError, f'{k}={v!r}: give ') for k,v in options.items()}

@pytest.mark.parametrize('name', cases)
def test_errors(name):
    f,kind,messages = cases[name]
    with pytest.raises(kind, match=messages): f()

# --- on several processes ---------------------------------------------------------------------------------------------------------

def warned(f):
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        f()
    return [str(o.message) for o in ws if 'trains on the whole data' in str(o.message)]

def outside():
    learn = learner()
    fits = warned(lambda: learn.fit(1)),warned(lambda: learn.fit(1))
    with learn.distrib_ctx(): return *fits,warned(lambda: learn.fit(1))

def test_a_fit_outside_of_the_context():
    "Said once, on rank 0, and not in one process"
    assert outside()==([],[],[])
    (first,*more),other = run_ranks(outside, 2)
    assert 'each of the 2 processes of this launch' in first[0] and more==[[],[]] and other==([],[],[])

def alone_in_a_call():
    learn = learner()
    with learn.distrib_ctx():
        if is_rank0(): learn.get_preds()

def test_a_call_on_rank_0_alone():
    found = run_ranks(alone_in_a_call, 2, errors='return')[0]
    remedy = 'has this rank made it alone? Make it outside of `if rank==0`'
    assert f'in a call that all ranks have to make (fit, validate, get_preds): {remedy}' in found.message
    assert re.match(r'rank 1 has left the context \(\S+ in alone_in_a_call: with learn.distrib_ctx\(\):\), and this rank', found.message)
    assert found.where.endswith('in alone_in_a_call: if is_rank0(): learn.get_preds()') # not the line of `with`

script = """
from learnerdist.launch import run
if __name__=='__main__':
    def main(): return 1
    run(main, nproc=2)
"""

def test_main_under_the_guard(tmp_path, monkeypatch):
    "As `python guard.py`, of which each rank imports what is not under the guard"
    (tmp_path/'guard.py').write_text(script)
    with pytest.raises(RanksError) as e: as_script(tmp_path/'guard.py', monkeypatch)
    assert "without what is under `if __name__=='__main__':`: define the function above that line" in str(e.value)
    assert 'what functools.cache wraps is not sent' in str(e.value)

helped = """import sys
if {prompt}: sys.ps1 = '>>> '
from {public} import *
from {public} import Checkpoint
if 'fastai' in sys.modules: from fastai.learner import Learner
from inspect import signature
help(Checkpoint)
help(Learner.distrib_ctx)
for f in (Learner.fit,Learner.to_distributed,Learner.distrib_ctx):
    options = [k for k,p in signature(f).parameters.items() if k!='self' and p.kind!=p.VAR_KEYWORD]
    of_ddp = f.__doc__.rpartition("and DDP's")[2]
    print('said', all(f'\\n{{k}}: ' in f.__doc__ or k in of_ddp for k in options))"""

@pytest.mark.parametrize('public,prompt', [pytest.param('learnerdist.all', True, marks=pytest.mark.slow),
                                           pytest.param('learnerdist.fastai', False, marks=pytest.mark.long)]) # test_fastai.py
def test_help_says_what_parameters_mean(public, prompt):
    "Each option of a context, always; of all else at a prompt only: scripts do not wait for it"
    code = helped.format(public=public, prompt=prompt)
    messages = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout
    assert messages.count("device: This process's accelerator")==1 and 'find_unused_parameters=False' in messages, messages
    assert ('keep: How many' in messages)==prompt and messages.count('said True')==2+prompt, messages
