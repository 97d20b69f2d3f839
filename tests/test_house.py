"The rules of CONTRIBUTING.md that a program can check; its table of modules is read from there"
import ast, io, re, subprocess, sys, tokenize
from importlib import import_module
from pathlib import Path
import pytest

root = Path(__file__).parent.parent
package = root/'learnerdist'
rows = re.findall(r'^\| `([\w/]+)` \| `([\w/]+)\.py` \|', (root/'CONTRIBUTING.md').read_text(), re.M)
modules = [module.replace('/', '.') for _,module in rows]
sources = {o: (package/f'{o.replace(".", "/")}.py').read_text() for o in modules}
trees = {o: ast.parse(s) for o,s in sources.items()}
by_hand = 'distributed/__init__.py','launch/__init__.py','fastai/__init__.py'

def whole_names(tree, at):
    "The modules, and names in them, that the module `at` imports, wherever in it"
    for o in ast.walk(tree):
        if isinstance(o, ast.Import): yield from (a.name for a in o.names)
        if not isinstance(o, ast.ImportFrom): continue
        base = ['learnerdist',*at.split('.')][:-o.level] if o.level else []
        yield from ('.'.join([*base, *([o.module] if o.module else []), a.name]) for a in o.names)

def imports(o):
    "Modules of ours that module `o` imports; a folder stands for what its `__init__` hands on"
    ours = [n.removeprefix('learnerdist.') for n in whole_names(trees[o], o) if n.startswith('learnerdist.')]
    return {n if n in modules else n.rpartition('.')[0] for n in ours} - {''}

def per_module(find):
    "What `find` finds in each module, for those where it finds something"
    return {o: found for o in modules if (found := [*find(o)])}

def test_table_names_every_module_and_notebook():
    others = {'__init__','__main__','all','_modidx'}
    assert {'.'.join(o.relative_to(package).with_suffix('').parts) for o in package.rglob('*.py') if o.stem not in others} == {*modules}
    found = [o.relative_to(root/'nbs').with_suffix('') for o in (root/'nbs').rglob('[0-9]*.ipynb') if '.ipynb_checkpoints' not in o.parts]
    assert {str(o) for o in found} == {nb for nb,_ in rows}
    assert all(re.sub(r'\d\d_', '', nb)==module for nb,module in rows)

def test_the_tour_names_what_is_there():
    "A name in CONTRIBUTING's tour and table of places is defined in the file that stands before it"
    text = (root/'CONTRIBUTING.md').read_text().partition('## A tour')[2].partition('## The house')[0]
    for file,names in re.findall(r'`(learnerdist/[\w/]+\.py)`((?:[:,] `\w+[^`]*`)*)', text):
        defined = {o.name for o in ast.walk(ast.parse((root/file).read_text())) if isinstance(o, (ast.FunctionDef,ast.ClassDef))}
        missing = {n.split('.')[-1] for n in re.findall(r'`([\w.]+)`', names)}-defined
        assert not missing, (file,missing)

def test_imports_only_modules_above():
    "So there is no cycle; launch/ needs core/ alone, and fastai/ alone imports fastai"
    assert per_module(lambda o: imports(o)-{*modules[:modules.index(o)]}) == {}
    assert per_module(lambda o: {n for n in imports(o) if o.startswith('launch.') and n.split('.')[0] not in ('core','launch')}) == {}
    fastais = per_module(lambda o: {n for n in whole_names(trees[o], o) if n.split('.')[0]=='fastai'})
    assert [o for o in fastais if not o.startswith('fastai.')] == []

def test_no_private_names_across_modules(monkeypatch):
    "What another module needs has a public name in the module that owns it"
    monkeypatch.syspath_prepend(str(root/'tools'))
    assert per_module(lambda o: import_module('figures').foreign_underscores(trees[o])) == {}

def test_columns():
    "Lines of the package have up to 120 columns, and no semicolons"
    written = lambda o: [l for l in sources[o].splitlines() if not l.startswith(('# %%','__all__'))] # those are the exporter's
    assert per_module(lambda o: [l for l in written(o) if len(l)>120]) == {}
    assert per_module(lambda o: [t.start for t in tokenize.generate_tokens(io.StringIO(sources[o]).readline) if t.string==';']) == {}

def listed(tree):
    "The names of `__all__`"
    return next((ast.literal_eval(o.value) for o in tree.body if isinstance(o, ast.Assign) and o.targets[0].id=='__all__'), [])

def test_public_names():
    "What scripts get by a star import is what is listed, and no more; a module's `__all__` has nothing else"
    public = dict(testing={'run_ranks','RanksError','RankFailure'}, # imported as modules
                  verify={'verify','Verdict','Difference','NoRun'}, plan={'plan'})
    from learnerdist import all as scripts
    handed_on = {*scripts.__all__}
    for file in by_hand:
        tree = ast.parse((package/file).read_text())
        names = [a.asname or a.name for o in tree.body if isinstance(o, ast.ImportFrom) for a in o.names]
        assert sorted(names)==sorted(listed(tree)), f'{file}: a public name is imported there, and is in its `__all__`'
        handed_on |= {*names}
    found = per_module(lambda o: {*listed(trees[o])}-handed_on-public.get(o, set()))
    assert found == {}, (f'{found}: a new public name is imported in all.py, or stands in two places of a folder\'s '
                         '`__init__`, an import and `__all__`; other names are exported by `#| exporti`')

def test_stubs_are_current(monkeypatch):
    "What editors and type checkers read in place of a module"
    pytest.importorskip('nbdev') # in a contributor's environment: an older fastcore has other signatures
    monkeypatch.syspath_prepend(str(root/'tools'))
    stubs = import_module('stubs')
    for o in stubs.stubbed: assert (package/f'{o}.pyi').read_text()==stubs.stub(o), f'{o}.pyi: run python tools/stubs.py'

def loaded(statement, *names):
    "Which of these modules a fresh interpreter has loaded after `statement`"
    code = f'import sys\n{statement}\nprint(*(o for o in {names} if o in sys.modules))'
    return subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True, check=True).stdout.split()

def test_imports_nothing_that_is_needed_only_sometimes():
    never = ('torchvision','matplotlib','tensorboard','torch.utils.tensorboard','torch._dynamo','triton','fastai','sklearn',
             'pandas','IPython')
    assert loaded('import learnerdist', 'torch', 'numpy', 'fastcore') == []
    assert loaded('import learnerdist.all', 'torch', *never) == ['torch']

def test_nothing_is_of_cuda_alone():
    "Neither `torch.cuda` nor a comparison with 'cuda'; but the variable that hides CUDA's devices"
    of_cuda = lambda n: getattr(n, 'attr', getattr(n, 'value', ''))=='cuda'
    assert per_module(lambda o: [n.lineno for n in ast.walk(trees[o]) if of_cuda(n) and o!='launch.cli']) == {}

def test_what_older_versions_of_fastcore_want():
    "The oldest that is supported has no other name for what `delegates` replaces"
    def delegating(n): return isinstance(n, ast.FunctionDef) and any('delegates' in ast.unparse(o) for o in n.decorator_list)
    names = [n.args.kwarg.arg for tree in trees.values() for n in ast.walk(tree) if delegating(n)]
    assert len(names)>5 and {*names}=={'kwargs'}

def test_texts_have_their_size():
    "README has at most 700 words, each version in CHANGELOG at most 80 lines"
    assert len((root/'README.md').read_text().split())<=700
    for o in re.split(r'^## ', (root/'CHANGELOG.md').read_text(), flags=re.M)[1:]: assert len(o.splitlines())<=80, o[:20]
