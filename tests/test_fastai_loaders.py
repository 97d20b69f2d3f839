"Each kind of fastai's loaders: dealt out, trained on, predicted in order"
import pytest
from fastai.text.all import *
from fastai.tabular.all import *
from fastai.callback.data import PartialDL, WeightedDL
from torch.utils.data import DataLoader as TorchLoader, IterableDataset
from helpers import Of
from test_fastai import CrossEntropy, accuracy, asking, ctx, data, history, items, on_1_and_2, per_rank, plain, same
from learnerdist.core.collectives import gather_rows
from learnerdist.fastai import *
from learnerdist.fastai.loaders import ShareDL
from learnerdist.data.distributed_dl import DistributedDL as OurDL, reindexed, widened
from learnerdist.data.loaders import TfmdDL as OurTfmdDL

warnings.filterwarnings('ignore')
F64 = torch.float64

def rows(dl, r, W, epoch=0, **kw):
    share = ShareDL.from_dl(dl, r, W, seed=5, **kw)
    share.set_epoch(epoch)
    res = [b for b in share]
    assert len(share)==len(res)
    return [o for b in res for o in (b.tolist() if torch.is_tensor(b) else b)]

# --- shares, in one process -------------------------------------------------------------------------------------------------

def test_shares_are_those_of_our_own_loader():
    "For settings drawn at random. What these are, tests/test_dealing.py shows"
    rng = random.Random(0)
    for _ in range(60):
        n,W,pad = rng.choice([0, 1, 5, 16, 47]),rng.choice([1, 2, 3, 8]),rng.choice([True,False,'batch'])
        kw = dict(bs=rng.choice([1, 4]), shuffle=rng.random()<.5, drop_last=rng.random()<.5, num_workers=0)
        for r in range(W):
            own = OurDL.from_dl(OurTfmdDL(range(n), **kw), r, W, 5, pad)
            own.set_epoch(1)
            assert rows(TfmdDL(list(range(n)), **kw), r, W, 1, pad=pad)==[i for b in own for i in b.tolist()]

def test_settings_are_kept():
    dl = TfmdDL(list(range(40)), bs=4, after_item=lambda o: o+1, after_batch=lambda b: b*2, num_workers=2)
    share = ShareDL.from_dl(dl, 1, 2)
    assert share.fake_l.num_workers==2 and [o.tolist() for o in share][0]==[4,8,12,16]
    assert [o.tolist() for o in dl][0]==[2,4,6,8] # the loader itself is as it was
    assert share.one_batch().tolist()==[4,8,12,16]

def test_what_is_drawn_while_a_batch_is_evaluated_does_not_depend_on_the_ranks():
    dl = TfmdDL(list(range(20)), bs=3, num_workers=0, after_batch=lambda b: b+torch.rand(len(b)))
    shares = {(r, W): [b.tolist() for b in ShareDL.by_batch(dl, r, W, 5, True)] for W in (1,2,3) for r in range(W)}
    for (r,W),share in shares.items(): assert share==shares[0,1][r::W]

@pytest.mark.parametrize('bs,W', [(1,2),(2,3),(4,2),(4,3)])
def test_lengths_of_language_models(bs, W):
    dl = LMDataLoader([torch.arange(10)]*8, lens=[10]*8, bs=bs, seq_len=5)
    for r in range(W):
        for share in (DistributedDL.from_dl(dl, r, W),DistributedDL.by_batch(dl, r, W)): assert len(share)==len([*share])

class Odd(TfmdDL):
    "Reads odd items only, twice"
    def get_idxs(self): return [i for i in range(self.n) if i%2]*2

def test_a_users_own_order():
    dl = Odd(list(range(20)), bs=2, num_workers=0)
    assert [rows(dl, r, 2) for r in range(2)]==[[1,5,9,13,17]*2, [3,7,11,15,19]*2]

def test_another_batch_size_keeps_what_a_loader_was_given():
    "fastai's `new` loses the weights of a `WeightedDL`, and how many samples a `PartialDL` reads"
    dl,read = WeightedDL(list(range(6)), bs=4, wgts=[0,0,1,0,0,0], shuffle=True, num_workers=0),[]
    for W in (1,2): read += [rows(dl, r, W, global_bs=6) for r in range(W)]
    assert read==[[2]*6, [2]*3, [2]*3] and rows(widened(dl, 2), 0, 1)==[2]*6
    dl = PartialDL(list(range(40)), bs=4, partial_n=12, num_workers=0)
    assert [len(rows(dl, r, 2, global_bs=6)) for r in range(2)]==[6,6]

class Plus(Transform):
    "Of batches, in training only"
    split_idx = 0
    def encodes(self, x:torch.Tensor): return x+100 if x.is_floating_point() else x

class Means(Callback):
    def before_fit(self): self.learn.means = []
    def before_batch(self): self.learn.means.append(float(self.x.mean()))

@pytest.mark.parametrize('kw', [dict(), dict(global_bs=12), dict(global_bs=12, max_bs=3)], ids=str)
def test_batch_transforms_know_their_split_and_decode(kw):
    torch.set_default_dtype(F64)
    dsets = Datasets(range(34), [[x_of],[y_of]], splits=[range(24), range(24, 34)])
    learn = Learner(dsets.dataloaders(bs=12, num_workers=0, device='cpu', after_batch=[Plus]), plain(), CrossEntropy(), cbs=Means())
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw):
        learn.fit(1)
        assert [round(o, -2) for o in learn.means]==[100.]*(24//kw.get('max_bs', 12))+[0.]
        assert learn.dls.train.after_batch.split_idx==0 and learn.predict(3)[2].shape==(3,)
        assert learn.dls.show_batch(show=False)[0].mean()>99

# --- learners ---------------------------------------------------------------------------------------------------------------

def learn_on(dls, W, preds=('all',)):
    "A fit, and what is predicted: all that fastai's loaders can give; for the validation loader as it is; nothing"
    torch.manual_seed(7)
    learn = Learner(dls, plain(), CrossEntropy(), opt_func=SGD, lr=.1, metrics=[accuracy])
    with ctx(learn, W):
        learn.fit(2)
        res = [history(learn)]
        if 'all' in preds: res += learn.get_preds(with_input=True, with_loss=True, with_decoded=True)
        if 'all' in preds: res.append(float(learn.get_preds(ds_idx=0)[1].sum()))
        if 'as it is' in preds: res += learn.get_preds(dl=learn.dls.valid, reorder=False)
        return res

def x_of(i): return data(200)[0][i]
def y_of(i): return data(200)[1][i]

class Twice(Transform):
    def encodes(self, x:torch.Tensor): return x*2 if x.is_floating_point() else x

class Stream(IterableDataset):
    def __init__(self, n): self.n = n
    def __iter__(self): return iter(items(self.n))
    def __len__(self): return self.n

class MixedDL:
    "Reads two loaders over the same rows side by side, as the well-known recipe does; it is no DataLoader"
    n_inp,device,bs = 1,torch.device('cpu'),None
    def __init__(self, *dls): self.dls,self.dataset,self.bs = dls,dls[0].dataset,dls[0].bs
    def __len__(self): return len(self.dls[0])
    def __iter__(self):
        for parts in zip(*self.dls): yield torch.cat([p[0] for p in parts], 1),parts[0][1]

def splits(dl, dealer):
    "What a user registers: a copy that reads what the dealer deals"
    return MixedDL(*[reindexed(o, dealer) for o in dl.dls])

def mixed(W):
    reindexed.register(MixedDL, splits)
    x,y = data(79)
    parts = [list(zip(x[:,:3], y)), list(zip(x[:,3:], y))]
    mk = lambda s: MixedDL(*[TfmdDL(p[s], bs=per_rank(12, W), shuffle=s.start is None, num_workers=0) for p in parts])
    return learn_on(DataLoaders(mk(slice(48)), mk(slice(48, 79))), W, ())

def of_loaders(W, rank, path):
    torch.set_default_dtype(F64)
    dsets,bs = Datasets(range(80), [[x_of],[y_of]], splits=[range(48), range(48, 80)]),per_rank(12, W)
    block = DataBlock(get_x=x_of, get_y=y_of, splitter=lambda o: [range(48), range(48, 80)], item_tfms=Twice)
    kw = dict(bs=bs, num_workers=0, device='cpu')
    inside = dsets.dataloaders(after_batch=[Twice()], **kw)
    def as_it_is(*dls): return learn_on(DataLoaders(*dls), W, ('as it is',))
    return {
        '`Datasets.dataloaders`, `TfmdDL`, with batch transforms': learn_on(inside, W),
        '`TfmdDL` with workers': learn_on(dsets.dataloaders(**kw|dict(num_workers=1)), W, ()),
        '`DataBlock`, with item transforms': learn_on(block.dataloaders(range(80), **kw), W),
        '`WeightedDL` (`weighted_dataloaders`)': learn_on(dsets.weighted_dataloaders(np.arange(48)+1., **kw), W),
        '`PartialDL` (`partial_dataloaders`)': learn_on(dsets.partial_dataloaders(32, **kw), W),
        "torch's `DataLoader` in `DataLoaders`": as_it_is(*[TorchLoader(items(n), bs, shuffle=n==48) for n in (48, 31)]),
        'an iterable data set': as_it_is(*[DataLoader(Stream(n), bs=bs, n=n) for n in (48, 31)]),
        "an iterable data set in torch's `DataLoader`": as_it_is(*[TorchLoader(Stream(n), bs) for n in (48, 31)]),
        "a mixed loader of one's own (fastai 2.8 has no `MixedDL`), registered in one line": mixed(W),
        '`one_batch`, `test_dl`, `show_batch`, `len` inside the context': looks(inside, W)}

def looks(dls, W):
    "What a script may ask of the loaders; a batch is this rank's"
    learn = Learner(dls, plain(), CrossEntropy())
    with ctx(learn, W):
        x,_ = learn.dls.valid.one_batch()
        test = learn.dls.test_dl(range(7))
        assert len(x)==per_rank(12, W) and [len(o) for o in (learn.dls.train_ds,learn.dls.valid_ds,test.dataset)]==[48,32,7]
        whole = [b[0] for b in test]
        learn.dls.show_batch(max_n=2, show=False)
        rows = gather_rows(x) if W else [x]
        assert len(learn.dls.valid)==len([*learn.dls.valid])
        return len(learn.dls.train),torch.cat(whole),torch.cat(rows)

def of_a_share(W, rank, path):
    "Predictions of a share, in its context and by a learner that is in none, and of some samples of a data set"
    torch.set_default_dtype(F64)
    dsets,res = Datasets(range(80), [[x_of],[y_of]], splits=[range(48), range(48, 80)]),[]
    for kw in (dict(), dict(global_bs=12, max_bs=3)):
        torch.manual_seed(7)
        dls,model = dsets.dataloaders(bs=per_rank(12, W), num_workers=0, device='cpu'),plain()
        learn,other = [Learner(o, model, CrossEntropy(), opt_func=SGD) for o in (dls,dls.new())]
        with ctx(learn, W, **kw if W else {}):
            res.append([o.get_preds(dl=learn.dls.train) for o in (learn,other)])
            res.append([learn.get_preds(dl=learn.dls.valid.new(n=20, drop_last=o)) for o in (False,True)])
    return res

@on_1_and_2
def test_a_share_is_predicted_whole(Ws, found): same(of_a_share, found=found, W=Ws, tol=1e-6)

@pytest.mark.slow
@on_1_and_2
def test_learners_on_every_kind_of_loader(Ws, found): same(of_loaders, found=found, W=Ws, tol=1e-6, lines='4')

def bag(): return Of(lambda m, x: m.out(m.emb(x).mean(1)), emb=nn.Embedding(20, 6), out=nn.Linear(6, 3)) # padding matters to it

def sentences(n, seed):
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(3, 15, (n,), generator=g).tolist()
    return [(torch.randint(2, 20, (l,), generator=g), torch.tensor(i%3)) for i,l in enumerate(lens)]

def length(o): return len(o[0])

def sorted_texts(W, rank):
    torch.set_default_dtype(F64)
    dls = DataLoaders.from_dsets(sentences(60, 0), sentences(29, 1), bs=per_rank(12, W), dl_type=SortedDL, sort_func=length,
                                 before_batch=Pad_Input(), num_workers=0)
    dls.loaders[1] = dls.valid.new(bs=12)
    torch.manual_seed(7)
    learn = Learner(dls, bag(), CrossEntropy(), opt_func=SGD, lr=.1, metrics=[accuracy])
    with ctx(learn, W):
        learn.fit(2)
        inputs = learn.get_preds(with_input=True)[0]
        padded,inputs = [o.tolist() for o in inputs],[o[o!=1].tolist() for o in inputs]
        return history(learn),learn.get_preds(with_loss=True),inputs,padded

class Recurrent(nn.Module):
    "Carries its state from batch to batch"
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.out,self.h = nn.Embedding(20, 5),nn.GRU(5, 6, batch_first=True),nn.Linear(6, 20),None
    def reset(self): self.h = None
    def forward(self, x):
        y,h = self.rnn(self.emb(x), self.h)
        self.h = h.detach()
        return self.out(y)

class SeqCrossEntropy(CrossEntropy):
    def forward(self, out, y): return super().forward(out.flatten(0, 1), y.flatten())
def seq_accuracy(pred, targ): return (pred.argmax(-1)==targ).double().mean()

def language_model(W, rank):
    torch.set_default_dtype(F64)
    texts = [o for o,_ in sentences(60, 0)],[o for o,_ in sentences(40, 1)]
    sizes = per_rank(12, W),12
    dls = DataLoaders(*[LMDataLoader(t, lens=[len(o) for o in t], bs=sizes[i], seq_len=5, shuffle=i==0) for i,t in enumerate(texts)])
    torch.manual_seed(7)
    learn = Learner(dls, Recurrent(), SeqCrossEntropy(), opt_func=SGD, lr=.1, metrics=[seq_accuracy,Perplexity()], cbs=ModelResetter)
    with ctx(learn, W):
        learn.fit(2)
        preds,targs = learn.get_preds(act=lambda o: o) # their last ones are shorter, so that they are a list
        return history(learn),[list(o) for o in (preds,targs)]

def table(n, seed):
    g = np.random.RandomState(seed)
    df = pd.DataFrame(dict(offset=g.randn(n), dealer=g.randn(n), source=g.choice(list('xyz'), n))) # attributes of our loaders
    df['y'] = np.where(df.offset+df.dealer>0, 'yes', 'no')
    df.loc[::7,'dealer'] = np.nan
    return df

def tabular(W, rank):
    random.seed(0), np.random.seed(0), torch.manual_seed(7), torch.set_default_dtype(torch.float32)
    to = TabularPandas(table(86, 1), [Categorify,FillMissing,Normalize], cat_names=['source'], cont_names=['offset','dealer'], y_names='y',
                       y_block=CategoryBlock(), splits=(list(range(60)),list(range(60, 86))))
    dls = to.dataloaders(bs=per_rank(12, W), device='cpu')
    learn = tabular_learner(dls, layers=[8], opt_func=SGD, lr=.01, metrics=accuracy)
    with ctx(learn, W):
        learn.fit(2)
        res = history(learn)
        test = learn.get_preds(dl=learn.dls.test_dl(table(13, 2)))[0]
        row = learn.predict(table(13, 2).iloc[0])
        interp = ClassificationInterpretation.from_learner(learn)
        learn.show_results(max_n=2)
        return res,learn.get_preds(),test,row[1:],interp.confusion_matrix().tolist(),interp.top_losses(3)[0]

def of_sequences(W, rank, path): return dict(sorted=sorted_texts(W, rank), lm=language_model(W, rank), tabular=tabular(W, rank))

@pytest.mark.slow
@on_1_and_2
def test_texts_and_tables(Ws, found):
    want = same(of_sequences, found=found, W=Ws, lines=dict(
        sorted=('4 `SortedDL`: texts, their padding', 1e-6), lm=('4 `LMDataLoader`: streams go on, also through `ModelResetter`', 1e-6),
        tabular=('7 `tabular_learner`: `TabDataLoader`, `TabularPandas`, `predict`, `test_dl`, `show_results`, '
                 '`ClassificationInterpretation` (float32)', 1e-5)))
    assert want['sorted'][2]==[o[0].tolist() for o in sentences(29, 1)]

found = asking(of_a_share, of_loaders, of_sequences)

class Skipping(list):
    def __getitem__(self, i):
        if i==7: raise SkipItemException
        return super().__getitem__(i)

def test_an_item_that_is_skipped_is_an_error_on_several_ranks():
    dl = TfmdDL(Skipping(range(11)), bs=2, num_workers=0)
    read = lambda r, W: torch.cat([*ShareDL.from_dl(dl, r, W)]).tolist()
    assert read(0, 1)==torch.cat([*dl]).tolist() and read(0, 2)==[0,2,4,6,8,10]
    with pytest.raises(ValueError, match=r'item 7 is skipped .* leave it out of the data set'): read(1, 2)
    dl = SortedDL(Skipping([torch.tensor([i]) for i in range(11)]), sort_func=lambda o: 1, bs=2, num_workers=0)
    with pytest.raises(ValueError, match='item 7 is skipped'): read(1, 2)
