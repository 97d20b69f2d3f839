"Options of `distrib_ctx`: what reaches DDP, what is refused, and plain BatchNorm"
from pathlib import Path
import pytest
from torch.nn.parallel import DistributedDataParallel
from scenes import bn, make, picture
import learnerdist
from learnerdist.all import Callback, Learner, group_size, process_group
from learnerdist.testing import run_ranks

class Peek(Callback):
    "Notes what DDP was told"
    def after_pred(self):
        if not self.training: return
        m = self.wrapper.ddp
        self.learn.seen = dict(ddp=isinstance(m, DistributedDataParallel), unused=getattr(m, 'find_unused_parameters', None),
            static=m.static_graph, view=m.gradient_as_bucket_view, cap=m.bucket_bytes_cap, buffers=bool(m.broadcast_buffers))

def rank_options(all_kw):
    res = []
    with process_group():
        for kw in all_kw:
            learn = make(picture(model=bn), 2)
            with learn.no_logging(), learn.added_cbs(Peek()), learn.distrib_ctx(**kw): learn.fit(1)
            res.append(learn.seen)
    return res

def test_options_reach_ddp_and_batches_that_do_not_divide_and_plain_batchnorm():
    kws = [{}, dict(find_unused_parameters=True), dict(static_graph=True), dict(gradient_as_bucket_view=True), dict(bucket_cap_mb=3),
           dict(broadcast_buffers=True)]
    plain = dict(ddp=True, unused=False, static=False, view=False, cap=25*2**20, buffers=False)
    want = [plain, dict(plain, unused=True), dict(plain, static=True), dict(plain, view=True), dict(plain, cap=3*2**20),
            dict(plain, buffers=True)]
    a,b = run_ranks(on_two_ranks, 2, kws)
    for options,_ in (a,b): assert options==want
    assert a[1]==b[1]

def on_two_ranks(kws): return rank_options(kws),rank_plain_bn()

@pytest.mark.parametrize('bad', ['find_unused_params','process_group','device_ids','module','dim','check_reduction','bogus'])
def test_unknown_option(bad):
    learn = make(picture())
    cbs = list(learn.cbs)
    with pytest.raises(ValueError, match=rf'got {bad}\b.*find_unused_parameters'), learn.distrib_ctx(**{bad: 1}): pass
    with pytest.raises(ValueError, match=bad): learn.to_distributed(**{bad: 1})
    assert learn.cbs==cbs

def rank_plain_bn():
    "Without synchronised statistics, buffers are rank 0's where the model is evaluated"
    learn,seen = make(picture(model=bn), group_size(), 0),[]
    class Sees(Callback):
        def before_validate(self): seen.append(self.learn.model[1].running_mean.tolist())
    with learn.no_logging(), learn.distrib_ctx(seed=3, sync_bn=False): learn.fit(2, cbs=Sees())
    return seen,learn.model[1].running_mean.tolist(),learn.recorder.values

def test_help_lists_the_options_in_a_script_and_in_editors():
    stub = (Path(learnerdist.__file__).parent/'learner/learner.pyi').read_text()
    for text in (Learner.distrib_ctx.__doc__,Learner.to_distributed.__doc__,stub.partition('def distrib_ctx')[2]):
        assert 'max_bs: Samples of a part of a step' in text and "kwargs: and DDP's: b" in text, text
    assert 'lr: ' in stub.partition('def fit(')[2].partition('def ')[0]
