"What strangers ran into with fastai's Learner: an error that names the remedy, or the run of one process"
import pytest
from fastai.basics import *
from harness import all_warnings
from learnerdist.core.lending import replaced
from learnerdist.fastai import *
from learnerdist.testing import run_ranks
from test_first_hour import Graph, OnGraph

def loader(): return DataLoader([(torch.full((3,), float(i)), torch.tensor(i%2)) for i in range(8)], bs=2)
def learner(dls=None, model=None, loss=None, **kw):
    learn = Learner(dls or DataLoaders(loader(), loader()), model or nn.Linear(3, 2), loss or nn.CrossEntropyLoss(), **kw)
    learn.logger = noop
    return learn
sgd = partial(OptimWrapper, opt=torch.optim.SGD)

def without_targets():
    dl = DataLoader([Graph()]*8, bs=2, create_batch=lambda b: (b[0],))
    learn = learner(DataLoaders(dl, dl), OnGraph(), noop, opt_func=sgd)
    with learn.no_bar(), learn.distrib_ctx(): learn.fit(1)

@pytest.mark.parametrize('kw,message', [(dict(n_epoch=-1),'n_epoch=-1: give a whole'),
    (dict(n_epoch=1, start_epoch=-1),'start_epoch=-1: give a whole'),
    (dict(n_epoch=1, cbs=[3]),'3 is no callback'), (dict(n_epoch=1, reset_opt='no'),"reset_opt='no': give True or False")], ids=str)
def test_bad_arguments_of_fit(kw, message):
    with pytest.raises(ValueError, match=message): learner().fit(**kw)

def test_no_logging_is_for_our_lines_too(capsys):
    learn = Learner(DataLoaders(loader(), loader()), nn.Linear(3, 2), nn.CrossEntropyLoss())
    learn.say('seen')
    with learn.no_logging(): learn.say('unseen')
    assert capsys.readouterr().out=='seen\n'

def test_an_export_that_fails_leaves_the_file_as_it_was(tmp_path):
    dls = DataLoaders.from_dsets(*[TfmdLists(list(range(8)), row)]*2, bs=2)
    learn = Learner(dls, nn.Linear(3, 2), nn.CrossEntropyLoss(), path=tmp_path)
    learn.export('a.pkl')
    learn.model.unpicklable = (i for i in ())
    with pytest.raises(TypeError): learn.export('a.pkl')
    assert load_learner(tmp_path/'a.pkl').model.weight.equal(learn.model.weight) and [*tmp_path.iterdir()]==[tmp_path/'a.pkl']

class Clips(Learner):
    "Its own step"
    def _do_grad_opt(self):
        self._with_events(self._backward, 'backward', CancelBackwardException)
        self._with_events(self._step, 'step', CancelStepException)
        self.opt.zero_grad()

def test_a_learner_that_steps_after_each_part_is_an_error():
    learn = learner(opt_func=sgd)
    learn.__class__ = Clips
    refused = pytest.raises(ValueError, match='max_bs=1: this learner.s own _do_grad_opt')
    with refused, learn.no_bar(), learn.distrib_ctx(max_bs=1): learn.fit(1)

def no_loss():
    learn = learner(loss=lambda p, t: None)
    with learn.no_bar(), learn.distrib_ctx(): learn.fit(1)

def row(i): return torch.full((3,), float(i)),i%2

def typed():
    "As in fastai's tutorial on transformers, where `TfmdLists.types` are classes"
    sets = [TfmdLists(list(range(8)), row) for _ in range(2)]
    for o in sets: o.types = [torch.Tensor,int,list]
    learn = learner(DataLoaders(*[DataLoader(o, bs=2) for o in sets]), nn.Linear(3, 9), opt_func=sgd)
    with learn.no_bar(), learn.distrib_ctx(): learn.fit(1)
    return True

class Second(Callback):
    "A second pass, as SAM takes it"
    def before_step(self):
        self.learn.opt.zero_grad()
        self.learn.loss_func(self.learn.wrapper(*self.xb), *self.yb).backward()

def sam():
    learn = learner(cbs=Second(), opt_func=sgd)
    with learn.no_bar(), learn.distrib_ctx(): learn.fit(1)
    return learn.model.weight.tolist()

class RankZeroPredicts(Callback):
    "As `predict` and `show_results` do, from which fastai's counters come back as 0"
    busy = False
    def after_epoch(self):
        if self.busy or rank_distrib(): return
        with replaced(self, busy=True): self.learn.get_preds(dl=[(torch.ones(2, 3),torch.zeros(2).long())])

def predicts_on_rank_0():
    learn = learner(cbs=RankZeroPredicts())
    with learn.no_bar(), learn.distrib_ctx(timeout_s=20): learn.fit(2)
    return learn.train_iter

def outside():
    "In no context: each rank trains on all of the data"
    learn = learner()
    with learn.no_bar(), all_warnings() as ws:
        learn.fit(1)
    return [str(o.message) for o in ws if '[no-context]' in str(o.message)]

def rank_of_one():
    "A group of one, with DDP: what a launch with one process for one GPU has"
    setup_distrib()
    try: return len(sam())
    finally: teardown_distrib()

def outcomes(n):
    "What each script comes to on this rank"
    res = {}
    for f in (without_targets,no_loss,typed,sam,predicts_on_rank_0,outside,*[rank_of_one]*(n==1)):
        try: res[f.__name__] = f()
        except Exception as e: res[f.__name__] = str(e)
    return res

@pytest.mark.parametrize('n', [1,2])
def test_scripts(n):
    "A batch object without targets, and a loss that returns None; a data set with a list of classes; a second pass"
    ranks = run_ranks(outcomes, n, n, timeout_s=240)
    assert [len(o['outside']) for o in ranks]==([0] if n==1 else [1,0])
    for o in ranks:
        assert 'has no targets' in o['without_targets'] and 'Graph' in o['without_targets']
        assert 'the loss is None: let loss_func' in o['no_loss'] and o['typed'] is True
        assert n==1 or o['predicts_on_rank_0']==4
        assert len(o['sam'])==2 and o['sam']==ranks[0]['sam'] and (n>1 or o['rank_of_one']==2)
