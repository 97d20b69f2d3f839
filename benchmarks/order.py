"""One rank's share of a shuffled order: seconds and memory, ours and torch's `DistributedSampler`, each in a process of its own

    python benchmarks/order.py"""
import json,os,resource,subprocess,sys,time
from collections import deque

from common import main,quartiles,save_plot,table,verdict

W,sizes = 8,(10**6, 10**7, 10**8)
most = 10**8     # DistributedSampler holds a list and a tensor of n whole numbers: some 4.6 GiB at 1e8
def rounds(n): return 5 if n<10**8 else 1

def ours(n, rank):
    from learnerdist.data.distributed_dl import DistributedDL
    return iter(DistributedDL(range(n), rank, W, bs=64, shuffle=True).dealer.items)

def torchs(n, rank):
    from torch.utils.data import DistributedSampler
    return iter(DistributedSampler(range(n), W, rank))

def child(way, n, rank):
    "Seconds to the first index and to the last, how many there were, and peak memory over what the imports took (MiB)"
    import torch,torch.utils.data,learnerdist.all # noqa: F401
    torch.set_num_threads(1)
    for _ in globals()[way](2000, rank): pass # what is imported and made once
    base,start = _peak(),time.perf_counter()
    it = globals()[way](n, rank)
    next(it)
    first = time.perf_counter()-start
    deque(it, maxlen=0)
    res = dict(first=first, seconds=time.perf_counter()-start, mib=max(_peak()-base, 0))
    (count,_), = deque(enumerate(globals()[way](n, rank), 1), maxlen=1) # once more, to count them
    return dict(res, count=count)

def _peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/(2**20 if sys.platform=='darwin' else 2**10)

def fresh(way, n, rank=3):
    got = subprocess.run([sys.executable, __file__, '--child', way, str(n), str(rank)], capture_output=True, text=True, check=True)
    return json.loads(got.stdout.splitlines()[-1])

def fits(n):
    "Whether the machine has the memory of the list and the tensor"
    free = os.sysconf('SC_AVPHYS_PAGES')*os.sysconf('SC_PAGE_SIZE')
    return n<=most and 60*n<free

def measure(quick):
    res = {}
    for n in sizes[:2] if quick else sizes:
        ways = ['ours','torchs'] if fits(n) else ['ours']
        if len(ways)<2: print(f'n={n:.0e}: DistributedSampler would need {60*n/2**30:.0f} GiB: left out', flush=True)
        runs = [{k: fresh(k, n) for k in ways} for _ in range(1 if quick else rounds(n))]
        for o in runs:
            for k,v in o.items():
                if v['count']!=n//W: raise SystemExit(f'{k}: {v} for n={n}')
        res[f'{n}'] = {k: [o[k] for o in runs] for k in ways}
    return dict(world_size=W, sizes=res)

def _mid(runs, k): return quartiles([o[k] for o in runs])[1]

def report(res):
    rows = []
    for n,o in res['sizes'].items():
        for k,name in dict(ours='learnerdist', torchs='DistributedSampler').items():
            if k not in o: continue
            rows.append([f'{int(n):.0e}', name, *(f'{_mid(o[k], c):.3f}' for c in ('first','seconds')), f'{_mid(o[k], "mib"):.1f}'])
        if 'torchs' in o: rows[-2] += [f"{_mid(o['torchs'], c)/_mid(o['ours'], c):.1f}" for c in ('first','seconds')]
    text = table(['n','way','s to the first index','s for the share','peak MiB','times sooner at the first','times faster'],
                 [r+['']*(7-len(r)) for r in rows])
    at = res['sizes']['10000000']
    lines = [verdict(f"n = 1e7, {what} over DistributedSampler's", _mid(at['ours'], k)/_mid(at['torchs'], k), 1)
             for what,k in (('time of the share','seconds'),('memory','mib'))]
    return text+'\n\n'+'\n'.join(lines)

def plot(res, path):
    import matplotlib.pyplot as plt
    fig,axs = plt.subplots(1, 2, figsize=(8, 3.4))
    for k,name in dict(ours='learnerdist', torchs='DistributedSampler').items():
        ns = [n for n,o in res['sizes'].items() if k in o]
        for ax,c,unit in zip(axs, ('seconds','mib'), ('seconds','peak MiB')):
            ax.plot([int(n) for n in ns], [max(_mid(res['sizes'][n][k], c), .1 if c=='mib' else 0) for n in ns], 'o-', label=name)
            ax.set(xscale='log', yscale='log', xlabel='samples in the data set', ylabel=unit)
    axs[0].set_title(f"A rank's share of a shuffled order, {res['world_size']} ranks", loc='left')
    save_plot(fig, axs[0], path)

if __name__=='__main__':
    if sys.argv[1:2]==['--child']: print(json.dumps(child(sys.argv[2], *map(int, sys.argv[3:]))))
    else: main('order', measure, report, plot)
