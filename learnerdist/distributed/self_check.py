"""Once a fit, on its first training batch: does the model mix samples, does the loss follow from those of parts, which parameters are unused?"""
import copy,logging,pickle,random
from collections import OrderedDict
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
from .replica import current
from ..learner.losses import LossTrace,MeanOver,as_mean,batch_rows,copied,counted_rows,cut,follows,loss_of_model,loss_over,tolerance

log = logging.getLogger(__name__)

class Samples(NamedTuple):
    "What a rank gives to the check"
    items:list|None   # Two samples, as the data set has them; None: they cannot be read one by one
    rows:tuple|None   # The first two samples of its batch, as callbacks have made them; None: the batch cannot be cut
    changed:bool      # Whether a callback has changed its batch
    n:int             # Number of samples in its batch; 0: it has cancelled the batch

def read_items(
    learn,
    n:int=2 # Number of samples of each rank
):          # None if the training data cannot be read sample by sample, or not be sent
    "This rank's samples of the training data, drawn from all of it. Random streams are left as they are"
    dl = getattr(learn.dl, 'source', learn.dl)
    ds = getattr(dl, 'dataset', None)
    size = 0 if isinstance(ds, IterableDataset) or not hasattr(ds, '__getitem__') else data_len(ds) or 0
    batched = hasattr(dl, 'do_batch') or getattr(dl, 'batch_sampler', None) is not None
    if not size or not batched: return None
    drawn,at = random.Random(size).sample(range(size), min(size, n*group_size())),n*group_rank()
    own = [drawn[i%len(drawn)] for i in range(at, at+n)]
    try:
        if not hasattr(dl, 'do_item') and hasattr(ds, '__dict__'): ds = copy.copy(ds) # a file that it opens is not for workers to inherit
        with shared_rng(group_rank()): res = [dl.do_item(i) if hasattr(dl, 'do_item') else ds[i] for i in own]
        pickle.dumps(res)
        return res
    except Exception as e: log.debug('samples cannot be read one by one: %r', e)

def collated(
    learn,
    items:list # Samples
):             # (inputs, targets)
    "The batch that the training loader makes of samples. ValueError if it draws random numbers"
    dl,before = getattr(learn.dl, 'source', learn.dl),_streams()
    b = dl.do_batch(items) if hasattr(dl, 'do_batch') else dl.collate_fn(items)
    b,after = to_device(b, learn.device),getattr(dl, 'after_batch', None) or []
    if isinstance(after, list):
        for f in after: b = f(b)
    else: b = after(b)
    if _streams()!=before: raise ValueError('the loader draws random numbers for a batch')
    return split_batch(b, getattr(learn.dl, 'n_inp', getattr(learn.dls, 'n_inp', None)))

def _streams(): return [o.tolist() if isinstance(o, Tensor) else o for o in (random.getstate(),*rng_state()[2:])]

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
    loss:object    # With its graph; None: it was not computed
    items:object   # What the loss is the mean over, if it shows or says that
    n:int          # Number of samples, see `counted_rows`
    drew:bool      # Whether the model draws random numbers in evaluation
    loss_drew:bool

def _quiet(model, training):
    "In evaluation, or in training without dropout; without hooks, and with nothing that depends on the batch or changes a weight"
    for m in model.modules():
        m.training = training and not isinstance(m, (BatchNorm,Dropout))
        vars(m)[compiled_call] = None
        for k,hooks in [*vars(m).items()]:
            if k.endswith('_hooks') and isinstance(hooks, dict) and hooks:
                vars(m)[k] = OrderedDict((i,f) for i,f in hooks.items() if _is_torchs(f)) # weight_norm is such a hook
        if isinstance(m, (nn.Embedding,nn.EmbeddingBag)): m.max_norm = None
        if isinstance(m, BatchNorm) and m.running_mean is None:
            device = next((p.device for p in m.parameters()), None)
            m.running_mean,m.running_var = torch.zeros(m.num_features, device=device),torch.ones(m.num_features, device=device)

def _is_torchs(f): return (getattr(f, '__module__', None) or type(f).__module__).startswith('torch.')

def computed(
    learn,
    xb, yb,        # Inputs and targets
    n:int,         # Number of samples
    training=False, # In evaluation where that is possible: some models compute their loss in training only
    pred=None      # The prediction; None: the model's
)->Outcome:
    "What the model and the loss make of a batch: on copies, without a backward pass or a hook; buffers and random streams stay"
    over,trace = loss_over(learn),LossTrace()
    model = getattr(get_model(learn.model), compiled_inside, get_model(learn.model))
    func = loss_of_model if learn.loss_func is None else learn.loss_func
    with untouched(model), untouched(func), shared_rng(0), torch.autocast(learn.device.type, enabled=False), torch.enable_grad(), trace:
        _quiet(model, training)
        xb,yb,states = copied(tuple(xb)),copied(tuple(yb)),[_streams()]
        if pred is None: pred = call_model(model, xb, model) if isinstance(learn, Learner) else model(*xb)
        states.append(_streams())
        loss = func(pred, *yb) if yb and over.kind!='whole' else None
        states.append(_streams())
        items = trace.items(loss) if isinstance(loss, Tensor) else None
        if type(loss) is tuple: loss,items = as_mean(*loss)
        elif loss is not None and over.count is not None: items = over.count(pred, *yb)
        return Outcome(pred, loss, items, counted_rows(pred, yb, n), states[0]!=states[1], states[1]!=states[2])

# ---
def far(
    whole, part,        # A tensor of the prediction for all samples, and one for some of them
    n:int, i:int, j:int # Number of all samples; which are the part's
)->bool:                # False also where they cannot be compared
    "Whether predictions differ beyond rounding. Rows may come in another order, as when a batch holds anchors, then positives"
    if not (isinstance(part, Tensor) and isinstance(whole, Tensor) and part.ndim and part.is_floating_point()): return False
    if whole.ndim!=part.ndim or not whole.isfinite().all(): return False
    others = [d for d in range(part.ndim) if part.shape[d]!=whole.shape[d]]
    if len(others)!=1 or whole.shape[others[0]]*(j-i)!=part.shape[others[0]]*n: return False
    a,b = [o.detach().movedim(others[0], 0).flatten(1).double() if o.ndim>1 else o.detach().double()[:,None] for o in (whole,part)]
    tol = 10*tolerance(part)*a.norm()/len(a)**.5 # of a row
    k = len(b)//(j-i)
    if len(b)%(j-i)==0 and bool(((a[i*k:j*k]-b).norm(dim=1)<=tol).all()): return False
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

def _kind(item): return [str(getattr(o, 'shape', '')) for o in item]+[str(item[-1])] if isinstance(item, (list,tuple)) and item else []

# ---
class Result(NamedTuple):
    "What a rank has found"
    whole:tuple # (loss, items, number) of all samples
    part:tuple  # The same of its own
    n_parts:int # Ranks from this one on have computed a part again
    tol:float   # Relative difference that is rounding
    mixes:bool
    draws:bool
    unused:list

class SelfCheck:
    "Checks model and loss in the first training batch of a fit, and again at the start of an epoch if the loss function is another"
    def __init__(self, trainer): self.trainer,self.loaded,self.checked = trainer,None,[]
    def begin_fit(self): self.checked = []
    def _is_due(self):
        "The same on every rank"
        learn,on = self.trainer.learn,self.trainer.findings.mode and group_size()>1
        if not on or not learn.training or vars(learn).get('wrapper') is None or not learn.yb: return False
        if not self.checked: return True
        return not learn.iter and loss_over(learn).kind=='unknown' and all(o is not learn.loss_func for o in self.checked)

    def note(self):
        "Before callbacks change a batch"
        self.loaded = _versions(self.trainer.learn) if self._is_due() else None

    def __call__(self, cancelled=False): # cancelled: whether this rank has cancelled the batch before its forward pass
        "Check, if it is time. Sync point then"
        learn = self.trainer.learn
        if not self._is_due(): return
        every = gather_objects(self._samples(cancelled))
        if not any(o.n for o in every): return # all have cancelled: the next batch
        self.checked.append(learn.loss_func)
        if self.trainer.shards is not None: return log.debug('a sharded model is not checked')
        over = loss_over(learn)
        found = gather_objects(self._result(every))
        if None in found and over.kind=='unknown' and not any(o.changed for o in every) and not any(o.items or o.rows for o in every):
            return log.debug('samples cannot be compared') # `LossWeights` warns if the loss shows no count
        self._judge(found, over)

    def _samples(self, cancelled):
        learn = self.trainer.learn
        changed,rows = self.loaded!=_versions(learn),None
        n = 0 if cancelled or self.trainer.shards is not None else batch_rows(learn)
        if n:
            try: rows = to_cpu(cut((tuple(learn.xb),tuple(learn.yb)), n, 0, min(n, 2)))
            except ValueError as e: log.debug('the batch cannot be cut: %s', e)
        own = None if self.trainer.shards is not None else read_items(learn)
        self.loaded = None
        return Samples(own, rows, changed and not cancelled, n)

    def _parts(self, every):
        "(inputs, targets, number of samples) of all samples; and of each part"
        learn,cap = self.trainer.learn,max(8, max(o.n for o in every))//2 # no larger than a batch
        n_parts = next((k for k in range(min(len(every), cap), 1, -1) if len(every)%k==0), len(every))
        if not any(o.changed for o in every) and all(o.items for o in every):
            try:
                items = sorted([p for o in every[:n_parts] for p in o.items], key=_kind) # parts of other classes and lengths show weights and padding
                return [(*collated(learn, o), len(o)) for o in (items,*[items[i:i+2] for i in range(0, len(items), 2)])]
            except Exception as e: log.debug('samples cannot be collated: %r', e)
        rows = [to_device(o.rows, learn.device) for o in every if o.rows is not None][:n_parts]
        if any(o.n and o.rows is None for o in every) or len(rows)<2: raise ValueError('batches cannot be cut')
        return [(*o, len(tree_leaves(o)[0])) for o in (joined(rows),*rows)]

    def _result(self, every):
        "None if it cannot be computed"
        for training in (False,True):
            try: return self._compare(*self._parts(every), training=training)
            except Exception as e: log.debug('the self-check could not be computed: %r', e)

    def _compare(self, every, *parts, training):
        learn,r = self.trainer.learn,group_rank()%len(parts)
        whole,n = computed(learn, *every, training=training),every[-1]
        i = sum(o[-1] for o in parts[:r])
        j = i+parts[r][-1]
        pred = cut(whole.pred, n, i, j) if whole.drew and whole.loss is not None else None
        own = computed(learn, *parts[r], training=training, pred=pred)
        drew = whole.drew or own.drew
        mixes = not drew and any(far(a, b, n, i, j) for a,b in zip(tree_leaves(whole.pred), tree_leaves(own.pred)))
        return Result(_numbers(whole), _numbers(own), len(parts), tolerance(whole.loss), mixes, whole.loss_drew, self._unused(whole.loss, every))

    def _unused(self, loss, b):
        "Names of the trained parameters that the loss does not depend on, in evaluation and in training"
        learn = self.trainer.learn
        if getattr(loss, 'grad_fn', None) is None or (found := reached(loss)) is None: return []
        current.of_loss = found
        if not self.trainer.replica.may_find_unused: return []
        named = {k: id(p) for k,p in get_model(learn.model).named_parameters() if p.requires_grad and p.numel()}
        if not {*named.values()}-found: return []
        again = reached(computed(learn, *b, training=True).loss)
        return [] if again is None or not again|found else [k for k,o in named.items() if o not in found|again]

    def _judge(self, found, over):
        "What all ranks have found, told once"
        learn,findings,name = self.trainer.learn,self.trainer.findings,_name_of(self.trainer.learn)
        done,kind = None not in found,None
        if done and not any(o.draws for o in found) and found[0].whole[0] is not None:
            kind = follows(found[0].whole, [o.part for o in found[:found[0].n_parts]], max(o.tol for o in found))
        if over.kind=='unknown': learn._loss_over = learn.loss_func,MeanOver(kind if kind in ('sum','items') else 'samples')
        if done and found[0].unused: self.trainer.replica.find_unused(found[0].unused, findings)
        if done and any(o.mixes for o in found):
            findings('mixes-samples', f'predictions of {type(get_model(learn.model)).__name__} depend on which other samples are in the batch, '
                     f'or on their padding. On {group_size()} ranks these are the samples of a rank: it is not the run of one process')
        elif kind=='other' and (over.kind=='unknown' or hasattr(learn.loss_func, 'n_items')):
            findings('loss-not-mean', f'the loss {name} of a batch does not follow from its values on parts of it: it is no mean over '
                     f"samples{' or over what n_items counts' if over.count else ''}, and no sum. {_remedy}")
        elif kind is None and over.kind=='unknown':
            findings('loss-unknown', f'what the loss {name} is the mean over is not known: it could not be compared on a batch and on parts '
                     f'of it. {_remedy}')


_remedy = ("Samples count alike. If it is a mean over other things, say what it counts: give it an attribute n_items, a function of "
           "(pred, *targs), or let it return (sum, count). If it needs the whole global batch, as contrastive losses do, let it work on "
           "gather_with_grad(pred), and set n_items = 'whole'")

def _numbers(o):
    loss = None if o.loss is None else float(o.loss.detach().double().mean())
    return loss,None if o.items is None else float(o.items),o.n

def _name_of(learn):
    func = learn.loss_func
    return 'of the model' if func is None else getattr(func, '__name__', type(func).__name__)

def _versions(learn):
    ts = [o for o in tree_leaves((tuple(learn.xb),tuple(learn.yb))) if isinstance(o, Tensor)]
    return [(id(o),None if o.is_inference() else version(o)) for o in ts]
