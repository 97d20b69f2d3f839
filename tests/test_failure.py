"One rank fails: within seconds the others raise an error that names it and carries its exception"
import itertools
import threading
from datetime import timedelta

import faults
import pytest
import torch
import torch.distributed as dist
from test_agreement import Raise, make, weights

from learnerdist.all import *
from learnerdist.core.env import wait_key
from learnerdist.core.env import group_rank,in_group,launch_store
from learnerdist.core.env import current_group
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

rounds = itertools.count()

def all_out(k):
    "Whether every rank has left the context of round `k`; this one stays alive meanwhile, with its exception and all that it holds"
    store = launch_store()
    store.set(f'out/{k}/{rank_distrib()}', 'yes')
    return all(wait_key(store, f'out/{k}/{r}', 15) for r in range(num_distrib()))

def caught(learn, rank, event, *cbs):
    try:
        with learn.distrib_ctx(seed=1): learn.fit(2, cbs=[Raise(event, Broken('no luck'), rank), *cbs])
    except Exception as e:
        err = e
        assert all_out(next(rounds))
    return type(err).__name__,getattr(err, 'rank', None),getattr(err, 'kind', None),str(err),in_group()

def run_failures(cases, bn): return [caught(make(bn=bn), *case) for case in cases]

def check(results, cases):
    for r,mine in enumerate(results):
        for (rank,event,*_),(kind,failed,of,msg,group) in zip(cases, mine):
            assert not group, event
            if r==rank: assert (kind,msg)==('Broken','no luck')
            else:
                assert (kind,failed,of)==('RankError',rank,'Broken'), (event,kind,msg)
                assert 'no luck' in msg and 'test_agreement.py' in msg and 'in act' in msg

events = ['before_fit','before_epoch','before_train','before_batch','after_pred','after_loss','after_backward','before_step','after_step',
          'after_batch','after_train','before_validate','after_validate','after_epoch','after_fit']

def test_wherever_the_others_are():
    cases = [(rank,e) for e in events if e!='after_fit' for rank in (0,1)]
    check(run_ranks(run_failures, 2, cases, False, timeout_s=300), cases)

def test_three_ranks_in_batchnorm_metric_barrier_or_computing():
    cases = [(1,'after_pred'), (2,'after_validate'), (0,'after_epoch',AtBarrier()), (1,'before_validate',Busy())]
    check(run_ranks(run_failures, 3, cases, True, timeout_s=300), cases)

def in_forward():
    learn = make(bn=True)
    forward = learn.model[2].forward
    def fail(x):
        if group_rank()==1 and learn.training: raise Broken('in the model')
        return forward(x)
    learn.model[2].forward = fail
    return caught(learn, None, 'after_cancel_fit')

def test_in_the_model():
    "The exception's frames hold the wrapped model, and it holds the group"
    a,b = run_ranks(in_forward, 2)
    assert a[:3]==('RankError',1,'Broken') and b[0]=='Broken'

def both_fail():
    class Each(Callback):
        def after_epoch(self): raise Broken(f'on {group_rank()}')
    learn = make()
    try:
        with learn.distrib_ctx(): learn.fit(1, cbs=Each)
    except Exception as e: return type(e).__name__,str(e)

def test_each_rank_keeps_its_own_exception(): assert run_ranks(both_fail, 2)==[('Broken','on 0'),('Broken','on 1')]

def again():
    "After a failure that the script has caught, the next context is a fresh one"
    first = caught(make(), 1, 'after_loss')[0]
    learn = make()
    with learn.distrib_ctx(seed=1): learn.fit(1)
    return first,len(learn.recorder.losses),weights(learn).tolist()

def test_the_next_context_works():
    a,b = run_ranks(again, 2)
    assert (a[0],b[0])==('RankError','Broken')
    assert a[1:]==b[1:]

def within_a_group():
    "A group that was opened around the context is closed too: else the others would wait in it"
    with process_group(): return caught(make(), 1, 'before_validate')

def test_within_a_group_of_ours():
    a,b = run_ranks(within_a_group, 2)
    assert a[:3]==('RankError',1,'Broken') and b[0]=='Broken'

def leaves():
    learn = make()
    try:
        with learn.distrib_ctx(): learn.fit(1, cbs=Raise('after_loss', SystemExit(0), 1))
    except RankError as e: return e.rank,e.kind

def test_a_rank_that_exits_in_the_middle(): assert run_ranks(leaves, 2)==[(1,'SystemExit'), None]

def users_group():
    setup_distrib()
    first = caught(make(), 1, 'after_loss')[:1]
    t = torch.ones(1)
    dist.all_reduce(t)
    return first,t.item(),dist.is_initialized()

def test_a_group_of_the_users_stays_open(): assert run_ranks(users_group, 2)==[(('RankError',),2.,True), (('Broken',),2.,True)]

def ends_by_itself():
    import os
    learn = make()
    try:
        with learn.distrib_ctx():
            if group_rank()==1: os._exit(3)
            learn.fit(1)
    except Exception as e: return isinstance(e, RuntimeError),str(e)

@pytest.mark.parametrize('env', [{}, dict(LOCAL_WORLD_SIZE='1')]) # the second: each rank on a machine of its own
def test_a_rank_that_is_gone_without_a_word(env):
    a,b = run_ranks(ends_by_itself, 2, errors='return', env=env)
    assert a[0] and 'peer' in a[1]
    assert '3' in b.message

def stuck():
    while not launch_store().check(['found']): threading.Event().wait(.01)

class Hang(Callback):
    "Rank 2 does not come to the next exchange, and the others' patience is short from now on"
    def after_step(self):
        dist.set_timeout(timedelta(seconds=2), current_group())
        self.distributed_trainer.links.timeout_s = 2
        if group_rank()==2: stuck()

def hangs():
    learn = make()
    try:
        with learn.distrib_ctx(): learn.fit(1, cbs=Hang)
    except Exception as e:
        launch_store().set('found', 'yes')
        return type(e).__name__,str(e)

@pytest.mark.parametrize('env,said', [({}, 'timed out: 2 s without a word from rank '),
                                      (dict(LOCAL_WORLD_SIZE='1'), 'Timed out waiting 2000ms')])
def test_a_rank_that_hangs_is_found(env, said):
    results = run_ranks(hangs, 3, env=env)
    (_,text), = [o for o in results if o[0]=='TimeoutError']
    assert text.startswith(f'a rank did not come: {said}') and 'rank 2 was at' in text
    place = next(o for o in text.splitlines()[1:] if 'rank 2' in o)
    assert 'test_failure.py' in place and 'in stuck: while not launch_store()' in place
    waited = [o for o in text.splitlines() if ' waited in ' in o]
    assert waited and all('test_failure.py' in o and 'in hangs: with learn' in o for o in waited)
    assert all(o[0] in ('TimeoutError','RankError') and 'rank 2 was at' in o[1] for o in results)

@pytest.mark.parametrize('fault,phase', [('segfault','training'), ('SIGKILL','saving'), ('raise','loader worker')])
def test_faults_through_the_launcher(fault, phase):
    "A sample of `python tests/faults.py`, whose table is in nbs/tutorials/failures.ipynb"
    outcome = faults.run(fault, phase)
    assert faults.complaints(outcome)==[], outcome
