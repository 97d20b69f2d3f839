"""Train random learners on 2 and 3 processes and on one at the same global batch size, and compare what comes out:

    python tools/sweep.py --cases 200 --seed 0 [--dtype float32] [--only K] [--set loss=weighted W=3]

Case K of a seed is always the same: a model, a loss, a structure of samples, a sampler, callbacks, an optimizer. One that differs is made
smaller, option by option, for as long as it differs; the table groups failures by what is left. `--only K` shows one case in full, `--set`
the smallest one with these options. A case is *same*, *told* (it differs, and a warning was given), *refused* (ValueError on every
rank, and if one process fails, on that), *DIFFERENT*, *error*, or *hang*. Exit status 1 where one is DIFFERENT, error or hang.

Ranks agree bit by bit. From one process numbers may differ by 1e-9 in float64 and by 1e-5 in float32, relative where they are above 1; in
a fit that enlarges rounding, by ten times what one process's own do when its first weights are rounded otherwise. Where that is so
much that nothing can be told from it, as in a fit that diverges, the case is *unseen*. In bfloat16, which has 8 bits, that is the rule
for all, above one unit of the last bit: ranks round each sum of gradients. Of a recorded loss above two, since ranks round theirs
before these are added up (seen: 1.5 units, in seed 101, case 67). The self-check sees differences of 2 % and
more in bfloat16: a loss that is nearly a mean (boxes, focal_by_weight) may be DIFFERENT."""
import argparse,ast,math,os,pickle,random,sys,tempfile,traceback,warnings
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.data import (BatchSampler,DataLoader,IterableDataset,RandomSampler,SequentialSampler,SubsetRandomSampler,
                              WeightedRandomSampler)
from learnerdist.all import (AccumMetric,Callback,DataLoaders,GradientAccumulation,GradientClip,Learner,Lookahead,Scheduler,
                             TfmdDL)
from learnerdist.learner.callback import cancels,inner_events
from learnerdist.testing import run_ranks

# --- data: a sample is (input, target) ---------------------------------------------------------------------------------------

C,T,V = 4,5,11 # classes, tokens of a text, words

def vectors(g, n):
    x = torch.randn(n, 6, generator=g)
    return x,x[:,:C].argmax(1)

def images(g, n):
    x = torch.randn(n, 1, 4, 4, generator=g)
    return x,x.flatten(1)[:,:C].argmax(1)

def texts(g, n):
    x = torch.randint(1, V, (n,T), generator=g)
    return x,x[:,0]%C

def tagged(g, n):
    "Texts of uneven length with a class for each token; -100 behind the end"
    x,ends = torch.randint(1, V, (n,T), generator=g),torch.randint(1, T+1, (n,), generator=g)
    past = torch.arange(T)>=ends[:,None]
    return x.masked_fill(past, 0),(x%C).masked_fill(past, -100)

def scenes(g, n):
    "For each image a list entry: a picture of its own height, and a dict of 0 to 3 boxes"
    x = [torch.randn(3+i%3, 6, generator=g) for i in range(n)]
    return x,[dict(boxes=torch.randn(int(torch.randint(1, 4, (), generator=g)), 2, generator=g)) for _ in x]

# --- models ------------------------------------------------------------------------------------------------------------------

class Tagger(nn.Module):
    "Classes of each token `(n,T,C)`, by a GRU or by a layer of a transformer"
    def __init__(self, body):
        super().__init__()
        self.emb,self.body,self.out = nn.Embedding(V, 8),body,nn.Linear(8, C)
    def forward(self, x):
        e = self.emb(x)
        e = self.body(e)[0] if isinstance(self.body, nn.GRU) else self.body(e, src_key_padding_mask=x==0)
        return self.out(e)

class FirstToken(nn.Module):
    "Classes of a text `(n,C)`"
    def __init__(self, **kw):
        super().__init__()
        self.emb,self.out = nn.Embedding(V, 8, **kw),nn.Linear(8, C)
    def forward(self, x): return self.out(self.emb(x).mean(1)+self.emb(x)[:,0])

class Heads(nn.Module):
    "Two outputs, in a dict or a tuple"
    def __init__(self, kind):
        super().__init__()
        self.kind,self.body,self.a,self.b = kind,nn.Linear(6, 7),nn.Linear(7, C),nn.Linear(7, 1)
    def forward(self, x):
        h = torch.tanh(self.body(x))
        return dict(cls=self.a(h), reg=self.b(h)) if self.kind=='dict' else (self.a(h), [self.b(h)])

class Detector(nn.Module):
    "A list of pictures to a list of dicts"
    def __init__(self):
        super().__init__()
        self.lin,self.out = nn.Linear(6, 3),nn.Linear(3, 2)
    def forward(self, xs): return [dict(center=self.out(torch.tanh(self.lin(x)).mean(0))) for x in xs]

class Kept(nn.Module):
    "A running mean that the module keeps itself"
    def __init__(self, n):
        super().__init__()
        self.register_buffer('mean', torch.zeros(n))
    def forward(self, x):
        if self.training: self.mean.lerp_(x.detach().transpose(0, 1).flatten(1).mean(1), .1)
        return x-self.mean.view(1, -1, *[1]*(x.ndim-2))

norms = dict(none=lambda n,d: nn.Identity(), bn=lambda n,d: (nn.BatchNorm2d if d==2 else nn.BatchNorm1d)(n),
             bn_nostats=lambda n,d: (nn.BatchNorm2d if d==2 else nn.BatchNorm1d)(n, track_running_stats=False),
             bn_cumulative=lambda n,d: (nn.BatchNorm2d if d==2 else nn.BatchNorm1d)(n, momentum=None),
             group=lambda n,d: nn.GroupNorm(1, n), own=lambda n,d: Kept(n),
             instance=lambda n,d: nn.InstanceNorm2d(n, track_running_stats=True, affine=True) if d==2 else nn.GroupNorm(1, n))

def has_bias(c): return not c['norm'].startswith(('bn','instance')) # its gradient would be zero but for rounding, which Adam enlarges
def mlp(c): return nn.Sequential(nn.Linear(6, 8, has_bias(c)), norms[c['norm']](8, 1), nn.Tanh(), nn.Linear(8, C))
def conv(c): return nn.Sequential(nn.Conv2d(1, 4, 3, bias=has_bias(c)), norms[c['norm']](4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, C))
def encoder(c): return nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True, bias=False) # as above: that of the keys

# name: data, model, losses
models = dict(mlp=(vectors, mlp, 'class'), conv=(images, conv, 'class'), text=(texts, lambda c: FirstToken(), 'class'),
              gru=(tagged, lambda c: Tagger(nn.GRU(8, 8, batch_first=True)), 'token'),
              transformer=(tagged, lambda c: Tagger(encoder(c)), 'token'), dict_heads=(vectors, lambda c: Heads('dict'), 'heads'),
              tuple_heads=(vectors, lambda c: Heads('tuple'), 'heads'), detector=(scenes, lambda c: Detector(), 'list'))

# --- losses ------------------------------------------------------------------------------------------------------------------

weights = [.2,1.,3.,7.]

class Focal(nn.Module):
    "By hand; over samples, or over the sum of their weights"
    def __init__(self, by_weight=False): super().__init__(); self.by_weight = by_weight # noqa: E702
    def forward(self, out, y):
        logp = F.cross_entropy(out, y, reduction='none')
        w = torch.tensor(weights)[y]
        return ((1-(-logp).exp())**2*w*logp).sum()/(w.sum() if self.by_weight else len(y))

class Learned(nn.Module):
    "A loss with a parameter that the optimizer has, and the model has not"
    def __init__(self): super().__init__(); self.log_scale = nn.Parameter(torch.zeros(())) # noqa: E702
    def forward(self, out, y): return F.cross_entropy(out, y)*(-self.log_scale).exp()+self.log_scale

class PosWeight(nn.BCEWithLogitsLoss):
    def __init__(self, **kw): super().__init__(pos_weight=torch.tensor(weights), **kw)
    def forward(self, out, y): return super().forward(out, F.one_hot(y, C).to(out.dtype))

class OfTokens(nn.CrossEntropyLoss):
    "Over tokens, flattened"
    def forward(self, out, y): return super().forward(out.flatten(0, 1), y.flatten())

class IgnoreSome(nn.CrossEntropyLoss):
    def __init__(self): super().__init__(ignore_index=0)

def of_texts(out, y): return F.cross_entropy(out.transpose(1, 2), y.clamp_min(0), reduction='none').mean(1).mean()
def of_heads(out, y):
    a,b = tree_leaves(out)
    return F.cross_entropy(a, y)+F.mse_loss(b[:,0], y.to(b))
def distances(out, y): return F.mse_loss((out[:,None]-out).norm(dim=-1), (y[:,None]!=y).to(out)) # `cdist` does not know bfloat16
def of_images(outs, ys): return torch.stack([((o['center']-y['boxes'])**2).mean() for o,y in zip(outs, ys)]).mean()
def of_boxes(outs, ys): return torch.cat([(o['center']-y['boxes'])**2 for o,y in zip(outs, ys)]).mean()

ce = nn.CrossEntropyLoss
losses = {'class': dict(mean=ce, weighted=lambda: ce(torch.tensor(weights)), ignore=IgnoreSome, sum=lambda: ce(reduction='sum'),
                        pos_weight=PosWeight, smooth=lambda: ce(label_smoothing=.1), focal=Focal,
                        focal_by_weight=lambda: Focal(True), learned=Learned, distances=lambda: distances),
          'token': dict(mean=lambda: of_texts, tokens=OfTokens, tokens_weighted=lambda: OfTokens(torch.tensor(weights)),
                        sum=lambda: OfTokens(reduction='sum')),
          'heads': dict(mean=lambda: of_heads), 'list': dict(mean=lambda: of_images, boxes=lambda: of_boxes)}

# --- loaders -----------------------------------------------------------------------------------------------------------------

class Stream(IterableDataset):
    def __init__(self, items): self.items = items
    def __iter__(self): return iter(self.items)

class OwnBatches:
    "A batch sampler of the user's"
    def __init__(self, n, bs): self.n,self.bs = n,bs
    def __len__(self): return math.ceil(self.n/self.bs)
    def __iter__(self): return iter(torch.randperm(self.n).split(self.bs))

def as_list(b): return tuple(map(list, zip(*b)))

def train_dl(c, items, bs):
    kw,n,s,L = {},len(items),c['sampler'],TfmdDL if c['loader']=='ours' else DataLoader
    if c['model']=='detector': kw['collate_fn'] = as_list
    sized = {'bs' if L is TfmdDL else 'batch_size': bs, 'drop_last': c['drop_last']}
    if s=='stream': return L(Stream(items), **sized, **kw)
    if s=='batches': return L(items, batch_sampler=BatchSampler(RandomSampler(items), bs, c['drop_last']), **kw)
    if s=='own_batches': return L(items, batch_sampler=OwnBatches(n, bs), **kw)
    made = dict(replace=lambda: RandomSampler(items, replacement=True, num_samples=n),
                weighted=lambda: WeightedRandomSampler([1.+i%3 for i in range(n)], n),
                subset=lambda: SubsetRandomSampler(range(0, n, 2)), sequential=lambda: SequentialSampler(items))
    return L(items, **sized, **kw, **({'shuffle': True} if s=='random' else {'sampler': made[s]()}))

def samples(c, n, seed):
    x,y = models[c['model']][0](torch.Generator().manual_seed(seed), n)
    return [dict(x=a, y=b) for a,b in zip(x, y)] if c['items']=='dict' else [(a,b) for a,b in zip(x, y)]

def make_dls(c, bs, seed=1):
    valid,n = samples(c, c['n_valid'], seed+100),c['n']*(2 if c['sampler']=='subset' else 1)
    kw = dict(collate_fn=as_list) if c['model']=='detector' else {}
    return DataLoaders(train_dl(c, samples(c, n, seed), bs), TfmdDL(valid, c['valid_bs'], **kw)) # its batch size is that of one process

# --- callbacks ---------------------------------------------------------------------------------------------------------------

class FreezeAt(Callback):
    "Freeze the first layer, or unfreeze one that was frozen, at an event of epoch 1"
    def __init__(self, event, on): self.event,self.on = event,on
    def before_fit(self): first_layer(self.learn.model, not self.on)
    def before_epoch(self): self._at('before_epoch', True)
    def before_train(self): self._at('before_train', True)
    def before_batch(self): self._at('before_batch', self.training and self.iter==1)
    def _at(self, event, now):
        if event==self.event and now and self.epoch==1: first_layer(getattr(self.model, 'module', self.model), self.on)

def first_layer(model, on):
    first = next(m for m in model.modules() if list(m.parameters(recurse=False)))
    for p in first.parameters(): p.requires_grad_(on)

class RaiseAt(Callback):
    "Raise a Cancel exception on one rank or on all of them"
    def __init__(self, event, what, step, rank, order=0):
        self.what,self.step,self.rank,self.order = what,step,rank,order
        setattr(self, event, self._event)
        self.event,self.n = event,0
    def before_fit(self):
        if self.event!='before_fit': self.n = 0
    def _event(self):
        if self.event in inner_events and self.training==(self.what=='validate'): return # loops of validation have other lengths
        now,self.n = self.n,self.n+1
        if now==self.step and self.rank in (None,int(os.environ.get('RANK', 0))): raise cancels[self.what]

def callbacks(c, k):
    "`k` is how many times as many samples a batch of this process holds as one of a rank"
    res = []
    if c['acc']: res.append(GradientAccumulation(c['acc']*c['W']))
    if c['clip']: res.append(GradientClip(c['clip']))
    if c['sched']: res.append(Scheduler(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, .9), by=c['sched']))
    if c['freeze']: res.append(FreezeAt(*c['freeze']))
    if c['cancel']: res.append(RaiseAt(*c['cancel'][:3], c['cancel'][3] if k==1 else None)) # one process stands for all
    return res

# --- one run -----------------------------------------------------------------------------------------------------------------

sgd = lambda ps, lr: torch.optim.SGD(ps, lr, momentum=.9)
opts = dict(sgd=sgd, adam=torch.optim.Adam, adamw=torch.optim.AdamW, rms=torch.optim.RMSprop, adagrad=torch.optim.Adagrad,
            lookahead=lambda ps, lr: Lookahead(sgd(ps, lr), k=2), amsgrad=lambda ps, lr: torch.optim.Adam(ps, lr, amsgrad=True))

class OfDict(nn.Module):
    def __init__(self, model): super().__init__(); self.inner = model # noqa: E702
    def forward(self, b): return self.inner(b['x'])

def rmse(out, y):
    a = tree_leaves(out)[0]
    return ((a.flatten(1)[:,0]-tree_leaves(y)[0].flatten()[:len(a)].to(a))**2).mean().sqrt()
def first_mean(out, y): # over samples
    return torch.stack([tree_leaves(o)[0].flatten()[:1].sum() for o in (out if isinstance(out, list) else tree_leaves(out)[0])]).mean()
metrics = dict(none=None, mean=first_mean, rmse=rmse, accum=rmse)

def make_learner(c, bs):
    loss,model = losses[models[c['model']][2]][c['loss']](),models[c['model']][1](c)
    own = [*loss.parameters()] if isinstance(loss, nn.Module) else []
    func,metric = loss,metrics[c['metric']]
    if c['items']=='dict':
        model,func = OfDict(model),lambda out,b: loss(out, b['y'])
        metric = metric and (lambda out,b: metrics[c['metric']](out, b['y']))
    if c['metric']=='accum': metric = AccumMetric(metric, name='accum')
    res = Learner(make_dls(c, bs), model, func, opts[c['opt']], lr=c['lr'], metrics=metric, splitter=lambda m: [*m.parameters(),*own])
    res.logger = lambda line: None
    return res,own

def one_run(c, k=1, nudge=None):
    "What comes out of a run; `k=W` for one process with the batches of W; `nudge`: a seed by which the first weights are rounded otherwise"
    torch.set_default_dtype(getattr(torch, c['dtype']))
    torch.manual_seed(c['seed'])
    random.seed(c['seed'])
    out = {}
    for fold in range(c['folds']):
        learn,own = make_learner(c, c['bs']*k)
        if nudge is not None: round_otherwise([*learn.model.parameters(),*own], nudge)
        kw = dict(global_bs=c['bs']*c['W'], max_bs=c['max_bs']) if c['max_bs'] and k==1 else {} # one process has no parts
        if c['folds']==1: kw['seed'] = 5
        with learn.distrib_ctx(timeout_s=30, **kw):
            _fits(c, learn, k)
            final = dict(validate=learn.validate())
            if c['preds']: final['preds'] = learn.get_preds()
        rec = learn.recorder
        final.update(weights=[o.detach().clone() for o in [*learn.model.state_dict().values(),*own]])
        final.update({o: getattr(rec, o) for o in ('lrs','losses','values')})
        out.update({f'fold {fold} {a}' if c['folds']>1 else a: b for a,b in final.items()})
    if c['after']: out['streams afterwards'] = [torch.rand(2), random.random()]
    return out

@torch.no_grad()
def round_otherwise(params, seed):
    "Move each number to one of its neighbours"
    g = torch.Generator().manual_seed(seed)
    for p in params: p.copy_(torch.nextafter(p, torch.where(torch.rand(p.shape, generator=g)<.5, -math.inf, math.inf)))

def _fits(c, learn, k):
    fit = learn.fit_one_cycle if c['cycle'] else learn.fit
    fit(c['epochs'], cbs=callbacks(c, k))
    if not c['late']: return
    learn.dls = make_dls(dict(c, n=c['n']+16), c['bs']*k, seed=2)
    fit(1)

# --- cases -------------------------------------------------------------------------------------------------------------------

base = dict(W=2, seed=0, dtype='float64', model='mlp', norm='none', loss='mean', items='tuple', sampler='random', loader='ours', n=48,
            n_valid=23, bs=4, valid_bs=5, drop_last=False, opt='sgd', lr=.1, cycle=False, sched=None, acc=None, clip=None, freeze=None,
            cancel=None, metric='none', folds=1, late=False, preds=True, after=False, epochs=2, max_bs=None)
# Options that name no class of fault; `n` does where it does not divide
sizes = 'W','seed','dtype','n','n_valid','bs','valid_bs','epochs','lr'

in_step = 'before_batch after_pred after_loss before_backward after_backward before_step after_step'.split()
around = dict(fit=['before_fit','before_epoch','before_train','after_batch','after_train','before_validate','after_validate','after_epoch'],
              epoch=['before_epoch','before_train','after_batch','after_train','before_validate','after_validate'],
              train=['before_train','after_batch'], validate=['before_validate','after_batch'])

def draw_cancel(rng, W):
    "(event, what is cancelled, at which call, on which rank), None for all ranks"
    what = rng.choice(['fit','epoch','train','validate','batch','step','backward'])
    inner = in_step[:3] if what=='validate' else in_step
    event = dict(step='before_step', backward='before_backward').get(what) or rng.choice([*around.get(what, []),*inner])
    return event,what,rng.randrange(6 if event in in_step or event=='after_batch' else 2),rng.choice([None,None,*range(W)])

def draw_case(seed, k, worlds=(2,3), dtype='float64'):
    "Case `k` of a seed"
    rng = random.Random(f'{seed}-{k}')
    maybe = lambda p, *o: rng.choice(o) if rng.random()<p else None
    W,model = rng.choice(worlds),rng.choice(list(models))
    kind,bs = models[model][2],rng.choice([2,3,4])
    whole,image_like = bs*W*rng.choice([3,4,5]),model in ('mlp','conv')
    freezes = [(event, on) for event in ('before_epoch','before_train','before_batch') for on in (True,False)]
    c = dict(W=W, seed=rng.randrange(1000), model=model, bs=bs, n=whole, n_valid=rng.choice([7,16,23]), valid_bs=rng.choice([1,4,5]),
             loss=maybe(.5, *losses[kind]), opt=maybe(.5, *opts), norm=maybe(.6, *list(norms)[1:]) if image_like else None,
             metric=maybe(.4, 'mean','mean','accum','rmse'), loader=maybe(.4, 'torch'), items=maybe(.15, 'dict'), clip=maybe(.2, .05,1.),
             sampler=maybe(.5, 'sequential','replace','weighted','subset','batches','own_batches','stream'),
             sched=maybe(.15, 'step','epoch'), acc=maybe(.25, 2*bs,3*bs), cycle=maybe(.15, True), folds=maybe(.08, 2),
             late=maybe(.1, True), after=maybe(.08, True), freeze=maybe(.15, *freezes))
    c = {a: b for a,b in c.items() if b is not None}
    if rng.random()<.25: c['cancel'] = draw_cancel(rng, W)
    if rng.random()<.3 and c.get('sampler')!='own_batches': c.update(n=whole-rng.randrange(1, bs*W), drop_last=rng.random()<.4)
    if rng.random()<.3: c['max_bs'] = rng.choice([1,2,3])
    plain = c.get('opt') in (None,'sgd','lookahead')
    lr = (.002 if c.get('loss')=='sum' else .1) if plain else .01 # a sum over a batch would diverge
    return fitting(base | c | dict(dtype=dtype, lr=lr))

def fitting(c):
    "`c` without options that do not go together"
    c = dict(c)
    if c['cancel']: c.update(folds=1, late=False)
    # a part hears the events of a batch; a batch sampler of the user's has no size
    if c['cancel'] or c['sampler'] in ('batches','own_batches'): c['max_bs'] = None
    if c['cycle']: c['sched'] = None
    if c['sampler'] in ('stream','own_batches'): c.update(cycle=False, drop_last=False)
    if c['sampler']=='own_batches': c['acc'] = None
    if c['model']=='detector': c.update(items='tuple', metric='none' if c['metric'] in ('rmse','accum') else c['metric'])
    if c['loss'] not in losses[models[c['model']][2]]: c['loss'] = 'mean'
    if c['model'] not in ('mlp','conv'): c['norm'] = 'none'
    if c['norm']=='bn_nostats': c['model'] = 'conv' # a batch of one sample has one value of each channel otherwise
    if c['metric']=='accum' and (c['model'].endswith('heads') or c['items']=='dict'): c['metric'] = 'rmse' # it concatenates tensors
    return c

# --- many runs ---------------------------------------------------------------------------------------------------------------

def guarded(c, k=1, nudge=None):
    "The run's outcome, or its error; and the warnings"
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter('always')
        try: res = one_run(c, k, nudge)
        except Exception as e: res = dict(error=f'{type(e).__name__}: {e}', trace=''.join(traceback.format_exception(e)))
        finally: torch.set_default_dtype(torch.float32)
    return res | dict(messages=[str(o.message) for o in messages if issubclass(o.category, UserWarning)])

def rank_runs(cases, folder):
    "On each rank: run the cases one after another, each outcome in a file"
    for i,c in enumerate(cases):
        res = guarded(c)
        (Path(folder)/f'{i}-{os.environ["RANK"]}.part').write_bytes(pickle.dumps(res))
        (Path(folder)/f'{i}-{os.environ["RANK"]}.part').rename(Path(folder)/f'{i}-{os.environ["RANK"]}.pkl')

def on_ranks(cases, W, timeout_s=600):
    "Outcomes by case and rank; one that some rank did not come back from is a hang, and those after it are run without it"
    res = []
    while len(res)<len(cases):
        with tempfile.TemporaryDirectory() as d:
            todo = cases[len(res):][:25]
            failed = run_ranks(rank_runs, W, todo, d, timeout_s=timeout_s+5*len(todo), errors='return')
            for i in range(len(todo)):
                files = [Path(d)/f'{i}-{r}.pkl' for r in range(W)]
                if not all(f.exists() for f in files):
                    errors = [f'{getattr(o, "kind", "")}: {getattr(o, "message", "")}' for o in failed]
                    res.append([dict(hang=True, messages=[], error=o) for o in errors])
                    break
                res.append([pickle.loads(f.read_bytes()) for f in files])
    return res

def outcomes(cases):
    "(alone, [of each rank]) for each case; one start of processes for each world size and 25 cases"
    res = [None]*len(cases)
    for W in sorted({c['W'] for c in cases}):
        at = [i for i,c in enumerate(cases) if c['W']==W]
        for i,o in zip(at, on_ranks([cases[i] for i in at], W)): res[i] = o
    return [(guarded(c, c['W']),o) for c,o in zip(cases, res)]

# --- comparing ---------------------------------------------------------------------------------------------------------------

def leaves(o):
    "Numbers and tensors of lists and dicts of any class, nested"
    if isinstance(o, dict): return [a for v in o.values() for a in leaves(v)]
    return [a for v in o for a in leaves(v)] if isinstance(o, (list,tuple)) else [o]

def distance(a, b):
    "Largest difference, relative where numbers are above 1; inf where structures differ"
    xs,ys = leaves(a),leaves(b)
    if len(xs)!=len(ys): return math.inf
    return max([_far(x, y) for x,y in zip(xs, ys)], default=0.)

def _far(x, y):
    if x is None or y is None or isinstance(x, str): return 0. if x is y or x==y else math.inf
    x,y = (torch.as_tensor(o, dtype=torch.double) for o in (x, y)) # not by the default dtype, which is float32 here
    if x.shape!=y.shape or not torch.equal(x.isnan(), y.isnan()): return math.inf
    return ((x-y).abs()/y.abs().clamp_min(1)).nan_to_num(0).max().item() if x.numel() else 0.

harmless = 'unused-parameters','split-stream','micro-batches' # what these warnings are about changes no number
def explained(messages):
    "Whether one of these warnings may be the cause of a difference"
    return any(not o.startswith(tuple(f'[{k}]' for k in harmless)) for o in messages)

# How far a run may be from one process's, and from where on nothing can be told from that process's own rounding
tolerances = dict(float64=(1e-9, 1e-3), float32=(1e-5, 1e-2), bfloat16=(2**-7, 2.))

def judged(c, alone, ranks):
    "(verdict, where or why, by how much)"
    tol = tolerances[c['dtype']][0]
    errors = [o['error'] for o in ranks if 'error' in o]
    if any('hang' in o or 'imed out' in o.get('error', '') for o in ranks): return 'hang',errors[0],math.inf
    # a last batch of one sample, for BatchNorm: one process refuses it, and so does every rank
    refuses = 'error' in alone and alone['error'].startswith('ValueError') and len(errors)==len(ranks)
    if 'error' in alone and not refuses: return 'error',f'alone: {alone["error"]}; ranks: {errors}',math.inf
    if errors: return 'refused' if len(errors)==len(ranks) and all('ValueError' in o for o in errors) else 'error',errors[0],math.inf
    keys = [a for a in alone if a!='messages']
    far = {f'{a} between ranks': max(distance(o[a], ranks[0][a]) for o in ranks) for a in keys}
    if has_one_answer(c): far |= {a: distance(ranks[0][a], alone[a]) for a in keys}
    coarse = 2 if c['dtype']=='bfloat16' else 1
    bad = {a: d for a,d in far.items() if d>(0 if 'between' in a else tol*coarse if a.endswith('losses') else tol)}
    if {*bad}&{*keys}: # a difference from one process, not between ranks
        free = rounding(c, alone, keys)
        unseen = any(free.get(a, 0)>tolerances[c['dtype']][1] for a in bad)
        bad = {a: d for a,d in bad.items() if d>free.get(a, 0)}
        if unseen and not bad: return 'unseen','',max(far.values())
    if not bad: return 'same','',max(far.values())
    return 'told' if explained(o for r in ranks for o in r['messages']) else 'DIFFERENT',', '.join(bad),max(bad.values())

def rounding(c, alone, keys, seeds=range(6)):
    "By how much outcomes may differ for rounding: ten times as much as one process's own do where its first weights are rounded otherwise"
    others = [guarded(c, c['W'], seed) for seed in seeds]
    return {a: 10*max(distance(o.get(a), alone[a]) for o in others) for a in keys}

def has_one_answer(c):
    """Whether one process could do the same: not if a rank cancels a batch alone, or validation ends after so many batches of each rank;
    nor if a buffer is that of the first part"""
    if c['max_bs'] and c['norm']=='own': return False
    if not c['cancel']: return True
    event,what,_,rank = c['cancel']
    return not (event in in_step and (rank is not None or what=='validate') or what=='validate' and event=='after_batch')

faults = 'DIFFERENT','error','hang','refused','told'
_verdicts = {}

def verdicts(cases):
    "Of each case; none is run twice"
    todo = {repr(c): c for c in cases if repr(c) not in _verdicts}
    for i in range(0, len(todo), 50):
        some = [*todo.values()][i:i+50]
        for c,o in zip(some, outcomes(some)): _verdicts[repr(c)] = judged(c, *o)
    return [_verdicts[repr(c)] for c in cases]

def smaller(c):
    "`c` with one option back at its default"
    res = [fitting({**c, k: v}) for k,v in base.items() if c[k]!=v and k not in ('W','seed','dtype','n','drop_last','lr')]
    if c['drop_last'] or c['n']%(c['W']*c['bs']): res.append({**c, 'drop_last': False, 'n': c['W']*c['bs']*4})
    return [o for o in res if o!=c]

def parts_of(c):
    "The smallest cases with one of the options of `c` each: an option, and the model that it may need"
    kept = {k: v for k,v in c.items() if v!=base[k] and k not in sizes}
    plain = {**base, 'W': c['W'], 'dtype': c['dtype']}
    res = [fitting({**plain, **o, k: v}) for o in ({}, {'model': c['model']}) for k,v in kept.items()]
    if c['n']%(c['W']*c['bs']) and not c['drop_last']: res += [{**o, 'n': 4*4*o['W']-5} for o in (plain, *res)]
    return [o for o in {repr(o): o for o in res}.values() if o not in (c, plain)]

def shrunk(found):
    "Each (number, case, verdict) with the smallest case found that fails too; a round for all of them at a time"
    todo,done,smaller_ = [*found],[],parts_of
    while todo:
        tries = [smaller_(c) for _,c,_ in todo]
        vs = iter(verdicts([t for ts in tries for t in ts]))
        rows,todo = [(o, [(t, next(vs)) for t in ts]) for o,ts in zip(todo, tries)],[]
        for (k,c,v),ts in rows:
            better = next(((k, t, w) for t,w in ts if w[0] in faults), None)
            if better and smaller_ is parts_of: done.append(better)
            elif better or smaller_ is parts_of: todo.append(better or (k, c, v))
            else: done.append((k, c, v))
        smaller_ = smaller
        print(f'… {len(todo)} of {len(found)} may be made smaller', file=sys.stderr, flush=True)
    return sorted(done, key=lambda o: o[0])

def named(c):
    "The options of a case that are not the default ones"
    opts = {k: v for k,v in c.items() if v!=base[k] and k not in ('seed','lr')}
    if c['n']%(c['W']*c['bs']) and not c['drop_last']: opts['n'] = f"{c['n']} of {c['W']}x{c['bs']}"
    return opts

def class_of(c):
    "What a failure is grouped by"
    opts = {k: v for k,v in named(c).items() if k not in sizes or k=='n' and ' of ' in str(v)}
    if 'n' in opts: opts['n'] = 'uneven'
    if 'cancel' in opts: opts['cancel'] = f"{opts['cancel'][1]} in {opts['cancel'][0]} on {'all' if opts['cancel'][3] is None else 'one'}"
    return ', '.join(f'{k}={v}' for k,v in sorted(opts.items())) or 'plain'

def table(found):
    "Failures by class, each with its smallest case"
    groups = {}
    for k,c,v in found: groups.setdefault((v[0],class_of(c)), []).append((k,c,v))
    for (what,name),rows in sorted(groups.items(), key=lambda o: (faults.index(o[0][0]),-len(o[1]))):
        _,c,(_,where,by) = min(rows, key=lambda o: len(named(o[1])))
        numbers,where = ', '.join(str(o[0]) for o in rows[:12]),' '.join(where.split())[:300]
        print(f'{what:9} {name}\n          {len(rows)} cases: {numbers}; {by:.2g}: {where}')
        print(f'          {" ".join(f"{a}={b!r}" for a,b in named(c).items())} seed={c["seed"]}', flush=True)

def show(c):
    "One case in full"
    (alone,ranks), = outcomes([c])
    print(named(c), *judged(c, alone, ranks), sep='\n')
    for who,o in [('alone',alone),*enumerate(ranks)]:
        numbers = {k: v for k,v in o.items() if k in ('losses','values','lrs','validate')}
        print(f'--- {who}', o.get('trace') or o.get('error') or numbers, *o['messages'], sep='\n')

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--cases', type=int, default=200)
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--only', type=int, metavar='K', help='show one case in full')
    p.add_argument('--set', nargs='+', metavar='NAME=VALUE', help='show the smallest case with these options')
    p.add_argument('--dtype', default='float64', choices=tolerances)
    p.add_argument('--world', default='2,3', help='numbers of processes to draw from')
    p.add_argument('--no-shrink', action='store_true')
    args = p.parse_args()
    worlds = tuple(map(int, args.world.split(',')))
    if args.set: return show(fitting(base | dict(map(option, args.set))))
    if args.only is not None: return show(draw_case(args.seed, args.only, worlds, args.dtype))
    cases = [draw_case(args.seed, k, worlds, args.dtype) for k in range(args.cases)]
    vs = verdicts(cases)
    found = [(k, c, v) for k,(c,v) in enumerate(zip(cases, vs)) if v[0] in faults]
    table(found if args.no_shrink else shrunk(found))
    counts = {k: sum(v[0]==k for v in vs) for k in ('same','unseen',*faults)}
    print(f'seed {args.seed}: {len(cases)} cases:', ', '.join(f'{n} {k}' for k,n in counts.items() if n))
    return any(v[0] in faults[:3] for v in vs)

def option(o):
    "A `NAME=VALUE` of the command line"
    k,_,v = o.partition('=')
    if k not in base: raise SystemExit(f'{k!r} is no option of a case: {", ".join(base)}')
    try: return k,ast.literal_eval(v)
    except (ValueError,SyntaxError): return k,v

if __name__=='__main__': sys.exit(main())
