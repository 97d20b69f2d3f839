"""Seconds that training stands still while a checkpoint is saved: plain, in the background, in memory:

    python -m learnerdist.launch --nproc 1 benchmarks/checkpoint.py
    python -m learnerdist.launch --nproc 2 benchmarks/checkpoint.py
    python -m learnerdist.launch --nproc 2 benchmarks/checkpoint.py --s3          # also to a server of S3 on this machine, of moto
    python -m learnerdist.launch --nproc 2 benchmarks/checkpoint.py --checksums 1 # only: of a sharded state of 1 GiB, by rank 0 and by all

The model has 8.4 million weights (34 MB); with Adam's two moments a checkpoint is 101 MB. A step's time is taken between the ends of
two batches, so that it includes whatever happens at a save; printed is how much longer the steps with a save take than the others."""
import argparse,os,subprocess,sys,tempfile,time,zlib
from contextlib import contextmanager
from pathlib import Path
from statistics import mean,median

import torch
from torch import nn
from torch.utils.data import TensorDataset
from learnerdist.all import (Callback,Checkpoint,DataLoaders,Learner,broadcast_object,distrib_barrier,group_rank,group_size,
                             process_group,rank0_first,rank_distrib)

class Times(Callback):
    "When each batch began: after all that happens between two batches"
    order,run_valid = 1002,False
    def before_fit(self): self.t = []
    def before_batch(self): self.t.append(time.perf_counter())
    def steps(self): return [b-a for a,b in zip(self.t, self.t[1:])]

def measure(every, n_steps, at=None, **kw):
    "Seconds of each step with a save, the median of the others, and those from the last step to the end of the fit"
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8*n_steps, 1024), torch.randint(10, (8*n_steps,)))
    model = nn.Sequential(*[o for _ in range(8) for o in (nn.Linear(1024, 1024), nn.ReLU())], nn.Linear(1024, 10))
    times = Times()
    learn = Learner(DataLoaders.from_dsets(data, bs=8), model, nn.CrossEntropyLoss(), opt_func=torch.optim.Adam)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(split_batches=True), tempfile.TemporaryDirectory() as d:
        learn.fit(1, cbs=[Checkpoint(at or broadcast_object(d), every, **kw), times])
        end = time.perf_counter()-times.t[-1]
    steps = times.steps()
    saves = set(range(every-1, len(steps), every))
    return [steps[i] for i in saves],median(o for i,o in enumerate(steps) if i not in saves),end

@contextmanager
def s3():
    "Within the body, a server of S3 on this machine has a bucket `bench`"
    port = 5600+os.getppid()%300
    os.environ |= dict(AWS_ENDPOINT_URL=f'http://127.0.0.1:{port}', AWS_ACCESS_KEY_ID='a', AWS_SECRET_ACCESS_KEY='b')
    def start():
        import s3fs
        server = subprocess.Popen([sys.executable,'-m','moto.server','-p',str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            time.sleep(1)
            try: return server,s3fs.S3FileSystem(skip_instance_cache=True).mkdir('bench')
            except OSError: assert server.poll() is None
    server = start()[0] if rank_distrib()==0 else None
    try: yield
    finally:
        if server: server.kill()

def checksums(gib):
    "Seconds to check a sharded state in the cache of the system: all by rank 0, and by all ranks, which also read it"
    from torch.distributed.tensor import distribute_tensor,init_device_mesh,Shard
    from learnerdist.checkpoint.snapshot import Writers,newest_good,write_snapshot
    from learnerdist.core.shards import split_rows
    with process_group(), tempfile.TemporaryDirectory() as d:
        W,r,d = group_size(),group_rank(),Path(broadcast_object(d))
        like = distribute_tensor(torch.zeros(int(gib*2**18), 1024), init_device_mesh('cpu', (W,)), [Shard(0)])
        skeleton,rows = split_rows(dict(w=like))
        parts = {f'rows_{r}': dict(rows=rows)}|({} if r else dict(model=skeleton, state=dict(opt={})))
        info,writers = dict(run='', epoch=0, step=0, shards=W),Writers(r, W, 'a')
        write_snapshot(d/'epoch_0000-step_00000000', parts, info, writers=writers)
        distrib_barrier()
        t = time.perf_counter()
        if r==0:
            for o in d.glob('*/*.pt'): zlib.crc32(o.read_bytes())
        distrib_barrier()
        alone,t = time.perf_counter()-t,time.perf_counter()
        cpu = time.process_time()
        assert newest_good(d, like, together=True).info['step']==0
        cpu = time.process_time()-cpu
        messages = f'checked by rank 0 {alone:.2f} s; checked and read by {W} {time.perf_counter()-t:.2f} s, {cpu:.2f} CPU s of rank 0'
        if r==0: print(f'a sharded state of {gib:g} GiB: {messages}')
        distrib_barrier()

def main():
    p = argparse.ArgumentParser()
    p.add_argument('--steps', type=int, default=120)
    p.add_argument('--s3', action='store_true')
    p.add_argument('--checksums', type=float, metavar='GiB')
    args = p.parse_args()
    if args.checksums: return checksums(args.checksums)
    cases = dict(plain={}, background=dict(background=True), memory=dict(in_memory=True))
    show(cases, args.steps)
    if args.s3:
        with s3(): show(dict(s3=dict(at=f's3://bench/{rank0_first(os.getppid)}')), args.steps)

def show(cases, n_steps):
    for name,kw in cases.items():
        saves,step,end = measure(20, n_steps, **kw)
        extra = [o-step for o in saves]
        messages = f'{name:<11} {mean(extra):.4f} s a save (from {min(extra):.4f} to {max(extra):.4f}); a step {step:.3f} s'
        if rank_distrib()==0: print(f'{messages}; from the last step to the end {end:.2f} s', flush=True)

if __name__=='__main__': main()
