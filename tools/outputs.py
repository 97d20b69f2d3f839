"""Run notebooks and keep their outputs: `python tools/outputs.py nbs/core` writes those that changed, `--check nbs` compares

The notebooks run in a copy of the tree, by `nbdev-test`. Left out are progress bars and stderr. Two outputs are the same if the text
between their numbers is equal, the numbers are close, and both have a picture or none; clock times, dates and names of cells do not
count. A check looks at cells that hold an output, except those marked `#| varies`, which show rounding errors or what depends on the
processor."""
import argparse,io,json,math,re,shutil,subprocess,sys,tempfile
from base64 import b64decode,b64encode
from importlib.util import find_spec
from pathlib import Path

root = Path(__file__).parent.parent
skipped = shutil.ignore_patterns('.*', '__pycache__', '_docs', '_proc', '*.egg-info')
clock = r'\d{4}-\d\d-\d\d|\b\d\d:\d\d(?::\d\d)?\b'
cell_name = r'<ipython-input[^>]*>|<dynamic-code>' # in tracebacks, by the version of execnb
number = r'-?\d+(?:\.\d*)?(?:e[-+]\d+)?'

def small(png)->str:
    "A picture in 64 colours, a third of the bytes"
    from PIL import Image
    out = io.BytesIO()
    Image.open(io.BytesIO(b64decode(png))).convert('RGB').quantize(64).save(out, 'png', optimize=True)
    return b64encode(out.getvalue()).decode()

def cleaned(outputs)->list:
    "Without progress bars, stderr, counts and metadata; pictures are small"
    res = []
    for o in outputs:
        o = {k:v for k,v in o.items() if k!='metadata'} | ({'execution_count': None} if 'execution_count' in o else {})
        data = o.get('data', {})
        html = ''.join(data.get('text/html', ''))
        is_bar = re.search('<progress|table.fastprogress', html) or html and not re.sub(r'<.*?>|\s', '', html)
        if o.get('name')=='stdout': o['text'] = re.sub(r'[^\n]*\r', '', ''.join(o['text'])).splitlines(keepends=True) # bars of a console
        if is_bar or o.get('name')=='stderr' or o.get('text')==[]: continue
        if 'image/png' in data: o['data'] = {'image/png': small(data['image/png'])}
        res.append(o | ({'metadata': {}} if data else {}))
    return res

def text_of(o): return ''.join(o.get('text', o.get('data', {}).get('text/plain', '')))

def is_close(a, b): return math.isclose(float(a), float(b), rel_tol=.02, abs_tol=1e-6)

def same(old, new)->bool:
    "Whether a reader sees the same in both lists of outputs"
    if [('image/png' in o.get('data', {})) for o in old]!=[('image/png' in o.get('data', {})) for o in new]: return False
    a,b = (re.sub(f'{clock}|{cell_name}', '', '\n'.join(map(text_of, o))) for o in (old,new))
    if re.sub(rf'{number}|\s', '', a)!=re.sub(rf'{number}|\s', '', b): return False
    a,b = (re.findall(number, o) for o in (a,b))
    return len(a)==len(b) and all(map(is_close, a, b))

def flags()->list:
    "Options of `nbdev-test` for the cells marked `#| hf`, which need the extra hf. Without it they are not run, and keep their outputs"
    missing = [o for o in ('transformers','peft') if find_spec(o) is None]
    if missing: print(f"cells marked hf are not run: {', '.join(missing)} not installed (pip install 'learnerdist[hf]')", flush=True)
    return [] if missing else ['--flags','hf']

def run(paths)->Path:
    "A folder with this tree, in which the notebooks of `paths` have run"
    at = Path(tempfile.mkdtemp())/'tree'
    shutil.copytree(root, at, ignore=skipped)
    for o in paths: # tutorials by themselves: a module's notebook defines methods anew for the notebooks that follow in its process
        apart = [[f'{o}/tutorials'], [o, '--skip-folder-re', '^[_.]|^tutorials$']] if (root/o/'tutorials').is_dir() else [[o]]
        command = ['nbdev-test', '--save', '--n-workers', '2', *flags()]
        runs = [subprocess.Popen([*command, *args], cwd=at) for args in apart] # at once: notebooks wait for processes that they start
        if any([r.wait() for r in runs]): sys.exit('a notebook has failed: what it says is above')
    return at

def varies(cell): return cell['source'][:1]==['#| varies\n']
def cells(file): return [o for o in json.loads(file.read_text())['cells'] if o['cell_type']=='code']

def compare(file, ran)->list:
    "A line for each cell whose committed output differs from that of the run"
    new = {o['id']: cleaned(o['outputs']) for o in cells(ran)}
    bad = [o for o in cells(file) if o['outputs'] and not varies(o) and not same(o['outputs'], new[o['id']])]
    return [f'{file} {o["id"]}\n  holds {[*map(text_of, o["outputs"])]}\n  gives {[*map(text_of, new[o["id"]])]}' for o in bad]

def write(file, ran):
    "Give the cells of `file` the outputs of the run where they are others"
    nb,new = json.loads(file.read_text()),{o['id']: cleaned(o['outputs']) for o in cells(ran)}
    for o in nb['cells']:
        if o['cell_type']!='code': continue
        pictures = [[p.get('data', {}).get('image/png') for p in outs] for outs in (o['outputs'],new[o['id']])]
        if not same(o['outputs'], new[o['id']]) or pictures[0]!=pictures[1]: o['outputs'] = new[o['id']]
    file.write_text(json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True)+'\n')

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('paths', nargs='*', default=['nbs'])
    p.add_argument('--check', action='store_true', help='change nothing; fail if an output differs')
    args = p.parse_args()
    at = run(args.paths)
    files = [f for o in args.paths for f in ([root/o] if o.endswith('.ipynb') else sorted((root/o).rglob('[!.]*.ipynb')))]
    files = [f for f in files if '.ipynb_checkpoints' not in f.parts]
    found = [l for f in files for l in (compare if args.check else write)(f, at/f.relative_to(root)) or ()]
    shutil.rmtree(at.parent)
    if found: sys.exit('\n'.join([*found,f'{len(found)} outputs differ: run tools/outputs.py on these notebooks and look at the changes']))

if __name__=='__main__': main()
