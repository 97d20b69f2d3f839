"""Every benchmark, one after the other, each in a process of its own

    python benchmarks/run_all.py            # about a quarter of an hour; figures and plots go to results/, tables into README.md
    python benchmarks/run_all.py --quick    # does everything run? Nothing is kept
    python benchmarks/run_all.py --report   # tables and plots anew, from the figures kept"""
import subprocess,sys,time

from common import here

names = 'step_time','sharded_step','options','order','evaluation','loader','start','deaths','growth','many_ranks','gpu'

def main():
    failed = []
    for name in names:
        print(f'\n## {name}', flush=True)
        start = time.time()
        if subprocess.run([sys.executable, here/f'{name}.py', *sys.argv[1:]]).returncode: failed.append(name)
        print(f'{name}: {time.time()-start:.0f} s', flush=True)
    if failed: sys.exit(f"failed: {', '.join(failed)}")

if __name__=='__main__': main()
