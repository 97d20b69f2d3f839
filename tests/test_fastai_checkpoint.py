"The same `Checkpoint` for fastai's Learner: alone and on two ranks, in mid-epoch, between epochs, and after a signal"
from contextlib import nullcontext
import pytest
from fastai.text.all import *
from fastai.callback.fp16 import ModelToHalf, NonNativeMixedPrecision
from harness import all_warnings
from helpers import At, fail
from learnerdist.all import EMA
from learnerdist.checkpoint.checkpoint import preempted_status
from learnerdist.checkpoint.position import set_streams,streams_now
from learnerdist.core.lending import replaced
from learnerdist.distributed.comparison import digest
from learnerdist.fastai import Checkpoint
from learnerdist.testing import run_ranks
from test_checkpoint import Shaken, differing, resumed_everywhere, stopped

def learner(path, workers=0):
    torch.manual_seed(3)
    random.seed(3)
    path.mkdir(exist_ok=True)
    train = DataLoader(Shaken(40), bs=8, shuffle=True, num_workers=workers)
    dls = DataLoaders(train, DataLoader(Shaken(16), bs=8, num_workers=0))
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(.2), nn.Linear(12, 3))
    return Learner(dls, model, loss_func=nn.CrossEntropyLoss(), metrics=accuracy, path=path, lr=.01)

def fit(path, kind='', cbs=(), every=1, ctx=True):
    learn,plain = learner(path, 2*(kind=='workers')),kind=='plain'
    stopper,ema = EarlyStoppingCallback(patience=9),EMA(.7, evaluate=True)
    cbs = [stopper, CSVLogger(), ema, *cbs]
    if every: cbs.insert(0, Checkpoint('ckpt', every, 100, resume=not plain))
    with learn.no_bar() if hasattr(learn, 'no_bar') else nullcontext(), learn.distrib_ctx() if ctx else nullcontext():
        if plain: learn.fit(2, cbs=cbs, resume=bool(every))
        else: learn.fit_one_cycle(2, .01, cbs=cbs)
        learn.validate()
    rec = learn.recorder
    return dict(model=digest(learn.model.state_dict()), opt=digest(learn.opt.state_dict()['state']), average=digest(ema.weights),
                values=[list(o) for o in rec.values],
                losses=[float(o) for o in rec.losses], lrs=list(rec.lrs), iters=list(rec.iters), wait=(stopper.best,stopper.wait),
                csv=[o.rpartition(',')[0] for o in (path/'history.csv').read_text().splitlines()],
                hps={k:[float(o) for o in v] for k,v in getattr(rec, 'hps', {}).items()})

everywhere = partial(resumed_everywhere, fit=fit)

in_mid_epoch = 'epoch_0000-step_00000002','epoch_0001-step_00000007'

@pytest.mark.parametrize('kind,names,n', [('',None,11), ('plain',in_mid_epoch,2)])
def test_alone(kind, names, n, tmp_path):
    found = everywhere(tmp_path, kind, False, names)
    assert len(found)==n and not any(found.values()), found
    alone = partial(fit, kind=kind, ctx=False)
    whole = alone(tmp_path/'whole') # is done
    status,_,differs = stopped(tmp_path/'stop', whole, [0], 2, True, alone)
    assert status==preempted_status and differs==[]
    assert differing(whole, alone(tmp_path/'unsaved', every=0))==[]

def texts(seed):
    random.seed(seed)
    return SimpleNamespace(train=LMDataLoader([torch.arange(9)+10*i for i in range(6)], bs=2, seq_len=4, shuffle=True))

def test_texts_go_on_in_the_order_of_the_interrupted_run():
    "fastai shuffles it in place, from that of the epoch before"
    first,other = texts(1),texts(2)
    list(first.train)
    state = streams_now(first)
    want = [x.tolist() for x,_ in first.train]
    set_streams(other, state)
    assert [x.tolist() for x,_ in other.train]==want

def loads(path):
    "The weights of a checkpoint, in and out of the context, and those of fastai's own file beside it"
    res = []
    for _ in range(2):
        learn = learner(path)
        with learn.distrib_ctx(): res.append(digest(learn.load('ckpt').model.state_dict()))
        res.append(digest(learn.load('ckpt/epoch_0001-step_00000005').model.state_dict()))
    learn.save('mine')
    return res+[digest(learner(path).load('mine').model.state_dict())]

two = ['epoch_0000-step_00000002','epoch_0001-step_00000004']

def rank_answers(path):
    "All that is asked of two ranks; the weights were saved by one process"
    found = [everywhere(path/'cycle', '', True, two),everywhere(path/'workers', 'workers', True, two[:1])]
    ended = stopped(path/'stop', fit(path/'cycle/whole'), [1], 2, True, fit)
    return dict(loads=loads(path/'alone'), found=found, stopped=ended, whole=in_global_batches(path/'whole'))

@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp('ranks')
    for o in ('cycle','workers'): (path/o).mkdir()
    whole = fit(path/'alone', every='epoch', ctx=False)['model']
    return path,whole,run_ranks(rank_answers, 2, path, timeout_s=400)

def test_load_the_weights_of_a_checkpoint(ranks):
    first = ranks[2][0]['loads'][1]
    for a,b,c,*others in (o['loads'] for o in ranks[2]): assert a==c==ranks[1]!=b==first and others==[first]*2

def test_two_ranks(ranks):
    for o in ranks[2]:
        for found in o['found']: assert not any(found.values()), found
        assert o['stopped']==(preempted_status, [('epoch_0000-step_00000002','train')], [])

def test_done_and_more_epochs(tmp_path, capsys):
    "With fastai's bar; what is said, and that a finished fit goes on where no schedule counts its epochs"
    def fit(path, n, one=False):
        learn = learner(path)
        (learn.fit_one_cycle if one else learn.fit)(n, cbs=Checkpoint('ckpt', resume=True))
        return learn
    first,again = fit(tmp_path/'a', 2),fit(tmp_path/'a', 2)
    assert again.final_record==first.final_record and not {'checkpoint','start_at'} & {*vars(again)}
    assert 'this fit was done already, after 10 steps' in capsys.readouterr().out
    more,whole = fit(tmp_path/'a', 4),fit(tmp_path/'b', 4)
    assert 'going on in epoch 2 after step 10' in capsys.readouterr().out
    assert list(more.recorder.values)==list(whole.recorder.values)
    assert digest(more.model.state_dict())==digest(whole.model.state_dict())
    fit(tmp_path/'c', 2, one=True)
    with pytest.raises(ValueError, match='for n_epoch=2, and that of this fit is for n_epoch=4'): fit(tmp_path/'c', 4, one=True)
    with pytest.raises(ValueError, match='holds checkpoints of another run'):
        learn = fit(tmp_path/'d', 1)
        learn.fit(1, cbs=Checkpoint('ckpt'))

def test_other_first_weights_are_no_changed_fit(tmp_path):
    "A checkpoint replaces them; the groups of fastai's optimizers hold them beside the settings"
    for n in (1,2):
        learn = learner(tmp_path)
        nn.init.constant_(learn.model[-1].weight, n)
        with learn.no_bar(), all_warnings() as ws: learn.fit(n, cbs=Checkpoint('ckpt', resume=True))
    assert [str(o.message) for o in ws if '[changed-fit]' in str(o.message)]==[]

class Predicts(Callback):
    "fastai counts steps and epochs from 0 again in such a loop"
    within = False
    def after_epoch(self):
        if self.within: return
        with replaced(self, within=True): self.learn.get_preds()

def test_predictions_of_a_callback_lose_no_state(tmp_path):
    learn = learner(tmp_path)
    with learn.no_bar(), learn.distrib_ctx(seed=1): learn.fit(3, cbs=[Predicts(), Checkpoint('ckpt', keep=9)])
    assert [o.name[:10] for o in sorted((tmp_path/'ckpt').iterdir())]==['epoch_0001','epoch_0002','epoch_0003']

class OnCPU(NonNativeMixedPrecision):
    "It asks for a GPU"
    dls = SimpleNamespace(device=torch.device('cuda'))

def test_half_precision_goes_on_with_its_float32_weights(tmp_path):
    def fit(path, stop=(), resume=False):
        learn = learner(path)
        learn.model[3].p = 0.
        cbs = [ModelToHalf(), OnCPU(max_loss_scale=2**15, scale_wait=2), Checkpoint('ckpt', 1), *stop] # some scales overflow
        with learn.no_bar(), learn.distrib_ctx(seed=1): learn.fit(2, cbs=cbs, resume=resume)
        return digest(learn.model.state_dict()),list(learn.recorder.values),cbs[1].loss_scale
    whole = fit(tmp_path/'whole')
    with pytest.raises(ZeroDivisionError): fit(tmp_path/'stop', [At(7)])
    assert fit(tmp_path/'stop', resume=True)==whole

def in_global_batches(path, resume=False):
    "A fit in global batches of 12 samples, on any number of ranks"
    torch.set_default_dtype(torch.float64)
    g = torch.Generator().manual_seed(0)
    rows = [*zip(torch.randn(40, 6, generator=g), torch.randint(3, (40,), generator=g))]
    torch.manual_seed(3)
    dls = DataLoaders(DataLoader(rows, bs=12, shuffle=True, num_workers=0), DataLoader(rows[:16], bs=12, num_workers=0))
    learn = Learner(dls, nn.Linear(6, 3), loss_func=lambda p,y: nn.functional.cross_entropy(p, y).float(), path=path, lr=.01)
    with learn.distrib_ctx(split_batches=True, seed=1): learn.fit_one_cycle(2, .01, cbs=Checkpoint('ckpt', 1, 100, resume=resume))
    rec = learn.recorder
    return dict(weight=learn.model.weight.tolist(), losses=[float(o) for o in rec.losses], lrs=list(rec.lrs), iters=list(rec.iters),
                values=[list(o) for o in rec.values])

@pytest.mark.parametrize('W', [1,2])
def test_go_on_in_mid_epoch_on_another_number_of_ranks(W, ranks, tmp_path):
    path,_,found = ranks
    path = path/'whole' if W==2 else tmp_path/'one'
    whole = found[0]['whole'] if W==2 else run_ranks(in_global_batches, 1, path)[0]
    shutil.copytree(path/'ckpt/epoch_0001-step_00000006', tmp_path/'ckpt/epoch_0001-step_00000006')
    for again in run_ranks(in_global_batches, 3, tmp_path, True):
        for k,v in whole.items(): torch.testing.assert_close(torch.tensor(again[k]), torch.tensor(v), rtol=1e-6, atol=1e-6)

@pytest.mark.parametrize('W', [1,2])
def test_a_state_waits_for_a_step_that_ends_in_the_next_epoch(W, tmp_path):
    "40 samples an epoch, 16 a step: the third step of the fit ends with the first batch of all ranks in its second epoch"
    for o in run_ranks(across_epochs, W, tmp_path, timeout_s=240): assert o==[]

def across_epochs(path):
    def train(name, cbs=(), n=2):
        learn = learner(path/name)
        cbs = [GradientAccumulation(16), Checkpoint('ckpt', 'epoch', 9), *cbs]
        with learn.no_bar(), learn.distrib_ctx(split_batches=True): learn.fit(n, cbs=cbs, resume=True)
        return dict(model=digest(learn.model.state_dict()), losses=[float(o) for o in learn.recorder.losses])
    whole = train('whole')
    with pytest.raises(ZeroDivisionError): train('cut', [At(8, fail)])
    assert [o.name for o in (path/'cut/ckpt').iterdir() if o.is_dir()]==['epoch_0001-step_00000006']
    train('longer', n=1)
    with all_warnings() as found: train('longer')
    assert any('gradients of 8 samples are lost' in str(o) for o in found)==(rank_distrib()==0)
    return differing(whole, train('cut'))
