"Checkpoints and files of a sharded model: each rank writes and reads its rows"
import os, random, shutil, signal
from functools import partial
import pytest, torch
from learnerdist.all import Callback, DataLoaders, Learner, Lookahead, group_rank, rank_distrib
from learnerdist.checkpoint import snapshot
from learnerdist.core import shards
from learnerdist.core.env import count
from learnerdist.testing import RanksError, run_ranks
import test_sharded as sharded
from harness import close, error_of, in_group, needs_fsdp2
from test_sharded import Net, case, context, make

pytestmark = [needs_fsdp2,pytest.mark.slow]
def net(): return Net(tied=True)
def ahead(p, lr): return Lookahead(torch.optim.AdamW(p, lr), k=2)
train = partial(sharded.train, model=net, opt=ahead, n_epoch=2) # of 3 steps

def without_gather(folder):
    "A run whose checkpoints gather nothing"
    def forbidden(*_): raise AssertionError('gathered')
    old,shards.full_tensor = shards.full_tensor,forbidden
    try: return train(folder, True)
    finally: shards.full_tensor = old

@pytest.fixture(scope='module')
def two(tmp_path_factory):
    "On two ranks: what a whole run comes to, and the folder of one that was stopped after step 5"
    path = tmp_path_factory.mktemp('two')
    whole = run_ranks(in_group, 2, without_gather, path/'whole')[0]
    with pytest.raises(RanksError, match='on purpose'): run_ranks(in_group, 2, train, path/'a', True, 5)
    return whole,path/'a'

# --- any number of ranks ----------------------------------------------------------------------------------------------------

def sizes(folder): return {o.name: o.stat().st_size for o in folder.iterdir()}

def test_two_ranks_write_and_any_number_reads(two, tmp_path):
    "Bitwise on as many ranks, else within rounding: sharded, and by DDP. Each rank writes its rows"
    whole,stopped = two
    found = snapshot.snapshots(stopped/'ck')[-1]
    info = snapshot.read_manifest(found)
    assert info['shards']==2 and info['format']==snapshot.format_version
    files = sizes(found)
    assert {*files}=={'manifest.json','model.pt','state.pt','rows_0.pt','rows_1.pt'}
    assert max(files['rows_0.pt'], files['rows_1.pt'])<.65*(files['rows_0.pt']+files['rows_1.pt'])
    for i,(W,how) in enumerate([(2,True), (3,True), (2,False)]):
        shutil.copytree(stopped, tmp_path/f'b{i}')
        for o in run_ranks(in_group, W, train, tmp_path/f'b{i}', how): close(o, whole, 0 if i==0 else 1e-9, f'{W}, {how}')

@pytest.mark.long
@pytest.mark.parametrize('W,shard,n,others', [(3, True, 3, [(2,True),(1,False)]), (4, True, 4, [(3,True)]),
                                              (4, dict(replicas=2), 2, [(1,False)])])
def test_written_by_more(W, shard, n, others, two, tmp_path):
    with pytest.raises(RanksError, match='on purpose'): run_ranks(in_group, W, train, tmp_path/'a', shard, 5)
    assert snapshot.read_manifest(snapshot.snapshots(tmp_path/'a/ck')[-1])['shards']==n
    for V,how in [*others,(W,shard)]:
        shutil.copytree(tmp_path/'a', tmp_path/f'{V}')
        for o in run_ranks(in_group, V, train, tmp_path/f'{V}', how): close(o, two[0], 1e-9, f'{V}, {how}')

def test_a_checkpoint_of_ddp_goes_on_sharded(two, tmp_path):
    "In the background; weights alone are read by `load`"
    with pytest.raises(RanksError, match='on purpose'): run_ranks(in_group, 2, train, tmp_path/'a', False, 5)
    for o in run_ranks(in_group, 2, train, tmp_path/'a', True, background=True): close(o, two[0])
    alone = make(case(model=net))
    alone.path = tmp_path/'a'
    close(dict(alone.load('ck').model.state_dict()), two[0]['w'])

def saved(folder, shard):
    learn = make(case(n=24, model=net))
    learn.path = folder
    with learn.no_logging(), context(learn, shard):
        learn.fit(1)
        learn.save('a')
        learn.save('a.safetensors')
        assert learn.load('a.safetensors') and learn.load('a')
        learn.fit(1)
    return [p.detach().clone() for p in learn.model.parameters()]

def test_one_file_is_that_of_a_whole_model(tmp_path):
    "Byte for byte the tensors that DDP saves, shared ones shared"
    ddp,own = [run_ranks(in_group, 2, saved, tmp_path/k, k=='b')[0] for k in 'ab']
    close(own, ddp)
    x,y = [torch.load(tmp_path/o/'models/a.pth') for o in 'ab']
    close(dict(y['model']), dict(x['model']))
    assert list(x)==list(y)
    w = y['model']
    assert w['head.weight'].data_ptr()!=w['scale'].data_ptr() and [*w]==[*x['model']]
    again = Learner(DataLoaders([], []), net().double(), path=tmp_path/'b')
    assert again.load('a').model.scale.dtype==torch.float64 and again.load('a.safetensors')

# --- failures ---------------------------------------------------------------------------------------------------------------

class Full(Callback):
    "The disk of one rank is full from step `at` on"
    def __init__(self, rank, at): self.rank,self.at = rank,at
    def before_fit(self): self.old = snapshot.save_sealed
    def cleanup(self): snapshot.save_sealed = self.old
    def before_batch(self):
        if self.training and self.learn.train_iter==self.at and group_rank()==self.rank: snapshot.save_sealed = self.fail
    def fail(self, *_): raise OSError(28, 'No space left on device')

def failing(folder):
    "What is said on this rank where rank 0 cannot write, and where rank 1 cannot, in the background"
    messages = []
    for rank in (0,1):
        for _ in range(rank_distrib()): count('snapshot') # as on a rank that has begun another one when it hears of a failure
        messages.append(error_of(in_group, train, folder/str(rank), True, cbs=[Full(rank, 3)], background=rank==1))
    return messages

def test_a_rank_that_cannot_write_ends_the_run(tmp_path):
    "With the cause on all ranks; the checkpoint before it is the newest, and good"
    for rank,messages in enumerate(zip(*run_ranks(failing, 2, tmp_path))):
        assert 'No space left on device: the checkpoint was not written; earlier ones are as they were' in messages[rank]
        assert f'rank {rank} failed with OSError' in messages[1-rank]
        assert [o.name for o in (tmp_path/str(rank)/'ck').glob('epoch*')]==['epoch_0000-step_00000002']
        assert snapshot.newest_good(tmp_path/str(rank)/'ck').info['step']==2

def test_damage_is_noticed_before_it_is_read(two, tmp_path):
    whole,stopped = two
    older,newer = snapshot.snapshots(stopped/'ck')
    good = torch.load(newer/'rows_1.pt')
    for damage in ('bit','short','gone','code'):
        shutil.copytree(stopped, tmp_path/damage)
        file = tmp_path/damage/'ck'/newer.name/'rows_1.pt'
        data = bytearray(file.read_bytes())
        if damage=='bit': data[len(data)//2] ^= 1
        if damage in ('bit','short'): file.write_bytes(data[:-9] if damage=='short' else data)
        if damage=='gone': file.unlink()
        if damage=='code': torch.save(dict(good, rows=[os.system]), file)
        found = snapshot.newest_good(tmp_path/damage/'ck')
        assert found.folder.name==older.name and 'rows_1.pt is' in found.bad[0]
    close(run_ranks(in_group, 2, train, tmp_path/'bit', True)[0], whole, 0)

class Kill:
    "Ends this process at its `n`-th operation on files of a checkpoint"
    def __init__(self, n):
        self.left = n
        for name in ('fsync','replace','rename','open'): setattr(os, name, self.counting(getattr(os, name)))
    def counting(self, f):
        def g(*args, **kw):
            if any('ck' in str(o) or isinstance(o, int) and f.__name__=='fsync' for o in args[:2]):
                self.left -= 1
                if self.left<=0: os.kill(os.getpid(), signal.SIGKILL)
            return f(*args, **kw)
        return g

def killed(folder, kills, background):
    if group_rank() in kills: Kill(kills[group_rank()])
    return train(folder, True, background=background, every=1)

def soak(folder, seed, rounds, background):
    "Runs that are killed while they write, each going on from the one before; how many steps were done at each kill"
    rng,steps = random.Random(seed),[]
    for _ in range(rounds):
        kills = {rng.randrange(2): rng.randrange(1, 60)}
        run_ranks(in_group, 2, killed, folder, kills, background, errors='return')
        found = snapshot.newest_good(folder/'ck') if (folder/'ck').exists() else None
        steps.append(found and found.info['step'])
    return steps,run_ranks(in_group, 2, train, folder, True, every=1)

@pytest.mark.parametrize('seed,rounds,background', [(1,2,False), pytest.param(2, 12, False, marks=pytest.mark.long),
                                                    pytest.param(3, 12, True, marks=pytest.mark.long)])
def test_killed_while_writing(seed, rounds, background, two, tmp_path):
    "At any moment a good checkpoint is there, and the run that goes on is the one that was never killed"
    steps,ranks = soak(tmp_path/'a', seed, rounds, background)
    known = [o or 0 for o in steps]
    assert known==sorted(known) and max(known)>0
    close(ranks, [two[0]]*2, 0)
    assert not [*(tmp_path/'a/ck').glob('.*.tmp')]
