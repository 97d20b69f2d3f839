"""What it takes to begin: the import; a launch up to the first collective; from the death of a rank to the next step, after a restart
from a checkpoint. In fresh processes by turns

    python benchmarks/start.py"""
import os,subprocess,sys,tempfile,time
from pathlib import Path

from common import bars,main,quartiles,ratio_text,ratios,table,turns,verdict

imports = {'import torch': 'import torch', 'import learnerdist.all': 'import learnerdist.all'}

plain = '''import time,torch,torch.distributed as dist
dist.init_process_group('gloo')
dist.all_reduce(torch.ones(1))
if not dist.get_rank(): print('first', time.time())
dist.destroy_process_group()
'''
own = '''import time
from learnerdist.all import *
with process_group():
    all_sum(torch.ones(1))
    if not group_rank(): print('first', time.time())
'''.replace('import time\n', 'import time,torch\n')

# Rank 1 kills itself in step 12 of the first attempt; rank 0 prints when the second one has done a step
dies = '''import os,signal,sys,time,torch
from pathlib import Path
from torch import nn
{imports}
folder,first = Path(sys.argv[1]),os.environ['TORCHELASTIC_RESTART_COUNT']=='0'
def after_step(rank, step):
    if first and rank==1 and step==12:
        (folder/'killed').write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    if not first and rank==0 and not (folder/'told').exists():
        print('lasted', time.time()-float((folder/'killed').read_text()), flush=True)
        (folder/'told').touch()
torch.manual_seed(0)
xs,ys = torch.randn(4000, 20),torch.randn(4000, 1)
model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 1))
'''
plain_dies = dies.format(imports='import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel') + '''
dist.init_process_group('gloo')
model,rank,at,start = DistributedDataParallel(model),dist.get_rank(),folder/'plain.pt',0
opt = torch.optim.SGD(model.parameters(), lr=.01)
if at.exists():
    state = torch.load(at)
    start = state['step']
    model.load_state_dict(state['model']), opt.load_state_dict(state['opt'])
for step in range(start+1, 100):
    i = torch.arange(rank+2*step*16, rank+2*(step+1)*16, 2)
    nn.functional.mse_loss(model(xs[i]), ys[i]).backward()
    opt.step(), opt.zero_grad()
    after_step(rank, step)
    if step%5==0 and rank==0:
        torch.save(dict(step=step, model=model.state_dict(), opt=opt.state_dict()), folder/'new.pt')
        (folder/'new.pt').rename(at)
dist.destroy_process_group()
'''
own_dies = dies.format(imports='from learnerdist.all import *') + '''
class Step(Callback):
    def after_batch(self): after_step(rank_distrib(), self.train_iter)
learn = Learner(DataLoaders.from_dsets([*zip(xs, ys)], [(xs[0], ys[0])], bs=16), model, nn.MSELoss(), torch.optim.SGD, lr=.01, path=folder)
learn.logger = lambda line: None
with learn.distrib_ctx(): learn.fit(3, cbs=[Checkpoint('ckpt', 5, in_memory=False), Step()], resume=True)
'''

def seconds(*args):
    "Of a whole process; up to the time that it prints, where it prints one; the time that it says something lasted"
    env = {k: v for k,v in os.environ.items() if k!='PYTHONDONTWRITEBYTECODE'} # torch's modules are compiled already, so ours shall be too
    env['PYTHONPATH'] = os.pathsep.join([str(Path(__file__).parent.parent), env.get('PYTHONPATH', '')])
    start = time.time()
    got = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env)
    end = time.time()
    if got.returncode and 'lasted' not in got.stdout: raise SystemExit(f'{args}: {got.stderr}')
    told = dict(o.split()[:2] for o in got.stdout.splitlines() if o.startswith(('first','lasted')))
    return float(told['lasted']) if 'lasted' in told else float(told.get('first', end))-start

def launches(folder, W=2):
    "By name, the command lines"
    for name,text in dict(plain=plain, own=own).items(): (Path(folder)/f'{name}.py').write_text(text)
    torchrun,ours = ['-m','torch.distributed.run',f'--nproc-per-node={W}'],['-m','learnerdist.launch','--nproc',str(W)]
    return {'torchrun, plain script': [*torchrun,f'{folder}/plain.py'], 'learnerdist.launch, plain script': [*ours,f'{folder}/plain.py'],
            'learnerdist.launch, learnerdist in the script': [*ours,f'{folder}/own.py'],
            'learnerdist.launch --no-fork-server, the same': [*ours,'--no-fork-server',f'{folder}/own.py']}

def restarts(folder, W=2):
    "By name, functions that return the seconds from the death of a rank to the next step"
    torchrun,ours = ['-m','torch.distributed.run',f'--nproc-per-node={W}'],['-m','learnerdist.launch','--nproc',str(W)]
    def lasted(command, text):
        with tempfile.TemporaryDirectory(dir=folder) as d:
            (Path(d)/'train.py').write_text(text)
            return seconds(*command, '--max-restarts', '1', f'{d}/train.py', d)
    os.environ['TORCH_DISABLE_SHARE_RDZV_TCP_STORE'] = '1' # else torchrun's restarted ranks read addresses of ended ones
    return {'torchrun, DDP and torch.save in the script': lambda: lasted(torchrun, plain_dies),
            'learnerdist.launch, the same script': lambda: lasted(ours, plain_dies),
            'learnerdist.launch, Checkpoint': lambda: lasted(ours, own_dies),
            'learnerdist.launch, Checkpoint in memory': lambda: lasted(ours, own_dies.replace('in_memory=False', 'in_memory=True')),
            'learnerdist.launch --no-fork-server, Checkpoint': lambda: lasted([*ours,'--no-fork-server'], own_dies)}

def measure(quick):
    n = 2 if quick else 15
    got = turns({k: lambda v=v: seconds('-c', v) for k,v in imports.items()}, n)
    with tempfile.TemporaryDirectory() as d:
        launched = turns({k: lambda v=v: seconds(*v) for k,v in launches(d).items()}, 2 if quick else 7)
        restarted = turns(restarts(d), 1 if quick else 5)
    return dict(imports=got, launches=launched, restarts=restarted)

def parts(res):
    for o in (res['imports'],res['launches'],res['restarts']):
        base = next(iter(o))
        yield o,base,ratios(o, base)

def report(res):
    rows = [[k, f'{quartiles(v)[1]:.2f}', ratio_text(rs[k]) if k in rs else '1'] for o,_,rs in parts(res) for k,v in o.items()]
    text = table(['2 ranks where launched', 's', 'ratio to the first of its kind: median (quartiles)'], rows)
    relative = [verdict(f'{k} over {base}', q[1], 1.05) for o,base,rs in parts(res) for k,q in rs.items()]
    seconds_ = [verdict(f'seconds of {k}', quartiles(res[o][k])[1], s, '{:.2f}') for o,k,s in targets]
    return text+'\n\n'+'\n'.join(relative+seconds_)

targets = (('launches','learnerdist.launch, learnerdist in the script',.6),
           ('restarts','learnerdist.launch, Checkpoint',1.5))

def plot(res, path):
    groups = {f'{kind}, over {base}': rs for kind,(_,base,rs) in zip(('import','launch','restart'), parts(res))}
    bars(path, groups, 'ratio', 'Start', line=1)

if __name__=='__main__': main('start', measure, report, plot)
