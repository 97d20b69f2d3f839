"""Kill ranks of a run at random points, and compare with the run that nobody disturbed:

    python tools/survivors.py [--kills 60] [--seed 0] [--only 4,fastai,plateau]

Each run trains on several ranks under `--on-failure shrink`: a script without a word about checkpoints. The cases: 3 and 4 ranks, this
package's Learner and fastai's, a plain fit, accumulation, a rate that falls on a plateau, bf16. A point is a number of events (calls and
returns of functions, of Python and of C) that a rank has come to since its start: there it kills itself, sometimes another rank at the
same time. Half of the first deaths are anywhere, a quarter in validation and a quarter in predictions; a later one may come while those
that are left begin. Weights, recorded numbers, learning rates, predictions, the CSV file and the user's own counts are compared, at 1e-9
in float64 (bf16: counts only, since other parts of a batch round in another way). Shown is how long it took from a death to the next
step, and how many steps were done again: at most 10, the distance of states in memory, and the one within which the rank has died."""
import argparse,json,os,random,signal,subprocess,sys,tempfile,time
from contextlib import suppress
from itertools import product
from pathlib import Path

import torch,torch._dynamo # noqa: F401 # here, so that ranks are forks of a process that has imported it

def make_fastai(kind):
    "fastai's Learner, its classes of callbacks, and callbacks for a fit"
    import fastai.learner
    from fastai.vision.all import (Callback,CSVLogger,DataLoader,DataLoaders,GradientAccumulation,GradientClip,ReduceLROnPlateau,
                                   SaveModelCallback)
    fastai.learner.tensor = torch.tensor # so that the smooth loss is float64; fastai's is float32
    def accuracy(pred, targ): return (pred.argmax(-1)==targ).double().mean()
    dls = DataLoaders(*(DataLoader(data(n, i), bs=24, shuffle=i==0, num_workers=0) for i,n in enumerate((394, 50))))
    def learner(net, path):
        return fastai.learner.Learner(dls, net, loss_func=torch.nn.CrossEntropyLoss(), lr=.01, metrics=accuracy, path=path)
    cbs = [GradientClip(5.),CSVLogger(),SaveModelCallback()]
    if kind=='accumulate': cbs.append(GradientAccumulation(48))
    if kind=='plateau': cbs.append(ReduceLROnPlateau(patience=0, min_delta=1.))
    return learner,Callback,cbs

def make(kind):
    "This package's Learner, its classes of callbacks, and callbacks for a fit"
    from learnerdist.all import (Callback,CSVLogger,DataLoaders,GradientAccumulation,GradientClip,Learner,ReduceLROnPlateauCallback,TfmdDL,
                                 accuracy)
    dls = DataLoaders(TfmdDL(data(394, 0), 24, shuffle=True), TfmdDL(data(50, 1), 24))
    def learner(net, path):
        return Learner(dls, net, torch.nn.CrossEntropyLoss(), torch.optim.AdamW, lr=.01, metrics=accuracy, path=path)
    cbs = [GradientClip(5.),CSVLogger()]
    if kind=='accumulate': cbs.append(GradientAccumulation(48))
    if kind=='plateau': cbs.append(ReduceLROnPlateauCallback(patience=0, threshold=.5))
    return learner,Callback,cbs

def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    return [*zip(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g))]

def kill(folder, i, me, ranks):
    "Kill ranks, this one last, if that has not been done"
    try: (folder/f'{i}.fired').write_text(str(time.time()))
    finally:
        for r in sorted(ranks, key=me.__eq__):
            with suppress(ProcessLookupError): os.kill(int((folder/f'{r}.pid').read_text()), signal.SIGKILL)

def train(folder, plan, of_fastai, kind):
    "On each rank; `plan`: by the number of ranks: who dies, after how many events, and with whom"
    torch.set_default_dtype(torch.float32 if kind=='bf16' else torch.float64)
    torch.set_num_threads(1)
    if of_fastai: from learnerdist.fastai import num_distrib,rank_distrib
    else: from learnerdist.all import num_distrib,rank_distrib
    me,W,state = rank_distrib(),num_distrib(),dict(n=0, validation=[], predictions=[]) # events so far; where loops were
    (folder/f'{me}.pid').write_text(str(os.getpid()))
    dies,n_events,ranks = plan.get(str(W), (None,None,()))
    def watch(frame, event, arg):
        state['n'] += 1
        if dies==me and state['n']==n_events: kill(folder, W, me, ranks)

    new,callback,cbs = (make_fastai if of_fastai else make)(kind)
    class Clock(callback):
        order,fit_state,n_steps,n_valid = 70,('n_steps','n_valid'),0,0
        def after_batch(self):
            self.n_steps,self.n_valid = self.n_steps+self.training,self.n_valid+(not self.training)
            if not self.training: state['validation'].append(state['n'])
            if self.training and me==0:
                with open(folder/'steps', 'a') as f: f.write(f'{W} {self.train_iter} {time.time()}\n')
    clock = Clock()
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.BatchNorm1d(20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
    learn = new(net, folder)
    learn.logger = lambda line: None
    with learn.distrib_ctx(split_batches=True, seed=3):
        sys.setprofile(watch)
        fit = learn.fit if kind in ('plateau','bf16') else learn.fit_one_cycle # fastai's takes no `amp` there
        fit(3, cbs=[*cbs,clock], **(dict(amp=torch.bfloat16) if kind=='bf16' else {}))
        rec = learn.recorder
        losses,values,lrs = ([float(o) for o in os] for os in (rec.losses,(v for o in rec.values for v in o),rec.lrs))
        state['predictions'].append(state['n'])
        iters,preds = [*rec.iters],[o.tolist() for o in learn.get_preds()]
        state['predictions'].append(state['n'])
        sys.setprofile(None)
    numbers = [[o.tolist() for o in net.state_dict().values()],losses,values,lrs,iters,[clock.n_steps],preds]
    (folder/f'{me}.json').write_text(json.dumps(dict(numbers=numbers, world=W, **state)))

whats = 'weights','losses','values','rates','steps','counts','predictions'

def launch(case, folder, plan):
    "The launcher's exit status, what each rank left, the rows of the CSV file, and what was printed"
    folder.mkdir()
    nproc,who,kind = case
    job = json.dumps([str(folder),plan,who=='fastai',kind])
    cmd = [sys.executable,'-m','learnerdist.launch','--nproc',nproc,'--on-failure','shrink',__file__,'--train',job]
    res = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    found = {int(o.stem): json.loads(o.read_text()) for o in folder.glob('*.json')}
    return res.returncode,found,(folder/'history.csv').read_text() if (folder/'history.csv').exists() else '',res.stdout

def flat(o): return [n for i in o for n in flat(i)] if isinstance(o, list) else [o]

def close(a, b):
    a,b = flat(a),flat(b)
    return len(a)==len(b) and all(abs(x-y)<=1e-9*max(1, abs(x)) for x,y in zip(a, b))

def draw(rng, ref):
    "A plan of deaths, until at least one rank is left. `ref`: what each rank of the undisturbed run left"
    plan,W = {},len(ref)
    n_events = min(o['n'] for o in ref.values())
    while W>1:
        ranks = rng.sample(range(W), 1+(W>2 and rng.random()<.2))
        where = rng.choice(['anywhere','anywhere','validation','predictions'])
        point = rng.randint(1, n_events if rng.random()<.7 else 3000) # or soon after the start
        at = ref[ranks[0]].get(where)
        if at and W==len(ref): # later ones have other numbers of events
            i = rng.randrange(len(at)-1) if where=='predictions' else rng.randrange(len(at))
            point = rng.randint(at[i], at[i+1]) if where=='predictions' else at[i]+rng.randint(-500, 500)
        plan[W] = ranks[0],point,ranks
        W -= len(ranks)
    return plan

def pauses(folder, plan):
    "For each death after the first step: (seconds to the next step, steps that were done again)"
    lines = [o.split() for o in (folder/'steps').read_text().splitlines()] if (folder/'steps').exists() else []
    steps = [(int(W),int(i),float(t)) for W,i,t in lines]
    for W in plan:
        if not (folder/f'{W}.fired').exists(): continue
        died = float((folder/f'{W}.fired').read_text())
        before,after = [o for o in steps if o[0]>=W],[o for o in steps if o[0]<W]
        if before and after: yield after[0][2]-died,before[-1][1]-after[0][1]+1

cases = [*product(('4','3'), ('ours','fastai'), ('plain','accumulate','plateau','bf16'))]

def main(args):
    rng,died,bad,k,found = random.Random(args.seed),0,[],0,[]
    known = {c: None for c in cases if {*args.only.split(',')}-{''}<={*c}}
    with tempfile.TemporaryDirectory() as d:
        while died<args.kills:
            case = rng.sample(sorted(known), len(known))[0] if k>=len(known) else rng.choice([c for c in known if known[c] is None])
            if known[case] is None: known[case] = launch(case, Path(d)/'-'.join(case), {})
            code,ref,csv,log = known[case]
            assert not code and len(ref)==int(case[0]), log
            k,plan,folder = k+1,draw(rng, ref),Path(d)/f'{k}'
            code,got,rows,log = launch(case, folder, plan)
            n = sum(len(o[2]) for W,o in plan.items() if (folder/f'{W}.fired').exists())
            died += n
            new = [*pauses(folder, plan)]
            found += new
            wrong = differences(got, ref[0], rows, csv, case[2])
            wrong += [f'exit {code}']*bool(code)+['not all']*(len(got)<int(case[0])-n)+['too many steps again']*any(o[1]>11 for o in new)
            messages = [f"{s:.2f} s, {i} steps again" for s,i in new]
            print(f'{k}: {"-".join(case)}: {plan}: {n} died, {messages}: {wrong or "equal"}', flush=True)
            if wrong:
                bad.append(k)
                print(log[-args.tail:], rows, csv, sep='\n', flush=True)
    secs,again = sorted(o[0] for o in found) or [0],[o[1] for o in found] or [0]
    print(f'{k} runs, {died} deaths, {len(bad)} bad: {bad}; to the next step {secs[len(secs)//2]:.2f} s in the median,',
          f'at most {secs[-1]:.2f} s; at most {max(again)} steps again')
    return len(bad)

def differences(got, ref, rows, csv, kind):
    "What differs from the undisturbed run"
    which = ('rates','steps','counts') if kind=='bf16' else whats
    res = [f'{what} of rank {r}' for r,o in got.items() for what,a,b in zip(whats, o['numbers'], ref['numbers'])
           if what in which and not close(a, b)]
    return res + ['CSV']*(kind!='bf16' and not close_rows(rows, csv))

def close_rows(a, b):
    a,b = ([[float(n) for n in o.split(',') if ':' not in n] for o in s.splitlines()[1:]] for s in (a, b)) # fastai's has the time
    return close(a, b)

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--kills', type=int, default=60)
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--tail', type=int, default=3000)
    p.add_argument('--only', default='', help='parts of cases, such as 4,fastai,plateau')
    p.add_argument('--train')
    args = p.parse_args()
    if args.train:
        folder,*rest = json.loads(args.train)
        train(Path(folder), *rest)
    else: sys.exit(main(args))
