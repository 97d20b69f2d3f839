"The loop: events and their order, Cancel exceptions, callbacks, parameter groups, batches of any structure, predictions"
from contextlib import nullcontext
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from learnerdist.all import *
from learnerdist.learner.callback import all_events, inner_events

def data(n=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g)
    return x,x@torch.tensor([[1.], [-2.], [.5]])

def make(cbs=None, n=8, bs=4, valid=True, **kw):
    torch.manual_seed(0)
    ds = TensorDataset(*data(n))
    dls = DataLoaders(TfmdDL(ds, bs), TfmdDL(ds, bs) if valid else None)
    kw = dict(opt_func=torch.optim.SGD, lr=.1) | kw
    learn = Learner(dls, nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), F.mse_loss, cbs=cbs, **kw)
    learn.logger = lambda line: None
    return learn

class Tracer(Callback):
    "Every event, in order, and one exception at the first time that an event comes"
    order = 90
    def __init__(self, at=None, error=None): self.seen,self.at,self.error,self.done = [],at,error,False
for _e in all_events:
    def _f(self, e=_e):
        self.seen.append(e)
        if e!=self.at or self.done: return
        self.done = True
        raise self.error
    setattr(Tracer, _e, _f)

train_batch = ['before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch']
valid_batch = ['before_batch','after_pred','after_loss','after_batch']
epoch = ['before_epoch','before_train',*train_batch*2,'after_train','before_validate',*valid_batch*2,'after_validate','after_epoch']

@pytest.mark.parametrize('valid', [True, False])
def test_any_callback_reads_the_values_of_the_epoch_that_has_ended(valid):
    seen,orders = [],[-10**8, -5, 0, 51, 10**8]
    class Look(Callback):
        def after_epoch(self): seen.append((len(self.recorder.values), self.recorder.values[-1][0]))
    learn = make([type(f'Look{i}', (Look,), dict(order=o)) for i,o in enumerate(orders)], valid=valid)
    for within in (nullcontext,learn.distrib_ctx):
        seen.clear()
        with within(): learn.fit(2)
        assert seen==[(i, learn.recorder.values[i-1][0]) for i in (1,2) for _ in orders]

def test_names_are_fastais():
    want = '''after_create after_dls before_fit
        before_epoch before_train before_batch after_pred after_loss before_backward after_cancel_backward
        after_backward before_step after_cancel_step after_step after_cancel_batch after_batch after_cancel_train after_train
        before_validate after_cancel_validate after_validate after_cancel_epoch after_epoch after_cancel_fit after_fit'''.split()
    assert list(all_events)==want and list(inner_events)==want[5:16] # after_dls is ours

scopes = {CancelFitException:'fit', CancelEpochException:'epoch', CancelTrainException:'train', CancelValidException:'validate',
          CancelBatchException:'batch', CancelBackwardException:'backward', CancelStepException:'step'}
next_of = dict(fit=[], epoch=epoch+['after_fit'], train=['before_validate'], validate=['after_epoch'], batch=['before_batch'],
               backward=['before_step'], step=['after_batch'])
inside = dict(fit=['before_fit','before_epoch','before_train','after_pred','after_step','after_batch','after_train','before_validate',
                   'after_validate','after_epoch'],
              epoch=['before_epoch','before_train','after_pred','after_batch','after_train','before_validate','after_validate'],
              train=['before_train','before_batch','after_pred','after_loss','before_backward','after_step','after_batch'],
              validate=['before_validate'], batch=['before_batch','after_pred','after_loss','before_backward','after_step'],
              backward=['before_backward'], step=['before_step'])

@pytest.mark.parametrize('error,event', [(c, e) for c,s in scopes.items() for e in inside[s]])
def test_cancel(error, event):
    tracer,scope = Tracer(event, error),scopes[error]
    learn = make(cbs=tracer)
    before = learn.model[0].weight.clone()
    learn.fit(2)
    i = tracer.seen.index(event)
    want = [event,f'after_cancel_{scope}',f'after_{scope}']+next_of[scope]
    assert tracer.seen[i:i+len(want)]==want
    assert tracer.seen[-1]=='after_fit' and tracer.seen.count('after_fit')==1
    n_epochs = (0 if event=='before_fit' else 1) if scope=='fit' else 2
    assert tracer.seen.count('before_epoch')==n_epochs and len(learn.recorder.values)<=n_epochs
    if scope in ('backward','step'): assert not torch.equal(learn.model[0].weight, before)

@pytest.mark.parametrize('error,event', [(CancelTrainException,'before_train'), (CancelEpochException,'before_epoch'),
                                         (CancelEpochException,'before_train'), (CancelBatchException,'before_batch')])
def test_columns_stay_in_place_where_nothing_was_trained(error, event):
    class Always(Callback):
        run_valid = False
        def __init__(self): setattr(self, event, self._raise)
        def _raise(self): raise error
    learn = make(cbs=Always(), metrics=[F.l1_loss])
    learn.fit(1)
    train,valid,l1 = learn.recorder.values[0]
    assert train is None or train!=train # not measured
    if error is not CancelEpochException: assert [valid, l1]==learn.validate()
    else: assert valid is None and l1 is None

def test_cancel_outside_of_its_loop_is_an_error():
    for error,event in ((CancelBatchException,'before_train'), (CancelValidException,'before_train'), (CancelEpochException,'before_fit')):
        with pytest.raises(error): make(cbs=Tracer(event, error)).fit(1)

def test_an_error_comes_through_as_it_is():
    e = KeyError('mine')
    tracer = Tracer('after_pred', e)
    learn = make(cbs=tracer)
    with pytest.raises(KeyError) as got: learn.fit(1)
    assert got.value is e and tracer.seen[-1]=='after_pred' and not learn.training and learn.xb==()
    learn.fit(1)

# --- callbacks --------------------------------------------------------------------------------------------------------------

class First(Callback):
    order = 1
    def before_fit(self): self.learn.told.append('first')

class SecondOneCallback(Callback):
    order = 2
    def before_fit(self): self.learn.told.append('second')

def test_order_names_and_classes():
    learn = make(cbs=[SecondOneCallback, First()])
    learn.told = []
    learn.fit(1)
    assert learn.told==['first','second'] and learn.first in learn.cbs and learn.second_one.name=='second_one'
    learn.remove_cb(First)
    assert not hasattr(learn, 'first') and not any(isinstance(o, First) for o in learn.cbs)
    learn.remove_cbs([learn.second_one])
    learn.told = []
    learn.fit(1)
    assert learn.told==[]
    assert learn.add_cbs([First, SecondOneCallback]) is learn and learn.add_cb(Tracer()) is learn and learn.remove_cb(Tracer) is learn

def test_added_cbs_are_taken_away_again():
    learn = make()
    before = list(learn.cbs)
    with learn.added_cbs([First(), Tracer]): assert hasattr(learn, 'first') and hasattr(learn, 'tracer')
    assert learn.cbs==before and not hasattr(learn, 'tracer')
    with pytest.raises(KeyError), learn.added_cbs(First()): raise KeyError
    assert learn.cbs==before
    with pytest.raises(KeyError): learn.fit(1, cbs=Tracer('after_loss', KeyError))
    assert learn.cbs==before
    other,fit = (type(o, (Callback,), {})() for o in ('Other','Fit')) # a method's name is refused
    for cbs in ([Tracer('before_fit', ValueError), other], [Tracer(), fit]):
        with pytest.raises(ValueError): learn.fit(1, cbs=cbs)
        assert learn.cbs==before and not hasattr(learn, 'tracer')

@pytest.mark.parametrize('name', ['Fit','Save','Device','Model','Dls','Opt','LossFunc','Metrics','Logger'])
def test_a_name_that_would_hide_something(name):
    learn = make()
    with pytest.raises(ValueError, match='name'): learn.add_cb(type(name, (Callback,), {})())
    learn.fit(1)

# --- optimizers and groups --------------------------------------------------------------------------------------------------

def by_layer(m): return [list(o.parameters()) for o in m]

def test_frozen_parameters_stay():
    def last_only(m):
        m[0].requires_grad_(False)
        return [p for p in m.parameters() if p.requires_grad]
    learn = make(splitter=last_only)
    before = learn.model[0].weight.clone()
    learn.fit(1)
    assert torch.equal(learn.model[0].weight, before)
    learn.model[0].requires_grad_(True)
    learn.splitter = by_layer
    learn.fit(1, reset_opt=True)
    assert not torch.equal(learn.model[0].weight, before) and len(learn.opt.param_groups)==2
    learn.model.requires_grad_(False)
    learn.splitter = lambda m: [p for p in m.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match='no trainable parameter'): learn.fit(1, reset_opt=True)

def test_a_second_fit_goes_on():
    a,b = make(opt_func=torch.optim.Adam),make(opt_func=torch.optim.Adam)
    a.fit(4)
    b.fit(2)
    opt = b.opt
    b.fit(2)
    assert b.opt is opt and all(torch.equal(p, q) for p,q in zip(a.model.parameters(), b.model.parameters()))
    b.fit(1, reset_opt=True)
    assert b.opt is not opt

def test_start_epoch_and_progress():
    class Pct(Callback):
        run_valid = False
        def after_batch(self): self.learn.got.append((self.epoch, self.train_iter, self.pct_train, self.iter, self.n_iter))
    learn = make(cbs=Pct())
    learn.got = []
    learn.fit(2)
    assert learn.got==[(0, 1, .25, 0, 2), (0, 2, .5, 1, 2), (1, 3, .75, 0, 2), (1, 4, 1., 1, 2)]
    learn.fit(3, start_epoch=1)
    assert [o[0] for o in learn.got[4:]]==[1,1,2,2] and learn.epoch==2 and len(learn.recorder.values)==2
    learn.fit(2, start_epoch=2)
    assert learn.recorder.values==[]
    learn.fit(0)
    assert learn.recorder.values==[]

def test_empty_loaders():
    learn = make()
    learn.dls = DataLoaders(TfmdDL(TensorDataset(*data(0)), 4), TfmdDL(TensorDataset(*data(0)), 4))
    learn.fit(1)
    assert learn.recorder.losses==[] and all(v is None or v!=v for v in learn.recorder.values[0])
    assert learn.validate()==[None]

def test_predictions_leave_the_learner_as_it_was():
    learn = make(metrics=[F.l1_loss])
    learn.fit(2)
    rec,keep = learn.recorder,(list(learn.recorder.losses), [list(o) for o in learn.recorder.values])
    cbs,metrics = list(learn.cbs),list(learn.metrics)
    learn.get_preds()
    learn.predict(data()[0][0])
    learn.validate()
    with pytest.raises(KeyError): learn.get_preds(cbs=Tracer('after_batch', KeyError))
    assert learn.cbs==cbs and learn.metrics==metrics and (rec.losses,rec.values)==keep and len(learn.validate())==2

def test_without_a_recorder():
    learn = make()
    learn.remove_cbs([Recorder, ProgressCallback])
    learn.fit(1)
    assert learn.get_preds()[0].shape==(8, 1)
