"`verify` on fastai's own Learner"
import pytest
from fastai.basics import *
from fastai.callback.all import *
import learnerdist.fastai # noqa: F401
from learnerdist.verify import verify

pytestmark = pytest.mark.slow

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
def of_a_type():
    "Predicts a tensor of a class of fastai's, as `DynamicUnet` does"
    learn = learner()
    learn.model.append(ToTensorBase())
    return learn
def rooted(p, y): return ((p-nn.functional.one_hot(y, 3))**2).mean().sqrt()
def no_mean(): return learner(rooted)
@pytest.mark.parametrize('func', [logged,of_a_type,*(pytest.param(o, marks=pytest.mark.long) for o in (accumulating,of_torch))])
def test_same(func):
    res = verify(func, steps=3)
    assert res.same and max(res.largest[k].by for k in ('gradients','weights','predictions'))<1e-11, res
    assert {*res.largest} >= {'buffers','gradients','weights','loss','metrics','predictions'}

def drawing():
    "A random transform of batches, dropout and MixUp"
    learn = learner(cbs=MixUp())
    learn.dls.train.after_batch = lambda b: (b[0]+torch.randn(()),b[1])
    learn.model = nn.Sequential(*learn.model[:3], nn.Dropout(.5), learn.model[3])
    return learn

@pytest.mark.parametrize('func', [dropped,drawing])
def test_the_same_bits(func):
    res = verify(func, steps=3)
    assert res.same and 'one in 2 parts, bit for bit, 3 steps in float32' in res.setting, res
    by = {k: d.by for k,d in res.largest.items()}
    assert by.pop('metrics')<1e-6 # sums in float32, which ranks add up
    assert by==dict.fromkeys(('buffers','gradients','weights','loss','predictions'), 0.), res

def test_difference():
    res = verify(no_mean, steps=3)
    assert (res.first.step,res.first.kind)==(0,'gradients') and '[loss-not-mean]' in res.causes[0], res
