"""The size and density of the package: `python tools/figures.py [root of another checkout]`; calls of a step: tools/walks.py

Lines are code lines as `ruff format --line-length 100` makes them, without comments, docstrings and blank lines, so that
typography does not change them. Densities are per 100 code lines as they were written, beside those of fastai if it is
installed."""
import ast
import importlib.util
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

documented = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module
unread = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER

def code_lines(source):
    "The numbers of the lines with code on them: no comments, docstrings or blank lines"
    lines = set()
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        if t.type not in unread: lines |= {*range(t.start[0], t.end[0]+1)}
    docs = [o.body[0] for o in ast.walk(ast.parse(source)) if isinstance(o, documented) and ast.get_docstring(o)]
    return lines - {i for d in docs for i in range(d.lineno, d.end_lineno+1)}

def formatted(source):
    "`source` as ruff formats it with lines of 100 columns"
    cmd = ['ruff', 'format', '--isolated', '--line-length', '100', '-']
    return subprocess.run(cmd, input=source, capture_output=True, text=True, check=True).stdout

def foreign_underscores(tree):
    "The names with an underscore that a module imports from another module of ours"
    froms = [o for o in ast.walk(tree) if isinstance(o, ast.ImportFrom) and (o.level or (o.module or '').startswith('learnerdist'))]
    return {(o.module, a.name) for o in froms for a in o.names if a.name.startswith('_') and not a.name.startswith('__')}

def is_patch(node):
    "Whether a function is a method that a module patches into a class"
    return any(ast.unparse(d).startswith('patch') for d in getattr(node, 'decorator_list', ()))

def modules_of(root):
    "The modules of the package below `root`, without nbdev's index"
    return sorted(o for o in (Path(root)/'learnerdist').rglob('*.py') if o.name!='_modidx.py')

def sizes(root):
    "The figures of a checkout's package, by name"
    res = Counter()
    for path in modules_of(root):
        source = path.read_text()
        tree = ast.parse(source)
        nodes = [*ast.walk(tree)]
        res['formatted lines'] += len(code_lines(formatted(source)))
        res['modules'] += 1
        res['functions'] += sum(isinstance(o, documented[:2]) for o in nodes)
        res['classes'] += sum(isinstance(o, ast.ClassDef) for o in nodes)
        res['patched methods'] += sum(map(is_patch, nodes))
        res['underscore names imported across modules'] += len(foreign_underscores(tree))
        res['lines over 120 columns'] += sum(len(o)>120 for o in source.splitlines() if not o.startswith('# %%'))
    res['lines of tests'] = sum(len(o.read_text().splitlines()) for o in (Path(root)/'tests').glob('*.py'))
    return res

comprehensions = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp

def of_several(node):
    "Whether an assignment gives several values to as many names, as in `a,b = 1,2`"
    return isinstance(node.value, ast.Tuple) and any(isinstance(o, ast.Tuple) for o in node.targets)

def densities(paths):
    "How dense the lines of these modules are, by name"
    n_lines,nodes = 0,[]
    for path in paths:
        source = path.read_text()
        n_lines += len(code_lines(source))
        nodes += ast.walk(ast.parse(source))
    n_comprehensions = sum(isinstance(o, comprehensions) for o in nodes)
    n_conditional = sum(isinstance(o, ast.IfExp) for o in nodes)
    assigned = [o for o in nodes if isinstance(o, ast.Assign)]
    return {'comprehensions per 100 lines': 100*n_comprehensions/n_lines,
            'conditional expressions per 100 lines': 100*n_conditional/n_lines,
            '% of assignments give values to several names': 100*sum(map(of_several, assigned))/len(assigned)}

def fastai_modules():
    "The modules of the installed fastai; none if there is none"
    spec = importlib.util.find_spec('fastai')
    if spec is None: return []
    return [o for o in Path(spec.origin).parent.rglob('*.py') if o.name!='_modidx.py']

if __name__=='__main__':
    root = next((o for o in sys.argv[1:] if not o.startswith('-')), Path(__file__).parent.parent)
    for name,n in sizes(root).items(): print(f'{n:7,} {name}')
    beside = fastai_modules()
    of_fastai = densities(beside) if beside else {}
    for name,x in densities(modules_of(root)).items():
        other = f' (fastai: {of_fastai[name]:.1f})' if of_fastai else ''
        print(f'{x:7.1f} {name}{other}')
