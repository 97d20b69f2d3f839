"""On a GPU: a step under nccl beside the peers' in float32 and bfloat16, how often it waits for the GPU, its memory; compiled models; two
ranks on one card by gloo, also sharded; votes beside nccl. What fails is told at the end, and ends nothing else

    python benchmarks/gpu.py
    REHEARSE=1 python benchmarks/gpu.py --out /tmp/gpu   # tiny sizes, on a simulated GPU if there is none: does everything run?"""
import os,re,sys,time,warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import sharded_step
import torch
import torch.distributed as dist
from common import all_close,bars,main,now,on_ranks,processor,quartiles,ratio_text,ratios,slowest,table,together,turns,verdict
from growth import vote
from learnerdist.all import MixedPrecision
from learnerdist.core.compat import sync_buffers
from learnerdist.core.env import default_device,in_group,process_group,setup_distrib,teardown_distrib
from learnerdist.core.shards import full_tensor
from learnerdist.distributed.vote_links import GlooLinks,open_links
from options import plain,sgd
from sharded import Block
from step_time import Task,accelerated,as_way,bare,fabric,fastai_ours,installed,loop,lr,mlp,ours,quiet,resnet
from step_time import ways as all_ways
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

rehearsal = bool(os.environ.get('REHEARSE'))
if rehearsal and not torch.cuda.is_available():
    sys.path.append(str(Path(__file__).parent.parent/'tests'))
    from simulated_gpu import SimulatedGPU
    SimulatedGPU().__enter__() # in this process, and in each rank, which imports this
gpu = torch.cuda.is_available()
width,depth = (16,2) if rehearsal else (1024,12)

def blocks(): return nn.Sequential(nn.Flatten(), *[Block(width) for _ in range(depth)], nn.Linear(width, 10))

# Name: model, shape of a sample, samples a step, steps of a round, rounds
models = dict(small=(mlp, (1,28,28), 64, 30, 30), large=(resnet, (3,64,64), 256, 12, 15))
chain = dict(blocks=(blocks, (width,), 512, 30, 20))
if rehearsal: models,chain = dict(small=(mlp, (1,28,28), 8, 8, 2)),dict(blocks=(blocks, (width,), 8, 8, 2))

# --- ways -------------------------------------------------------------------------------------------------------------------

fused = sgd(fused=True)
compiler = dict(disable=True) if rehearsal else {} # a simulated GPU has no compiler
bf16 = dict(dtype=torch.bfloat16, device_type='cuda' if gpu else 'cpu')

def by_hand(task, stack, opt_func=None, cast=False, compiled=False):
    "The loop by hand over DDP, with autocast, or with `torch.compile`"
    model = task.model()
    ids = [task.device.index] if task.device.type=='cuda' else None
    ddp = DistributedDataParallel(model, device_ids=ids, **{sync_buffers: False}) if in_group() else model
    called = torch.compile(ddp, **compiler) if compiled else ddp
    def run(x):
        with torch.autocast(**bf16, enabled=cast): return called(x).float()
    run.train = called.train
    return model,partial(loop, task, run, (opt_func or sgd())(model.parameters(), lr=lr), DataLoader(task.data(), task.bs))

there = installed()
def among(ways):
    "Those of packages that are installed"
    return {k: v for k,v in ways.items() if k in there}

plain_ways = among({k: f for k,(f,_) in all_ways.items()})
half_ways = among({'bare DDP': partial(by_hand, opt_func=fused, cast=True),
                   'learnerdist': lambda t, s: plain(t, s, fused, cbs=MixedPrecision('bf16')),
                   "learnerdist, fastai's Learner": partial(fastai_ours, amp='bf16'),
                   'Accelerate': partial(accelerated, opt_func=fused, mixed_precision='bf16'),
                   'Fabric': partial(fabric, opt_func=fused, precision='bf16-mixed')})
compiled_ways = {'bare DDP': by_hand, 'bare DDP, torch.compile': partial(by_hand, compiled=True), 'learnerdist': plain,
                 'learnerdist, compile()': partial(plain, compiled=compiler),
                 'learnerdist, compile(regional=True)': partial(plain, compiled=dict(compiler, regional=True))}
two_ways = {'bare DDP': bare, 'learnerdist': ours}
sharded_ways = {'bare DDP': bare, 'learnerdist': ours, 'bare FSDP2': sharded_step.by_hand,
                'learnerdist, shard=True': partial(plain, shard=True),
                **among({'Accelerate': sharded_step.accelerated, 'Fabric': sharded_step.fabric})}

# --- the measure ------------------------------------------------------------------------------------------------------------

def waits(way, task):
    "Calls that make the host wait for the GPU, in a round: torch warns of each"
    with ExitStack() as stack, warnings.catch_warnings(record=True) as found:
        _,train = way(task, stack)
        task.clock.start()
        warnings.simplefilter('always')
        torch.cuda.set_sync_debug_mode('warn')
        try: train()
        finally: torch.cuda.set_sync_debug_mode('default')
    return sum('synchroniz' in str(o.message) for o in found)

def waits_a_step(way, case):
    "Those of a step: what is once a fit drops out"
    func,shape,bs,n_steps,_ = case
    few,many = (waits(way, Task(func, shape, bs, n)) for n in (n_steps,2*n_steps))
    return (many-few)/n_steps

def top_memory(task, train):
    "MiB that the GPU's tensors take at most in a round"
    task.clock.start()
    torch.cuda.reset_peak_memory_stats()
    train()
    return torch.cuda.max_memory_allocated()/2**20

def measure_model(ways, tol, case):
    func,shape,bs,n_steps,n_rounds = case
    task,losses = Task(func, shape, bs, n_steps),{}
    with ExitStack() as stack:
        made,first = {},{}
        for k,f in ways.items():
            start,made[k] = now(),f(task, stack)
            as_way(task, made[k][1], losses, k)()
            first[k] = now()-start # what a compiler needs, for one
        times = turns({k: as_way(task, train, losses, k) for k,(_,train) in made.items()}, n_rounds)
        base = [*made['bare DDP'][0].parameters()]
        diffs = {k: max((full_tensor(a)-b).abs().max().item() for a,b in zip(m.parameters(), base)) for k,(m,_) in made.items()}
    all_close('weights', diffs, tol)
    counts,memory = {},{}
    if gpu:
        counts = {k: waits_a_step(f, case) for k,f in ways.items()}
        for k,f in ways.items():
            with ExitStack() as stack: memory[k] = top_memory(task, f(task, stack)[1])
    return dict(times=times, waits=counts, memory=memory, weights=diffs, first=first)

def one_rank(name, tol, cases):
    quiet()
    setup_distrib() # a group of one: DDP and nccl take part
    try: return {k: measure_model(globals()[name], tol, v) for k,v in cases.items()}
    finally: teardown_distrib()

def two_ranks(name, tol, cases):
    quiet()
    with process_group(): return {k: measure_model(globals()[name], tol, v) for k,v in cases.items()},dist.get_backend()

def on_one(name, tol, cases): return on_ranks(one_rank, 1, name, tol, cases, launched=True)[0]
def on_two(name, tol, cases):
    got = on_ranks(two_ranks, 2, name, tol, {k: (*v[:3],v[3]//2+2,v[4]//2+1) for k,v in cases.items()})
    return {k: dict(got[0][0][k], times=slowest([o[k]['times'] for o,_ in got])) for k in cases}

def vote_rank():
    "Microseconds of a vote of two ranks while their GPU is busy, by sockets and by gloo, and of gloo's all-reduce of 8 bytes"
    with process_group():
        t,n = torch.zeros(2),4096 if gpu and not rehearsal else 8
        busy = torch.ones(n, n, device=default_device())
        def reduce():
            dist.all_reduce(t)
            return t[0].item()
        with open_links() as links: res = {'a vote, sockets': 1e6*vote(links)}
        for _ in range(200): busy = busy@busy*0 # the GPU's queue; a vote is not to wait for it
        with open_links() as links: res['a vote, sockets, while the GPU computes'] = 1e6*vote(links)
        res['a vote, gloo'],begin = 1e6*vote(GlooLinks(60)),time.perf_counter()
        together()
        for _ in range(300): reduce()
        return {**res, "gloo's all-reduce": 1e6*(time.perf_counter()-begin)/300}

def nccl_rank():
    "Microseconds of nccl's all-reduce of 8 bytes that the host reads, in a group of one: less than with any other rank"
    setup_distrib()
    try:
        t = torch.zeros(2, device=default_device())
        for i in range(350):
            if i==50: begin = now()
            dist.all_reduce(t)
            t[0].item()
        return {f"{dist.get_backend(dist.group.WORLD)}'s all-reduce, read by the host, one rank": 1e6*(now()-begin)/300}
    finally: teardown_distrib()

def measure_votes(): return {**on_ranks(vote_rank, 2)[0], **on_ranks(nccl_rank, 1, launched=True)[0]}

sections = {'one rank, float32': partial(on_one, 'plain_ways', 1e-3), 'one rank, bfloat16 and fused SGD': partial(on_one, 'half_ways', .1),
            'compiled': lambda _: on_one('compiled_ways', 1e-2, chain), 'two ranks on one card': partial(on_two, 'two_ways', 1e-3),
            'two ranks on one card, sharded': lambda _: on_two('sharded_ways', 1e-3, chain), 'votes': lambda _: measure_votes()}

def measure(quick):
    cases,res = {k: (*v[:-1], 2 if quick else v[-1]) for k,v in models.items()},dict(sections={}, failed={}, rehearsal=rehearsal)
    for name,func in sections.items():
        start = time.time()
        try: res['sections'][name] = func(cases)
        except (Exception,SystemExit) as e: res['failed'][name] = f'{type(e).__name__}: {e}'[:4000]
        print(f"{name}: {'failed' if name in res['failed'] else 'done'}, {time.time()-start:.0f} s", flush=True)
    return res

# --- report -----------------------------------------------------------------------------------------------------------------

head = ['model','way','ms a step','ratio to bare DDP: median of rounds (quartiles)','waits for the GPU in a step',
        'MiB at most','s of the first round']

def rows_of(case, o):
    rs,cell = ratios(o['times'], 'bare DDP'),lambda d, k, fmt: format(d[k], fmt) if k in d else ''
    return [[case if not i else '', k, f'{1000*quartiles(v)[1]:.2f}', ratio_text(rs[k]) if k in rs else '1', cell(o['waits'], k, 'g'),
             cell(o['memory'], k, '.0f'), cell(o['first'], k, '.1f')] for i,(k,v) in enumerate(o['times'].items())]

def report(res):
    text = 'A rehearsal: the figures mean nothing.\n\n' if res['rehearsal'] else ''
    for name,o in res['sections'].items():
        if name=='votes': text += f'**{name}**\n\n'+table(['what','µs'], [[k, f'{v:.0f}'] for k,v in o.items()])+'\n\n'
        else: text += f'**{name}**\n\n'+table(head, [r for k,v in o.items() for r in rows_of(k, v)])+'\n\n'
    failed = [f'- **failed**: {k}: {v.splitlines()[0]}' for k,v in res['failed'].items()]
    return text+'\n'.join(verdicts(res['sections'].get('one rank, float32', {}))+failed)

def verdicts(cases):
    more = {k: o['waits']['learnerdist']-o['waits']['bare DDP'] for k,o in cases.items() if o['waits']}
    large = [ratios(o['times'], 'bare DDP')['learnerdist'][1] for k,o in cases.items() if k=='large']
    return [*(verdict('large, learnerdist over bare DDP, nccl, 1 rank', o, 1.02) for o in large),
            *(verdict(f"{k}, waits for the GPU in a step of ours beyond the bare loop's", v, 0, '{:g}') for k,v in more.items())]

def plot(res, path):
    cases = {f'{k}, {name}': o for name,s in res['sections'].items() if name!='votes' for k,o in s.items()}
    groups = {k: ratios(o['times'], 'bare DDP') for k,o in cases.items()}
    bars(path, groups, 'time over bare DDP', 'A training step on a GPU', line=1)
    if res['failed']: sys.exit(f"failed: {', '.join(res['failed'])}")

if __name__=='__main__':
    if not gpu and not rehearsal: sys.exit(print('gpu: no GPU here, nothing measured'))
    main('gpu', measure, report, plot, kept_as='gpu-'+('rehearsal' if rehearsal else re.sub(r'\W+', '-', processor()).lower()))
