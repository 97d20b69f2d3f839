"""fastai's own notebooks, cell by cell, in three ways: as they are (plain), with every fit and prediction in a `distrib_ctx` of one process
(context), and that on 2 processes (ranks). A table of the cells that pass:

    python tools/fastai_notebooks.py path/to/fastai/nbs                  # a folder, or an archive of the repository (.tar.gz, .zip)
    python tools/fastai_notebooks.py fastai.zip --only 13a 17 --ways plain ranks
    python tools/fastai_notebooks.py fastai.zip --keep all.json --write  # the table into docs/clients.md; goes on if it was interrupted

Data sets and weights are small stand-ins (tests/stand_ins.py) from a local server. Left out are cells that are exported, since their names
come from the installed fastai, which learnerdist changes; cells marked as slow, cuda, skip or `eval: false`; lines for IPython (`%`, `!`);
notebooks whose name begins with `_`, as by nbdev, and those about fastai.distributed, which learnerdist replaces. A cell that takes
over 10 s of CPU time plain is interrupted, and does not pass.
The two medical ones need `pip install pydicom kornia scikit-image`.
PyPI's sdist of fastai has no notebooks (seen with 2.7.18, 2.8.0, 2.8.12).

A cell begins with the same seeds on all ranks, rank after rank up to where they meet, since each may write and remove a file; a rank that
has ended it frees those that wait for it. Exit status 1 if more than 20 cells pass plain and not in another way, or one of them without a
reason in `reasons`."""
import argparse,functools,importlib,io,json,os,random,re,shutil,signal,sys,tempfile,time,types,warnings
from contextlib import redirect_stdout
from pathlib import Path
root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'tests'))
from learnerdist.core.env import in_group,shared_store,new_launch,num_distrib,rank_distrib,record_exit,teardown_distrib
from learnerdist.testing import RanksError,run_ranks

ways = dict(plain=1, context=1, ranks=2) # processes
limit_s = dict(plain=10, context=40, ranks=40) # of CPU time, of a cell
most = 20 # cells that may pass plain only
in_context = 'fit','validate','get_preds','predict','tta','lr_find','show_results'
directive = re.compile(r'^#(?:\s*\|)?\s*(default_exp|export[a-z]*|eval|slow|cuda|skip|cpp|distributed)\b:?\s*(\S*)', re.M)

# Why a cell passes plain only, by its notebook and its error
reasons = {
    r'^13a_learner: .*(Epoch 1/1|epoch train_loss|valid_events)': "it compares prints; learnerdist.fastai imports the progress bar",
    r'^13a_learner: rank 1: (AssertionError: $|ValueError: this rank loads)': 'a temporary folder for each rank, and rank 0 alone writes',
    r'^13a_learner: rank 1: AssertionError: regex': 'it compares prints, and rank 0 alone prints',
    r'^13a_learner: rank 0: AssertionError: Exception occured in `Recorder`': "its callback counts one rank's samples",
    r'^14a_callback.data: .* has no targets': 'its batches have no targets: an error in a context, since nothing would be trained',
    r'^(16_callback.progress|17_callback.tracker): rank 1: (FileNotFoundError|AssertionError: $)': 'a file that the other rank has removed',
    r'global_bs=1: a global batch has a sample at least for each': 'its batches have one sample, for two ranks',
}

# --- what there is to run -----------------------------------------------------------------------------------------------------

def find_notebooks(source, tmp):
    "The notebooks of a folder or an archive"
    if source.is_file(): shutil.unpack_archive(source, tmp)
    folder = Path(tmp) if source.is_file() else source
    res = sorted(o for o in folder.rglob('*.ipynb') if '.ipynb_checkpoints' not in o.parts and o.name[0]!='_')
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

def has_to_run(path):
    "Not if it is about fastai.distributed, which ours replaces"
    cells = [*cells_of(path)]
    return any(o[1]=='run' for o in cells) and not any(o[2]=='distributed' or 'fastai.distributed' in o[3] for o in cells)

# --- a notebook in one way, on each of its processes --------------------------------------------------------------------------

def within(name, f):
    "`f`, called in a `distrib_ctx`, unless the learner is in one; there are as many steps as in one process"
    @functools.wraps(f)
    def method(self, *args, **kwargs):
        if hasattr(self, 'distributed_trainer') or not hasattr(self, 'dls'): return f(self, *args, **kwargs)
        let_next_begin()
        with self.distrib_ctx(timeout_s=20, split_batches=True): return getattr(self, name)(*args, **kwargs)
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

def outcome(src, ns, limit_s):
    "'ok', or the error; the cell is interrupted after `limit_s` seconds of CPU time"
    over = [] # from then on the signal is late itself: raised while another error is handled, it would end the whole notebook
    def late(*args):
        if not over: raise TimeoutError(f'takes over {limit_s} s')
    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, limit_s, limit_s) # again, if what it raised was swallowed
    try:
        try:
            with redirect_stdout(io.StringIO()): exec(compile(src, 'cell', 'exec'), ns)
        finally: over.append(True)
    except (Exception,SystemExit) as e: return f'{type(e).__name__}: {" ".join(str(e).split())[:160]}'
    finally: signal.setitimer(signal.ITIMER_PROF, 0)
    return 'ok'

def seed(i):
    import numpy as np, torch
    for f in (random.seed,np.random.seed,torch.manual_seed): f(i)

def begin_cell(folder, i):
    "In a launch of its own, unless the notebook has opened a group; after the rank before, up to where they meet: both may use a file"
    global begun
    seed(i)
    n,rank = num_distrib(),rank_distrib()
    begun = [Path(folder)/f'begun-{i}-{r}' for r in range(n)][rank:rank+1]
    if n<2 or in_group(): return
    os.environ['LEARNERDIST_INIT_METHOD'] = f'file://{folder}/launch-{i}'
    new_launch()
    before,since = Path(folder)/f'begun-{i}-{rank-1}',time.monotonic()
    while rank and not before.exists() and time.monotonic()-since<20: time.sleep(.01)

def let_next_begin():
    for o in begun: o.touch()

begun = [] # the file for which the next rank waits

ended = dict(kind='exit', message='has ended this cell')

def end_cell(folder, i, res):
    "Write this rank's outcome, free the ranks that wait for this one, and wait for them"
    files = [Path(folder)/f'outcome-{i}-{r}' for r in range(max(num_distrib(), 1))]
    tmp = Path(folder)/f'tmp-{rank_distrib()}'
    let_next_begin()
    if len(files)>1 and not in_group(): record_exit(shared_store(), rank_distrib(), ended)
    tmp.write_text(res)
    tmp.rename(files[rank_distrib()])
    while not all(o.exists() for o in files): time.sleep(.01)
    if any(o.read_text()!='ok' for o in files): teardown_distrib()

def run_notebook(path, way, folder, urls, slow):
    "Run the cells in `folder`; those in `slow` are not over plain in time"
    os.chdir(folder)
    warnings.simplefilter('ignore')
    from fastai.data.external import URLs
    for k,v in urls.items(): setattr(URLs, k, v)
    nb = sys.modules['notebook'] = types.ModuleType('notebook') # a place from which what a notebook defines can be pickled
    ours = {} if way=='plain' else names_of('learnerdist.fastai')
    for i,kind,module,src in cells_of(path):
        if kind=='module': vars(nb).update(names_of(f'fastai.{module}'), **{k:v for k,v in ours.items() if k[0]!='_'})
        if ours: wrap(importlib.import_module('fastai.learner').Learner)
        if kind!='run': continue
        begin_cell(folder, i)
        end_cell(folder, i, outcome(src, vars(nb), limit_s['plain' if i in slow else way]))

def outcomes(path, way, urls, torch_home, slow):
    "{cell: 'ok', or an error}; a cell that is not reached has the error of the whole run"
    with tempfile.TemporaryDirectory() as d:
        for o in path.parent.iterdir(): (Path(d)/o.name).symlink_to(o) # pictures, which a notebook reads
        env,err = dict(HOME=f'{d}/home', TORCH_HOME=str(torch_home), HF_HUB_OFFLINE='1', MPLBACKEND='Agg'),'not reached'
        try: run_ranks(run_notebook, ways[way], path, way, d, urls, slow, timeout_s=3600, env=env)
        except RanksError as e: err = ' '.join(str(e).split())[:160]
        files = {i: [Path(d)/f'outcome-{i}-{r}' for r in range(ways[way])] for i,kind,*_ in cells_of(path) if kind=='run'}
        per_cell = {i: [o.read_text() if o.exists() else err for o in os] for i,os in files.items()}
    return {i: worst(os) for i,os in per_cell.items()}

def worst(outs):
    "The outcome of all ranks: the error that is no consequence of another's"
    bad = sorted((o.startswith('RankError'), r, o) for r,o in enumerate(outs) if o!='ok')
    return 'ok' if not bad else f'rank {bad[0][1]}: {bad[0][2]}'[8*(len(outs)==1):]

def in_all_ways(path, names, urls, torch_home):
    "{way: {cell: outcome}}; a cell that is too slow plain gets no more time elsewhere"
    res = {}
    for way in names:
        slow = {i for i,o in res.get('plain', {}).items() if o.startswith('TimeoutError: takes over')}
        res[way] = outcomes(path, way, urls, torch_home, slow)
    return res

def of_all(paths, names, run, file=None):
    """{notebook: {way: {cell: outcome}}}, where `run` has that of a notebook. file: the outcomes that it holds are taken from there, and
    others are added as they come, so that a run may be interrupted, or cut in parts by --only"""
    held = json.loads(file.read_text()) if file and file.exists() else {}
    res = {k: {w: {int(i): o for i,o in cells.items()} for w,cells in v.items()} for k,v in held.items() if [*v]==[*names]}
    for path in paths:
        if path.stem not in res:
            res[path.stem] = run(path)
            if file:
                file.with_suffix('.tmp').write_text(json.dumps(res))
                file.with_suffix('.tmp').rename(file)
        print(line_of(path.stem, res[path.stem]), *differences(path.stem, res[path.stem]), sep='\n', flush=True)
    return dict(sorted(res.items()))

# --- the table ----------------------------------------------------------------------------------------------------------------

def line_of(name, res):
    n = len(next(iter(res.values())))
    return f'| {name} | {n} | '+' | '.join(str([*o.values()].count('ok')) for o in res.values())+' |'

def differences(name, res):
    "(notebook, cell, way, outcome, reason) of the cells that pass plain and not otherwise"
    plain = res.get('plain', {})
    bad = [(i,way,o) for way,cells in res.items() for i,o in cells.items() if o!='ok' and plain.get(i, 'ok')=='ok']
    return [(name, i, way, o, next((v for k,v in reasons.items() if re.search(k, f'{name}: {o}')), '')) for i,way,o in bad]

def total(results):
    "The outcomes of all notebooks, as of one"
    names = next(iter(results.values()))
    return {w: {(k,i): o for k,res in results.items() for i,o in res[w].items()} for w in names}

def table(results):
    "(Markdown, whether it is as it should be) from {notebook: {way: {cell: outcome}}}"
    bad = [o for k,res in results.items() for o in differences(k, res)]
    head = [f"| notebook | cells | {' | '.join(total(results))} |", '|---'*(len(total(results))+2)+'|']
    lines = [*(line_of(*o) for o in results.items()), line_of('all', total(results)), '']
    lines += [f'- {k}, cell {i}, {way}: {o}: {why or "NO REASON"}' for k,i,way,o,why in bad] or ['Every cell that passes plain passes.']
    return '\n'.join(head+lines),len({o[:2] for o in bad})<=most and all(o[4] for o in bad)

def section(results):
    "What docs/clients.md says of them"
    import fastai
    res,cells = total(results),{}
    for name,v in results.items():
        for _,i,_,_,why in differences(name, v): cells.setdefault(why, set()).add((name, i))
    n = {w: [*o.values()].count('ok') for w,o in res.items()}
    head = ['| cells | pass plain | in a context | on 2 processes |', '|---|---|---|---|']
    row = f"| {len(res['plain'])} of {len(results)} notebooks, fastai {fastai.__version__} | {n['plain']} | {n['context']} | {n['ranks']} |"
    lines = [f"- {why}: {', '.join(f'{k} (cell {i})' for k,i in sorted(os))}." for why,os in sorted(cells.items())]
    return '\n'.join([*head, row, '', 'Cells that pass plain only, and why:', '', *(lines or ['- none.'])])

def write(text, page=root/'docs'/'clients.md', begin='<!-- tools/fastai_notebooks.py --write -->', end='<!-- end notebooks -->'):
    "Between its marks on the page"
    before,_,rest = page.read_text().partition(begin)
    if not rest: raise ValueError(f'{page} has no line {begin}')
    page.write_text(f'{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}')

def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    p.add_argument('source', type=Path, help="folder of notebooks, or an archive of fastai's repository")
    p.add_argument('--only', nargs='+', default=[''], help='beginnings of names of notebooks')
    p.add_argument('--ways', nargs='+', choices=ways, default=[*ways])
    p.add_argument('--keep', type=Path, help='file of outcomes by notebook: those in it are not run again, others are added')
    p.add_argument('--write', action='store_true', help='write the table into docs/clients.md')
    args = p.parse_args()
    import fastai.basics # noqa: F401 which forked ranks then have
    import matplotlib.pyplot # noqa: F401
    from fastai.data.external import URLs
    from stand_ins import resnet_weights,standing_in
    with tempfile.TemporaryDirectory() as tmp, standing_in(Path(tmp)/'data', URLs) as urls:
        resnet_weights(Path(tmp)/'torch')
        found = find_notebooks(args.source.resolve(), tmp)
        found = [o for o in found if o.name.startswith(tuple(args.only)) and has_to_run(o)]
        run = functools.partial(in_all_ways, names=args.ways, urls=urls, torch_home=Path(tmp)/'torch')
        results = of_all(found, args.ways, run, args.keep)
    if not results: sys.exit(f"{args.source}: no notebook begins with {' or '.join(args.only)}")
    text,good = table(results)
    print('', text, sep='\n')
    if args.write: write(section(results))
    sys.exit(not good)

if __name__=='__main__': main()
