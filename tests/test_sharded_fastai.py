"`distrib_ctx(shard=…)` with fastai's Learner: the run of one process"
import pytest, torch
from torch import nn
pytest.importorskip('fastai')
from fastai.basics import Learner
from fastai.callback.all import GradientClip, GradientAccumulation, SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.optimizer import Adam, OptimWrapper, SGD, ranger
from functools import partial
from learnerdist.all import deferred, group_rank, group_size, process_group
from learnerdist.core.shards import is_part
import learnerdist.fastai # noqa: F401
from learnerdist.testing import run_ranks
from test_sharded import acc64, data, differs, needs_fsdp2, net, two_groups

base = dict(model=lambda: net().double(), opt=Adam, cbs=(), splitter=None, do='fit', n=24, n_valid=11)
def case(**kw): return {**base, **kw}

class CrossEntropy(nn.CrossEntropyLoss):
    "fastai's Recorder takes float32 only; the gradients are float64 all the same"
    def forward(self, out, y): return super().forward(out, y).float()

def make(c, W, path):
    torch.manual_seed(5+group_rank())
    dls = DataLoaders(DataLoader(data(c['n']), bs=6//W, shuffle=False), DataLoader(data(c['n_valid'], 2), bs=3))
    return Learner(dls, c['model'](), CrossEntropy(), lr=.05, opt_func=c['opt'], metrics=acc64, path=path, cbs=[o(W) for o in c['cbs']],
                   **({'splitter': c['splitter']} if c['splitter'] else {}))

def run(c, path, W=1):
    learn = make(c, W, path)
    params,before = dict(learn.model.named_parameters()),[(type(m),{*vars(m)}) for m in learn.model.modules()]
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=3, **({'shard': True} if W>1 else {})):
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
        assert W==1 or all(is_part(p) for p in learn.model.parameters())
        res |= dict(values=[list(o) for o in learn.recorder.values], losses=list(learn.recorder.losses), preds=list(learn.get_preds()))
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

same = dict(adam=case(), sgd=case(opt=partial(SGD, mom=.9)), ranger=case(opt=ranger), lr_find=case(do='lr_find'),
            torchs=case(opt=partial(OptimWrapper, opt=torch.optim.AdamW)), one_cycle=case(do='one_cycle', splitter=two_groups),
            fine_tune=case(do='fine_tune', splitter=two_groups), freeze=case(do='freeze', splitter=two_groups),
            clip=case(cbs=[lambda W: GradientClip(.5)]), save=case(cbs=[lambda W: SaveModelCallback()]),
            accumulation=case(cbs=[lambda W: GradientAccumulation(12//W)]), deferred=case(model=lambda: deferred(lambda: net().double())))

tol = dict(start=1e-6, values=1e-6, losses=1e-6, preds=1e-9, params=1e-9) # fastai records float32

def rank_runs(path, names=None):
    with process_group(): return {k: run(same[k], path/k, group_size()) for k in names or same}

@pytest.mark.slow
@needs_fsdp2
def test_same_run(tmp_path):
    alone = {k: run(c, tmp_path/'alone') for k,c in same.items()}
    for ranks in run_ranks(rank_runs, 2, tmp_path):
        assert {(k,q): d for k in same for q in ranks[k] if (d := differs([alone[k][q]], [ranks[k][q]]))>tol[q]} == {}

def refused(path):
    said = []
    for f in (lambda o: o.export('x.pkl'), lambda o: o.save(open(path/'f', 'wb'))):
        with process_group():
            learn = make(base, group_size(), path)
            try:
                with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(shard=True): f(learn)
            except Exception as e: said.append(str(e))
    return said

@needs_fsdp2
def test_refused_within_the_context(tmp_path):
    for said in run_ranks(refused, 2, tmp_path):
        assert [o.partition(':')[0] for o in said]==['export','save to an open file'] and all('Do it after the context' in o for o in said)
