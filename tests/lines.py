"""Tables in the docs that tests write: what they have shown, line by line

A test says `shows('6 `GradientClip`', W, outcome)` once it has compared. At its end, what it has shown must be what the table says of it,
for these numbers of ranks; `python -m pytest tests/test_fastai*.py --fastai-table` writes a table anew."""
import re
from pathlib import Path
import pytest

root = Path(__file__).parent.parent
shown,tables = [],[] # (line, W, outcome) of the test that runs; all tables

class Table:
    "A page of `nbs/tutorials` with a section for each point, written by the tests whose files begin with `prefix`"
    def __init__(self, name, prefix, points, columns, head):
        self.path,self.name,self.prefix,self.points,self.columns,self.head = root/f'nbs/tutorials/{name}.md',name,prefix,points,columns,head
        self.option = f'--{name.replace("_", "-")}'
        tables.append(self)

    def shows(self, line, W, outcome):
        "`line` begins with the number of its point; `outcome` is a tolerance, 0 for bit by bit, or words"
        shown.append((line, W, outcome if isinstance(outcome, str) else 'the same bits' if outcome==0 else f'{outcome:g}'))

    def render(self, rows):
        "Markdown from (test, line, W, outcome)"
        cells,made_by,res = {},{},[self.head]
        for test,line,W,outcome in rows:
            cells.setdefault(line, {})[W] = outcome
            made_by[line] = test
        heads = ' | '.join(f'{W} rank{"s"*(W>1)}' for W in self.columns)
        for n,title in self.points.items():
            lines = sorted((o for o in cells if o.startswith(f'{n} ')), key=lambda o: (made_by[o],o))
            if lines: res.append('\n'.join([f'## {title}', '', f'| | {heads} | shown by |', '|---'*(len(self.columns)+2)+'|',
                *('| '+' | '.join([o[2:], *(cells[o].get(W, '') for W in self.columns), f'`{made_by[o]}`'])+' |' for o in lines)]))
        return '\n\n'.join(res)+'\n'

    def committed(self):
        "(test, line, W, outcome) of the table that is there"
        point,res = None,[]
        for o in self.path.read_text().splitlines() if self.path.exists() else []:
            if o.startswith('## '): point = next(k for k,v in self.points.items() if v==o[3:])
            row = re.fullmatch(r'\| (.+) \| `(\S+)` \|', o)
            if row:
                line,*cells = row[1].split(' | ')
                res += [(row[2], f'{point} {line}', W, c.strip()) for W,c in zip(self.columns, cells) if c.strip()]
        return res

    def write(self, reports, skipped):
        "The rows of tests that ran, and of others what the table says"
        rows = [tuple(row) for o in reports for k,v in o.user_properties if k==self.name for row in v]
        new = {o[:3] for o in rows}
        own = [o.nodeid for o in reports if '[' not in o.nodeid and o.nodeid not in skipped] # with other parameters, one may not have run
        ran = {o.split('/')[-1] for o in own}
        kept = [o for o in self.committed() if o[0] not in ran and o[:3] not in new and is_there(o[0])]
        self.path.write_text(self.render(dict.fromkeys(kept+rows)))

def _bare(name): return name.split('[')[0]
def name_of(item): return f'{item.path.name}::{_bare(item.name)}'
def table_of(item): return next((o for o in tables if item.path.name.startswith(o.prefix)), None)

@pytest.fixture(autouse=True)
def table(request, record_property):
    "What this test has shown is what the table says of it"
    shown.clear()
    yield
    own,name = table_of(request.node),name_of(request.node)
    if own is None: return
    rows = [(name, *o) for o in dict.fromkeys(shown) if o[1] in own.columns]
    record_property(own.name, rows)
    if getattr(request.node, 'has_failed', True) or request.config.getoption(own.option): return
    ws = {o[2] for o in rows} if '[' in request.node.name else own.columns # the same test with other parameters shows the others
    want = [o for o in own.committed() if o[0]==name and o[2] in ws]
    if '[' in request.node.name:
        want = [o for o in want if o[1] in {r[1] for r in rows}]
        if not want: return # the table has not been written for these parameters
    assert sorted(rows)==sorted(want), f'this test shows something else than {own.path.name} says: write it with {own.option}'

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when=='call': item.has_failed = not report.passed
    return report

def pytest_addoption(parser):
    for o in tables: parser.addoption(o.option, action='store_true', help=f'write {o.path.relative_to(root)} from what the tests show')

def pytest_terminal_summary(terminalreporter, config):
    "On the process that the workers report to; of tests that did not run, a table keeps what it says"
    for own in tables:
        failed = [o for k in ('failed','error') for o in terminalreporter.stats.get(k, []) if f'test_{own.name}' not in o.nodeid]
        if not config.getoption(own.option) or failed or hasattr(config, 'workerinput'): continue
        skipped = {o.nodeid for o in terminalreporter.stats.get('skipped', [])}
        own.write([o for os in terminalreporter.stats.values() for o in os if getattr(o, 'when', '')=='teardown'], skipped)

def is_there(test):
    file,name = test.split('::')
    return re.search(rf"^def {_bare(name)}\(", (Path(__file__).parent/file).read_text(), re.M) is not None
