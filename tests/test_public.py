"tools/public.py on a toy script and notebook: searches and replaces, cells, lines counted, verdicts. The ports need the checkouts"
import json,os,subprocess,sys
from pathlib import Path
import pytest,torch
root = Path(__file__).parent.parent
sys.path.insert(0, str(root/'tools'))
import public

ports = """== toy toys/train.py
about: a loop
argv: --lr 1
data:
    n = 1000 => n = 10
    import matplotlib\\n =>
port:
    ---
    for i in…step()
    =>
    learn = Learner(i => i)
    learn.fit(1)
    ---

== book toys/a.ipynb
cells: import | fit
data: few
port: fastai
"""

@pytest.fixture
def toys(tmp_path, monkeypatch):
    folder = tmp_path/'toys'
    folder.mkdir()
    (folder/'train.py').write_text('import matplotlib\nn = 1000\nfor i in range(n):\n    loss()\n    step()\nend()\n')
    cells = ['fit', 'from fastai.vision.all import *\nbs = 256', 'plot', '%time\nlearn.fit(1)\npreds,_ = learn.get_preds()\ny = learn.x']
    cells = [dict(cell_type='code', source=[o]) for o in cells]
    (folder/'a.ipynb').write_text(json.dumps(dict(cells=cells)))
    monkeypatch.setattr(public, 'pieces', public.read_ports(ports))
    return [folder]

def test_a_port_is_searches_and_replaces(toys):
    assert public.pieces['toy']['argv']=='--lr 1' and public.pieces['toy']['about']=='a loop'
    assert public.text_of('toy', toys, ported=False)[1].startswith('n = 10\nfor')
    assert public.text_of('toy', toys)[1]=='n = 10\nlearn = Learner(i => i)\nlearn.fit(1)\nend()\n'
    lines,added,removed = public.diff_of('toy', toys)
    assert (added,removed)==(2, 3)
    assert lines[1:]==['-for i in range(n):','-    loss()','-    step()','+learn = Learner(i => i)','+learn.fit(1)']
    assert public.text_of('toy', [])==(None, None)
    with pytest.raises(ValueError, match='not in the source: range.…'): public.edited('ranges', [('range(…', '')])

def test_cells_of_a_notebook(toys):
    begun = 'from fastai.vision.all import *\nfrom learnerdist.fastai import *\nbs = 12\npass\n'
    context = 'with learn.distrib_ctx(split_batches=True): '
    assert public.text_of('book', toys)[1]==f'{begun}{context}learn.fit(1)\n{context}preds,_ = learn.get_preds()\ny = learn.x\n'
    with pytest.raises(ValueError, match="no cell of a.ipynb has 'tune'"): public.cells_of(toys[0]/'a.ipynb', ['tune'])

def test_verdicts():
    def of(w, *messages): return dict(weights=[torch.tensor([w])], losses=[.5], messages=messages)
    def judge(*ranks, told=''): return public.judge(of(1.), ranks, told)
    assert judge(of(1.), of(1., '[mixes-samples] x'))==('same', '`mixes-samples`') and judge(of(1.+1e-9))==('same', '')
    assert judge(of(1.1, '[mixes-samples] x'))==('warned', '`mixes-samples`: weights by 0.1')
    assert judge(of(1.1, '[unused-parameters] x'))[0]==judge(of(float('nan')))[0]==judge(dict(messages=[]))[0]=='FAILURE'
    assert judge(dict(error='ValueError: take\nanother', ours=True), told='take')==('error', 'ValueError: take another')
    assert judge(dict(error='KeyError: take', ours=False), told='take')[0]==judge(dict(error='ValueError: x', ours=True))[0]=='FAILURE'

@pytest.mark.long
@pytest.mark.skipif('PUBLIC_CHECKOUTS' not in os.environ, reason='PUBLIC_CHECKOUTS names no folders of checkouts')
def test_ports_of_public_code():
    checkouts = os.environ['PUBLIC_CHECKOUTS'].split(os.pathsep)
    p = subprocess.run([sys.executable, root/'tools/public.py', *checkouts], capture_output=True, text=True)
    assert p.returncode==0, p.stdout+p.stderr
