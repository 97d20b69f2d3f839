"One rank fails: within seconds the others raise an error that names it and carries its exception"
import os,threading
from datetime import timedelta
from itertools import count,product
import faults, pytest, torch, torch.distributed as dist
from helpers import Raise, weights
from test_agreement import make
from test_no_trace import changes, snapshot
from learnerdist.all import *
from learnerdist.core import env,rank0
from learnerdist.core.env import current_group,group_timeout,in_group,is_consequence,shared_store,wait_key
from learnerdist.core.stacks import report_folder
from learnerdist.launch.watch import explain
from learnerdist.testing import run_ranks

class Broken(Exception): pass

class Busy(Callback):
    "Compute for a while on the ranks that are well, out of reach of any collective"
    def before_validate(self):
        t = torch.randn(400, 400)
        for _ in range(50): t = (t@t).clamp(-1, 1)

class AtBarrier(Callback):
    order = 30
    def after_epoch(self): distrib_barrier()

rounds = count()

def all_out():
    "Whether every rank has left the context of this round; this one stays alive meanwhile, with its exception and all that it holds"
    store,k = shared_store(),next(rounds)
    store.set(f'out/{k}/{rank_distrib()}', 'yes')
    return all(wait_key(store, f'out/{k}/{r}', 60) for r in range(num_distrib()))

def caught(learn, rank, event, *cbs):
    "The error, and what is not as it was before the context"
    before = snapshot(learn)
    try:
        with learn.distrib_ctx(seed=1): learn.fit(2, cbs=[Raise(event, Broken('no luck'), rank), *cbs])
    except Exception as e:
        err = e
        assert all_out()
    return type(err).__name__,getattr(err, 'rank', None),getattr(err, 'kind', None),str(err),changes(before, learn)

def run_failures(cases, bn): return [caught(make(bn=bn), *case) for case in cases]

def check(results, cases):
    for r,mine in enumerate(results):
        for (rank,event,*_),(kind,failed,of,msg,changed) in zip(cases, mine):
            assert changed==[], event
            if r==rank: assert (kind,msg)==('Broken','no luck')
            else:
                assert (kind,failed,of)==('RankError',rank,'Broken'), (event,kind,msg)
                assert 'no luck' in msg and 'helpers.py' in msg and 'in act' in msg

events = ['before_fit','before_epoch','before_train','before_batch','after_pred','after_loss','after_backward','before_step','after_step',
          'after_batch','after_train','before_validate','after_validate','after_epoch']

def test_wherever_the_others_are():
    cases = [*product((0,1), events),(0,'after_epoch',AtBarrier()),(1,'before_validate',Busy())]
    check(run_ranks(run_failures, 2, cases, False, timeout_s=300), cases)

def in_forward():
    learn = make(bn=True)
    forward = learn.model[2].forward
    def fail(x):
        if group_rank()==1 and learn.training: raise Broken('in the model')
        return forward(x)
    learn.model[2].forward = fail
    return caught(learn, None, 'after_cancel_fit')

def in_metric():
    def fails(p, t):
        if group_rank()==1: raise Broken('in a metric')
        return (p-t).abs().mean()
    return caught(make(metrics=[fails]), None, 'after_cancel_fit')

def at_attach():
    learn = make()
    def no_room(*args): raise Broken('no room')
    if rank_distrib()==1: learn.model.to = no_room
    return caught(learn, None, 'after_cancel_fit')

def one_after_the_other():
    "Rank 1 fails; then rank 2, which has not heard of it; then rank 0 finds its peers gone"
    class InTurn(Callback):
        def after_loss(self):
            r,store = group_rank(),shared_store()
            store.set(f'after its loss {r}', 'yes')
            for o in ('after its loss 0','after its loss 2'): store.get(o) # else one of them would fail within the forward pass
            if r!=1: store.get(f'out of the context {dict([(2,1), (0,2)])[r]}') # `wait_key` would hear of the failure
            if r: raise Broken(f'on {r}')
    learn = make()
    try:
        with learn.distrib_ctx(): learn.fit(1, cbs=InTurn)
    except Exception as e:
        shared_store().set(f'out of the context {rank_distrib()}', 'yes')
        return type(e).__name__,getattr(e, 'rank', None),str(e).splitlines()[0]

def test_the_first_of_two_failures_is_the_one_that_others_hear_of():
    a,b,c = run_ranks(one_after_the_other, 3)
    assert a==('RankError',1,'rank 1 failed with Broken: on 1') and (b,c)==(('Broken',None,'on 1'),('Broken',None,'on 2'))

def again():
    "After a failure that the script has caught, the next context is a fresh one"
    learn = make()
    with learn.distrib_ctx(seed=1): learn.fit(1)
    return len(learn.recorder.losses),weights(learn).tolist()

def within_a_group():
    "A group that was opened around the context is closed too: else the others would wait in it"
    with process_group(): return caught(make(), 1, 'before_validate')

def users_group():
    setup_distrib()
    found = caught(make(), 1, 'after_loss')
    t = torch.ones(1)
    dist.all_reduce(t)
    open_and_whole = t.item()==2 and dist.is_initialized()
    teardown_distrib()
    return found,open_and_whole

def one_after_another():
    """In the model, where the exception's frames hold the wrapped model and with it the group; in a metric; within a group of
    ours; in one of the user's; a model that cannot go to its device"""
    users,is_open = users_group()
    return [in_forward(),in_metric(),within_a_group(),users,at_attach()],is_open,[wrong_gpu(o) for o in (False,True)],again()

def test_failures_one_after_another():
    for r,(found,is_open,gpus,after) in enumerate(ranks := run_ranks(one_after_another, 2, timeout_s=200)):
        assert is_open and after==ranks[0][-1]
        for o in found: assert o[0]=='Broken' if r else o[:3]==('RankError',1,'Broken')
        assert [o[4] for o in found]==[[],[],['group'],[],[]]
        for err,n in gpus: assert n and err==(('ValueError',None,True,False) if r else ('RankError','ValueError',True,False))

def ends_by_itself():
    learn = make()
    try:
        with learn.distrib_ctx():
            if group_rank()==1: os._exit(3)
            learn.fit(1)
    except RankError as e: return e.rank,str(e)

@pytest.mark.parametrize('env', [{}, dict(LOCAL_WORLD_SIZE='1')]) # the second: each rank on a machine of its own
def test_a_rank_that_is_gone_without_a_word(env):
    a,b = run_ranks(ends_by_itself, 2, errors='return', env=env)
    assert a==(1,'rank 1 ended with exit status 3') and b.message=='ended with exit status 3, without an exception'

def stuck():
    "Until the launcher has asked where this rank is"
    while (report_folder()/'stack.txt').read_text().count('in stuck')<1: threading.Event().wait(.01)
    os._exit(3)

set_timeout = getattr(dist, 'set_timeout', dist.distributed_c10d._set_pg_timeout) # torch 2.6 has only the second

class Hang(Callback):
    "Rank 2 does not come to the next exchange, and the others' patience is short from now on"
    def after_step(self):
        set_timeout(timedelta(seconds=2), current_group())
        self.learn.runner.links.timeout_s = 2
        if group_rank()==2: stuck()

def hangs():
    learn = make()
    with learn.distrib_ctx(): learn.fit(1, cbs=Hang)

@pytest.mark.parametrize('env,messages', [({}, 'timed out: 2 s without a word from rank '),
                                      (dict(LOCAL_WORLD_SIZE='1'), '')]) # then gloo's own words
def test_a_rank_that_hangs_is_found(env, messages):
    "One rank says what it has waited for, the launcher where each of them is"
    found = run_ranks(hangs, 3, env=env, errors='return')
    first, = [o for o in found[:2] if o.kind=='TimeoutError']
    assert first.message.startswith(f'a rank did not come: {messages}')
    assert all(o.kind=='RankError' or o is first for o in found[:2])
    assert all(o.where.startswith('waited in ') and 'in hangs: with learn' in o.where for o in found[:2])
    assert found[2].where.startswith('was at ') and 'in stuck: while' in found[2].where
    lines = explain(sorted(found, key=lambda o: (o.cause,o.time)))
    assert len(lines)==4 and [o[:8] for o in lines[1:]]==[f'  rank {r}' for r in range(3)]

@pytest.mark.slow
@pytest.mark.parametrize('fault,phase', [('stop','after the context'), pytest.param('SIGKILL','saving', marks=pytest.mark.long)])
def test_faults_through_the_launcher(fault, phase, monkeypatch):
    "A sample of `python tests/faults.py`, whose table is in nbs/tutorials/failures.ipynb. A link is cut in test_machines.py"
    monkeypatch.setattr(faults, 'timeout_s', 1)
    outcome = faults.run(fault, phase, limit_s=250)
    assert faults.complaints(outcome)==[], outcome

def test_a_fault_in_a_worker_of_a_loader(tmp_path):
    "The report has its exception, and its line"
    found = run_ranks(faults.train, 2, 'raise', 'loader worker', errors='return', env=dict(FAULT_DIR=tmp_path))
    lines = explain(sorted(found, key=lambda o: (o.cause,o.time)))
    outcome = faults.Outcome('raise', 'loader worker', 0., 1, '\n'.join(lines), True)
    assert faults.complaints(outcome)==[], outcome

def raised(f):
    try: f()
    except Exception as e: return e

def test_what_is_no_consequence():
    "An error from C++, but not from gloo. Others are in the notebook of env"
    assert not is_consequence(raised(lambda: torch.ones(2)@torch.ones(3)))

def wrong_gpu(plain):
    "A GPU that is not there, on rank 1 alone; then the ranks go on together"
    device,learn = 99 if rank_distrib()==1 else None,make()
    try:
        with process_group(device) if plain else learn.distrib_ctx(device=device): learn.fit(1)
    except Exception as e: err = type(e).__name__,getattr(e, 'kind', None),'device=99' in str(e),in_group()
    with learn.distrib_ctx(): learn.fit(1)
    return err,len(learn.recorder.losses)

def leaves_early(how, phase):
    mine = rank_distrib()==(0 if phase=='rank0_first' else 1)
    def leave():
        if mine and how=='_exit': os._exit(0)
        if mine and how=='exit': raise SystemExit(0)
        if mine: raise ImportError('no such module')
    try:
        if phase=='before': leave()
        if phase=='rank0_first': rank0_first(leave)
        if phase=='joins': rank0_first(int) if not mine else leave()
        learn = make()
        with learn.distrib_ctx():
            leave()
            learn.fit(1)
    except RankError as e: return str(e).splitlines()[0]

@pytest.mark.parametrize('phase,hows', [('before',['exit','raise']), ('rank0_first',['_exit','exit']), ('joins',['_exit','raise']),
                                        ('training',['_exit','exit'])])
def test_a_rank_that_leaves_is_not_waited_for(phase, hows):
    "Others are in tests of `rank0_first`, of a rank that is gone, and in the notebook of env"
    r = int(phase!='rank0_first')
    gone = f'rank {r} left with status 0{env._absent}'
    left = f'rank {r} left by sys.exit(0)' if phase in ('rank0_first','training') else gone
    want = dict(_exit=gone, exit=left, **{'raise': f'rank {r} failed with ImportError: no such module'})
    for o in hows: assert run_ranks(leaves_early, 2, o, phase, errors='return')[1-r]==want[o]

# --- patience -----------------------------------------------------------------------------------------------------

def within_short_patience():
    "A shorter `timeout_s` within a group that waits longer, and a context that takes over its group's"
    learn = make()
    with process_group(timeout_s=77), learn.distrib_ctx(): assert (group_timeout(),learn.runner.links.timeout_s)==(77,77)
    with process_group(timeout_s=77):
        with process_group(timeout_s=9): assert group_timeout()==9
        assert group_timeout()==77
        dist.barrier()
        with process_group(timeout_s=4):
            if group_rank()==0: assert raised(lambda: dist.all_reduce(torch.ones(1), group=current_group()))
            else: wait_key(shared_store(), 'heard', 60)
        shared_store().set('heard', 'yes')

def test_timeout_within_a_group(): run_ranks(within_short_patience, 2)

def rank_reads_files(path):
    "Rank 0, which alone writes, does so when the others are at the end of the context"
    learn,whole,store = make(path=path),rank0.written,shared_store()
    def late(p):
        assert all(wait_key(store, f'ahead/{r}', 60) for r in (1,2))
        threading.Event().wait(.3) # they would have read by now
        return whole(p)
    rank0.written = late
    try:
        with learn.no_logging(), learn.distrib_ctx():
            files = [learn.save('a'),learn.save('b')]
            there = [o.exists() for o in files]
            store.set(f'ahead/{rank_distrib()}', 'yes')
    finally: rank0.written = whole
    for o in files: torch.load(o, weights_only=False) # by other means than ours, which wait by themselves
    return there

def test_files_of_rank_0_are_there_after_the_context(tmp_path):
    assert run_ranks(rank_reads_files, 3, tmp_path)==[[True,True],[False,False],[False,False]]
