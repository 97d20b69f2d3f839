"""Validation and predictions of a classifier and of a model with large outputs: exact ones of this package, and gathers of every batch

    python benchmarks/evaluation.py"""
from contextlib import ExitStack

import torch
from common import all_close,bars,main,on_ranks,quartiles,ratio_text,ratios,slowest,table,turns,verdict
from learnerdist.all import DataLoaders, Learner, ProgressCallback, all_sum, default_device, group_rank, group_size, process_group
from learnerdist.core.collectives import gather_rows
from learnerdist.data.loaders import to_device
from learnerdist.data.dealing import undeal
from step_time import installed,plain_loader,quiet,theirs
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader,Subset,TensorDataset

def mlp(): return nn.Sequential(nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
def pixels(): return nn.Conv2d(3, 21, 1)

# Name: model, shape of a sample, of a target, classes, batch size, rounds
models = dict(classifier=(mlp, (1,16,16), (), 10, 64, 8), segmentation=(pixels, (3,64,64), (64,64), 21, 2, 4))

def right(pred, y): return (pred.argmax(1)==y).double().mean()

class Task:
    "What all ways evaluate"
    def __init__(self, func, shape, targ, n_classes, bs, n_batches):
        g,n = torch.Generator().manual_seed(1),bs*group_size()*n_batches
        torch.manual_seed(0)
        self.bs,self.device,self.model = bs,default_device(),func().to(default_device())
        self.data = TensorDataset(torch.randn(n, *shape, generator=g), torch.randint(n_classes, (n, *targ), generator=g))
    def loader(self): return DataLoader(self.data, self.bs)
    def own_data(self): return Subset(self.data, range(group_rank(), len(self.data), group_size()))
    def share(self): return plain_loader(self.data, self.bs)

def batches(task, dl, model=None):
    model = task.model if model is None else model
    model.eval()
    with torch.no_grad():
        for b in dl:
            x,y = to_device(b, task.device)
            yield model(x),y

def means(batches):
    "Sums of loss and right answers, and the samples"
    loss,good,n = 0.,0.,0
    for pred,y in batches:
        loss += cross_entropy(pred, y).double()*len(y)
        good += right(pred, y)*len(y)
        n += len(y)
    return torch.stack([torch.as_tensor(o, dtype=torch.double).cpu() for o in (loss,good,n)])

def joined(batches):
    "All predictions and targets, as `get_preds` returns them"
    return [torch.cat([o.cpu() for o in os]) for os in zip(*batches)]

def of_all(sums): return (sums[:2]/sums[2]).tolist()

# --- the ways: each returns a function for validation, and one for predictions; what they return is compared ----------------

def bare(task, stack):
    dl = task.share()
    return lambda: means(batches(task, dl)),lambda: joined(batches(task, dl))

def our_learner(task, dl):
    dls = DataLoaders(dl, dl, device=task.device)
    return Learner(dls, task.model, cross_entropy, metrics=right).remove_cb(ProgressCallback)

def ours(task, stack):
    learn = our_learner(task, task.loader())
    stack.enter_context(learn.distrib_ctx())
    return learn.validate,learn.get_preds

def ours_bare(task, stack):
    "Our own loop over this rank's samples: what our Learner takes when nothing is exchanged"
    learn = our_learner(task, DataLoader(task.own_data(), task.bs))
    return learn.validate,learn.get_preds

def fastai_learner(task):
    from fastai.callback.progress import ProgressCallback as FastaiProgress
    from fastai.data.core import DataLoaders as FastaiLoaders
    from fastai.data.core import TfmdDL
    from fastai.learner import Learner as FastaiLearner
    from fastai.metrics import AvgMetric
    dl = TfmdDL(task.data, bs=task.bs, num_workers=0, device=task.device)
    task.model.device = task.device
    learn = FastaiLearner(FastaiLoaders(dl, dl, device=task.device), task.model, nn.CrossEntropyLoss(), metrics=AvgMetric(right))
    learn.remove_cb(FastaiProgress)
    return learn

def fastai_ours(task, stack):
    theirs()
    import learnerdist.fastai # noqa: F401
    learn = fastai_learner(task)
    stack.enter_context(learn.distrib_ctx())
    return lambda: [*learn.validate()],lambda: learn.get_preds(act=lambda o: o)

def fastai_bare(task, stack):
    "fastai's own loop over this rank's samples: what its Learner takes when nothing is exchanged"
    from fastai.data.core import TfmdDL
    import learnerdist.fastai # noqa: F401 - else fastai gathers each batch
    learn = fastai_learner(task)
    dl = TfmdDL(task.own_data(), bs=task.bs, num_workers=0, device=task.device)
    return lambda: [*learn.validate(dl=dl)],lambda: learn.get_preds(dl=dl, act=lambda o: o, reorder=False)

def fastai_theirs(task, stack):
    import fastai.torch_core as core
    import learnerdist.fastai.trainer as trainer
    mod,learn = theirs(),fastai_learner(task)
    learn.add_cb(mod.DistributedTrainer(sync_bn=False))
    dl = mod.DistributedDL(learn.dls.valid, group_rank(), group_size(), device=task.device)
    def gathering(func):
        old,core.maybe_gather = core.maybe_gather,trainer.fastais_gather
        try: return func()
        finally: core.maybe_gather = old
    return lambda: gathering(lambda: [*learn.validate(dl=dl)]),lambda: gathering(lambda: learn.get_preds(dl=dl, reorder=False))

def accelerated(task, stack):
    from accelerate import Accelerator
    acc = Accelerator(cpu=not torch.cuda.is_available())
    dl = acc.prepare(task.loader())
    def gathered():
        for o in batches(task, dl): yield acc.gather_for_metrics(o)
    return lambda: of_all(means(gathered())),lambda: joined(gathered())

fastais = "learnerdist, fastai's Learner"
same_learner = {'learnerdist': 'our Learner alone', fastais: "fastai's Learner alone"}
# Nothing is exchanged
bases = {'bare loop': bare, 'our Learner alone': ours_bare, "fastai's Learner alone": fastai_bare}
ways = {**bases, 'learnerdist': ours, fastais: fastai_ours, 'fastai.distributed': fastai_theirs, 'Accelerate': accelerated}

# --- the measure ------------------------------------------------------------------------------------------------------------

def into(res, name, func):
    def way(): res[name] = func()
    return way

def check_all(name, numbers, preds, task):
    "Losses, metrics and, of ways that promise their order, predictions are those of one process"
    want = of_all(means(batches(task, task.loader())))
    numbers['bare loop'] = of_all(all_sum(numbers['bare loop']))
    for k in {*same_learner.values()}&{*numbers}: # their shares have as many samples
        mine = torch.tensor([float(o) for o in numbers[k]], dtype=torch.double)
        numbers[k] = (all_sum(mine)/group_size()).tolist()
    diffs = {k: max(abs(float(a)-b) for a,b in zip(v, want)) for k,v in numbers.items()}
    all_close(f'{name}: loss and metric', diffs, 2e-5)
    whole,_ = joined(batches(task, task.loader()))
    preds = {k: v[0] for k,v in preds.items()}
    for k in {*bases}&{*preds}: preds[k] = undeal(gather_rows(preds[k]))
    all_close(f'{name}: predictions', {k: (v-whole).abs().max().item() for k,v in preds.items() if k!='fastai.distributed'}, 1e-5)
    return diffs

def measure_model(names, name, spec, n_batches, n_rounds):
    task,numbers,preds = Task(*spec, n_batches),{},{}
    with ExitStack() as stack:
        made = {k: ways[k](task, stack) for k in names}
        valid = turns({k: into(numbers, k, v) for k,(v,_) in made.items()}, n_rounds)
        pred = turns({k: into(preds, k, p) for k,(_,p) in made.items()}, n_rounds)
    return dict(valid=valid, preds=pred, diffs=check_all(name, numbers, preds, task))

def measure_rank(names, n_batches, n_rounds):
    quiet()
    with process_group(): return {k: measure_model(names, k, v[:-1], n_batches, n_rounds or v[-1]) for k,v in models.items()}

def measure(quick, W=2):
    n_batches,names = 50 if quick else 500,[o for o in installed() if o in ways]
    own = ['bare loop',*[v for k,v in same_learner.items() if k in names]]
    got = on_ranks(measure_rank, W, [*own, *names], n_batches, 2 if quick else None)
    return dict(ranks=W, n_batches=n_batches, models={k: dict(diffs=got[0][k]['diffs'], valid=slowest([o[k]['valid'] for o in got]),
                                                              preds=slowest([o[k]['preds'] for o in got])) for k in models})

def over_own(times):
    "The ratios of our ways to the same Learner that exchanges nothing"
    return {k: ratios(times, v)[k] for k,v in same_learner.items() if k in times}

goal = 1.6 # of predictions

def report(res):
    rows = []
    for name,o in res['models'].items():
        for what in ('valid','preds'):
            rs,own = ratios(o[what], 'bare loop'),over_own(o[what])
            for i,(k,v) in enumerate(o[what].items()):
                title = f"{name}, {dict(valid='validation', preds='predictions')[what]}" if not i else ''
                rows.append([title, k, f"{1000*quartiles(v)[1]/res['n_batches']:.3f}", ratio_text(rs[k]) if k in rs else '1',
                             ratio_text(own[k]) if k in own else ''])
    head = f"{res['n_batches']} batches, {res['ranks']} ranks"
    text = table([head, 'way', 'ms a batch', 'over the bare loop: median (quartiles)', 'over the same Learner alone'], rows)
    lines = []
    for name,o in res['models'].items():
        for what in ('valid','preds'):
            meds = {k: v[1] for k,v in ratios(o[what], 'bare loop').items()}
            peers = {k: v for k,v in meds.items() if 'learnerdist' not in k and k not in bases}
            if not peers: continue
            best = min(peers, key=peers.get)
            lines.append(f"- {name}, {what}: the best peer is {best}, at {peers[best]:.2f}; learnerdist is at {meds['learnerdist']:.2f}: "
                         f"{'ahead' if meds['learnerdist']<peers[best] else '**behind**'}.")
    for name,o in res['models'].items():
        over = {f'{k} over the same Learner alone': v for k,v in over_own(o['preds']).items()}
        over['learnerdist over the bare loop'] = ratios(o['preds'], 'bare loop')['learnerdist']
        lines += [verdict(f'{name}, predictions, {k}', v[1], goal, '{:.2f}') for k,v in over.items()]
    return text+'\n\n'+'\n'.join(lines)

def plot(res, path):
    groups = {f'{k}, {w}': ratios(o[w], 'bare loop') for k,o in res['models'].items() for w in ('valid','preds')}
    bars(path, groups, 'time over the bare loop', f"Validation and predictions, {res['ranks']} ranks", line=1, log=True)

if __name__=='__main__': main('evaluation', measure, report, plot)
