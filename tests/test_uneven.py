"Ranks whose training loaders end at different steps: the epoch ends for all with the first, with the same weights"
from functools import partial
import pytest, torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Sampler
from harness import all_warnings, asking
from helpers import Stream
from scenes import Cancels, make, normed, result, scene, sgd
from learnerdist.all import *
from learnerdist.testing import run_ranks

pytestmark = pytest.mark.slow

BS = 4

def data(n, seed):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    return list(zip(x, x[:,:2]*.5+.1))

class Shares(Stream):
    "Each rank's own samples; knows no length"
    splits_by_rank = True

class KnownShares(Shares):
    "It says how many there are; that may be wrong"
    said = None
    def __len__(self): return len(self.items) if self.said is None else self.said

class Split(Sampler):
    "A sampler of the user's, with the attributes of torch's DistributedSampler, whose shares are not equally long"
    def __init__(self, n, rank, num_replicas): self.n,self.rank,self.num_replicas = n,rank,num_replicas
    def __iter__(self): return iter(range(self.n))
    def __len__(self): return self.n

def loader(kind, n_batches, rank, W, short=0, messages=None):
    "`n_batches` on this rank, the last one `short` samples short"
    n = n_batches*BS-short if n_batches else 0
    items = data(n, seed=rank)
    if kind=='stream': return TfmdDL(Shares(items), BS)
    if kind=='workers': return DataLoader(Shares(items), BS, num_workers=1)
    if kind=='known_stream':
        ds = KnownShares(items)
        if messages: ds.said = messages[rank]*BS
        return TfmdDL(ds, BS)
    return DataLoader(items or [0], BS, sampler=Split(n, rank, W))

kinds = 'stream','known_stream','sampler'

class Count(Callback):
    "Steps of each epoch"
    def before_fit(self): self.learn.counts = []
    def before_train(self): self.counts.append(0)
    def after_step(self): self.counts[-1] += 1

def learner(dl, **kw):
    learn = make(scene(lr=.05, **kw))
    learn.dls.loaders[0],learn.logger = dl,lambda line: None
    return learn

def fit(kind, lens, cbs=list, short=0, cycle=False, messages=None, path='.', **kw):
    rank = rank_distrib()
    learn = learner(loader(kind, lens[rank], rank, len(lens), short, messages), **kw)
    learn.path = path
    with all_warnings() as ws, learn.distrib_ctx(seed=1):
        (learn.fit_one_cycle if cycle else learn.fit)(2, cbs=[Count(),*cbs()])
    messages = [str(w.message) for w in ws if '[uneven-epoch]' in str(w.message)]
    return dict(result(learn), counts=learn.counts, messages=messages)

def many(cases):
    with process_group(): return [fit(**kw) for kw in cases]

def alike(cases, ranks):
    "What each case gives on each rank, once it is the same on all"
    for c,rs in zip(cases, res := [*zip(*ranks)]):
        for r in rs:
            assert all(torch.equal(v, rs[0]['state'][k]) for k,v in r['state'].items()), c
            assert all(r[k]==rs[0][k] for k in ('losses','values','lrs','counts')), c
    return zip(cases, res)

def by_hand(lens, short=0):
    "Weights and losses of two epochs of plain SGD on the samples of all ranks, over the steps that all ranks have"
    learn,losses = learner(None),[]
    opt = sgd(learn.model.parameters(), .05)
    parts = [list(loader('stream', n, r, len(lens), short)) for r,n in enumerate(lens)]
    for i in list(range(min(lens)))*2:
        x,y = (torch.cat([p[i][k] for p in parts]) for k in (0, 1))
        loss = learn.loss_func(learn.model(x), y)
        loss.backward()
        losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return learn.model.state_dict(),losses

lengths = (4,2,3),(2,2,5),(1,3,3),(3,3,3)

def test_epoch_ends_with_the_first_rank():
    "The last batch of the longest share is never seen, the short one of the shortest counts for less"
    cases = [dict(kind=kind, lens=lens) for kind in kinds for lens in lengths]
    cases += [dict(kind='stream', lens=lengths[0], short=2), dict(kind='workers', lens=lengths[-1])]
    for c,rs in alike(cases, run_ranks(many, 3, cases)):
        state,losses = by_hand(c['lens'], c.get('short', 0))
        assert rs[0]['counts']==[min(c['lens'])]*2, c
        for k,v in state.items(): torch.testing.assert_close(rs[0]['state'][k], v, rtol=0, atol=1e-12)
        assert rs[0]['losses']==pytest.approx(losses, abs=1e-12)
        least = min(c['lens'])
        for i,r in enumerate(rs): # rank 0 says how many have no further batch, in each epoch
            assert len(r['messages'])==(2 if i==0 and max(c['lens'])>least else 0), c
            assert all(f'{c["lens"].count(least)} of 3 ranks' in o and f'ends after {least}' in o for o in r['messages'])

def interrupted(cancel): return [Cancels(*cancel),Scheduler(partial(StepLR, step_size=1, gamma=.5)),SaveModelCallback()]

# Whatever 2 ranks are asked, by name: cases of `fit`
cycles = [dict(kind=kind, lens=lens, cycle=True) for kind in kinds[1:] for lens in [(3,5),(4,2),(4,4)]]
wrong = ((3,5),(5,5)), ((5,3),(5,5)), ((5,5),(3,5)), ((3,3),(5,5))
wrong = [dict(kind='known_stream', lens=lens, messages=messages) for lens,messages in wrong]
normal = [dict(kind=kind, lens=(3,5), short=short, model=normed) for kind in kinds for short in (0,2)]
at = [('after_loss',CancelBatchException,0), ('after_loss',CancelBatchException,2), ('after_backward',CancelBatchException,2),
      ('before_batch',CancelTrainException,1), ('after_step',CancelTrainException,2)]
cancelled = [dict(kind='stream', lens=lens, cbs=partial(interrupted, (event,exc,rank,i)))
             for event,exc,i in at for rank,lens in ((0,(3,5)), (1,(3,5)), (0,(5,3)))]
asked = dict(cycles=cycles, wrong=wrong, normal=normal, cancelled=cancelled)
empty = [(kind,lens) for kind in kinds for lens in [(0,2),(2,0)]]
none = [('known_stream',(0,0))]

def answers(W, rank, path):
    res = {k: many([dict(kw, path=path/f'{k}{i}') for i,kw in enumerate(cases)]) for k,cases in asked.items()}
    return dict(res, empty=nothing(empty), none=nothing(none))

found = asking(alone=(answers,))

@pytest.mark.parametrize('name', asked)
def test_ranks_are_alike(name, found):
    "Lengths that are wrong, synchronised BatchNorm, and a rank whose last step may be its part in the others'"
    alike(asked[name], [o[name] for o in found(answers, 2)])

def test_one_cycle_has_the_steps_that_are_taken(found):
    for c,rs in zip(cycles, zip(*[o['cycles'] for o in found(answers, 2)])): # down to the end of the cycle
        assert len(rs[0]['lrs'])==2*min(c['lens']) and abs(rs[0]['lrs'][-1]-.05/1e5)<1e-9
    with pytest.raises(ValueError, match='has no len'): learner(loader('stream', 3, 0, 1)).fit_one_cycle(1)

def nothing(cases):
    res = []
    for kind,lens in cases:
        rank = rank_distrib()
        learn = learner(loader(kind, lens[rank], rank, len(lens)))
        before = list(learn.cbs)
        try:
            with learn.distrib_ctx(seed=1): learn.fit(1)
            res.append('no error')
        except (ValueError,RankError) as e: res.append((type(e).__name__, str(e), learn.cbs==before))
    return res

def test_a_rank_without_any_batch(found):
    for c,*rs in zip(empty, *[o['empty'] for o in found(answers, 2)]):
        for name,msg,clean in rs:
            assert name in ('ValueError','RankError') and 'no training batch' in msg and clean, (c,rs)
        assert 'ValueError' in [o[0] for o in rs]

def test_no_rank_has_any_batch_trains_nothing(found): assert [o['none'] for o in found(answers, 2)]==[['no error']]*2
