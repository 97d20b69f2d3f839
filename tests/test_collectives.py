"How many collectives a step, a validation batch, an epoch and a prediction take: exact counts, so that none creeps in"
from collections import Counter
import pytest, torch.distributed as dist
from sklearn.metrics import f1_score
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
import scenes
from scenes import classes, net, normed, scene
from learnerdist.all import *
from learnerdist.distributed.vote_links import Links, Phase
from learnerdist.testing import run_ranks

pytestmark = pytest.mark.slow

BS = 4
names = ('all_gather','all_gather_coalesced','all_gather_into_tensor','all_gather_object','all_reduce','all_reduce_coalesced','all_to_all',
         'all_to_all_single','barrier','batch_isend_irecv','broadcast','broadcast_object_list','gather','gather_object','isend',
         'monitored_barrier','new_group','reduce','reduce_scatter','reduce_scatter_tensor','scatter',
         'scatter_object_list','send','send_object_list')

class Counted:
    "Counts votes, meetings, and what goes through `torch.distributed`; not what DDP's own C++ code exchanges, nor what is within these"
    def __enter__(self):
        self.calls,self.inside = Counter(),False
        self.old = [(o,name,getattr(o, name)) for o,name in [*((dist,o) for o in names),(Links,'exchange')]]
        for o,name,func in self.old: setattr(o, name, self._counted(name, func))
        return self.calls
    def __exit__(self, *exc):
        for o in self.old: setattr(*o)
    def _counted(self, name, func):
        def call(*args, **kw):
            outer,self.inside = self.inside,True
            messages = name if name!='exchange' else 'mean' if args[2:3]==(Phase.backward,) else 'vote'
            if not outer: self.calls[messages] += 1
            try: return func(*args, **kw)
            finally: self.inside = outer
        return call

class BatchMeans(Metric):
    "A class never seen"
    def reset(self): self.means = []
    def accumulate(self, learn): self.means.append(accuracy(learn.pred, learn.y).item())
    @property
    def value(self): return sum(self.means)

known = [accuracy, error_rate, MulticlassAccuracy(2, average='micro')]

def make(n_steps=3, n_valid=2, metrics=known, model=net):
    "`n_steps` and `n_valid` are those of each rank"
    n = BS*group_size()
    kw = dict(n=n*n_steps, n_valid=n*n_valid, bs=n, val_bs=BS, metrics=metrics, model=model)
    return scenes.make(scene(ds=classes, loss=F.cross_entropy, **kw), group_size())

def less(a, b): return dict(a-b)

def fit_calls(n_epoch=1, **kw):
    learn = make(**kw)
    with learn.distrib_ctx(seed=1), learn.no_logging(), Counted() as calls: learn.fit(n_epoch)
    return calls

def rank_fits():
    with process_group():
        f1 = skm_metric(f1_score, dim_argmax=-1, average='macro')
        base,rows,replay = fit_calls(),fit_calls(metrics=[*known,f1]),fit_calls(metrics=[*known,BatchMeans])
        return dict(fit=dict(base), step=less(fit_calls(n_steps=4), base), valid=less(fit_calls(n_valid=3), base),
                    epoch=less(fit_calls(2), base), norm=less(fit_calls(model=normed), base),
                    rows=less(rows, base), replay=less(replay, base))

@pytest.mark.parametrize('W,env', [(2, {}), (3, {}), (2, dict(LOCAL_WORLD_SIZE='1'))]) # the last: each rank on a machine of its own
def test_a_fit(W, env):
    # Meetings of a step: 2 ranks add up all of the gradients each, 3 a part, which the others fetch. The items that a loss counts travel
    # with the first one; between machines in a message of their own, which arrives while the backward pass runs
    mean = 1 if env else W-1
    alike = (W-1).bit_length() # Messages that gather tensors of one shape; twice as many objects
    for got in run_ranks(rank_fits, W, env=env):
        assert (got['step'].pop('mean', 0),got['epoch'].pop('mean', 0),got['fit'].pop('mean', 0))==(mean,3*mean,3*mean)
        items = 1 if env else 0
        assert got['step']==(dict(vote=1, isend=1) if env else dict(vote=1))
        assert got['valid']=={'vote': 1}
        # Votes before and after the epoch, its training loop and its validation: 6. Before each of 3 steps and 2 batches, and after
        # the last ones, whether a rank has another: 4 and 3.
        # The losses of its steps, an all-gather. The counts and sums of its validation. A hash of the weights, as a vote
        assert got['epoch']==dict(vote=6+4+3+1, isend=alike+2*2*alike+3*items)
        # As votes: before the fit the options of callbacks, and what the ranks begin; after its first step whether the weights are equal.
        # One more before the fit. In its first batch what samples show
        assert got['fit']==dict(vote=1+1+6+4+3+1+2, isend=alike+(2+1)*2*alike+3*items)
        # BatchNorm: the sums of each step, forward and backward; 3 buffers after the epoch
        assert got['norm']=={'all_reduce': 3*2, 'broadcast': 3}
        # Predictions and targets: what they look like, then the rows. On one machine nobody sends rows: ranks say that theirs are
        # written, of each
        assert got['rows']==(dict(isend=4*2*alike) if env else dict(vote=2, isend=2*2*alike))
        # All metrics of unknown kinds together get the ranks' batches, a round of ranks at a time
        assert got['replay']==dict(isend=3*2*alike)

def calls_of(func, *args, **kw):
    with Counted() as calls: func(*args, **kw)
    return dict(calls)

def read_loaders(learn):
    for dl in learn.dls:
        dl.set_epoch(2)
        for _ in range(2): assert len(dl)==len([*dl])
        assert dl.one_batch()[0].shape==(BS, 4) and dl.n and dl.n_total
        dl.new(bs=2).one_batch()
    learn.dls.one_batch()
    learn.dls.one_batch(1)

def rank_others(path):
    with process_group():
        learn = make()
        learn.path = path
        with Counted() as context, learn.distrib_ctx(seed=1): pass
        with learn.distrib_ctx(seed=1):
            x = learn.dls.one_batch()[0][0]
            return dict(context=dict(context), loaders=calls_of(read_loaders, learn), validate=calls_of(learn.validate),
                        preds=calls_of(learn.get_preds), rank0=calls_of(learn.get_preds, gather='rank0'),
                        predict=calls_of(learn.predict, x), save=calls_of(learn.save, 'm'), load=calls_of(learn.load, 'm'))

def test_everything_else(tmp_path):
    for got in run_ranks(rank_others, 2, tmp_path):
        assert got['loaders']=={}
        assert got['save']==got['load']=={}
        # Votes before, after, before each of 2 batches and after the last; whether each batch was seen once, and the sums
        assert got['validate']=={'vote': 2+3, 'isend': 2*2}
        # Nobody reads the loss, so there is no sum; what predictions and targets look like, and that their rows are written
        assert got['preds']==got['rank0']=={'vote': 2+3+2, 'isend': 3*2}
        assert got['predict']=={'vote': 2+2} # each rank reads the same item
        # Where ranks answer, and whether they do. As votes a hash of options, path and seed; of model, weights and optimizer; of data
        assert got['context']=={'isend': 2, 'vote': 3}
