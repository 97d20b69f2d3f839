"The rules of CONTRIBUTING.md that a program can check; its table of modules is read from there"
import ast,io,re,subprocess,sys,tokenize
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path

import pytest

from learnerdist.learner.callback import all_events

root = Path(__file__).parent.parent
package = root/'learnerdist'
rows = re.findall(r'^\| `([\w/]+)` \| `([\w/]+)\.py` \|', (root/'CONTRIBUTING.md').read_text(), re.M)
modules = [module.replace('/', '.') for _,module in rows]
sources = {o: (package/f'{o.replace(".", "/")}.py').read_text() for o in modules}
trees = {o: ast.parse(s) for o,s in sources.items()}
functions = ast.FunctionDef,ast.AsyncFunctionDef
kinds = type(lambda: 0),property,classmethod

def imports(tree, at):
    "Modules of ours that the module `at` imports, wherever in it; a folder stands for what its `__init__` hands on"
    for o in ast.walk(tree):
        if isinstance(o, ast.Import): names = [a.name for a in o.names]
        elif not isinstance(o, ast.ImportFrom): continue
        else:
            base = '.'.join(['learnerdist',*at.split('.')][:-o.level] + ([o.module] if o.module else [])) if o.level else o.module
            names = [f'{base}.{a.name}' if f'{base}.{a.name}'.removeprefix('learnerdist.') in modules else base for a in o.names]
        yield from (n.partition('.')[2] for n in names if n.startswith('learnerdist.'))

def per_module(find):
    "What `find` finds in each module, for those where it finds something"
    return {o: found for o in modules if (found := [*find(o)])}

def loaded(statement, *names):
    "Which of these modules a fresh interpreter has loaded after `statement`"
    code = f'import sys\n{statement}\nprint(*(o for o in {names} if o in sys.modules))'
    return subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True, check=True).stdout.split()

def test_table_names_every_module_and_notebook():
    by_hand = {'__init__','__main__','all','_modidx'}
    assert {'.'.join(o.relative_to(package).with_suffix('').parts) for o in package.rglob('*.py') if o.stem not in by_hand} == {*modules}
    found = [o.relative_to(root/'nbs').with_suffix('') for o in (root/'nbs').rglob('[0-9]*.ipynb') if '.ipynb_checkpoints' not in o.parts]
    assert {str(o) for o in found} == {nb for nb,_ in rows}
    assert all(re.sub(r'\d\d_', '', nb)==module for nb,module in rows)

def test_imports_only_modules_above():
    above = lambda o: {*modules[:modules.index(o)]}
    if_not_above = lambda o: {*imports(trees[o], o)} - above(o)
    assert per_module(if_not_above) == {}

def test_folders_keep_apart():
    launch = {o: {*imports(trees[o], o)} for o in modules if o.startswith('launch.')}
    assert {o for found in launch.values() for o in found if o.split('.')[0] not in ('core','launch')} == set()
    whole = lambda n: not getattr(n, 'level', 0) and (getattr(n, 'module', None) or n.names[0].name)
    nodes = {o: [n for n in ast.walk(t) if isinstance(n, (ast.Import,ast.ImportFrom))] for o,t in trees.items()}
    fastais = per_module(lambda o: [n for n in nodes[o] if 'fastai' in (whole(n) or '')])
    assert [o for o in fastais if not o.startswith('fastai.')] == []

def handed_on(file):
    "The names that a module written by hand imports, and those of its `__all__`"
    tree = ast.parse((package/file).read_text())
    names = [a.asname or a.name for o in tree.body if isinstance(o, ast.ImportFrom) for a in o.names]
    listed = next((ast.literal_eval(o.value) for o in tree.body if isinstance(o, ast.Assign) and o.targets[0].id=='__all__'), [])
    return sorted(names),sorted(listed)

def test_public_names():
    "What scripts get by a star import is what is listed, and no more; each has a docstring"
    import learnerdist.all as public
    for file in ('all.py','distributed/__init__.py','launch/__init__.py','fastai/__init__.py'):
        names,listed = handed_on(file)
        assert names==listed and len({*listed})==len(listed)
    assert len(public.__all__)<=85
    assert [o for o in public.__all__ if not getattr(public, o).__doc__ and o!='preempted_status'] == []

def test_modules_list_what_is_public():
    "What a star import of one module hands out is public; all else is reached by name"
    files = 'all.py','distributed/__init__.py','launch/__init__.py','fastai/__init__.py'
    public = {o for file in files for o in handed_on(file)[1]}
    of_their_own = dict(testing={'run_ranks','leak_check','RanksError','RankFailure'}, # imported as modules
                        verify={'verify','Verdict','Difference','NoRun'})
    listed = lambda o: next(ast.literal_eval(n.value) for n in trees[o].body if isinstance(n, ast.Assign) and n.targets[0].id=='__all__')
    assert per_module(lambda o: {*listed(o)}-public-of_their_own.get(o, set())) == {}

def tool(name, monkeypatch):
    monkeypatch.syspath_prepend(str(root/'tools'))
    return import_module(name)

def test_list_of_public_names_is_current(monkeypatch):
    assert (root/'docs/names.md').read_text()==tool('names', monkeypatch).table(), 'run python tools/names.py'

def test_stubs_are_current(monkeypatch):
    "What editors and type checkers read in place of a module: python tools/stubs.py writes it"
    stubs = tool('stubs', monkeypatch)
    for o in stubs.stubbed: assert (package/f'{o}.pyi').read_text()==stubs.stub(o), f'{o}.pyi: run python tools/stubs.py'

def test_stubs_have_every_public_method():
    "Also those that modules patch in"
    import learnerdist.all as public
    for cls in (public.Learner,public.Recorder):
        tree = ast.parse((package/f'{cls.__module__.partition(".")[2].replace(".", "/")}.pyi').read_text())
        stub = next(o for o in tree.body if isinstance(o, ast.ClassDef) and o.name==cls.__name__)
        found = {getattr(o, 'name', '') or o.target.id for o in stub.body if isinstance(o, (*functions,ast.AnnAssign))}
        assert {o for o in vars(cls) if not o.startswith('_')} <= found
        assert 'distrib_ctx' in found or cls is not public.Learner

def test_package_imports_nothing_heavy():
    assert loaded('import learnerdist', 'torch', 'numpy', 'fastcore') == []

def test_all_imports_nothing_that_is_needed_only_sometimes():
    never = ('torchvision','matplotlib','tensorboard','torch.utils.tensorboard','torch._dynamo','triton','fastai','fastprogress','sklearn',
             'pandas','IPython')
    assert loaded('import learnerdist.all', 'torch', *never) == ['torch']

def test_no_private_names_across_modules(monkeypatch):
    "What another module needs has a public name in the module that owns it"
    assert per_module(lambda o: tool('figures', monkeypatch).foreign_underscores(trees[o])) == {}

def test_columns():
    "Lines of the package have up to 120 columns, and no semicolons"
    written = lambda o: [l for l in sources[o].splitlines() if not l.startswith(('# %%','__all__'))] # those are the exporter's
    assert per_module(lambda o: [l for l in written(o) if len(l)>120]) == {}
    assert per_module(lambda o: [t.start for t in tokenize.generate_tokens(io.StringIO(sources[o]).readline) if t.string==';']) == {}

def public_functions(o):
    "A module's functions and its classes' methods, but for those with an underscore or that answer an event: (class, name, node)"
    for n in trees[o].body:
        patches = [d for d in getattr(n, 'decorator_list', ()) if ast.unparse(d).startswith('patch')]
        if isinstance(n, ast.ClassDef) and n.name[0]!='_':
            yield from ((n.name, f.name, f) for f in n.body if isinstance(f, functions) and is_public(f))
        elif isinstance(n, functions) and is_public(n):
            yield ast.unparse(n.args.args[0].annotation or ast.Name('')) if patches else '',n.name,n

def is_public(f):
    again = any(ast.unparse(d).endswith(('.setter','.register')) for d in f.decorator_list)
    return (f.name=='__init__' or not f.name.startswith('_')) and f.name not in (*all_events,'cleanup') and not again

def documented(o):
    "Names and lambdas of a module's public classes, with what the class inherits"
    for k,cls in vars(import_module(f'learnerdist.{o}')).items():
        if k.startswith('_') or not isinstance(cls, type) or cls.__module__!=f'learnerdist.{o}': continue
        for name,v in vars(cls).items():
            if name.startswith('_') or name in (*all_events,'cleanup') or not isinstance(v, kinds): continue
            yield f'{k}.{name}',any(getattr(vars(c).get(name), '__doc__', None) for c in cls.__mro__)

def test_public_names_have_docstrings():
    "Functions and classes without an underscore, and their public methods and properties, unless a base class has said it"
    pytest.importorskip('fastai')
    assert all(ast.get_docstring(o) for o in trees.values())
    bare = lambda o: [name for cls,name,f in public_functions(o) if not cls and not ast.get_docstring(f)]
    assert per_module(bare) == {}
    classes = lambda o: [n for n in trees[o].body if isinstance(n, ast.ClassDef) and n.name[0]!='_']
    assert per_module(lambda o: [n.name for n in classes(o) if not ast.get_docstring(n)]) == {}
    assert per_module(lambda o: [name for name,has in documented(o) if not has]) == {}

clear = {'self','cls','args','kwargs','learn','model','dl','epoch','event','training','path','device','state','rank','world_size'}

def test_public_parameters_have_docments():
    "Of what scripts import, unless the name says it all: a comment on the parameter's line"
    import learnerdist.all as public
    def bare(o):
        lines = sources[o].splitlines()
        for cls,name,f in public_functions(o):
            internal = cls in ('DistributedTrainer','Checkpoint') and name!='__init__' # which their callbacks call, not scripts
            if not {cls or name} & {*public.__all__} or internal or o.startswith('fastai.'): continue
            args = [*f.args.args,*f.args.kwonlyargs,f.args.vararg,f.args.kwarg]
            above = lambda a: lines[a.lineno-2].lstrip().startswith('#') # a long one
            found = [a.arg for a in args if a and a.arg not in clear and '#' not in lines[a.lineno-1] and not above(a)]
            if found and not (cls and len(args)-args.count(None)==2): yield f'{cls}.{name}',found # the docstring has the only one
    assert per_module(bare) == {}

def test_requires_four_packages():
    cfg = ConfigParser(delimiters=['='])
    cfg.read(root/'settings.ini')
    assert {re.match(r'\w+', o)[0] for o in cfg['DEFAULT']['requirements'].split()} == {'torch','torchvision','fastcore','fastprogress'}

def cuda_calls(tree):
    calls = [o for o in ast.walk(tree) if isinstance(o, ast.Call) and isinstance(o.func, ast.Attribute)]
    return [o.lineno for o in calls if o.func.attr=='cuda']

def test_nothing_calls_cuda():
    assert per_module(lambda o: cuda_calls(trees[o])) == {}

def test_orders_of_callbacks_are_in_one_table():
    "A number in a class of the package would not be seen beside the others"
    found = per_module(lambda o: [n.name for n in ast.walk(trees[o]) if isinstance(n, ast.ClassDef) and n.name!='Order' for a in n.body
                                  if isinstance(a, ast.Assign) and has_bare_order(a)])
    assert {k: v for k,v in found.items() if k not in ('learner.callback','fit_record')} == {} # the default 0; a recorder outside of all

def has_bare_order(a):
    "Whether an assignment gives `order` a number"
    names,vals = a.targets[0],a.value
    pairs = zip(names.elts, vals.elts) if isinstance(names, ast.Tuple) and isinstance(vals, ast.Tuple) else [(names, vals)]
    return any(getattr(k, 'id', '')=='order' and not isinstance(v, ast.Attribute) for k,v in pairs)
