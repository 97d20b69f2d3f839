"The table, the bar, and the log file: from rank 0 alone, the bar only where somebody watches"
import warnings
import contextlib,io,os,pty,threading
import pytest, torch
from torch import nn
from torch.nn import functional as F
from helpers import Raise
from learnerdist.all import *
from learnerdist.testing import run_ranks

def make(cbs=None, path='.', valid=True, **kw):
    torch.manual_seed(0)
    x,y = torch.randn(8, 3),torch.arange(8)%2
    dls = DataLoaders(TfmdDL(list(zip(x, y)), 4), TfmdDL(list(zip(x, y)), 4) if valid else None, path=path)
    return Learner(dls, nn.Linear(3, 2), F.cross_entropy, torch.optim.SGD, metrics=[accuracy], cbs=cbs, **kw)

# --- lines ------------------------------------------------------------------------------------------------------------------

def test_no_bar_and_no_logging(capsys):
    learn = make()
    logger = learn.logger
    with learn.no_logging(): learn.fit(1)
    assert capsys.readouterr().out==''
    with learn.no_bar(): learn.fit(1)
    assert len(capsys.readouterr().out.splitlines())==2
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    with pytest.raises(KeyError), learn.no_logging(), learn.no_bar(): raise KeyError
    assert learn.logger is logger and learn.progress.show_bar and capsys.readouterr().out==''
    learn.progress.show_bar = False
    with learn.no_bar(): pass
    assert not learn.progress.show_bar # as it was, not as it usually is

@pytest.mark.parametrize('error', [CancelFitException, KeyError])
def test_a_fit_that_ends_early_gives_the_logger_back(error, tmp_path, capsys):
    learn = make(path=tmp_path, cbs=[CSVLogger(), Raise('after_train', error, at=1)])
    logger = learn.logger
    with contextlib.suppress(KeyError): learn.fit(3)
    assert learn.logger is logger and learn.progress.mbar is None and len(capsys.readouterr().out.splitlines())==2
    assert len((tmp_path/'history.csv').read_text().splitlines())==2

# --- bars -------------------------------------------------------------------------------------------------------------------

def on_terminal(f):
    "What `f()` writes to a terminal"
    ours,theirs = pty.openpty()
    got = []
    def read():
        with contextlib.suppress(OSError):
            while o := os.read(ours, 4096): got.append(o)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        with os.fdopen(theirs, 'w') as tty, contextlib.redirect_stdout(tty): f()
    finally:
        thread.join() # reading ends where the other side is closed
        os.close(ours)
    return b''.join(got).decode()

def lines_of(out): return [o.rpartition('\r')[2].rstrip() for o in out.replace('\r\n', '\n').split('\n')]

def test_bar_on_a_terminal():
    out = on_terminal(lambda: make().fit(2))
    assert '█' in out and '\r' in out and '100.00%' in out
    table = [o for o in lines_of(out) if o.strip()]
    assert table[0].split()[:4]==['epoch','train_loss','valid_loss','accuracy'] and [o.split()[0] for o in table[1:3]]==['0', '1']
    assert '█' not in table[1]

def rank_writes(path):
    "Output and files on a pipe, and on a terminal"
    rank,out = rank_distrib(),io.StringIO()
    warnings.simplefilter('ignore') # of the paths, which differ so that each rank's files are seen
    learn = make(path=path/str(rank), cbs=CSVLogger())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), learn.distrib_ctx(seed=1):
        learn.fit(2)
        learn.validate()
        learn.get_preds()
    def f():
        with learn.distrib_ctx(seed=1): learn.fit(1)
    tty = on_terminal(f)
    lines = []
    learn.logger = lines.append
    with learn.distrib_ctx(seed=1): learn.fit(1)
    learn.remove_cb(ProgressCallback)
    with learn.distrib_ctx(seed=1): learn.fit(1)
    return out.getvalue(),tty,(path/str(rank)/'history.csv').exists(),lines,learn.recorder.values

def test_only_rank_0_prints_and_writes(tmp_path):
    (out0,tty0,file0,lines0,vals0),(out1,tty1,file1,lines1,vals1) = run_ranks(rank_writes, 2, tmp_path)
    assert len(out0.splitlines())==3 and '\r' not in out0 and out1=='' and tty1=='' and '█' in tty0
    assert file0 and not file1 and len(lines0)==3 and lines1==[] and vals0==vals1
    assert lines0[2][1:-1]==vals0[0]
