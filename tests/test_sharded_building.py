"Models that no rank holds whole: on the meta device, with weights from a file"
import json, re, zlib
from importlib.util import find_spec
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from learnerdist.all import EMA, DataLoaders, Learner, distrib_barrier, group_rank, group_size, process_group, rank_distrib
from learnerdist.core.weights import save_sealed, save_tensors
from learnerdist.core import weights
from learnerdist.core.shards import full_tensor, map_tensors
from learnerdist.distributed import sharded
from learnerdist.learner import saving
from learnerdist.testing import run_ranks
from harness import close, error_of, in_group, needs_fsdp2, on_2_and_3
from scenes import default_dtype
from test_sharded import F64, case, enters, run

pytestmark = pytest.mark.slow

class Block(nn.Module):
    def __init__(self, n=41, table='cpu'):
        super().__init__()
        self.a,self.b = nn.Linear(n, 50),nn.Linear(50, n, bias=False)
        scale = torch.linspace(.5, 1.5, n*30, dtype=F64, device=table) # no file has it
        self.register_buffer('scale', scale.view(30, n), persistent=False)
        self.register_buffer('seen', torch.zeros(()))
    def forward(self, x):
        if self.training: self.seen += 1
        return x+self.b(self.a(x*self.scale[3]).tanh())

class Net(nn.Module):
    "Rows that do not divide by the ranks, tied weights of the root, buffers in and out of files"
    def __init__(self, **kw):
        super().__init__()
        self.inp,self.layers,self.out = nn.Linear(6, 41, bias=False),nn.ModuleList([Block(**kw) for _ in range(3)]),nn.Linear(41, 6)
        self.emb = nn.Linear(50, 41, bias=False)
        self.again = nn.Linear(50, 41, bias=False)
        self.again.weight = self.emb.weight
        self.layers.apply(lambda m: nn.init.trunc_normal_(m.weight, std=.3) if isinstance(m, nn.Linear) else None)
    def forward(self, x):
        x = self.inp(x)
        for o in self.layers: x = o(x)
        return self.out(F.linear(F.linear(x, self.emb.weight.t()), self.again.weight))

def whole_net():
    with default_dtype(F64):
        torch.manual_seed(5)
        return Net()

def meta_net(**kw):
    with torch.device('meta'): return Net(**kw).double()

def files(folder):
    "The whole model in each kind of file"
    state = whole_net().state_dict()
    save_sealed(dict(model=state, opt={}), folder/'a.pth')
    torch.save(state, folder/'b.pth')
    save_tensors(state, folder/'c.safetensors')
    parts = {'one.safetensors': [k for k in state if 'layers' in k], 'two.safetensors': [k for k in state if 'layers' not in k]}
    for k,names in parts.items(): save_tensors({n: state[n] for n in names}, folder/k)
    index = dict(weight_map={n: k for k,names in parts.items() for n in names})
    (folder/'d.safetensors.index.json').write_text(json.dumps(index))
    torch.save(without('emb.weight', state), folder/'e.pth') # the other name of a shared weight
    return ['a.pth','b.pth','c.safetensors','d.safetensors.index.json','e.pth']

@needs_fsdp2
@on_2_and_3
def test_same_run_as_built_whole(W, tmp_path):
    "From one kind of file; of the others, what is loaded"
    names = files(tmp_path)
    want = run(case(model=whole_net)),[dict(whole_net().state_dict())]*len(names)
    for got in run_ranks(in_group, W, built, tmp_path, names): close(got, want)

def built(folder, names):
    found = []
    for o in names:
        learn = learner(meta_net)
        with learn.distrib_ctx(shard=dict(weights=folder/o)): found.append(map_tensors(dict(learn.model.state_dict()), full_tensor))
    return run(case(model=meta_net, ctx=dict(seed=3, shard=dict(weights=str(folder/names[-1]))))),found

def learner(model, path='.'):
    torch.manual_seed(5+group_rank())
    g = torch.Generator().manual_seed(1)
    ds = TensorDataset(torch.randn(24, 6, generator=g, dtype=F64), torch.randint(6, (24,), generator=g))
    return Learner(DataLoaders(DataLoader(ds, 6//max(group_size(), 1)), DataLoader(ds, 3)), model(), F.cross_entropy, lr=.05, path=path)

class Mapped:
    "The bytes of a mapped file that are in memory, by the end of `load_model`"
    def __init__(self, f): self.f,self.kb = f,0
    def __call__(self, *args, **kw):
        res = self.f(*args, **kw)
        with open('/proc/self/smaps') as f: text = f.read()
        self.kb = sum(map(int, re.findall(r'big\.pth\n(?:.*\n)??Size:.*\n(?:.*\n)*?Rss: +(\d+) kB', text)))
        return res

class Summed:
    "Bytes whose checksum this rank has computed; in place of the module zlib"
    def __init__(self): self.n = 0
    def crc32(self, data, *start):
        self.n += len(data)
        return zlib.crc32(data, *start)

makes = dict(weights=lambda: (sharded,learner(meta_big)), load=lambda: (saving,learner(big)), fastai=lambda: of_fastai())
def read_by_rank(file):
    "What a rank reads of a file by `weights=`, or in `load` of either Learner: KiB that it maps, KiB for the checksum"
    return {k: read_by(k, file) for k in makes if k!='fastai' or find_spec('fastai')}

def read_by(how, file):
    with process_group():
        place,learn = makes[how]()
        place.load_model,weights.zlib = spy,summed = Mapped(place.load_model),Summed()
        with learn.distrib_ctx(shard=dict(weights=file) if how=='weights' else True):
            if how!='weights': learn.load(str(file.with_suffix('')), with_opt=False)
        return spy.kb,summed.n/1024

def of_fastai():
    from learnerdist.fastai import checkpoint
    from test_fastai import make
    return checkpoint,make(2, model=big, dtype=torch.float32)

def meta_big():
    with torch.device('meta'): return big()

def big(): return nn.Sequential(*[nn.Linear(1024, 4096) for _ in range(2)]) # the system maps up to 2 MiB around what is read

@needs_fsdp2
def test_a_rank_reads_its_rows_of_a_file(tmp_path):
    "Our own file it also reads once for the checksum, without keeping it"
    save_sealed(big().state_dict(), tmp_path/'big.pth')
    size = (tmp_path/'big.pth').stat().st_size/1024
    for found in run_ranks(read_by_rank, 2, tmp_path/'big.pth'):
        for how,(mapped,n) in found.items():
            assert .4*size<mapped<.8*size, (how,size,mapped)
            assert how=='fastai' or round(n/size, 2)==1, (how,size,n)

refused = dict(fit=lambda o: o.fit(1), validate=lambda o: o.validate(), get_preds=lambda o: o.get_preds(), save=lambda o: o.save('x'),
               predict=lambda o: o.predict(torch.zeros(6, dtype=F64)), load=lambda o: o.load('a'),
               safetensors=lambda o: o.save('x.safetensors'), ddp=lambda o: enters(o))

def twice(path, model=whole_net, **kw):
    "Two contexts, the second after a load of what the first saved; what calls after each say"
    learn,messages = learner(model, path).add_cb(EMA(.7)),{}
    if not kw: learn.load(path/'start')
    for i in range(2):
        with learn.no_logging(), learn.distrib_ctx(seed=3, **kw):
            if i: learn.load('a')
            learn.fit(1)
            learn.save('a')
            res = map_tensors([learn.model.state_dict(),learn.ema.weights], full_tensor)
        if not kw:
            learn.ema.weights = {} # as there, where the next average begins with what is loaded
            continue
        assert learn.opt is None and learn.ema.weights=={} and all(p.is_meta for p in learn.model.parameters())
        for k,f in refused.items():
            try: f(learn)
            except ValueError as e: messages[i,k] = str(e)
        distrib_barrier()
    return messages,res,[list(o) for o in learn.recorder.values]

def twice_on_ranks(path):
    with process_group(): return twice(path, meta_net, shard=dict(weights=path/'start.pth'))

@needs_fsdp2
def test_contexts_leave_no_values_where_there_were_none(tmp_path):
    save_sealed(whole_net().state_dict(), tmp_path/'start.pth')
    _,*alone = twice(tmp_path)
    for messages,*res in run_ranks(twice_on_ranks, 2, tmp_path):
        assert [*messages]==[(i,k) for i in range(2) for k in refused]
        assert all('is on the meta device, and has no values' in o for o in messages.values())
        close(res, alone)

def without(k, state): return {n: v for n,v in state.items() if n!=k}

def refusals(folder):
    state = whole_net().state_dict()
    if rank_distrib()==0:
        torch.save(without('out.bias', state), folder/'missing.pth')
        torch.save(without('layers.0.a.weight', state), folder/'large.pth')
        torch.save(state, folder/'whole.pth')
        torch.save(dict(state, **{'out.bias': torch.zeros(3)}), folder/'shape.pth')
    tries = [(meta_net, True), (meta_net, dict(weights=folder/'none.pth')),
             (meta_net, dict(weights=folder/'missing.pth')), (meta_net, dict(weights=folder/'large.pth')),
             (meta_net, dict(weights=folder/'shape.pth')), (lambda: meta_net(table=None), dict(weights=folder/'whole.pth'))]
    with process_group():
        res = []
        for model,shard in tries:
            learn = learner(model)
            before = [(type(o),{*vars(o)}) for o in learn.model.modules()]
            res.append(error_of(enters, learn, shard=shard))
            assert before==[(type(o),{*vars(o)}) for o in learn.model.modules()]
            distrib_barrier()
        return res

whys = ['inp.weight is on the meta device, and has no values: give distrib_ctx(shard=dict(weights=file))',
        'none.pth', 'out.bias is on the meta device', 'layers.0.a.weight is on the meta device', 'size mismatch for out.bias',
        'layers.0.scale is on the meta device, and has no values']

@needs_fsdp2
def test_refused_with_a_remedy(tmp_path):
    for found in run_ranks(refusals, 2, tmp_path):
        for messages,why in zip(found, whys): assert why in messages, (messages,why)

def test_alone_a_model_without_values_is_refused(tmp_path):
    learn = Learner(DataLoaders([], []), meta_net(), F.cross_entropy, path=tmp_path)
    for do in (learn.prepare_model, lambda: learn.save('a'), lambda: learn.fit(1)):
        with pytest.raises(ValueError, match='inp.weight is on the meta device, and has no values: give distrib_ctx'): do()
    assert not [*tmp_path.iterdir()]
