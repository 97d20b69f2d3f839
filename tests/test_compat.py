"Which private names of torch the installed version has, and which of them, and of the shims of older versions, can go"
import ast,re
from configparser import ConfigParser
from pathlib import Path
import pytest,torch
from learnerdist.core import compat

root = Path(__file__).parent.parent

def number(version): return tuple(map(int, version.split('.')[:2]))

def test_no_private_name_is_missing():
    pytest.importorskip('fastai')
    import learnerdist.fastai # noqa: F401 it adds fastai's names
    later = {'.'.join(compat.names[k][:2]) for k in compat.names if compat.torch_version<number(compat.shims.get(k, '0'))}
    gone = {k:v for k,v in compat.missing().items() if k not in later}
    assert not gone, f'torch {torch.__version__} and the others lack: ' + '; '.join(f'{k} (lost: {v})' for k,v in gone.items())

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
    pythons = {'_exit','_current_frames','_asdict','_replace','_fields','_make','_forkserver_pid','_forkserver','_resource_tracker','_pid'}
    found = {str(o.relative_to(root)): sorted({*private_names(t, ours)}-pythons) for o,t in trees.items()}
    assert {k:v for k,v in found.items() if v} == {}

def test_shims_are_still_needed():
    "When the lower bound of torch rises, those go that no supported version needs"
    cfg = ConfigParser(delimiters=['='])
    cfg.read(root/'settings.ini')
    oldest = re.search(r'torch>=([\d.]+)', cfg['DEFAULT']['requirements'])[1]
    assert [k for k,v in compat.shims.items() if number(v)<=number(oldest)] == []
