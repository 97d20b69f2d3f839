"`distrib_ctx(shard=…)` with fastai's Learner: the run of one process"
import pytest, torch
from torch import nn
pytest.importorskip('fastai')
from fastai.basics import Learner
from fastai.callback.all import EarlyStoppingCallback, GradientAccumulation, GradientClip, ModelResetter, SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import Adam, OptimWrapper, SGD, ranger
from functools import partial
from helpers import OneFloat
from learnerdist.all import group_rank, group_size, process_group
from learnerdist.core.shards import is_sharded
from fastai.text.learner import TextLearner
from learnerdist.fastai import checkpoint
from learnerdist.testing import run_ranks
from harness import close, needs_fsdp2
from scenes import right
from test_sharded import net, rows, two_groups
from test_sharded_building import Mapped

base = dict(model=lambda: net().double(), opt=Adam, cbs=(), splitter=None, do='fit', n=24, n_valid=11, shard=True, files=False)
def case(**kw): return {**base, **kw}

def make(c, W, path):
    torch.manual_seed(5+group_rank())
    dls = DataLoaders(DataLoader(rows(c['n']), bs=6//W, shuffle=False), DataLoader(rows(c['n_valid']), bs=3))
    kw = {'splitter': c['splitter']} if c['splitter'] else {}
    return Learner(dls, c['model'](), OneFloat(nn.CrossEntropyLoss()), lr=.05, opt_func=c['opt'], metrics=right, path=path,
                   cbs=[o(W) for o in c['cbs']], **kw)

def run(c, path, W=1):
    "The numbers of a learner's calls, in a context that is sharded on several ranks"
    learn = make(c, W, path)
    params,before = dict(learn.model.named_parameters()),[(type(m),{*vars(m)}) for m in learn.model.modules()]
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=3, **({'shard': c['shard']} if W>1 else {})):
        res = dict(start=list(learn.validate()))
        if c['do']=='fit': learn.fit(2)
        elif c['do']=='one_cycle': learn.fit_one_cycle(2, slice(.01,.05))
        elif c['do']=='fine_tune': learn.fine_tune(1)
        elif c['do']=='lr_find':
            learn.lr_find(num_it=6, show_plot=False)
            learn.fit(1)
        elif c['do']=='freeze':
            learn.freeze_to(1)
            learn.fit(1)
            learn.unfreeze()
            learn.fit(1)
        elif c['do']=='amp': learn.to_fp16().fit(1) # fastai's: on the CPU it makes predictions float32, and no more
        assert W==1 or all(is_sharded(p) for p in learn.model.parameters())
        res |= dict(values=[list(o) for o in learn.recorder.values], losses=list(learn.recorder.losses), preds=list(learn.get_preds()))
        if c['files']:
            learn.save('now')
            w = learn.model.state_dict()['head.weight'].clone()
            learn.fit(1)
            learn.load('now')
            now = learn.model.state_dict()['head.weight']
            assert torch.equal(*[getattr(o, 'to_local', lambda o=o: o)() for o in (w,now)])
            learn.fit(1)
    assert all(params[k] is p for k,p in learn.model.named_parameters())
    assert [(type(m),{*vars(m)}) for m in learn.model.modules()]==before
    res['params'] = [p.detach().clone() for p in learn.model.parameters()]
    with learn.no_bar(), learn.no_logging(): learn.fit(1) # alone, with the state of the optimizer
    return res

def acc(n): return lambda W: GradientAccumulation(n)
def recurrent(): return Resets().double()

class Resets(nn.Module):
    "Keeps its hidden state, as a language model does, until it is reset"
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.head = nn.Linear(6, 5),nn.LSTM(5, 5, batch_first=True),nn.Linear(5, 6, bias=False)
        self.h,self.n_resets = torch.zeros(1),0
    def reset(self): self.h,self.n_resets = torch.zeros(1),self.n_resets+1
    def forward(self, x):
        out = self.rnn(self.emb(x)[:,None])[0][:,-1]
        if self.training: self.h = self.h+1
        return self.head(out)*(1+.1/self.h.to(out))

same = dict(adam=case(files=True), sgd=case(opt=partial(SGD, mom=.9)), ranger=case(opt=ranger, files=True), lr_find=case(do='lr_find'),
            torchs=case(opt=partial(OptimWrapper, opt=torch.optim.AdamW), cbs=[lambda W: GradientClip(.5)], files=True),
            one_cycle=case(do='one_cycle', splitter=two_groups), accumulation=case(cbs=[acc(12)]),
            fine_tune=case(do='fine_tune', splitter=two_groups), freeze=case(do='freeze', splitter=two_groups),
            amp=case(do='amp'),
            reset=case(model=recurrent, cbs=[lambda W: ModelResetter()]),
            best=case(cbs=[lambda W: SaveModelCallback(),lambda W: EarlyStoppingCallback(min_delta=9.)]))

tol = dict(start=1e-6, values=1e-6, losses=1e-6, preds=1e-9, params=1e-9) # fastai records float32

def rank_runs(path, names):
    with process_group(): return {k: run(same[k], path/k, group_size()) for k in names}

some = 'adam','lr_find','torchs','amp','best' # one of each kind

@pytest.mark.slow
@needs_fsdp2
@pytest.mark.parametrize('W,names', [(2, some), *[pytest.param(o, [*same], marks=pytest.mark.long) for o in (2,3)]], ids=['some','2','3'])
def test_same_run(W, names, tmp_path):
    alone = {k: run(same[k], tmp_path/'alone') for k in names}
    for ranks in run_ranks(rank_runs, W, tmp_path, names, timeout_s=400):
        for k in names:
            for q,want in alone[k].items(): close(ranks[k][q], want, 1e-6 if k=='amp' else tol[q], f'{k}.{q}')

def loaded(path):
    "KiB of a file of fastai's that are in memory when a rank loads it, its size, and whether the weights are those"
    with process_group():
        learn = make(dict(base, model=lambda: nn.Sequential(*[nn.Linear(1024, 4096) for _ in range(2)])), group_size(), path)
        with learn.distrib_ctx(shard=True):
            learn.create_opt()
            file = learn.save('big')
            before = [p.to_local().clone() for p in learn.model.parameters()]
            for p in learn.model.parameters(): p.data.mul_(0)
            checkpoint.load_model = spy = Mapped(checkpoint.load_model)
            learn.load('big')
            checkpoint.load_model = spy.f
            now = [p.to_local() for p in learn.model.parameters()]
        return spy.kb,file.stat().st_size/1024,all(map(torch.equal, before, now))

@needs_fsdp2
def test_a_rank_reads_its_rows_of_fastais_file(tmp_path):
    for kb,size,equal in run_ranks(loaded, 2, tmp_path): assert equal and .4*size<kb<.8*size

def refused(path):
    messages = []
    calls = lambda o: o.export('x.pkl'), lambda o: o.save(open(path/'f', 'wb')), lambda o: TextLearner.save_encoder(o, 'x')
    for f in (*calls, lambda o: o.to_fp16().fit(1)):
        with process_group():
            learn = make(base, group_size(), path)
            try:
                with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(shard=True if f in calls else dict(mp='bf16')): f(learn)
            except Exception as e: messages.append(str(e))
    return messages

@needs_fsdp2
def test_refused_within_the_context(tmp_path):
    for messages in run_ranks(refused, 2, tmp_path):
        assert [o.partition(':')[0] for o in messages[:3]]==['export','save to an open file','save_encoder']
        assert all('Do it after the context' in o for o in messages[:3]) and 'leave out one of the two' in messages[3]
