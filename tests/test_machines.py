"""Several machines, as network namespaces on this one: see machines.py. Needs root."""
import json,os,re,signal,subprocess,sys,time
from pathlib import Path
import pytest,torch
import machines

pytestmark = pytest.mark.skipif(not machines.usable(), reason='needs root, ip and /dev/net/tun')
root = Path(__file__).parent.parent

def train(how):
    "What each rank runs. how: 'fit': to its end, and rank 0 saves the weights; 'on': until something happens to it"
    from learnerdist.all import Callback,DataLoaders,Learner,rank_distrib
    folder = Path(os.environ['MACHINES_DIR'])
    torch.manual_seed(0)
    x = torch.arange(48.).reshape(24, 2)%7/7
    dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, True)), batch_size=int(os.environ.get('BS', 2)))
    class Begun(Callback):
        def after_batch(self):
            if self.training and self.epoch==1: (folder/f'{rank_distrib()}.begun').touch()
            if how=='raise' and self.epoch==1 and rank_distrib()==3: raise ValueError('a bad batch')
    learn = Learner(DataLoaders(dl, dl), torch.nn.Linear(2, 1).double(), torch.nn.MSELoss(), lr=.1, cbs=Begun)
    learn.model.float()
    learn.logger = lambda line: None
    with learn.distrib_ctx(): learn.fit(2 if how=='fit' else 100_000)
    if not rank_distrib(): torch.save(learn.model.state_dict(), folder/'model.pth')

class Launch:
    "The same command on each machine"
    def __init__(self, on, n, folder, how, *options, delay_s=0):
        self.folder,self.start = folder,time.monotonic()
        env = {k:v for k,v in os.environ.items() if k!='GLOO_SOCKET_IFNAME'}
        env |= dict(MACHINES_DIR=str(folder), PYTHONPATH=str(root), OMP_NUM_THREADS='1')
        command = sys.executable,'-m','learnerdist.launch','--nnodes',str(n),'--nproc','2','--rdzv-endpoint','machine-a:29500'
        self.out = [folder/f'{i}.txt' for i in range(n)]
        self.runs = []
        for i in range(n):
            with open(self.out[i], 'w') as f:
                run = subprocess.Popen(on(i, *command, *options, __file__, how), env=env, stdout=f, stderr=f)
            self.runs.append(run)

    def __enter__(self): return self
    def __exit__(self, *exc):
        for o in self.runs: o.kill() # its ranks end with it
        for o in self.runs: o.wait()

    def wait_begun(self, n, limit_s=60):
        end = time.monotonic()+limit_s
        while not all((self.folder/f'{r}.begun').exists() for r in range(n)):
            assert time.monotonic()<end and None in [o.poll() for o in self.runs], self.texts()
            time.sleep(.02)

    def wait_for(self, i, text, limit_s)->float:
        "Seconds until machine i has said this"
        start = time.monotonic()
        while not re.search(text, self.out[i].read_text()):
            assert time.monotonic()<start+limit_s, (i, text, self.texts())
            time.sleep(.05)
        return time.monotonic()-start

    def statuses(self, limit_s=60): return [o.wait(limit_s) for o in self.runs]
    def texts(self): return [o.read_text() for o in self.out]

    def processes(self, i):
        "Process ids of what runs on machine i"
        res = subprocess.run(['ip','netns','pids',f'ld{os.getpid()}{"abcd"[i]}'], capture_output=True, text=True, check=True)
        return [*map(int, res.stdout.split())]

if __name__=='__main__': train(*sys.argv[1:])
