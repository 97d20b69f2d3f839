"""Trainings for the simulated GPU: `of_table` from the table of scenes, and `stories`, which do more than train

`table_on` runs them on one rank or several, and returns plain data: what they computed, and what happened on the GPU.
test_simulated_gpu.py compares it with the CPU; tools/gpu_table.py writes the table of docs/gpu.md."""
import shutil
from contextlib import ExitStack
from functools import partial
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset
from harness import caught
from scenes import F32, OwnLoss, as_graph, as_lists, boxes, by_batches, classes, contrast, conv, detector, graphs
from scenes import half_precision, instance_normed, make, net, normed, of_boxes, part_used
from scenes import on_cpu, picture, run, scene, squares, texts_in_dicts, weighted_ce
from simulated_gpu import Gpu, SimulatedGPU
from learnerdist.all import *

# --- scenes of the table ----------------------------------------------------------------------------------------------

N = 96 # 8 steps of 12 samples an epoch

class Marks(Callback):
    "Marks steps of the second epoch: in these nothing happens that is done once in an epoch or a fit"
    order,run_valid = 1000,False
    first,last = 1,6
    def after_batch(self):
        if Gpu.sim and self.epoch==1: Gpu.sim.phase = 'step' if self.first<=self.iter<self.last else ''
    def after_train(self):
        if Gpu.sim: Gpu.sim.phase = ''
n_marked = Marks.last-Marks.first

def small_memory():
    "Memory runs out at more than 3 samples"
    model = net()
    model.register_forward_pre_hook(_runs_out)
    return model
def _runs_out(model, xb):
    if model.training and len(xb[0])>3: raise torch.OutOfMemoryError('on purpose')
def ema(): return [EMA(.9, evaluate=True)]
def macro(p, t): return F.one_hot(p.argmax(1), 2).mul(F.one_hot(t, 2)).double().mean(0).sqrt().mean().item()
def bf16(): return [MixedPrecision('bf16')]
def clip(): return [GradientClip(.3)]

def rare(n):
    "One of seven labels counts, so that a rank has at times nothing to count"
    x,y = classes(n).tensors
    return TensorDataset(x, y.where(torch.arange(n)%7==0, -100))

def counts_on_a_device(p, y):
    "On rank 0 the device knows the items, on others the host"
    return F.cross_entropy(p, y, reduction='sum'),len(y) if group_rank() else (y>=0).sum()

def ctx(**kw): return dict(ctx=dict(seed=3, **kw))
mixed = dict(dtype=F32, tol=3e-3, unlike=('opt',))
def hooked(k, tol): return scene(dtype=F32, tol=tol, opt=torch.optim.SGD, **ctx(comm_hook=k))

of_table = {
    'mean squares': scene(), 'cross-entropy': scene(ds=classes, loss=F.cross_entropy, metrics=[accuracy]),
    'convolutions': picture(model=conv), 'BatchNorm': scene(model=normed), 'InstanceNorm': scene(model=instance_normed),
    'unused parameters': picture(model=part_used, **ctx(find_unused_parameters=True)),
    'ignored labels': scene(ds=rare, loss=nn.CrossEntropyLoss()), 'class weights': scene(ds=classes, loss=weighted_ce),
    'items of a device on one rank': scene(ds=classes, loss=counts_on_a_device),
    'a sum': scene(loss=squares, lr=.002), 'a loss of the whole batch': scene(loss=contrast),
    "the model's own loss": scene(ds=texts_in_dicts, model=OwnLoss, loss=None, **ctx(find_unused_parameters=True)),
    'detection': scene(ds=boxes, loader=by_batches, model=detector, dl=dict(collate_fn=as_lists), loss=of_boxes, preds=False),
    'graphs': scene(ds=graphs, dl=dict(collate_fn=as_graph), preds=False),
    'a metric of all rows': scene(ds=classes, loss=F.cross_entropy, metrics=lambda: [AccumMetric(macro)]),
    'pinned memory': scene(dl=dict(pin_memory=True)), 'AdamW': scene(opt=torch.optim.AdamW, lr=.01), 'GradientClip': scene(cbs=clip),
    'GradientAccumulation': scene(bs=24, parts=2, accumulate=24), 'EMA': scene(cbs=ema),
    'gradient_as_bucket_view': scene(**ctx(gradient_as_bucket_view=True)), 'max_bs': scene(**ctx(max_bs=3)),
    'max_bs, ignored labels': scene(ds=rare, loss=nn.CrossEntropyLoss(), **ctx(max_bs=3)), "max_bs='auto'": scene(**ctx(max_bs='auto')),
    "max_bs='auto', memory runs out": scene(model=small_memory, **ctx(max_bs='auto', checks=False)),
    'float16, GradScaler': scene(cbs=half_precision, **mixed), 'bfloat16': scene(cbs=bf16, **mixed),
    'MixedPrecision()': scene(cbs=lambda: [MixedPrecision()], **mixed),
    'comm_hook fp16': hooked('fp16', 1e-3), 'comm_hook bf16': hooked('bf16', 1e-2), 'comm_hook powersgd': hooked('powersgd', .1)}

def _marked(c, cbs): return [*cbs(), Marks()]
of_table = {k: {**c, 'n': N, 'cbs': partial(_marked, c, c['cbs'])} for k,c in of_table.items()}

# --- stories: functions of a folder that the ranks share --------------------------------------------------------------

def on_rank0(f):
    if not group_rank(): f()
    distrib_barrier()

def small(path=None, **kw):
    learn = make(scene(n=N, **kw), group_size(), group_rank())
    if path: learn.path = path
    return learn

def state(learn): return {k: v.detach().cpu().clone() for k,v in learn.model.state_dict().items()}

def resumed(path):
    "A fit, and its second half again, from a checkpoint"
    def first(): # of the checkpoints, in the middle of the first epoch
        source = path/'whole/ckpt'
        keep = sorted(o.name for o in source.iterdir() if o.name.startswith('epoch_'))[0]
        shutil.copytree(source, path/'half/ckpt', ignore=lambda d, names: [o for o in names if o.startswith('epoch_') and o!=keep])
    res = []
    for folder in ('whole','half'):
        if Gpu.sim: Gpu.sim.forget()
        if res: on_rank0(first)
        learn = small(path/folder, metrics=[], opt=torch.optim.AdamW, lr=.01)
        with learn.no_logging(), learn.distrib_ctx(seed=3): learn.fit(2, cbs=[Checkpoint('ckpt', every=3, keep=9), Marks()], resume=True)
        res.append([state(learn),learn.recorder.losses,learn.recorder.values])
    return res

def saved(path):
    learn = small(path)
    with learn.no_logging(), learn.distrib_ctx(seed=3):
        learn.fit(1)
        learn.save('a')
        before = learn.validate()
        learn.fit(2, cbs=Marks())
        learn.load('a')
        assert learn.validate()==before
    return before,state(learn)

def found(path):
    "lr_find"
    learn = small()
    with learn.distrib_ctx(seed=3): res = learn.lr_find(num_it=16, show_plot=False)
    return list(res.losses),res.lrs

def predicted(path):
    "predict"
    learn = small()
    with learn.no_logging(), learn.distrib_ctx(seed=3):
        learn.fit(2, cbs=Marks())
        return [learn.predict(o).cpu() for o,_ in [learn.dls.valid.dataset[i] for i in (2,3)]]

def offloaded(path): return sharded(path, dict(offload=True))

def sharded(path, shard=True):
    "FSDP2: fits, predictions, save and load"
    learn = small(path, opt=torch.optim.AdamW, lr=.01)
    with learn.no_logging(), learn.distrib_ctx(seed=3, shard=shard if group_size()>1 else False):
        learn.fit(2, cbs=Marks())
        learn.save('a')
        val,preds = learn.validate(),learn.get_preds()[0].cpu()
        learn.fit(1)
        learn.load('a')
        again = learn.validate()
    return learn.recorder.losses,val,preds,again,state(learn)

stories = {'Checkpoint, resume': resumed, 'save, load': saved, 'lr_find': found, 'predict': predicted,
           'shard=True': sharded, 'shard=dict(offload=True)': offloaded}

# --- fastai -----------------------------------------------------------------------------------------------------------

def fastais_first_script(path):
    "That of docs/start.md, on pictures that are made here. Its loaders name no device: fastai's is GPU 0 on each rank"
    from fastai.vision.all import ImageDataLoaders, resnet18, vision_learner, accuracy # noqa: F401
    from PIL import Image
    import learnerdist.fastai # noqa: F401
    def pictures():
        g = torch.Generator().manual_seed(0)
        for part,n in dict(train=16, valid=6).items():
            for i in range(n):
                file = path/part/'ab'[i%2]/f'{i}.png'
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((torch.rand(32, 32, 3, generator=g)*(128+64*(i%2))).byte().numpy()).save(file)
    on_rank0(pictures)
    dls = ImageDataLoaders.from_folder(path, bs=8//group_size(), num_workers=0, seed=1)
    torch.manual_seed(0)
    learn = vision_learner(dls, resnet18, pretrained=False, metrics=accuracy)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=3):
        learn.fine_tune(1)
        losses = [float(o) for o in learn.recorder.losses]
        preds,targs = learn.get_preds()
    learn.save('mnist')
    return losses,learn.recorder.values,preds,targs

def fastais(path, **kw):
    "A fit of fastai's, with a metric"
    from fastai.callback.core import Callback as C
    from fastai.metrics import accuracy as acc
    from test_fastai_scenes import fastais as make
    class MarksOfFastai(C):
        order,run_valid = 1000,False
        def after_batch(self):
            if Gpu.sim and self.epoch==1: Gpu.sim.phase = 'step' if Marks.first<=self.iter<Marks.last else ''
    learn = make(scene(n=N, ds=classes, loss=F.cross_entropy, dtype=F32), group_size(), group_rank())
    learn.metrics = acc
    with learn.no_logging(), learn.distrib_ctx(seed=3, **kw):
        learn.fit(2, cbs=MarksOfFastai())
        res = [float(o) for o in learn.recorder.losses],learn.recorder.values,learn.get_preds(),state(learn)
    return res

of_fastai = {"fastai's first script": fastais_first_script, "fastai's fit": fastais}

# --- to run them ------------------------------------------------------------------------------------------------------

def table_on(names, path, n_gpus=2, **kw):
    """What each scene or story gives on this rank, plain, and what happened on its GPU. n_gpus: 0: on the CPU; path: a folder of all
    ranks, for stories"""
    res = {}
    with ExitStack() as stack:
        sim = stack.enter_context(SimulatedGPU(n_gpus, **kw)) if n_gpus else None
        stack.enter_context(process_group())
        for k in names:
            if sim: sim.forget()
            got = caught(run_of, k, path/k.replace(' ', '_').replace("'", ''))
            res[k] = dict(got=tree_map(on_cpu, got))
            if not sim: continue
            marked = [o for o in sim.collectives if o.phase=='step']
            res[k] |= dict(waits=sim.count('step'), collectives=marked, faults=sim.faults[:])
    return res

def run_of(name, path):
    if name in of_table: return run(of_table[name], group_size(), group_rank())
    path.mkdir(parents=True, exist_ok=True)
    return {**stories, **of_fastai}[name](path)
