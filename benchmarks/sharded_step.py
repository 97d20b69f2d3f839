"""A step of a sharded model: bare FSDP2, ours, Accelerate's and Fabric's, and DDP, on the same model, samples and ranks, in turns

    python benchmarks/sharded_step.py"""
from functools import partial

from common import all_close,bars,main,on_ranks,quartiles,ratio_text,ratios,slowest,table,verdict
from learnerdist.core.env import group_rank,group_size,process_group
from learnerdist.distributed import DistributedDL
from learnerdist.distributed.sharded import repeated_blocks
from learnerdist.distributed.sharded import make_mesh
from options import plain
from sharded import Block
from step_time import bare,installed,loop,lr,measure_model,quiet,sgd
from torch import nn
from torch.utils.data import DataLoader

def chain(width, depth): return nn.Sequential(*[Block(width) for _ in range(depth)], nn.Linear(width, 10))

# Name: model, shape of a sample, samples a step on each rank, steps of a round, rounds
models = {'blocks of 2 MiB': (partial(chain, 512, 6), (512,), 64, 12, 25), 'blocks of 8 MiB': (partial(chain, 1024, 8), (1024,), 64, 8, 12)}
quick_models = {'blocks of 16 KiB': (partial(chain, 64, 2), (64,), 8, 6, 2)}
base = 'bare FSDP2'

def spread(model, mesh):
    from torch.distributed.fsdp import fully_shard
    for m in [*repeated_blocks(model),model]: fully_shard(m, mesh=mesh)
    return model

def by_hand(task, stack):
    model = spread(task.model(), make_mesh(task.device, 1))
    dl = DistributedDL.from_dl(DataLoader(task.data(), task.bs), group_rank(), group_size())
    return model,partial(loop, task, model, sgd(model.parameters(), lr), dl)

def accelerated(task, stack):
    "On the CPU Accelerate leaves out the sharding without a word; its state is told to shard"
    import torch
    from accelerate import Accelerator,DistributedType,FullyShardedDataParallelPlugin
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy='transformer_based_wrap', cpu_ram_efficient_loading=False,
                                            transformer_cls_names_to_wrap=['Block'])
    acc = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    acc.state.distributed_type,acc.state.fsdp_plugin = DistributedType.FSDP,plugin
    model = task.model()
    model,opt,dl = acc.prepare(model, sgd(model.parameters(), lr=lr), DataLoader(task.data(task.in_batches()), task.bs))
    return model,partial(loop, task, model, opt, dl, acc.backward)

def fabric(task, stack):
    import torch
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import ModelParallelStrategy
    strategy = ModelParallelStrategy(lambda m, mesh: spread(m, mesh['data_parallel']), group_size(), 1)
    kw = dict(devices=group_size(), strategy=strategy, plugins=[LightningEnvironment()])
    fab = Fabric(accelerator='cuda' if torch.cuda.is_available() else 'cpu', **kw)
    fab.launch()
    model = fab.setup_module(task.model())
    opt = fab.setup_optimizers(sgd(model.parameters(), lr=lr))
    return model,partial(loop, task, model, opt, fab.setup_dataloaders(DataLoader(task.data(), task.bs)), fab.backward)

ways = {base: by_hand, 'learnerdist': partial(plain, shard=True), 'Accelerate': accelerated, 'Fabric': fabric, 'bare DDP': bare}

def measure_rank(names, sizes):
    quiet()
    with process_group(): return {k: measure_model({n: ways[n] for n in names}, *v) for k,v in sizes.items()}

def measure(quick):
    there = installed()
    names,sizes,res = [k for k in ways if k in there or k==base],quick_models if quick else models,{}
    for W in (2,4):
        got = on_ranks(measure_rank, W, names, sizes)
        for k in sizes:
            diffs = {n: max(o[k]['weights'][n] for o in got) for n in names}
            all_close(f'{k}, {W} ranks', diffs, 1e-4)
            res[f'{k}, {W} ranks'] = dict(weights=diffs, times=slowest([o[k]['times'] for o in got]))
    return dict(cases=res)

def report(res):
    rows,lines = [],[]
    for case,o in res['cases'].items():
        rs = ratios(o['times'], base)
        rows += [[case if not i else '', k, f'{1000*quartiles(v)[1]:.1f}', ratio_text(rs[k]) if k in rs else '1', f"{o['weights'][k]:.0e}"]
                 for i,(k,v) in enumerate(o['times'].items())]
        lines.append(verdict(f'{case}, learnerdist over bare FSDP2', rs['learnerdist'][1], 1.05))
    head = ['model', 'way', 'ms a step', 'ratio to bare FSDP2: median of rounds (quartiles)', 'weights differ by']
    return '\n\n'.join([table(head, rows), '\n'.join(lines)])

def plot(res, path):
    bars(path, {k: ratios(o['times'], base) for k,o in res['cases'].items()}, 'time over bare FSDP2', 'A step of a sharded model', line=1)

if __name__=='__main__': main('sharded_step', measure, report, plot)
