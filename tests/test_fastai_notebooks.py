"tools/fastai_notebooks.py: cells of a notebook in four ways, and the table of them"
import json, sys, tarfile
from pathlib import Path
import pytest
pytest.importorskip('fastai')
sys.path.insert(0, str(Path(__file__).parent.parent/'tools'))
import fastai_notebooks as tool

cells = ['#| default_exp metrics', '#| export\nraise SystemExit(1)', '#| slow\n1/0', '#|eval: false\n1/0', # not run
    '%matplotlib inline\nfrom fastai.test_utils import *',
    'from learnerdist.core.env import group_size\nfrom fastai.callback.all import *',
    'class Looks(Callback):\n    def before_train(self): self.seen = hasattr(self.learn, "distributed_trainer"),group_size()',
    'learn = synth_learner(n_trn=2)\nwith learn.no_bar(): learn.fit(1, cbs=(looks := Looks()))',
    'assert not looks.seen[0], "within a context"', 'assert looks.seen[1]==1, "on two processes"', 'assert accuracy is not None\n1/0',
    'class Mine(type(learn)):\n    def get_preds(self, extra=1, **kw): return extra,super().get_preds(**kw)',
    'learn.__class__ = Mine\nassert learn.get_preds(3)[0]==3 and len(learn.get_preds()[1][0])==learn.dls.valid.n']

@pytest.fixture
def folder(tmp_path):
    (tmp_path/'nbs').mkdir()
    nb = dict(cells=[dict(cell_type='markdown', source=['# Title'])]+[dict(cell_type='code', source=o.splitlines(True)) for o in cells])
    (tmp_path/'nbs'/'13b_metrics.ipynb').write_text(json.dumps(nb))
    return tmp_path

@pytest.mark.long
def test_every_way(folder):
    with tarfile.open(folder/'fastai.tar.gz', 'w:gz') as f: f.add(folder/'nbs', 'fastai-1/nbs')
    path, = tool.find_notebooks(folder/'fastai.tar.gz', folder/'out')
    res = {way: tool.outcomes(path, way, 100) for way in tool.ways}
    assert [*res['plain']]==[5,6,7,8,9,10,11,12,13]
    failed = {way: [i for i,o in os.items() if o!='ok'] for way,os in res.items()}
    assert failed==dict(plain=[11], patched=[11], context=[9,11], ranks=[9,10,11])
    text,bad = tool.table({'13b_metrics': res})
    assert '| 13b_metrics | 9 | 8 | 8 | 7 | 6 |' in text and len(bad)==3
    assert '- 13b_metrics, cell 10, ranks: rank 0: AssertionError: on two processes' in text

def test_no_notebooks(folder):
    (folder/'empty').mkdir()
    with pytest.raises(SystemExit, match='no notebooks in it'): tool.find_notebooks(folder/'empty', folder)
