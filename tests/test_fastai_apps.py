"fastai's applications end to end, its downloads, and transforms"
import contextlib, pytest, tarfile
from fastai.text.all import *
from fastai.collab import *
from torch.utils._pytree import tree_leaves
from helpers import serve
from stand_ins import save, texts
from test_fastai import asking, close, ctx, data, floats, history, make, on_1_and_2, per_rank, same
from learnerdist.core.env import process_group
from learnerdist.fastai import *
from learnerdist.testing import run_ranks
pytestmark = pytest.mark.slow

warnings.filterwarnings('ignore')
F64 = torch.float64

def seeds(W):
    random.seed(0), np.random.seed(0), torch.manual_seed(7)
    torch.set_default_dtype(torch.float32)

def pictures(path):
    for i in range(24): save(path/'images'/f'{i:02}_{("right","left")[i%2]}.png', i, left=i%2==1, mask=path/'masks'/f'{i:02}.png')

def label_of(o): return Path(o).stem.split('_')[1]
def mask_of(o): return Path(o).parent.parent/'masks'/f'{Path(o).stem[:2]}.png'

class ToDouble(Callback):
    "In float32, BatchNorm over so few activations makes much of rounding"
    order = 8
    def before_batch(self): self.learn.xb = tuple(x.double() for x in self.learn.xb)

def resnet18(**kw):
    "Its first half, a twentieth of the weights"
    import torchvision
    model = torchvision.models.resnet18(**kw)
    model.layer3 = model.layer4 = nn.Identity()
    return model

class Loss(CrossEntropyLossFlat):
    "fastai's Recorder takes float32 only"
    def __call__(self, *args, **kw): return super().__call__(*args, **kw).float()

def without_dropout(model):
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout): m.p = 0.

def recorded(learn): return floats(learn.recorder.losses),[floats(o) for o in learn.recorder.values]

def vision(W, rank, path):
    from fastai.vision.all import ImageDataLoaders, Resize, vision_learner
    from fastai.callback.tensorboard import TensorBoardCallback
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
        learn.fit_one_cycle(1, 1e-2, cbs=TensorBoardCallback(log_dir=path/f'boards/{W}_{rank}', trace_model=False)) # with log_preds
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

@on_1_and_2
def test_vision(Ws, found):
    import matplotlib
    matplotlib.use('Agg')
    same(vision, found=found, W=Ws, tol=1e-5, lines=dict(
        vision_learner='7 `vision_learner` with half a ResNet18, `ImageDataLoaders`, `TensorBoardCallback` with `log_preds`',
        predict='3 `predict`', tta='3 `tta`', max='3 `tta(use_max=True)`', test='4 `test_dl` of files',
        interp='3 `Interpretation`, `ClassificationInterpretation`, its plots, `show_results`',
        summary="3 `learn.summary()`, with this rank's batch size",
        batch="4 `one_batch`, `show_batch` of pictures: this rank's"))
    assert {o.name for o in (found.path/'boards').iterdir()}=={f'{W}_0' for W in (0,*Ws)}

def unet(W, rank, path):
    from fastai.vision.all import SegmentationDataLoaders, unet_learner
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
        learn.fit(1, .1)
        return history(learn),learn.get_preds()

def applications(W, rank, path):
    return dict(unet=unet(W, rank, path), lm=text(W, rank, True), clas=text(W, rank, False), collab=collab(W, rank))

@on_1_and_2
def test_applications(Ws, found):
    same(applications, found=found, W=Ws, lines=dict(
        unet=('7 `unet_learner`, `Dice`', 1e-5), lm=('7 `language_model_learner`, AWD-LSTM without dropout', 1e-5),
        clas=('7 `text_classifier_learner`, AWD-LSTM without dropout', 1e-5), collab=('7 `collab_learner` (float32)', 1e-5)))

def scaled():
    from fasttransform import Transform
    class Scaled(Transform):
        "Learns the mean and the spread of the training set; one method for each type"
        def setups(self, items): self.mean,self.std = (getattr(torch.stack([*items]), o)(0) for o in ('mean','std'))
        def encodes(self, o:torch.Tensor): return (o-self.mean)/self.std
        def decodes(self, o:torch.Tensor): return o*self.std+self.mean
    class Shifted(Transform):
        "Of batches, in training only"
        order,split_idx = 3,0
        def encodes(self, b:tuple): return b[0]+.1,*b[1:]
    return Scaled,Shifted

class Label:
    "The class of sample `i`"
    def __init__(self, y): self.y = y
    def __call__(self, i): return int(self.y[i])

def transformed(W, rank, path):
    Scaled,Shifted = scaled()
    torch.manual_seed(0)
    x,y = data(133)
    torch.set_default_dtype(F64)
    scale = Scaled()
    dsets = Datasets([*range(133)], [[x.__getitem__,scale],[Label(y),lambda o: torch.tensor(o)]], splits=[[*range(96)],[*range(96, 133)]])
    dls = dsets.dataloaders(bs=per_rank(24, W), num_workers=0, device=torch.device('cpu'), after_batch=[Shifted()])
    learn = make(W, rank, metrics=[])
    learn.dls = dls
    with ctx(learn, W):
        learn.fit(2)
        return history(learn),learn.get_preds(with_input=True),scale.mean,learn.dls.one_batch()[0].shape[1]

@on_1_and_2
def test_transforms(Ws, found):
    pytest.importorskip('fasttransform')
    line = '4 fasttransform: a transform that learns from the training set, one of batches in training only'
    same(transformed, found=found, W=Ws, tol=1e-6, lines=[line])

found = asking(vision, applications, transformed, prepare=pictures)

def downloads(url, base):
    path = rank0_first(untar_data, url, base=base)
    return (path/'a.txt').read_text()

def test_rank0_first_downloads_once(tmp_path):
    (tmp_path/'www'/'stuff').mkdir(parents=True)
    (tmp_path/'www'/'stuff'/'a.txt').write_text('hello')
    with tarfile.open(tmp_path/'www'/'stuff.tgz', 'w:gz') as f: f.add(tmp_path/'www'/'stuff', 'stuff')
    with serve(tmp_path/'www') as (url,fetched):
        assert run_ranks(downloads, 2, f'{url}stuff.tgz', tmp_path/'base')==['hello']*2
    assert fetched==['stuff.tgz']

# --- the same bits ----------------------------------------------------------------------------------------------------------

def drawn_picture(i):
    from fastai.vision.all import PILImage
    return PILImage.create(np.random.default_rng(int(i)).integers(0, 255, (20,20,3), dtype=np.uint8))
def abc(i): return 'abc'[int(i)%3]
def bits(mixed=True):
    from fastai.vision.all import ImageBlock, aug_transforms, vision_learner
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    block = DataBlock((ImageBlock,CategoryBlock), get_x=drawn_picture, get_y=abc, splitter=RandomSplitter(seed=1),
                      batch_tfms=aug_transforms(size=16))
    dls = block.dataloaders(list(range(37)), bs=6, num_workers=0, device='cpu')
    torch.manual_seed(0)
    learn = vision_learner(dls, resnet18, pretrained=False, normalize=False, metrics=accuracy, loss_func=CrossEntropyLossFlat(),
                           cbs=[MixUp()] if mixed else [])
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=3, global_bs=12, max_bs=3):
        learn.fit(1, lr=1e-3)
        preds = learn.get_preds()
    rec = learn.recorder
    return dict(state=dict(learn.model.state_dict()), opt=tree_leaves(learn.opt.state_dict()), losses=[float(o) for o in rec.losses],
                values=[[*o] for o in rec.values], preds=[o.as_subclass(torch.Tensor) for o in preds])
def just_mixed():
    with process_group(): return [bits()]
def both():
    with process_group(): return [bits(), bits(False)]

@pytest.mark.parametrize('W,runs', [(2, just_mixed), pytest.param(4, both, marks=pytest.mark.long)], ids=[2,4])
def test_vision_learner_to_the_bit(W, runs):
    "On any number of ranks, with `aug_transforms` and MixUp, by fastai's own optimizer"
    want = runs()
    for r in run_ranks(runs, W, timeout_s=300): close(r, want, 0)
