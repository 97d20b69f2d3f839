"""A fit in a notebook of a real JupyterLab, seen by a real browser: does the bar move, and does the plot come?

    pip install jupyterlab selenium        # and Debian's chromium and chromium-driver
    python tools/live_notebook.py [screenshot.png]

Prints the positions of the bars that the browser has seen, and fails if they did not move, or if the table or the plot is missing.
"""
import secrets,socket,subprocess,sys,tempfile,time
from contextlib import ExitStack,suppress
from pathlib import Path

import nbformat
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.chrome.service import Service

port,token = 8899,secrets.token_hex(8)
cells = '''
import time,torch
from learnerdist.all import *
from learnerdist.launch import run
class Slow(Callback):
    def after_batch(self): time.sleep(.15)
def train(n):
    import matplotlib.pyplot # so that rank 0's plot is shown
    ds = [(torch.rand(4),torch.rand(1)) for _ in range(120)]
    learn = Learner(DataLoaders.from_dsets(ds, ds[:20], bs=2), torch.nn.Linear(4, 1), torch.nn.MSELoss(), cbs=Slow())
    with learn.distrib_ctx(): learn.fit(n)
    if is_rank0(): learn.recorder.plot_loss()
    return 'done'
===
run(train, 2, nproc=2)
'''.split('===')

def browser(profile):
    opts = webdriver.ChromeOptions()
    opts.binary_location = '/usr/bin/chromium'
    for o in ('headless','no-sandbox','disable-gpu','remote-debugging-pipe','disable-dev-shm-usage','disable-background-networking',
              f'user-data-dir={profile}','window-size=1100,1000'): opts.add_argument(f'--{o}')
    return webdriver.Chrome(options=opts, service=Service('/usr/bin/chromedriver'))

def wait(found, timeout_s=120):
    "What `found()` returns once it is true"
    end = time.monotonic()+timeout_s
    while not (res := found()):
        if time.monotonic()>end: raise TimeoutError(f'not seen within {timeout_s} s')
        time.sleep(.2)
    return res

def is_served():
    "Whether the server of JupyterLab answers"
    with suppress(OSError), socket.create_connection(('127.0.0.1', port), 1): return True

def positions(page):
    "Value and maximum of each bar on the page"
    return page.execute_script("return [...document.querySelectorAll('.jp-OutputArea progress')].map(o => [o.value, o.max])")

def watch(page):
    "Run both cells; the positions of the bars until the result is there"
    page.get(f'http://127.0.0.1:{port}/lab/tree/live.ipynb?token={token}')
    wait(lambda: page.find_elements(By.CSS_SELECTOR, '.jp-CodeCell .cm-content'))
    wait(lambda: 'Idle' in page.find_element(By.TAG_NAME, 'body').text) # the kernel has started
    page.find_elements(By.CSS_SELECTOR, '.jp-CodeCell .cm-content')[0].click()
    for _ in cells: ActionChains(page).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).pause(1).perform()
    seen = []
    def done():
        now = positions(page)
        if now and now not in seen[-1:]: seen.append(now)
        return page.find_elements(By.CSS_SELECTOR, '.jp-OutputArea-executeResult')
    wait(done)
    return seen

def main(picture=None):
    with ExitStack() as stack:
        d = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o.strip()) for o in cells])
        nb.metadata.kernelspec = dict(name='python3', display_name='Python 3', language='python')
        nbformat.write(nb, Path(d, 'live.ipynb'))
        lab = subprocess.Popen([sys.executable, '-m', 'jupyterlab', '--no-browser', '--allow-root', '--port', str(port),
                                f'--ServerApp.token={token}'], cwd=d, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(lab.wait)
        stack.callback(lab.terminate)
        wait(is_served)
        page = browser(f'{d}/profile')
        stack.callback(page.quit)
        seen,html = watch(page),page.page_source
        if picture: page.save_screenshot(picture)
    print(*seen, sep='\n')
    assert len(seen)>5 and '<th>train_loss</th>' in html and 'data:image/png' in html, 'the bar, the table or the plot was not seen'

if __name__=='__main__': main(*sys.argv[1:])
