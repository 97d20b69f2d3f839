"run() in a real notebook: a kernel, and cells that are executed as Jupyter executes them"
import os,re,select
import nbformat,pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

cells = '''
import os,threading
from pathlib import Path
import torch
from learnerdist.launch import ranks,run
from learnerdist.all import *
(torch.randn(600, 600)@torch.randn(600, 600)).sum() # so that this process has threads
k = 21
def add():
    "Sees what other cells define, and meets the other rank"
    ds = [(torch.ones(1),torch.ones(1))]*4
    learn = Learner(DataLoaders.from_dsets(ds, ds, bs=2), torch.nn.Linear(1, 1), torch.nn.MSELoss())
    with learn.distrib_ctx():
        learn.fit(1)
        return all_sum(torch.tensor(k)).item()
===
run(add, nproc=2)
===
k = 4
run(add, nproc=2)
===
def train(seen):
    if rank_distrib()==0:
        print('epoch 0', flush=True)
        while not Path(seen).exists(): threading.Event().wait(.01)
        print('epoch 1')
    else: print('also', 'here')
    return 'done'
run(train, SEEN, nproc=2)
===
def fails():
    x = dict(a=1)
    if rank_distrib()==1: return x['b']
run(fails, nproc=2)
===
def waits():
    print(f'pid {os.getpid()}\\n', end='', flush=True) # in one piece: two ranks print at once
    threading.Event().wait()
run(waits, nproc=2)
===
run(add, nproc=2)
===
import learnerdist.launch.processes as processes
os.sched_getaffinity = lambda pid: range(8) # so that each rank computes with several threads, which a fork of this process could not
def many_threads(): return torch.get_num_threads(),float((torch.ones(600, 600)@torch.ones(600, 600)).mean())
run(many_threads, nproc=2)
===
class Model(torch.nn.Linear): pass
def make():
    ds = [(torch.ones(1),torch.ones(1))]*4
    return Learner(DataLoaders.from_dsets(ds, ds, bs=2), Model(1, 1), torch.nn.MSELoss())
def fit(learn, n):
    with learn.distrib_ctx(): learn.fit(n)
    return len(learn.recorder.losses),type(learn.model)
r = ranks(2)
learn = r.keep(make)
n,cls = r.run(fit, learn, 2)
n,cls is Model,r.run(os.getpid)==r.run(os.getpid)
===
def more(learn):
    fit(learn, 1)
    print(f'pid {os.getpid()}\\n', end='', flush=True) # in one piece: two ranks print at once
    return int(learn.model.weight.numel())
r.run(more, learn)
===
def waits_again(learn):
    print('waits\\n', end='', flush=True)
    threading.Event().wait()
r.run(waits_again, learn)
===
n = r.run(fit, learn, 1)[0]
r.close()
n
'''

class Reader(NotebookClient):
    "Acts on what a cell prints, while it runs"
    def __init__(self, nb, seen, **kw):
        super().__init__(nb, allow_errors=True, timeout=120, **kw)
        self.seen,self.text,self.pids,self.woken = seen,'',[],False

    def process_message(self, msg, cell, cell_index):
        if msg['msg_type']=='stream': self._read(msg['content']['text'])
        return super().process_message(msg, cell, cell_index)

    def _read(self, text):
        self.text += text
        if 'epoch 0' in text: self.seen.touch()
        pids = [int(o) for o in re.findall(r'pid (\d+)\n', self.text)]
        if len(pids)==2 and not self.pids:
            self.pids = [os.pidfd_open(p) for p in pids]
            os.kill(self.km.provisioner.pid, 2) # Jupyter's interrupt
        if self.text.count('waits\n')==2 and not self.woken: # however the text is cut into messages
            self.woken = True
            os.kill(self.km.provisioner.pid, 2)

def outputs(cell): return [(o.get('text') or o.get('data', {}).get('text/plain') or o.get('evalue')) for o in cell.outputs]

def test_run_in_a_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv('IPYTHONDIR', str(tmp_path)) # the kernel's own files
    sources = [o.strip().replace('SEEN', repr(str(tmp_path/'seen'))) for o in cells.split('===')]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in sources])
    client = Reader(nb, tmp_path/'seen')
    client.execute()
    _,first,second,live,failed,interrupted,last,threads,keep,more,again,after = nb.cells
    for cell,value in ((first,'42'), (second,'8'), (last,'8')): # again, also after a failure and an interrupt
        *shown,res = cell.outputs
        assert res.data['text/plain']==value and ''.join(o.text for o in shown).startswith('epoch     train_loss')
    shown = ''.join(outputs(live))
    assert shown.replace('[r1] also here\n', '', 1)=="epoch 0\nepoch 1\n'done'" # the second was printed because we had seen the first
    error = failed.outputs[-1]
    assert error.ename=='RanksError' and error.evalue.startswith("rank 1 failed: KeyError: 'b'\nTraceback")
    assert "in fails" in error.evalue and "rank 0 failed" not in error.evalue
    assert interrupted.outputs[-1].ename=='KeyboardInterrupt' and len(client.pids)==2
    for o in client.pids:
        assert select.select([o], [], [], 30)[0]
        os.close(o)
    assert outputs(threads)[-1]=='(4, 600.0)'
    assert [outputs(o)[-1] for o in (keep,more)]==['(2, True, True)','1']
    assert again.outputs[-1].ename=='KeyboardInterrupt' and outputs(after)[-1]=='1' # on the ranks that were interrupted
