"""Several machines, as network namespaces on this one: see machines.py. Needs root."""
import torch,learnerdist.all # noqa: F401 # first, so that ranks are forks of a process that has them
import os,re,signal,subprocess,sys,time
from functools import partial
from pathlib import Path
import pytest
import machines
from helpers import root,start

pytestmark = pytest.mark.skipif(not machines.usable(), reason='needs root, ip and /dev/net/tun')

def train(how, bs=2):
    """What each rank runs. how: 'fit': to its end, and rank 0 saves the weights; 'on': until something happens to it; 'saves': so, with a
    Checkpoint; 'late': to its end, and rank 3 fails then"""
    from learnerdist.all import Callback,Checkpoint,DataLoaders,Learner,rank_distrib
    folder = Path(os.environ['MACHINES_DIR'])
    torch.manual_seed(0)
    x = torch.arange(96., dtype=torch.double).reshape(48, 2)%7/7
    dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, True)), batch_size=bs)
    class Begun(Callback):
        def after_batch(self):
            if self.training and self.epoch: (folder/f'{rank_distrib()}.begun').write_text(f'{os.getpid()} {self.epoch}')
    learn = Learner(DataLoaders(dl, dl), torch.nn.Linear(2, 1).double(), torch.nn.MSELoss(), lr=.1, cbs=Begun)
    learn.logger = lambda line: None
    cbs = [Checkpoint(folder/'states')] if how=='saves' else None
    with learn.distrib_ctx(): learn.fit(2 if how in ('fit','late') else 100_000, cbs=cbs)
    if how=='late' and rank_distrib()==3: raise ValueError('late')
    if not rank_distrib(): torch.save(learn.model.state_dict(), folder/'model.pth')

class Launch:
    "The same launcher on each machine"
    def __init__(self, enter, n, folder, how, *options):
        self.folder = folder
        env = {k:v for k,v in os.environ.items() if k!='GLOO_SOCKET_IFNAME'}
        env |= dict(MACHINES_DIR=str(folder), PYTHONPATH=str(root), OMP_NUM_THREADS='1')
        args = '--nnodes',n,'--nproc',2,'--rdzv-endpoint','machine-a:29500',*options,__file__,how
        self.out = [folder/f'{i}.txt' for i in range(n)]
        self.runs = []
        for i in range(n):
            with open(self.out[i], 'w') as f:
                self.runs.append(start(*args, env=env, outs=[0,f.fileno(),f.fileno()], begin=partial(enter, i)))

    def __enter__(self): return self
    def __exit__(self, *exc):
        for o in self.runs: o.kill() # its ranks end with it
        for o in self.runs: o.wait()

    def wait_begun(self, n, limit_s=300):
        "Until all ranks have trained for an epoch; their process ids"
        end = time.monotonic()+limit_s
        files = [self.folder/f'{r}.begun' for r in range(n)]
        while not all(texts := [o.read_text() if o.exists() else '' for o in files]): # empty while it is written
            assert time.monotonic()<end and None in [o.poll() for o in self.runs], self.texts()
            time.sleep(.02)
        return [int(o.split()[0]) for o in texts]

    def wait_for(self, i, text, limit_s=30)->float:
        "Seconds until machine i has said this"
        start = time.monotonic()
        while not re.search(text, self.out[i].read_text()):
            assert time.monotonic()<start+limit_s, (i, text, self.texts())
            time.sleep(.05)
        return time.monotonic()-start

    def statuses(self, limit_s=300): return [o.wait(limit_s) for o in self.runs]
    def texts(self): return [o.read_text() for o in self.out]

    def processes(self, i):
        "Process ids of what runs on machine i"
        res = subprocess.run(['ip','netns','pids',f'ld{os.getpid()}{"abcd"[i]}'], capture_output=True, text=True, check=True)
        return [*map(int, res.stdout.split())]

def alone(folder, monkeypatch, bs):
    "Weights of one process at the global batch size"
    monkeypatch.setenv('MACHINES_DIR', str(folder))
    train('fit', bs)
    return torch.load(folder/'model.pth')

def same(a, b): return all(torch.allclose(a[k], b[k], rtol=0, atol=1e-9) for k in a)

def trains_as_one(n, folder, monkeypatch, delay_s=0., known='all', endpoint='machine-a:29500'):
    with machines.machines(n, known) as (enter,cable):
        cable.delay_s = delay_s
        with Launch(enter, n, folder, 'fit', '--rdzv-endpoint', endpoint) as run: assert run.statuses()==[0]*n, run.texts()
    # and what the command hides: a warning of c10d, perhaps with where it came from
    known_lines = r'.*(waits for the other machines|\[c10d\]).*\n((Exception raised|frame #|<omitting).*\n|\n)*'
    assert not any(re.sub(known_lines, '', o) for o in run.texts()), run.texts()
    weights = torch.load(folder/'model.pth')
    assert same(weights, alone(folder, monkeypatch, 4*n)), weights

@pytest.mark.slow
def test_two_machines_train_as_one_process(tmp_path, monkeypatch): trains_as_one(2, tmp_path, monkeypatch)

@pytest.mark.long
@pytest.mark.parametrize('n,delay_s', [(4, 0.), (2, .02)])
def test_four_machines_and_a_slow_link(n, delay_s, tmp_path, monkeypatch): trains_as_one(n, tmp_path, monkeypatch, delay_s)

@pytest.mark.long
@pytest.mark.parametrize('known', ['none','debian'])
def test_machines_that_do_not_know_each_others_names_train(known, tmp_path, monkeypatch):
    "torchrun takes host names for addresses; where these mean nothing, or 127.0.1.1, its launchers wait for one another in vain"
    trains_as_one(2, tmp_path, monkeypatch, known=known, endpoint='10.77.0.1:29500')

def ranks_of(i): return rf'machine-{"abcd"[i]} \(ranks {2*i}, {2*i+1}\)'
def gone(i): return rf'{ranks_of(i)} is gone, or the link to it: its launcher has been silent for \d+ s'
def no_way(i): return f'machine-{"abcd"[i]} cannot reach machine-a:29500, where the launchers meet'

@pytest.mark.long
@pytest.mark.parametrize('rank,sig,other', [(3, signal.SIGKILL, 'rank 3 ended by SIGKILL'),
                                            (0, signal.SIGSEGV, '.*: rank 0, which runs it, has ended')])
def test_a_rank_is_killed(rank, sig, other, tmp_path):
    "Both launchers name the rank, at once. Rank 0 has the ranks' store, so the other machine's ranks do not get how it ended"
    with machines.machines() as (enter,_), Launch(enter, 2, tmp_path, 'on') as run:
        os.kill(run.wait_begun(4)[rank], sig)
        i = rank//2
        assert run.statuses()==([1,128+sig] if i else [128+sig,1])
        run.wait_for(i, f'rank {rank} failed first: ended by {sig.name}')
        run.wait_for(1-i, other)
        assert 'has been silent' not in run.texts()[1-i]

@pytest.mark.long
@pytest.mark.parametrize('i', [0,1])
def test_a_launcher_gets_sigterm(i, tmp_path):
    "All ranks save, and all launchers end at once with the status that says so. With launcher 0 their store ends"
    with machines.machines() as (enter,_), Launch(enter, 2, tmp_path, 'saves') as run:
        run.wait_begun(4)
        run.runs[i].send_signal(signal.SIGTERM)
        assert run.statuses(60)==[75,75], run.texts()

@pytest.mark.long
def test_a_rank_fails_after_those_of_another_machine_have_ended(tmp_path):
    "Their launcher waits for this one, and ends with it"
    with machines.machines() as (enter,_), Launch(enter, 2, tmp_path, 'late') as run:
        assert run.statuses(60)==[0,1], run.texts()
        run.wait_for(1, 'rank 3 failed first: ValueError: late')

@pytest.mark.long
@pytest.mark.parametrize('n,i', [(2, 1), (4, 0), (4, 2)])
@pytest.mark.parametrize('how', ['killed','vanishes'])
def test_a_machine_is_gone(how, n, i, tmp_path):
    "All others name it within 30 s, and end. On machine 0 is the store in which the launchers meet"
    with machines.machines(n) as (enter,cable), Launch(enter, n, tmp_path, 'on') as run:
        run.wait_begun(2*n)
        if how=='killed':
            for pid in run.processes(i): os.kill(pid, signal.SIGKILL)
        else: cable.cut.add(i)
        end = time.monotonic()+30
        for j in {*range(n)}-{i}: run.wait_for(j, gone(i) if i else no_way(j), end-time.monotonic())
        if how=='vanishes': # it says the same of the others
            for j in {*range(n)}-{i}: run.wait_for(i, no_way(i) if i else gone(j), end-time.monotonic())
        assert all(run.statuses())

@pytest.mark.long
@pytest.mark.parametrize('cut_s', [5,20])
def test_a_link_comes_back(cut_s, tmp_path):
    "After 5 s the run goes on. After 20 s it has ended, and each machine names the other"
    with machines.machines() as (enter,cable), Launch(enter, 2, tmp_path, 'on') as run:
        run.wait_begun(4)
        cable.cut.add(1)
        begun,end = tmp_path/'0.begun',time.monotonic()+30
        time.sleep(cut_s) # the time that is tested
        cable.cut.clear()
        if cut_s==5:
            was = begun.read_text()
            while begun.read_text() in (was,''): assert time.monotonic()<end, run.texts()
            assert not any('gone' in o for o in run.texts())
        else:
            run.wait_for(0, gone(1), end-time.monotonic())
            run.wait_for(1, no_way(1), end-time.monotonic())
            assert run.statuses()==[1,1]

if __name__=='__main__': train(*sys.argv[1:])
