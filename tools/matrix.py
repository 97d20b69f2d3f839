"""What works with which versions: an environment for each row, README's tests and first job in it, and a table of the results.

    python tools/matrix.py                     # all rows, an hour; environments in a temporary folder (some 6 GB each, one at a time)
    python tools/matrix.py --rows oldest --envs /tmp/envs --write   # kept environments; the row's line in nbs/tutorials/versions.md
"""
import argparse,json,os,re,shutil,subprocess,sys,tempfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent
table = root/'nbs/tutorials/versions.md'
shown = 'torch','torchvision','fastcore','fastprogress','fastai','numpy'
tools = ('pytest','pytest-xdist','scikit-learn','matplotlib','torchmetrics','pandas','tensorboard','nbclient','ipykernel','safetensors',
         'cloudpickle','setuptools<81') # timm and others import pkg_resources
# By name: the version of Python, and what pip is asked for. The lower bounds of settings.ini are those of the first row
rows = dict(
    oldest=('3.10', 'torch==2.6.0 torchvision==0.21.0 fastcore==1.7.29 fastprogress==1.0.5 fastai==2.7.19'),
    middle=('3.11', 'torch==2.6.0 torchvision==0.21.0 fastai==2.8.12'),
    torch_2_11=('3.11', 'torch==2.11.0 torchvision==0.26.0 fastai==2.8.12'),
    newest_python=('3.13', 'torch torchvision fastai'),
    newest=('3.11', 'torch torchvision fastai'))
head = f"""# Versions that were run
Each row is an environment of its own, made by `tools/matrix.py`, in which README's main job ran on 2 processes, and README's tests,
`python -m pytest -n 2`. The numbers are tests that passed, that were skipped since a package or a part of torch is not there, and, if there
are any, that failed: their names follow below. A row that ran chosen files only names them.

The oldest versions that are supported are torch 2.6, torchvision 0.21, fastcore 1.7.29, fastprogress 1.0.5, fastai 2.7.19 and Python 3.10.

| row | Python | {' | '.join(shown)} | README's job | tests |
|---|---|{'---|'*len(shown)}---|---|
"""

def python_of(version):
    "An interpreter of this version: on the path, or pyenv's"
    found = shutil.which(f'python{version}')
    pyenvs = sorted((Path.home()/'.pyenv/versions').glob(f'{version}.*/bin/python'))
    for o in [*pyenvs[::-1], *([found] if found else [])]:
        if subprocess.run([o, '-c', 'import venv,ctypes,ssl'], capture_output=True).returncode==0: return str(o)

def environment(name, python, packages, envs):
    "The interpreter of the row's environment, made if it is not there; None, and why, where that cannot be"
    path = Path(envs)/name
    exe = path/'bin/python'
    if exe.exists(): return exe,''
    found = python_of(python)
    if found is None: return None,f'no Python {python} here'
    subprocess.run([found, '-m', 'venv', path], check=True)
    p = subprocess.run([exe, '-m', 'pip', 'install', '-q', *packages.split(), *tools], capture_output=True, text=True)
    return (exe,'') if p.returncode==0 else (None, p.stderr.strip().splitlines()[-1])

def versions(exe):
    code = f"""
import json,platform
from importlib.metadata import PackageNotFoundError,version
res = [platform.python_version()]
for o in {shown}:
    try: res.append(version(o))
    except PackageNotFoundError: res.append('')
print(json.dumps(res))"""
    return json.loads(subprocess.run([exe, '-c', code], capture_output=True, text=True, check=True).stdout)

def env_of():
    return {**os.environ, 'PYTHONPATH': str(root), 'PYTHONDONTWRITEBYTECODE': '1', 'GLOO_SOCKET_IFNAME': 'lo'}

def readme_job(exe):
    "Whether README's first script says the same alone, at twice the batch size, and on 2 processes"
    script = re.search(r'```python\n(.*?)```', (root/'README.md').read_text(), re.S)[1]
    with tempfile.TemporaryDirectory() as d:
        def messages(how, bs):
            (Path(d)/'job.py').write_text(script.replace('bs=32', f'bs={bs}'))
            p = subprocess.run([exe, *how, 'job.py'], cwd=d, env=env_of(), capture_output=True, text=True, timeout=600)
            return p.stdout.strip().splitlines()[-1] if p.returncode==0 and p.stdout.strip() else p.stderr.strip()[-300:]
        alone,two = messages([], 64),messages(['-m', 'learnerdist.launch', '--nproc', '2'], 32)
    return 'the same' if 'predictions, error' in two and two==alone else f'alone: {alone}; on 2: {two}'

def run_tests(exe, names):
    "How many tests passed, were skipped and failed, as text, and the names of those that failed"
    files = [f'tests/test_{o}.py' for o in names]
    pytest = [exe, '-m', 'pytest', '-n', '2', '-p', 'no:cacheprovider', '-rfE', '--tb=short']
    p = subprocess.run([*pytest, *files], cwd=root, env=env_of(), capture_output=True, text=True)
    failed = list(dict.fromkeys(re.findall(r'^(?:FAILED|ERROR) tests/(\S+)', p.stdout, re.M)))
    if failed: print(p.stdout[-20000:])
    counts = {k: int(m[1]) if (m := re.search(rf'(\d+) {k}', p.stdout)) else 0 for k in ('passed','skipped')}
    messages = f"{counts['passed']}, skipped {counts['skipped']}"+(f', failed {len(failed)}' if failed else '')
    return messages+(f" ({', '.join(names)})" if names else ''),failed

def run_row(name, envs, names):
    "The row's line, and its failed tests"
    python,packages = rows[name]
    exe,why = environment(name, python, packages, envs)
    if exe is None: return f"| {name} | {python} | {' | '.join(['']*len(shown))} | {why} | |",[]
    messages,failed = run_tests(exe, names)
    return f"| {name} | {' | '.join(versions(exe))} | {readme_job(exe)} | {messages} |",failed

def write(lines, failed):
    "Put these rows into the table; others stay"
    old = table.read_text() if table.exists() else ''
    known = {o.split(' | ')[0].strip('| '): o for o in re.findall(r'^\|.*\|$', old, re.M)[2:]} | lines
    notes = dict(re.findall(r'^- (\w+): (.*)$', old, re.M)) | {k: ', '.join(f'`{o}`' for o in v) for k,v in failed.items()}
    messages = ''.join(f'- {k}: {notes[k]}\n' for k in rows if notes.get(k))
    table.write_text(head + ''.join(known[o]+'\n' for o in rows if o in known) + (f'\nFailed:\n\n{messages}' if messages else ''))

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--rows', nargs='+', choices=rows, default=[*rows])
    p.add_argument('--tests', nargs='+', default=[], help='names of test files, without test_ and .py; all, if none is given')
    p.add_argument('--envs', help='folder of environments, which are kept; else each is made and removed')
    p.add_argument('--write', action='store_true', help=f'put the rows into {table.relative_to(root)}')
    args,lines,failed = p.parse_args(),{},{}
    for name in args.rows:
        with tempfile.TemporaryDirectory() as d: lines[name],failed[name] = run_row(name, args.envs or d, args.tests)
        print(lines[name], *(f'    {o}' for o in failed[name]), sep='\n', flush=True)
        if args.write: write({name: lines[name]}, {name: failed[name]})
    sys.exit(any(failed.values()))

if __name__=='__main__': main()
