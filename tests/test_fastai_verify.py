"`verify` on fastai's own Learner"
import pytest,torch
from fastai.callback.all import CSVLogger,GradientAccumulation,MixUp,SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import RocAuc,accuracy
from fastai.torch_core import TensorBase
from torch import nn
import learnerdist.fastai # noqa: F401
from learnerdist.distributed import engine
from learnerdist.verify import verify

def data(n):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(n))
    return list(zip(x, x[:,:3].argmax(1)))

def learner(loss=None, **kw):
    dls = DataLoaders(DataLoader(data(48), bs=4, shuffle=True), DataLoader(data(13), bs=4))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return Learner(dls, model, loss or CrossEntropyLossFlat(), lr=.05, metrics=[accuracy,RocAuc()], **kw)

def plain(cbs=None):
    learn = learner()
    with learn.distrib_ctx(seed=1): learn.fit_one_cycle(2, cbs=cbs)

def of_torch():
    "torch's DataLoaders within fastai's"
    learn = learner()
    learn.dls = DataLoaders(*[torch.utils.data.DataLoader(data(n), 4, shuffle=n==48) for n in (48,13)])
    with learn.distrib_ctx(seed=1): learn.fit(2)

def accumulating(): plain(GradientAccumulation(8))
def logged():
    "Ends within an epoch, whose row has all its columns, for the callbacks that read it"
    plain([CSVLogger(),SaveModelCallback(monitor='roc_auc_score')])
def dropped():
    "Batches of a class of fastai's, which its own callback casts"
    learn = learner()
    learn.model = nn.Sequential(*learn.model[:3], nn.Dropout(.5), learn.model[3])
    learn.dls = DataLoaders(*[DataLoader([(TensorBase(x),y) for x,y in data(n)], bs=4) for n in (48,13)])
    with learn.distrib_ctx(seed=1): learn.fit(1)
def weighted():
    "With the remedy switched off"
    engine.Mean.weigh,engine.Mean.corrects = (lambda self, loss, part, n_parts, k: loss),False
    return learner(CrossEntropyLossFlat(weight=torch.tensor([.1,1.,9.])))
def jittered():
    "With a random transform of batches"
    learn = learner()
    learn.dls.train.after_batch = lambda b: (b[0]+torch.randn(()),b[1])
    return learn
def mixed_up(): return learner(cbs=MixUp())

@pytest.mark.parametrize('func', [accumulating,logged,*(pytest.param(o, marks=pytest.mark.long) for o in (plain,of_torch))])
def test_same(func):
    res = verify(func, steps=3)
    assert res.same and max(res.largest[k].by for k in ('gradients','weights','predictions'))<1e-11, res
    assert {*res.largest} >= {'buffers','gradients','weights','loss','metrics','predictions'}

@pytest.mark.parametrize('func,quantity,cause', [(weighted, 'gradients', 'the loss is no mean over samples'),
    (dropped, 'gradients', 'a layer or a callback draws'), (jittered, None, 'a batch is another one each time it is read'),
    pytest.param(mixed_up, None, 'random draws differ by rank', marks=pytest.mark.long)])
def test_difference(func, quantity, cause):
    res = verify(func, steps=3)
    assert res.first.step==0 and quantity in (res.first[1],None) and cause in res.causes[0], res
    assert func is mixed_up or not any('a callback changes the batches' in o for o in res.causes), res
