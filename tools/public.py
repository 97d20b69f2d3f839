"""Public training scripts and notebooks, ported, on 1, 2 and 3 processes: `python tools/public.py CHECKOUT... [--only NAME ...] [--write]`

A checkout is a folder as `git clone` names it: examples (pytorch's), fastbook, course22p2, course22 (fastai's), minGPT. A port is what a user
would type: searches and replaces of a few words in their file; `--diff` shows it, and its lines are counted. Data sets are small and made here;
searches and replaces for these, for sizes and for dropout of 0 are not counted. The loader's batch size is that of a step at any number of
processes. Compared with one process, in float64, are weights, losses, values and what the script computes afterwards. A row is *same*,
*warned* (it differs, and a warning says why), *error* (one that says what to do) or *FAILURE*, which makes the exit status 1."""
import argparse
import contextlib
import difflib
import io
import json
import os
import random
import re
import sys
import tempfile
import time
import traceback
import types
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

from learnerdist.testing import run_ranks
from sweep import distance, harmless

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'tests'))
page, begin, end = root/'docs/public.md', '<!-- tools/public.py --write -->\n', '<!-- end -->\n'

# --- data ---------------------------------------------------------------------------------------------------------------------

class Digits(torch.utils.data.Dataset):
    "In place of torchvision's MNIST: noise, with a bright row that tells the class"
    def __init__(self, root=None, train=True, transform=None, download=False, n=40):
        g = torch.Generator().manual_seed(int(train))
        self.data, self.targets = torch.randint(80, (n, 28, 28), generator=g, dtype=torch.uint8), torch.arange(n) % 10
        self.data[torch.arange(n), 2*self.targets+4] += 150
        self.transform = transform
    def __len__(self): return len(self.data)
    def __getitem__(self, i):
        from PIL import Image
        img = Image.fromarray(self.data[i].numpy())
        return (self.transform(img) if self.transform else img), int(self.targets[i])

class Rows:
    "In place of a data set of Hugging Face's `datasets`"
    features = dict(image=None, label=None)
    def __init__(self, digits, transform=None): self.digits, self.transform = digits, transform
    def __len__(self): return len(self.digits)
    def __getitem__(self, i):
        img, y = self.digits[i]
        b = dict(image=[img], label=[y])
        if self.transform: b = self.transform(b)
        return {k: v[0] for k, v in b.items()}

class Fashion(dict):
    def with_transform(self, f): return Fashion({k: Rows(v.digits, f) for k, v in self.items()})

def load_dataset(*args, **kw): return Fashion(train=Rows(Digits()), test=Rows(Digits(train=False)))

# Packages that a notebook imports, and of which a port needs nothing else
stand_ins = {'datasets': dict(load_dataset=load_dataset, load_dataset_builder=None), 'einops': dict(rearrange=None), 'k_diffusion': {},
             'torcheval.metrics': dict(MulticlassAccuracy=dict, Mean=dict, Metric=object), 'torcheval': {}, 'diffusers': dict(UNet2DModel=nn.Module)}

def human_numbers(path):
    words = 'one two three four five six seven eight nine ten'.split()
    for name, n in dict(train=700, valid=60).items(): (path/f'{name}.txt').write_text(''.join(f'{words[i%10]} {words[i//10%10]} \n' for i in range(n)))

def titanic(path, n=90):
    import pandas as pd
    g = np.random.RandomState(0)
    names = [f'Doe, {o}. J' for o in ('Mr', 'Miss', 'Mrs')]
    pd.DataFrame(dict(Survived=g.randint(0, 2, n), Pclass=g.randint(1, 4, n), Name=g.choice(names, n), Sex=g.choice(['male', 'female'], n),
                      Age=g.randint(1, 80, n), SibSp=g.randint(0, 3, n), Parch=g.randint(0, 3, n), Ticket=g.randint(0, 50, n).astype(str),
                      Fare=g.rand(n)*50, Cabin=g.choice(['A1', 'B2', 'C3'], n), Embarked=g.choice(list('CQS'), n))).to_csv(path/'train.csv')

def cora(path, n=30):
    g = np.random.RandomState(0)
    lines = [' '.join(map(str, [i, *g.randint(0, 2, 12), f'class{i%3}'])) for i in range(n)]
    (path/'cora.content').write_text('\n'.join(lines))
    (path/'cora.cites').write_text('\n'.join(f'{a} {b}' for a, b in g.randint(0, n, (60, 2))))

def words(path):
    for name in ('train', 'valid', 'test'): (path/f'{name}.txt').write_text('the cat saw a dog and the dog saw it\n'*20)

def pictures(path):
    from stand_ins import save
    for i in range(12): save(path/'BSDS300/images'/('train', 'test')[i%3==2]/f'{i}.png', i, (256, 256))

def makers():
    import stand_ins
    own = dict(HUMAN_NUMBERS=human_numbers, TITANIC=titanic, CORA=cora, WORDS=words, PICTURES=pictures, IMAGENETTE=stand_ins.makers['IMAGENETTE_160'])
    return stand_ins.makers | own

# --- ports --------------------------------------------------------------------------------------------------------------------

def pattern(search): return '.*?'.join(map(re.escape, search.split('…')))+r'\Z'*search.endswith('…')

def edited(text, edits):
    "`text` after each edit: a function, or (search, replace), where … in a search stands for anything. ValueError if nothing is found"
    for o in edits:
        f = o if callable(o) else lambda t, o=o: re.sub(pattern(o[0]), lambda m: o[1], t, flags=re.S)
        text, before = f(text), text
        if text==before: raise ValueError(f'not in the source: {o if callable(o) else o[0]}')
    return text

def cells_of(path, phrases):
    "A notebook as a script: for each phrase the next cell that has it, or the first one"
    cells = [''.join(o['source']) for o in json.loads(path.read_text())['cells'] if o['cell_type']=='code']
    at = []
    for p in phrases:
        having = [i for i, o in enumerate(cells) if p in o]
        if not having: raise ValueError(f'no cell of {path.name} has {p!r}')
        at.append(next((i for i in having if i >= max(at, default=0)), having[0]))
    return re.sub(r'^(\s*)[%!].*$', r'\1pass', '\n'.join(cells[i] for i in sorted({*at})), flags=re.M)+'\n'

def imported(text): return re.sub(r'(from fastai\S* import \*)', r'\1\nfrom learnerdist.fastai import *', text, count=1)
calls = r'^(\s*)((?:[\w,]+ = )?learn\.(?:fit|fit_one_cycle|fine_tune|lr_find|validate|get_preds|tta)\(.*\))$'
def in_context(options='split_batches=True'): return lambda text: re.sub(calls, rf'\1with learn.distrib_ctx({options}): \2', text, flags=re.M)
fastai = [imported, in_context()]
drawn = 'split_batches=True, max_bs=8'  # what is drawn for a batch is then drawn for its parts, at any number of processes

pieces = {}
def piece(name, path, port, cells=(), data=(), argv='', also='', told='', about=''):
    "argv: of the script; also: variables that are compared; told: in the error that is expected"
    pieces[name] = dict(path=path, port=port, cells=cells, data=data, argv=argv, also=also.split(), told=told, about=about or path)

def of_book(name, path, *cells, data=(), port=fastai, **kw):
    piece(name, path, port, cells, data, **kw)

def text_of(name, checkouts, ported=True):
    o = pieces[name]
    path = next((p for c in checkouts if (p := c.parent/o['path']).exists() and c.name==Path(o['path']).parts[0]), None)
    if path is None: return None, None
    text = edited(cells_of(path, o['cells']) if path.suffix=='.ipynb' else path.read_text(), o['data'])
    text = re.sub(r'untar_data\(URLs\.(\w+)\)', r"made('\1')", text)
    return path, edited(text, o['port']) if ported else text

def diff_of(name, checkouts):
    "The port's diff, lines that it adds, lines that it removes"
    before, after = (text_of(name, checkouts, o)[1].splitlines() for o in (False, True))
    lines = [*difflib.unified_diff(before, after, n=0, lineterm='')][2:]
    return lines, *(sum(o.startswith(c) for o in lines) for c in '+-')

#BEGIN
# fastai: each port has the two lines that `fastai` adds, `from learnerdist.fastai import *` and a context around each call

small = ('resnet34', 'resnet18, pretrained=False'), ('Resize(224)', 'Resize(32)')
headless = ('metrics=error_rate)', 'metrics=error_rate, ps=0.)')
of_book('cats', 'fastbook/clean/01_intro.ipynb', 'def is_cat', data=[*small, headless], about='fine-tune a classifier of pictures')
of_book('segmentation', 'fastbook/clean/01_intro.ipynb', 'from fastai.vision.all', 'SegmentationDataLoaders', data=[
    ('learn = vision…fine_tune(1)', 'pass'), ('resnet34)', 'resnet18, pretrained=False)'), ('bs=8', 'bs=12, item_tfms=Resize(32)'), ('tune(8)', 'tune(1)'),
    ('get_image_files(path/"images")', 'get_image_files(path/"images").sorted()[:30]')],
    about='a U-Net')
small_lstm = ('AWD_LSTM,', 'AWD_LSTM, config=awd_lstm_clas_config | dict(emb_sz=16, n_hid=16, n_layers=2),')
of_book('sentiment', 'fastbook/clean/01_intro.ipynb', 'TextDataLoaders', data=[('drop_mult=0.5', 'drop_mult=1e-12, pretrained=False, ps=[0.]'), ('tune(4', 'tune(1'), small_lstm],
    port=[*fastai, ('TextDataLoaders.from_folder(', 'rank0_first(TextDataLoaders.from_folder, ')], about='a text classifier')
of_book('adult', 'fastbook/clean/01_intro.ipynb', 'TabularDataLoaders', 'fit_one_cycle(3)', data=[('path=path,', 'path=path, bs=1200,')], about='a tabular model')
of_book('movies', 'fastbook/clean/01_intro.ipynb', 'from fastai.collab', data=[('tune(10)', 'tune(2)')], about='collaborative filtering')
of_book('threes', 'fastbook/clean/04_mnist_basics.ipynb', 'from fastai.vision.all', 'untar_data(URLs.MNIST_SAMPLE)', 'threes = (path', 'seven_tensors = [',
        'stacked_sevens = ', 'valid_3_tens = ', 'train_x = ', 'train_y = ', 'dset = list', 'valid_x = ', 'predictions = predictions.sigmoid()',
        'dl = DataLoader(dset', 'valid_dl = DataLoader', 'def batch_accuracy', 'lr = 1.\n', 'dls = DataLoaders(dl', 'nn.Linear(28*28,1), opt_func=SGD',
        'learn.fit(10, lr=lr)', 'simple_net = nn.Sequential', 'Learner(dls, simple_net', 'learn.fit(40, 0.1)',
        data=[('from fastbook import *\n', ''), ('fit(10', 'fit(2'), ('fit(40', 'fit(2'), ('params = weights…validate_epoch(linear1)', ''),
              ('batch_size=256', 'batch_size=40')], about='a loss and a metric by hand')
of_book('breeds', 'fastbook/clean/05_pet_breeds.ipynb', 'from fastai.vision.all', 'pets = DataBlock', 'suggest_funcs', 'fit_one_cycle(12',
        data=[('aug_transforms(size=224, min_scale=0.75)', 'Normalize()'), ('Resize(460)', 'Resize(32)'), small[0], headless, ('cycle(12', 'cycle(1'),
              ('cycle(3,', 'cycle(1,')], also='lr_min lr_steep', about='`lr_find`, rates by layer')
of_book('augmented', 'fastbook/clean/05_pet_breeds.ipynb', 'from fastai.vision.all', 'pets = DataBlock', 'fine_tune(2)', port=[imported, in_context(drawn)],
        data=[('size=224', 'size=32'), ('Resize(460)', 'Resize(40)'), small[0], headless, ('path/"images")', 'path/"images", bs=48)')], about='batch transforms, drawn for each part')
of_book('multi_label', 'fastbook/clean/06_multicat.ipynb', 'from fastai.vision.all', "pd.read_csv(path/'train", 'def get_x(r): return path', 'item_tfms = RandomRes',
        'def splitter(df)', 'vision_learner(dls, resnet50', 'thresh=0.1)', 'preds,targs', also='preds', data=[('resnet50,', 'resnet18, pretrained=False, ps=0.,'),
        ('RandomResizedCrop(128', 'RandomResizedCrop(32')], about='several labels, random crops, a threshold changed')
of_book('points', 'fastbook/clean/06_multicat.ipynb', 'from fastai.vision.all', 'BIWI_HEAD_POSE', 'img_files = get_image_files', 'cal = np', 'biwi = DataBlock',
        'dls = biwi', 'y_range=(-1,1))', 'lr = 1e-2', data=[('aug_transforms(size=(240,320))', 'None'), ('untar_data(URLs.PASCAL_2007)', '0'),
        ('dls.show_batch(max_n=9, figsize=(8,6))', ''), ('resnet18,', 'resnet18, pretrained=False, ps=0.,')], about='points as targets')
of_book('sizes', 'fastbook/clean/07_sizing_and_tta.ipynb', 'from fastai.vision.all', 'def get_dls', 'get_dls(128, 128)', 'learn.dls = get_dls', 'learn.tta()',
        data=[('[*aug…0.75),', '['), ('Resize(460)', 'Resize(48)'), ('(128, 128)', '(48, 48)'), ('(64, 224)', '(24, 32)'), ('xresnet50', 'xresnet18'),
              ('tune(5', 'tune(1'), ('cycle(4', 'cycle(1')], also='preds', about='new loaders within a run, `tta`')
of_book('factors', 'fastbook/clean/08_collab.ipynb', 'from fastai.collab', 'ratings = pd', 'movies = pd', 'ratings.merge', 'dls = Collab', 'n_users  = len',
        'def create_params', 'self.user_factors = create_params', 'wd=0.1)', 'embs = get_emb_sz', 'class CollabNN', 'CollabNN(*embs)', 'wd=0.01)',
        data=[('dls.show_batch()', ''), ('cycle(5', 'cycle(1'), ('bs=64', 'bs=240')], about='models of embeddings by hand')
lm = ('bs=128, seq_len=80', 'bs=6, seq_len=10'), ('.to_fp16()', ''), ('drop_mult=0.3', 'drop_mult=1e-12, pretrained=False'), (small_lstm[0], small_lstm[1].replace('clas', 'lm'))
of_book('language_model', 'fastbook/clean/10_nlp.ipynb', 'from fastai.text', 'get_imdb = ', 'language_model_learner', 'fit_one_cycle(1, 2e-2)', data=[
        *lm, ('blocks=', 'n_inp=1, blocks=') if False else ("folders=['train', 'test', 'unsup']", "folders=['test']")],
        port=[*fastai, ('dls_lm = DataBlock(', 'dls_lm = rank0_first(lambda: DataBlock('), ('seq_len=10)', 'seq_len=10))')], about='AWD-LSTM, perplexity')
of_book('reviews', 'fastbook/clean/10_nlp.ipynb', 'from fastai.text', 'get_imdb = ', 'dls_clas = DataBlock', 'text_classifier_learner', 'freeze_to(-2)', 'freeze_to(-3)',
        data=[*lm[:2], ("folders=['train', 'test', 'unsup']", "folders=['test']"), ('bs=128, seq_len=72', 'bs=30, seq_len=20'),
              ('drop_mult=0.5', 'drop_mult=1e-12, pretrained=False, ps=[0.]'), small_lstm], about='a classifier, layers thawed one after the other',
        port=[*fastai, ('\ndls_lm = DataBlock(', '\ndls_lm = rank0_first(lambda: DataBlock('), ('seq_len=10)', 'seq_len=10))'),
              ('\ndls_clas = DataBlock(', '\ndls_clas = rank0_first(lambda: DataBlock('), ('seq_len=20)', 'seq_len=20))')])
dive = 'from fastai.text', 'lines = L()', "text = ' . '", 'tokens = text', 'vocab = L(', 'word2idx', 'seqs = L((tensor(nums[i:i+3])', 'bs = 64', 'def group_chunks'
numbers_data = ('bs = 64', 'bs = 12'), ('bs=64', 'bs=12'), ('seqs\nbs', '\nbs')
shorter = lambda t: re.sub(r'cycle\(\d+', 'cycle(2', t).replace('sl = 16', 'sl = 8')  # noqa: E731
of_book('numbers', 'fastbook/clean/12_nlp_dive.ipynb', *dive, 'class LMModel1', 'LMModel1(len', data=[*numbers_data, shorter], about='a model of words')
of_book('stateful', 'fastbook/clean/12_nlp_dive.ipynb', *dive, 'class LMModel3', 'group_chunks(seqs[:cut], bs), ', 'LMModel3(len', data=[*numbers_data, shorter],
        told='[carries-state]', about='a hidden state from batch to batch')
local = [*fastai, ('[torch.zeros(n_layers, bs, n_hidden) for _ in range(2)]', 'None'), ('for h in self.h: h.zero_()', 'self.h = None'),
         ('ModelResetter)', 'EachBatch)'), ('class LMModel', '''class EachBatch(ModelResetter):
    def before_batch(self):
        if not self.training: self.model.reset()
class LMModel''')]
of_book('lstm', 'fastbook/clean/12_nlp_dive.ipynb', *dive, 'sl = 16', 'class LMModel6', 'LMModel6(len', data=[*numbers_data, shorter], port=local,
        about='an LSTM, its state reset before each batch of validation')
of_book('tied', 'fastbook/clean/12_nlp_dive.ipynb', *dive, 'sl = 16', 'class LMModel7', 'TextLearner(', 'wd=0.1', data=[*numbers_data, shorter, ('64, 2, 0.4', '64, 2, 0.')],
        port=[*local[:4], local[5], ('metrics=accuracy)', 'metrics=accuracy, cbs=EachBatch)')], about='tied weights, `RNNRegularizer`')
of_book('activations', 'fastbook/clean/13_convolutions.ipynb', 'from fastai.vision', 'MNIST_SAMPLE', 'def get_dls', 'def simple_cnn', 'callback.hook', 'layers = [nn.Conv2d',
        'epochs=1, lr=0.06', 'fit(5, lr', data=[('from fastbook import *\n', ''), ("'training','testing'", "'train','valid'"), ('fit(5', 'fit(1'),
        ('act=False),  #1x1', 'act=False),')], about='`ActivationStats`, BatchNorm')
of_book('resnet', 'fastbook/clean/14_resnet.ipynb', 'from fastbook', 'def get_data', 'dls = get_data', 'def get_model', 'def get_learner', 'def _conv_block',
        'idconv = noop', 'learn.fit_one_cycle(5', data=[('from fastbook', 'from fastai.vision.all'), ('[*aug…resize),', '['), ('untar_data(url)', 'untar_data(URLs.IMAGENETTE_160)'),
        ('get_data(URLs.IMAGENETTE_160, 160, 128)', 'get_data(0, 32, 32)'), ('.to_fp16()', ''), ('cycle(5', 'cycle(1'), ('bs=128', 'bs=48')], about='a network by hand')
of_book('siamese', 'fastbook/clean/15_arch_details.ipynb', 'SiameseTransform', 'class SiameseModel', 'create_body', 'create_head(512', 'SiameseModel(enc', 'def loss_func',
        'siamese_splitter', 'splitter=siamese', 'cycle(4, 3e-3)', 'learn.unfreeze', data=[('resnet34', 'resnet18(weights=None)'), ('ps=0.5', 'ps=0.'),
        ('Resize(224)', 'Resize(32)'), ('cycle(4', 'cycle(1')], about='two pictures, drawn by the data set')
of_book('own_optimizers', 'fastbook/clean/16_accel_sgd.ipynb', 'from fastbook', 'def get_data', 'dls = get_data', 'def get_learner', 'def average_grad(', 'def momentum_step',
        'average_grad,momentum_step', 'learn.fit_one_cycle(3, 0.03)', data=[('from fastbook', 'from fastai.vision.all'), ('[*aug…resize),', '['), ('untar_data(url)', 'untar_data(URLs.IMAGENETTE_160)'),
        ('get_data(URLs.IMAGENETTE_160, 160, 128)', 'get_data(0, 32, 32)'), ('.to_fp16()', ''), ('resnet34,', 'resnet18, ps=0.,'), ('bs=128', 'bs=48'), ('cycle(3', 'cycle(1'),
        ('add_(-lr, grad_avg)', 'add_(grad_avg, alpha=-lr)')], about='optimizers by hand')
of_book('grad_cam', 'fastbook/clean/18_CAM.ipynb', 'from fastbook', 'def is_cat', 'x, = first', 'def __init__(self, m)', 'class HookBwd', 'with HookBwd(learn.model[0])', 'w = grad[0]',
        data=[('from fastbook', 'from fastai.vision.all'), *small, headless, ('img = PILImage.create(image_cat())', 'img = get_image_files(path).sorted()[0]'),
              ('x.cuda()', 'x.double()')], also='cam_map', about='Grad-CAM by hooks after training')
of_book('titanic', 'course22/clean/06-why-you-should-use-a-framework.ipynb', 'from fastai.tabular', "pd.read_csv(path/'train", 'def add_features', 'splits =', 'dls = Tabular',
        'tabular_learner', 'lr_find', 'fit(16', data=[("path/'train", "made('TITANIC')/'train"), ('fit(16', 'fit(4'), ('path="."', 'path=".", bs=36')], about='a tabular model, `lr_find`')
of_book('accumulated', 'course22/clean/10-scaling-up-road-to-the-top-part-3.ipynb', 'setup_comp', 'def train(', 'accum=2, fin', data=[('path = setup_comp…"\')', ''),
        ('tst_files…sorted()', "trn_path = untar_data(URLs.IMAGENETTE)/'train'"), ('aug_transforms(size=size, min_scale=0.75)', 'None'),
        ('64//accum', '48//accum'), ('(64)', '(48)'), ('.to_fp16()', ''), ("'convnext_small_in22k', 128", 'resnet18, 32, item=Resize(32)'),
        ('arch, metrics', 'arch, pretrained=False, ps=0., metrics'), ('report_gpu()', '')], about='`GradientAccumulation`')
# pytorch/examples and minGPT, to the compact Learner

star = ('import torch\n', 'import torch\nfrom learnerdist.all import *\n')
fit = '    with learn.distrib_ctx(split_batches=True): learn.fit(args.epochs)\n'
fit_drawn = fit.replace('True)', 'True, max_bs=2)')  # with dropout
digits = '''    learn = Learner(DataLoaders(train_loader, test_loader), model, F.nll_loss, optim.Adadelta, args.lr, metrics=accuracy,
                    cbs=Scheduler(lambda opt: StepLR(opt, step_size=1, gamma=args.gamma), by='epoch'))
'''
loops, steps = ('def train(…def main', 'def main'), '    optimizer = optim.Adadelta…scheduler.step()\n'
piece('mnist', 'examples/mnist/main.py', [star, loops, (steps, digits+fit_drawn)], argv='--batch-size 12 --epochs 2', about="dropout, torch's `StepLR`")
piece('mnist_rnn', 'examples/mnist_rnn/main.py', [star, loops, (steps, digits+fit)], argv='--batch-size 12 --epochs 2 --lr .1', data=[
      ('Dropout2d(0.25)', 'Dropout2d(0.)'), ('Dropout2d(0.5)', 'Dropout2d(0.)')], about='an LSTM, BatchNorm')
piece('siamese_digits', 'examples/siamese_network/main.py', [star, loops, (steps, digits.replace('F.nll_loss', 'nn.BCELoss()').replace(' metrics=accuracy,', '')+fit),
      ('output = self.sigmoid(output)', 'output = self.sigmoid(output).squeeze(1)')], argv='--batch-size 12 --epochs 1 --lr .01',
      data=[('.clone().float()', '.clone().double()/255'), ('dtype=torch.float)', 'dtype=torch.double)')], about='pairs drawn by the data set')
piece('vae', 'examples/vae/main.py', [star, ('if use_accel else {}\n', "if use_accel else {}\nkwargs['collate_fn'] = lambda b: (torch.stack([x for x, _ in b]),)*2\n"),
      ('def train(epoch…', '''def loss_func(out, x): return loss_function(out[0], x, *out[1:])
learn = Learner(DataLoaders(train_loader, test_loader), model, loss_func, optim.Adam, 1e-3)
'''+fit_drawn.strip())], argv='--batch-size 12 --epochs 2', about='inputs as targets, a sum, draws in the model')
nodes = '''    class Nodes(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net
        def forward(self, idx): return self.net(features, adj_mat)[idx]
    def loader(idx): return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(idx, labels[idx]), len(idx))
    learn = Learner(DataLoaders(loader(idx_train), loader(idx_val)), Nodes(NET), nn.NLLLoss(), lambda ps, lr: Adam(ps, lr, weight_decay=args.l2), args.lr,
                    metrics=accuracy)
'''+fit
graph = [("path='./cora'", "path=made('CORA')"), ('torch.FloatTensor', 'torch.DoubleTensor')]
piece('gcn', 'examples/gcn/main.py', [star, ('    optimizer = Adam(…break\n', nodes.replace('NET', 'gcn')), ('    loss_test, acc…', '')], data=[*graph,
      ("    print('Downloading…extractall()\n", ''), ('idx[:1000], idx[1000:1500], idx[1500:]', 'idx[:6], idx[6:12], idx[12:]')],
      argv='--epochs 3 --dropout-p 0', about='one graph: ranks share its nodes')
piece('gat', 'examples/gat/main.py', [star, ('    optimizer = Adam(…break\n', nodes.replace('NET', 'gat_net')), ('    loss_test, acc…', '')], data=[*graph,
      ("path = './cora'", "path = made('CORA')"), ('idx[:1200], idx[1200:1600], idx[1600:]', 'idx[:6], idx[6:12], idx[12:]')],
      argv='--epochs 3 --dropout-p 0', about='graph attention')
piece('sines', 'examples/time_sequence_prediction/train.py', [star, ('    optimizer = optim.LBFGS…', '''    from torch.utils.data import DataLoader, TensorDataset
    learn = Learner(DataLoaders(DataLoader(TensorDataset(input, target), 97)), seq, criterion, optim.LBFGS, .8)
    with learn.distrib_ctx(split_batches=True): learn.fit(opt.steps)''')], data=[("torch.load('traindata.pt')", 'np.sin(np.arange(12)[:, None]+np.arange(9)/3)')],
      told='needs the loss several times a step', about='LBFGS')
piece('super_resolution', 'examples/super_resolution/main.py', [star, ('optimizer = optim.Adam…', '''learn = Learner(DataLoaders(training_data_loader, testing_data_loader), model, criterion, optim.Adam, opt.lr)
with learn.distrib_ctx(split_batches=True): learn.fit(opt.nEpochs)
learn.save('model')''')], argv='--upscale_factor 4 --batchSize 6 --testBatchSize 2 --threads 0 --nEpochs 1', about='pictures to pictures')
piece('dcgan', 'examples/dcgan/main.py', [star, ('fixed_noise = …', '''class Noised(torch.utils.data.Dataset):
    def __len__(self): return len(dataset)
    def __getitem__(self, i): return dataset[i][0], torch.randn(nz, 1, 1), 1.
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.netD = netD
    def forward(self, real, noise): return netD(real), netD(netG(noise).detach())
def loss_func(out, label): return criterion(out[0], label)+criterion(out[1], 1-label)
class TrainG(Callback):
    def before_fit(self):
        sync_batchnorm(netG)
        self.opt_g = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    def after_step(self):
        criterion(netD(netG(self.xb[1])), self.y).backward()
        average_grads(netG.parameters())
        self.opt_g.step()
        self.opt_g.zero_grad()
loader = torch.utils.data.DataLoader(Noised(), batch_size=opt.batchSize, shuffle=True, num_workers=int(opt.workers))
learn = Learner(DataLoaders(loader), Critic(), loss_func, lambda ps, lr: optim.Adam(ps, lr, betas=(opt.beta1, 0.999)), opt.lr, cbs=TrainG())
with learn.distrib_ctx(split_batches=True): learn.fit(opt.niter)''')], data=[('FakeData(', 'FakeData(24, ')], about='a GAN: two optimizers',
      argv='--dataset fake --batchSize 12 --niter 1 --ngf 4 --ndf 4 --nz 5 --workers 0')
piece('word_model', 'examples/word_language_model/main.py', [star, ('# Loop over epochs…', '''class Columns(torch.utils.data.Dataset):
    def __init__(self, source): self.source = source
    def __len__(self): return (len(self.source)-1)//args.bptt*self.source.shape[1]
    def __getitem__(self, k):
        i, column = divmod(k, self.source.shape[1])
        part = self.source[i*args.bptt:(i+1)*args.bptt+1, column]
        return part[:-1], part[1:]
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, x): return self.model(x.t()).transpose(0, 1)
def loss_func(out, y): return criterion(out.flatten(0, 1), y.flatten())
def loader(source): return torch.utils.data.DataLoader(Columns(source), source.shape[1])
learn = Learner(DataLoaders(loader(train_data), loader(val_data)), Model(), loss_func, torch.optim.SGD, args.lr,
                cbs=[GradientClip(args.clip), ReduceLROnPlateauCallback(patience=0, factor=.25), SaveModelCallback(fname='model')])
'''+fit_drawn.strip())], data=[("default='./data/wikitext-2'", "default=str(made('WORDS'))")], about='a transformer: clipping, plateau, best weights',
      argv='--model Transformer --emsize 8 --nhid 8 --nlayers 1 --batch_size 12 --bptt 5 --epochs 2 --dropout 0 --lr 1')
piece('imagenet', 'examples/imagenet/main.py', [star, ('    optimizer = torch.optim.SGD(…# Data loading', '    # Data loading'),
      ('    for epoch in range(args.start_epoch, args.epochs)…def train(', '''    def top1(output, target): return accuracy(output, target)[0]
    opt_func = lambda ps, lr: torch.optim.SGD(ps, lr, momentum=args.momentum, weight_decay=args.weight_decay)
    learn = Learner(DataLoaders(train_loader, val_loader), model, criterion, opt_func, args.lr, metrics=top1,
                    cbs=Scheduler(lambda opt: StepLR(opt, step_size=30, gamma=0.1), by='epoch'))
'''+fit+'def train(')], argv='--dummy -a resnet18 --epochs 1 -b 12 -j 0 --no-accel --lr .01', about='the ImageNet script',
      data=[('FakeData(1281167, (3, 224, 224), 1000', 'FakeData(24, (3, 32, 32), 10'), ('FakeData(50000, (3, 224, 224), 1000', 'FakeData(15, (3, 32, 32), 10')])
piece('ddp_tutorial', 'examples/distributed/ddp-tutorial-series/single_gpu.py', [star, ('class Trainer:…def load', 'def load'), ('    trainer = Trainer(…total_epochs)',
      '''    learn = Learner(DataLoaders(train_data), model, F.mse_loss, torch.optim.SGD, 1e-3)
    with learn.distrib_ctx(): learn.fit(total_epochs)
    learn.save('checkpoint')''')], argv='2 1 --batch_size 12', data=[('F.cross_entropy', 'F.mse_loss'), ('device = 0', "device = 'cpu'"), ('2048', '60'),
      ("return DataLoader(", "batch_size //= int(os.environ.get('WORLD_SIZE', 1))\n    return DataLoader("), ('import torch\n', 'import os, torch\nimport torch\n')],
      about="the script that torch's tutorial on DDP begins with")
piece('stream', 'examples/regression/main.py', [star, ('for batch_idx in…break\n', '''class Points(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True: yield [o[0] for o in get_batch(1)]
class Good(Callback):
    def after_step(self):
        if self.loss < 1e-3 or self.iter==9: raise CancelFitException()
loader = torch.utils.data.DataLoader(Points(), batch_size=12)
learn = Learner(DataLoaders(loader), fc, F.smooth_l1_loss, torch.optim.SGD, .1, cbs=Good())
with learn.distrib_ctx(split_batches=True): learn.fit(1)
'''), ("print('Loss…batch_idx))", '')], about='an endless stream, stopped by a callback')
by_steps = '''    from torch.utils.data import RandomSampler
    n = config.trainer.max_iters*config.trainer.batch_size
    loader = DataLoader(train_dataset, config.trainer.batch_size, sampler=RandomSampler(train_dataset, replacement=True, num_samples=n))
'''
gpt_fit = '    with learn.distrib_ctx(split_batches=True, max_bs=2): learn.fit(1)\n'
gpt_args = '--model.model_type=gpt-nano --trainer.max_iters=4 --trainer.batch_size=12'
piece('adder', 'minGPT/projects/adder/adder.py', [star, ('    # construct the trainer…train_dataset)\n', by_steps+'''    def loss_func(out, y): return torch.nn.functional.cross_entropy(out[0].flatten(0, 1), y.flatten(), ignore_index=-1)
    learn = Learner(DataLoaders(loader), model, loss_func, lambda ps, lr: model.configure_optimizers(config.trainer), config.trainer.learning_rate,
                    cbs=GradientClip(config.trainer.grad_norm_clip))
'''), ('trainer.device', 'learn.device'), ('    # iteration callback…', gpt_fit+"    score = eval_split(learn, 'test')\n")], also='score', argv=gpt_args+' --data.ndigit=1',
      about='a number of steps, labels of -1, its own optimizer')
piece('chars', 'minGPT/projects/chargpt/chargpt.py', [star, ('    # construct the trainer…', by_steps.replace('sampler', 'collate_fn=with_targets, sampler')+'''    learn = Learner(DataLoaders(loader, n_inp=2), model, lambda out, y: out[1], lambda ps, lr: model.configure_optimizers(config.trainer), config.trainer.learning_rate,
                    cbs=GradientClip(config.trainer.grad_norm_clip))
'''+gpt_fit), ("if __name__ == '__main__':", '''def with_targets(samples):
    x, y = torch.utils.data.default_collate(samples)
    return x, y, y

if __name__ == '__main__':''')], data=[("open('input.txt', 'r')", "open(made('WORDS')/'train.txt')")], argv=gpt_args+' --data.block_size=8',
      about='a model that takes targets, and returns (logits, loss)')

# course22p2: miniai's learner becomes ours; its callbacks for devices, metrics and progress go

def ours(text): return 'import learnerdist.all as ld\n'+text
learner = r'''learn = (?:Train|Momentum)?Learner\((get_model\(\)|model), dls, '''
def with_ours(text): return re.sub(learner, r'learn = ld.Learner(ld.DataLoaders(dls.train, dls.valid), \1, ', text)
p2 = [ours, with_ours, ('learn.fit(', 'with learn.distrib_ctx(split_batches=True): learn.fit('), ('metrics = MetricsCB(accuracy=MulticlassAccuracy())\n', '')]
no_cbs = ('\ncbs = […\n', '\n')
scheduled = [*p2, no_cbs, ('cbs=cbs+xtra', 'cbs=xtra, metrics=ld.accuracy'), ('astats = ActivationStats(fc.risinstance(GeneralRelu))\n', '')]
few = lambda t: re.sub(r'bs = (1024|512|256)\b', 'bs = 12', re.sub(r'num_workers=[\w.]+', 'num_workers=0', t))  # noqa: E731
def of_course(name, path, *cells, port=p2, data=(), **kw): piece(name, f'course22p2/nbs/{path}.ipynb', port, cells, [few, *data], **kw)

of_course('autoencoder', '08_autoencoder', 'import pickle', 'dsd = load', 'def transformi', 'bs = 256\ntds', 'cf = collate', 'def collate_', 'dls = data_loaders', "dt = dls['train']", 'def deconv',
          'ds = tds', 'ae = nn', 'lr=0.01)', data=[(', ignore_verifications=True', ''), ('img = ds…\n', ''), ('show_image(img…\n', '\n')],
          port=[ours, ('return to_device(cf(b))', 'return (cf(b)[0],)*2'), ('opt = optim.SGD(ae…dv)', '''learn = ld.Learner(ld.DataLoaders(dt, dv), ae, F.mse_loss, optim.SGD, 0.01)
with learn.distrib_ctx(split_batches=True): learn.fit(5)''')], about='targets are the inputs')
of_course('first_learner', '09_learner', 'import math', 'import matplotlib', 'dsd = load', 'def transformi', 'tds = dsd', 'dls = DataLoaders', 'm,nh = 28*28,50\ndef',
          'cbs = [TrainCB(), DeviceCB(), metrics, ProgressCB(plot=True)]\nlearn = Learner(model, dls, F.cross_entropy, lr=0.2, cbs=cbs)\nlearn.fit(2)',
          data=[('metrics = MetricsCB', 'model = get_model()\nmetrics = MetricsCB')], port=[*p2, no_cbs, ('cbs=cbs', 'opt_func=optim.SGD, metrics=ld.accuracy')], about="miniai's first learner")
resnet = 'import pickle', 'set_seed(42)', 'dsd = load', 'iw = partial'
of_course('cosine', '12_accel_sgd', *resnet, 'T_max=tmax', 'rec = RecorderCB(lr', port=[*scheduled, ('rec = RecorderCB(lr=_lr)\n', ''), ('BatchSchedCB(sched),rec', 'ld.Scheduler(sched)')],
          data=[(', LRFinderCB()', '')], about="torch's schedulers by step")
of_course('cosine_by_epoch', '12_accel_sgd', *resnet, 'EpochSchedCB(sched),rec', port=[*scheduled, ('EpochSchedCB(sched),rec', "ld.Scheduler(sched, by='epoch')")], about='by epoch')
of_course('onecycle', '13_resnet', *resnet, '#|export\nact_gr', 'nfs=(8,16,32,64,128), ', 'lr,epochs = 6e-2,5', 'learn.fit(epochs)', port=[*scheduled, ('BatchSchedCB(sched)', 'ld.Scheduler(sched)')],
          data=[('epochs = 6e-2,5', 'epochs = 6e-2,2')], about='`OneCycleLR`, BatchNorm')
of_course('batch_augment', '14_augment', 'import torch,random', 'import pickle', 'dsd = load', 'iw = partial', 'def get_model(', 'from torchvision import', 'def tfm_batch', 'padding=1',
          'epochs = 20', port=[*scheduled, ('BatchTransformCB(partial(tfm_batch, tfm_x=tfms), on_val=False)', 'Augment()'), ('BatchSchedCB(sched)', 'ld.Scheduler(sched)'), ('split_batches=True', 'split_batches=True, max_bs=2'),
          ('def tfm_batch', '''class Augment(ld.Callback):
    run_valid = False
    def before_batch(self): self.learn.xb = tfms(self.xb[0]),
def tfm_batch''')], data=[('epochs = 20', 'epochs = 1'), ('64,128,256,512', '16,16,16,16'), ('learn = TrainLearner(model, dls, F.cross_entropy, lr=lr, cbs=[SingleBatchCB(), augcb])', '')], about='augmentation of whole batches')
of_course('noise', '22_noise-pred', 'import timm', 'set_seed(42)', 'dsd = load', 'def noisify', 'def collate_ddpm', 'def transformi', 'def flat_mse', 'def get_model(', 'metrics = MetricsCB()', 'opt_func = partial',
          'learn.fit(epochs)', port=[*p2[:-1], no_cbs, ('cbs=cbs+xtra', 'cbs=xtra'), ('BatchSchedCB(sched)', 'ld.Scheduler(sched)'), ('split_batches=True', 'split_batches=True, max_bs=2')],
          data=[('epochs = 20', 'epochs = 1'), ('64,128,256,512', '16,16,16,16'), ('from miniai.fid import ImageEval', '')], about='noise drawn by the collate function')
vae_cells = 'import timm', 'set_seed(42)', 'dsd = load', 'def transformi', 'ni,nh,nl', 'def lin(', 'def init_weights', 'iw = partial'
vae_port = [*p2[:-1], no_cbs, ('cbs=cbs', 'cbs=ld.Scheduler(sched)')]
vae_data = ('epochs = 20', 'epochs = 1'), ('784,400,200', '784,20,10')
of_course('dense_autoencoder', '29_vae', *vae_cells, 'class Autoenc', 'opt_func = partial', 'model = Autoenc()', 'learn.fit(epochs)', port=vae_port, data=vae_data, about='BatchNorm, `OneCycleLR`')
of_course('dense_vae', '29_vae', *vae_cells, 'class VAE', 'def kld_loss', 'metrics = MetricsCB', 'model = VAE()', 'learn.fit(epochs)', about='draws in the model',
          port=[*vae_port, ('metrics = …\n', ''), ('split_batches=True', 'split_batches=True, max_bs=2')], data=vae_data)
#END

# --- running and comparing ----------------------------------------------------------------------------------------------------

def noting(cls, seen):
    "`cls.__init__`, which notes the learner; fastai's gets inputs in float64"
    init = cls.__init__
    def __init__(self, *args, **kw):
        init(self, *args, **kw)
        seen.append(self)
        if not cls.__module__.startswith('fastai'): return
        from fastai.callback.core import Callback
        def double(os): return tuple(o.double() if isinstance(o, torch.Tensor) and o.is_floating_point() else o for o in os)
        class Doubled(Callback):
            order = 51
            def before_train(self): self.recorder.smooth_loss.val = self.recorder.smooth_loss.val.double()
            def after_loss(self): self.learn.loss = self.learn.loss.double()
            def before_batch(self): self.learn.xb, self.learn.yb = double(self.xb), double(self.yb)
        self.add_cb(Doubled())
    return mock.patch.object(cls, '__init__', __init__)

def numbers(learn):
    res = dict(weights=[p.detach().clone() for p in learn.model.state_dict().values()])
    if hasattr(learn.recorder, 'losses'): res |= dict(losses=[float(o) for o in learn.recorder.losses], values=learn.recorder.values)
    return {k: [[*o] if k=='values' else o for o in v] for k, v in res.items()}

@contextlib.contextmanager
def prepared(name, path, folder, seen):
    "Where a piece runs: its folder, arguments, modules and seeds; its learners get into `seen`"
    from fastai.learner import Learner as Theirs

    from learnerdist.all import Learner
    here = Path(folder)/f'{name}-{os.environ.get("WORLD_SIZE", 1)}'
    here.mkdir(exist_ok=True)
    os.chdir(here)
    for f in (torch.manual_seed, random.seed, np.random.seed): f(0)
    modules, folders = {*sys.modules}, [str(o) for o in path.parents[:3]]
    with contextlib.ExitStack() as stack:
        for o in (noting(Learner, seen), noting(Theirs, seen), mock.patch('torchvision.datasets.MNIST', Digits),
                  mock.patch.object(sys, 'argv', [str(path), *pieces[name]['argv'].split()]), mock.patch.object(sys, 'path', folders+sys.path),
                  contextlib.redirect_stdout(io.StringIO())): stack.enter_context(o)
        yield
    for o in {*sys.modules}-modules:
        if str(getattr(sys.modules[o], '__file__', '')).startswith(str(path.parents[0])): del sys.modules[o]

def outcome(name, path, text, folder):
    "What a piece gives on this process: numbers of each of its learners and of variables; its error, and whether that is ours; warnings"
    res, seen, ns = {}, [], dict(__name__='__main__', __file__=str(path), made=lambda o: Path(folder)/o)
    with prepared(name, path, folder, seen), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        try:
            exec(compile(text, str(path), 'exec'), ns)
            res = {f'{k} {i or ""}'.strip(): v for i, o in enumerate(seen) for k, v in numbers(o).items()} | {o: ns[o] for o in pieces[name]['also']}
        except Exception as e:
            at = traceback.extract_tb(e.__traceback__)[-1].filename
            res = dict(error=f'{type(e).__name__}: {e}', ours='learnerdist' in at and isinstance(e, ValueError), trace=traceback.format_exc())
    return res | dict(messages=[str(o.message) for o in warned])

def outcomes(jobs, folder):
    "Of several pieces, one after the other. jobs: from their names to (path, text)"
    from fastcore.basics import defaults
    defaults.cpus = 0
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.double)
    for k, v in stand_ins.items():
        sys.modules[k] = types.ModuleType(k)
        vars(sys.modules[k]).update(v)
    res = {}
    for name, job in jobs.items():
        start = time.process_time()
        res[name] = outcome(name, *job, folder)
        if '-v' in os.environ.get('PUBLIC', ''): print(name, f'{time.process_time()-start:.1f} s', res[name].get('trace', ''), file=sys.stderr, flush=True)
    return res

def codes(ranks): return sorted({o for r in ranks for t in r['messages'] for o in re.findall(r'^\[([a-z-]+)\] ', t)})

def judge(alone, ranks, told='', tol=1e-7):
    "(verdict, detail) of a run on some ranks; fastai computes losses and values in float32"
    errors = [o for o in [alone, *ranks] if 'error' in o]
    clear = told and any(o['ours'] and told in o['error'] for o in errors)
    if errors: return ('error' if clear else 'FAILURE'), ' '.join(next((o for o in errors if o['ours']), errors[0])['error'].split())[:200]
    names = [k for k in alone if k!='messages']
    if not names: return 'FAILURE', 'nothing to compare'
    off = {k: max(distance(o.get(k), alone[k]) for o in ranks) for k in names}
    far, said = ', '.join(f'{k} by {v:.1g}' for k, v in off.items() if not v <= (1e-5 if k.startswith(('losses', 'values')) else tol)), codes(ranks)
    warned = ', '.join(f'`{o}`' for o in said)
    if not far: return 'same', warned
    return ('warned', f'{warned}: {far}') if {*said}-{*harmless} else ('FAILURE', f'{warned} {far}')

def run_pieces(jobs, folder, worlds=(2, 3)):
    "From the name of each piece to (verdict, detail), joined over numbers of processes. jobs: as of `outcomes`"
    for o in {'PICTURES'}.union(*(re.findall(r"made\('(\w+)'\)", text) for _, text in jobs.values())):
        (Path(folder)/o).mkdir()
        makers()[o](Path(folder)/o)
    found = {o: [] for o in jobs}
    alone = run_ranks(outcomes, 1, jobs, folder, timeout_s=3000)[0]
    for W in worlds:
        ranks = run_ranks(outcomes, W, jobs, folder, timeout_s=3000)
        for o in jobs: found[o].append(judge(alone[o], [r[o] for r in ranks], pieces[o]['told']))
    return {k: [' / '.join(dict.fromkeys(filter(None, o))) for o in zip(*v)] for k, v in found.items()}

def table(rows):
    "rows: from a name to (verdict, detail, lines added, lines removed)"
    head = '| code | what | lines of the port | on 1, 2, 3 processes | |\n|---|---|---|---|---|\n'
    lines = [f"| {pieces[k]['path']} | {pieces[k]['about']} | +{a} -{r} | {verdict} | {detail} |\n" for k, (verdict, detail, a, r) in rows.items()]
    return head+''.join(lines)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('checkouts', nargs='+', type=lambda o: Path(o).resolve(), help='folders: examples, fastbook, course22p2, course22, minGPT')
    p.add_argument('--only', nargs='*', default=[*pieces], help=', '.join(pieces))
    p.add_argument('--diff', action='store_true', help='show the ports, run nothing')
    p.add_argument('--worlds', type=int, nargs='+', default=[2, 3], help='numbers of processes')
    p.add_argument('--write', action='store_true', help='write the table into docs/public.md')
    args = p.parse_args()
    jobs = {o: text_of(o, args.checkouts) for o in args.only}
    jobs, rows = {k: v for k, v in jobs.items() if v[0]}, {}
    counts = {o: diff_of(o, args.checkouts) for o in jobs}
    if args.diff:
        for k, (lines, *_) in counts.items(): print(f'--- {k}: {pieces[k]["path"]}', *lines, sep='\n')
        return False
    with tempfile.TemporaryDirectory() as folder: found = run_pieces(jobs, folder, args.worlds)
    for k, o in found.items():
        rows[k] = *o, *counts[k][1:]
        print(k, *rows[k], flush=True)
    if args.write:
        before, _, rest = page.read_text().partition(begin)
        page.write_text(before+begin+table(rows)+end+rest.partition(end)[2])
    return any('FAILURE' in o[0] for o in rows.values())

if __name__=='__main__': sys.exit(main())
