"""'As one process': what functions and scenes give on W ranks beside what they give on one, and that they leave nothing behind

A training that is data (a model, data, a loss, options, callbacks) is a line in the table of scenes.py. `asking(f, g)` is a fixture for
what is more than that: it starts the ranks of a file once for each number of them. `close` compares what comes back."""
import functools, sys, traceback, warnings
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary
import pytest, torch
from fastcore.foundation import L
from torch import Tensor
from learnerdist.core.compat import fsdp_on_cpu
from learnerdist.core.env import group_rank, group_size, num_distrib, process_group, rank_distrib, shared_store
from learnerdist.testing import run_ranks

needs_fsdp2 = pytest.mark.skipif(not fsdp_on_cpu, reason='a torch without FSDP2 on the CPU')
def newer_torch(why): return pytest.mark.skipif(torch.__version__<'2.7', reason=f'torch 2.6: {why}')
# What 2 ranks show is shown by 3 before a release
on_2_and_3 = pytest.mark.parametrize('W', [2, pytest.param(3, marks=pytest.mark.long)])

class Failed(str): "A traceback, or what was left behind"

def close(a, b, tol=1e-9, at=''):
    "Equal in structure, and in numbers up to `tol`, absolute or relative; 0: bit by bit, in the same dtype. `at` says where, if not"
    for o in (a, b): assert not isinstance(o, Failed), o
    if isinstance(b, L): a,b = [*a],[*b] # fastai's lists
    if isinstance(b, dict):
        assert list(a)==list(b), f'{at}: {list(a)}, {list(b)}'
        for k in b: close(a[k], b[k], tol, f'{at}.{k}')
    elif isinstance(b, (list,tuple)) and not all(isinstance(o, (int,float)) for o in b):
        assert len(a)==len(b), f'{at}: {len(a)}, {len(b)}'
        for i,o in enumerate(zip(a, b)): close(*o, tol, f'{at}[{i}]')
    elif isinstance(b, (Tensor,int,float,list,tuple)):
        if tol==0: assert getattr(a, 'dtype', None)==getattr(b, 'dtype', None), f'{at}: {a}, {b}'
        x,y = (torch.as_tensor(o, dtype=torch.complex128, device='cpu') for o in (a, b))
        torch.testing.assert_close(x, y, atol=tol, rtol=tol, equal_nan=True, msg=lambda m: f'{at}: {m}')
    else: assert a==b, f'{at}: {a!r}, {b!r}'

@contextmanager
def all_warnings():
    "Those of a block, also what was warned of before"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        yield found

# --- nothing is left ------------------------------------------------------------------------------------------------------

plain = {int,float,str,bytes,list,dict,set,type(None)}
_kept = {} # From a module or a class to how many names it has, and which of them `_values` reads: tests ask for them 3,000 times

def _is_kept(owner, k, v):
    kind = type(v)
    if isinstance(v, type): return not isinstance(owner, type) and v.__module__==owner.__name__
    return kind in plain and not k.startswith('__') or kind in (ContextVar,WeakKeyDictionary)

def _values(name, owner):
    "(name, value) of what a module or a class holds that may change"
    held = vars(owner)
    n,names = _kept.get(owner, (0, ()))
    if n!=len(held):
        names = [k for k,v in held.items() if _is_kept(owner, k, v)]
        _kept[owner] = len(held),names
    for k in names:
        v = held.get(k)
        kind = type(v)
        if isinstance(v, type): yield from _values(f'{name}.{k}', v)
        elif kind is ContextVar: yield f'{name}.{k}',repr(v.get(None))
        elif kind is WeakKeyDictionary: yield f'{name}.{k}',len(v)
        else: yield f'{name}.{k}',repr(v)

# Counts that name keys of the store, the first use of the accelerator, and what has been said, are of a process; modules register names
# when they are imported
of_process = {f'learnerdist.{o}' for o in (
    'core.env._counts','core.env._first_use','core.stacks._warned','core.compat.names','learner.learner.fit_flags',
    'learner.saving.in_folders','distributed.engine.context_callbacks')}

@functools.lru_cache(1)
def _ours(n):
    "The names of the package's modules, among the `n` that there are: thousands"
    return [o for o in list(sys.modules) if o.startswith('learnerdist')]

def module_state():
    "What the modules of the package and their classes hold"
    res = {k: v for name in _ours(len(sys.modules)) for k,v in _values(name, sys.modules[name])}
    return {k: v for k,v in res.items() if k not in of_process}

def changed(before):
    "What modules hold now that is not as it was: before and after"
    after = module_state()
    return {k: (v, after.get(k)) for k,v in before.items() if after.get(k)!=v}

# --- functions on ranks ---------------------------------------------------------------------------------------------------

def caught(f, *args, **kw):
    "What `f` returns; `Failed` with its traceback, or if it leaves something behind in a module of the package"
    before = module_state()
    try: res = f(*args, **kw)
    except Exception: return Failed(traceback.format_exc())
    left = changed(before)
    return Failed(f'left in modules, before and after: {left}') if left else res

def error_of(f, *args, **kw):
    "'KeyError: why', which `f` raises; '' without an error"
    try: f(*args, **kw)
    except Exception as e: return f'{type(e).__name__}: {e}'
    return ''

def in_group(f, *args, **kw):
    "What `f` returns in a group of all ranks, or in one process"
    with process_group(): return f(*args, **kw)

def on_ranks(func, *args):
    "What `func(W, rank, *args)` returns on this rank"
    with process_group(): return func(group_size(), group_rank(), *args)

def alone_on_ranks(func, *args):
    "With RANK and WORLD_SIZE set; the function opens the group, if it wants one"
    return func(num_distrib(), rank_distrib(), *args)

def each_of(kinds, path):
    "What functions return on this rank, by their names; an error of one leaves the others"
    shared_store() # of the launch: it stays
    return {f.__name__: caught(call, f, path) for call,funcs in kinds.items() for f in funcs}

def asking(*funcs, alone=(), prepare=lambda path: None, env=None):
    """A fixture, `found(func, W)`: what each of `funcs(W, rank, path)` returns on the ranks of `W` processes, which are started once for
    all of them; on 0 processes, without a context. `alone` are functions that open their own group; `prepare(path)` comes before all;
    `env` is of the ranks. A file has one fixture, and another one for its slow tests, which are not always asked for"""
    @pytest.fixture(scope='module')
    def found(tmp_path_factory):
        path = tmp_path_factory.mktemp('found')
        prepare(path)
        of_ranks = functools.cache(lambda W: run_ranks(each_of, W, {on_ranks: funcs, alone_on_ranks: alone}, path, timeout_s=500, env=env))
        of_one = functools.cache(lambda func, W: func(W, 0, path))
        def found(func, W):
            res = [of_one(func, W)] if W<2 else [o[func.__name__] for o in of_ranks(W)]
            for o in res: assert not isinstance(o, Failed), o
            return res
        found.path = path
        return found
    return found
