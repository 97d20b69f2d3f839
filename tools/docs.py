"""Write the pages of the site: notebooks and Markdown files of this repository, as Markdown for zensical

`tools/docs.sh` calls it. No notebook is executed: outputs are those that it holds, signatures and docments those of the modules."""
import ast,inspect,json,os,re,shutil,sys
from base64 import b64decode
from importlib import import_module
from pathlib import Path

from fastcore.docments import DocmentTbl,docments
from fastcore.nbio import read_nb
from nbdev.doclinks import patch_name

root = Path(__file__).parent.parent
sys.path.insert(0, str(root))
defs = ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef
guides = {'Begin': 'start fastai_day fastai accelerate options', 'Run': 'launching machines plan launchers checkpoints',
          'Train': 'losses metrics data global_batch ema sharded speed clients', 'Check': 'symptoms messages same results',
          'Inside': 'how_it_works glossary gpu systems log'}
tutorials = '''gallery is_it_the_same same_bits global_batch training_tricks failures from_fastai_distributed fastai_table sharded_lora
catalyst_ddp ddp_from_scratch versions'''.split()
folders = 'core data learner distributed checkpoint launch fastai'.split()

# Which file becomes which page
def page_of(path)->str:
    "Where the page of a file stands in the site: `nbs/core/01_env.ipynb` is `core/env.md`"
    *dirs,name = Path(path).parts
    if name=='README.md': return {(): 'index.md', ('nbs',): 'notebooks.md', ('docs',): 'guide/index.md'}.get((*dirs,), '/'.join(dirs)+'.md')
    dirs = {'docs': ['guide']}.get('/'.join(dirs), dirs[1:] if dirs[:1]==['nbs'] else dirs)
    return '/'.join([*dirs,re.sub(r'^\d+_|\.\w+$', '', name).lower()+'.md'])

def sources()->dict:
    "The files of the repository that become pages, and their pages"
    files = [o for pattern in ('*.md','docs/*.md','nbs/**/*.ipynb','nbs/**/*.md','benchmarks/README.md') for o in root.glob(pattern)]
    files = [o.relative_to(root) for o in files if '.ipynb_checkpoints' not in o.parts]
    return {str(o): page_of(o) for o in sorted(files)}

# Definitions: a heading, the signature, the docstring, the docments as a table
def names(node):
    "The names of a definition: a patched method has its class before it, several if it is patched into several"
    res = patch_name(node)
    owners,_,name = str(res).rpartition('.')
    return res if isinstance(res, list) else [f'{o.strip()}.{name}' for o in owners.strip('()').split(',')] if owners[:1]=='(' else [res]

def is_public(name): return '._' not in f'.{name}'

def signature(node, name, o)->str:
    "As it is written, or with the options that it passes on; wrapped at 88 columns"
    init = next((o for o in node.body if getattr(o, 'name', '')=='__init__'), None) if isinstance(node, ast.ClassDef) else node
    if not init: return f'class {name}'
    args = [o.strip() for o in re.split(r', (?![^(\[]*[)\]])', ast.unparse(init.args)) if o]
    if passes_on(o):
        args = [re.sub(r'(\w+):.*?( = |$)', lambda m: m[1]+m[2].strip(), str(p)) for p in inspect.signature(o).parameters.values()]
    args = args[1:] if args[:1] and re.match(r'(self|cls)\b', args[0]) else args
    end = f') -> {ast.unparse(node.returns)}' if getattr(node, 'returns', None) else ')'
    text = f'{name}({", ".join(args)}{end}'
    return text if len(text)<=88 else f'{name}(\n    '+',\n    '.join(args)+f'\n{end}'

def passes_on(o): return callable(o) and '__signature__' in getattr(o, '__dict__', ()) # as fastcore's `delegates` has it

def found(module, name):
    "What `name` stands for in its module: the function of a property or of a method that is wrapped"
    o = module
    for k in name.split('.'): o = inspect.getattr_static(o, k)
    o = getattr(o, 'fget', None) or getattr(o, 'func', None) or getattr(o, '__func__', o)
    return inspect.unwrap(o) if callable(o) and not passes_on(o) else o

def table(o)->str:
    "The docments that there are; types and defaults stand in the signature"
    if passes_on(o):
        rows = [f'| {k} | {v} |' for k,v in docments(o, args_kwargs=True).items() if v]
        return '\n'.join(['| | **Details** |','|---|---|',*rows])
    try: rows = str(DocmentTbl(o, verbose=False)).splitlines()
    except (TypeError, ValueError, OSError): return '' # a class with another metaclass, or without a signature
    rows = [r for r in rows if not re.match(r'\| \S+ \|  \|$', r)]
    return '\n'.join(rows) if len(rows)>2 else ''

def summary(doc)->str:
    "The first sentence of a docstring, whose lines may be wrapped"
    return re.split(r'(?<=[.!?]) (?=[A-Z`])', ' '.join(doc.partition('\n\n')[0].split()))[0]

def described(node, name, module, level=3):
    "The section of a definition, then those of a class's methods that have a docstring"
    o = found(module, name)
    text = f'{ast.get_docstring(node) or ""}\n\n{table(o)}'
    for k in ast.walk(node):  # a parameter is no link, whatever else has its name
        if isinstance(k, ast.arg): text = text.replace(f'`{k.arg}`', f'<code>{k.arg}</code>')
    yield f'{"#"*level} `{name}` {{#{name}}}\n\n```python\n{signature(node, name, o)}\n```\n\n{text}'
    for f in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(f, defs) and is_public(f.name) and ast.get_docstring(f): yield from described(f, f'{name}.{f.name}', module, level+1)

# Cells
def output(o, save)->str:
    "One output of a cell, as Markdown; `save` writes a picture and returns its name"
    if o.output_type=='stream': return fenced(o.text)
    if o.output_type=='error': return fenced('\n'.join(o.traceback))
    data = o.data
    if 'image/png' in data: return f'![A plot that the code above draws]({save(b64decode(data["image/png"]))})'
    if 'text/html' in data: return ''.join(data['text/html'])
    if 'text/markdown' in data: return data['text/markdown']
    return fenced(data.get('text/plain', ''))

def fenced(text, lang='text'): return f'````{lang}\n{text.rstrip()}\n````' if text.strip() else ''

def box(cell)->str:
    "The source of an exported cell, folded"
    body = cell.source.replace('\n', '\n    ')
    return f'??? quote "Source"\n\n    ```python\n    {body}\n    ```'

class Page:
    "A notebook as Markdown; `anchors` are the names that it defines"
    def __init__(self, path, at):
        self.path,self.at,self.anchors,self.parts,self.images = path,at,{},[],{}
        nb = read_nb(root/path)
        exp = next((m[1] for c in nb.cells if (m := re.match(r'#\| default_exp (\S+)', c.source))), None)
        self.module = import_module(f'learnerdist.{exp}') if exp else None
        for cell in nb.cells: self.add(cell)

    def add(self, cell):
        if cell.cell_type=='markdown': return self.parts.append(cell.source)
        known = cell.directives
        cell.source = re.sub(r'^#\|.*\n?', '', cell.source, flags=re.M).strip()
        if {'hide','default_exp'} & {*known} or not cell.source: return
        if {'export','exporti'} & {*known}: return self.exported(cell)
        outs = [o for o in (output(o, self.save) for o in cell.outputs) if o]
        self.parts += [fenced(cell.source, 'python'),*[f'<div class="output" markdown="1">\n\n{o}\n\n</div>' for o in outs]]

    def exported(self, cell):
        body = cell.parsed_()
        for node in body:
            for name in names(node) if isinstance(node, defs) else []:
                if not is_public(name): continue
                parts = [*described(node, name, self.module)]
                self.parts += parts
                self.anchors.update({re.search('`(.+?)`', o)[1]: summary(re.split(r'```\n\n', o)[1]) for o in parts})
        if not all(isinstance(o, (ast.Import,ast.ImportFrom)) for o in body): self.parts.append(box(cell))

    def save(self, data):
        name = f'{Path(self.at).stem}_{len(self.images)}.png'
        self.images[name] = data
        return name

# Links
def relative(target, at): return os.path.relpath(target, Path(at).parent)

class Links:
    "Names in backticks become links to their sections; links between files of the repository become links between pages"
    def __init__(self, pages, files):
        self.files,self.assets,self.where = files,{},{}
        for p in sorted(pages, key=lambda p: p.at.startswith('fastai/')):  # a name that both Learners have leads to ours
            for name in p.anchors:
                for k in {name, name.removeprefix('Learner.')}: self.where.setdefault(k, []).append((p.at, name))

    def named(self, m, at):
        text,name = m[0],m[1].removeprefix('learnerdist.').removeprefix('learn.')
        spots = self.where.get(name, [])
        own = [o for o in spots if o[0].split('/')[0]==at.split('/')[0]] or spots
        if not own or len({o[1] for o in own})>1 and own[0][1]!=name: return text
        page,anchor = own[0]
        return f'[{text}]({"" if page==at else relative(page, at)}#{anchor})'

    def file(self, m, path, at):
        text,target = m[1],m[2]
        if re.match(r'https?:|mailto:|#', target) or not path: return m[0]
        target,_,anchor = target.partition('#')
        full = os.path.normpath(Path(path).parent/target)
        page = self.files.get(full) or self.files.get(f'{full}/README.md') or (f'{full[4:]}/index.md' if full[4:] in folders else None)
        if not page and (root/full).is_file(): page = self.assets[full] = full
        if not page: return text if (root/full).is_dir() else m[0] # a folder without a page; our picture, or an error that zensical tells
        return f'[{text}]({relative(page, at)}{"#"*bool(anchor)}{anchor})'

    def __call__(self, text, path, at):
        parts = re.split(r'(?ms)(^ *(`{3,}).*?^ *\2 *$|^#.*?$)', text)
        for i in range(0, len(parts), 3):
            parts[i] = re.sub(r'\[((?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]\(([^)\s]+)\)', lambda m: self.file(m, path, at), parts[i])
            parts[i] = re.sub(r'(?<![\[`])`([\w.]+)(?:\([^`]*\))?`(?![\]`])', lambda m: self.named(m, at), parts[i])
        return ''.join(o for i,o in enumerate(parts) if i%3<2 and o)

# The site
def public_names()->dict:
    "What `learnerdist.all` hands out, in its order, by the comments that are its headings"
    public,res,seen = import_module('learnerdist.all'),{},set()
    source = Path(public.__file__).read_text().partition('__all__')[0]
    for title,body in re.findall(r'^# (.+)\n((?:(?!# ).*\n)*)', source, re.M):
        found = dict.fromkeys(o for m in re.findall(r'^from (\S+) import', body, re.M) for o in import_module(m).__all__)
        if names := [o for o in found if o not in seen]: res[title.partition(':')[0]] = names
        seen |= found.keys()
    return res

def api_index(pages)->str:
    "The methods of a Learner, the public names, then every other documented name, by module"
    known = {k: (p.at,v) for p in sorted(pages, key=lambda p: p.at.startswith('fastai/'), reverse=True) for k,v in p.anchors.items()}
    def table(names):
        rows = [f'| [`{k}`]({known[k][0]}#{k}) | {known[k][1].replace("|", chr(92)+"|")} |' for k in names]
        return '| Name | Meaning |\n|---|---|\n'+'\n'.join(rows)
    groups = public_names()
    public = {o for names in groups.values() for o in names}
    methods = sorted((k for k in known if k.startswith('Learner.')), key=str.lower)
    first = {'Methods of a Learner': methods, **{title: [o for o in names if o in known] for title,names in groups.items()}}
    res = ['# API\n\nThe methods of a Learner, what `from learnerdist.all import *` hands out, then what else is documented, by module.']
    res += [f'## {title}\n\n{table(names)}' for title,names in first.items()]
    for p in pages:
        names = [k for k in p.anchors if k not in public and not k.startswith('Learner.')]
        if names: res.append(f'## {p.at[:-3].replace("/", ".")}\n\n{table(names)}')
    return '\n\n'.join(res)

def nav(files)->list:
    def inside(folder, first=()): # those that are named first, then the others
        found = [at for at in files.values() if Path(at).parent.as_posix()==folder and not at.endswith('index.md')]
        return sorted(found, key=lambda at: [*first,Path(at).stem].index(Path(at).stem))
    modules = [{o: [f'{o}/index.md',*inside(o)]} for o in folders]
    listed = {title: [f'guide/{o}.md' for o in names.split()] for title,names in guides.items()}
    rest = [o for o in inside('guide') if not any(o in names for names in listed.values())]
    guide = ['guide/index.md',*[{k: v} for k,v in listed.items()],*rest]
    top = [at for path,at in files.items() if re.fullmatch(r'nbs/[^/]+\.ipynb', path)]
    return [{'Home': 'index.md'},{'Guide': guide},{'Tutorials': inside('tutorials', tutorials)},
            {'Modules': ['notebooks.md',*modules,{'top': top}]},{'API': 'api.md'},
            {'Project': ['contributing.md','benchmarks.md','changelog.md']}]

def main(out):
    shutil.rmtree(out, ignore_errors=True)
    files = sources()
    pages = [Page(path, at) for path,at in files.items() if path.endswith('.ipynb')]
    texts = {p.at: (p.path, '\n\n'.join(p.parts)) for p in pages}
    texts |= {at: (path, (root/path).read_text()) for path,at in files.items() if path.endswith('.md')}
    title = {p.path: re.search('^# (.+)', p.parts[0])[1] for p in pages}
    reading = re.sub(r'\[[\w/]+\]\(([\w/]+\.ipynb)\)', lambda m: f'[{title["nbs/"+m[1]]}]({m[1]})', (root/'nbs/README.md').read_text())
    texts['notebooks.md'] = ('nbs/README.md', reading)
    for o in folders: texts[f'{o}/index.md'] = ('nbs/README.md', re.search(rf'^#(# {o}:.*?)(?=^## )', reading, re.M|re.S)[1])
    texts['api.md'] = (None, api_index(pages))
    links = Links(pages, files)
    for at,(path,text) in texts.items():
        (out/'pages'/at).parent.mkdir(parents=True, exist_ok=True)
        (out/'pages'/at).write_text(links(text, path, at))
    for p in pages:
        for name,data in p.images.items(): (out/'pages'/p.at).with_name(name).write_bytes(data)
    for o in links.assets:
        (out/'pages'/o).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root/o, out/'pages'/o)
    shutil.copy(root/'tools/site.css', out/'pages')
    (out/'mkdocs.yml').write_text(json.dumps({'INHERIT': os.path.relpath(root/'tools/docs.yml', out), 'nav': nav(files)}, indent=1))

if __name__=='__main__': main(Path(sys.argv[1] if len(sys.argv)>1 else root/'_proc').resolve())
