"""A training step of every way, on the same model, samples, ranks and processes, in turns

    python benchmarks/step_time.py
    python benchmarks/step_time.py --cases 'large, 2'   # one of the cases; the figures of the others are kept"""
import importlib,os
from contextlib import ExitStack
from functools import partial

import torch
from common import all_close,bars,main,now,on_ranks,peer,quartiles,ratio_text,ratios,slowest,table,turns,verdict
from learnerdist.core.collectives import all_sum
from learnerdist.core.compat import sync_buffers
from learnerdist.all import DataLoaders,Learner,ProgressCallback # all: with every callback that users have
from learnerdist.data.loaders import to_device
from learnerdist.core.env import default_device,group_rank,group_size,in_group,process_group
from learnerdist.core.shards import full_tensor
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader,DistributedSampler,TensorDataset

def mlp(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

def resnet():
    from torchvision.models import resnet18
    return resnet18(num_classes=10)

# Name: model, shape of a sample, samples a step on each rank, steps of a round, rounds
models = dict(small=(mlp, (1,28,28), 64, 50, 60), large=(resnet, (3,64,64), 16, 8, 20))
quick_models = dict(small=(mlp, (1,28,28), 64, 12, 3), large=(resnet, (3,64,64), 2, 4, 2))
skip = 2 # Steps of a round that do not count: after the first one DDP makes its buckets anew
lr,momentum = .01,.9

def sgd(params, lr): return torch.optim.SGD(params, lr=lr, momentum=momentum)

class Clock:
    "Told when each step of a round begins; the seconds of a step, over those that count"
    def __init__(self, n): self.n = n
    def start(self): self.i,self.marks = 0,[]
    def tick(self):
        if self.i in (skip,self.n-1): self.marks.append(now())
        self.i += 1
    def ticking(self, func):
        def call(*args):
            self.tick()
            return func(*args)
        return call
    @property
    def step(self): return (self.marks[1]-self.marks[0])/(self.n-1-skip)

class Task:
    "What all ways train: a model, samples, batch size. `order` says where a way that deals otherwise finds each sample"
    def __init__(self, func, shape, bs, n_steps):
        g,n = torch.Generator().manual_seed(1),bs*group_size()*n_steps
        self.func,self.bs,self.clock,self.n_steps = func,bs,Clock(n_steps),n_steps
        self.x,self.y = torch.randn(n, *shape, generator=g),torch.randint(10, (n,), generator=g)
        self.device = default_device()
    def data(self, order=None): return TensorDataset(*((self.x,self.y) if order is None else (self.x[order],self.y[order])))
    def model(self):
        torch.manual_seed(0)
        return self.func().to(self.device)
    def in_blocks(self):
        "For loaders that give each rank a block of the data"
        return torch.arange(len(self.x)).view(-1, group_size()).T.flatten()
    def in_batches(self):
        "For loaders that give the ranks batches by turns"
        return torch.arange(len(self.x)).view(self.n_steps, self.bs, group_size()).transpose(1, 2).flatten()

# --- the ways: each returns the model, and a function that trains it for a round and returns the last loss ------------------

def loop(task, model, opt, dl, backward=lambda loss: loss.backward()):
    "The loop as one writes it by hand"
    model.train()
    for b in dl:
        task.clock.tick()
        x,y = to_device(b, task.device)
        loss = cross_entropy(model(x), y)
        backward(loss)
        opt.step()
        opt.zero_grad()
    return loss.detach()

def bare(task, stack):
    model = task.model()
    ids = [task.device.index] if task.device.type=='cuda' else None
    ddp = DistributedDataParallel(model, device_ids=ids, **{sync_buffers: False}) if in_group() else model
    return model,partial(loop, task, ddp, sgd(model.parameters(), lr), plain_loader(task.data(), task.bs))

def plain_loader(data, bs):
    "torch's, as one writes it by hand: the samples are dealt out as ours are"
    return DataLoader(data, bs, sampler=DistributedSampler(data, group_size(), group_rank(), shuffle=False) if in_group() else None)

def ours(task, stack):
    dls = DataLoaders(DataLoader(task.data(), task.bs), device=task.device)
    learn = Learner(dls, task.model(), cross_entropy, opt_func=sgd, lr=lr).remove_cb(ProgressCallback)
    learn.one_batch = task.clock.ticking(learn.one_batch)
    stack.enter_context(learn.distrib_ctx(sync_bn=False, seed=0))
    stack.enter_context(learn.no_logging())
    def train():
        learn.fit(1)
        return learn.loss
    return learn.model,train

def fastai_learner(task, order=None, **flags):
    from fastai.callback.core import Callback
    from fastai.callback.progress import ProgressCallback as FastaiProgress
    from fastai.data.core import DataLoaders as FastaiLoaders
    from fastai.data.core import TfmdDL
    from fastai.learner import CancelValidException
    from fastai.learner import Learner as FastaiLearner
    from fastai.optimizer import OptimWrapper
    class NoValidation(Callback):
        def after_train(self): self.learn.last_loss = self.learn.loss.detach()
        def before_validate(self): raise CancelValidException
    model,dl = task.model(),TfmdDL(task.data(order), bs=task.bs, num_workers=0, device=task.device)
    model.device = task.device
    opt = partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=momentum))
    learn = FastaiLearner(FastaiLoaders(dl, dl, device=task.device), model, nn.CrossEntropyLoss(), opt_func=opt, lr=lr, cbs=NoValidation)
    learn.remove_cb(FastaiProgress)
    learn.logger,learn.one_batch = lambda line: None,task.clock.ticking(learn.one_batch)
    def train():
        learn.fit(1, **flags)
        return learn.last_loss
    return learn,train

def fastai_ours(task, stack, **flags):
    theirs() # before ours: the last one imported is the one that patches the Learner
    import learnerdist.fastai # noqa: F401
    learn,train = fastai_learner(task, **flags)
    stack.enter_context(learn.distrib_ctx(sync_bn=False, seed=0))
    return learn.model,train

def fastai_theirs(task, stack):
    learn,train = fastai_learner(task, task.in_blocks())
    if group_size()>1: learn.add_cb(theirs().DistributedTrainer(sync_bn=False, kwargs_handlers=[plain_buffers()]))
    return learn.model,train

def theirs():
    "fastai's own, which sends the order by `.cuda()`: replaced, so that it runs on the CPU"
    os.environ['ACCELERATE_USE_CPU'] = str(not torch.cuda.is_available()).lower()
    mod = importlib.import_module('fastai.distributed')
    def broadcast(self, t, rank):
        t = torch.LongTensor(t)
        torch.distributed.broadcast(t, rank)
        return t.tolist()
    if not torch.cuda.is_available(): mod.DistributedDL._broadcast = broadcast
    return mod

def plain_buffers():
    from accelerate import DistributedDataParallelKwargs
    return DistributedDataParallelKwargs(broadcast_buffers=False)

def accelerated(task, stack, opt_func=sgd, **kw):
    from accelerate import Accelerator
    acc = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[plain_buffers()], **kw)
    model = task.model()
    ddp,opt,dl = acc.prepare(model, opt_func(model.parameters(), lr=lr), DataLoader(task.data(task.in_batches()), task.bs))
    return model,partial(loop, task, ddp, opt, dl, acc.backward)

def fabric(task, stack, opt_func=sgd, **kw):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import DDPStrategy
    gpu,model = torch.cuda.is_available(),task.model()
    strategy = DDPStrategy(broadcast_buffers=False) if group_size()>1 else 'auto'
    plugins = [LightningEnvironment()] if group_size()>1 else None
    fab = Fabric(accelerator='cuda' if gpu else 'cpu', devices=group_size(), strategy=strategy, plugins=plugins, **kw)
    fab.launch()
    ddp,opt = fab.setup(model, opt_func(model.parameters(), lr=lr))
    return model,partial(loop, task, ddp, opt, fab.setup_dataloaders(DataLoader(task.data(), task.bs)), fab.backward)

ways = {'bare DDP': (bare, []), 'learnerdist': (ours, []), "learnerdist, fastai's Learner": (fastai_ours, ['fastai']),
        'fastai.distributed': (fastai_theirs, ['fastai','accelerate']), 'Accelerate': (accelerated, ['accelerate']),
        'Fabric': (fabric, ['lightning_fabric'])}

# --- the measure ------------------------------------------------------------------------------------------------------------

def installed(): return [k for k,(_,needs) in ways.items() if all([peer(o) is not None for o in needs])]

def as_way(task, train, losses, name):
    def way():
        task.clock.start()
        losses[name] = train()
        return task.clock.step
    return way

def measure_model(ways, func, shape, bs, n_steps, n_rounds):
    "Seconds of a step in each round of each way, and how far its weights and last loss are from the bare loop's"
    task,losses = Task(func, shape, bs, n_steps),{}
    with ExitStack() as stack:
        made = {k: way(task, stack) for k,way in ways.items()}
        times = turns({k: as_way(task, train, losses, k) for k,(_,train) in made.items()}, n_rounds)
        params = {k: [full_tensor(p).detach().clone() for p in model.parameters()] for k,(model,_) in made.items()}
    base,mean = next(iter(params.values())),lambda o: all_sum(o.double())/group_size()
    diffs = {k: max((a-b).abs().max().item() for a,b in zip(v, base)) for k,v in params.items()}
    loss_diffs = {k: abs(mean(v)-mean(losses[next(iter(ways))])).item() for k,v in losses.items()}
    return dict(times=times, weights=diffs, losses=loss_diffs)

def quiet():
    import logging,warnings
    warnings.filterwarnings('ignore')
    for o in ('lightning_fabric','lightning.fabric'): logging.getLogger(o).setLevel(logging.ERROR)

def measure_rank(names, sizes):
    quiet()
    with process_group(): return {k: measure_model({n: ways[n][0] for n in names}, *v) for k,v in sizes.items()}

def measure(quick, ranks=(1, 2), only=None, cases=('',)):
    names,res = only or installed(),{}
    for W in ranks:
        named = {k: f'{k}, {W} rank{"s"*(W>1)}' for k in models}
        sizes = {k: v for k,v in (quick_models if quick else models).items() if named[k].startswith(tuple(cases))}
        got = on_ranks(measure_rank, W, names, sizes) if sizes else []
        for k in sizes:
            case,diffs = named[k],{d: {n: max(o[k][d][n] for o in got) for n in names} for d in ('weights','losses')}
            for d,v in diffs.items(): all_close(f'{case}: {d}', v, 1e-4)
            res[case] = dict(diffs, times=slowest([o[k]['times'] for o in got]))
    return dict(cases=res)

def rows_of(case, res):
    times,base = res['times'],'bare DDP'
    rs = ratios(times, base)
    return [[case if i==0 else '', k, f'{1000*quartiles(v)[1]:.2f}', ratio_text(rs[k]) if k in rs else '1', f"{res['weights'][k]:.0e}"]
            for i,(k,v) in enumerate(times.items())]

def report(res):
    rows = [o for case,r in res['cases'].items() for o in rows_of(case, r)]
    text = table(['model', 'way', 'ms a step', 'ratio to bare DDP: median of rounds (quartiles)', 'weights differ by'], rows)
    large = {k: ratios(o['times'], 'bare DDP')['learnerdist'][1] for k,o in res['cases'].items() if k.startswith('large')}
    lines = [verdict(f'{k}, learnerdist over bare DDP', v, 1.02) for k,v in large.items()]
    for k,o in res['cases'].items():
        meds = {n: v[1] for n,v in ratios(o['times'], 'bare DDP').items()}
        best = min((n for n in meds if 'learnerdist' not in n), key=meds.get, default=None)
        if best: lines.append(f"- {k}: the best peer is {best}, at {meds[best]:.3f}; learnerdist is at {meds['learnerdist']:.3f}: "
                              f"{'ahead' if meds['learnerdist']<meds[best] else '**behind**'}.")
    return text+'\n\n'+'\n'.join(lines)

def plot(res, path):
    bars(path, {k: ratios(o['times'], 'bare DDP') for k,o in res['cases'].items()}, 'time over bare DDP', 'A training step', line=1)

if __name__=='__main__': main('step_time', measure, report, plot)
