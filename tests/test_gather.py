"`get_preds(gather=…)`: files in memory, errors, and fastai's Learner. What comes back is in test_predictions.py"
import os,resource
from pathlib import Path
import pytest, torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from harness import asking, error_of
from helpers import Raise
from test_predictions import bare_loss, of
from learnerdist.all import CancelBatchException, DataLoaders, Learner, TfmdDL, group_rank, process_group
from learnerdist.testing import run_ranks

pytest.importorskip('fastai')

def xy(n): return torch.randn(n, 3, generator=torch.Generator().manual_seed(n)),torch.arange(n)
def wide(x): return x.repeat(1, 400)
models = dict(narrow=lambda x: x*2, wide=wide)

def make(name, n, bs=3, cbs=None):
    return Learner(DataLoaders(*[TfmdDL(TensorDataset(*xy(n)), bs)]*2), of(models[name]), bare_loss, cbs=cbs)

def leaves(o):
    "Nested lists of numbers, with dtypes"
    if isinstance(o, dict): return {k: leaves(v) for k,v in o.items()}
    return (str(o.dtype),o.tolist()) if isinstance(o, torch.Tensor) else [leaves(v) for v in o] if isinstance(o, (list,tuple)) else o

def skips(W, rank, path):
    learn = make('wide', 13, cbs=[Raise('before_batch', CancelBatchException, 0, 1)])
    with learn.distrib_ctx(): return leaves(learn.get_preds()[1])

def test_a_cancelled_batch_has_no_rows(found):
    for o in found(skips, 2): assert o==('torch.int64',[0,1,2,3,4,5,9,10,11,12]) # not 6, 7, 8

# --- errors -----------------------------------------------------------------------------------------------------------------

def test_what_gather_may_be():
    for how in ('rank1', None, Path('out')):
        with pytest.raises(ValueError, match="gather=.*: give 'all' or 'rank0'"): make('narrow', 3).get_preds(gather=how)

def fastai_learner(n, name='narrow'):
    from fastai.data.core import DataLoaders as FastaiLoaders
    from fastai.data.core import TfmdDL as FastaiDL
    from fastai.learner import Learner as FastaiLearner
    class Loss(nn.MSELoss):
        def forward(self, pred, targ): return super().forward(pred[:,0], targ.float())
        def activation(self, o): return o.softmax(-1)
        def decodes(self, o): return o.argmax(-1)
    dl = FastaiDL([*zip(*xy(n))], bs=3, num_workers=0, device='cpu')
    model = of(models[name])
    model.unused = nn.Parameter(torch.zeros(1))
    return FastaiLearner(FastaiLoaders(dl, dl, device='cpu'), model, Loss(), metrics=[])

def of_fastai(W, rank, path):
    import learnerdist.fastai # noqa: F401
    res = {}
    for n in (13,1):
        learn = fastai_learner(n, 'wide')
        with learn.distrib_ctx():
            res[n] = [leaves(learn.get_preds(with_input=True, with_decoded=True, gather=o)) for o in ('all','rank0')]
            res[n].append(leaves(learn.get_preds(with_preds=False)))
            with pytest.raises(ValueError, match='gather'): learn.get_preds(gather='no')
    return res

@pytest.mark.parametrize('W', [1, 2])
def test_fastais_learner(W, found):
    import learnerdist.fastai # noqa: F401
    want = {n: leaves(fastai_learner(n, 'wide').get_preds(with_input=True, with_decoded=True)) for n in (13,1)}
    for r,res in enumerate(found(of_fastai, W)):
        for n in (13,1):
            whole,rank0,targs = res[n]
            assert same(whole, want[n]) and targs==[None,want[n][2]]
            assert rank0==[None]*4 if r else same(rank0, want[n])

def same(a, b):
    "To the rounding of a softmax over other batches"
    return len(a)==len(b) and all(p[0]==q[0] and torch.allclose(torch.tensor(p[1]), torch.tensor(q[1]), 1e-5, 1e-6) for p,q in zip(a, b))

class Differs(IterableDataset):
    "Reads another number of samples on each rank, the same ones at first"
    def __iter__(self): return iter([*zip(*xy(13))][:13-4*group_rank()])

def differs(W, rank, path):
    learn = Learner(DataLoaders(TfmdDL(TensorDataset(*xy(4)), 2), DataLoader(Differs(), 2)), of(lambda x: x), bare_loss)
    def evaluated(how):
        with learn.distrib_ctx(): getattr(learn, how)()
    return [error_of(evaluated, o) for o in ('get_preds','validate')]

def test_batches_that_were_not_seen_once_are_an_error(found):
    for messages in sum(found(differs, 2), []):
        assert 'evaluated 4, 2 batches, 6 in all' in messages and 'have counted 7, 5' in messages

def rank_short_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, resource.RLIM_INFINITY)) # bytes of a file, also of one in memory
    with process_group():
        learn = make('narrow', 13)
        with learn.distrib_ctx(): return leaves(learn.get_preds())

def test_a_file_in_memory_is_no_longer_than_its_rows(): assert run_ranks(rank_short_files, 2)==[leaves(make('narrow', 13).get_preds())]*2

def no_rows_in_memory(x): return dict(sparse=x.to_sparse(), quantized=torch.quantize_per_tensor(x, .1, 0, torch.qint8))

def odd_tensors(W, rank, path):
    learn = Learner(DataLoaders(*[TfmdDL(TensorDataset(*xy(7)), 3)]*2), of(no_rows_in_memory), bare_loss)
    with learn.distrib_ctx(): o = learn.get_preds()[0]
    return type(o['sparse']),o['sparse'].is_sparse,o['sparse'].to_dense(),o['quantized'].dequantize()

found = asking(alone=(skips, of_fastai, differs, odd_tensors))

def test_tensors_whose_rows_are_no_bytes(found):
    x = xy(7)[0]
    for cls,is_sparse,sparse,quantized in found(odd_tensors, 1)+found(odd_tensors, 2):
        assert (cls,is_sparse)==(torch.Tensor,True) and torch.equal(sparse, x)
        assert torch.allclose(quantized, x, atol=.051)

def rank_too_many_files(who, at_end):
    "No file more can be opened; at_end: nor while the error is handled"
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with process_group():
            learn = make('wide', 13)
            with learn.distrib_ctx():
                learn.get_preds()
                fds = {int(o) for o in os.listdir('/proc/self/fd')}
                limit = max(fds)+2 if at_end else min({*range(max(fds)+2)}-fds)
                if group_rank()==who: resource.setrlimit(resource.RLIMIT_NOFILE, (limit,old[1]))
                learn.get_preds()
    except Exception as e: return type(e).__name__,str(e)
    finally: resource.setrlimit(resource.RLIMIT_NOFILE, old)

@pytest.mark.skipif(not Path('/proc/self/fd').exists(), reason='needs /proc')
@pytest.mark.parametrize('who,at_end', [(1, False), *[pytest.param(*o, marks=pytest.mark.long) for o in ((0, False), (1, True))]])
def test_too_many_open_files(who, at_end):
    res = run_ranks(rank_too_many_files, 2, who, at_end)
    assert res[who][0]=='OSError' and 'Too many open files' in res[who][1]
    assert res[1-who][0]=='RankError' and f'rank {who} failed with OSError' in res[1-who][1] and 'Too many open' in res[1-who][1]
