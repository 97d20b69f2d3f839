"""What the tests of fastai's side have shown, line by line, and the table of it in the docs

A test says `shows('6 `GradientClip`', W, outcome)` once it has compared. At its end, what it has shown must be what the table says of it,
for these numbers of ranks; `python -m pytest tests/test_fastai*.py --fastai-table` writes the table anew."""
import re
from pathlib import Path
import pytest

tests = Path(__file__).parent
path,option = tests.parent/'nbs/tutorials/fastai_table.md','--fastai-table'
points = {2:'Training', 3:'Evaluation, prediction, files', 4:'Loaders', 5:'Metrics', 6:'Callbacks', 7:'Applications',
          8:'Outside of a context'}
worlds = 1,2,3

head = """# fastai's Learner on 1, 2 and 3 ranks

Written by the tests, `python -m pytest tests/test_fastai*.py --fastai-table`: do not edit. Each test fails where it shows something else
than this table says.

One process, without a context, is fastai as it is; it reads the training data in the order that the context deals. A number is the largest
difference that the test allows, absolute or relative, on every rank of 1, 2 or 3 processes; "the same bits" is what it says. Models are
in float64 unless a line says otherwise, fastai's Recorder keeps float32."""

shown = [] # (line, W, outcome) of the test that runs

def shows(line, W, outcome):
    "`line` begins with the number of its point; `outcome` is a tolerance, 0 for bit by bit, or words"
    shown.append((line, W, outcome if isinstance(outcome, str) else 'the same bits' if outcome==0 else f'{outcome:g}'))

def render(rows):
    "Markdown from (test, line, W, outcome)"
    cells,made_by,res = {},{},[head]
    for test,line,W,outcome in rows:
        cells.setdefault(line, {})[W] = outcome
        made_by[line] = test
    heads = ' | '.join(f'{W} rank{"s"*(W>1)}' for W in worlds)
    for n,title in points.items():
        lines = sorted((o for o in cells if o.startswith(f'{n} ')), key=lambda o: (made_by[o],o))
        texts = ['| '+' | '.join([o[2:], *(cells[o].get(W, '') for W in worlds), f'`{made_by[o]}`'])+' |' for o in lines]
        if lines: res.append('\n'.join([f'## {title}', '', f'| | {heads} | shown by |', '|---'*(len(worlds)+2)+'|', *texts]))
    return '\n\n'.join(res)+'\n'

def committed():
    "(test, line, W, outcome) of the table that is there"
    point,res = None,[]
    for o in path.read_text().splitlines() if path.exists() else []:
        if o.startswith('## '): point = next(k for k,v in points.items() if v==o[3:])
        if row := re.fullmatch(r'\| (.+) \| `(\S+)` \|', o):
            line,*cells = row[1].split(' | ')
            res += [(row[2], f'{point} {line}', W, c.strip()) for W,c in zip(worlds, cells) if c.strip()]
    return res

def is_there(test):
    file,name = test.split('::')
    return re.search(rf"^def {name.split('[')[0]}\(", (tests/file).read_text(), re.M) is not None

@pytest.fixture(autouse=True)
def table(request, record_property):
    "What this test has shown is what the table says of it"
    shown.clear()
    yield
    item = request.node
    name,has_params = f"{item.path.name}::{item.name.split('[')[0]}",'[' in item.name
    if not name.startswith('test_fastai'): return
    rows = [(name, *o) for o in dict.fromkeys(shown) if o[1] in worlds]
    record_property('rows', rows)
    if getattr(item, 'has_failed', True) or request.config.getoption(option): return
    ws = {o[2] for o in rows} if has_params else worlds # the same test with other parameters shows the others
    want = [o for o in committed() if o[0]==name and o[2] in ws]
    if has_params: want = [o for o in want if o[1] in {r[1] for r in rows}]
    if has_params and not want: return # the table has not been written for these parameters
    assert sorted(rows)==sorted(want), f'this test shows something else than {path.name} says: write it with {option}'

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when=='call': item.has_failed = not report.passed
    return report

def pytest_addoption(parser): parser.addoption(option, action='store_true', help=f'write {path.name} from what the tests show')

def pytest_terminal_summary(terminalreporter, config):
    "On the process that the workers report to; of tests that did not run, the table keeps what it says"
    stats = terminalreporter.stats
    failed = [o for k in ('failed','error') for o in stats.get(k, []) if 'test_fastai_table' not in o.nodeid]
    if not config.getoption(option) or failed or hasattr(config, 'workerinput'): return
    reports = [o for os in stats.values() for o in os if getattr(o, 'when', '')=='teardown']
    skipped = {o.nodeid for o in stats.get('skipped', [])}
    rows = [tuple(row) for o in reports for k,v in o.user_properties if k=='rows' for row in v]
    # with other parameters, one of a name may not have run
    ran = {o.nodeid.split('/')[-1] for o in reports if '[' not in o.nodeid and o.nodeid not in skipped}
    kept = [o for o in committed() if o[0] not in ran and o[:3] not in {r[:3] for r in rows} and is_there(o[0])]
    path.write_text(render(dict.fromkeys(kept+rows)))
