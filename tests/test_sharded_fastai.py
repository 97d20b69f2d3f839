"`distrib_ctx(shard=…)` with fastai's Learner: the run of one process"
from functools import partial
import pytest, torch
from torch import nn
pytest.importorskip('fastai')
from fastai.callback.all import EarlyStoppingCallback, GradientAccumulation, GradientClip, ModelResetter, SaveModelCallback
from fastai.optimizer import Adam, OptimWrapper, ranger
from fastai.text.learner import TextLearner
from harness import asking, close, needs_fsdp2
from learnerdist.all import group_rank, process_group
from learnerdist.core.shards import is_sharded
from learnerdist.testing import run_ranks
from test_fastai import call, cases, ctx, floats, history, make

pytestmark = needs_fsdp2

class Resets(nn.Module):
    "Keeps its hidden state, as a language model does, until it is reset"
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.head = nn.Linear(8, 5),nn.LSTM(5, 5, batch_first=True),nn.Linear(5, 3, bias=False)
        self.h,self.n_resets = torch.ones(1),0
    def reset(self): self.h,self.n_resets = torch.ones(1),self.n_resets+1
    def forward(self, x):
        out = self.rnn(self.emb(x)[:,None])[0][:,-1]
        if self.training: self.h = self.h+1
        return self.head(out)*(1+.1/self.h.to(out))

fit,files = call('fit', 2),[call('fit', 1), call('save', 'now'), call('fit', 1), call('load', 'now'), call('fit', 1)]
def all_cases(path):
    "Those of test_fastai.py, and more optimizers, callbacks and files"
    torchs = partial(OptimWrapper, opt=torch.optim.AdamW)
    more = dict(ranger=(files, dict(opt=ranger)), torchs=(files, dict(opt=torchs, cbs=GradientClip(.5))), adam=(files, dict(opt=Adam)),
                lr_find=([call('lr_find', num_it=6, show_plot=False), call('fit', 1)], {}),
                accumulation=([fit], dict(cbs=GradientAccumulation(48))),
                amp=([call('to_fp16'), call('fit', 1)], {}), # on the CPU it makes predictions float32, and no more
                reset=([fit], dict(model=Resets, cbs=ModelResetter())),
                best=([fit], dict(cbs=[SaveModelCallback(), EarlyStoppingCallback(min_delta=9.)])))
    return {k: (hows, dict(kw, path=path/k)) for k,(hows,kw) in (cases | more).items()}

def fitted(W, rank, hows, kw):
    "The numbers of a learner's calls, in a context that is sharded on several ranks; the model is whole after it, and trains alone"
    learn = make(W, rank, **kw)
    params,before = dict(learn.model.named_parameters()),[(type(m),{*vars(m)}) for m in learn.model.modules()]
    with ctx(learn, W, **(dict(shard=True) if W>1 else {})):
        start = floats(learn.validate())
        for name,args,kws in hows: getattr(learn, name)(*args, **kws)
        assert W<2 or all(is_sharded(p) for p in learn.model.parameters())
        preds = learn.get_preds()
    assert all(params[k] is p for k,p in learn.model.named_parameters())
    assert [(type(m),{*vars(m)}) for m in learn.model.modules()]==before
    res = dict(history(learn), start=start, preds=preds)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return res

some = '`fit`, a model with BatchNorm','`fine_tune`','torchs','best' # one of each kind
def of_some(W, rank, path): return {k: fitted(W, rank, *o) for k,o in all_cases(path/str(W)).items() if k in some}
def of_all(W, rank, path): return {k: fitted(W, rank, *o) for k,o in all_cases(path/str(W)).items()}
few,every = asking(of_some),asking(of_all)

@pytest.mark.parametrize('W,runs', [pytest.param(2, 'few', marks=pytest.mark.slow),
                                    *(pytest.param(W, 'every', marks=pytest.mark.long) for W in (2,3))])
def test_same_run(W, runs, request):
    found,func = request.getfixturevalue(runs),dict(few=of_some, every=of_all)[runs]
    want, = found(func, 0)
    for got in found(func, W):
        for k in want:
            close(got[k]['state'], want[k]['state'], 1e-6 if k=='amp' else 1e-9, k)
            close(got[k], want[k], 1e-6, k)

def refused(path):
    messages = []
    calls = lambda o: o.export('x.pkl'), lambda o: o.save(open(path/'f', 'wb')), lambda o: TextLearner.save_encoder(o, 'x')
    for f in (*calls, lambda o: o.to_fp16().fit(1)):
        with process_group():
            learn = make(2, group_rank(), path=path)
            try:
                with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(shard=True if f in calls else dict(mp='bf16')): f(learn)
            except Exception as e: messages.append(str(e))
    return messages

def test_refused_within_the_context(tmp_path):
    for messages in run_ranks(refused, 2, tmp_path):
        assert [o.partition(':')[0] for o in messages[:3]]==['export','save to an open file','save_encoder']
        assert all('Do it after the context' in o for o in messages[:3]) and 'leave out one of the two' in messages[3]
