"""Once a fit, on its first training batch: does the model mix samples, and does the loss follow from those of parts?"""
import copy,logging,pickle,random
from collections import OrderedDict
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor,nn
from torch.utils.data import IterableDataset

from ..core.collectives import gather_objects
from ..core.compat import BatchNorm,Dropout,compiled_call,compiled_inside,tree_leaves,tree_map,version
from ..core.env import group_rank,group_size
from ..core.random import rng_state,shared_rng,untouched
from ..data.loaders import call_model,data_len,split_batch,to_cpu,to_device
from ..learner.learner import Learner,get_model
from ..learner.losses import LossTrace,MeanOver,as_mean,batch_rows,copied,counted_rows,cut,follows
from ..learner.losses import loss_of_model,loss_over,tolerance
from .replica import current

# ---
log = logging.getLogger(__name__)

def streams(): return random.getstate(),*[o.tolist() if isinstance(o, Tensor) else o for o in rng_state()[2:]]

def loader_of(learn): return getattr(learn.dl, 'source', learn.dl)

def read_items(
    learn,
    n:int=2 # Number of samples of each rank
):          # None if the training data cannot be read sample by sample, or not be sent
    "This rank's samples of the training data, drawn from all of it. Random streams are left as they are"
    dl = loader_of(learn)
    ds = getattr(dl, 'dataset', None)
    batched = hasattr(dl, 'do_batch') or getattr(dl, 'batch_sampler', None) is not None
    if isinstance(ds, IterableDataset) or not (batched and hasattr(ds, '__getitem__') and data_len(ds)): return None
    drawn = random.Random(len(ds)).sample(range(len(ds)), min(len(ds), n*group_size()))
    own = [drawn[i%len(drawn)] for i in range(n*group_rank(), n*group_rank()+n)]
    if not hasattr(dl, 'do_item') and hasattr(ds, '__dict__'): ds = copy.copy(ds) # workers inherit no file of it
    try:
        with shared_rng(group_rank()): res = [dl.do_item(i) if hasattr(dl, 'do_item') else ds[i] for i in own]
        pickle.dumps(res)
        return res
    except Exception as e: log.debug('samples cannot be read one by one: %r', e)

def collated(
    learn,
    items:list # Samples
):             # (inputs, targets)
    "The batch that the training loader makes of samples. ValueError if it draws random numbers"
    dl,before = loader_of(learn),streams()
    b = to_device(dl.do_batch(items) if hasattr(dl, 'do_batch') else dl.collate_fn(items), learn.device)
    after = getattr(dl, 'after_batch', None) or []
    for f in after if isinstance(after, list) else [after]: b = f(b)
    if streams()!=before: raise ValueError('the loader draws random numbers for a batch')
    return split_batch(b, getattr(learn.dl, 'n_inp', getattr(learn.dls, 'n_inp', None)))

def joined(
    parts:list # Batches of the same structure
):
    "The samples of several batches as one"
    leaves = iter([torch.cat(os) for os in zip(*map(tree_leaves, parts))])
    return tree_map(lambda o: next(leaves), parts[0])

# ---
class Outcome(NamedTuple):
    "What the model and the loss make of some samples"
    pred:object
    loss:object # With its graph; None: it was not computed
    items:object # What the loss is the mean over, if it shows or says that
    n:int # Number of samples, see `counted_rows`
    draws:bool # Whether the model draws random numbers in evaluation
    loss_draws:bool
    @property
    def numbers(self):
        loss = None if self.loss is None else float(self.loss.detach().double().mean())
        return loss,None if self.items is None else float(self.items),self.n

def computed(
    learn, xb, yb, n, # Inputs and targets of `n` samples
    training=False,   # In evaluation where that is possible: some models compute their loss in training only
    pred=None         # The prediction; None: the model's
)->Outcome:
    "What model and loss make of a batch: on copies, without a backward pass or a hook. Buffers and random streams stay"
    over,trace = loss_over(learn),LossTrace()
    model = getattr(get_model(learn.model), compiled_inside, get_model(learn.model))
    func = loss_of_model if learn.loss_func is None else learn.loss_func
    exact = torch.autocast(learn.device.type, enabled=False),torch.enable_grad()
    with ExitStack() as stack:
        for o in (untouched(model),untouched(func),shared_rng(0),*exact,trace): stack.enter_context(o)
        _quiet(model, training)
        xb,yb,seen = copied(tuple(xb)),copied(tuple(yb)),[streams()]
        if pred is None: pred = call_model(model, xb, model) if isinstance(learn, Learner) else model(*xb)
        seen.append(streams())
        loss = func(pred, *yb) if yb and over.kind!='whole' else None
        draws,loss_draws = seen[0]!=seen[1],seen[1]!=streams()
        items = trace.items(loss) if isinstance(loss, Tensor) else None
        if type(loss) is tuple: loss,items = as_mean(*loss)
        elif loss is not None and over.count is not None: items = over.count(pred, *yb)
        return Outcome(pred, loss, items, counted_rows(pred, yb, n), draws, loss_draws)

def _quiet(model, training):
    "In evaluation, or in training without dropout; without hooks, and without what changes a weight"
    for m in model.modules():
        m.training = training and not isinstance(m, (BatchNorm,Dropout))
        vars(m)[compiled_call] = None
        for k in [k for k,v in vars(m).items() if k.endswith('_hooks') and v]:
            vars(m)[k] = OrderedDict((i,f) for i,f in vars(m)[k].items() if _is_torchs(f)) # weight_norm is such a hook
        if isinstance(m, (nn.Embedding,nn.EmbeddingBag)): m.max_norm = None
        if isinstance(m, BatchNorm) and m.running_mean is None:
            like = next(m.parameters(), torch.zeros(0))
            m.running_mean,m.running_var = like.new_zeros(m.num_features),like.new_ones(m.num_features)

def _is_torchs(f): return (getattr(f, '__module__', None) or type(f).__module__).startswith('torch.')

# ---
def far(
    whole, part,        # A tensor of the prediction for all samples, and one for some of them
    n:int, i:int, j:int # Number of all samples; which are the part's
)->bool:                # False also where they cannot be compared
    "Whether predictions differ beyond rounding. Rows may come in another order: anchors, then positives"
    if not (isinstance(part, Tensor) and isinstance(whole, Tensor)) or whole.ndim!=part.ndim: return False
    if not part.ndim or not part.is_floating_point() or not whole.isfinite().all(): return False
    dims = [d for d in range(part.ndim) if part.shape[d]!=whole.shape[d]]
    if len(dims)!=1 or whole.shape[dims[0]]*(j-i)!=part.shape[dims[0]]*n: return False
    a,b = [o.detach().double().movedim(dims[0], 0).reshape(o.shape[dims[0]], -1) for o in (whole,part)]
    tol,k = 10*tolerance(part)*a.norm()/len(a)**.5,len(b)//(j-i) # of a row; rows of a sample
    if len(b)==k*(j-i) and bool(((a[i*k:j*k]-b).norm(dim=1)<=tol).all()): return False
    return bool((torch.cdist(b, a, compute_mode='donot_use_mm_for_euclid_dist').min(1)[0]>tol).any())

def reached(
    loss # With its graph
)->set:  # Ids; None if a part of the graph is made in the backward pass only
    "The parameters that the graph of a loss reaches"
    todo,seen,found = [loss.grad_fn],set(),set()
    while todo:
        node = todo.pop()
        if node is None or node in seen: continue
        if 'Checkpoint' in node.name(): return None
        seen.add(node)
        if hasattr(node, 'variable'): found.add(id(node.variable))
        todo += [o for o,_ in node.next_functions]
    return found

# ---
class Samples(NamedTuple):
    "What a rank gives to the check"
    items:list|None # Two samples, as the data set has them; None: they cannot be read one by one
    rows:tuple|None # The first two samples of its batch, as callbacks have made them; None: the batch cannot be cut
    changed:bool # Whether a callback has changed its batch
    n:int # Number of samples in its batch; 0: it has cancelled the batch

def parts_of(
    learn,
    every:list # `Samples` of all ranks
)->list:       # (inputs, targets, number): of all samples, then of each part. ValueError if there are none
    "The batches that the check compares: as the loader makes them, or cut from those of the ranks"
    cap = max(8, max(o.n for o in every))//2 # together no larger than a batch
    n = next((k for k in range(min(len(every), cap), 1, -1) if len(every)%k==0), len(every))
    if not any(o.changed for o in every) and all(o.items for o in every):
        try:
            items = sorted([p for o in every[:n] for p in o.items], key=_kind) # other classes show their weights
            return [(*collated(learn, o), len(o)) for o in (items,*[items[i:i+2] for i in range(0, len(items), 2)])]
        except Exception as e: log.debug('samples cannot be collated: %r', e)
    rows = [to_device(o.rows, learn.device) for o in every if o.rows is not None][:n]
    if any(o.n and o.rows is None for o in every) or len(rows)<2: raise ValueError('batches cannot be cut')
    return [(*o, len(tree_leaves(o)[0])) for o in (joined(rows),*rows)]

def _kind(item):
    if not isinstance(item, (list,tuple)) or not item: return []
    return [str(getattr(o, 'shape', '')) for o in item]+[str(item[-1])]

class Result(NamedTuple):
    "What a rank has found"
    whole:tuple # `numbers` of all samples
    part:tuple # Of its own
    n_parts:int # Ranks from this one on have computed a part again
    tol:float # Relative difference that is rounding
    mixes:bool
    draws:bool # Whether the loss draws random numbers
    unused:list # Names of parameters

# ---
class SelfCheck:
    "Checks model and loss in the first training batch of a fit, and of an epoch with another loss function"
    def __init__(self, trainer): self.trainer,self.loaded,self.checked = trainer,None,[]
    def begin_fit(self): self.checked = []
    def _is_due(self): # the same on every rank
        learn,on = self.trainer.learn,self.trainer.findings.mode and group_size()>1
        if not on or not learn.training or vars(learn).get('wrapper') is None or not learn.yb: return False
        if not self.checked: return True
        is_new = all(o is not learn.loss_func for o in self.checked)
        return not learn.iter and is_new and loss_over(learn).kind=='unknown'

    def note(self):
        "Before callbacks change a batch"
        self.loaded = _versions(self.trainer.learn) if self._is_due() else None

    def __call__(self,
        cancelled=False # Whether this rank has cancelled the batch
    ):
        "Check, if it is time, before the forward pass. Sync point then"
        if not self._is_due(): return
        learn,sharded = self.trainer.learn,self.trainer.shards is not None
        every = gather_objects(Samples(None, None, False, 1) if sharded else self._samples(cancelled))
        if not any(o.n for o in every): return # all have cancelled: the next batch
        self.checked.append(learn.loss_func)
        if sharded or not any(o.changed or o.items or o.rows for o in every):
            return log.debug('nothing can be compared') # `LossWeights` warns if the loss shows no count
        self._judge(gather_objects(self._result(every)), loss_over(learn))

    def _samples(self, cancelled):
        learn = self.trainer.learn
        changed,rows,n = not cancelled and self.loaded!=_versions(learn),None,0 if cancelled else batch_rows(learn)
        try: rows = to_cpu(cut((tuple(learn.xb),tuple(learn.yb)), n, 0, min(n, 2))) if n else None
        except ValueError as e: log.debug('the batch cannot be cut: %s', e)
        return Samples(read_items(learn), rows, changed, n)

    def _result(self, every):
        "None if it cannot be computed"
        for training in (False,True):
            try: return self._compare(*parts_of(self.trainer.learn, every), training=training)
            except Exception as e: log.debug('the self-check could not be computed: %r', e)

    def _compare(self, every, *parts, training):
        learn,r,n = self.trainer.learn,group_rank()%len(parts),every[-1]
        whole,i = computed(learn, *every, training=training),sum(o[-1] for o in parts[:r])
        j = i+parts[r][-1]
        pred = cut(whole.pred, n, i, j) if whole.draws and whole.loss is not None else None
        own = computed(learn, *parts[r], training=training, pred=pred)
        pairs = [] if whole.draws or own.draws else zip(tree_leaves(whole.pred), tree_leaves(own.pred))
        mixes,unused = any(far(a, b, n, i, j) for a,b in pairs),self._unused(whole.loss, every)
        return Result(whole.numbers, own.numbers, len(parts), tolerance(whole.loss), mixes, whole.loss_draws, unused)

    def _unused(self, loss, b):
        "Names of the trained parameters that the loss does not depend on, in evaluation and in training"
        learn,found = self.trainer.learn,reached(loss) if getattr(loss, 'grad_fn', None) is not None else None
        if not found: return []
        current.of_loss = found
        named = {k: id(p) for k,p in get_model(learn.model).named_parameters() if p.requires_grad and p.numel()}
        if not self.trainer.replica.may_find_unused or not {*named.values()}-found: return []
        again = reached(computed(learn, *b, training=True).loss)
        return [] if again is None else [k for k,o in named.items() if o not in found|again]

    def _judge(self, found, over):
        learn,findings,kind,one = self.trainer.learn,self.trainer.findings,None,found[0]
        done = None not in found
        if done and not any(o.draws for o in found) and one.whole[0] is not None:
            kind = follows(one.whole, [o.part for o in found[:one.n_parts]], max(o.tol for o in found))
        known = kind if kind in ('sum','items') else 'samples'
        if over.kind=='unknown': learn._loss_over = learn.loss_func,MeanOver(known)
        if done and one.unused: self.trainer.replica.find_unused(one.unused, findings)
        name = getattr(learn.loss_func, '__name__', type(learn.loss_func).__name__)
        if done and any(o.mixes for o in found):
            findings('mixes-samples', f'predictions of {type(get_model(learn.model)).__name__} depend on which other '
                                      'samples are in '
                     f'the batch, or on its padding. On {group_size()} ranks these are the samples of a rank: it is '
                     'not the run of '
                     'one process')
        elif kind=='other' and (over.kind=='unknown' or hasattr(learn.loss_func, 'n_items')):
            findings('loss-not-mean', f'the loss {name} of a batch does not follow from its values on parts of it: it '
                                      'is no mean over '
                     f"samples{' or over what n_items counts' if over.count else ''}, and no sum. {remedy}")
        elif kind is None and over.kind=='unknown':
            findings('loss-unknown', f'what the loss {name} is the mean over is not known, as it could not be '
                                     'compared on a batch and '
                     f'on parts of it. {remedy}')

remedy = ('Samples count alike. If it is a mean over other things, say what it counts: give it an attribute n_items, a '
          'function of (pred, *targs), or let it return (sum, count). If it needs the whole global batch, as contrastive '
          "losses do, let it work on gather_with_grad(pred), and set n_items = 'whole'")

def _versions(learn):
    ts = [o for o in tree_leaves((tuple(learn.xb),tuple(learn.yb))) if isinstance(o, Tensor)]
    return [(id(o),None if o.is_inference() else version(o)) for o in ts]
