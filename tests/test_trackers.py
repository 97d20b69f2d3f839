"Weights & Biases and MLflow: one run for all ranks, which a resumed fit goes on with, under both Learners"
import json,struct,sys
from contextlib import suppress
import pytest, torch
mlflow,*_ = map(pytest.importorskip, ('mlflow','wandb','fastai'))
from fastai.data.core import DataLoaders as FastaiLoaders
from fastai.data.load import DataLoader as FastaiLoader
from fastai.learner import Learner as FastaiLearner
from learnerdist.all import Checkpoint, DataLoaders, Learner, MLflowLogger, TensorBoardLogger, TfmdDL, Timer, WandbLogger, num_distrib
from learnerdist.fastai import DistributedTrainer # noqa: F401  (patches fastai's Learner)
from learnerdist.testing import run_ranks
from helpers import Raise
from torch import nn

x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
items = [*zip(x, x[:,:2])]

def make(kind, path, **kw):
    torch.manual_seed(0)
    model,bs = nn.Linear(4, 2),12//max(num_distrib(), 1)
    if kind=='fastai':
        dls = FastaiLoaders(FastaiLoader(items, bs=bs, shuffle=True, num_workers=0), FastaiLoader(items, bs=bs, num_workers=0))
        learn = FastaiLearner(dls, model, loss_func=nn.MSELoss(), path=path, lr=.01, **kw)
    else:
        dls = DataLoaders(TfmdDL(items, bs, shuffle=True), TfmdDL(items, bs))
        learn = Learner(dls, model, nn.MSELoss(), torch.optim.SGD, lr=.01, path=path, **kw)
    learn.logger = lambda line: None
    return learn

def make_logger(tracker, path, **kw):
    mlflow.set_tracking_uri(f'file:{path}/mlruns')
    if tracker=='wandb': return WandbLogger('demo', mode='offline', **kw)
    return MLflowLogger('demo', **kw)

@pytest.fixture(autouse=True)
def folders_of_mlflow(monkeypatch): monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true') # else a data base or a server

def records_of(file):
    "The records of a file of wandb's offline mode: LevelDB's log format, behind 7 bytes of wandb's own"
    data,at,part = file.read_bytes(),7,b''
    while at+7<=len(data):
        left = 32768-at%32768
        if left<7: # the rest of a block is empty
            at += left
            continue
        n,kind = struct.unpack_from('<HB', data, at+4)
        part,at = part+data[at+7:at+7+n],at+7+n
        if kind in (1, 4): # whole, or the last part
            yield part
            part = b''

def of_wandb(path):
    "By run: its points by name, its configuration, the names of what was uploaded, how it ended"
    from wandb.proto.wandb_internal_pb2 import Record
    runs = {}
    for file in sorted(path.glob('wandb/offline-run-*/*.wandb')):
        run = runs.setdefault(file.stem.removeprefix('run-'), dict(points={}, config={}, files=set(), ended=[]))
        for data in records_of(file):
            record = Record()
            record.ParseFromString(data)
            row = {o.key or o.nested_key[0]: json.loads(o.value_json) for o in record.history.item}
            for k,v in row.items():
                group = k.partition('/')[0]
                if group not in ('step','epoch') or k.endswith('number'): continue
                run['points'].setdefault(k, []).append((row[f'{group}/number'], v))
            for config in (record.config,record.run.config): run['config'] |= {o.key: json.loads(o.value_json) for o in config.update}
            if record.artifact.name: run['files'].add(record.artifact.name.partition('-')[0])
            if record.HasField('exit'): run['ended'].append(record.exit.exit_code)
    return runs

def of_mlflow(path):
    "As `of_wandb`"
    client,runs = mlflow.MlflowClient(f'file:{path}/mlruns'),{}
    for run in client.search_runs([o.experiment_id for o in client.search_experiments()]):
        i = run.info.run_id
        points = {k: sorted((o.step,o.value) for o in client.get_metric_history(i, k)) for k in run.data.metrics}
        config = {k: int(v) if v.isdigit() else v for k,v in run.data.params.items()}
        runs[i] = dict(points=points, config=config, files={o.path for o in client.list_artifacts(i)}, ended=[run.info.status])
    return runs

read = dict(wandb=of_wandb, mlflow=of_mlflow)

# Each runs in processes of its own: trackers keep what they have opened until a process ends

def track(kind, tracker, path):
    "Two fits with one logger: what the recorder has, and the id of the run that was opened on this rank"
    logger,losses,values = make_logger(tracker, path),[],[]
    learn = make(kind, path, cbs=[logger,Timer()])
    with learn.distrib_ctx():
        for n in (2, 1):
            learn.fit(n)
            losses += map(float, learn.recorder.losses)
            values += learn.recorder.values
    return losses,[list(map(float, o)) for o in values],logger.run_id

# Each tracker and each Learner; before a release each with each
both = pytest.mark.parametrize('kind,tracker', [('ours','wandb'), ('fastai','mlflow'),
    *(pytest.param(*o, marks=pytest.mark.long) for o in (('fastai','wandb'), ('ours','mlflow')))])

# The test of a resumed fit shows one run for all ranks of Weights & Biases, too
@pytest.mark.parametrize('kind,tracker', [('fastai','mlflow'), *(pytest.param(*o, marks=pytest.mark.long)
                                          for o in (('ours','wandb'), ('fastai','wandb'), ('ours','mlflow')))])
def test_one_run_for_all_ranks(kind, tracker, tmp_path):
    (losses,values,run_id),(_,_,other) = run_ranks(track, 2, kind, tracker, tmp_path)
    runs = read[tracker](tmp_path)
    assert [*runs]==[run_id] and other is None
    run = runs[run_id]
    points = run['points']
    assert [n for n,_ in points['step/loss']]==[*range(1, 13)] and [v for _,v in points['step/lr']]==[pytest.approx(.01)]*12
    assert [v for _,v in points['step/loss']]==pytest.approx(losses)
    assert points['epoch/valid_loss']==[(i+1,pytest.approx(o[1])) for i,o in enumerate(values)]
    assert points['epoch/train_loss']==[(i+1,pytest.approx(o[0])) for i,o in enumerate(values)]
    assert len(points['epoch/comm'])==3 and ('epoch/samples_per_s' in points)==(kind=='ours') # fastai's recorder counts none
    assert {k: run['config'][k] for k in ('model','loss','batch_size','samples','ranks')}==dict(
        model='Linear', loss='MSELoss', batch_size=12, samples=48, ranks=2)
    assert len(run['files'])==1 and set(run['ended'])=={0 if tracker=='wandb' else 'FINISHED'}

def fit(kind, tracker, path, failing):
    "The losses of a fit that fails, or of one that goes on, and the id of the run that was opened on this rank"
    learn,logger = make(kind, path),make_logger(tracker, path, log_model=not failing)
    cbs = [logger,Checkpoint('states'),*[Raise('before_epoch', KeyError('in epoch 1'), at=1)]*failing]
    with suppress(KeyError), learn.distrib_ctx(): learn.fit(3, resume=not failing, cbs=cbs)
    return [float(o) for o in learn.recorder.losses],logger.run_id

@both
@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_resumed_fit_goes_on_with_its_run(n, kind, tracker, tmp_path):
    run_ranks(fit, n, kind, tracker, tmp_path, True)
    (first,old), = read[tracker](tmp_path).items()
    assert len(old['points']['step/loss'])==4 and old['ended']==[1 if tracker=='wandb' else 'FAILED'] and not old['files']
    (losses,run_id),*others = run_ranks(fit, n, kind, tracker, tmp_path, False)
    (second,run), = read[tracker](tmp_path).items()
    assert first==second==run_id and run['ended'][-1]==(0 if tracker=='wandb' else 'FINISHED')
    assert [n for n,_ in run['points']['step/loss']]==[*range(1, 13)] and [n for n,_ in run['points']['epoch/valid_loss']]==[1,2,3]
    assert [v for _,v in run['points']['step/loss']]==pytest.approx(losses)
    assert run['config']['ranks']==n and len(run['files'])==1 and all(o[0]==losses for o in others)

def open_first(tracker, path):
    "What loops that are no fit have opened. The id of the script's own run, of the logger's, of the one that is open after a fit"
    for kind in ('ours','fastai'):
        learn = make(kind, path, cbs=make_logger(tracker, path))
        learn.get_preds()
        learn.validate()
        learn.lr_find(num_it=10, **{} if kind=='ours' else dict(show_plot=False))
    opened,logger = read[tracker](path),make_logger(tracker, path, log_model=False)
    if tracker=='wandb':
        import wandb
        run = wandb.init(project='mine', mode='offline', dir=path)
        make('ours', path).fit(1, cbs=logger)
        ids = run.id,logger.run_id,wandb.run.id
        run.finish()
    else:
        run = mlflow.start_run()
        make('ours', path).fit(1, cbs=logger)
        ids = run.info.run_id,logger.run_id,mlflow.active_run().info.run_id
        mlflow.end_run()
    return opened,ids

@pytest.mark.parametrize('tracker', ['wandb','mlflow'])
def test_a_run_that_the_script_has_opened_is_used_and_left_open(tracker, tmp_path):
    "And other loops open none"
    (opened,ids), = run_ranks(open_first, 1, tracker, tmp_path)
    (only,found), = read[tracker](tmp_path).items()
    assert opened=={} and {*ids}=={only} and len(found['points']['step/loss'])==4

@pytest.mark.parametrize('module,logger', [('wandb',WandbLogger), ('mlflow',MLflowLogger), ('torch.utils.tensorboard',TensorBoardLogger)])
def test_a_tracker_that_is_not_installed(module, logger, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    learn,extra = make('ours', tmp_path, cbs=logger()),module.rpartition('.')[2]
    with pytest.raises(ValueError, match=rf"install the extra, pip install 'learnerdist\[{extra}\]'"): learn.fit(1)
