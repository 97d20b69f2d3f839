"""A run of ten minutes with validation, a checkpoint every 30 s, and one rank killed: the share of the clock that went into steps that
count, and where the rest went. Beside torchrun with torch.distributed.checkpoint, Lightning, and torchft, where these are installed

    python benchmarks/goodput.py                  # 45 minutes
    python benchmarks/goodput.py --seconds 120    # so long for each, and not ten minutes"""
import argparse,shutil,socket,subprocess,sys,tempfile,time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from common import main,peer,table,turns,verdict
from deaths import end,start

# All do the same steps: 30 ms of sleep and a small model. Rank 1 kills itself once, between two checkpoints; rank 0 notes each step
common = '''import os,signal,sys,time,torch
from pathlib import Path
from torch import nn
{imports}
torch.set_num_threads(1)
folder,n_epoch,every,dies = Path(sys.argv[1]),*map(int, sys.argv[2:])
n,bs,W = {n},16,2
def work(rank, step):
    time.sleep(.03)
    if rank==1 and step>=dies and not (folder/'killed').exists():
        (folder/'killed').write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
def tick(rank, what, share=1):
    if not rank: print(what, time.time(), share, file=notes)
notes = open(folder/f'{{time.time()}}.notes', 'a', buffering=1)
torch.manual_seed(0)
xs,valid_xs = torch.randn(n*bs*W, 32),torch.randn(20*bs, 32)
train,valid = (torch.utils.data.TensorDataset(o, o[:,:1]) for o in (xs, valid_xs))
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
'''
own = '''
class Step(Callback):
    def after_loss(self): work(rank_distrib(), self.train_iter+1) if self.training else time.sleep(.01)
    def after_batch(self): self.training and tick(rank_distrib(), self.train_iter)
    def after_validate(self): tick(rank_distrib(), 'valid')
dls = DataLoaders.from_dsets(train, valid, bs=bs)
learn = Learner(dls, model, nn.MSELoss(), torch.optim.AdamW, lr=1e-3, path=folder)
learn.logger = lambda line: None
with learn.distrib_ctx(): learn.fit(n_epoch, cbs=[Step(),Checkpoint('states', every=every, in_memory=50, background=True, resume=True)])
'''
loop = '''
opt,mse,step = torch.optim.AdamW(model.parameters(), lr=1e-3),nn.MSELoss(),0
def loader(ds): return DataLoader(ds, bs, sampler=DistributedSampler(ds, W, rank))
def validate():
    with torch.no_grad(): losses = [mse(plain(x), y) for x,y in loader(valid) if not time.sleep(.01)]
    tick(rank, 'valid')
    return torch.stack(losses).mean()
'''
by_hand = '''
dist.init_process_group('gloo')
rank,plain = dist.get_rank(),model
model = DistributedDataParallel(plain)'''+loop+'''
def state():
    of_model,of_opt = get_state_dict(model, opt)
    return dict(model=of_model, opt=of_opt, step=step)
saved = max((int(o.parent.name) for o in folder.glob('*/.metadata')), default=0)
if saved:
    old = state()
    dcp.load(old, checkpoint_id=folder/str(saved))
    set_state_dict(model, opt, model_state_dict=old['model'], optim_state_dict=old['opt'])
    step = old['step']
while step<n*n_epoch:
    dl = loader(train)
    dl.sampler.set_epoch(step//n)
    for x,y in islice(dl, step%n, None):
        loss = mse(model(x), y)
        work(rank, step+1)
        loss.backward()
        opt.step(), opt.zero_grad()
        step += 1
        tick(rank, step)
        if step%every==0: dcp.save(state(), checkpoint_id=folder/str(step))
    dist.all_reduce(validate())
dist.destroy_process_group()
'''
by_lightning = '''
rank = int(os.environ['LOCAL_RANK'])
class Module(L.LightningModule):
    def __init__(self): super().__init__(); self.net = model
    def loss(self, b): return nn.functional.mse_loss(self.net(b[0]), b[1])
    def training_step(self, b, i):
        loss = self.loss(b)
        work(rank, self.global_step+1)
        return loss
    def validation_step(self, b, i):
        time.sleep(.01)
        self.log('valid', self.loss(b), sync_dist=True)
    def on_train_batch_end(self, *args): tick(rank, self.global_step)
    def on_validation_end(self): tick(rank, 'valid')
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), lr=1e-3)
saving = ModelCheckpoint(folder/'states', every_n_train_steps=every, save_last=True)
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
trainer = L.Trainer(max_epochs=n_epoch, accelerator='cpu', devices=W, strategy='ddp', callbacks=[saving], default_root_dir=folder, **quiet)
trainer.fit(Module(), DataLoader(train, bs, shuffle=True), DataLoader(valid, bs), ckpt_path='last')
'''
# Each rank is a replica group. The killed one gets its state from the other
by_torchft = '''
rank,plain = int(os.environ['REPLICA_GROUP_ID']),model'''+loop+'''
(folder/f'{rank}.here').touch()
while len([*folder.glob('*.here')])<W: time.sleep(.01) # else one may be done before the other begins
def load(o): plain.load_state_dict(o['model']), opt.load_state_dict(o['opt'])
def state(): return dict(model=plain.state_dict(), opt=opt.state_dict())
manager = Manager(pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load, state_dict=state,
                  replica_id=f'group_{rank}', timeout=timedelta(seconds=20))
model,optimizer,batches = torchft.DistributedDataParallel(manager, plain),Optimizer(manager, opt),iter(())
while (step := manager.current_step())<n*n_epoch:
    b = next(batches, None)
    if b is None: batches = islice(loader(train), step%n, None)
    x,y = b or next(batches)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    work(rank, step+1)
    loss.backward()
    optimizer.step()
    if manager.current_step()==step: continue
    step = manager.current_step()
    tick(rank, step, manager.num_participants()/W)
    if step%every==0 and not rank: torch.save(dict(state(), step=step), folder/f'{step}.pt')
    if step%n==0: validate()
manager.shutdown(wait=False)
'''
loaders = 'from itertools import islice\nfrom torch.utils.data import DataLoader,DistributedSampler\n'
dcp_imports = loaders+'''import torch.distributed as dist,torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict,set_state_dict
from torch.nn.parallel import DistributedDataParallel'''
torchft_imports = loaders+'import torchft\nfrom datetime import timedelta\nfrom torchft import Manager,Optimizer,ProcessGroupGloo'
lightning_imports = loaders+'import lightning as L\nfrom lightning.pytorch.callbacks import ModelCheckpoint'
restarts = '--nproc-per-node=2','--max-restarts=1'
torchrun = '-m','torch.distributed.run','--standalone'
# The package, imports, the script, the command; None: one of torchrun's for each rank
ways = {'learnerdist': ('learnerdist','from learnerdist.all import *',own,('-m','learnerdist.launch','--nproc','2','--max-restarts','1')),
        'torchrun and DCP by hand': ('torch',dcp_imports,by_hand,(*torchrun,*restarts)),
        'Lightning, by torchrun': ('lightning',lightning_imports,by_lightning,(*torchrun,*restarts)),
        'torchft, heartbeats within .5 s': ('torchft',torchft_imports,by_torchft,None)}

n_steps,step_s = 1000,.036 # Of an epoch; of a step, about

def run(imports, text, cmd, plan):
    "Run a way to its end; what `accounts` says of it"
    with tempfile.TemporaryDirectory() as d, ExitStack() as stack:
        folder,args = Path(d),[f'{d}/train.py',d,*map(str, plan)]
        (folder/'train.py').write_text(common.format(imports=imports, n=n_steps)+text)
        began = time.time()
        # without it restarted ranks find the addresses of those before them, and wait for ever
        if cmd: procs = [start(*cmd, *args, TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1')]
        else: procs = of_torchft(stack, args)
        for o in [end(p, 60+3*own_args.seconds) for p in procs]:
            if o.returncode: raise SystemExit(f'{o.args}: {o.stdout[-3000:]}')
        return accounts(folder, began, time.time(), plan[1])

def of_torchft(stack, args):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        at = f'127.0.0.1:{s.getsockname()[1]}'
    options = '--min_replicas 1 --heartbeat_timeout_ms 500 --join_timeout_ms 10000 --bind'.split()
    house = stack.enter_context(subprocess.Popen([shutil.which('torchft_lighthouse'),*options,at], stderr=subprocess.DEVNULL))
    stack.callback(house.kill)
    group = *torchrun,'--nproc-per-node=1','--max-restarts=3'
    return [start(*group, *args, REPLICA_GROUP_ID=str(i), TORCHFT_LIGHTHOUSE=f'http://{at}', RUST_LOG='error') for i in range(2)]

parts = 'launch','death to next step','cut step','steps again','ranks alone','checkpoints','validation','after validation','end'

def accounts(folder, began, ended, every):
    """Seconds of a run, and of what, by rank 0's notes. A step that counts has the clock from the end of the step before it; one after
    a validation, a checkpoint or the death has the median of the others, and the rest is theirs. Steps of one rank alone count as its
    share of the samples. share: of the clock, that went into steps that count; even: that share if each had taken the median"""
    killed,notes = float((folder/'killed').read_text()),[]
    for o in folder.glob('*.notes'): notes += [line.split() for line in o.read_text().splitlines()]
    notes = sorted([(float(t),k,float(share)) for k,t,share in notes])
    of_samples = {k: share for _,k,share in notes if k!='valid'}
    gaps = [(t-before,k,last,before) for (before,last,_),(t,k,_) in zip(notes, notes[1:])]
    step = median(gap for gap,k,last,_ in gaps if k!='valid' and last!='valid')
    res,took = dict.fromkeys(parts, 0.),{}
    def add(k, gap):
        if k in took: res['steps again'] += took[k]
        took[k] = gap
    add(notes[0][1], step)
    for gap,k,last,before in gaps:
        if k=='valid': res['validation'] += gap
        elif before<=killed<before+gap:
            res['death to next step'] += before+gap-killed-step
            res['cut step'] += killed-before
            add(k, step)
        elif last=='valid' or int(last)%every==0:
            res['after validation' if last=='valid' else 'checkpoints'] += gap-step
            add(k, step)
        else: add(k, gap)
    res['launch'],res['end'] = notes[0][0]-began-step,ended-notes[-1][0]
    seconds = ended-began
    counted = {k: of_samples[k]*gap for k,gap in took.items()}
    res['ranks alone'] = sum(took.values())-sum(counted.values())
    share,even = sum(counted.values())/seconds,step*sum(of_samples.values())/seconds
    return dict(res, seconds=seconds, share=share, even=even, step=step, n_steps=len(took))

def measure(quick, cases=('',)):
    seconds = 20 if quick else own_args.seconds
    every = round((5 if quick else 30)/step_s)
    n_epoch = max(round(seconds/step_s/n_steps), 1)
    dies = every*(n_epoch*n_steps//every//2)+every//2
    got = {}
    def once(k):
        _,*how = ways[k]
        got[k] = run(*how, (n_epoch,every,dies))
        print(k, got[k], flush=True)
    chosen = [k for k,(name,*_) in ways.items() if k.startswith(tuple(cases)) and peer(name)]
    turns({k: lambda k=k: once(k) for k in chosen}, 1, warm=0)
    return dict(cases=got, every=every)

def report(res):
    runs = res['cases']
    head = ['','steps that count','at the median','the run, s','a step, ms',*(f'{o}, s' for o in parts)]
    def row(o):
        return [f"{o['share']:.1%}",f"{o['even']:.1%}",f"{o['seconds']:.1f}",f"{1000*o['step']:.1f}",*(f'{o.get(p, 0):.2f}' for p in parts)]
    text = table(head, [[k,*row(o)] for k,o in runs.items()])
    ours,others = runs['learnerdist'],[o['share'] for k,o in runs.items() if 'learnerdist' not in k]
    lines = verdict('the rest of the clock, in %, of learnerdist', 100-100*ours['share'], 3, '{:.1f}')
    if others: lines += '\n'+verdict('that over the best of the others', (1-ours['share'])/(1-max(others)), 1)
    return f"{ours['n_steps']:,} steps of 2 ranks, a checkpoint every {res['every']} of them.\n\n{text}\n\n{lines}"

def plot(res, path):
    plt = peer('matplotlib.pyplot', 'matplotlib')
    if plt is None: return
    fig,ax = plt.subplots(figsize=(8, 2.4))
    left = [0]*len(res['cases'])
    for part in parts:
        widths = [max(100*o.get(part, 0)/o['seconds'], 0) for o in res['cases'].values()]
        ax.barh([*res['cases']], widths, left=left, label=part)
        left = [a+b for a,b in zip(left, widths)]
    ax.axvline(3, color='black', lw=.8, ls=':')
    ax.set(xlabel='% of the clock that went into no step that counts', title='A run with a rank killed')
    ax.invert_yaxis()
    ax.legend(fontsize=7, loc='upper left', bbox_to_anchor=(1, 1))
    fig.tight_layout()
    fig.savefig(path, dpi=110)

if __name__=='__main__':
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument('--seconds', type=int, default=600)
    own_args,sys.argv[1:] = p.parse_known_args()
    main('goodput', measure, report, plot)
