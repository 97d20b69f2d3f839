"""Write `learner.pyi`: modules below it add methods to `Learner` by `@patch`, which editors and type checkers do not follow

`python tools/stubs.py` after `nbdev-export`; `tests/test_house.py` compares."""
import ast,inspect,re
from pathlib import Path

from learnerdist import all as public
from learnerdist.core.docstrings import add_docments
from learnerdist.distributed.trainer import ddp_options

add_docments([public.Learner]) # for editors
package = Path(__file__).parent.parent/'learnerdist'
stubbed = 'learner/learner',
functions = ast.FunctionDef,ast.AsyncFunctionDef

def patched()->dict:
    "From each class to the methods that modules patch in, fastai's apart, as (module, function)"
    res = {}
    for file in sorted(package.rglob('*.py')):
        if 'fastai' in file.relative_to(package).parts or file.name=='_modidx.py': continue
        for f in ast.parse(file.read_text()).body:
            if isinstance(f, functions) and any(ast.unparse(d).startswith('patch') for d in f.decorator_list):
                res.setdefault(ast.unparse(f.args.args[0].annotation or ast.Constant(0)), []).append((file, f))
    return res

def bare(f):
    "The signature and docstring of a function"
    spelled_out(f)
    of_learner = vars(public.Learner).get(f.name)
    # a property's, or of another class: as it is written
    if inspect.isfunction(of_learner) and inspect.cleandoc(ast.get_docstring(f) or '-') in (of_learner.__doc__ or ''):
        text = of_learner.__doc__.replace(', '.join(ddp_options), ', '.join(_ddps.split()))
        f.body[0] = ast.Expr(ast.Constant(re.sub(r'\n(?=.)', '\n        ', text)))
    f.body = [o for o in f.body[:1] if ast.get_docstring(f)] or [ast.Expr(ast.Constant(...))]
    kinds = {'patch': [], 'patch(as_prop=True)': [ast.Name('property')]}
    f.decorator_list = [p for d in f.decorator_list if not ast.unparse(d).startswith('delegates') for p in kinds.get(ast.unparse(d), [d])]
    a = f.args
    pairs = [*zip([*a.posonlyargs,*a.args][::-1], a.defaults[::-1]),*zip(a.kwonlyargs, a.kw_defaults)]
    for arg,default in pairs:
        if arg.annotation and isinstance(default, ast.Constant) and default.value is None:
            arg.annotation = ast.parse(f'{ast.unparse(arg.annotation)}|None').body[0].value
    plain = lambda o: o if o is None or isinstance(o, ast.Constant) else ast.Constant(...)
    a.defaults,a.kw_defaults = [*map(plain, a.defaults)],[*map(plain, a.kw_defaults)]
    if a.args and a.args[0].arg=='self': a.args[0].annotation = None
    return f

def attributes(cls):
    "Names that a class assigns, and its methods to `self`"
    stores = [o for f in cls.body for o in ast.walk(f) if isinstance(getattr(o, 'ctx', None), ast.Store)]
    top = {id(o) for f in cls.body if isinstance(f, ast.Assign) for o in ast.walk(f)}
    names = [o.attr for o in stores if isinstance(o, ast.Attribute) and ast.unparse(o.value)=='self' and o.attr[0]!='_']
    names += [o.id for o in stores if isinstance(o, ast.Name) and id(o) in top]
    return [o for o in dict.fromkeys(names) if all(getattr(f, 'name', '')!=o for f in cls.body)]

_callbacks = dict(Learner='recorder progress train_eval distributed_trainer timer') # Attributes that callbacks of this package are
_ddps = 'bucket_cap_mb find_unused_parameters gradient_as_bucket_view static_graph broadcast_buffers mixed_precision' # in any torch

def spelled_out(f):
    "A function that delegates options has them in its signature; those of DDP that every torch has"
    if not any(ast.unparse(d).startswith('delegates') for d in f.decorator_list): return f
    known,a = {o.arg for o in [*f.args.args,*f.args.kwonlyargs]},f.args
    for k,p in inspect.signature(getattr(public.Learner, f.name)).parameters.items():
        of_torch = k in ddp_options and k not in _ddps.split()
        if k in known or of_torch or p.kind==p.VAR_KEYWORD: continue
        a.kwonlyargs.append(ast.arg(k, ast.Name('Any')))
        a.kw_defaults.append(ast.Constant(...))
    return f

def bare_class(cls, more):
    "A class without code, with these methods too"
    names = [*attributes(cls),*_callbacks.get(cls.name, '').split()]
    own = ast.parse(''.join(f'{o}:Any\n' for o in names)).body
    shown = [o for o in [*cls.body,*more] if not isinstance(o, ast.Assign) and not re.match('_[a-z]', getattr(o, 'name', ''))]
    kept = [bare(o) if isinstance(o, functions) else o for o in shown]
    cls.body = [kept[0],*own,*kept[1:]]
    return cls

def imports_for(used, files):
    "Absolute imports of these names, as the modules that use them have them"
    for file in files:
        for o in ast.parse(file.read_text()).body:
            if not isinstance(o, ast.ImportFrom): continue
            names = [a for a in o.names if (a.asname or a.name) in used]
            base = ['learnerdist',*file.relative_to(package).with_suffix('').parts][:-o.level or None] if o.level else []
            if names: yield ast.unparse(ast.ImportFrom('.'.join([*base,*[o.module]*bool(o.module)]), names, 0))

def bare_statement(o, added):
    "What stands in a stub for a statement of a module; None: nothing"
    if isinstance(o, ast.ClassDef): return bare_class(o, [f for _,f in added.get(o.name, []) if not f.name.startswith('_')])
    if isinstance(o, functions): return None if o.decorator_list or o.name.startswith('_') else bare(o)
    if isinstance(o, ast.Assign) and isinstance(o.targets[0], ast.Name): return ast.parse(f'{o.targets[0].id}:Any')

def stub(name)->str:
    "The text of a module's `.pyi`"
    file,added = package/f'{name}.py',patched()
    tree = ast.parse(file.read_text()).body
    sources = dict.fromkeys([file,*[f for o in tree if isinstance(o, ast.ClassDef) for f,_ in added.get(o.name, [])]])
    text = '\n\n'.join(ast.unparse(s) for o in tree if (s := bare_statement(o, added)))
    used = {o.id for o in ast.walk(ast.parse(text)) if isinstance(o, ast.Name) and not re.search(rf'^(class )?{o.id}\b', text, re.M)}
    lines = ['from typing import Any',*['import torch']*('torch' in used),*imports_for(used-{'Any','torch'}, sources)]
    return '\n'.join(['# Made by tools/stubs.py from the modules: do not edit',*dict.fromkeys(lines)])+f'\n\n{text}\n'

if __name__=='__main__':
    for o in stubbed: (package/f'{o}.pyi').write_text(stub(o))
