"tools/fastai_notebooks.py: cells of a notebook in three ways, stand-ins for its data, and the table of them"
import json, sys, tarfile
from pathlib import Path
import pytest
pytest.importorskip('fastai')
sys.path.insert(0, str(Path(__file__).parent.parent/'tools'))
import fastai_notebooks as tool
from stand_ins import standing_in

cells = ['#| default_exp metrics', '#| export\nraise SystemExit(1)', '#| slow\n1/0', '#|eval: false\n1/0', # not run
    '%matplotlib inline\nfrom fastai.test_utils import *',
    'from learnerdist.core.env import group_size,rank_distrib\nfrom fastai.callback.all import *',
    'class Looks(Callback):\n    def before_train(self): self.seen = hasattr(self.learn, "distributed_trainer"),group_size()',
    'learn = synth_learner(n_trn=2)\nwith learn.no_bar(): learn.fit(1, cbs=(looks := Looks()))',
    'assert not looks.seen[0], "within a context"', 'assert looks.seen[1]==1, "on two processes"', 'assert accuracy is not None\n1/0',
    'class Mine(type(learn)):\n    def get_preds(self, extra=1, **kw): return extra,super().get_preds(**kw)',
    'learn.__class__ = Mine\nassert learn.get_preds(3)[0]==3 and len(learn.get_preds()[1][0])==learn.dls.valid.n',
    'if rank_distrib(): (Path(synth_learner().path)/"none").read_text()\nlearn.fit(1)', # rank 0 waits for a rank that has left
    'from fastai.data.all import *\npath = untar_data(URLs.MNIST_TINY)\ntest_eq(len(get_image_files(path/"train")), 709)',
    'import signal\nsignal.setitimer(signal.ITIMER_PROF, .1)\nwhile True: pass', # too slow
    'learn.fit(1)', 'if not rank_distrib(): learn.validate()', 'learn.validate()']

@pytest.fixture
def folder(tmp_path):
    (tmp_path/'nbs').mkdir()
    nb = dict(cells=[dict(cell_type='markdown', source=['# Title'])]+[dict(cell_type='code', source=o.splitlines(True)) for o in cells])
    (tmp_path/'nbs'/'13b_metrics.ipynb').write_text(json.dumps(nb))
    (tmp_path/'nbs'/'_draft.ipynb').write_text(json.dumps(nb))
    return tmp_path

@pytest.mark.long
def test_every_way(folder, monkeypatch):
    from fastai.data.external import URLs
    with tarfile.open(folder/'fastai.tar.gz', 'w:gz') as f: f.add(folder/'nbs', 'fastai-1/nbs')
    path, = tool.find_notebooks(folder/'fastai.tar.gz', folder/'out')
    with standing_in(folder/'data', URLs, ['MNIST_TINY']) as urls: res = tool.in_all_ways(path, tool.ways, urls, folder)
    assert [*res['plain']]==[*range(5, 20)]
    failed = {way: sorted(i for i,o in os.items() if o!='ok') for way,os in res.items()}
    assert failed==dict(plain=[11,16], context=[9,11,16], ranks=[9,10,11,14,16,18]) # once they have failed, ranks go on together
    assert 'takes over 10 s' in res['plain'][16] and 'takes over 10 s' in res['ranks'][16]
    assert 'rank 1: FileNotFoundError' in res['ranks'][14] and 'rank 1 has ended this cell' in res['ranks'][18] # no timeout
    monkeypatch.setattr(tool, 'reasons', {'within a context|on two processes': 'looks at ranks', 'FileNotFound': 'a file'})
    text,good = tool.table({'13b_metrics': res})
    assert '| 13b_metrics | 15 | 13 | 12 | 9 |' in text and not good and text.count('NO REASON')==1
    assert '- 13b_metrics, cell 10, ranks: rank 0: AssertionError: on two processes: looks at ranks' in text
    tool.reasons['has ended this cell'] = 'rank 0 alone'
    assert tool.table({'13b_metrics': res})[1] and not tool.table({f'{i}': res for i in range(6)})[1] # 24 cells
    page = folder/'page.md'
    page.write_text('# Page\n<!-- tools/fastai_notebooks.py --write -->\nold\n<!-- end notebooks -->\nrest\n')
    tool.write(tool.section({'13b_metrics': res}), page)
    text = page.read_text()
    assert '- a file: 13b_metrics (cell 14).' in text and 'old' not in text and text.endswith('-->\nrest\n')

def test_no_notebooks(folder):
    (folder/'empty').mkdir()
    with pytest.raises(SystemExit, match='no notebooks in it'): tool.find_notebooks(folder/'empty', folder)
