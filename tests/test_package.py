"The sdist and the wheel: built from this tree, checked, installed apart from it, and run on two ranks"
import json,os,re,shutil,subprocess,sys,tarfile,zipfile
from email import message_from_bytes
from importlib.util import find_spec
from pathlib import Path
import pytest
pytestmark = pytest.mark.slow
import learnerdist

root = Path(__file__).parent.parent
job = """
import json,torch
from torch import nn
from torch.utils.data import TensorDataset
import learnerdist
from learnerdist.all import DataLoaders,Learner,is_rank0,num_distrib

x = torch.linspace(-1, 1, 16)[:,None]
dls = DataLoaders.from_dsets(TensorDataset(x, x*2), TensorDataset(x, x*2), bs=4)
torch.manual_seed(0)
learn = Learner(dls, nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD, lr=.1)
with learn.distrib_ctx(seed=1): learn.fit(1)
if is_rank0(): print(json.dumps([learnerdist.__file__, learnerdist.__version__, num_distrib(), learn.validate()[0]<3]))
"""

def run(*args, **kw):
    p = subprocess.run(args, capture_output=True, text=True, timeout=300, **kw)
    assert p.returncode==0, p.stdout+p.stderr
    return p.stdout

@pytest.fixture(scope='module')
def dist(tmp_path_factory):
    "A folder with both, built from a copy: a build leaves files behind"
    path = tmp_path_factory.mktemp('package')
    for o in ('learnerdist','tests','nbs'): shutil.copytree(root/o, path/'src'/o, ignore=shutil.ignore_patterns('__pycache__', '.ipynb_*'))
    files = 'setup.py','settings.ini','pyproject.toml','MANIFEST.in','README.md','CHANGELOG.md','LICENSE'
    for o in files: shutil.copy(root/o, path/'src')
    (path/'src/docs').mkdir()
    shutil.copy(root/'docs/messages.md', path/'src/docs')
    run(sys.executable, '-m', 'build', '--no-isolation', '--outdir', path/'dist', path/'src') # the wheel from the sdist
    return path/'dist'

def find(dist, pattern):
    res, = dist.glob(pattern)
    return res

def test_what_the_wheel_holds(dist):
    with zipfile.ZipFile(find(dist, '*.whl')) as z:
        info = f'learnerdist-{learnerdist.__version__}.dist-info'
        files,meta = {o for o in z.namelist() if not o.startswith(info)},message_from_bytes(z.read(f'{info}/METADATA'))
        assert f'{info}/licenses/LICENSE' in z.namelist()
        assert z.read('learnerdist/messages.md')==(root/'docs/messages.md').read_bytes() # that of `learnerdist explain`
    modules = {str(o.relative_to(root)) for k in ('*.py','*.pyi') for o in (root/'learnerdist').rglob(k)}-{'learnerdist/_modidx.py'}
    assert files==modules|{'learnerdist/py.typed','learnerdist/messages.md'}
    assert meta['Version']==learnerdist.__version__ and meta['License-Expression']=='Apache-2.0' and meta['Requires-Python']=='>=3.10'
    assert {'Typing :: Typed','Programming Language :: Python :: 3.10'} <= {*meta.get_all('Classifier')}

@pytest.mark.parametrize('url', ['','https://host/us/learnerdist'])
def test_links_of_the_package_page(url, tmp_path):
    "Absolute ones to this tree once settings.ini has `url_source`; before, none"
    for o in ('setup.py','settings.ini','README.md','learnerdist/__init__.py'):
        (tmp_path/o).parent.mkdir(exist_ok=True)
        shutil.copy(root/o, tmp_path/o)
    with open(tmp_path/'settings.ini', 'a') as f: f.write(f'url_source = {url}\n')
    page = run(sys.executable, 'setup.py', '-q', '--long-description', cwd=tmp_path)
    links = re.findall(r'(!?)\[[^]]*\]\((.*?)\)', page)
    places = [o.removeprefix(f'{url}/{"raw" if picture else "blob"}/v{learnerdist.__version__}/') for picture,o in links]
    assert bool(links)==bool(url) and all((root/o.partition('#')[0]).exists() for o in places) and all(o.startswith(url) for _,o in links)

def test_what_the_sdist_holds(dist):
    with tarfile.open(find(dist, '*.tar.gz')) as t: files = {o.partition('/')[2] for o in t.getnames()}
    assert {'settings.ini','setup.py','LICENSE','README.md','CHANGELOG.md'} <= files
    assert not [o for o in files if o.startswith(('nbs','tests','benchmarks'))]

def test_twine_has_no_complaint(dist):
    "Where twine is installed, as it is with the extra `dev`"
    assert len([*dist.iterdir()])==2
    if find_spec('twine'): run(sys.executable, '-m', 'twine', 'check', '--strict', *dist.iterdir())

@pytest.mark.long # what is in the wheel, the tests above show
def test_installed_wheel_runs(dist, tmp_path):
    "By the installed command, on two ranks, far from this tree"
    run(sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--no-index', '--target', tmp_path/'site', find(dist, '*.whl'))
    (tmp_path/'job.py').write_text(job)
    env = {**os.environ, 'PYTHONPATH': str(tmp_path/'site'), 'OMP_NUM_THREADS': '1'}
    out = run(tmp_path/'site/bin/learnerdist', 'launch', '--nproc', '2', '-m', 'job', cwd=tmp_path, env=env)
    file,*got = json.loads(out.splitlines()[-1])
    assert Path(file).is_relative_to(tmp_path) and got==[learnerdist.__version__, 2, True]
    assert run(tmp_path/'site/bin/learnerdist', 'explain', 'no-context', cwd=tmp_path, env=env).startswith('[no-context]\nA launch has')
