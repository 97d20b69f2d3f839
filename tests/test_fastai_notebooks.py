"tools/fastai_notebooks.py: cells of a notebook in three ways, stand-ins for its data, and the table of them"
import json, sys, tarfile
from pathlib import Path
import pytest
from torch.distributed import HashStore
pytest.importorskip('fastai')
sys.path.insert(0, str(Path(__file__).parent.parent/'tools'))
import fastai_notebooks as tool
from learnerdist.core.env import unpack_error
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

def test_a_run_in_parts(tmp_path):
    "Outcomes are kept as they come, and taken from there"
    ran,file = [],tmp_path/'all.json'
    def run(path):
        ran.append(path.stem)
        if path.stem=='02': raise KeyboardInterrupt
        return dict(plain={3: 'ok'}, ranks={3: 'rank 1: KeyError: 1'})
    with pytest.raises(KeyboardInterrupt): tool.of_all([Path('01.ipynb'),Path('02.ipynb')], ['plain','ranks'], run, file)
    res = tool.of_all([Path('01.ipynb'),Path('00.ipynb')], ['plain','ranks'], run, file)
    assert ran==['01','02','00'] and [*res]==['00','01'] and res['01']==res['00']==run(Path('00'))
    assert [*tool.of_all([Path('03.ipynb')], ['plain'], lambda path: dict(plain={1: 'ok'}), file)]==['03'] # others were run in other ways

def test_the_limit_of_a_cell_that_has_failed():
    "It ends no notebook: the signal may come while the error is read"
    cell = ['import time','end = time.process_time()+.4','class Slow(Exception):','    def __str__(self):',
            '        while time.process_time()<end: pass','        return "slow"','raise Slow']
    assert tool.outcome('\n'.join(cell), {}, .2)=='Slow: slow'
    assert tool.outcome('while True: pass', {}, .2)=='TimeoutError: takes over 0.2 s'

def test_ranks_that_wait_hear_of_the_end_of_a_cell(tmp_path, monkeypatch):
    "Rank 1 has ended it, and rank 0 before"
    store = HashStore()
    for name,value in dict(num_distrib=2, rank_distrib=1, in_group=False, shared_store=store).items():
        monkeypatch.setattr(tool, name, lambda value=value: value)
    (tmp_path/'outcome-3-0').write_text('ok')
    tool.end_cell(tmp_path, 3, 'ok')
    assert 'rank 1 has ended this cell' in str(unpack_error(store.get('left').decode()))

def test_no_notebooks(folder):
    (folder/'empty').mkdir()
    with pytest.raises(SystemExit, match='no notebooks in it'): tool.find_notebooks(folder/'empty', folder)
