"fastai's applications end to end on two ranks, its downloads, and what its own `distributed` gets wrong"
import contextlib, http.server, io, os, random, re, runpy, subprocess, sys, tarfile, threading, warnings
from pathlib import Path
import pytest
pytest.importorskip('fastai')
import numpy as np, pandas as pd, torch
from fastai.callback.core import Callback
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.data.external import untar_data
from fastai.interpret import ClassificationInterpretation, Interpretation
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import Dice, accuracy, rmse
from fastai.optimizer import SGD
from fastai.text.all import (AWD_LSTM, BaseTokenizer, Perplexity, TextDataLoaders, Tokenizer, awd_lstm_clas_config, awd_lstm_lm_config,
                             language_model_learner, text_classifier_learner)
from fastai.vision.all import ImageDataLoaders, Resize, SegmentationDataLoaders, Normalize, unet_learner, vision_learner
from PIL import Image
from torchvision.models import resnet18
from test_fastai import ctx, floats, history, make, on_ranks, per_rank, same, state
from test_fastai_callbacks import quiet
from learnerdist.fastai import *
from learnerdist.testing import run_ranks
pytestmark = pytest.mark.slow

warnings.filterwarnings('ignore')
root = Path(__file__).parent.parent

def seeds(W):
    random.seed(0), np.random.seed(0), torch.manual_seed(7)
    torch.set_default_dtype(torch.float32)

def pictures(path, n=40, size=32):
    g = np.random.RandomState(0)
    for kind in ('images','masks'): (path/kind).mkdir()
    for i in range(n):
        img = g.randint(0, 80, (size, size, 3)).astype('uint8')
        mask = np.zeros((size, size), 'uint8')
        mask[8:24, (0 if i%2 else 16):(16 if i%2 else 32)] = 1
        img[mask>0] += 120
        Image.fromarray(img).save(path/'images'/f'{i:02}_{"left" if i%2 else "right"}.png')
        Image.fromarray(mask).save(path/'masks'/f'{i:02}.png')
    return path

def label_of(o): return Path(o).stem.split('_')[1]
def mask_of(o): return Path(o).parent.parent/'masks'/f'{Path(o).stem[:2]}.png'

class ToDouble(Callback):
    "In float32, BatchNorm over so few activations makes much of rounding"
    order = 8
    def before_batch(self): self.learn.xb = tuple(x.double() for x in self.learn.xb)

class Loss(CrossEntropyLossFlat):
    "fastai's Recorder takes float32 only"
    def __call__(self, *args, **kw): return super().__call__(*args, **kw).float()

def without_dropout(model):
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout): m.p = 0.

def recorded(learn): return floats(learn.recorder.losses),[floats(o) for o in learn.recorder.values]

def vision(W, rank, path):
    seeds(W)
    files = sorted((path/'images').iterdir())
    tfms = dict(item_tfms=Resize(32), batch_tfms=Normalize.from_stats([.5]*3, [.5]*3))
    kw = dict(valid_pct=.25, seed=1, bs=per_rank(12, W), num_workers=0, device='cpu', **tfms)
    dls = ImageDataLoaders.from_path_func(path, files, label_of, **kw)
    kw = dict(pretrained=False, normalize=False, metrics=accuracy, opt_func=SGD)
    learn = vision_learner(dls, resnet18, cbs=ToDouble, loss_func=Loss(), **kw)
    learn.model.double()
    without_dropout(learn.model)
    with ctx(learn, W):
        learn.fit_one_cycle(1, 1e-2, cbs=TensorBoardCallback(log_dir=path/f'{W}_{rank}', trace_model=False)) # with log_preds
        res = dict(vision_learner=(recorded(learn), learn.get_preds()))
        res['predict'],res['tta'] = learn.predict(files[0])[1:],learn.tta(n=2)
        res['max'] = learn.tta(n=1, use_max=True)[0]
        interp = ClassificationInterpretation.from_learner(learn)
        res['interp'] = (interp.confusion_matrix().tolist(), interp.top_losses(3)[0], interp.most_confused(), interp[[0,2]][1],
                         Interpretation.from_learner(learn, ds_idx=0)[[0,2]][1])
        res['test'] = learn.get_preds(dl=learn.dls.test_dl(files[:5]))[0]
        res['summary'] = [o.split()[-3:] for o in str(learn.summary()).splitlines() if 'True' in o or o.startswith('Total')]
        learn.show_results(max_n=2)
        learn.dls.show_batch(max_n=2)
        interp.plot_top_losses(2)
        interp.plot_confusion_matrix()
        res['batch'] = len(learn.dls.one_batch()[0])==per_rank(12, W)
    return res

def test_vision(tmp_path):
    import matplotlib
    matplotlib.use('Agg')
    same(vision, pictures(tmp_path, 32), tol=1e-5, lines=dict(
        vision_learner='7 `vision_learner` with a ResNet18, `ImageDataLoaders`, `TensorBoardCallback` with `log_preds`',
        predict='3 `predict`', tta='3 `tta`', max='3 `tta(use_max=True)`', test='4 `test_dl` of files',
        interp='3 `Interpretation`, `ClassificationInterpretation`, its plots, `show_results`',
        summary="3 `learn.summary()`, with this rank's batch size",
        batch="4 `one_batch`, `show_batch` of pictures: this rank's"))
    assert sorted(o.name for o in tmp_path.iterdir() if o.name[0].isdigit())==[f'{W}_0' for W in range(4)]

def unet(W, rank, path):
    seeds(W)
    files = sorted((path/'images').iterdir())[:15]
    kw = dict(valid_pct=.2, seed=1, bs=per_rank(6, W), num_workers=0, device='cpu')
    dls = SegmentationDataLoaders.from_label_func(path, files, mask_of, codes=['no','yes'], **kw)
    kw = dict(pretrained=False, normalize=False, metrics=Dice(), opt_func=SGD, loss_func=Loss(axis=1))
    learn = unet_learner(dls, resnet18, cbs=ToDouble, **kw)
    learn.model.double()
    with ctx(learn, W):
        learn.fit(1, 1e-2)
        return recorded(learn),floats(learn.validate())

class Words(BaseTokenizer):
    def __init__(self, **kw): super().__init__()

def texts():
    g = random.Random(1)
    words = [''.join(g.choices('abcdef', k=3)) for _ in range(30)]
    rows = [(' '.join(g.choices(words, k=g.randint(5, 30))), i%2, i>=60) for i in range(80)]
    return pd.DataFrame(rows, columns=['text','label','is_valid'])

def text(W, rank, is_lm):
    seeds(W)
    kw = dict(text_col='text', label_col='label', valid_col='is_valid', is_lm=is_lm, seq_len=10, bs=per_rank(12, W), val_bs=12,
              device='cpu', num_workers=0) # evaluation takes the validation loader as it is
    with contextlib.redirect_stdout(io.StringIO()):
        dls = TextDataLoaders.from_df(texts(), tok_tfm=Tokenizer.from_df('text', tok=Words(), n_workers=1), **kw)
    config = dict(awd_lstm_lm_config if is_lm else awd_lstm_clas_config, n_hid=12, emb_sz=8, n_layers=2, output_p=0., hidden_p=0.,
                  input_p=0., embed_p=0., weight_p=1e-12) # at weight_p=0, fastai's weight dropout fails with this torch, on one process too
    make_learner = language_model_learner if is_lm else text_classifier_learner
    mets = [accuracy,Perplexity()] if is_lm else accuracy
    learn = make_learner(dls, AWD_LSTM, config=config, pretrained=False, metrics=mets, opt_func=SGD)
    learn.loss_func = Loss()
    without_dropout(learn.model.double())
    with ctx(learn, W, **(dict(find_unused_parameters=True) if W else {})):
        learn.fit_one_cycle(1, 1e-2)
        return recorded(learn),floats(learn.validate())

def collab(W, rank):
    seeds(W)
    g = np.random.RandomState(0)
    df = pd.DataFrame(dict(user=g.randint(0, 9, 120), item=g.randint(0, 7, 120), rating=g.rand(120)*5))
    dls = CollabDataLoaders.from_df(df, bs=per_rank(24, W), valid_pct=.2, seed=1, device='cpu')
    learn = collab_learner(dls, n_factors=5, y_range=(0, 5.5), metrics=rmse, opt_func=SGD)
    with ctx(learn, W):
        learn.fit(2, .1)
        return history(learn),learn.get_preds()

def applications(W, rank, path):
    return dict(unet=unet(W, rank, path), lm=text(W, rank, True), clas=text(W, rank, False), collab=collab(W, rank))

def test_applications(tmp_path):
    same(applications, pictures(tmp_path, 15), lines=dict(
        unet=('7 `unet_learner`, `Dice`', 1e-5), lm=('7 `language_model_learner`, AWD-LSTM without dropout', 1e-5),
        clas=('7 `text_classifier_learner`, AWD-LSTM without dropout', 1e-5), collab=('7 `collab_learner` (float32)', 1e-5)))

# --- downloads --------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def server(folder):
    hits = []
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args): super().__init__(*args, directory=folder)
        def do_GET(self):
            hits.append(self.path)
            super().do_GET()
        def log_message(self, *args): pass
    srv = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    thread = threading.Thread(target=srv.serve_forever)
    thread.start()
    try: yield f'http://127.0.0.1:{srv.server_port}',hits
    finally:
        srv.shutdown()
        thread.join()
        srv.server_close()

def downloads(url, base):
    path = rank0_first(untar_data, url, base=base)
    return (path/'a.txt').read_text()

def test_rank0_first_downloads_once(tmp_path):
    (tmp_path/'www'/'stuff').mkdir(parents=True)
    (tmp_path/'www'/'stuff'/'a.txt').write_text('hello')
    with tarfile.open(tmp_path/'www'/'stuff.tgz', 'w:gz') as f: f.add(tmp_path/'www'/'stuff', 'stuff')
    with server(tmp_path/'www') as (url,hits):
        assert run_ranks(downloads, 3, f'{url}/stuff.tgz', tmp_path/'base')==['hello']*3
    assert hits==['/stuff.tgz']

# --- fastai.distributed was imported before ---------------------------------------------------------------------------------

def imported_before(W, rank):
    import importlib
    importlib.import_module('fastai.distributed')
    import learnerdist.fastai as ours
    importlib.reload(ours)
    learn = make(W, rank)
    with quiet(learn), learn.distrib_ctx(seed=3):
        learn.fit(1)
        return state(learn),learn.get_preds(),type(learn.distributed_trainer).__module__

def test_fastai_distributed_imported_before():
    pytest.importorskip('accelerate')
    for got in run_ranks(on_ranks, 2, imported_before):
        assert got[2]=='learnerdist.fastai.trainer'

# --- the examples -----------------------------------------------------------------------------------------------------------

def table_of(text):
    "The lines of the table without the clock, and the last line"
    lines = [o.strip() for o in text.splitlines()]
    return [[float(v) for v in o.split()[:-1]] for o in lines if re.match(r'\d+ +[\d.]+ ', o)],lines[-1]

def launched(name, *args):
    env = dict(os.environ, PYTHONPATH=str(root), MPLBACKEND='Agg')
    cmd = [sys.executable,'-W','ignore','-m','learnerdist.launch','--nproc','2',f'examples/{name}.py',*args]
    res = subprocess.run(cmd, cwd=root, env=env, capture_output=True, text=True, timeout=200)
    assert res.returncode==0, res.stderr
    assert '\r' not in res.stdout and '%' not in res.stdout # no bar
    return table_of(res.stdout)

def alone(name, *args):
    "The same script in this process"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as m:
        m.setattr(sys, 'argv', [name,*args])
        torch.set_default_dtype(torch.float32)
        runpy.run_path(str(root/f'examples/{name}.py'), run_name='__main__')
    return table_of(out.getvalue())

@pytest.mark.long
def test_tabular_example():
    (two,last2),(one,last1) = launched('fastai_tabular', '--epochs', '3'),alone('fastai_tabular', '--epochs', '3', '--bs', '16')
    assert len(two)==3 and two==[pytest.approx(o, abs=2e-6) for o in one] and last2==last1

@pytest.mark.long
def test_vision_example(tmp_path):
    rows,last = launched('fastai_vision', '--epochs', '1', '--pictures', '90', '--bs', '16', '--path', str(tmp_path/'digits'))
    assert len(rows)==1 and f'{rows[0][3]:.4f}'==last.split()[-4] and last.endswith('on 22 pictures')
