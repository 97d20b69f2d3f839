"""fastai's own notebooks, cell by cell, in four ways: as they are (plain), with `learnerdist.fastai` imported (patched), with every fit and
prediction in a `distrib_ctx` (context), and that on 2 processes (ranks). A table of the cells that pass:

    python tools/fastai_notebooks.py path/to/fastai/nbs                      # a folder, or an archive of the repository (.tar.gz, .zip)
    python tools/fastai_notebooks.py fastai.zip --only 13a 17 --ways plain ranks --write table.md

Cells that are exported are not run: their names come from the installed fastai, which learnerdist changes. Cells marked as slow, cuda, skip
or `eval: false`, and lines for IPython (`%`, `!`), are left out. PyPI's sdist of fastai has no notebooks (seen with 2.7.18, 2.8.0, 2.8.12).
Exit status 1 where a cell passes plain, and not in another way."""
import argparse,functools,importlib,io,json,os,re,shutil,sys,tempfile,types,warnings
from contextlib import redirect_stdout
from pathlib import Path
from learnerdist.core.env import num_distrib,rank_distrib
from learnerdist.testing import RanksError,run_ranks

ways = dict(plain=1, patched=1, context=1, ranks=2) # processes
in_context = 'fit','validate','get_preds','predict','tta','lr_find','show_results'
directive = re.compile(r'^#(?:\s*\|)?\s*(default_exp|export[a-z]*|eval|slow|cuda|skip|cpp|distributed)\b:?\s*(\S*)', re.M)

# --- what there is to run -----------------------------------------------------------------------------------------------------

def find_notebooks(source, tmp):
    "The notebooks of a folder or an archive"
    if source.is_file(): shutil.unpack_archive(source, tmp)
    folder = Path(tmp) if source.is_file() else source
    res = sorted(o for o in folder.rglob('*.ipynb') if '.ipynb_checkpoints' not in o.parts)
    if not res: sys.exit(f"{source}: no notebooks in it, as in fastai's sdist on PyPI. Give a checkout's nbs/, or the repository's archive")
    return res

def kind_of(src):
    "('module', its name), ('exported', ''), ('skipped', '') or ('run', '')"
    found = dict(directive.findall(src))
    if 'default_exp' in found: return 'module',found['default_exp']
    if any(o.startswith('export') for o in found): return 'exported',''
    if {'slow','cuda','skip','cpp'} & {*found} or found.get('eval')=='false': return 'skipped',''
    return 'run',''

def cells_of(path):
    "(number, kind, module, source) of each cell of code"
    for i,c in enumerate(json.loads(path.read_text())['cells']):
        src = ''.join(c['source'])
        if c['cell_type']=='code' and src.strip(): yield i,*kind_of(src),re.sub(r'^(\s*)[%!].*$', r'\1pass', src, flags=re.M)

# --- a notebook in one way, on each of its processes --------------------------------------------------------------------------

def within(name, f):
    "`f`, called in a `distrib_ctx`, unless the learner is in one"
    @functools.wraps(f)
    def method(self, *args, **kwargs):
        if hasattr(self, 'distributed_trainer') or not hasattr(self, 'dls'): return f(self, *args, **kwargs)
        with self.distrib_ctx(timeout_s=60): return getattr(self, name)(*args, **kwargs)
    method.within = True
    return method

def wrap(cls):
    "Let the methods of a class and of its subclasses enter a context"
    if cls.__name__.startswith('_') or hasattr(cls, '_plain') or '_Base' in [o.__name__ for o in cls.__mro__]: return # ours
    for k in in_context:
        f = vars(cls).get(k)
        if f is not None and not hasattr(f, 'within'): setattr(cls, k, within(k, f))
    for o in cls.__subclasses__(): wrap(o)

def names_of(module): return {k:v for k,v in vars(importlib.import_module(module)).items() if not k.startswith('__')}

def outcome(src, ns):
    try:
        with redirect_stdout(io.StringIO()): exec(compile(src, 'cell', 'exec'), ns)
    except (Exception,SystemExit) as e: return f'{type(e).__name__}: {" ".join(str(e).split())[:160]}'
    return 'ok'

def run_notebook(path, way, folder):
    "Run the cells in `folder`; each cell's outcome is appended to this rank's file there"
    os.chdir(folder)
    os.environ['MPLBACKEND'] = 'Agg'
    warnings.simplefilter('ignore')
    nb = sys.modules['notebook'] = types.ModuleType('notebook') # a place from which what a notebook defines can be pickled
    ours = {} if way=='plain' else names_of('learnerdist.fastai')
    with open(f'outcomes-{rank_distrib()}', 'w') as f:
        for i,kind,module,src in cells_of(path):
            if kind=='module': vars(nb).update(names_of(f'fastai.{module}'), **{k:v for k,v in ours.items() if k[0]!='_'})
            if ours and num_distrib()+(way=='context')>1: wrap(importlib.import_module('fastai.learner').Learner)
            if kind=='run': print(json.dumps([i,outcome(src, vars(nb))]), file=f, flush=True)

def outcomes(path, way, timeout_s):
    "{cell: 'ok', or an error}; a cell that is not reached has the error of the whole run"
    with tempfile.TemporaryDirectory() as d:
        for o in path.parent.iterdir(): (Path(d)/o.name).symlink_to(o) # pictures, which a notebook reads
        err = 'not reached'
        try: run_ranks(run_notebook, ways[way], path, way, d, timeout_s=timeout_s)
        except RanksError as e: err = ' '.join(str(e).split())[:160]
        files = [Path(d)/f'outcomes-{r}' for r in range(ways[way])]
        ranks = [dict(map(json.loads, o.read_text().splitlines())) if o.exists() else {} for o in files]
    per_cell = {i: [o.get(i, err) for o in ranks] for i,kind,*_ in cells_of(path) if kind=='run'}
    return {i: next((f'rank {r}: {o}'[8*(len(os)==1):] for r,o in enumerate(os) if o!='ok'), 'ok') for i,os in per_cell.items()}

# --- the table ----------------------------------------------------------------------------------------------------------------

def line_of(name, res):
    n = len(next(iter(res.values())))
    return f'| {name} | {n} | '+' | '.join(str([*o.values()].count('ok')) for o in res.values())+' |'

def differences(name, res):
    "Cells that pass plain and not otherwise"
    plain = res.get('plain', {})
    return [f'- {name}, cell {i}, {way}: {o}' for way,cells in res.items() for i,o in cells.items() if o!='ok' and plain.get(i, 'ok')=='ok']

def table(results):
    "Markdown from {notebook: {way: {cell: outcome}}}"
    names = [*next(iter(results.values()))]
    bad = [o for k,res in results.items() for o in differences(k, res)]
    total = {w: {(k,i): o for k,res in results.items() for i,o in res[w].items()} for w in names}
    head = [f"| notebook | cells | {' | '.join(names)} |", '|---'*(len(names)+2)+'|']
    lines = [*(line_of(*o) for o in results.items()), line_of('all', total), '', *(bad or ['Every cell that passes plain passes.'])]
    return '\n'.join(head+lines),bad

def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    p.add_argument('source', type=Path, help="folder of notebooks, or an archive of fastai's repository")
    p.add_argument('--only', nargs='+', default=[''], help='beginnings of names of notebooks')
    p.add_argument('--ways', nargs='+', choices=ways, default=[*ways])
    p.add_argument('--timeout', type=float, default=600, help='seconds for a notebook in one way')
    p.add_argument('--write', type=Path, help='file for the table')
    args,results = p.parse_args(),{}
    with tempfile.TemporaryDirectory() as tmp:
        for path in find_notebooks(args.source.resolve(), tmp):
            if not path.name.startswith(tuple(args.only)) or not any(o[1]=='run' for o in cells_of(path)): continue
            results[path.stem] = {way: outcomes(path, way, args.timeout) for way in args.ways}
            print(line_of(path.stem, results[path.stem]), *differences(path.stem, results[path.stem]), sep='\n', flush=True)
    if not results: sys.exit(f"{args.source}: no notebook begins with {' or '.join(args.only)}")
    text,bad = table(results)
    print('', text, sep='\n')
    if args.write: args.write.write_text(text+'\n')
    sys.exit(bool(bad))

if __name__=='__main__': main()
