"Models that no rank holds whole: `deferred`, weights from a file, and contexts that end without gathering"
import copy, json, re, zlib
import numpy as np, pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from learnerdist.all import (DataLoaders, Learner, deferred, distrib_barrier, group_rank, group_size, process_group,
                             rank_distrib)
from learnerdist.core.deferred import fill_in, has_deferred
from learnerdist.core.weights import save_sealed, save_tensors
from learnerdist.core import weights
from learnerdist.distributed import sharded
from learnerdist.learner import saving
from learnerdist.testing import run_ranks
from test_sharded import F64, case, differs, needs_fsdp2, outcome, run

# --- one process ------------------------------------------------------------------------------------------------------------

class Tables(nn.Module):
    "Buffers that no file holds, computed from large tensors; weights that are set by hand"
    def __init__(self):
        super().__init__()
        self.register_buffer('mask', torch.full((50, 50), float('-inf')).triu(1), persistent=False)
        at = torch.arange(2000.)[:,None]*torch.exp(torch.arange(0., 6, 2))
        self.register_buffer('sin', torch.zeros(2000, 6), persistent=False)
        self.sin[:,0::2],self.sin[:,1::2] = at.sin(),at.cos()
        self.a,self.b = nn.Parameter(torch.rand(40, 50)),nn.Parameter(torch.empty(60, 30))
        with torch.no_grad(): self.b.copy_(torch.from_numpy(np.arange(1800.).reshape(60, 30)))
        rows = torch.zeros(30)
        for i in range(60):
            rows += 1 # a tensor that changes after it was copied
            with torch.no_grad(): self.b[i] += rows
        self.largest = self.a.detach().max().item()
        if (self.a>.5).sum()>900: self.a.data.mul_(2)
        self.a.data = self.a.data+1

def scaled(m):
    for o in m.modules():
        if isinstance(o, nn.Linear): nn.init.trunc_normal_(o.weight, std=.02)
    return m.double()

def orthogonal():
    m = nn.Linear(64, 40)
    nn.init.orthogonal_(m.weight)
    nn.init.uniform_(m.bias, generator=torch.Generator().manual_seed(3))
    nn.init.normal_(nn.init.eye_(m.weight), generator=torch.Generator().manual_seed(4))
    return m

def with_dropout():
    m = nn.Linear(64, 40)
    m.weight.data.copy_(F.dropout(m.weight.data)*torch.rand_like(m.weight)+torch.randperm(40)[:,None])
    return m

built = dict(linear=lambda: nn.Linear(64, 64), conv=lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(2000)), tables=Tables,
             lstm=lambda: nn.LSTM(32, 32, 2, bidirectional=True), transformer=lambda: scaled(nn.Transformer(32, 2, 2, 2, 64)),
             orthogonal=orthogonal, dropout=with_dropout, norm=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
             spectral=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)), bag=lambda: nn.EmbeddingBag(90, 30),
             half=lambda: nn.Linear(64, 64).bfloat16())

@pytest.mark.parametrize('name', built)
def test_deferred_is_bitwise_the_constructors(name):
    "Weights, buffers, strides, what else it computed, and the random stream afterwards"
    torch.manual_seed(1)
    a,state = built[name](),torch.get_rng_state()
    torch.manual_seed(1)
    b = deferred(built[name])
    assert torch.equal(state, torch.get_rng_state()) and has_deferred(b)
    params = [*b.parameters()]
    torch.manual_seed(2)
    before = torch.get_rng_state()
    fill_in(b)
    assert torch.equal(before, torch.get_rng_state()) and all(x is y for x,y in zip(params, b.parameters()))
    for (k,x),(j,y) in zip([*a.named_parameters(),*a.named_buffers()], [*b.named_parameters(),*b.named_buffers()]):
        assert (k,x.dtype,x.stride(),x.requires_grad)==(j,y.dtype,y.stride(),y.requires_grad) and torch.equal(x, y), k
    assert getattr(a, 'largest', 0)==getattr(b, 'largest', 0)

def test_alone_a_deferred_model_is_filled_when_it_is_used(tmp_path):
    def learner(build):
        torch.manual_seed(0)
        return Learner(DataLoaders(DataLoader(ds, 4), DataLoader(ds, 4)), build(), F.cross_entropy, path=tmp_path)
    ds,net = TensorDataset(torch.randn(8, 40), torch.randint(40, (8,))),lambda: nn.Linear(40, 40)
    dos = ['fit(1)','get_preds()','save("a")','export()','validate()']
    for do in dos:
        a,b = learner(net),learner(lambda: deferred(net))
        for o in (a,b):
            with o.no_logging(): eval(f'o.{do}')
        assert all(torch.equal(x, y) for x,y in zip(a.model.parameters(), b.model.parameters()))
    other = learner(lambda: deferred(net))
    assert torch.equal(other.load('a').model.weight, learner(net).model.weight)

def test_deferred_refuses():
    with pytest.raises(ValueError, match='build returned a list'): deferred(lambda: [nn.Linear(2, 2)])
    def twice(m):
        with torch.no_grad(): m.weight.mul_(2)
        return m
    for change in (lambda m: m.double(), twice, lambda m: copy.deepcopy(m)):
        learn = Learner(DataLoaders([], []), change(deferred(lambda: nn.Linear(40, 40))))
        with pytest.raises(ValueError, match=r'weight is on the meta device, .* such as .double\(\), or give shard='): learn.prepare_model()

# --- sharded ----------------------------------------------------------------------------------------------------------------

class Block(nn.Module):
    def __init__(self, n=41):
        super().__init__()
        self.a,self.b = nn.Linear(n, 50),nn.Linear(50, n, bias=False)
        self.register_buffer('scale', torch.linspace(.5, 1.5, n*30).view(30, n), persistent=False)
        self.register_buffer('seen', torch.zeros(()))
    def forward(self, x):
        if self.training: self.seen += 1
        return x+self.b(self.a(x*self.scale[3]).tanh())

class Net(nn.Module):
    "Rows that do not divide by the ranks, tied weights of the root, buffers in and out of files"
    def __init__(self):
        super().__init__()
        self.inp,self.layers,self.out = nn.Linear(6, 41, bias=False),nn.ModuleList([Block() for _ in range(3)]),nn.Linear(41, 6)
        self.emb = nn.Linear(50, 41, bias=False)
        self.again = nn.Linear(50, 41, bias=False)
        self.again.weight = self.emb.weight
        self.layers.apply(lambda m: nn.init.trunc_normal_(m.weight, std=.3) if isinstance(m, nn.Linear) else None)
    def forward(self, x):
        x = self.inp(x)
        for o in self.layers: x = o(x)
        return self.out(F.linear(F.linear(x, self.emb.weight.t()), self.again.weight))

def whole_net(): return Net().double()
def deferred_net(): return deferred(whole_net)

def meta_net():
    "Weights from a file, the tables of the constructor"
    torch.manual_seed(99)
    return deferred_net()

def files(folder):
    "The whole model in each kind of file"
    torch.manual_seed(5)
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

same = dict(deferred=case(model=deferred_net), sgd=case(model=deferred_net, opt=torch.optim.SGD, shard=[Block]),
            one=case(model=deferred_net, shard=lambda m: False, n_valid=1))

def rank_runs(cases):
    with process_group(): return {k: outcome(c, group_size(), group_rank()) for k,c in cases.items()}

@pytest.mark.slow
@needs_fsdp2
@pytest.mark.parametrize('W', [2, pytest.param(3, marks=pytest.mark.long)])
def test_same_run_as_built_whole(W, tmp_path):
    "Also where the weights come from a file: the constructor's were others"
    cases = same | {o: case(model=meta_net, shard=dict(weights=str(tmp_path/o))) for o in files(tmp_path)}
    alone = {k: run(dict(c, model=whole_net)) for k,c in same.items()}
    for ranks in run_ranks(rank_runs, W, cases):
        assert {k: d for k in cases if (d := differs(alone.get(k, alone['deferred']), ranks[k]))>1e-9} == {}

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

def read_by_rank(file, later):
    "What a rank reads of a file by `weights=`, or in `learn.load`: KiB that it maps, KiB for the checksum"
    with process_group():
        learn = learner(lambda: deferred(big))
        place = saving if later else sharded
        place.load_model,weights.zlib = spy,summed = Mapped(place.load_model),Summed()
        with learn.distrib_ctx(shard=dict(keep_sharded=True, **({} if later else dict(weights=file)))):
            if later: learn.load(str(file.with_suffix('')), with_opt=False)
        return spy.kb,summed.n/1024

def big(): return nn.Sequential(*[nn.Linear(1024, 4096) for _ in range(2)]) # the system maps up to 2 MiB around what is read

@needs_fsdp2
@pytest.mark.parametrize('later', [False, True])
def test_a_rank_reads_its_rows_of_a_file(later, tmp_path):
    "And another half of it for the checksum, without keeping it"
    save_sealed(big().state_dict(), tmp_path/'big.pth')
    size = (tmp_path/'big.pth').stat().st_size/1024
    found = run_ranks(read_by_rank, 2, tmp_path/'big.pth', later)
    assert all(.4*size<o<.8*size and abs(n-size/2)<1 for o,n in found), (size,found)

def damaged(folder, names):
    messages = {}
    for name in names:
        for later in (False,True):
            with process_group():
                learn = learner(deferred_net, folder)
                try:
                    with learn.distrib_ctx(shard=dict(keep_sharded=True, **({} if later else dict(weights=folder/name)))):
                        if later: learn.load(folder/name.removesuffix('.pth'))
                except ValueError as e: messages[name,later] = str(e)
    return messages

def damaged_files(folder):
    "One bit, wherever it is: in the part of any rank"
    torch.manual_seed(5)
    state,names = whole_net().state_dict(),[]
    for end,save in (('.pth',lambda p: save_sealed(state, p)), ('.safetensors',lambda p: save_tensors(state, p))):
        save(folder/f'good{end}')
        good = bytearray((folder/f'good{end}').read_bytes())
        for at in (.4,.6,.9):
            data = good[:]
            data[int(at*len(data))] ^= 4
            names.append(f'{at}{end}')
            (folder/names[-1]).write_bytes(data)
    return names

@pytest.mark.slow
@needs_fsdp2
@pytest.mark.parametrize('W', [2, pytest.param(3, marks=pytest.mark.long)])
def test_damage_is_noticed_by_all_ranks(W, tmp_path):
    for messages in run_ranks(damaged, W, tmp_path, damaged_files(tmp_path)):
        assert len(messages)==12 and all('its checksum differs' in o for o in messages.values())

refused = dict(fit=lambda o: o.fit(1), validate=lambda o: o.validate(), get_preds=lambda o: o.get_preds(), save=lambda o: o.save('x'),
               predict=lambda o: o.predict(torch.zeros(6, dtype=F64)), export=lambda o: o.export(), load=lambda o: o.load('a'),
               safetensors=lambda o: o.save('x.safetensors'),
               ddp=lambda o: enters(o), replicas=lambda o: enters(o, shard=dict(replicas=2)))

def enters(learn, **kw):
    with learn.distrib_ctx(**kw): pass

def keep(path):
    "Two contexts that keep parts, and a third that gathers; what the calls in between say"
    with process_group():
        learn = learner(deferred_net, path)
        before,messages = dict(learn.model.named_parameters()),{}
        for i,how in enumerate([dict(keep_sharded=True), dict(keep_sharded=True, blocks=Block), True]):
            with learn.no_logging(), learn.distrib_ctx(seed=3, shard=how):
                learn.fit(1)
                if not i: learn.save('a')
            if how is True: break
            held = sum(o.source.own.numel() for o in before.values() if o.is_meta)
            for k,f in refused.items():
                try: f(learn)
                except ValueError as e: messages[k] = str(e)
                else: messages[k] = ''
            distrib_barrier()
        assert all(before[k] is p for k,p in learn.model.named_parameters())
        res = [p.detach().clone() for p in learn.model.parameters()],[list(o) for o in learn.recorder.values]
        with learn.no_logging(): learn.fit(1) # alone, with the optimizer's state
        return messages,held,res

def thrice(path):
    learn = learner(whole_net, path)
    with learn.no_logging():
        for _ in range(3):
            with learn.distrib_ctx(seed=3): learn.fit(1)
    return [p.detach().clone() for p in learn.model.parameters()],[list(o) for o in learn.recorder.values]

@needs_fsdp2
def test_contexts_that_keep_parts(tmp_path):
    alone = thrice(tmp_path)
    for messages,held,res in run_ranks(keep, 2, tmp_path):
        assert {k for k,o in messages.items() if 'which keep_sharded did not gather' not in o}=={'replicas'}
        assert messages['replicas'].endswith('go on with as many ranks and replicas, or save and load')
        assert held<=.55*sum(p.numel() for p in res[0]) and differs(alone, res)<1e-9

def without(k, state): return {n: v for n,v in state.items() if n!=k}

def bare_meta():
    with torch.device('meta'): return whole_net()

def refusals(folder):
    torch.manual_seed(5)
    state = whole_net().state_dict()
    if rank_distrib()==0:
        torch.save(without('out.bias', state), folder/'missing.pth')
        torch.save(without('layers.0.a.weight', state), folder/'large.pth')
        torch.save(state, folder/'whole.pth')
        torch.save(dict(state, **{'out.bias': torch.zeros(3)}), folder/'shape.pth')
    tries = [(bare_meta, True), (deferred_net, dict(weights=3)), (deferred_net, dict(weights=folder/'none.pth')),
             (deferred_net, dict(weights=folder/'missing.pth')), (deferred_net, dict(weights=folder/'large.pth')),
             (deferred_net, dict(weights=folder/'shape.pth')), (bare_meta, dict(weights=folder/'whole.pth')),
             (deferred_net, dict(keep_sharded=2))]
    with process_group():
        res = []
        for model,shard in tries:
            learn = learner(model)
            before = [(type(o),{*vars(o)}) for o in learn.model.modules()]
            try:
                with learn.distrib_ctx(shard=shard): pass
            except Exception as e: res.append(f'{type(e).__name__}: {e}')
            else: res.append('')
            assert before==[(type(o),{*vars(o)}) for o in learn.model.modules()]
            if model is deferred_net:
                fill_in(learn.model)
                torch.manual_seed(5+group_rank())
                assert torch.equal(learn.model.layers[1].a.weight, whole_net().layers[1].a.weight)
            distrib_barrier()
        return res

@needs_fsdp2
def test_refused_with_a_remedy(tmp_path):
    "And the model can still be built as it could before"
    for found in run_ranks(refusals, 2, tmp_path):
        for messages,why in zip(found, ['inp.weight is on the meta device', 'weights=3: give the path', 'none.pth',
                                    'Missing key(s) in state_dict: "out.bias"',
                                    'Missing key(s) in state_dict: "layers.0.a.weight"', 'size mismatch for out.bias',
                                    'layers.0.scale is on the meta device, and nothing says', 'keep_sharded=2: give True or False']):
            assert why in messages
