"""SIGTERM wherever it comes: the run saves, or its launcher says which state is newest; and going on ends with the same weights"""
import os,random,re,signal,time
from pathlib import Path
from typing import NamedTuple
import pytest,torch
from helpers import environment,start
from learnerdist.checkpoint.snapshot import newest_in,weights_in

script = """import os,signal,sys,time
from pathlib import Path
import torch
from torch.utils.data import DataLoader,Dataset
from learnerdist.all import *
folder,held = Path(sys.argv[1]),sys.argv[2:]
seen = set()
def mark(name): # a phase of this run begins, on rank 0
    if name in seen or rank_distrib(): return
    seen.add(name)
    with open(folder/'phases', 'a') as f: f.write(f'{name} {os.getpid()}\\n')
    while name in held and not arrived(): time.sleep(.002)
def arrived(): # SIGTERM, of which a checkpoint takes note; without one it ends this process
    checkpoint = vars(learn).get('checkpoint')
    return checkpoint is not None and checkpoint.when.requests.got is not None
class Data(Dataset):
    def __len__(self): return 16
    def __getitem__(self, i):
        time.sleep(.003)
        return torch.tensor([i/16., 1.]),torch.ones(1)
class Mark(Callback):
    def before_fit(self): mark('before fit')
    def after_pred(self): mark(f'{"training" if self.training else "validation"} {self.epoch}' if self.learn.fitting else 'get_preds')
mark('script')
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(.5), torch.nn.Linear(8, 1))
learn = Learner(DataLoaders.from_dsets(Data(), Data(), bs=2), model, torch.nn.MSELoss(), lr=.1, path=folder, cbs=Mark())
learn.logger = lambda line: None
model.register_state_dict_post_hook(lambda *_: mark('writing'))
try:
    with learn.distrib_ctx():
        learn.fit(2, cbs=Checkpoint('a', every=3), resume=True)
        mark('after a fit')
        preds,_ = learn.get_preds()
        mark('between two fits')
        for _ in range(50): time.sleep(.002)
        seen.clear()
        learn.fit(2, cbs=Checkpoint('b', every='epoch'), resume=True)
except Preempted: # saved; now the launcher's signal follows that of the system
    os.kill(os.getpid(), signal.SIGTERM)
    raise
mark('end')
if not rank_distrib(): torch.save(dict(model.state_dict(), preds=preds), folder/'final.pth')
"""
phases = ('start','script','before fit','training 0','writing','validation 0','training 1','validation 1','after a fit','get_preds',
          'between two fits','end')

class Moment(NamedTuple):
    phase:str  # That has begun when SIGTERM comes: 'start' is that of the command
    delay_s:float
    to:str     # Who gets it: the 'launcher', as by a user; 'all' processes, as by Slurm; 'rank' 0

def begun(folder, nproc=2, held=()):
    "A launch in `folder`. held: phases in which the run waits for the signal"
    (folder/'phases').unlink(missing_ok=True)
    (folder/'script.py').write_text(script)
    # without a number of threads the launcher says that it sets one
    return start('--nproc', nproc, folder/'script.py', folder, *held, env=environment(OMP_NUM_THREADS='1'))

def interrupted(folder, moment=None):
    "One launch in `folder`: its exit status, and what it has printed"
    run = begun(folder)
    if moment: interrupt(run, folder, moment)
    res = run.result()
    return res.returncode,res.stdout+res.stderr

def interrupt(run, folder, moment):
    "Send SIGTERM at this moment, unless the run has ended before"
    pid = None
    while moment.phase!='start' and pid is None and run.poll() is None:
        time.sleep(.002)
        text = (folder/'phases').read_text() if (folder/'phases').exists() else ''
        pid = next(iter(re.findall(rf'{moment.phase} (\d+)\n', text)), None)
    time.sleep(moment.delay_s)
    if run.poll() is not None: return
    if moment.to!='rank' or pid is None: run.send_signal(signal.SIGTERM)
    targets = [] if moment.to=='launcher' or pid is None else [int(pid)]
    if moment.to=='all' and pid: targets = [int(o.name) for o in Path('/proc').glob('[0-9]*') if is_rank(o, folder)]
    for o in targets:
        try: os.kill(o, signal.SIGTERM)
        except ProcessLookupError: pass

def is_rank(proc, folder):
    "Whether a process is a rank of the run in this folder"
    try: command = (proc/'cmdline').read_bytes()
    except OSError: return False
    return str(folder).encode() in command and b'--worker' in command

def judge(folder, moment, status, text):
    "AssertionError unless the run has saved, or says which state is newest; which can be loaded"
    at = moment,status,text
    assert status in ({0,75,143,-signal.SIGTERM} if moment.phase=='start' else {0,75,143}), at
    assert 'Traceback' not in text, at
    if status in (0,-signal.SIGTERM): return
    found = re.search(r'the newest state is (\S+),', text)
    assert found or status==143 and 'ended by SIGTERM before this launch saved a state' in text, at
    if found: assert weights_in(newest_in(Path(found[1]))), at
    for o in (folder/'a',folder/'b'):
        if newest := newest_in(o): assert weights_in(newest), at

def same(a, b): return a.keys()==b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def until_done(folder, moments, expected):
    "Start again after each of these moments, until the run is done: its weights and predictions are those of a run without them"
    used = 0
    for o in moments:
        status,text = interrupted(folder, o)
        judge(folder, o, status, text)
        used += 1
        if status==0: break
    if status: assert interrupted(folder)[0]==0
    assert same(torch.load(folder/'final.pth'), expected)
    return used

@pytest.fixture(scope='module')
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole')
    assert interrupted(folder)==(0,'')
    return torch.load(folder/'final.pth')

@pytest.mark.slow
def test_sigterm_at_two_moments(tmp_path):
    "In validation the fit saves, and a second signal changes nothing. In predictions the launcher says which state is newest"
    moments = [Moment('validation 1', 0, 'launcher'),Moment('get_preds', 0, 'launcher')]
    folders = [tmp_path/o for o in 'ab']
    for o in folders: o.mkdir()
    runs = [begun(at, 1, [o.phase]) for at,o in zip(folders, moments)]
    for o in zip(runs, folders, moments): interrupt(*o)
    found = [(o.returncode,o.stdout+o.stderr) for o in (run.result() for run in runs)]
    said = r'learnerdist.launch: the newest state is \S+/a/epoch_000{}-step_00000016, from which .*\n'
    for at,moment,(code,text),status,epoch in zip(folders, moments, found, (75,143), (1,2)):
        assert code==status and re.fullmatch(said.format(epoch), text), (code, text)
        judge(at, moment, code, text)

@pytest.mark.long
@pytest.mark.parametrize('seed', range(4))
def test_sigterm_at_random_moments(seed, tmp_path, expected):
    "15 of them, in all phases"
    rng,n,folders = random.Random(seed),15,0
    while n>0:
        moments = [Moment(rng.choice(phases), rng.random()*.1, rng.choice(['launcher','launcher','all','rank'])) for _ in range(min(n, 6))]
        moments = [o._replace(delay_s=o.delay_s*50) if o.phase=='start' else o for o in moments]
        folder = tmp_path/str(folders)
        folder.mkdir()
        n -= until_done(folder, moments, expected)
        folders += 1
