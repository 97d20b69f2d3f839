"`verify` says of a run that is one process's that it is, and of each kind of difference what it is and where it begins"
import os,random
import pytest,torch
from torch import nn
from torch.utils.data import TensorDataset
from helpers import launch
from learnerdist.all import *
from learnerdist.testing import RanksError
from learnerdist.verify import NoRun,judge,main,verify

# --- learners: one that is the same at any number of processes, and others ---------------------------------------------------

def data(n=32):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(n))
    return TensorDataset(x, x[:,:3].argmax(1))

def mlp(*layers): return nn.Sequential(nn.Linear(6, 8), *layers, nn.Tanh(), nn.Linear(8, 3))

def learner(model=None, loss=None, train=None, valid=None, metrics=accuracy, **kw):
    torch.manual_seed(int(os.environ.get('RANK', 0))) # other first weights on other ranks
    dls = DataLoaders(train or TfmdDL(data(), 4, shuffle=True), valid or TfmdDL(data(13), 4))
    return Learner(dls, model or mlp(), loss or nn.CrossEntropyLoss(), lr=.05, metrics=metrics, **kw)

def plain(): return learner()
def two_fits():
    learn = learner(mlp(nn.BatchNorm1d(8)), train=TfmdDL(data(), 4, shuffle=True), opt_func=torch.optim.SGD)
    with learn.distrib_ctx(seed=1): learn.fit_one_cycle(3, .1, cbs=GradientAccumulation(8))
    raise AssertionError('verify ends the function after its first fit')

def rooted(p, y): return ((p-nn.functional.one_hot(y, 3))**2).mean().sqrt()
def no_mean(): return learner(loss=rooted)

class_weights = torch.tensor([.1,1.,9.])
def in_float32(pred, targ):
    "Counts its class weights, in float32"
    w = class_weights[targ]
    return (nn.functional.cross_entropy(pred, targ, reduction='none')*w).sum(),w.sum()
def rounded(): return learner(loss=in_float32)

class Noise(Callback):
    "Draws for a part of a step, by all generators"
    run_valid = False
    def before_batch(self): self.learn.xb = (self.xb[0]+torch.randn(())+random.random(),)
def drawing():
    "Dropout, a transform of batches and a callback draw, beside BatchNorm and class weights"
    def jitter(b): return b[0]+torch.randn(len(b[0]), 1),b[1]
    return learner(mlp(nn.Dropout(.4), nn.BatchNorm1d(8)), nn.CrossEntropyLoss(torch.tensor([.1,1.,9.])), opt_func=torch.optim.Adam,
                   train=TfmdDL(data(30), 4, shuffle=True, after_batch=jitter), cbs=Noise)
def late():
    "Draws from the third step on"
    class Late(Callback):
        def before_batch(self):
            if self.training and self.iter>1: torch.rand(1)
    return learner(cbs=Late)
def drawing_and_keeping(): return learner(nn.Sequential(nn.Dropout(.4), mlp(Keeps())))
class OfTheGlobalBatch(nn.CrossEntropyLoss):
    n_items = 'whole'
    def forward(self, p, y): return super().forward(gather_with_grad(p), gather_with_grad(y))
def of_the_global_batch(): return learner(mlp(nn.Dropout(.4)), OfTheGlobalBatch())

def plain_bn():
    learn = learner(mlp(nn.BatchNorm1d(8)))
    with learn.distrib_ctx(sync_bn=False): learn.fit(2)

def augmented(): return learner(train=TfmdDL(data(), 4, after_item=lambda o: (o[0]+torch.randn(6), o[1])))
def not_dealt():
    "A data set that says it is split already, and is not"
    ds = data()
    ds.splits_by_rank = True
    return learner(train=TfmdDL(ds, 4))

def other_split():
    "As an unseeded `train_test_split`"
    at = torch.randperm(40, generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4), 'big')))
    return learner(train=TfmdDL([data(40)[i] for i in at[:32]], 4))

class Keeps(nn.Module):
    "Subtracts a mean of batches before, of this rank"
    def forward(self, x):
        if self.training: self.h = .5*getattr(self, 'h', 0)+x.detach().mean(0)
        return x-getattr(self, 'h', 0)

class Carries(nn.Module):
    "Goes on from the batch before, without a buffer"
    h = None
    def forward(self, x):
        y,self.h = x if self.h is None or len(self.h)!=len(x) else x+self.h,x.detach()
        return y
def carrying():
    with (learn := learner(mlp(Carries()))).distrib_ctx(checks=False): learn.fit(1)
def texts(b): return nn.utils.rnn.pad_sequence([x[:2+i%4] for i,(x,_) in b], batch_first=True),torch.stack([y for _,(_,y) in b])
class MeanOfTexts(nn.Module):
    "Its padding counts"
    def forward(self, x): return x.mean(1, keepdim=True)*torch.ones(6)
def padded(): return learner(nn.Sequential(MeanOfTexts(), mlp()), train=TfmdDL([*enumerate(data())], 4, collate_fn=texts, shuffle=True))
def rmse(out, y): return ((out[:,0]-y)**2).mean().sqrt()

class Rescales(Callback):
    "Makes weights that depend on the first batch of this rank"
    def before_fit(self):
        with torch.no_grad(): self.learn.model[0].weight /= self.learn.model[0](next(iter(self.learn.dls.train))[0].double()).std()
def rescaled(): return learner(cbs=Rescales)
class Unfreezes(Callback):
    def before_fit(self): self.learn.model[0].requires_grad_(False)
    def before_train(self):
        if self.epoch: get_model(self.model)[0].requires_grad_(True)

class Grows(Callback):
    "Adds what is no mean over samples, a little at first"
    def after_loss(self): self.learn.loss_grad = self.loss_grad+1e-7*20**self.train_iter*self.loss_grad**2
def growing(): return learner(cbs=Grows)

class Critic(Callback):
    "Trains a module of the loss, in each part of a step"
    run_valid = False
    def before_fit(self): self.opt_critic = torch.optim.SGD(self.loss_func.parameters(), lr=.1)
    def after_pred(self):
        self.loss_func(self.pred.detach(), self.y).backward()
        self.opt_critic.step()
def with_critic(): return learner(mlp(nn.Dropout(.4)), Perceptual(), cbs=Critic)

def divides(): return learner(train=TfmdDL(data(), 8//max(num_distrib(), 1), shuffle=True))

def remedied():
    "What a remedy makes the same is the same; rank 1 has no batch of validation, and the metric is a mean of batches"
    return learner(loss=nn.CrossEntropyLoss(torch.tensor([.1,1.,9.])), train=TfmdDL(data(31), 4), valid=TfmdDL(data(5), 8), metrics=rmse,
                   cbs=Unfreezes, splitter=lambda m: [*m.parameters()])

class Perceptual(nn.Module):
    "Compares what a net makes of predictions. The net is trained by nobody, and not frozen"
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 4)
    def forward(self, p, y): return nn.functional.mse_loss(self.net(p), self.net(nn.functional.one_hot(y, 3).to(p)))
def perceptual(): return learner(loss=Perceptual())

# --- the verdicts ------------------------------------------------------------------------------------------------------------

class OfWords(nn.Sequential):
    "With a sparse gradient"
    def __init__(self): super().__init__(nn.Embedding(9, 5, sparse=True), nn.Linear(5, 3))
    def forward(self, x): return super().forward((x.abs()*3).long().clamp(max=8)).mean(1)
def words():
    assert torch.backends.cudnn.deterministic # else a GPU's convolutions are not even the same twice
    return learner(OfWords(), opt_func=torch.optim.SGD)

@pytest.mark.parametrize('f', [two_fits,remedied,augmented,words,perceptual])
def test_same(f):
    res = verify(f)
    assert res.same and res.first is None and str(res).splitlines()[-1].startswith('The same: 2 processes and one'), res
    assert max(res.largest[k].by for k in ('gradients','weights','predictions'))<1e-11
    assert {*res.largest} >= {'gradients','weights','loss','metrics','predictions'}

def test_a_script_that_divides_its_batch_size_by_the_processes():
    res = verify(divides, steps=6)
    assert res.same and not res.notes, res

@pytest.mark.parametrize('f,steps', [(drawing,7),(late,5)])
def test_a_run_that_draws_has_the_same_bits(f, steps):
    "As one process that computes the step in as many parts, and in the script's dtype, since equal bits are a proof in any"
    res = verify(f, steps=steps)
    assert res.same and res.setting==f'2 processes and one in 2 parts, bit for bit, {steps} steps in float32', res
    assert {*res.largest}>={'gradients','weights','loss','metrics','predictions'} and {d.by for d in res.largest.values()}=={0.}

def test_without_equal_bits_a_run_that_draws_differs():
    res = verify(drawing_and_keeping, steps=4)
    assert not res.same and res.first.step==0 and 'model.1.1.h: kept from one batch to the next' in str(res.causes), res

def test_what_cannot_be_run_in_parts():
    with pytest.raises(NoRun, match='(?s)the fit draws, so it was run in parts .*without its draws.*needs the global batch'):
        verify(of_the_global_batch, steps=2)

@pytest.mark.parametrize('f,kind,name,cause', [
    (no_mean, 'gradients', '', '[loss-not-mean]'),
    (plain_bn, 'buffers', '1.running', "1.running_mean: a module computes it from each rank's samples (BatchNorm: sync_bn=False?)"),
    (not_dealt, 'gradients', '', 'the training loader is not dealt'), (other_split, 'gradients', '', 'other samples'),
    (carrying, 'metrics', '', 'model.1.h: kept from one batch'), (padded, 'gradients', '', 'padding: the batches have other shapes'),
    (rescaled, 'gradients', '', '0.weight: other weights before the first step: code that depends on the rank, or a file of')],
    ids=lambda o: getattr(o, '__name__', ''))
def test_difference(f, kind, name, cause):
    res = verify(f, steps=10)
    print(res)
    assert not res.same and res.first.kind==kind and res.first.name.startswith(name) and res.first.by>1e-6
    assert cause in res.causes[0]

# --- the command -------------------------------------------------------------------------------------------------------------

script = """
import sys
sys.path.insert(0, {tests!r})
import test_verify
learn = getattr(test_verify, sys.argv[1])()
try:
    with learn.distrib_ctx(): learn.fit_one_cycle(30)
except Exception: print('not caught')
print('not reached')
"""

@pytest.mark.long
def test_launch_proves_before_it_trains(tmp_path):
    file = tmp_path/'train.py'
    file.write_text(script.format(tests=os.path.dirname(__file__)).replace("print('not reached')", "print('trained')"))
    def outcome(name, *opts):
        res = launch('--nproc', 2, '--verify', 2, *opts, file, name)
        return res.returncode,'The same' in res.stdout,'DIFFERENT' in res.stdout,'trained' in res.stdout
    assert outcome('plain')==(0,True,False,True)
    assert outcome('no_mean')==(1,False,True,False)
    assert outcome('no_mean', '--verify-only-warn')==(0,False,True,True)

def test_a_tensor_that_stays_float32():
    res = verify(rounded, steps=4)
    assert not res.same and 1e-9<res.first.by<1e-6 and res.causes[0].startswith('rounding: a tensor of the script'), res
    assert verify(rounded, steps=4, dtype='float32').same

def test_could_not_be_run(tmp_path, capsys):
    (tmp_path/'train.py').write_text('print("no learner here")')
    assert main([str(tmp_path/'train.py')])==2
    assert 'no fit within a distrib_ctx was run' in capsys.readouterr().err

def adam():
    model = mlp(nn.BatchNorm1d(8))
    nn.init.zeros_(model[0].bias)
    return learner(model, opt_func=torch.optim.Adam)

def test_what_grows_is_no_rounding():
    res = verify(growing, steps=6)
    assert not res.same and res.first.by<1e-6 and 'rounding' not in str(res), res

def test_the_start_is_that_of_the_first_part():
    res = verify(with_critic, steps=2)
    assert not res.same and 'other weights' not in str(res) and '[ranks-differ] loss_func.net' in res.causes[0], res

def test_a_gradient_that_is_rounding():
    "That of a bias before BatchNorm is zero but for rounding, of which Adam makes steps"
    res = verify(adam, steps=4)
    assert res.same and max(res.largest[k].by for k in ('buffers','weights','predictions'))<1e-11, res

class Float32Only(nn.Module):
    def forward(self, x): return x @ torch.eye(8, dtype=torch.float32)

class Conv(nn.Conv1d):
    def forward(self, x): return super().forward(x[:,None])[:,0]

rows = torch.ones(4, 6)
class OfOwnRows(Callback):
    "Calls the model with rows that stay float32: torch's message has types in lower case"
    def before_train(self): self.model(rows)

def float32_only(): return learner(mlp(Float32Only()))
def own_rows(): return learner(nn.Sequential(Conv(1, 1, 1), mlp()), cbs=OfOwnRows)

def test_type():
    for func in (float32_only,own_rows):
        res = verify(func, steps=2)
        assert res.same and res.setting.endswith('2 steps in float32') and 'not in float64' in res.notes[-1], res
    with pytest.raises(RanksError, match='dtype|[Dd]ouble'): verify(float32_only, steps=2, dtype='float64')

def test_a_verdict_counts_its_steps():
    def record(n):
        return dict(rows=[[]]*n, shapes=[[]]*n, values={}, dtype='float64', parts=None, n_batches=n, edits=False, steady=True,
                    warned=['[no-batches] nothing is trained'])
    one,two,other = [record(2)|dict(values={(1,'weights',k): (torch.tensor([v]).double(),v) for k,v in zip('ab', o)})
                     for o in ((1,1),(1,1),(1,2))]
    first = judge(one, [two,other]).first
    assert str(first)=='weights b of rank 1 differs from one process by 1 at step 1'
    assert judge(one, [other,other]).largest['weights']==(1,'weights','b',1.,1)
    for n,steps in ((1,'1 step'),(2,'2 steps')):
        assert str(judge(record(n), [record(n)]*3)).endswith(f'The same: 3 processes and one, {steps} in float64')
    with pytest.raises(NoRun, match=r'rank 0 took no step, in 0 batches.*\[no-batches\]'):
        judge(record(1), [record(0)]*2)

def resumes(path):
    learn = learner()
    with learn.distrib_ctx(): learn.fit(1, cbs=Checkpoint(path, resume=True))

@pytest.mark.parametrize('where', ['folder of a finished run','folder within the path'])
def test_a_run_that_resumes_has_files_of_its_own(where, tmp_path):
    "It goes on neither from the user's checkpoints nor from those of the run that it is compared with"
    path = str(tmp_path/'run') if 'finished' in where else 'run'
    if 'finished' in where:
        with learner().no_logging() as learn: learn.fit(1, cbs=Checkpoint(path))
    before = [*tmp_path.rglob('*')]
    res = verify(resumes, path, steps=2)
    assert res.same and '2 steps' in res.setting and [*tmp_path.rglob('*')]==before, res
