"Every block of Python on the pages of docs/ and in README runs, in order, on 2 processes, or on those that it starts"
import json,os,re,shlex
from itertools import product

import pytest
from fastcore.basics import defaults
from PIL import Image

from helpers import as_script,blocks,root,write
from harness import needs_fsdp2,newer_torch
from learnerdist import verify
from learnerdist.core.compat import fsdp_on_cpu
from learnerdist.launch.cli import get_parser
from learnerdist.testing import run_ranks

elsewhere = 'launchers','messages' # test_launchers and test_messages run those
pages = [root/'README.md',*sorted(o for o in (root/'docs').glob('*.md') if o.stem not in elsewhere)]
# What a page takes for granted: a learner, its data and model
setup = '''
import os
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from learnerdist.all import *
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4), torch.randint(3, (24,)))
dls = DataLoaders.from_dsets(data, data, bs=8)
loss_func = nn.CrossEntropyLoss()
def new_learner(**kw): return Learner(dls, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), loss_func, **kw)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
learn = new_learner()
bucket = f'file://{os.getcwd()}/bucket'
'''
def two_digits(folder):
    "A few pictures where `untar_data(URLs.MNIST_SAMPLE)` looks for them before it downloads"
    for part,label in product(('train','valid'), '37'):
        at = folder/f'data/mnist_sample/{part}/{label}'
        at.mkdir(parents=True)
        for i in range(33 if part=='train' else 9): Image.new('L', (28,28), 20*int(at.name)+i).save(at/f'{i}.png')

complete = 'README','start','accelerate' # These begin with their own imports and data
starts = 'launching','same','fastai_day' # Their blocks start processes
page = root/'docs/fastai_day.md'
*day,killed,jupyter = blocks(page)

def run(path, folder, texts):
    "Blocks of a page, one after the other"
    os.chdir(folder)
    defaults.cpus = 0 # fastai's loaders start no workers
    space = dict(__name__='__main__', __file__=str(path))
    for i,block in enumerate(texts): exec(compile(block, f'{path.name}, block {i}', 'exec'), space)

@pytest.mark.parametrize('path', [o for o in pages if blocks(o) and o.stem not in starts], ids=lambda o: o.stem)
def test_blocks_run(path, tmp_path):
    if path.stem=='clients': pytest.importorskip('wandb')
    if path.stem=='sharded' and not fsdp_on_cpu: pytest.skip(needs_fsdp2.kwargs['reason'])
    two_digits(tmp_path)
    texts = [setup]*(path.stem not in complete)+blocks(path)
    run_ranks(run, 2, path, tmp_path, texts, timeout_s=240, env=dict(FASTAI_HOME=str(tmp_path)))

@pytest.mark.slow
@pytest.mark.parametrize('page, words', [('launching', ['epoch']), ('same', ['DIFFERENT: 2 ','The same: 2 '])])
def test_blocks_that_start_processes(page, words, tmp_path, monkeypatch, capfd):
    "As a script"
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, '\n'.join([setup,*blocks(root/f'docs/{page}.md')]), 'page.py')
    as_script(file, monkeypatch)
    text,_ = capfd.readouterr()
    assert all(o in text for o in words), text

@pytest.mark.slow
def test_a_day_with_fastai(tmp_path, capfd):
    "With a quarter of the pictures; then its script, which a kill ends in its first epoch, and which goes on there when it starts again"
    first,*rest = day
    first = first.replace('range(1600)', 'range(400)')
    run_ranks(run, 2, page, tmp_path, [first,*rest], timeout_s=240)
    assert all((tmp_path/o).stat().st_size for o in ('lr.png','confusion.png','history.csv','models/model.pth'))
    script = [first.replace('bs=16', 'bs=4'),killed.replace('fine_tune(2', 'fine_tune(1')] # as many steps as with all pictures
    assert run_ranks(run, 2, page, tmp_path, script, errors='return')[1].message.startswith('ended by SIGKILL')
    run_ranks(run, 2, page, tmp_path, script, timeout_s=240)
    out,_ = capfd.readouterr()
    assert 'going on in epoch 0 after step 20' in out and re.search(r'^accuracy 0\.\d+$', out, re.M)

@pytest.mark.long
def test_a_day_with_fastai_in_jupyter(tmp_path, monkeypatch):
    import nbclient,nbformat # here: each rank imports what stands at the top
    monkeypatch.setenv('IPYTHONDIR', str(tmp_path)) # the kernel's own files
    cells = [day[0],jupyter,'r.close()']
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in cells])
    nbclient.NotebookClient(nb, timeout=240, resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    assert nb.cells[1].outputs[-1].data['text/plain'].startswith('[')

at_the_top = """
import time
from pathlib import Path
from PACKAGE import *
name = f'run_{time.time_ns()}' # of each rank
BROADCAST_OBJECT
if rank_distrib()==1: Path('asked').touch()
else:
    while not Path('asked').exists(): pass
    Path('written').write_text(name)
DISTRIB_BARRIER
assert Path('written').read_text()==name
"""

@pytest.mark.parametrize('package', ['learnerdist.all','learnerdist.fastai'])
def test_remedies_for_files_hold_at_the_top_of_a_script(package, tmp_path):
    "Those of docs/symptoms.md that are collectives: no context is open there"
    rows = re.findall(r'`([^`]*(broadcast_object|distrib_barrier)\([^`]*)`', (root/'docs/symptoms.md').read_text())
    text = at_the_top.replace('PACKAGE', package)
    for line,name in rows: text = text.replace(name.upper(), line)
    assert len(rows)==2
    run_ranks(run, 2, root/'docs/symptoms.md', tmp_path, [text], timeout_s=60)

@newer_torch('torchrun takes fewer options')
def test_commands_have_these_options():
    "Each command of ours on a page is one that its parser takes"
    found = [m for o in [root/'README.md',*(root/'docs').glob('*.md')]
             for m in re.findall(r'^(?:srun )?python -m learnerdist\.(launch|verify) (.+?)(?: +#.*| \|\|.*)?$', o.read_text(), re.M)]
    assert len(found)>10
    for name,args in found:
        parser = get_parser() if name=='launch' else verify.get_parser()
        assert parser.parse_args(shlex.split(args))

def text_of(file):
    "Prose, without blocks of code"
    text = file.read_text()
    if file.suffix=='.ipynb':
        text = '\n\n'.join(''.join(c['source']) for c in json.loads(text)['cells'] if c['cell_type']=='markdown')
    return re.sub(r'^```.*?^```', '', text, flags=re.M|re.S)

def anchors(file):
    "Of its headings"
    heads = [re.sub(r'\[(.*?)\]\(.*?\)', r'\1', o) for o in re.findall('^#+ (.+)$', text_of(file), re.M)]
    return {re.sub(r'[^\w\- ]', '', o.lower()).strip().replace(' ', '-') for o in heads}

def test_links_lead_somewhere():
    "Those from a page or a notebook to another, and to a heading. Those of the site that is made from them are in test_docs.py"
    files = [*root.glob('*.md'),*(root/'docs').glob('*.md'),*(root/'nbs').rglob('[!.]*.md'),*(root/'nbs').rglob('*.ipynb')]
    texts = {o: text_of(o) for o in files}
    links = [(at,o) for at,text in texts.items() for o in re.findall(r'\]\(([^)\s]+)\)', text) if not re.match('https?:|mailto:', o)]
    assert len(links)>200
    for at,link in links:
        path,_,anchor = link.partition('#')
        to = at.parent/path if path else at
        assert to.exists() and (not anchor or to.suffix not in ('.md','.ipynb') or anchor in anchors(to)), (at,link)
