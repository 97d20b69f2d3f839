"SIGTERM wherever it comes: the run saves, or its launcher says which state is newest. Going on from there: test_checkpoint.py"
import re,signal,time
import pytest
from helpers import environment,start,write

script = """import os,signal,sys,time
import torch
from learnerdist.all import *
folder,held = sys.argv[1:]
def mark(name): # SIGTERM comes here, of which a checkpoint takes note; without one it ends this process
    if name!=held: return
    open(f'{folder}/here', 'w').close()
    while held in ('script','get_preds') or checkpoint.when.requests.got is None: time.sleep(.002)
class Mark(Callback):
    def after_pred(self): mark(f'{"training" if self.training else "validation"} {self.epoch}' if self.learn.fitting else 'get_preds')
checkpoint = Checkpoint('a', every=3)
mark('script')
data = [(torch.ones(2),torch.ones(1))]*16
learn = Learner(DataLoaders.from_dsets(data, data, bs=2), torch.nn.Linear(2, 1), torch.nn.MSELoss(), path=folder, cbs=Mark())
learn.logger = lambda line: None
try:
    with learn.distrib_ctx():
        learn.fit(2, cbs=checkpoint)
        learn.get_preds()
except Preempted: # saved; now the launcher's signal follows that of the system
    os.kill(os.getpid(), signal.SIGTERM)
    raise
"""

@pytest.mark.slow
def test_sigterm_at_three_moments(tmp_path):
    "In validation the fit saves, and a second signal changes nothing. Elsewhere the launcher says which state is newest, or that none is"
    newest = r'learnerdist.launch: the newest state is .*/a/epoch_000{}-step_00000016, from which .*\n'
    none = r'learnerdist.launch: ended by SIGTERM before this launch saved a state.*\n'
    moments = {'validation 1': (75,newest.format(1)), 'get_preds': (143,newest.format(2)), 'script': (143,none)}
    runs = {k: start(write(tmp_path/k, script), tmp_path/k, k, env=environment(OMP_NUM_THREADS='1')) for k in moments}
    for k,run in runs.items():
        while not (tmp_path/k/'here').exists():
            assert run.poll() is None, run.result()
            time.sleep(.002)
        run.send_signal(signal.SIGTERM)
    for k,(status,said) in moments.items():
        res = runs[k].result()
        assert res.returncode==status and re.fullmatch(said, res.stdout+res.stderr), res
