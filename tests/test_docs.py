"How long the docs are; before a release the site, built from this tree: every link and anchor leads somewhere"
import os,re,subprocess,sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote,urldefrag
import pytest

root = Path(__file__).parent.parent

def words(text)->list:
    "What a reader reads: pieces with a letter, outside of code, of the addresses of links, and of tables that tools write"
    text = re.sub(r'(?ms)^<!-- tools/.*?-->.*?^<!--.*?-->', '', text)
    text = re.sub(r'(?ms)^ *(`{3,}).*?^ *\1 *$', '', text)
    text = re.sub(r'`[^`]+`|(?<=\])\([^)\s]+\)', '', text)
    return re.findall(r'\S*[^\W\d_]\S*', text)

def test_words_that_count():
    text = 'Two [words](docs/page.md) and `some.code()`, 12 % of 3:\n```python\nx = 1\n```\n'
    text += '<!-- tools/x.py --write -->\n| a | b |\n<!-- end -->\n'
    assert words(text)==['Two','[words]','and','of']

def test_docs_have_at_most_10_000_words():
    sizes = {str(o.relative_to(root)): len(words(o.read_text())) for o in [root/'README.md',*(root/'docs').glob('*.md')]}
    assert sum(sizes.values())<=10_000, sorted(sizes.items(), key=lambda o: -o[1])

def test_the_picture_of_batch_sizes_is_what_its_code_draws(monkeypatch):
    monkeypatch.syspath_prepend(root/'tools')
    import batch_size
    assert batch_size.page.read_text()==batch_size.drawn()

class Html(HTMLParser):
    "The links and anchors of a page, what it loads, and its text"
    def __init__(self, text):
        super().__init__()
        self.links,self.loads,self.text = [],[],''
        self.anchors,self.tags = set(),set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.add(tag)
        self.anchors |= {attrs[k] for k in ('id','name') if attrs.get(k)}
        to = attrs.get('href') if tag in ('a','link') else attrs.get('src')
        if to: (self.links if tag=='a' else self.loads).append(to)

    def handle_data(self, data): self.text += data

@pytest.fixture(scope='module')
def site(tmp_path_factory):
    if not find_spec('zensical'): pytest.skip('needs the extra `docs`')
    out = tmp_path_factory.mktemp('site')/'site'
    env = {**os.environ, 'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}'}
    p = subprocess.run([root/'tools/docs.sh', out], env=env, capture_output=True, text=True, timeout=300)
    assert p.returncode==0, p.stdout+p.stderr
    return out

@pytest.fixture(scope='module')
def pages(site): return {str(o.relative_to(site)): Html(o.read_text()) for o in site.rglob('*.html')}

def broken(pages, site):
    "Links within the site that lead nowhere"
    for at,page in pages.items():
        for link in page.links+page.loads:
            if re.match('https?:|mailto:|data:', link): continue
            path,anchor = urldefrag(unquote(link))
            to = os.path.normpath(Path(at).parent/path) if path else at
            if path.startswith('/') or not (site/to).is_file(): yield at,link
            elif anchor and to in pages and anchor not in pages[to].anchors: yield at,link

@pytest.mark.long
def test_links_and_anchors(pages, site):
    assert list(broken({k:v for k,v in pages.items() if k!='404.html'}, site))==[] # that one is for a host's root
    assert sum(len(o.links) for o in pages.values())>5000

@pytest.mark.long
def test_nothing_is_loaded_from_elsewhere(pages):
    assert [(k,o) for k,v in pages.items() for o in v.loads if re.match('(https?:)?//', o)]==[]

@pytest.mark.long
def test_each_notebook_is_a_page_with_its_names(pages):
    "A title, and for the names of a module their signature and docments"
    for o in (root/'nbs').rglob('[0-9]*.ipynb'):
        at = str(o.relative_to(root/'nbs').with_name(re.sub(r'^\d+_', '', o.stem)+'.html'))
        assert at in pages, at
    page = pages['core/collectives.html']
    assert {'all_sum','all_mean','gather_rows'} <= page.anchors
    assert 'Number of samples in that sum; it may differ between ranks' in page.text
    assert {'Learner.fit','Learner.added_cbs'} <= pages['learner/learner.html'].anchors
    assert {'DataParallel.reset','DistributedDataParallel.reset'} <= pages['distributed/data_parallel.html'].anchors # patched into both
    assert 'BatchNorm over the global batch' in pages['distributed/trainer.html'].text # an option that distrib_ctx passes on

@pytest.mark.long
def test_the_api_has_what_is_public_by_topic(pages):
    assert {'Learner','Learner.fit','Learner.distrib_ctx','EMA'} <= pages['api/train.html'].anchors
    assert 'train.html#Learner.fit' in pages['api/index.html'].links
    assert 'BatchNorm over the global batch' in pages['api/train.html'].text
    internal = {'Engine','Checkpoint.commit','open_memory'}
    assert {k.partition('/')[0] for k,v in pages.items() if internal & v.anchors}=={'checkpoint','distributed'}
    assert internal <= {a for v in pages.values() for a in v.anchors}
