"Which private names of torch the installed version has, what happens without them, and which shims of older versions can go"
import ast,json,os,re,subprocess,sys
from collections import OrderedDict
from configparser import ConfigParser
from pathlib import Path
from typing import NamedTuple
import pytest,torch
from torch import nn
from learnerdist.core import compat
from learnerdist.data.rows import Samples
from learnerdist.data.rows import row_columns
from learnerdist.distributed.gather_rows import _meta

root = Path(__file__).parent.parent

def number(version): return tuple(map(int, version.split('.')[:2]))

def test_no_private_name_is_missing():
    pytest.importorskip('fastai')
    import learnerdist.fastai # noqa: F401 it adds fastai's names
    later = {'.'.join(compat.names[k][:2]) for k in compat.names if compat.torch_version<number(compat.shims.get(k, '0'))}
    gone = {k:v for k,v in compat.missing().items() if k not in later}
    assert not gone, f'torch {torch.__version__} and the others lack: ' + '; '.join(f'{k} (lost: {v})' for k,v in gone.items())

def test_what_is_missing_is_said():
    assert compat.find('tee') and compat.find('queue_callback')
    names = dict(attr=('torch.nn.parallel', 'DistributedDataParallel().no_such', 'a'), module=('torch.no_such', 'x', 'b'),
                 package=('no_such_package', 'x', 'c'), there=('torch', 'nn', 'd'))
    with pytest.MonkeyPatch.context() as m:
        m.setattr(compat, 'names', names)
        assert compat.missing() == {'torch.nn.parallel.DistributedDataParallel().no_such': 'a', 'torch.no_such.x': 'b'}
        assert compat.find('attr', 5)==5 and compat.find('module') is None and compat.find('there') is nn

def private_names(tree, ours):
    "Private attributes and imports of other packages"
    for o in ast.walk(tree):
        if isinstance(o, ast.Attribute) and re.match('_[A-Za-z]', o.attr) and o.attr not in ours: yield o.attr
        if isinstance(o, ast.ImportFrom) and not o.level and '._' in o.module: yield o.module
        if isinstance(o, ast.ImportFrom) and not o.level: yield from (a.name for a in o.names if a.name.startswith('_'))

def test_private_names_are_in_compat():
    "Of other packages; what is Python's own, or stands in a list of fastai's names, is named here"
    trees = {o: ast.parse(o.read_text()) for o in (root/'learnerdist').rglob('*.py') if o.name not in ('_modidx.py','compat.py')}
    nodes = [n for t in trees.values() for n in ast.walk(t)]
    ours = {n.name for n in nodes if isinstance(n, (ast.FunctionDef,ast.ClassDef))}
    ours |= {getattr(n, 'attr', getattr(n, 'id', '')) for n in nodes if isinstance(getattr(n, 'ctx', None), ast.Store)}
    ours |= {k.arg for n in nodes if isinstance(n, ast.Call) for k in n.keywords if k.arg} # vars(self).update(_name=…)
    pythons = {'_exit','_asdict','_replace','_fields','_make','_forkserver_pid','_forkserver','_resource_tracker','_pid'}
    found = {str(o.relative_to(root)): sorted({*private_names(t, ours)}-pythons) for o,t in trees.items()}
    assert {k:v for k,v in found.items() if v} == {}

def test_shims_are_still_needed():
    "When the lower bound of torch rises, those go that no supported version needs"
    cfg = ConfigParser(delimiters=['='])
    cfg.read(root/'settings.ini')
    oldest = re.search(r'torch>=([\d.]+)', cfg['DEFAULT']['requirements'])[1]
    assert [k for k,v in compat.shims.items() if number(v)<=number(oldest)] == []

script = """
import json,torch
from torch import nn
from learnerdist.all import DataLoaders,Learner,TfmdDL,is_rank0,num_distrib
from learnerdist.core import compat

class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    def forward(self, x):
        y = self.lin(x)
        return {'y': y, 'more': (y*2, [y+1])}

torch.manual_seed(0)
x = torch.randn(12, 4, dtype=torch.float64)
ds = [(o, o.sum(0, keepdim=True)) for o in x]
dl,bs = TfmdDL(ds, bs=4, num_workers=1, persistent_workers=True),4//max(num_distrib(), 1)
learn = Learner(DataLoaders(dl.new(bs=bs), dl.new(bs=bs)), Nested().double(), lambda p,y: ((p['y']-y)**2).mean(), torch.optim.SGD, lr=.1)
with learn.distrib_ctx():
    learn.fit(2)
    preds,_ = learn.get_preds()
weights = torch.cat([p.flatten() for p in learn.model.parameters()]).tolist()
if is_rank0(): print(json.dumps([weights, preds['more'][1][0].flatten().tolist(), learn.recorder.times[-1], len(compat.missing())]))
"""

# What Python runs at its start: no private name is found in any module
nothing_private = """
import importlib,sys
find = importlib.import_module
def import_module(name, package=None):
    if sys._getframe(1).f_globals.get('__name__')=='learnerdist.core.compat': raise ImportError(name)
    return find(name, package)
importlib.import_module = import_module
"""

def run_script(path, *how, **env):
    (path/'script.py').write_text(script)
    env = {**os.environ, 'OMP_NUM_THREADS': '1', **env}
    p = subprocess.run([sys.executable, *how, str(path/'script.py')], env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert p.returncode==0, p.stderr
    return json.loads(p.stdout.splitlines()[-1])

@pytest.mark.long
def test_a_torch_without_these_names_trains(tmp_path):
    "On two ranks of the launcher, with synchronised BatchNorm and nested predictions, as one process that has all names"
    (tmp_path/'sitecustomize.py').write_text(nothing_private)
    weights,preds,_,n = run_script(tmp_path)
    assert n==len(compat.missing())
    got,got_preds,times,n = run_script(tmp_path, '-m', 'learnerdist.launch', '--nproc', '2', PYTHONPATH=f'{tmp_path}{os.pathsep}{root}')
    assert n>15 and times['comm'] is times['step'] is None and times['total']>0
    assert got==pytest.approx(weights, abs=1e-9) and got_preds==pytest.approx(preds, abs=1e-9)

def test_fallbacks_of_trees():
    b = (1, {'x': [2, Row(3, 4)], 'y': (5,)}, [], OrderedDict(z=Samples([6, 7])))
    assert compat._leaves(b)==compat.tree_leaves(b)==[1, 2, 3, 4, 5, Samples([6, 7])]
    leaves,spec = compat._flatten(b)
    assert compat._unflatten(leaves, spec)==b and compat._map(str, b)==compat.tree_map(str, b)
    assert compat._leaves(b, is_leaf=lambda o: isinstance(o, dict))==compat.tree_leaves(b, is_leaf=lambda o: isinstance(o, dict))

class Row(NamedTuple):
    a:int
    b:int

def test_only_plain_data_travels():
    "What ranks say of the structure of their rows has nothing of torch's own classes in it"
    _,structure = _meta(*row_columns([({'x': torch.zeros(3, 2)}, [torch.zeros(3)])]))
    assert structure==({'x': 0}, [1])
