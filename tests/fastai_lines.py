"""The table in the docs of what fastai's side does on 1, 2 and 3 ranks, line by line, each shown by the test that it names

A test says `shows('6 `GradientClip`', W, outcome)` once it has compared, and fails unless the table says so. At its end it has shown all
lines that name it, for these numbers of ranks."""
import os, re
from pathlib import Path
import pytest

tests = Path(__file__).parent
path = tests.parent/'nbs/tutorials/fastai_table.md'
points = {2:'Training', 3:'Evaluation, prediction, files', 4:'Loaders', 5:'Metrics', 6:'Callbacks', 7:'Applications',
          8:'Outside of a context'}
worlds = 1,2,3

def read():
    "{(number of the point and line, W): (outcome, test)}"
    point,res = None,{}
    for o in path.read_text().splitlines():
        if o.startswith('## '): point = next(k for k,v in points.items() if v==o[3:])
        if row := re.fullmatch(r'\| (.+) \| `(\S+)` \|', o):
            line,*cells = row[1].split(' | ')
            res |= {(f'{point} {line}', W): (c.strip(),row[2]) for W,c in zip(worlds, cells) if c.strip()}
    return res

rows,shown = read(),set()

def shows(line, W, outcome):
    "`line` begins with the number of its point; `outcome` is a tolerance, 0 for bit by bit, or words"
    text = outcome if isinstance(outcome, str) else 'the same bits' if outcome==0 else f'{outcome:g}'
    test = os.environ['PYTEST_CURRENT_TEST'].split('/')[-1].split('[')[0].split(' ')[0]
    assert W not in worlds or rows.get((line, W))==(text,test), f'{path.name} says otherwise: {line} | {W} | {text} | {test}'
    shown.add((line, W))

@pytest.fixture(autouse=True)
def table(request):
    "What a test has shown is all that names it"
    shown.clear()
    yield
    name,Ws = f'{request.node.path.name}::{request.node.originalname}',{W for _,W in shown}
    assert {k for k,(_,test) in rows.items() if test==name and k[1] in Ws}-shown==set()
