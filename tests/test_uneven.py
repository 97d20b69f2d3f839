"Ranks whose training loaders end at different steps: the epoch ends for all with the first, with the same weights everywhere"
import warnings
from functools import partial
from pathlib import Path
import pytest, torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, Sampler
from learnerdist.all import (Callback, CancelBatchException, CancelTrainException, DataLoaders, Learner, RankError, SaveModelCallback,
                             Scheduler, TfmdDL, process_group, rank_distrib)
from learnerdist.testing import run_ranks

torch.set_num_threads(1)
BS = 4

def data(n, seed):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    return list(zip(x, x.sum(1, keepdim=True)*.5+.1))

class Stream(IterableDataset):
    "Each rank's own samples; knows no length"
    splits_by_rank = True
    def __init__(self, items, said=None): self.items,self.said = items,said
    def __iter__(self): return iter(self.items)

class KnownStream(Stream):
    "It says how many there are; that may be wrong"
    def __len__(self): return len(self.items) if self.said is None else self.said

class Split(Sampler):
    "A sampler of the user's, with the attributes of torch's DistributedSampler, whose shares are not equally long"
    def __init__(self, n, rank, num_replicas): self.n,self.rank,self.num_replicas = n,rank,num_replicas
    def __iter__(self): return iter(range(self.n))
    def __len__(self): return self.n

def loader(kind, n_batches, rank, world_size, short=0):
    "`n_batches` on this rank, the last one `short` samples short"
    n = n_batches*BS-short if n_batches else 0
    items = data(n, seed=rank)
    if kind=='stream': return TfmdDL(Stream(items), BS)
    if kind=='known_stream': return TfmdDL(KnownStream(items), BS)
    if kind=='workers': return DataLoader(Stream(items), BS, num_workers=1)
    return DataLoader(items or [0], BS, sampler=Split(n, rank, world_size))

kinds = ['stream','known_stream','sampler']

class Count(Callback):
    "Steps, and batches, of each epoch"
    def before_fit(self): self.learn.counts = []
    def before_train(self): self.counts.append(0)
    def after_step(self): self.counts[-1] += 1

class Raise(Callback):
    run_valid = False
    def __init__(self, event, exc, rank, at):
        self.exc,self.rank,self.at,self.seen = exc,rank,at,0
        setattr(self, event, self.act)
    def act(self):
        self.seen += 1
        if self.rank==rank_distrib() and self.seen==self.at+1: raise self.exc

def net(bn=False): return nn.Sequential(nn.Linear(3,4), *([nn.BatchNorm1d(4)] if bn else []), nn.ReLU(), nn.Linear(4,1)).double()

def make(dl, bn=False, path='.', **kw):
    torch.manual_seed(7)
    opt = partial(torch.optim.SGD, momentum=.9)
    learn = Learner(DataLoaders(dl, TfmdDL(data(10, 99), BS), path=path), net(bn), nn.MSELoss(), opt, lr=.05, **kw)
    learn.logger = lambda line: None
    return learn

def result(learn, ws):
    rec = learn.recorder
    return dict(state={k:v.clone() for k,v in learn.model.state_dict().items()}, losses=rec.losses, values=rec.values, lrs=rec.lrs,
                counts=learn.counts, said=[str(w.message) for w in ws if 'training batches' in str(w.message)])

def fit(kind, lens, n_epoch=2, cbs=(), short=0, cycle=False, said=None, **kw):
    rank = rank_distrib()
    dl = TfmdDL(KnownStream(data(lens[rank]*BS, rank), said[rank]*BS), BS) if said else loader(kind, lens[rank], rank, len(lens), short)
    learn = make(dl, **kw)
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        with learn.distrib_ctx(seed=1): (learn.fit_one_cycle if cycle else learn.fit)(n_epoch, cbs=[Count(),*cbs])
    return result(learn, ws)

def many(cases):
    with process_group(): return {k:fit(**kw) for k,kw in cases.items()}

def equal_on_all(rs):
    for r in rs[1:]:
        for k,v in rs[0]['state'].items(): assert torch.equal(v, r['state'][k]), k
        assert (r['losses'],r['values'],r['lrs'],r['counts'])==(rs[0]['losses'],rs[0]['values'],rs[0]['lrs'],rs[0]['counts'])

def by_hand(lens, n_epoch=2, short=0):
    "Weights of plain SGD on the mean of the ranks' gradients, over the steps that all ranks have"
    learn = make(loader('stream', 1, 0, 1))
    learn.prepare(.05)
    batches = [list(loader('stream', n, r, len(lens), short)) for r,n in enumerate(lens)]
    for i in list(range(min(lens)))*n_epoch:
        for b in batches: (learn.loss_func(learn.model(b[i][0]), b[i][1])/len(lens)).backward()
        learn.opt.step()
        learn.opt.zero_grad()
    return learn.model.state_dict()

lengths = {2:[(3,5),(5,3),(1,4),(4,4),(2,1)], 3:[(4,2,3),(2,2,5),(1,3,3),(3,3,3)]}

@pytest.mark.parametrize('n', [2,3])
def test_epoch_ends_with_the_first_rank(n):
    cases = {(kind,lens): dict(kind=kind, lens=lens) for kind in kinds for lens in lengths[n]}
    res = run_ranks(many, n, cases)
    for kind,lens in cases:
        rs = [r[kind,lens] for r in res]
        equal_on_all(rs)
        assert rs[0]['counts']==[min(lens)]*2 and len(rs[0]['losses'])==2*min(lens), (kind,lens)
        for k,v in by_hand(lens).items(): torch.testing.assert_close(rs[0]['state'][k], v, rtol=0, atol=1e-12)
        for i,(r,m) in enumerate(zip(rs, lens)): # those that drop batches say so, in each epoch
            assert len(r['said'])==2*(m>min(lens)), (kind,lens)
            assert all(f'rank {i} ' in o and f'ends after {min(lens)}' in o for o in r['said'])

def test_one_cycle_has_the_steps_that_are_taken():
    cases = {(kind,lens): dict(kind=kind, lens=lens, cycle=True) for kind in ('known_stream','sampler') for lens in [(3,5),(4,2),(4,4)]}
    res = run_ranks(many, 2, cases)
    for kind,lens in cases:
        rs = [r[kind,lens] for r in res]
        equal_on_all(rs)
        assert len(rs[0]['lrs'])==2*min(lens) and abs(rs[0]['lrs'][-1]-.05/1e5)<1e-9 # down to the end of the cycle

def test_one_cycle_needs_a_length():
    learn = make(loader('stream', 3, 0, 1))
    with pytest.raises(ValueError, match='no length'): learn.fit_one_cycle(1)


@pytest.mark.parametrize('lens,said', [((3,5),(5,5)), ((5,3),(5,5)), ((5,5),(3,5)), ((3,3),(5,5))])
def test_a_length_that_is_wrong_hangs_nobody(lens, said):
    rs = [r['a'] for r in run_ranks(many, 2, dict(a=dict(kind='', lens=lens, said=said)))]
    equal_on_all(rs)

def test_with_workers():
    cases = {lens: dict(kind='workers', lens=lens) for lens in [(3,5),(2,1)]}
    res = run_ranks(many, 2, cases)
    for lens in cases:
        equal_on_all([r[lens] for r in res])
        assert res[0][lens]['counts']==[min(lens)]*2

@pytest.mark.parametrize('n', [2,3])
def test_recorded_losses_are_means_over_samples(n):
    "The last batch of the longest share is never seen, the short one of the shortest counts for less"
    lens = lengths[n][0]
    rs = [r['a'] for r in run_ranks(many, n, dict(a=dict(kind='stream', lens=lens, short=2, n_epoch=1)))]
    equal_on_all(rs)
    first = make(loader('stream', 1, 0, 1)).model
    bs = [next(iter(loader('stream', m, r, n, short=2))) for r,m in enumerate(lens)]
    want = nn.functional.mse_loss(first(torch.cat([b[0] for b in bs])), torch.cat([b[1] for b in bs]))
    assert abs(rs[0]['losses'][0]-want.item())<1e-12

def test_with_synchronised_batchnorm():
    cases = {(kind,short): dict(kind=kind, lens=(3,5), bn=True, short=short) for kind in kinds for short in (0,2)}
    res = run_ranks(many, 2, cases)
    for k in cases: equal_on_all([r[k] for r in res])

def with_callbacks(path):
    res = {}
    with process_group():
        for rank in (0,1):
            for event,exc,at in [('after_loss',CancelBatchException,0), ('after_loss',CancelBatchException,2),
                                 ('after_backward',CancelBatchException,2), ('before_batch',CancelTrainException,1),
                                 ('after_step',CancelTrainException,2)]:
                for lens in [(3,5),(5,3)]:
                    cbs = [Raise(event, exc, rank, at), Scheduler(partial(StepLR, step_size=1, gamma=.5)), SaveModelCallback()]
                    res[event,exc.__name__,at,rank,lens] = fit('stream', lens, cbs=cbs, path=Path(path)/f'{len(res)}')
    return res

def test_cancels_in_uneven_epochs(tmp_path):
    res = run_ranks(with_callbacks, 2, tmp_path)
    for k in res[0]:
        for r in res: # a rank's last step may be its part in the others'
            assert all(torch.equal(v, res[0][k]['state'][o]) for o,v in r[k]['state'].items()), k
            assert (r[k]['values'],r[k]['losses'],r[k]['counts'])==(res[0][k]['values'],res[0][k]['losses'],res[0][k]['counts']), k

# --- a rank with nothing ------------------------------------------------------------------------------------------------------

def nothing(kind, lens):
    rank = rank_distrib()
    learn = make(loader(kind, lens[rank], rank, len(lens)))
    before = list(learn.cbs)
    try:
        with learn.distrib_ctx(seed=1): learn.fit(1)
    except (ValueError,RankError) as e: return type(e).__name__,str(e),learn.cbs==before
    return 'no error','',learn.recorder.losses

@pytest.mark.parametrize('kind', ['stream','known_stream','sampler'])
@pytest.mark.parametrize('lens', [(0,2),(2,0)])
def test_a_rank_without_any_batch(kind, lens):
    res = run_ranks(nothing, 2, kind, lens)
    for name,msg,clean in res: assert name in ('ValueError','RankError') and 'no training batch' in msg and clean, res
    assert 'ValueError' in [o[0] for o in res]

def test_no_rank_has_any_batch_trains_nothing():
    assert [o[0] for o in run_ranks(nothing, 2, 'known_stream', (0,0))]==['no error']*2
