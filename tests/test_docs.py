"The site, built from this tree: every link and anchor leads somewhere. With LEARNERDIST_BROWSER=1, in Chromium: no error in its console"
import json,os,re,subprocess,sys,threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler,ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from urllib.parse import unquote,urldefrag
import pytest
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not find_spec('zensical'), reason="needs the extra `docs`")]

root = Path(__file__).parent.parent

class Html(HTMLParser):
    "The links and anchors of a page, what it loads, and its text"
    def __init__(self, text):
        super().__init__()
        self.links,self.anchors,self.loads,self.text = [],set(),[],''
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[k] for k in ('id','name') if attrs.get(k)}
        to = attrs.get('href') if tag in ('a','link') else attrs.get('src')
        if to: (self.links if tag=='a' else self.loads).append(to)

    def handle_data(self, data): self.text += data

@pytest.fixture(scope='module')
def site(tmp_path_factory):
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

def test_links_and_anchors(pages, site):
    assert list(broken({k:v for k,v in pages.items() if k!='404.html'}, site))==[] # that one is for a host's root
    assert sum(len(o.links) for o in pages.values())>5000

def test_a_broken_link_is_found(tmp_path):
    texts = {'a.html': '<a href="b.html#nowhere"></a><a href="gone.html"></a><a href="#here"></a><p id="here">',
             'b.html': '<img src="gone.png">'}
    for k,v in texts.items(): (tmp_path/k).write_text(v)
    found = broken({k: Html(v) for k,v in texts.items()}, tmp_path)
    assert [link for _,link in found]==['b.html#nowhere','gone.html','gone.png']

def test_nothing_is_loaded_from_elsewhere(pages):
    assert [(k,o) for k,v in pages.items() for o in v.loads if re.match('(https?:)?//', o)]==[]

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
    assert '../learner/learner.html#Learner.fit' in {re.sub(r'^(?=learner)', '../', o) for o in pages['api.html'].links}

def test_tutorials_and_gallery_show_their_pictures(pages):
    shown = {k: [o for o in v.loads if o.endswith('.png') and 'assets' not in o] for k,v in pages.items()}
    for o in 'ddp_from_scratch','training_tricks','catalyst_ddp': assert shown[f'tutorials/{o}.html'], o
    assert len(shown['tutorials/gallery.html'])==6

def test_search_finds_names(site):
    index, = site.rglob('search.json')
    texts = json.dumps(json.loads(index.read_text()))
    assert 'distrib_ctx' in texts and 'gather_rows' in texts

# A page that opens others in a frame of some width, one after the other, and writes down what it saw
probe = """<!doctype html><body><iframe height="900"></iframe><script>
(async () => {
  const frame = document.querySelector('iframe'), seen = []
  for (const width of [1280, 390]) for (const page of %s) {
    frame.width = width
    await new Promise(done => { frame.onload = done; frame.src = page })
    await new Promise(done => setTimeout(done, 500))
    const doc = frame.contentDocument, wide = o => o.scrollWidth>o.clientWidth+1
    const code = [...doc.querySelectorAll('pre, pre code')].filter(wide).map(o => o.innerText.slice(0, 80))
    seen.push({page, width, title: doc.querySelector('h1').innerText, wide: wide(doc.documentElement), code})
  }
  await fetch('/seen', {method: 'POST', body: JSON.stringify(seen)})
})()
</script>"""
flags = ('--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update '
         '--disable-sync --enable-logging=stderr --remote-debugging-port=0').split()
looked_at = 'index.html','core/collectives.html','learner/learner.html','tutorials/gallery.html','api.html'

class Host(SimpleHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_POST(self):
        self.server.seen.put(json.loads(self.rfile.read(int(self.headers['Content-Length']))))
        self.send_response(204)
        self.end_headers()

@pytest.mark.skipif(not os.environ.get('LEARNERDIST_BROWSER'), reason='LEARNERDIST_BROWSER=1 asks for it; needs Chromium')
def test_a_browser_has_no_complaint(site, tmp_path):
    "Five pages at two widths, in headless Chromium: nothing on the console, nothing that scrolls sideways"
    (site/'probe.html').write_text(probe%json.dumps(looked_at))
    with ThreadingHTTPServer(('127.0.0.1', 0), partial(Host, directory=site)) as server:
        server.seen = Queue()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f'http://127.0.0.1:{server.server_port}/probe.html'
        p = subprocess.Popen(['chromium',*flags, f'--user-data-dir={tmp_path}', url], stderr=subprocess.PIPE, text=True)
        try: seen = server.seen.get(timeout=120)
        finally:
            p.terminate()
            said = p.communicate(timeout=30)[1]
            server.shutdown()
    (site/'probe.html').unlink()
    assert [o for o in said.splitlines() if 'CONSOLE' in o]==[]
    assert len(seen)==10 and all(o['title'] for o in seen)
    assert [o for o in seen if o['wide'] or o['code']]==[]
