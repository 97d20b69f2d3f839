"""Public training scripts and notebooks, ported, on 1, 2 and 3 processes: `python tools/public.py CHECKOUT... [--only NAME ...] [--write]`

A checkout is a folder as `git clone` names it: examples (pytorch's), fastbook, course22p2, course22 (fastai's), minGPT. A port is what a
user would type: searches and replaces of a few words in their file, in tools/public_ports.txt. `--diff` shows it; its lines are counted.
Data sets are small and made here; searches and replaces for these, for sizes and for dropout of 0 are not counted. The loader's batch size
is that of a step at any number of processes. Compared with one process, in float64, are weights, losses, values and what the script
computes afterwards. A row is *same*, *warned* (it differs, and a warning says why), *error* (one that says what to do) or *FAILURE*, which
makes the exit status 1. `--write` puts the rows into docs/public.md, whose others stay."""
import argparse
import contextlib
import difflib
import io
import json
import os
import random
import re
import sys
import tempfile
import time
import traceback
import types
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from learnerdist.testing import run_ranks
from sweep import distance, harmless

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'tests'))
page, begin, end = root/'docs/public.md', '<!-- tools/public.py --write -->\n', '<!-- end -->\n'

# --- data ---------------------------------------------------------------------------------------------------------------------

class Digits(torch.utils.data.Dataset):
    "In place of torchvision's MNIST: noise, with a bright row that tells the class"
    def __init__(self, root=None, train=True, transform=None, download=False, n=40):
        g = torch.Generator().manual_seed(int(train))
        self.data, self.targets = torch.randint(80, (n, 28, 28), generator=g, dtype=torch.uint8), torch.arange(n) % 10
        self.data[torch.arange(n), 2*self.targets+4] += 150
        self.transform = transform
    def __len__(self): return len(self.data)
    def __getitem__(self, i):
        from PIL import Image
        img = Image.fromarray(self.data[i].numpy())
        return (self.transform(img) if self.transform else img), int(self.targets[i])

class Rows:
    "In place of a data set of Hugging Face's `datasets`"
    features = dict(image=None, label=None)
    def __init__(self, digits, transform=None): self.digits, self.transform = digits, transform
    def __len__(self): return len(self.digits)
    def __getitem__(self, i):
        img, y = self.digits[i]
        b = dict(image=[img], label=[y])
        if self.transform: b = self.transform(b)
        return {k: v[0] for k, v in b.items()}

class Fashion(dict):
    def with_transform(self, f): return Fashion({k: Rows(v.digits, f) for k, v in self.items()})

def load_dataset(*args, **kw): return Fashion(train=Rows(Digits()), test=Rows(Digits(train=False)))

# Packages that a notebook imports, and of which a port needs nothing else
stand_ins = {'datasets': dict(load_dataset=load_dataset, load_dataset_builder=None), 'diffusers': dict(UNet2DModel=None),
             'einops': dict(rearrange=None), 'k_diffusion': {}, 'torcheval': {},
             'torcheval.metrics': dict(MulticlassAccuracy=dict, Mean=dict, Metric=object)}

def human_numbers(path):
    words = 'one two three four five six seven eight nine ten'.split()
    for name, n in dict(train=700, valid=60).items():
        (path/f'{name}.txt').write_text(''.join(f'{words[i%10]} {words[i//10%10]} \n' for i in range(n)))

def titanic(path, n=90):
    import pandas as pd
    def pick(*os): return np.random.RandomState(len(os)).choice(os, n)
    df = pd.DataFrame(dict(Survived=pick(0, 1), Pclass=pick(1, 2, 3), Name=pick('Doe, Mr. J', 'Doe, Miss. J', 'Doe, Mrs. J'),
                           Parch=pick(0, 1), Sex=pick('male', 'female'), Age=pick(*range(1, 80)), SibSp=pick(0, 1, 2), Ticket=pick(*'abcd'),
                           Fare=pick(*range(7, 50)), Cabin=pick('A1', 'B2', 'C3'), Embarked=pick(*'CQS')))
    df.to_csv(path/'train.csv')

def cora(path, n=30):
    g = np.random.RandomState(0)
    lines = [' '.join(map(str, [i, *g.randint(0, 2, 12), f'class{i%3}'])) for i in range(n)]
    (path/'cora.content').write_text('\n'.join(lines))
    (path/'cora.cites').write_text('\n'.join(f'{a} {b}' for a, b in g.randint(0, n, (60, 2))))

def words(path):
    for name in ('train', 'valid', 'test'): (path/f'{name}.txt').write_text('the cat saw a dog and the dog saw it\n'*20)

def pictures(path):
    from stand_ins import save
    for i in range(12): save(path/'BSDS300/images'/('train', 'test')[i%3==2]/f'{i}.png', i, (256, 256))

def makers():
    import stand_ins
    own = dict(HUMAN_NUMBERS=human_numbers, TITANIC=titanic, CORA=cora, WORDS=words, PICTURES=pictures)
    return stand_ins.makers | own | dict(IMAGENETTE=stand_ins.makers['IMAGENETTE_160'])

# --- ports --------------------------------------------------------------------------------------------------------------------

def pattern(search): return '.*?'.join(map(re.escape, search.split('…')))+r'\Z'*search.endswith('…')

def edited(text, edits):
    "`text` after each edit: a function, or (search, replace), where … in a search stands for anything. ValueError if nothing is found"
    for o in edits:
        before = text
        text = o(text) if callable(o) else re.sub(pattern(o[0]), lambda m, new=o[1]: new, text, flags=re.S)
        if text==before: raise ValueError(f'not in the source: {o if callable(o) else o[0]}')
    return text

def cells_of(path, phrases):
    "A notebook as a script: for each phrase the next cell that has it, or the first one"
    cells = [''.join(o['source']) for o in json.loads(path.read_text())['cells'] if o['cell_type']=='code']
    at = []
    for p in phrases:
        having = [i for i, o in enumerate(cells) if p in o]
        if not having: raise ValueError(f'no cell of {path.name} has {p!r}')
        at.append(next((i for i in having if i >= max(at, default=0)), having[0]))
    return re.sub(r'^(\s*)[%!].*$', r'\1pass', '\n'.join(cells[i] for i in sorted({*at})), flags=re.M)+'\n'

def imported(text): return re.sub(r'(from fastai\S* import \*)', r'\1\nfrom learnerdist.fastai import *', text, count=1)
calls = r'^(\s*)((?:[\w,]+ = )?learn\.(?:fit|fit_one_cycle|fine_tune|lr_find|validate|get_preds|tta)\(.*\))$'
def in_context(options='split_batches=True'):
    "For an edit: a context around each call of a learner"
    return lambda text: re.sub(calls, rf'\1with learn.distrib_ctx({options}): \2', text, flags=re.M)
fastai = [imported, in_context()]
def ours(text): return 'import learnerdist.all as ld\n'+text
learner = r'learn = (?:Train|Momentum)?Learner\((get_model\(\)|model), dls, '
def with_ours(text): return re.sub(learner, r'learn = ld.Learner(ld.DataLoaders(dls.train, dls.valid), \1, ', text)  # miniai's
def few(text): return re.sub(r'\bbs = (1024|512|256)\b', 'bs = 12', re.sub(r'num_workers=[\w.]+', 'num_workers=0', text))
def shorter(text): return re.sub(r'cycle\(\d+', 'cycle(2', text).replace('sl = 16', 'sl = 8')
named = dict(imported=[imported], fastai=fastai, ours=[ours], with_ours=[with_ours], few=[few], shorter=[shorter])

def edits_of(lines):
    "From lines `search => replace`, a block of several lines between ---, or the name of edits after +"
    res, lines = [], iter(lines)
    for line in lines:
        if line=='---': old, new = '\n'.join(iter(lambda: next(lines), '---')).split('\n=>\n')
        else: old, new = (o.removeprefix(' ').replace('\\n', '\n') for o in line.split(' =>', 1)) if ' =>' in line else (line, '')
        if line.startswith('+in_context'): res.append(in_context(line.partition(' ')[2] or 'split_batches=True'))
        else: res += named[line[1:]] if line[:1]=='+' else [(old, new)]
    return res

def read_ports(text):
    "From the name of each port to what the file says of it"
    res = {}
    for part in re.split(r'^== ', text, flags=re.M)[1:]:
        head, *lines = part.rstrip('\n').split('\n')
        name, path = head.split()
        o = res[name] = dict(path=path, about='', argv='', told='', also='', cells='', data=[], port=[])
        for line in lines:
            if line and line[0]!=' ':
                key, _, value = line.partition(':')
                o[key] = [f'+{value.strip()}']*bool(value) if key in ('data', 'port') else value.strip()
            else: o[key].append(line[4:])
        o.update({k: edits_of(o[k]) for k in ('data', 'port')}, also=o['also'].split(), cells=o['cells'].replace('\\n', '\n').split(' | '))
    return res

pieces = read_ports((root/'tools/public_ports.txt').read_text())

def text_of(name, checkouts, ported=True):
    "(path, text) of a piece's script; (None, None) without its checkout"
    o = pieces[name]
    path = next((p for c in checkouts if (p := c.parent/o['path']).exists() and c.name==Path(o['path']).parts[0]), None)
    if path is None: return None, None
    text = edited(cells_of(path, o['cells']) if path.suffix=='.ipynb' else path.read_text(), o['data'])
    text = re.sub(r'untar_data\(URLs\.(\w+)\)', r"made('\1')", text)
    return path, edited(text, o['port']) if ported else text

def diff_of(name, checkouts):
    "The port's diff, lines that it adds, lines that it removes"
    before, after = (text_of(name, checkouts, o)[1].splitlines() for o in (False, True))
    lines = [*difflib.unified_diff(before, after, n=0, lineterm='')][2:]
    return lines, *(sum(o.startswith(c) for o in lines) for c in '+-')


# --- running and comparing ----------------------------------------------------------------------------------------------------

def noting(cls, seen):
    "`cls.__init__`, which notes the learner; fastai's gets inputs in float64"
    init = cls.__init__
    def __init__(self, *args, **kw):
        init(self, *args, **kw)
        seen.append(self)
        if not cls.__module__.startswith('fastai'): return
        from fastai.callback.core import Callback
        def double(os): return tuple(o.double() if isinstance(o, torch.Tensor) and o.is_floating_point() else o for o in os)
        class Doubled(Callback):
            order = 51
            def before_train(self): self.recorder.smooth_loss.val = self.recorder.smooth_loss.val.double()
            def after_loss(self): self.learn.loss = self.learn.loss.double()
            def before_batch(self): self.learn.xb, self.learn.yb = double(self.xb), double(self.yb)
        self.add_cb(Doubled())
    return mock.patch.object(cls, '__init__', __init__)

def sampled(p):
    "Of a tensor some 1,000 numbers, and its norm: the results of all pieces are in memory"
    p = p.detach().double().flatten()
    return torch.cat([p[::max(len(p)//1000, 1)], p.norm()[None]])

def numbers(learn):
    rec, weights = learn.recorder, [sampled(p) for p in learn.model.state_dict().values()]
    return dict(weights=weights, losses=[float(o) for o in getattr(rec, 'losses', ())], values=[[*o] for o in getattr(rec, 'values', ())])

@contextlib.contextmanager
def prepared(name, path, folder, seen):
    "Where a piece runs: its folder, arguments, modules and seeds; its learners get into `seen`"
    from fastai.learner import Learner as Theirs

    from learnerdist.all import Learner
    here = Path(folder)/f'{name}-{os.environ.get("WORLD_SIZE", 1)}'
    here.mkdir(exist_ok=True)
    os.chdir(here)
    for f in (torch.manual_seed, random.seed, np.random.seed): f(0)
    modules, folders = {*sys.modules}, [str(o) for o in path.parents[:3]]
    with contextlib.ExitStack() as stack:
        for cls in (Learner, Theirs): stack.enter_context(noting(cls, seen))
        stack.enter_context(mock.patch('torchvision.datasets.MNIST', Digits))
        stack.enter_context(mock.patch.object(sys, 'argv', [str(path), *pieces[name]['argv'].split()]))
        stack.enter_context(mock.patch.object(sys, 'path', folders+sys.path))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield
    for o in {*sys.modules}-modules:
        if str(getattr(sys.modules[o], '__file__', '')).startswith(str(path.parents[0])): del sys.modules[o]

def outcome(name, path, text, folder):
    "What a piece gives on this process: numbers of each of its learners and of variables; its error, and whether that is ours; warnings"
    res, seen, ns = {}, [], dict(__name__='__main__', __file__=str(path), made=lambda o: Path(folder)/o)
    with prepared(name, path, folder, seen), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        try:
            exec(compile(text, str(path), 'exec'), ns)
            for i, learn in enumerate(seen): res |= {f'{k} {i or ""}'.strip(): v for k, v in numbers(learn).items()}
            res |= {o: eval(o, ns) for o in pieces[name]['also']}
        except Exception as e:
            is_ours = isinstance(e, ValueError) and 'learnerdist' in traceback.extract_tb(e.__traceback__)[-1].filename
            res = dict(error=f'{type(e).__name__}: {e}', ours=is_ours, trace=traceback.format_exc())
    return res | dict(messages=[str(o.message) for o in warned])

def outcomes(jobs, folder):
    "Of several pieces, one after the other. jobs: from their names to (path, text)"
    from fastcore.basics import defaults
    defaults.cpus = 0
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.double)
    for k, v in stand_ins.items():
        sys.modules[k] = types.ModuleType(k)
        vars(sys.modules[k]).update(v)
    res = {}
    for name, job in jobs.items():
        start = time.process_time()
        res[name] = outcome(name, *job, folder)
        seconds, trace = time.process_time()-start, '' if res[name].get('ours') else res[name].get('trace', '')
        if os.environ.get('RANK', '0')=='0': print(name, f'{seconds:.1f} s', trace, file=sys.stderr, flush=True)
    return res

def codes(ranks): return sorted({o for r in ranks for t in r['messages'] for o in re.findall(r'^\[([a-z-]+)\] ', t)})

def judge(alone, ranks, told='', tol=1e-7):
    "(verdict, detail) of a run on some ranks"
    errors = [o for o in [alone, *ranks] if 'error' in o]
    clear = [o for o in errors if o['ours'] and told and told in o['error']]
    if errors: return ('error' if clear else 'FAILURE'), ' '.join((clear or errors)[0]['error'].split())[:150]
    names, said = [k for k in alone if k!='messages'], codes(ranks)
    if not names: return 'FAILURE', 'nothing to compare'
    off = {k: max(distance(o.get(k), alone[k]) for o in ranks) for k in names}
    far = ', '.join(f'{k} by {v:.1g}' for k, v in off.items() if not v <= tol)
    verdict = 'same' if not far else 'warned' if {*said}-{*harmless} else 'FAILURE'
    return verdict, ': '.join(filter(None, [', '.join(f'`{o}`' for o in said), far]))

def run_pieces(jobs, folder, worlds=(2, 3)):
    "From the name of each piece to (verdict, detail), joined over numbers of processes. jobs: as of `outcomes`"
    for o in set().union(*(re.findall(r"made\('(\w+)'\)", text) for _, text in jobs.values())):
        (Path(folder)/o).mkdir()
        makers()[o](Path(folder)/o)
    found = {o: [] for o in jobs}
    alone = run_ranks(outcomes, 1, jobs, folder, timeout_s=3000)[0]
    for W in worlds:
        ranks = run_ranks(outcomes, W, jobs, folder, timeout_s=3000)
        for o, (_, text) in jobs.items():
            tol = 1e-5 if 'fastai' in text else 1e-7  # fastai's losses are in float32
            found[o].append(judge(alone[o], [r[o] for r in ranks], pieces[o]['told'], tol))
    return {k: [' / '.join(dict.fromkeys(filter(None, o))) for o in zip(*v)] for k, v in found.items()}

def write(rows):
    "Put rows, from the names of pieces to lines, into the page's table, whose others stay"
    before, _, rest = page.read_text().partition(begin)
    old, _, rest = rest.partition(end)
    known = {k: line for k, o in pieces.items() for line in old.splitlines() if line.startswith(f'| {o["path"]} | {o["about"]} |')}
    head = '| code | what | lines of the port | on 1, 2, 3 processes | |\n|---|---|---|---|---|\n'
    page.write_text(before+begin+head+''.join(f'{(known | rows)[k]}\n' for k in pieces if k in known | rows)+end+rest)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folders = 'examples, fastbook, course22p2, course22, minGPT'
    p.add_argument('checkouts', nargs='+', type=lambda o: Path(o).resolve(), help=f'folders: {folders}')
    p.add_argument('--only', nargs='*', default=[*pieces], help=', '.join(pieces))
    p.add_argument('--diff', action='store_true', help='show the ports, run nothing')
    p.add_argument('--worlds', type=int, nargs='+', default=[2, 3], help='numbers of processes')
    p.add_argument('--write', action='store_true', help='write the table into docs/public.md')
    args = p.parse_args()
    jobs = {k: v for k in args.only if (v := text_of(k, args.checkouts))[0]}
    diffs, rows, bad = {k: diff_of(k, args.checkouts) for k in jobs}, {}, []
    if args.diff:
        for k, (lines, *_) in diffs.items(): print(f'--- {k}: {pieces[k]["path"]}', *lines, sep='\n')
        return False
    with tempfile.TemporaryDirectory() as folder: found = run_pieces(jobs, folder, args.worlds)
    for k, (verdict, detail) in found.items():
        rows[k] = '| {path} | {about} | '.format(**pieces[k])+f'+{diffs[k][1]} -{diffs[k][2]} | {verdict} | {detail} |'
        print(k, verdict, detail, flush=True)
        if 'FAILURE' in verdict: bad.append(k)
    if args.write: write(rows)
    return bool(bad)

if __name__=='__main__': sys.exit(main())
