"""What it takes to begin: the import, and a launch up to the first collective, in fresh processes by turns

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

def seconds(*args):
    "Of a whole process; up to the time that it prints, where it prints one"
    env = {k: v for k,v in os.environ.items() if k!='PYTHONDONTWRITEBYTECODE'} # torch's modules are compiled already, so ours shall be too
    env['PYTHONPATH'] = os.pathsep.join([str(Path(__file__).parent.parent), env.get('PYTHONPATH', '')])
    start = time.time()
    got = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env)
    end = time.time()
    if got.returncode: raise SystemExit(f'{args}: {got.stderr}')
    told = [o for o in got.stdout.splitlines() if o.startswith('first')]
    return (float(told[-1].split()[1]) if told else end)-start

def launches(folder, W=2):
    "By name, the command lines"
    for name,text in dict(plain=plain, own=own).items(): (Path(folder)/f'{name}.py').write_text(text)
    torchrun,ours = ['-m','torch.distributed.run',f'--nproc-per-node={W}'],['-m','learnerdist.launch','--nproc',str(W)]
    return {'torchrun, plain script': [*torchrun,f'{folder}/plain.py'], 'learnerdist.launch, plain script': [*ours,f'{folder}/plain.py'],
            'learnerdist.launch, learnerdist in the script': [*ours,f'{folder}/own.py']}

def measure(quick):
    n = 2 if quick else 15
    got = turns({k: lambda v=v: seconds('-c', v) for k,v in imports.items()}, n)
    with tempfile.TemporaryDirectory() as d:
        launched = turns({k: lambda v=v: seconds(*v) for k,v in launches(d).items()}, 2 if quick else 7)
    return dict(imports=got, launches=launched)

def parts(res):
    for o in (res['imports'],res['launches']):
        base = next(iter(o))
        yield o,base,ratios(o, base)

def report(res):
    rows = [[k, f'{quartiles(v)[1]:.2f}', ratio_text(rs[k]) if k in rs else '1'] for o,_,rs in parts(res) for k,v in o.items()]
    text = table(['2 ranks where launched', 's', 'ratio to the first of its kind: median (quartiles)'], rows)
    return text+'\n\n'+'\n'.join(verdict(f'{k} over {base}', q[1], 1.05) for _,base,rs in parts(res) for k,q in rs.items())

def plot(res, path):
    groups = {f'{kind}, over {base}': rs for kind,(_,base,rs) in zip(('import','launch'), parts(res))}
    bars(path, groups, 'ratio', 'Start', line=1)

if __name__=='__main__': main('start', measure, report, plot)
