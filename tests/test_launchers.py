"The recipes of docs/launchers.md, as they stand there: each ends with the numbers of one process"
import json,os,re,subprocess,sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest
import torch

from helpers import Fork, blocks, environment, free_port
from learnerdist.launch.cli import run_target

pytestmark = pytest.mark.slow
root = Path(__file__).parent.parent
path = root/'docs/launchers.md'
page = path.read_text()
line = lambda begin: re.search(rf'^{begin}.*?(?= +#|$)', page, re.M)[0]
recipes = dict(torch=line('torchrun'), accelerate=line('python -c'), mpirun=line('mpirun'), spawn='python spawn.py', ray='python on_ray.py',
               distributed='python on_dask.py', pyspark='python on_spark.py')
sweep = re.search('`(python -m .* on_optuna.py)`', page)[1]
main = "if __name__=='__main__': main()"
needs = lambda *names: [o for o in names if not find_spec(o)] # of the extra `launchers`
drop = 'RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT'.split()
# for each rank, if more processes than cores and by root
mpirun_here = dict(OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1', PRTE_MCA_rmaps_default_mapping_policy=':oversubscribe')

def write_recipes(folder, train=''):
    "All blocks of the page as files; `train` stands at the end of train.py's definitions"
    for block in blocks(path):
        name = re.match(r'# (\w+\.py)\n', block)
        text = block.replace('/tmp/', f'{folder}/').replace('29500', str(free_port()))
        (folder/(name[1] if name else 'train.py')).write_text(text if name else text.replace(main, train+main))

def start(command, folder, **env):
    env = {k:v for k,v in os.environ.items() if k not in drop} | mpirun_here | dict(
        PYTHONPATH=f'{folder}:{root}', HOME=str(folder), PATH=f'{Path(sys.executable).parent}:{os.environ["PATH"]}',
        OMP_NUM_THREADS='1', RAY_DEDUP_LOGS='0', PYTHONUNBUFFERED='1') | env
    return subprocess.Popen(command, shell=True, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

def ended(p):
    "What a process has said, and its status"
    with p: out,_ = p.communicate(timeout=600)
    return out,p.returncode

def started(command, folder, train=''):
    "The output of a recipe"
    write_recipes(folder, train)
    out,status = ended(start(command, folder))
    assert status==0, out
    return out

def numbers(out, name='final'):
    "The last numbers that a recipe prints after `name`"
    return [float(o) for o in re.findall(r'\d+\.\d+(?:e-\d+)?', re.findall(rf'{name} (.*)', out)[-1])]

@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    write_recipes(folder := tmp_path_factory.mktemp('alone'))
    res = Fork(run_target, [str(folder/'train.py')], cwd=folder, env=environment(OMP_NUM_THREADS='1')).result()
    assert res.returncode==0, res.stderr
    return numbers(res.stdout)

@pytest.mark.parametrize('name', [pytest.param(o, marks=[pytest.mark.long]*(o in ('spawn','accelerate'))) for o in recipes])
def test_the_same_numbers(name, alone, tmp_path):
    if needs(*[name]*(name not in ('mpirun','spawn'))) or name=='mpirun' and not which('mpirun', path=Path(sys.executable).parent):
        pytest.skip('needs the extra `launchers`')
    if name=='pyspark' and not which('java'): pytest.skip('needs Java')
    out = started(recipes[name], tmp_path)
    assert numbers(out)==pytest.approx(alone, rel=1e-5) and 'by 2' in out
    if name=='ray': assert numbers(out, 'reported')==pytest.approx(alone, rel=1e-5)

@pytest.mark.long
def test_kubernetes_by_hand(alone, tmp_path):
    write_recipes(tmp_path)
    out,status = ended(start(line('for i in').replace('29500', str(free_port())), tmp_path))
    assert status==0 and numbers(out)==pytest.approx(alone, rel=1e-5) and out.count('by 2')==1

killing = '''
import os,signal
from pathlib import Path
class Kill(Callback):
    order = 10000
    def before_batch(self):
        if self.epoch==1 and self.training and self.iter==2 and rank_distrib()==1 and not Path('/tmp/killed').exists():
            Path('/tmp/killed').touch()
            os.kill(os.getpid(), signal.SIGKILL)
    def after_epoch(self):
        if rank_distrib()==0: print('epoch', self.epoch, file=open('/tmp/epochs', 'a'))
    def after_fit(self):
        if rank_distrib()==0: torch.save(self.learn.model.state_dict(), '/tmp/weights')
undisturbed = main
def main(*args, cbs=(), **kw): return undisturbed(*args, cbs=[*cbs, Kill], **kw)

'''

@pytest.mark.skipif(bool(needs('ray')), reason='needs the extra `launchers`')
def test_ray_starts_again_from_a_checkpoint(tmp_path):
    "A worker is killed in its second epoch: what is reported and the weights are those of a run that is not disturbed"
    res = {}
    for name in ('killed','undisturbed'):
        folder = tmp_path/name
        folder.mkdir()
        if name=='undisturbed': (folder/'killed').touch()
        out = started(recipes['ray'], folder, killing.replace('/tmp/', f'{folder}/'))
        assert (folder/'killed').exists() and (folder/'epochs').read_text()=='epoch 0\nepoch 1\n', out # the first one is not repeated
        res[name] = numbers(out, 'reported'),torch.load(folder/'weights')
    (metrics,weights),(others,want) = res.values()
    assert metrics==others and len(metrics)==2 and all(torch.equal(weights[k], want[k]) for k in want)

states = '''
import json
rows = [(o.state.name, o.params, o.intermediate_values) for o in study.trials]
open(f'/tmp/rank{rank_distrib()}', 'w').write(json.dumps(rows))
'''

@pytest.mark.skipif(bool(needs('optuna')), reason='needs the extra `launchers`')
def test_optuna(tmp_path):
    "The same trials with the same states on all ranks as on one process, where some are pruned; without a seed an error"
    found = {}
    for n in (1, 2):
        folder = tmp_path/str(n)
        folder.mkdir()
        write_recipes(folder)
        with (folder/'on_optuna.py').open('a') as f: f.write(states.replace('/tmp/', f'{folder}/'))
        out,status = ended(start(sweep if n==2 else 'python on_optuna.py', folder))
        assert status==0, out
        found[n] = [json.loads((folder/f'rank{r}').read_text()) for r in range(n)]
    (want,),(first,second) = found.values()
    assert first==second and [o[:2] for o in first]==[o[:2] for o in want] and {o[0] for o in want}=={'COMPLETE','PRUNED'}
    for a,b in zip(first, want): assert a[2]==pytest.approx(b[2], rel=1e-5)

@pytest.mark.skipif(bool(needs('optuna')), reason='needs the extra `launchers`')
def test_optuna_without_a_seed(tmp_path):
    write_recipes(tmp_path)
    file = tmp_path/'on_optuna.py'
    file.write_text(file.read_text().replace('seed=1', ''))
    out,status = ended(start(sweep, tmp_path))
    assert status==1
    assert re.search(r'\[different-settings\] the ranks train differently: .*lr.* the sampler of a sweep, needs a seed', out), out

@pytest.mark.skipif(bool(needs('ray')), reason='needs the extra `launchers`')
def test_ray_tune(alone, tmp_path): assert numbers(started('python on_tune.py', tmp_path))==pytest.approx(alone[1:], rel=1e-5)

@pytest.mark.skipif(bool(needs('kubernetes','kubeflow_trainer_api','yaml')), reason='needs the extra `launchers`')
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
