"""What becomes of a run in which one rank fails: every fault in every phase.

`python tests/faults.py [--write]` runs all of them through the launcher and prints a table (or puts it into
nbs/tutorials/failures.ipynb); test_failure.py runs a sample. Under the launcher this is the run that fails, in ranks that are forks."""
import torch,argparse,atexit,ctypes,json,os,re,signal,sys,tempfile,time
from functools import partial
from pathlib import Path
from typing import NamedTuple
import machines

root = Path(__file__).parent.parent
notebook = root/'nbs/tutorials/failures.ipynb'
faults = 'raise','sys.exit','os._exit','SIGKILL','segfault','hang'
phases = 'before the group','rank0_first','training','validation','saving','loader worker'
cases = [(f,p) for p in phases for f in faults if (f,p)!=('hang','rank0_first')] # which waits as long as a download may take
well = 'sys.exit(0)','os._exit(0)','sys.exit(75)' # a rank leaves without an error, while the others go on
ends = 'end of the context','after the context','exit hook' # where no other rank waits in a collective
cases += [(f,p) for p in ('before the group','rank0_first','training') for f in well]
cases += [('sys.exit(256)','training'),('deaf child','training'),('stop','training'),*((f,p) for p in ends for f in ('stop','hang'))]
cases += [('cut link','two machines')] # where this process may make network namespaces
lines = Path(__file__).read_text().splitlines()
timeout_s = 8 # of a run that will hang, and what `--wait` gets; all other runs have distrib_ctx's usual 1800

def hangs(fault): return fault in ('hang','stop','cut link')

def who_fails(phase): return 0 if phase in ('rank0_first','saving') else 1 # rank 0 does those

def fail(how):
    Path(os.environ['FAULT_DIR'], 'when').write_text(str(time.time()))
    if how=='raise': raise ValueError('a bad batch')
    if how=='sys.exit': sys.exit(3)
    if how=='os._exit': os._exit(3)
    if how=='sys.exit(0)': sys.exit(0)
    if how=='os._exit(0)': os._exit(0)
    if how=='sys.exit(75)': sys.exit(75)
    if how=='sys.exit(256)': sys.exit(256)
    if how=='stop': os.kill(os.getpid(), signal.SIGSTOP)
    if how=='deaf child': deaf_child()
    if how=='cut link': Path(os.environ['FAULT_DIR'], 'cut').touch() or time.sleep(3) # `run` cuts it meanwhile
    if how=='SIGKILL': os.kill(os.getpid(), signal.SIGKILL)
    if how=='segfault': ctypes.string_at(0)
    if how=='hang': time.sleep(1000)

def deaf_child():
    "Fail, and leave a child that no signal but SIGKILL ends"
    if os.fork(): raise ValueError('a bad batch')
    for o in signal.valid_signals()-{signal.SIGKILL,signal.SIGSTOP}: signal.signal(o, signal.SIG_IGN)
    time.sleep(1000)

def train(fault, phase):
    from learnerdist.all import Callback,DataLoaders,Learner,rank0_first,rank_distrib
    mine = rank_distrib()==who_fails(phase)
    model = torch.nn.Linear(1, 1)
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 40
        def __getitem__(self, i):
            if mine and phase=='loader worker' and i>20 and torch.utils.data.get_worker_info(): fail(fault)
            return torch.ones(1)*i/40,torch.ones(1)
    class Fail(Callback):
        def before_batch(self):
            where = ('training','two machines') if self.training else ('validation',)
            if mine and self.epoch==1 and phase in where: fail(fault)
    if mine and phase=='before the group': fail(fault)
    if phase=='rank0_first': rank0_first(lambda: fail(fault) if mine else None)
    dls = DataLoaders.from_dsets(Data(), Data(), bs=4, num_workers=2 if phase=='loader worker' else 0)
    learn = Learner(dls, model, torch.nn.MSELoss(), lr=.01, path=os.environ['FAULT_DIR'])
    learn.logger = lambda line: None
    on_state_dict = getattr(model, 'register_state_dict_post_hook', model._register_state_dict_hook) # torch 2.4 has only the second
    if mine and phase=='exit hook': atexit.register(fail, fault)
    with learn.distrib_ctx(timeout_s=timeout_s if hangs(fault) else 1800):
        learn.fit(1)
        learn.save('m')
        if mine and phase=='saving': on_state_dict(lambda *_: fail(fault))
        learn.fit(1, cbs=[]) if phase=='saving' else learn.fit(2, cbs=Fail)
        learn.save('m')
        learn.fit(1)
        if mine and phase=='end of the context': fail(fault)
    if mine and phase=='after the context': fail(fault)

class Outcome(NamedTuple):
    fault:str
    phase:str
    seconds:float # From the fault to the end of the last process of the run
    status:int    # The launcher's
    messages:str      # Its report
    kept:bool     # Whether the weights that were saved before can be loaded

def run(fault, phase, limit_s=100):
    "One run, whose processes are known by a variable of their environment"
    from helpers import environment,start # which ranks do not need
    with tempfile.TemporaryDirectory() as d:
        env = dict(FAULT_DIR=d, OMP_NUM_THREADS='1')
        if phase=='two machines': messages,status = on_two_machines(env, d, limit_s)
        else:
            wait = ['--wait',str(timeout_s)] if phase in ends else []
            res = start('--nproc', 2, *wait, __file__, fault, phase, env=environment(**env)).result(limit_s)
            messages,status = report(res.stderr),res.returncode
        end = time.monotonic()+limit_s
        while ours(d) and time.monotonic()<end: time.sleep(.05)
        when = Path(d, 'when')
        seconds = time.time()-float(when.read_text()) if when.exists() else float('nan') # it has failed otherwise before
        assert not ours(d), f'{fault}, {phase}: left after {limit_s} s'
        file = Path(d, 'models/m.pth')
        kept = not file.exists() or bool(torch.load(file, weights_only=True))
    return Outcome(fault, phase, seconds, status, messages, kept)

def report(text):
    "What the launcher itself said"
    messages = re.sub(r'(?s)\n\non rank .*?\n(?= \()', '', text[text.find('learnerdist.launch: '):])
    return messages.replace('learnerdist.launch: ', '').strip()

def on_two_machines(env, folder, limit_s):
    "A rank on each of two machines, whose link is cut: what both launchers said, and the least status"
    from helpers import environment,shutdown_in,start
    options = '--nnodes',2,'--nproc',1,*shutdown_in(2),'--rdzv-endpoint','machine-a:29500'
    env = {k:v for k,v in environment(**env).items() if k!='GLOO_SOCKET_IFNAME'}
    with machines.machines() as (enter,cable):
        runs = [start(*options, __file__, 'cut link', 'two machines', env=env, begin=partial(enter, i)) for i in (0,1)]
        end = time.monotonic()+limit_s
        while not Path(folder, 'cut').exists() and time.monotonic()<end: time.sleep(.05)
        cable.cut.add(1)
        found = [o.result(limit_s) for o in runs]
    return '\n'.join(report(o.stderr) for o in found),min(o.returncode for o in found)

def ours(folder):
    "Processes of this run"
    def has(o):
        try: return f'FAULT_DIR={folder}'.encode() in (o/'environ').read_bytes()
        except OSError: return False
    return [o.name for o in Path('/proc').glob('[0-9]*') if has(o)]

def line_of(fault):
    "Where a fault happens in this file"
    return next(i for i,o in enumerate(lines, 1) if f"how=='{fault}'" in o)

def complaints(o:Outcome)->list:
    "What is wrong with an outcome"
    rank,lineless = who_fails(o.phase),o.fault in ('os._exit','SIGKILL') # of which nothing in the process can tell
    words = {'raise': 'ValueError: a bad batch', 'sys.exit': 'SystemExit: 3', 'os._exit': 'status 3', 'SIGKILL': 'SIGKILL',
             'segfault': 'SIGSEGV', 'hang': 'a rank did not come', 'stop': 'by SIGSTOP', 'sys.exit(256)': 'SystemExit: 256',
             'deaf child': 'ValueError: a bad batch', 'sys.exit(75)': 'left with status 75',
             'cut link': 'machine-b cannot reach '}.get(o.fault, 'left ')
    if o.phase in ends: words = f'still ran {timeout_s} s after rank 0 had ended: it {"is stopped" if o.fault=="stop" else "was at"}'
    lineless = lineless or o.fault in (*well,'stop','deaf child','cut link')
    if o.phase=='loader worker':
        words = {'raise': words, 'hang': 'rank 1 was at'}.get(o.fault, 'DataLoader worker')
        lineless = o.fault!='raise' # the rank knows where it waited for its worker
    res = []
    first = f'rank {rank} ' in o.messages.splitlines()[0] or hangs(o.fault)
    if not first or f'rank {rank}' not in o.messages: res.append(f'no rank {rank}')
    if words not in o.messages: res.append(f'no {words!r}')
    if not lineless and not re.search(rf'faults.py(:|", line ){line_of(o.fault)}\b', o.messages): res.append('no line')
    if not o.status or not o.kept: res.append(f'status {o.status}, kept {o.kept}')
    return res

def late(o:Outcome)->list:
    "What is too slow about it, on a machine that does nothing else: no matter of a test"
    return [f'{o.seconds:.1f} s'] if o.seconds > 15 + (2*timeout_s if hangs(o.fault) else 0) else []

def telling(l): return re.match(r' *(rank \d|ValueError)', l) or 'faults.py' in l

def row(o:Outcome):
    messages = '<br>'.join(re.sub(r'/\S*/', '', l).replace('|', '/').strip()[:150] for l in o.messages.splitlines() if telling(l))
    return f'| {o.phase} | `{o.fault}` | {o.seconds:.1f} | {o.status} | {messages} |'

def key(row): return row.split(' | ')[:2] # phase and fault

def write(rows):
    "Put these rows into the table; others stay"
    nb = json.loads(notebook.read_text())
    cell = next(o for o in nb['cells'] if ''.join(o['source']).startswith('| phase |'))
    head,line,*old = ''.join(cell['source']).splitlines()
    new = [next((o for o in rows if key(o)==key(was)), was) for was in old]
    new += [o for o in rows if key(o) not in map(key, old)]
    cell['source'] = '\n'.join([head,line,*new]).splitlines(keepends=True)
    notebook.write_text(json.dumps(nb, indent=1, sort_keys=True, ensure_ascii=False)+'\n')

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--write', action='store_true', help=f'put the table into {notebook.name}')
    parser.add_argument('--only', default='', help='faults or phases whose name contains this; the table then keeps its other rows')
    args = parser.parse_args()
    outcomes = []
    for f,p in cases:
        if args.only not in f'{f} {p}' or p=='two machines' and not machines.usable(): continue
        outcomes.append(o := run(f, p))
        print(f'{p}, {f}: {o.seconds:.1f} s', *late(o), *complaints(o), file=sys.stderr, flush=True)
    rows = [*map(row, outcomes)]
    write(rows) if args.write else print(*rows, sep='\n')
    return any(late(o) or complaints(o) for o in outcomes)

if __name__=='__main__': train(*sys.argv[1:]) if 'FAULT_DIR' in os.environ else sys.exit(main())
