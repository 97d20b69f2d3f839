"`save` writes once, whole or not at all, and waits for nobody; the `load` that follows sees the file on any rank"
import contextlib,io,operator,os,resource,stat,sys,time
from functools import partial
from pathlib import Path
import pytest, torch
from torch import nn
from torch.nn import functional as F
import fastai.basics as fb
from fastai.callback.tracker import SaveModelCallback as FastaiSave
from learnerdist.all import *
from learnerdist.fastai import load_learner
from learnerdist.core import env
from learnerdist.core.weights import save_sealed
from learnerdist.testing import run_ranks

def make(path, rank=0, value=None, opt=torch.optim.SGD):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(16, 4, generator=g)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    if value is not None: nn.init.constant_(model[0].weight, value)
    items = list(zip(x, x[:,:1]))
    return Learner(DataLoaders(TfmdDL(items, 4, shuffle=True), TfmdDL(items, 4), path=path), model, F.mse_loss, opt, lr=.1)

def weight(learn): return learn.model[0].weight.flatten()[0].item()
def set_weight(learn, v): nn.init.constant_(learn.model[0].weight, v)

def litter(path): return sorted(o.name for o in Path(path).rglob('*') if o.is_file() and o.suffix!='.pth' and o.suffix!='.flag')

# --- alone ------------------------------------------------------------------------------------------------------------------

def test_plain_keys_and_tensors_only(tmp_path):
    learn = make(tmp_path)
    with learn.no_logging(): learn.fit(1)
    old = os.umask(0o027)
    try: file = learn.save('a')
    finally: os.umask(old)
    assert file==tmp_path/'models/a.pth' and stat.S_IMODE(file.stat().st_mode)==0o640 # that of any file
    state = torch.load(file, weights_only=True)
    assert list(state)==['model','opt'] and list(state['model'])==list(learn.model.state_dict())
    file = learn.save('b', with_opt=False)
    assert list(torch.load(file, weights_only=True))==list(learn.model.state_dict())
    nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).load_state_dict(torch.load(file, weights_only=True)) # without us

def test_safetensors(tmp_path, monkeypatch):
    "A file that other programs read, with tied weights under both names, and one that others wrote"
    safe = pytest.importorskip('safetensors.torch')
    learn = make(tmp_path)
    learn.model.append(learn.model[2])
    state = learn.model.state_dict()
    file = learn.save('a.safetensors')
    found = safe.load_file(file)
    assert {*found}=={*state} and all(torch.equal(found[k], o) for k,o in state.items())
    safe.save_file({k: o.clone()+1 for k,o in state.items()}, file)
    assert torch.equal(learn.load('a.safetensors').model[0].weight, found['0.weight']+1)
    monkeypatch.setitem(sys.modules, 'safetensors.torch', None)
    with pytest.raises(ImportError, match='pip install safetensors'): learn.save('b.safetensors')
    assert learn.load(learn.save('c').with_suffix('')) is learn

def test_absolute_path_and_folders(tmp_path):
    learn = make(tmp_path/'there')
    assert learn.save(tmp_path/'else'/'where')==tmp_path/'else'/'where.pth'
    assert learn.save('deep/er').exists()
    assert learn.save('v1.5')==tmp_path/'there/models/v1.5.pth'
    learn.load('v1.5')
    learn.load(tmp_path/'else'/'where')

def test_optimizer_goes_on(tmp_path):
    def order(learn): # the same batches for both
        torch.manual_seed(1)
        with learn.no_logging(): learn.fit(1)
    a = make(tmp_path, opt=torch.optim.Adam)
    order(a)
    a.save('a')
    b,c = (make(tmp_path, rank=5, opt=torch.optim.Adam) for _ in range(2))
    b.load('a')
    c.load('a', with_opt=False)
    assert b.opt is not None and c.opt is None
    opt_of_a = a.opt
    assert a.load('a') is a and a.opt is opt_of_a # a trained learner keeps its optimizer
    for learn in (a, b, c): order(learn)
    assert all(torch.equal(p, q) for p,q in zip(a.model.parameters(), b.model.parameters()))
    assert not torch.equal(a.model[0].weight, c.model[0].weight)

def test_absent_file_and_other_model(tmp_path):
    learn = make(tmp_path)
    with pytest.raises(FileNotFoundError, match='absent.pth'): learn.load('absent')
    os.mkfifo(learn.save('pipe').with_name('fifo.pth')) # whose writer nobody waits for
    with pytest.raises(ValueError, match='fifo.pth is not a regular file'): learn.load('fifo')
    learn.save('a')
    other = make(tmp_path)
    other.model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match='Unexpected key'): other.load('a')
    other.load('a', strict=False)
    assert torch.equal(other.model[0].weight, learn.model[0].weight)

def test_a_disk_that_is_full_at_any_byte(tmp_path):
    "Also where torch then cannot end its archive, and raises another error"
    data = {f'w{i}': torch.ones(50, i+1) for i in range(40)}
    size,_ = save_sealed(data, tmp_path/'a')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for n in range(100, size, 997):
        resource.setrlimit(resource.RLIMIT_FSIZE, (n,limits[1]))
        try:
            with pytest.raises(OSError, match='File too large'): save_sealed(data, tmp_path/'b')
        finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)

def test_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    learn = make(tmp_path)
    old = learn.save('a').read_bytes()
    def broken(o, f):
        f.write(b'half')
        raise KeyboardInterrupt
    monkeypatch.setattr(torch, 'save', broken)
    for o in ('a','new'):
        with pytest.raises(KeyboardInterrupt): learn.save(o)
    assert (tmp_path/'models/a.pth').read_bytes()==old
    assert [o.name for o in (tmp_path/'models').iterdir()]==['a.pth']

# --- on several ranks -------------------------------------------------------------------------------------------------------

class Saves(Callback):
    "Saves in the midst of a fit, with the model wrapped"
    order = 30
    def __init__(self, everywhere=True): self.everywhere = everywhere
    def after_step(self):
        if self.everywhere or not rank_distrib(): self.learn.save('step')

def rank_saves_in_fit(path):
    learn,res = make(path, rank_distrib()),dict(plain=list(make(path).model.state_dict()))
    with learn.no_logging(), learn.distrib_ctx(seed=1):
        learn.fit(1, cbs=Saves(everywhere=True))
        keys = list(torch.load(path/'models/step.pth', weights_only=True)['model'])
        learn.fit(1, cbs=Saves(everywhere=False))
        mine = {k:v.clone() for k,v in learn.model.state_dict().items()}
        learn.save('end')
        learn.load('end')
        res['same'] = all(torch.equal(mine[k], v) for k,v in learn.model.state_dict().items())
    learn.save('out')
    for o in ('out','end'): learn.load(o)
    res['keys'] = keys
    return res

def rank_counts(path):
    "Who writes: each rank counts the files that it gives to torch.save (which also pickles tensors on their way to other ranks)"
    learn,n,save = make(path, rank_distrib()),[],torch.save
    def counted(o, f, *args, **kw):
        if hasattr(f, 'name'): n.append(f)
        return save(o, f, *args, **kw)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(torch, 'save', counted)
        learn.save('out')
        with learn.no_logging(), learn.distrib_ctx():
            learn.save('in')
            learn.fit(1)
            learn.save('in')
        with process_group(): learn.save('group')
    return len(n)

def rank_failed_save(path, inside):
    "Rank 0's disk is full at the second save"
    rank,res = rank_distrib(),{}
    learn = make(path, rank, value=7.)
    with learn.distrib_ctx() if inside else contextlib.nullcontext(), pytest.MonkeyPatch.context() as m:
        learn.save('a')
        if rank==0: m.setattr(torch, 'save', no_space)
        for name in ('a','new'):
            try:
                learn.save(name)
                learn.load(name)
            except Exception as e:
                trace = getattr(e, 'trace', '')
                res[name] = type(e).__name__,str(e).split('\n')[0],getattr(e, 'rank', None),'no_space' in trace
    return res

def no_space(o, f):
    f.write(b'half')
    raise OSError('no space left')

def rank_resumes(path):
    "The usual way to go on, or to start: a missing file is missing on every rank, at once"
    learn = make(path)
    try: learn.load('not there')
    except FileNotFoundError: missing = True
    with learn.no_logging(), learn.distrib_ctx(): learn.fit(1)
    learn.save('not there')
    learn.load('not there')
    return missing,rank_distrib(),len(learn.recorder.losses)

def rank_saves(path):
    "One after the other, each in a folder"
    runs = dict(fit=rank_saves_in_fit, counts=rank_counts, full=partial(rank_failed_save, inside=False),
                full_inside=partial(rank_failed_save, inside=True), resumes=rank_resumes, apart=rank_own_folder)
    return {k: f(path/k) for k,f in runs.items()}

def test_saves_and_loads_on_ranks(tmp_path):
    zero,one = run_ranks(rank_saves, 2, tmp_path, timeout_s=120)
    for r in (zero,one):
        assert r['fit']['same'] and r['fit']['keys']==r['fit']['plain']
        assert r['resumes']==(True,int(r is one),2) # a missing file is missing on every rank
    assert (zero['counts'],one['counts'])==(4,0) and litter(tmp_path/'fit')==[]
    for k in ('full','full_inside'): # a failed save reaches the ranks that load
        for name in ('a','new'):
            assert zero[k][name][:2]==('OSError','no space left')
            assert one[k][name]==('RankError','rank 0 failed with OSError: no space left',0,True)
        assert weight(make(tmp_path/k).load('a'))==7 and litter(tmp_path/k)==[] and not (tmp_path/k/'models/new.pth').exists()
    messages,at = one['apart'],tmp_path/'apart'
    assert zero['apart'] is None and f'this rank loads {at}/1/models/tmp.pth, which is not there' in messages
    assert f'rank 0 loads {at}/0/models/tmp.pth' in messages and 'distrib_ctx' in messages

def rank_0_alone_saves(path):
    "By both Learners, over a file of an earlier run; rank 0 takes its time. Later all ranks save, then rank 0 alone again"
    return [saves_alone(make(path/'ours')),saves_alone(fastai_learner(path/'fastai'), load_learner)]

def saves_alone(learn, load_learner=None): # fastai's exports, too
    res = []
    for i,everywhere in enumerate([False,True,False,False,True]):
        set_weight(learn, 10*rank_distrib()+i)
        if rank_distrib()==0: time.sleep(.1)
        if everywhere or rank_distrib()==0: learn.save('a')
        set_weight(learn, -1)
        learn.load('a')
        res.append(weight(learn))
        if load_learner:
            set_weight(learn, 10*rank_distrib()+i)
            if rank_distrib()==0: time.sleep(.1)
            if everywhere or rank_distrib()==0: learn.export('e')
            res.append(weight(load_learner(learn.path/'e')))
        with process_group(): distrib_barrier()
    return res

class Rows(list): # as `export` wants it
    def new_empty(self): return Rows()

def fastai_learner(path):
    learn = make(path)
    dl = fb.DataLoader(Rows([(torch.ones(4),torch.ones(1))]*4), bs=2)
    return fb.Learner(fb.DataLoaders(dl, dl), learn.model, F.mse_loss, path=path)

def test_a_file_of_an_earlier_run_is_never_read_after_a_save(tmp_path):
    "Whether rank 0 has saved alone, or all ranks have, and for good"
    learn = fastai_learner(tmp_path/'fastai')
    learn.export('e')
    for o in (learn,make(tmp_path/'ours', value=77.)): o.save('a')
    zero,one = run_ranks(both, 2, rank_0_alone_saves, rank_names_alike, tmp_path)
    assert zero==one and zero[0]==[[0,1,2,3,4],[0,0,1,1,2,2,3,3,4,4]]
    # the one that was asked for: what `save` or `SaveModelCallback` has written in this run; of earlier ones the newer
    assert [a for a,_ in zero[1]]==[b for _,b in zero[1]]

def both(f, g, path): return f(path),g(path)

def named_alike(learn, save_model, ctx):
    "A `Checkpoint` and files under one name: in one fit, then one after the other. The weights that are loaded, and expected"
    res = []
    def loads(name, expected):
        set_weight(learn, -1)
        res.append((weight(learn.load(name)),expected))
    with ctx:
        first = Kept()
        learn.fit(2, cbs=[save_model(monitor='valid_loss', comp=operator.gt, fname='m'),Checkpoint('m'),first]) # the first is best
        res.append((weight(learn),first.seen[0]))
        distrib_barrier() # rank 0 writes this file again, which the others may be about to read
        set_weight(learn, 5)
        learn.save('m')
        loads('m', 5)
        learn.save('models')
        loads('models', 5)
        with process_group(): distrib_barrier()
        for k in [k for k in env._counts if k.startswith('save ')]: del env._counts[k] # as if an earlier run had written them
        learn.fits_done = 0
        loads('m', 5)
        last = Kept()
        learn.fit(3, cbs=[Checkpoint('m', resume=True),last])
        loads('m', last.seen[-1])
    return res

class Kept(Callback):
    "The weight after each epoch, before others react"
    order = -20
    def __init__(self): self.seen = []
    def after_epoch(self): self.seen.append(weight(self.learn))

def rank_names_alike(path):
    kinds = (make(path/'ours'),SaveModelCallback),(fastai_learner(path/'fastai'),FastaiSave)
    res = []
    for learn,save in kinds:
        with learn.no_logging() if hasattr(learn, 'no_logging') else contextlib.nullcontext():
            res += named_alike(learn, save, learn.distrib_ctx(seed=1))
    return res

def rank_own_folder(path):
    own = path/str(rank_distrib())
    learn = make(own)
    learn.save('tmp')
    try: learn.load('tmp')
    except ValueError as e: return str(e)

def rank_late(path):
    "Rank 0 loads when another one has said that it waits"
    learn,messages,say = make(path),io.StringIO(),env._print_once
    def noted(*args):
        say(*args)
        env.shared_store().set('messages', 'yes')
    env._print_once = noted
    learn.save('a')
    if rank_distrib()==0: assert env.wait_key(env.shared_store(), 'messages', 60)
    with contextlib.redirect_stderr(messages): learn.load('a')
    return messages.getvalue()

@pytest.mark.slow
def test_a_rank_that_waits_says_for_what(tmp_path):
    "One of those that wait"
    messages = run_ranks(rank_late, 3, tmp_path, timeout_s=120)
    assert ''.join(messages).count('waits for rank 0 to load')==1 and f'{tmp_path}/models/a.pth, as all ranks do' in ''.join(messages)
