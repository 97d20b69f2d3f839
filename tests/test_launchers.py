"The recipes of docs/launchers.md, as they stand there: each ends with the numbers of one process"
import os,re,subprocess,sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers import blocks

pytestmark = pytest.mark.slow
path = Path(__file__).parent.parent/'docs/launchers.md'
page = path.read_text()
accelerate = re.search(r"^python (-c '.*?')", page, re.M)[1]
recipes = dict(torch='-m torch.distributed.run --nproc-per-node 2 train.py', accelerate=accelerate, spawn='spawn.py', ray='on_ray.py',
               dask='on_dask.py')

def numbers(command, folder):
    "Training and validation loss that a recipe prints at its end"
    for block in blocks(path):
        name = re.match(r'# (\w+\.py)\n', block)
        (folder/(name[1] if name else 'train.py')).write_text(block)
    env = {**os.environ, 'PYTHONPATH': f'{folder}:{Path(__file__).parent.parent}', 'OMP_NUM_THREADS': '1', 'RAY_DEDUP_LOGS': '0'}
    p = subprocess.run(f'{sys.executable} {command}', shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert p.returncode==0, p.stdout+p.stderr
    return [float(o) for o in re.search(r'final \[?([\d., ]+)', p.stdout+p.stderr)[1].split(',')]

@pytest.fixture(scope='module')
def alone(tmp_path_factory): return numbers('train.py', tmp_path_factory.mktemp('alone'))

@pytest.mark.parametrize('name', [pytest.param(o, marks=[pytest.mark.long]*(o=='spawn')) for o in recipes]) # test_env opens a group by hand
def test_the_same_numbers(name, alone, tmp_path):
    if not find_spec('distributed' if name=='dask' else name if name!='spawn' else 'torch'): pytest.skip('needs the extra `clients`')
    assert numbers(recipes[name], tmp_path)==pytest.approx(alone, rel=1e-5)

@pytest.mark.skipif(not find_spec('optuna'), reason='needs the extra `clients`')
def test_optuna(tmp_path):
    assert numbers('-m learnerdist.launch --nproc 2 on_optuna.py', tmp_path)==pytest.approx(numbers('on_optuna.py', tmp_path), rel=1e-5)
