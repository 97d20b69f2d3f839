"""Write the table of docs/gpu.md: what the scenes of tests/gpu_scenes.py do on two simulated GPUs

    python tools/gpu_table.py [--check]

For each scene: whether the numbers are those of the CPU; how often the host waits for the device in a step, beyond one process; collectives
of a step. Then the lines of the package that name a device, a GPU or nccl, and which of them have not run. --check writes nothing: its
status is 1 if a scene has other numbers than the CPU. It takes some minutes."""
import argparse, ast, re, sys, tempfile
from collections import Counter
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(root),str(root/'tests')]
import test_cuda, test_simulated_gpu as tests
from gpu_scenes import n_marked, of_fastai, of_table, stories, table_on
from test_cuda import rank_simulated
from learnerdist.fastai import setup_distrib
from learnerdist.launch import cli, processes
from learnerdist.testing import run_ranks
from harness import Failed,close

page,begin,end = root/'docs/gpu.md','<!-- tools/gpu_table.py writes this -->','<!-- to here -->'
package = root/'learnerdist'
names = [*of_table,*stories,*of_fastai]
words = re.compile(r"device\.type|cuda|accelerator|gpu|nccl|non_blocking|pin_memory", re.I)
of_device = re.compile(r"device\.type|cuda|gpu") # a branch of such a condition is one of the device

# --- lines that have run

def traced(f, *args, **kw):
    "What `f` returns, and the lines of the package that have run, by file"
    ran = {}
    def call(frame, event, arg):
        path = frame.f_code.co_filename
        if not path.startswith(str(package)): return None
        lines = ran.setdefault(path[len(str(package))+1:], set())
        lines.add(frame.f_lineno)
        def line(frame, event, arg):
            lines.add(frame.f_lineno)
            return line
        return line
    sys.settrace(call)
    try: return f(*args, **kw),ran
    finally: sys.settrace(None)

def rank_lines(f, *args, **kw):
    "`f` on this rank of several, or alone; an error is no matter here"
    def caught():
        try: return f(*args, **kw)
        except Exception as e: return e
    return traced(caught)[1]

def on_gpus():
    "What no scene does: counting GPUs, choosing one"
    args = cli.get_parser().parse_args(['--gpus', '0', 'train.py'])
    return processes.count_nproc('auto'),cli._choose_nproc(args),setup_distrib(gpu=0)

def device_lines(path)->set:
    "Lines of statements within functions that name a device, and of what depends on such a condition"
    source = path.read_text()
    lines,found = source.splitlines(),set()
    for f in ast.walk(ast.parse(source)):
        if not isinstance(f, (ast.FunctionDef,ast.Lambda)) or isinstance(f, ast.Lambda): continue
        for o in ast.walk(f):
            if not isinstance(o, ast.stmt) or isinstance(o, (ast.FunctionDef,ast.ClassDef,ast.Import,ast.ImportFrom)): continue
            if isinstance(o, ast.Expr) and isinstance(o.value, ast.Constant): continue # a docstring
            head = '\n'.join(lines[o.lineno-1:o.body[0].lineno-1 if hasattr(o, 'body') else o.end_lineno]) or lines[o.lineno-1]
            code = re.sub(r"""#.*|"[^"]* [^"]*"|'[^']* [^']*'|cuda=False""", '', head) # without comments, messages and streams of the CPU
            if words.search(code): found.add(o.lineno)
            if isinstance(o, ast.If) and of_device.search(code): found |= {p.lineno for p in (*o.body,*o.orelse)}
    return found

# --- the table

def rows(one, cpu, two):
    for k in names:
        found = [o[k]['got'] for o in (one,*cpu,*two)]
        errors = [o.splitlines()[-1] for o in found if isinstance(o, Failed)]
        if errors: yield k,errors[0],'','',''
        else:
            ref = cpu[1] if k=="fastai's first script" else cpu[0] # that one has dropout: on two ranks, too
            extra = Counter(two[0][k]['waits'])-Counter(one[k]['waits'])
            ns = sum(one[k]['waits'].values()),sum(extra.values()),len(two[0][k]['collectives'])
            yield k,same(two, ref, k),*[f'{n/n_marked:g}' for n in ns]

def same(two, ref, k):
    tol = of_table.get(k, {}).get('tol', 1e-4 if 'script' in k else 1e-6)
    try:
        for o in two: close(o[k]['got'], ref[k]['got'], tol)
    except AssertionError as e: return 'no: '+' '.join(str(e).split())[:100]
    return f'yes, to {tol:g}'

def main(check=False):
    with tempfile.TemporaryDirectory() as d:
        d = Path(d)
        kw = dict(timeout_s=1800)
        one, = run_ranks(table_on, 1, names, d/'one', 1, **kw)
        cpu = [run_ranks(table_on, 1, names, d/'cpu', 0, **kw)[0],run_ranks(table_on, 2, ["fastai's first script"], d/'cpu2', 0, **kw)[0]]
        cpu[1] = {**cpu[0], **cpu[1]}
        two = run_ranks(table_on, 2, names, d/'two', same_order=True, **kw)
        table = [*rows(one, cpu, two)]
        for o in table: print(*o, sep=' | ')
        if check: return sum(not o[1].startswith('yes') for o in table)
        runs = [(1, table_on, names, d/'lines1', 2), (2, table_on, names, d/'lines2', 2)]
        runs += [(2, rank_simulated, 1, test_cuda.rank_run, (test_cuda.kws,), {}), (2, rank_simulated, 2, test_cuda.rank_streams, (), {})]
        runs += [(1, rank_simulated, 2, test_cuda.rank_device, (), {}), (1, rank_simulated, 2, on_gpus, (), {})]
        runs += [(2, tests.rank_collectives, o) for o in (None,'nccl')]+[(2, tests.rank_reads), (1, tests.rank_current_device)]
        ran = [o for W,*args in runs for o in run_ranks(rank_lines, W, *args, **kw)]
    write(table, ran)

def write(table, ran):
    res = ['| training on two GPUs | the numbers of the CPU | waits of one process | more waits | collectives |','|---|---|---|---|---|']
    res += [f'| {" | ".join(o)} |' for o in table]
    n,missed = 0,[]
    for path in sorted(package.rglob('*.py')):
        name = str(path.relative_to(package))
        found = device_lines(path) if path.name!='_modidx.py' else set()
        never = sorted(found-set().union(*[o.get(name, set()) for o in ran]))
        n += len(found)
        source = path.read_text().splitlines()
        missed += [f'- `{name}`: `{source[i-1].strip()}`' for i in never]
    res += ['',f'{n-len(missed)} of {n} lines that name a device, or depend on it, have run. Not these:',*missed]
    text = page.read_text()
    page.write_text(text[:text.index(begin)+len(begin)]+'\n'+'\n'.join(res)+'\n'+text[text.index(end):])

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--check', action='store_true')
    sys.exit(main(p.parse_args().check))
