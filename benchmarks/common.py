"""What the benchmarks share: the machine, turns, medians and ratios, tables, files"""
import argparse,importlib,json,os,platform,random,re,statistics,time
from datetime import date
from importlib.metadata import PackageNotFoundError,version
from pathlib import Path

import torch
import torch.distributed as dist
from learnerdist.core.collectives import broadcast_object
from learnerdist.core.env import current_group,group_size
from learnerdist.launch.processes import call_on_ranks,share_of_cores

here = Path(__file__).parent
packages = 'torch','fastai','accelerate','lightning-fabric'

# --- the machine ------------------------------------------------------------------------------------------------------------

def processor():
    "What the machine computes on"
    if torch.cuda.is_available(): return torch.cuda.get_device_name()
    info = Path('/proc/cpuinfo')
    names = [o.partition(':')[2].strip() for o in info.read_text().splitlines() if o.startswith('model name')] if info.exists() else []
    return f'{os.cpu_count()} cores of {names[0] if names else platform.machine()}'

def _version(name):
    try: return version(name)
    except PackageNotFoundError: return None

def machine():
    "Machine, versions, day and load, as they are now"
    return dict(processor=processor(), system=platform.system(), python=platform.python_version(), date=str(date.today()),
                load=round(os.getloadavg()[0], 1), versions={o: v for o in packages if (v := _version(o))})

def describe(m):
    "One line about `machine()`"
    return f"{m['processor']}, {m['system']}, load {m['load']} at the start; Python {m['python']}, " + \
           ', '.join(f'{k} {v}' for k,v in m['versions'].items()) + f"; {m['date']}"

def peer(module, package=None):
    "The module, or None, with a line that says so, where its package is not installed"
    try: return importlib.import_module(module)
    except ImportError as e:
        if e.name!=module.partition('.')[0]: raise
        print(f'{package or module} is not installed: left out (pip install learnerdist[bench])', flush=True)

# --- ranks ------------------------------------------------------------------------------------------------------------------

def on_ranks(func, world_size, *args, n_threads=None, launched=False):
    "What `func(*args)` returned on each of so many processes. One process gets no more threads than one of two, to compare with them"
    call = (func,args) if launched or world_size>1 else (_unlaunched,(func,*args))
    return call_on_ranks(call[0], world_size, call[1], n_threads=n_threads or share_of_cores(max(world_size, 2)))

def _unlaunched(func, *args):
    "One process is none of a launch: a peer would want to hear of others"
    for k in ('RANK','WORLD_SIZE','LOCAL_RANK','LOCAL_WORLD_SIZE'): os.environ.pop(k)
    return func(*args)

def now():
    "Seconds, once the GPU has done what it was given"
    if torch.cuda.is_available(): torch.cuda.synchronize()
    return time.perf_counter()

def together():
    if group_size()>1: dist.barrier(group=current_group())

def slowest(ranks):
    "Of lists of seconds by name, one dict for each rank, the slowest rank's at each place"
    return {k: [max(o) for o in zip(*[r[k] for r in ranks])] for k in ranks[0]}

# --- turns ------------------------------------------------------------------------------------------------------------------

limit = float(os.environ.get('BENCH_SECONDS') or 'inf') # After which no further round begins; fewer rounds have wider quartiles

def turns(
    ways, # By name: called once a round, return the seconds that count; None: the whole call's
    n_rounds,
    warm=1 # Rounds before, that do not count
):
    "Seconds of each way, by round; in an order drawn anew each round, since whatever else the machine does is to slow all of them"
    times,rng,begin = {k: [] for k in ways},random.Random(0),now()
    for i in range(n_rounds+warm):
        for k in rng.sample(list(ways), len(ways)):
            together()
            start = now()
            secs = ways[k]()
            times[k].append(now()-start if secs is None else secs)
        if i>=warm+2 and broadcast_object(now()-begin>limit): break
    return {k: v[warm:] for k,v in times.items()}

def quartiles(xs): return statistics.quantiles(xs, n=4, method='inclusive') if len(xs)>1 else list(xs)*3

def ratios(times, base):
    "Of each way, the quartiles of its ratios to `base` in the same round"
    return {k: quartiles([a/b for a,b in zip(v, times[base])]) for k,v in times.items() if k!=base}

def ratio_text(q): return f'{q[1]:.3f} ({q[0]:.3f} to {q[2]:.3f})'

def all_close(what, diffs, tol):
    "Stop where two ways did not compute the same: a figure about something else is worse than none"
    if not all(o<=tol for o in diffs.values()): raise SystemExit(f'{what}: these do not agree to {tol}: {diffs}')

# --- tables and files -------------------------------------------------------------------------------------------------------

def table(head, rows):
    "In markdown"
    return '\n'.join('| '+' | '.join(str(c) for c in o)+' |' for o in [head, ['---']*len(head), *rows])

def verdict(what, value, target, fmt='{:.3f}'):
    "A target, and whether it was met"
    met = value<=target
    return f"- {what}: at most {fmt.format(target)}, seen {fmt.format(value)}: {'met' if met else '**missed**'}."

def bars(path, groups, ylabel, title, line=None, log=False):
    "A bar for each way in each group: (low, middle, high) by way, by group"
    plt = peer('matplotlib.pyplot', 'matplotlib')
    if plt is None: return
    ways = list(dict.fromkeys(k for o in groups.values() for k in o))
    fig,ax = plt.subplots(figsize=(4+1.2*len(groups)+.2*len(ways)*len(groups), 3.6))
    width = .8/max(map(len, groups.values()))
    for way in ways: # a group has the bars that it has, side by side, around its middle
        at = [(j+([*o].index(way)-(len(o)-1)/2)*width, o[way]) for j,o in enumerate(groups.values()) if way in o]
        mids = [q[1] for _,q in at]
        err = [[q[1]-q[0] for _,q in at], [q[2]-q[1] for _,q in at]]
        ax.bar([x for x,_ in at], mids, .94*width, yerr=err, label=way, capsize=2)
    if line is not None: ax.axhline(line, color='black', lw=.8, ls=':')
    if log: ax.set_yscale('log')
    ax.set(xticks=range(len(groups)), xticklabels=list(groups), ylabel=ylabel, title=title)
    save_plot(fig, ax, path, loc='upper left', bbox_to_anchor=(1, 1))

def save_plot(fig, ax, path, **legend):
    ax.legend(fontsize=7, **legend)
    fig.tight_layout()
    fig.savefig(path, dpi=110)

def into_readme(name, text, file=here/'README.md'):
    "Put `text` between the markers of `name`"
    old = file.read_text()
    new,n = re.subn(rf'(<!-- {name} -->\n).*?(<!-- end -->)', lambda m: m[1]+text+'\n'+m[2], old, flags=re.S)
    if n!=1: raise ValueError(f'{file}: {n} places for {name!r}, instead of one')
    file.write_text(new)

def main(name, measure, report, plot, kept_as=None):
    "Measure, print the report, and keep figures, plot and README; `--quick` only prints"
    p = argparse.ArgumentParser(description=f'The benchmark of {name}')
    p.add_argument('--quick', action='store_true', help='few rounds, nothing is kept: does it run?')
    p.add_argument('--report', action='store_true', help='measure nothing: report, plot and README from the figures kept')
    p.add_argument('--cases', nargs='+', help='beginnings of the names of cases: measure these, and keep the figures of the others')
    p.add_argument('--out', type=Path, default=here/'results', help='folder of figures and plots')
    args = p.parse_args()
    file = args.out/f'{kept_as or name}.json'
    if not args.report:
        start,res = time.time(),dict(machine=machine())
        res.update(measure(args.quick, cases=args.cases) if args.cases else measure(args.quick))
        if args.cases and file.exists(): res['cases'] = {**json.loads(file.read_text())['cases'], **res['cases']}
        res['seconds'] = round(time.time()-start)
    else: res = json.loads(file.read_text())
    text = f"{describe(res['machine'])}; {res['seconds']} s.\n\n{report(res)}"
    print(text, flush=True)
    if args.quick: return
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report: file.write_text(json.dumps(res, indent=1)+'\n')
    plot(res, file.with_suffix('.png'))
    if args.out==here/'results': into_readme(name, text)
