"""Write the pages of the site: notebooks and Markdown files of this repository, as Markdown for zensical

`tools/docs.sh` calls it, before zensical and after it. No notebook is executed: outputs are those that it holds, signatures and docments
those of the modules."""
import ast,inspect,json,os,re,shutil,sys
from base64 import b64decode
from importlib import import_module
from pathlib import Path

from fastcore.docments import DocmentTbl,docments
from fastcore.nbio import read_nb
from latex2mathml.converter import convert
from nbdev.doclinks import patch_name

root = Path(__file__).parent.parent
sys.path.insert(0, str(root))
from learnerdist.learner.callback import Callback  # noqa: E402
defs = ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef
guides = {'Begin': 'start fastai_day fastai accelerate options', 'Run': 'launching machines plan launchers checkpoints',
          'Train': 'losses metrics data global_batch ema sharded speed clients public', 'Check': 'symptoms messages same results',
          'Inside': 'how_it_works glossary gpu systems'}
tutorials = '''gallery is_it_the_same same_bits global_batch training_tricks failures from_fastai_distributed fastai_table sharded_lora
catalyst_ddp ddp_from_scratch versions'''.split()
project = ['contributing.md','benchmarks.md','guide/log.md','changelog.md']
folders = 'core data learner distributed checkpoint launch fastai'.split()
# The API by topic: names, and modules with all of their public names
topics = {
    'Train': '''Learner Learner.fit Learner.fit_one_cycle Learner.fine_tune Learner.lr_find distributed.trainer learner.learner
        learner.callback learner.schedule learner.techniques learner.finder distributed.loops distributed.replica distributed.batchnorm
        distributed.compiling distributed.data_parallel''',
    'Predict': 'learner.predictions Learner.validate learner.metrics',
    'Save': 'learner.saving checkpoint.checkpoint',
    'Look': 'learner.recorder learner.loggers learner.trackers distributed.profiling',
    'Data': 'data.loaders data.distributed_dl data.datasets',
    'Processes': 'run ranks core.env core.rank0 core.collectives core.random verify run_ranks'}

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

def with_formulas(text):
    "TeX as MathML, which browsers set without a script or a font of ours"
    def put(m):
        if m['code']: return m[0]
        return convert(m['block'], display='block') if m['block'] else f'<span>{convert(m["inline"])}</span>'
    return re.sub(r'(?s)(?P<code>(`+).+?\2)|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^\s$`][^$`\n]*)\$', put, text)

class Page:
    "A notebook as Markdown; `anchors` are the names that it defines"
    def __init__(self, path, at):
        self.path,self.at = path,at
        self.anchors,self.sections = {},{} # of each name: its first sentence; its section
        self.parts,self.images = [],{}
        nb = read_nb(root/path)
        exp = next((m[1] for c in nb.cells if (m := re.match(r'#\| default_exp (\S+)', c.source))), None)
        self.module = import_module(f'learnerdist.{exp}') if exp else None
        for cell in nb.cells: self.add(cell)

    def add(self, cell):
        if cell.cell_type=='markdown': return self.parts.append(with_formulas(cell.source))
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
                for o in parts:
                    k = re.search('`(.+?)`', o)[1]
                    self.anchors[k],self.sections[k] = summary(re.split(r'```\n\n', o)[1]),o
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
        for p in sorted(pages, key=lambda p: p.at.startswith('fastai/')):  # the API before modules; of two Learners, ours
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
class Topic:
    "A page of the API: the sections of public names. Methods of callbacks stay away: the learner calls them"
    path = None
    def __init__(self, title, names, known):
        self.title,self.at,self.anchors,self.parts = title,f'api/{title.lower()}.md',{},[f'# {title}']
        for name in names:
            page = known[name]
            o = found(page.module, name)
            methods = [k for k in page.sections if k.startswith(f'{name}.')]
            if inspect.isclass(o) and issubclass(o, Callback) or name=='Learner': methods = []
            for level,k in [('##',name),*[('###',k) for k in methods]]:
                self.parts.append(re.sub('^#+', level, page.sections[k]))
                self.anchors[k] = page.anchors[k]
        self.names = names

    def table(self):
        rows = [f'| [`{k}`]({Path(self.at).name}#{k}) | {self.anchors[k].replace("|", chr(92)+"|")} |' for k in self.names]
        return '\n'.join([f'## [{self.title}]({Path(self.at).name})','','| Name | Meaning |','|---|---|',*rows])

def topic_pages(pages)->list:
    "The pages of the API. A public name without a topic is an error"
    ours = [p for p in pages if not p.at.startswith('fastai/')]
    known = {k: p for p in reversed(ours) for k in p.sections}
    public = {k for k in known if k.startswith('Learner.') or k in import_module('learnerdist.all').__all__}
    modules = {p.at[:-3].replace('/', '.'): p for p in ours}
    res,seen = [],set()
    for title,entries in topics.items():
        names = []
        for o in entries.split(): names += [o] if o in known else [k for k in modules[o].sections if k in public]
        res.append(Topic(title, [k for k in names if k not in seen], known))
        seen |= {*names}
    if public-seen: raise ValueError(f'`topics` in tools/docs.py lacks {sorted(public-seen)}: add their modules')
    return res

def nav(files, api)->list:
    def inside(folder, first=()): # those that are named first, then the others
        found = [at for at in files.values() if Path(at).parent.as_posix()==folder and not at.endswith('index.md')]
        return sorted(found, key=lambda at: [*first,Path(at).stem].index(Path(at).stem))
    modules = [{o: [f'{o}/index.md',*inside(o)]} for o in folders]
    listed = {title: [f'guide/{o}.md' for o in names.split()] for title,names in guides.items()}
    rest = [o for o in inside('guide') if not any(o in names for names in [*listed.values(),project])]
    guide = ['guide/index.md',*[{k: v} for k,v in listed.items()],*rest]
    tools = [at for path,at in files.items() if re.fullmatch(r'nbs/[^/]+\.ipynb', path)]
    topic = ['api/index.md',*[o.at for o in api]]
    internals = ['notebooks.md',*modules,{'testing and verification': tools}]
    return [{'Home': 'index.md'},{'Guide': guide},{'Tutorials': inside('tutorials', tutorials)},{'API': topic},{'Modules': internals},
            {'Project': project}]

def sort_search(path):
    """Guides are found first, then the API. Of modules and of the project's pages only titles are found, later in a title counts less:
    they get their part of the site before them"""
    index = json.loads(path.read_text())
    parts = ['Home','Guide','API','Tutorials','Modules','Project']
    for o in index['items']:
        if parts.index(o['path'][0])<4: continue
        where = o['location'].partition('.html')[0].replace('/', '.')
        o.update(path=o["path"][:1], title=f'{o["path"][0]}, {where}: {o["title"]}', text='')
    index['items'].sort(key=lambda o: parts.index(o['path'][0]))
    path.write_text(json.dumps(index))

def main(out):
    shutil.rmtree(out, ignore_errors=True)
    files = sources()
    pages = [Page(path, at) for path,at in files.items() if path.endswith('.ipynb')]
    api = topic_pages(pages)
    texts = {p.at: (p.path, '\n\n'.join(p.parts)) for p in [*pages,*api]}
    texts |= {at: (path, (root/path).read_text()) for path,at in files.items() if path.endswith('.md')}
    title = {p.path: re.search('^# (.+)', p.parts[0])[1] for p in pages}
    reading = re.sub(r'\[[\w/]+\]\(([\w/]+\.ipynb)\)', lambda m: f'[{title["nbs/"+m[1]]}]({m[1]})', (root/'nbs/README.md').read_text())
    texts['notebooks.md'] = ('nbs/README.md', reading)
    for o in folders: texts[f'{o}/index.md'] = ('nbs/README.md', re.search(rf'^#(# {o}:.*?)(?=^## )', reading, re.M|re.S)[1])
    first = '# API\n\nWhat `from learnerdist.all import *` hands out, and the methods of a Learner.'
    texts['api/index.md'] = (None, '\n\n'.join([first,*[o.table() for o in api]]))
    links = Links([*api,*pages], files)
    for at,(path,text) in texts.items():
        (out/'pages'/at).parent.mkdir(parents=True, exist_ok=True)
        (out/'pages'/at).write_text(links(text, path, at))
    for p in pages:
        for name,data in p.images.items(): (out/'pages'/p.at).with_name(name).write_bytes(data)
    for o in links.assets:
        (out/'pages'/o).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root/o, out/'pages'/o)
    shutil.copy(root/'tools/site.css', out/'pages')
    (out/'mkdocs.yml').write_text(json.dumps({'INHERIT': os.path.relpath(root/'tools/docs.yml', out), 'nav': nav(files, api)}, indent=1))

if __name__=='__main__':
    out = Path(sys.argv[1] if len(sys.argv)>1 else root/'_proc').resolve()
    if (out/'site/search.json').is_file(): sort_search(out/'site/search.json')
    else: main(out)
