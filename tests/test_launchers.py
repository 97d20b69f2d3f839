"The recipes of docs/launchers.md, as they stand there: each ends with the numbers of one process"
import os,re,socket,subprocess,sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

from helpers import blocks

pytestmark = pytest.mark.slow
path = Path(__file__).parent.parent/'docs/launchers.md'
page = path.read_text()
accelerate = re.search(r"^python (-c '.*?')", page, re.M)[1]
by_hand = re.search(r'^for i in .*', page, re.M)[0]
recipes = dict(torch='-m torch.distributed.run --nproc-per-node 2 train.py', accelerate=accelerate, spawn='spawn.py', ray='on_ray.py',
               dask='on_dask.py', pyspark='on_spark.py')
packages = dict(spawn='torch', dask='distributed')
needs = lambda *names: [o for o in names if not find_spec(o)] # of the extra `clients`

def started(command, folder):
    "The output of a recipe"
    for block in blocks(path):
        name = re.match(r'# (\w+\.py)\n', block)
        file = folder/(name[1] if name else 'train.py')
        if not file.exists(): file.write_text(block)
    env = {**os.environ, 'PYTHONPATH': f'{folder}:{Path(__file__).parent.parent}', 'OMP_NUM_THREADS': '1', 'RAY_DEDUP_LOGS': '0'}
    p = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert p.returncode==0, p.stdout+p.stderr
    return p.stdout+p.stderr

def numbers(command, folder):
    "Training and validation loss that a recipe prints at its end"
    found = re.search(r'final \[?([\d., ]+)', started(f'{sys.executable} {command}', folder))
    return [float(o) for o in found[1].split(',')]

@pytest.fixture(scope='module')
def alone(tmp_path_factory): return numbers('train.py', tmp_path_factory.mktemp('alone'))

@pytest.mark.parametrize('name', [pytest.param(o, marks=[pytest.mark.long]*(o=='spawn')) for o in recipes]) # test_env opens a group by hand
def test_the_same_numbers(name, alone, tmp_path):
    if needs(packages.get(name, name)): pytest.skip('needs the extra `clients`')
    if name=='pyspark' and not which('java'): pytest.skip('needs Java')
    assert numbers(recipes[name], tmp_path)==pytest.approx(alone, rel=1e-5)

def test_by_hand(alone, tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as s: port = s.getsockname()[1]
    out = started(by_hand.replace('29500', str(port)).replace('python', sys.executable), tmp_path)
    assert [float(o) for o in re.search(r'final \[(.*?)\]', out)[1].split(',')]==pytest.approx(alone, rel=1e-5)

killed = """
import os, signal
from pathlib import Path
from learnerdist.all import Callback, rank_distrib
from on_ray import train

class Kill(Callback):
    order = 200
    def before_batch(self):
        if self.epoch==1 and rank_distrib()==1 and not Path('FOLDER/killed').exists():
            Path('FOLDER/killed').touch()
            os.kill(os.getpid(), signal.SIGKILL)
    def after_epoch(self):
        if rank_distrib()==0: print(self.epoch, file=open('FOLDER/epochs', 'a'))

if __name__=='__main__': train(Kill())
"""

@pytest.mark.skipif(bool(needs('ray')), reason='needs the extra `clients`')
def test_ray_starts_again_from_a_checkpoint(alone, tmp_path):
    (tmp_path/'killed.py').write_text(killed.replace('FOLDER', str(tmp_path)))
    out = started(f'{sys.executable} killed.py', tmp_path)
    assert (tmp_path/'killed').exists()
    assert [float(o) for o in re.search(r'final \[(.*?)\]', out)[1].split(',')]==pytest.approx(alone, rel=1e-5)
    assert (tmp_path/'epochs').read_text().split()==['0','1'] # the first one was not repeated

@pytest.mark.skipif(bool(needs('optuna')), reason='needs the extra `clients`')
def test_optuna(tmp_path):
    assert numbers('-m learnerdist.launch --nproc 2 on_optuna.py', tmp_path)==pytest.approx(numbers('on_optuna.py', tmp_path), rel=1e-5)

@pytest.mark.skipif(bool(needs('ray')), reason='needs the extra `clients`')
def test_ray_tune(alone, tmp_path): assert numbers('on_tune.py', tmp_path)==pytest.approx(alone[1:], rel=1e-5)

@pytest.mark.skipif(bool(needs('kubernetes','kubeflow_trainer_api','yaml')), reason='needs the extra `clients`')
def test_manifests():
    "Each field of the manifests exists in the models of the two clients, and no required one is missing"
    import kubeflow_trainer_api.models as trainer
    import kubernetes.client as k8s
    import yaml
    service,job,train_job = yaml.safe_load_all('\n---\n'.join(re.findall(r'```yaml\n(.*?)```', page, re.S)))
    for o in (service,job):
        model = getattr(k8s, f'V1{o["kind"]}')
        client = k8s.ApiClient()
        made = client._ApiClient__deserialize(o, model)
        assert client.sanitize_for_serialization(made)==o
    made = trainer.TrainerV1alpha1TrainJob.from_dict(train_job)
    assert made.to_dict()==train_job
