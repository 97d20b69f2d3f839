"""A GPU that is none: tensors that say `cuda:i` and have their numbers on the CPU

In a process of its own, such as a rank of `run_ranks`, since torch keeps the name of a device that it has once been given:

    def rank():
        with SimulatedGPU(2) as sim:           # two GPUs; 1: ranks share it; kind='xpu', float64=False
            with learn.distrib_ctx(): learn.fit(1)
            return sim.waits,sim.collectives
    run_ranks(rank, 2)

It raises where devices are mixed, where nccl would refuse a tensor, and where a pickled tensor comes back on another rank's GPU. It counts
what makes the host wait for the device, and each collective, with the line that caused it. It shows nothing of kernels, of streams, of the
real nccl, of speed.

How: torch lets a device in Python have the name PrivateUse1. A `Gpu` is a wrapper of a tensor on the CPU. An operation on it comes to
`SimulatedGPU.run`, also from C++, such as autograd's engine and DDP's reducer. Functions that take a device by name are replaced."""
import collections, contextlib, functools, gc, os, sys, threading, time, warnings
from types import SimpleNamespace
import learnerdist
import torch, torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils import _device, _foreach_utils
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
name_in_torch = 'simulated' # C++ knows the device by this name, of index 0; a device named by a user is index+1

# Older ones have no device in Python, or make nccl's groups in C++
is_possible = hasattr(torch._C, '_acc') and hasattr(c10d.Backend, '_ensure_backend_registered')

class Gpu(Tensor):
    "A tensor of a simulated device. `host`: its numbers; `gpu`: the index of the device"
    sim = None # The `SimulatedGPU` that is installed
    of = Tensor # The class that a user sees
    @staticmethod
    def __new__(cls, host, index, requires_grad=False):
        res = Tensor._make_wrapper_subclass(cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
                                            device=torch.device(name_in_torch, 0), requires_grad=requires_grad)
        res.host,res.gpu = host,index
        return res
    __torch_function__ = torch._C._disabled_torch_function_impl
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass(): return _safely(Gpu.sim.run, func, args, kwargs or {})
    def __repr__(self, **kw): return f'{type(self).__name__}({self.host}, device={self.device})'
    def data_ptr(self): return self.host.data_ptr()
    def untyped_storage(self): return self.host.untyped_storage()
    def tolist(self):
        Gpu.sim.wait('tolist')
        return self.host.tolist()
    def set_meta(self, x, as_copy=False):
        "fastai's: the attributes of another tensor, but for its numbers"
        self.__dict__.update({k: v for k,v in x.__dict__.items() if k not in ('host','gpu')})
    def as_subclass(self, cls):
        "Also of a class such as fastai's TensorImage; gradients flow through it"
        sim = Gpu.sim
        with sim.making(cls if issubclass(cls, Gpu) else _of(cls)), torch._C.DisableTorchFunctionSubclass(): res = aten.alias(self)
        if hasattr(Tensor, 'set_meta'): res.set_meta(self)
        return res
    @property
    def data(self): return self.detach()
    @data.setter
    def data(self, o):
        Tensor.data.__set__(self, o)
        self.host,self.gpu = o.host,o.gpu
    def __deepcopy__(self, memo):
        if id(self) not in memo:
            res = memo[id(self)] = type(self)(self.host.clone(), self.gpu, self.requires_grad)
            res.set_meta(self)
            if self.grad is not None: res.grad = self.grad.__deepcopy__(memo)
        return memo[id(self)]
    def __reduce_ex__(self, proto):
        Gpu.sim.wait('pickle')
        return _unpickled,(self.host.detach(),str(self.device),self.requires_grad,isinstance(self, torch.nn.Parameter))

@functools.cache
def _of(cls):
    "`Gpu` that is also of a class of tensors"
    if cls is Tensor: return Gpu
    def function(own, func, types, args=(), kwargs=None): # what it makes may be on the CPU
        return cls.__torch_function__(func, tuple(getattr(o, 'of', o) for o in types), args, kwargs)
    return type(cls.__name__, (Gpu,cls), dict(of=cls, __torch_function__=classmethod(function)))

def _unpickled(host, device, requires_grad=False, is_param=False):
    "A pickled tensor comes back on the device of its number"
    sim = Gpu.sim
    device = torch.device(device if sim is None or sim.map_location is None else sim.map_location)
    if device.type=='cpu': res = host
    elif sim is None: raise RuntimeError(f'a tensor of {device} is read where there is no such device: give map_location')
    else:
        index = sim.current if device.index is None else device.index
        is_foreign = index!=sim.current and sim.map_location is None
        if is_foreign: sim.fault(f'a pickled tensor comes back on {device}, and this rank has {sim.kind}:{sim.current}')
        res = Gpu(host, index)
    return torch.nn.Parameter(res, requires_grad) if is_param else res.requires_grad_(requires_grad)


Wait = collections.namedtuple('Wait', 'phase what where') # `phase` is the user's word
Collective = collections.namedtuple('Collective', 'phase name bytes where')

_reads = {'_local_scalar_dense','nonzero','equal','is_nonzero','masked_select','unique_consecutive','_unique2','unique_dim','bincount'}
_copies = {'_to_copy','copy_'}
_indexing = {'index','index_put','index_put_','_index_put_impl_','_unsafe_index'}
_nccl_dtypes = {torch.int8,torch.uint8,torch.int32,torch.int64,torch.float16,torch.float32,torch.float64,torch.bfloat16,torch.bool}

_ours = os.path.dirname(os.path.abspath(learnerdist.__file__))
_others = tuple(f'{os.sep}site-packages{os.sep}{o}' for o in ('fastai','torch/nn','torch/amp','torch/optim','torch/distributed/fsdp'))

def where()->str:
    "The line that is at work: the innermost one of the package, of fastai or of torch's modules; then the package's own"
    found,f = [],sys._getframe(2)
    while f is not None:
        path = f.f_code.co_filename
        is_ours = path.startswith(_ours)
        if is_ours: path = path[len(os.path.dirname(_ours))+1:]
        elif any(o in path for o in _others): path = path.rpartition(f'site-packages{os.sep}')[2]
        else: path = None
        if path and (is_ours or not found): found.append(f'{path}:{f.f_lineno} {f.f_code.co_name}')
        if is_ours: break
        f = f.f_back
    return ' < '.join(found)

class Stream:
    "All that a stream was given is done at once"
    stream_id = device_index = device_type = 0 # what FSDP2 of torch 2.15 hands on
    def __init__(self, device=None, priority=0, **kw): self.device = device
    def __enter__(self): return self
    def __exit__(self, *exc): pass
    def wait_stream(self, o): pass
    def wait_event(self, o): pass
    def record_event(self, o=None): return (o or Event()).record(self)
    def is_capturing(self): return False

class Event:
    def __init__(self, *args, **kw): self.at = None
    def record(self, stream=None):
        self.at = time.perf_counter()
        return self
    def synchronize(self): Gpu.sim.wait('event.synchronize')

class SimulatedGPU:
    "Context in which torch has `n` GPUs; what has happened stands in `waits`, `collectives` and `faults`"
    def __init__(self, n=1, kind='cuda', # 'xpu': a device that torch.accelerator alone knows
                 float64=True,    # Whether it has this dtype
                 same_order=False # Whether ranks compare each collective before it runs. The same on all
                ):
        self.n,self.kind,self.float64,self.same_order = n,kind,float64,same_order
        self.current,self.phase,self.map_location,self.pid = 0,'',None,None
        self.waits,self.collectives,self.faults = [],[],[]
        self.warns = False # As `torch.cuda.set_sync_debug_mode` says
        self.in_backward = None # The error that has ended a backward pass
        self.under = {} # From the name of a group that says nccl to the gloo group beneath it
        self.devices = {} # From the name of such a group to the device that this rank has in it
        self.local = threading.local() # `cls`: what the next operation makes
        self.streams = [torch.Generator() for _ in range(n)] # of random numbers
        self.stack = contextlib.ExitStack()
        self.module = getattr(torch, kind)

    def __enter__(self):
        assert Gpu.sim is None, 'one is installed'
        _register()
        Gpu.sim = self
        self.stack.callback(setattr, Gpu, 'sim', None)
        parts = self._tensors,self._backward,self._factories,self._accelerator,self._module,self._files,self._groups,self._autocast
        for install in parts: install()
        return self
    def __exit__(self, *exc): self.stack.close()

    def fault(self, text, error=RuntimeError):
        self.faults.append((self.phase,text,where()))
        raise error(text)
    def forget(self):
        "Begin anew to count"
        self.phase = ''
        for o in (self.waits, self.collectives, self.faults): o.clear()
    def wait(self, what):
        self.waits.append(Wait(self.phase, what, where()))
        if self.warns: warnings.warn('called a synchronizing CUDA operation')
    def count(self, phase=None)->dict:
        "How often each wait of this phase has happened; all without one"
        return dict(collections.Counter((o.what,o.where) for o in self.waits if phase in (None,o.phase)))
    def live_bytes(self, index)->int:
        "Of all tensors on this device"
        found = {}
        for o in gc.get_objects():
            if issubclass(type(o), Gpu) and o.gpu==index: found[o.host.untyped_storage().data_ptr()] = o.host.untyped_storage().nbytes()
        return sum(found.values())

    # --- operations

    @contextlib.contextmanager
    def making(self, cls):
        self.local.cls = cls
        try: yield
        finally: self.local.cls = None

    def index_of(self, device):
        "Of a device as C++ or Python names it; None on the CPU"
        device = torch.device(device)
        if device.type==name_in_torch: return device.index-1 if device.index else None
        if device.type!=self.kind: return None
        return self.current if device.index is None else device.index

    def named(self, o):
        "What a user names by this device, as C++ knows it; all else as it is"
        if isinstance(o, str) and o.partition(':')[0]==self.kind or type(o) is int: o = torch.device(o)
        if not isinstance(o, torch.device) or o.type!=self.kind: return o
        index = self.index_of(o)
        if index>=self.n: raise RuntimeError(f'CUDA error: invalid device ordinal: {o} of {self.n}')
        return torch.device(name_in_torch, index+1)

    def run(self, func, args, kwargs):
        "An operation, on the numbers of its tensors; what it makes is on their device, or on the one that it names"
        leaves,spec = tree_flatten((args,kwargs))
        gpus = [o for o in leaves if isinstance(o, Gpu)]
        space,_,name = func._schema.name.partition('::')
        if space in ('c10d','_c10d_functional') and name!='wait_tensor': return self._collective(func, name, leaves, spec)
        index = self._check(name, leaves, gpus, func)
        self._note_waits(name, args, kwargs, gpus)
        if self.pid is None: self.pid = os.getpid()
        if self.pid!=os.getpid(): raise RuntimeError(f'Cannot re-initialize {self.kind.upper()} in forked subprocess')
        beneath = [self._beneath(o) for o in leaves]
        args,kwargs = tree_unflatten(beneath, spec)
        if name in ('_to_copy','copy_'): kwargs.pop('non_blocking', None)
        if index is not None: kwargs.pop('pin_memory', None)
        draws = torch.Tag.nondeterministic_seeded in func.tags and index is not None
        with self._stream(index) if draws else contextlib.nullcontext(): res = _kernels.get(name, func)(*args, **kwargs)
        known = {id(b): o for b,o in zip(beneath, leaves) if isinstance(b, Tensor)}
        cls = getattr(self.local, 'cls', None) or Gpu
        def wrapped(o):
            if not isinstance(o, Tensor): return o
            if id(o) in known:
                same = known[id(o)]
                if isinstance(same, Gpu) and (same.shape!=o.shape or same.stride()!=o.stride()): same.data = Gpu(o, same.gpu)
                return same
            if index is None: return o
            if o.dtype==torch.float64 and not self.float64: self.fault(f'float64 on a device without it, in {func}', TypeError)
            return cls(o, index)
        return tree_map(wrapped, res)

    def _beneath(self, o):
        if isinstance(o, Gpu): return o.host
        return torch.device('cpu') if isinstance(o, torch.device) and o.type==name_in_torch else o

    def _check(self, name, leaves, gpus, func):
        "The index of the device of what is made; None: the CPU. RuntimeError where devices are mixed"
        indices = {o.gpu for o in gpus}
        if name not in _copies:
            hosts = [o for o in leaves if isinstance(o, Tensor) and not isinstance(o, Gpu) and o.dim() and name not in _indexing]
            if len(indices)>1 or gpus and hosts:
                found = sorted({str(o.device) for o in (*gpus,*hosts)})
                self.fault(f'Expected all tensors to be on the same device, but found {", ".join(found)}, in {func}')
        named = next((o for o in leaves if isinstance(o, torch.device)), None)
        if named is not None and named.type!=name_in_torch: return None
        if named is not None and named.index: return named.index-1
        if name=='copy_' and not isinstance(leaves[0], Gpu): return None
        return gpus[0].gpu if gpus else self.current

    def _note_waits(self, name, args, kwargs, gpus):
        "What makes the host wait until the device is done"
        blocks = not (kwargs.get('non_blocking') or name=='copy_' and len(args)>2 and args[2])
        if name in _reads: self.wait(name)
        elif name=='repeat_interleave' and kwargs.get('output_size') is None: self.wait(name)
        elif name=='_to_copy' and gpus:
            to = kwargs.get('device')
            if to is not None and to.type=='cpu': self.wait('copy to the host')
        elif name=='copy_' and gpus and len({isinstance(o, Gpu) for o in args[:2]})==2:
            if isinstance(args[1], Gpu): self.wait('copy to the host')
            elif blocks: self.wait('copy to the device')
        elif name in _indexing:
            for o in args[1]:
                if o is None: continue
                if o.dtype in (torch.bool,torch.uint8): self.wait('index by a mask')
                elif not isinstance(o, Gpu) and o.dim(): self.wait('index from the host')

    @contextlib.contextmanager
    def _stream(self, index):
        "Random numbers of the device's own stream"
        old = torch.default_generator.get_state()
        torch.default_generator.set_state(self.streams[index].get_state())
        try: yield
        finally:
            self.streams[index].set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(old)

    # --- collectives

    def _collective(self, func, name, leaves, spec):
        "A collective on a group: by the gloo group beneath, if it says nccl. It has ended when this returns"
        tensors = [o for o in leaves if isinstance(o, Tensor)]
        at = max(i for i,o in enumerate(leaves) if _is_group(o))
        functional = isinstance(leaves[at], str)
        pg = c10d._resolve_process_group(leaves[at]) if functional else dist.ProcessGroup.unbox(leaves[at])
        under = self.under.get(pg.group_name)
        if under: self._check_nccl(name, tensors, pg, under)
        elif self.kind not in dist.get_backend_config(pg): self.fault(f'No backend type associated with device type {self.kind}, in {name}')
        self.collectives.append(Collective(self.phase, name, sum(o.nbytes for o in tensors), where()))
        hosts = [self._beneath(o) for o in leaves]
        flat = name in ('_allgather_base_','_reduce_scatter_base_') # of which gloo wants rows
        if flat: hosts = [o.view(-1) if isinstance(o, Tensor) else o for o in hosts]
        if under: hosts[at] = under.group_name if functional else under.boxed()
        args,kwargs = tree_unflatten(hosts, spec)
        res = func(*args, **kwargs)
        known = {id(h): o for h,o in zip(hosts, leaves) if isinstance(h, Tensor)}
        wrapped = lambda o: (known.get(id(o)) if id(o) in known else Gpu(o, tensors[0].gpu)) if isinstance(o, Tensor) else o
        if functional: return tree_map(wrapped, res)
        *outs,work = res if isinstance(res, tuple) else (res,)
        dist.Work.unbox(work).wait()
        fut = torch.futures.Future()
        fut.set_result([o for o in tree_flatten(tree_unflatten(leaves, spec)[0][0])[0] if isinstance(o, Tensor)])
        done = torch._C._distributed_c10d._create_work_from_future(fut).boxed()
        return (*tree_map(wrapped, outs),done) if isinstance(res, tuple) else done

    def _check_nccl(self, name, tensors, pg, under):
        "What nccl refuses"
        group = pg.group_name
        for o in tensors:
            if not isinstance(o, Gpu): self.fault(f'No backend type associated with device type cpu, in {name}')
            if not o.is_contiguous(): self.fault(f'Tensors must be contiguous, in {name}', ValueError)
            if o.dtype not in _nccl_dtypes: self.fault(f'Unconvertible NCCL type {o.dtype}, in {name}')
            if group not in self.devices: self._connect(group, under, o.gpu)
            if o.gpu!=self.devices[group]:
                self.fault(f'{name} of a tensor on {o.device} in a group in which this rank has {self.kind}:{self.devices[group]}')
        kinds = sorted({(*o.shape,str(o.dtype)) for o in tensors}, key=str) # a set: where rows are gathered, one rank has more
        if self.same_order: self.compare(f'{name} {kinds}', under)

    def compare(self, what, under):
        "Whether all ranks of a group are in the same collective"
        every = _gathered(what, under)
        if len({*every})>1: self.fault(f'the ranks of a group are in different collectives: {"; ".join(every)}')

    def _connect(self, group, under, index):
        "The first collective of a group: the ranks find out each other's devices"
        self.devices[group] = index
        every = _gathered(f'{index}', under)
        same = [r for r,o in enumerate(every) if o==f'{index}']
        if len(same)>1: self.fault(f'Duplicate GPU detected: rank {same[0]} and rank {same[1]} both on {self.kind} device {index}')

    def _groups(self):
        "Groups that say nccl, or what the device has, with gloo beneath"
        backend = dist.get_default_backend_for_device(self.kind).upper()
        plugins = c10d.Backend._plugins
        old = plugins.get(backend)
        def create(opts, backend_options=None):
            pg = self.under[opts.group_id] = dist.ProcessGroup(dist.PrefixStore('beneath', opts.store), opts.group_rank, opts.group_size)
            pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            res = dist.ProcessGroupGloo(opts.store, opts.group_rank, opts.group_size, timeout=opts.timeout)
            pg._register_backend(torch.device('cpu'), dist.ProcessGroup.BackendType.GLOO, res)
            pg._set_group_name(f'{opts.group_id}/beneath')
            torch._C._distributed_c10d._register_process_group(pg.group_name, pg)
            return res
        plugins[backend] = c10d.Backend._BackendPlugin(create, True)
        self.stack.callback(lambda: plugins.update({backend: old}) if old else plugins.pop(backend))
        barrier = dist.ProcessGroup.barrier
        def barrier_of(pg, opts=None, **kw):
            under = self.under.get(pg.group_name)
            if under is None or opts is None: return barrier(pg, opts, **kw) if opts else barrier(pg, **kw)
            self.wait('barrier')
            self.collectives.append(Collective(self.phase, 'barrier', 0, where()))
            opts.device = torch.device('cpu')
            return barrier(under, opts)
        self._set(dist.ProcessGroup, 'barrier', barrier_of)

    # --- what is replaced

    def _set(self, o, name, val):
        own = name in vars(o)
        old = getattr(o, name, None)
        setattr(o, name, val)
        self.stack.callback(setattr, o, name, old) if own else self.stack.callback(delattr, o, name)

    def _tensors(self):
        "Devices of tensors, as a user sees them; modules may move"
        real,real_device = Tensor.device,torch.device
        def device(t):
            res = real.__get__(t)
            return real_device(self.kind, getattr(t, 'gpu', self.current)) if res.type==name_in_torch else res
        self._set(Tensor, 'device', property(device))
        self._set(Tensor, f'is_{self.kind}', property(lambda t: real.__get__(t).type==name_in_torch))
        as_subclass = Tensor.as_subclass # fastai gives a copy on the CPU the class of its source
        self._set(Tensor, 'as_subclass', lambda t, cls: as_subclass(t, getattr(cls, 'of', cls) if issubclass(cls, Gpu) else cls))
        class Meta(type): # torch.device(0) is the accelerator's
            def __instancecheck__(cls, o): return isinstance(o, real_device)
            def __call__(cls, *args, **kw):
                if len(args)==1 and type(args[0]) is int: return real_device(self.kind, args[0])
                return real_device(*args, **kw)
        self._set(torch, 'device', Meta('device', (), dict(__module__='torch')))
        old = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        apply = nn.Module._apply
        def moved(module, fn, recurse=True): # what is there already stays, as a swap of it fails within a step
            for o in module.children() if recurse else (): o._apply(fn)
            here = [*module.parameters(recurse=False),*module.buffers(recurse=False)]
            return module if all(fn(t) is t for t in here) else apply(module, fn, recurse=False)
        self._set(nn.Module, '_apply', moved)
        self.stack.callback(torch.__future__.set_swap_module_params_on_conversion, old)
        self._set(torch.backends.cudnn, 'is_acceptable', lambda t: False) # no kernels
        self._set(_foreach_utils, '_foreach_supported_types', [*_foreach_utils._foreach_supported_types, Gpu])

    def _backward(self):
        "Errors of a backward pass, see `_safely`"
        engine = torch.autograd._engine_run_backward
        def backward(*args, **kw):
            res,error = None,None
            try:
                with _Pageable(): res = engine(*args, **kw)
            except Exception as e: error = e
            own,self.in_backward = self.in_backward,None
            if own or error: raise own or error
            return res
        self._set(torch.autograd, '_engine_run_backward', backward)
        def registering(f): return lambda t, hook: f(t, functools.partial(_safely, hook, or_else=None))
        for k in ('register_hook','register_post_accumulate_grad_hook'): self._set(Tensor, k, registering(getattr(Tensor, k)))

    def _factories(self):
        "What takes a device by name"
        def naming(f):
            @functools.wraps(f)
            def named(*args, **kw):
                if 'device' in kw: kw['device'] = self.named(kw['device'])
                if kw.pop('pin_memory', False): return _pinned(f(*args, **kw))
                return f(*args, **kw)
            return named
        torchs = {o.__name__ for o in _device._device_constructors() if getattr(torch, o.__name__, None) is o}
        torchs |= {f'{o}_like' for o in 'empty zeros ones full rand randn randint'.split()}
        for k in torchs: self._set(torch, k, naming(getattr(torch, k)))
        for k in 'tensor empty zeros ones full empty_strided'.split(): self._set(Tensor, f'new_{k}', naming(getattr(Tensor, f'new_{k}')))
        to = Tensor.to
        def moved(t, *args, **kw):
            args,kw = [*map(self.named, args[:1]),*args[1:]],{k: self.named(o) if k=='device' else o for k,o in kw.items()}
            if isinstance(t, Gpu): # C++ finds it at index 0
                own = torch.device(name_in_torch, t.gpu+1)
                args,kw = [_zero if o==own else o for o in args],{k: _zero if o==own else o for k,o in kw.items()}
            return to(t, *args, **kw)
        self._set(Tensor, 'to', moved)
        self._set(Tensor, self.kind, lambda t, device=None, non_blocking=False: t.to(self._device(device), non_blocking=non_blocking))
        self._set(Tensor, 'pin_memory', lambda t, device=None: _pinned(t.clone()))
        self._set(Tensor, 'is_pinned', lambda t, device=None: getattr(t.untyped_storage(), 'pinned', False))
        self._set(Tensor, 'record_stream', lambda t, stream: None)

    def _device(self, o=None): return torch.device(self.kind, self._index(o))
    def _index(self, o=None):
        if isinstance(o, int): return o
        index = None if o is None else torch.device(o).index
        return self.current if index is None else index

    def set_device(self, o):
        index = self._index(o)
        if not 0<=index<self.n: raise RuntimeError(f'CUDA error: invalid device ordinal: {index} of {self.n}')
        self.current,self.pid = index,self.pid or os.getpid()

    def exchange(self, index):
        old = self.current
        if index>=0: self.set_device(index)
        return old

    def _accelerator(self):
        "torch.accelerator: its Python over these"
        fs = dict(getAccelerator=lambda: torch.device(self.kind), getDeviceIndex=lambda: self.current, setDeviceIndex=self.set_device,
                  exchangeDevice=self.exchange, maybeExchangeDevice=self.exchange, emptyCache=lambda: None,
                  getStream=lambda i: self.stream, setStream=lambda s: None, synchronizeDevice=lambda i=None: self.wait('synchronize'))
        for k,f in fs.items(): self._set(torch._C, f'_accelerator_{k}', f)
        self._set(torch._C, '_get_accelerator', lambda check=None: torch.device(self.kind))

    def _module(self):
        "torch.cuda, or torch.xpu"
        self.stream = Stream()
        def gen(d=None): return self.streams[self._index(d)]
        def seed_all(s):
            for o in self.streams: o.manual_seed(s)
        def used(d=None): return self.live_bytes(self._index(d))
        def properties(d=None):
            uuid = f'simulated-{self._index(d)}'
            return SimpleNamespace(name='simulated', uuid=uuid, major=9, minor=0, total_memory=1<<36, multi_processor_count=1)
        fs = dict(
            is_available=lambda: True, device_count=lambda: self.n, current_device=lambda: self.current, set_device=self.set_device,
            _exchange_device=self.exchange, _maybe_exchange_device=self.exchange, is_initialized=lambda: self.pid is not None,
            _is_in_bad_fork=lambda: self.pid not in (None, os.getpid()), init=lambda: None, _lazy_init=lambda: None,
            _lazy_call=lambda f, **kw: f(),
            get_device_properties=properties, get_device_name=lambda d=None: 'simulated', get_device_capability=lambda d=None: (9,0),
            is_bf16_supported=lambda including_emulation=True: True, is_current_stream_capturing=lambda: False,
            manual_seed=lambda s: gen().manual_seed(s), manual_seed_all=seed_all, get_rng_state=lambda d=None: gen(d).get_state(),
            set_rng_state=lambda s, d=None: gen(d).set_state(s), memory_allocated=used,
            max_memory_allocated=used, reset_peak_memory_stats=lambda d=None: None,
            empty_cache=lambda: None, synchronize=lambda d=None: self.wait('synchronize'),
            set_sync_debug_mode=lambda mode: setattr(self, 'warns', mode not in (0,'default')), Stream=Stream, Event=Event,
            stream=lambda s: contextlib.nullcontext(s), current_stream=lambda d=None: self.stream,
            default_stream=lambda d=None: self.stream, set_stream=lambda s: None)
        for k,f in fs.items():
            if hasattr(self.module, k): self._set(self.module, k, f)

    def _files(self):
        "torch.load: tensors of the device, and where they come back"
        load = torch.load
        def loaded(f, map_location=None, **kw):
            to = map_location if isinstance(map_location, (str,torch.device)) else None
            old,self.map_location = self.map_location,to
            try: res = load(f, map_location='cpu' if to is not None else map_location, **kw)
            finally: self.map_location = old
            if to is None or torch.device(to).type=='cpu': return res
            return tree_map(lambda o: o.to(to) if isinstance(o, Tensor) else o, res)
        self._set(torch, 'load', loaded)
        torch.serialization.add_safe_globals([_unpickled])

    def _autocast(self):
        "Casts of a CUDA autocast, by the key of the device in the dispatcher"
        lib = torch.library.Library('aten', 'IMPL')
        self.stack.callback(lib._destroy)
        for cast,names in ((_lower, _in_half), (_float, _in_float), (_widest, _promoted)):
            for k in names.split():
                for op in (getattr(getattr(aten, k), o) for o in getattr(aten, k).overloads()):
                    if op._schema.overload_name.endswith('out') or any(a.is_out for a in op._schema.arguments): continue
                    lib.impl(op, functools.partial(_cast, op, cast), 'AutocastPrivateUse1')
        own = lambda k: name_in_torch if k==self.kind else k
        for k in ('is_autocast_enabled','set_autocast_enabled','get_autocast_dtype','set_autocast_dtype'):
            f = getattr(torch, k)
            self._set(torch, k, lambda *args, f=f: f(*map(own, args[:1]), *args[1:]))
        torch.set_autocast_dtype(self.kind, torch.float16 if self.kind=='cuda' else torch.bfloat16)

_zero = torch.device('cpu') # that of C++'s device, once it has its name

def _register():
    "The device's name, and what C++ calls without a tensor of it; once in a process"
    global _zero
    if _zero.type!='cpu': return
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(name_in_torch)
    _zero = torch.device(name_in_torch, 0)
    lib = _register.lib = torch.library.Library('aten', 'IMPL')
    _register.fall = torch.library.Library('_', 'IMPL')
    _register.fall.fallback(torch.library.fallthrough_kernel, 'AutocastPrivateUse1')
    lib.impl('_thnn_fused_lstm_cell', _lstm_cell, 'AutogradPrivateUse1')
    lib.impl('_thnn_fused_gru_cell', _gru_cell, 'AutogradPrivateUse1')
    run = lambda op: lambda *args, **kw: Gpu.sim.run(op, args, kw)
    lib.impl('empty.memory_format', run(aten.empty.memory_format), 'PrivateUse1')
    lib.impl('empty_strided', run(aten.empty_strided.default), 'PrivateUse1')
    lib.impl('_copy_from', lambda s, d, non_blocking=False: Gpu.sim.run(aten.copy_.default, (d,s,non_blocking), {}), 'PrivateUse1')

_no_tensor = object() # C++ raises where it gets this
def _safely(f, *args, or_else=_no_tensor, **kw):
    """In a backward pass C++ raises, and the end of the pass then the error itself. In the engine's thread for this device is a guard in
    Python, where a Python error would end the process by SIGABRT"""
    try: return f(*args, **kw)
    except Exception as e:
        if torch._C._current_graph_task_id()<0: raise
        Gpu.sim.in_backward = Gpu.sim.in_backward or e
        return or_else

class _Pageable(TorchDispatchMode):
    "DDP's reducer asks for pinned memory where parameters are unused, and a device in Python has none"
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.is_pinned.default: return True
        if kwargs.get('pin_memory'): kwargs = {**kwargs, 'pin_memory': False}
        return _safely(func, *args, **kwargs)

def _is_group(o): return isinstance(o, str) or type(o).__name__=='ScriptObject' and 'ProcessGroup' in str(o._type())

def _pinned(t):
    t.untyped_storage().pinned = True # which views share
    return t

def _gathered(text, pg):
    "The texts of all ranks of a group"
    own = torch.frombuffer(bytearray(text.encode()[:200].ljust(200)), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(pg.size())]
    pg.allgather([every], [own]).wait()
    return [bytes(o.tolist()).decode(errors='replace').strip() for o in every]

# --- autocast: torch's lists for CUDA

_in_half = """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu addmm addmv addr
    matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul linalg_multi_dot linalg_vecdot lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell scaled_dot_product_attention"""
_in_float = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm native_layer_norm
    group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp prod softmax log_softmax
    cumprod cumsum sum norm"""
_promoted = 'addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add'

def _lower(tensors): return torch.get_autocast_dtype(Gpu.sim.kind)
def _float(tensors): return torch.float32
def _widest(tensors): return torch.float32 if any(o.dtype==torch.float32 for o in tensors) else torch.get_autocast_dtype(Gpu.sim.kind)

def _cast(op, cast, *args, **kw):
    "An operation within autocast: its tensors in another dtype, but float64"
    leaves,spec = tree_flatten((args,kw))
    able = lambda o: isinstance(o, Tensor) and o.is_floating_point() and o.dtype!=torch.float64
    to = cast([o for o in leaves if able(o)])
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        leaves = [o.to(to) if able(o) and o.dtype!=to else o for o in leaves]
        args,kw = tree_unflatten(leaves, spec)
        return op(*args, **kw)

# --- what only CUDA has: cells of recurrent networks, SyncBatchNorm

def _gates(x, h, n, *biases):
    x,h = [o if b is None else o+b for o,b in zip((x, h), biases)]
    return zip(x.chunk(n, 1), h.chunk(n, 1))

def _lstm_cell(x, h, c, x_bias=None, h_bias=None):
    i,f,g,o = [a+b for a,b in _gates(x, h, 4, x_bias, h_bias)]
    c = f.sigmoid()*c+i.sigmoid()*g.tanh()
    return o.sigmoid()*c.tanh(),c,torch.empty_like(x)

def _gru_cell(x, h, old, x_bias=None, h_bias=None):
    (xr,hr),(xz,hz),(xn,hn) = _gates(x, h, 3, x_bias, h_bias)
    new,z = (xn+(xr+hr).sigmoid()*hn).tanh(),(xz+hz).sigmoid()
    return (old-new)*z+new,torch.empty_like(x)

def _over(x): return [d for d in range(x.dim()) if d!=1]
def _wide(v, x): return v.view(1, -1, *[1]*(x.dim()-2))

def _bn_stats(x, eps):
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.mean(_over(x)),(x.var(_over(x), unbiased=False)+eps).rsqrt()

def _bn_gather(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    counts = counts.view(-1, 1).to(mean.dtype)
    n = counts.sum()
    some = n.clamp(min=1) # without a sample on any rank the kernel's mean is 0
    m = (mean*counts).sum(0)/some
    var = (counts*(1/invstd**2-eps+(mean-m)**2)).sum(0)/some
    if running_mean is not None:
        running_mean.mul_(1-momentum).add_(momentum*m)
        running_var.mul_(1-momentum).add_(momentum*var*n/(n-1))
    return m,(var+eps).rsqrt()

def _bn_elemt(x, w, b, mean, invstd, eps):
    y = (x-_wide(mean, x))*_wide(invstd, x)
    return (y if w is None else y*_wide(w, x)+_wide(b, x)).to(x.dtype)

def _bn_back_reduce(g, x, mean, invstd, w, *needs):
    sum_g,sum_gx = g.sum(_over(x)),(g*(x-_wide(mean, x))).sum(_over(x))
    return sum_g,sum_gx,(sum_gx*invstd).to(x.dtype),sum_g.to(x.dtype)

def _bn_back_elemt(g, x, mean, invstd, w, sum_g, sum_gx, counts):
    n = counts.sum()
    res = (g-_wide(sum_g, x)/n-(x-_wide(mean, x))*_wide(invstd**2*sum_gx, x)/n)*_wide(invstd, x)
    return (res if w is None else res*_wide(w, x)).to(x.dtype)

_kernels = dict(batch_norm_stats=_bn_stats, batch_norm_gather_stats_with_counts=_bn_gather, batch_norm_elemt=_bn_elemt,
                batch_norm_backward_reduce=_bn_back_reduce, batch_norm_backward_elemt=_bn_back_elemt)
