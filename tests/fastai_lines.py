"""What the tests of fastai's side have shown, line by line, and the table of it in the docs

A test says `shows('6 `GradientClip`', W, outcome)` once it has compared. At its end, what it has shown must be what the table says of
it; `python -m pytest tests/test_fastai*.py --fastai-table` writes the table anew."""
import re
from pathlib import Path
import pytest

path = Path(__file__).parent.parent/'nbs/tutorials/fastai_table.md'
points = {2:'Training', 3:'Evaluation, prediction, files', 4:'Loaders', 5:'Metrics', 6:'Callbacks', 7:'Applications',
          8:'Outside of a context'}
shown = [] # (line, W, outcome) of the test that runs

head = """# fastai's Learner on 1, 2 and 3 ranks

Written by the tests, `python -m pytest tests/test_fastai*.py --fastai-table`: do not edit. Each test fails where it shows something else
than this table says.

One process, without a context, is fastai as it is; it reads the training data in the order that the context deals. A number is the largest
difference that the test allows, absolute or relative, on every rank of 1, 2 or 3 processes; "the same bits" is what it says. Models are
in float64 unless a line says otherwise, fastai's Recorder keeps float32."""

def shows(line, W, outcome):
    "`line` begins with the number of its point; `outcome` is a tolerance, 0 for bit by bit, or words"
    cell = outcome if isinstance(outcome, str) else 'the same bits' if outcome==0 else f'{outcome:g}'
    shown.append((line, W, cell))

def render(rows):
    "Markdown from (test, line, W, outcome)"
    cells,made_by = {},{}
    for test,line,W,outcome in rows:
        cells.setdefault(line, {})[W] = outcome
        made_by[line] = test
    res = [head]
    for n,title in points.items():
        lines = sorted((o for o in cells if o.startswith(f'{n} ')), key=lambda o: (made_by[o],o))
        res.append('\n'.join([f'## {title}', '', '| | 1 rank | 2 ranks | 3 ranks | shown by |', '|---|---|---|---|---|',
            *('| '+' | '.join([o[2:], *(cells[o].get(W, '') for W in (1,2,3)), f'`{made_by[o]}`'])+' |' for o in lines)]))
    return '\n\n'.join(res)+'\n'

def committed():
    "(test, line, W, outcome) of the table that is there"
    point,res = None,[]
    for o in path.read_text().splitlines() if path.exists() else []:
        if o.startswith('## '): point = next(k for k,v in points.items() if v==o[3:])
        row = re.fullmatch(r'\| (.+) \| `(\S+)` \|', o)
        if row:
            line,*cells = row[1].split(' | ')
            res += [(row[2], f'{point} {line}', W, c.strip()) for W,c in zip((1,2,3), cells) if c.strip()]
    return res

def name_of(item): return f'{item.path.name}::{item.name}'

@pytest.fixture(autouse=True)
def table(request, record_property):
    "What this test has shown is what the table says of it"
    shown.clear()
    yield
    rows = [(name_of(request.node), *o) for o in dict.fromkeys(shown) if o[1] in (1,2,3)] # the columns that there are
    record_property('fastai_rows', rows)
    failed = getattr(request.node, 'has_failed', True)
    if failed or request.config.option.fastai_table or not name_of(request.node).startswith('test_fastai'): return
    want = [o for o in committed() if o[0]==name_of(request.node)]
    assert sorted(rows)==sorted(want), f'this test shows something else than {path.name} says: write it with --fastai-table'

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when=='call': item.has_failed = not report.passed
    return report

def pytest_addoption(parser):
    parser.addoption('--fastai-table', action='store_true', help='write nbs/tutorials/fastai_table.md from what the tests show')

def pytest_terminal_summary(terminalreporter, config):
    "On the process that the workers report to; of tests that did not run, the table keeps what it says"
    failed = [o for k in ('failed','error') for o in terminalreporter.stats.get(k, []) if 'test_fastai_table' not in o.nodeid]
    if not config.option.fastai_table or failed or hasattr(config, 'workerinput'): return
    reports = [o for os in terminalreporter.stats.values() for o in os if getattr(o, 'when', '')=='teardown']
    rows = [tuple(row) for o in reports for k,v in o.user_properties if k=='fastai_rows' for row in v]
    ran = {f"{o.nodeid.split('/')[-1]}" for o in reports}
    kept = [o for o in committed() if o[0] not in ran and is_there(o[0])]
    path.write_text(render(dict.fromkeys(kept+rows)))

def is_there(test):
    file,name = test.split('::')
    return re.search(rf"^def {name.split('[')[0]}\(", (Path(__file__).parent/file).read_text(), re.M) is not None
