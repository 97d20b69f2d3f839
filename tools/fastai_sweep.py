"""Train random fastai learners on 2 and 3 processes and on one at the same global batch size, and compare what comes out:

    python tools/fastai_sweep.py --cases 40 --seed 0 [--only K]

As tools/sweep.py does for the compact Learner: losses, schedules, fastai's `GradientAccumulation` and `GradientClip`, frozen layers, uneven
epochs, and `max_bs` on the ranks alone. A case is *same* (to 3e-5, in float32), *told* (it differs, and a warning was given), *refused*
(ValueError in one process, and on every rank), *DIFFERENT* or *error*. Exit status 1 where one is of the last two."""
import argparse,random,sys,traceback,warnings
from collections import Counter
import torch
from torch import nn
from torch.nn import functional as F
from fastai.callback.training import GradientAccumulation,GradientClip
from fastai.data.core import DataLoaders,TfmdDL
from fastai.learner import Learner
from fastai.losses import BCEWithLogitsLossFlat,CrossEntropyLossFlat,FocalLossFlat,LabelSmoothingCrossEntropyFlat,MSELossFlat
from fastai.optimizer import Adam,SGD
from fastai.torch_core import params,trainable_params
import learnerdist.fastai # noqa: F401 (it patches the Learner)
from learnerdist.testing import run_ranks

class Tagger(nn.Module):
    "Classes of five tokens"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 15)
    def forward(self, x): return self.lin(x).view(-1, 5, 3)

def of_user(p, y): return F.cross_entropy(p, y, reduction='none').mean()
def a_sum(p, y): return .05*F.cross_entropy(p, y, reduction='sum')

losses = dict(ce=CrossEntropyLossFlat, mse=MSELossFlat, bce=BCEWithLogitsLossFlat, smooth=LabelSmoothingCrossEntropyFlat,
              focal=FocalLossFlat, weights=lambda: CrossEntropyLossFlat(weight=torch.tensor([.2,1.,5.])), tokens=CrossEntropyLossFlat,
              ignore=lambda: CrossEntropyLossFlat(ignore_index=-100), user=lambda: of_user, sum=lambda: a_sum)

def draw_case(seed, k):
    "Case `k` of a seed"
    rng = random.Random(f'{seed}-{k}')
    def maybe(p, *of): return rng.choice(of) if rng.random()<p else None
    c = dict(W=rng.choice([2,2,3]), seed=rng.randrange(1000), loss=rng.choice([*losses]), bs=rng.choice([2,3,4]),
             n=rng.choice([36,37,41,48]), n_valid=rng.choice([5,11,12]), adam=rng.random()<.5,
             cycle=rng.random()<.3, drop_last=rng.random()<.3, wd=maybe(.5, .1))
    c |= dict(acc=maybe(.6, 8,13,24), clip=maybe(.3, .1), max_bs=maybe(.6, 1,2,3), freeze=maybe(.2, True), bn=maybe(.15, True))
    if c['max_bs']: c['bn'] = None # its statistics are those of a part, which one process does not have; a part of one sample is refused
    return c

def samples(c):
    "Inputs and targets, for training and validation"
    g = torch.Generator().manual_seed(c['seed'])
    n = c['n']+c['n_valid']
    x = torch.randn(n, 4, generator=g)
    y = x[:,:3].argmax(1)
    if c['loss']=='mse': y = x.roll(1, 1)[:,:3]
    if c['loss']=='bce': y = (x[:,:3]>0).float()
    if c['loss'] in ('tokens','ignore'): y = torch.randint(3, (n,5), generator=g)
    if c['loss']=='ignore': y[torch.rand(n, 5, generator=g)<.5] = -100
    return [*zip(x, y)]

def make_learner(c, bs):
    ds = samples(c)
    dls = DataLoaders(TfmdDL(ds[:c['n']], bs, shuffle=True, drop_last=c['drop_last']), TfmdDL(ds[c['n']:], 4))
    torch.manual_seed(c['seed'])
    layers = nn.Linear(4, 8),nn.BatchNorm1d(8) if c['bn'] else nn.Identity(),nn.Tanh(),nn.Linear(8, 3)
    in_groups = c['freeze'] and c['loss'] not in ('tokens','ignore')
    model = nn.Sequential(*layers) if c['loss'] not in ('tokens','ignore') else Tagger()
    cbs = [cls(v) for cls,v in ((GradientAccumulation,c['acc']),(GradientClip,c['clip'])) if v]
    splitter = (lambda m: [params(m[0]),params(m[1:])]) if in_groups else trainable_params
    opt,lr = (Adam,.01) if c['adam'] else (SGD,.1)
    learn = Learner(dls, model, losses[c['loss']](), opt_func=opt, lr=lr, cbs=cbs, splitter=splitter, wd=c['wd'])
    if in_groups: learn.freeze_to(1)
    return learn

def one_run(c, W):
    "What comes out, on W processes"
    torch.set_num_threads(1)
    learn = make_learner(c, c['bs']*c['W']//W)
    kw = dict(global_bs=c['bs']*c['W'], max_bs=c['max_bs']) if W>1 and c['max_bs'] else {}
    with learn.distrib_ctx(seed=1, timeout_s=60, **kw), learn.no_logging(), learn.no_bar():
        (learn.fit_one_cycle if c['cycle'] else learn.fit)(2)
        rec = learn.recorder
        res = dict(losses=torch.tensor([*map(float, rec.losses)]), values=torch.tensor([[*map(float, o)] for o in rec.values]))
        res |= dict(preds=learn.get_preds()[0], validate=torch.tensor([*map(float, learn.validate())]))
    return res|dict(weights=torch.cat([o.detach().float().flatten() for o in learn.model.state_dict().values()]))

def guarded(c, W):
    "The run's outcome, or its error; and the codes of its warnings"
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter('always')
        try: res = one_run(c, W)
        except Exception as e: res = dict(error=f'{type(e).__name__}: {e}', trace=traceback.format_exc())
    return res|dict(told=[str(o.message) for o in messages if str(o.message).startswith('[')])

def rank_runs(cases): return [guarded(c, c['W']) for c in cases]

def far(a, b):
    "Largest difference, relative where numbers are above 1"
    if a.shape!=b.shape: return float('inf')
    return ((a-b).abs()/b.abs().clamp(min=1)).nan_to_num(0).max().item() if a.numel() else 0.

def judged(alone, ranks):
    "(verdict, by how much or why)"
    errors = [o['error'] for o in (alone,*ranks) if 'error' in o]
    if errors:
        refused = len(errors)==1+len(ranks) and alone['error'].startswith('ValueError')
        return 'refused' if refused else 'error',errors
    bad = {}
    for k in ('weights','losses','values','preds','validate'):
        d = max(far(o[k], alone[k]) for o in ranks)
        if d>3e-5: bad[k] = d
    if not bad: return 'same',''
    return 'told' if any(o['told'] for o in ranks) else 'DIFFERENT',bad

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--cases', type=int, default=40)
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--only', type=int, metavar='K', help='one case in full')
    args = p.parse_args()
    cases = [draw_case(args.seed, k) for k in (range(args.cases) if args.only is None else [args.only])]
    counts = Counter()
    for W in (2,3):
        some = [c for c in cases if c['W']==W]
        for i in range(0, len(some), 20):
            found = run_ranks(rank_runs, W, some[i:i+20], timeout_s=600)
            for c,*ranks in zip(some[i:i+20], *found):
                alone = guarded(c, 1)
                verdict,why = judged(alone, ranks)
                counts[verdict] += 1
                if verdict!='same': print(verdict, c, why, flush=True)
                if args.only is not None: print(alone, *ranks, sep='\n')
    print(f'seed {args.seed}: {len(cases)} cases:', ', '.join(f'{n} {k}' for k,n in counts.items()))
    return counts['DIFFERENT']+counts['error']>0

if __name__=='__main__': sys.exit(main())
