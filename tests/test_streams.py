"Streams and loaders of other packages, where they are installed: each sample once over all ranks; a resumed fit trains on the rest"
import io,json,tarfile
from importlib.util import find_spec
import pytest, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate, get_worker_info
from harness import Failed, caught
from learnerdist.all import Callback, Checkpoint, DataLoaders, Learner, num_distrib
from learnerdist.core.env import shared_store
from learnerdist.testing import run_ranks
from test_position import Numbers

reads = []

def stacked(items): return (torch.stack([o['x'] for o in items]),)*2
def numbers(shards):
    for s in shards:
        for i in range(12):
            reads.append(s)
            yield {'x': [float(12*s+i)]}

def hugging_face(folder, shuffle=False):
    import datasets
    ds = datasets.IterableDataset.from_generator(numbers, gen_kwargs={'shards': [0,1,2]})
    ds = (ds.shuffle(seed=1, buffer_size=4) if shuffle else ds).with_format('torch')
    return DataLoader(ds, 2, collate_fn=stacked)

class Rows(Dataset):
    def __len__(self): return 37
    def __getitem__(self, i):
        reads.append(i)
        return (torch.tensor([float(i)]),)*2

def stateful(folder):
    from torchdata.stateful_dataloader import StatefulDataLoader
    return StatefulDataLoader(Rows(), 2, shuffle=True)

def stateful_stream(folder):
    from torchdata.stateful_dataloader import StatefulDataLoader
    return StatefulDataLoader(Numbers(37), 2)

class Split(Numbers):
    "Each worker reads numbers of its own"
    def __iter__(self):
        info = get_worker_info()
        return (o for o in super().__iter__() if int(o[0])%info.num_workers==info.id)

def stateful_workers(folder):
    from torchdata.stateful_dataloader import StatefulDataLoader
    return StatefulDataLoader(Split(37), 2, num_workers=2)

def nodes(folder):
    from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper
    batches = Batcher(SamplerWrapper(RandomSampler(range(37))), 2, drop_last=False)
    return Loader(Mapper(batches, lambda idxs: default_collate([Rows()[i] for i in idxs])))

def write_shards(folder):
    for s in range(3):
        with tarfile.open(folder/f'{s}.tar', 'w') as tar:
            for i in range(7*s, 7*s+7):
                b,info = json.dumps([float(i)]).encode(),tarfile.TarInfo(f'{i:04}.json')
                info.size = len(b)
                tar.addfile(info, io.BytesIO(b))

def webdataset(folder):
    import webdataset as wds
    ds = wds.WebDataset([str(folder/f'{s}.tar') for s in range(3)], shardshuffle=False, nodesplitter=lambda urls: urls)
    return DataLoader(ds.decode().map(lambda o: {'x': torch.tensor(o['json'])}), 2, collate_fn=stacked)

# Needs, loader, samples, and whether what was trained on is left unread
kinds = dict(hugging_face=('datasets', hugging_face, 36, True), shuffled=('datasets', lambda f: hugging_face(f, True), 36, False),
             stateful=('torchdata', stateful, 37, True), stateful_stream=('torchdata', stateful_stream, 37, None),
             stateful_workers=('torchdata', stateful_workers, 37, None), nodes=('torchdata', nodes, 37, None),
             webdataset=('webdataset', webdataset, 21, None))

class Seen(Callback):
    "What is trained on, and counts; stops in the batch `stop`, of which there is no checkpoint"
    order = 950
    def __init__(self, stop): self.stop,self.seen,self.n = stop,[],0
    def after_batch(self):
        self.n += 1
        if self.n==self.stop: raise InterruptedError
        if not self.learn.repeated: self.seen += [(self.epoch,int(o)) for o in self.xb[0]]

def fit(folder, kind, stop=None, saves=True):
    torch.manual_seed(5)
    seen = Seen(stop)
    dls = DataLoaders(kinds[kind][1](folder))
    learn = Learner(dls, nn.Linear(1, 1), nn.functional.mse_loss, torch.optim.SGD, lr=1e-4, path=folder/kind)
    learn.logger = lambda line: None
    with learn.distrib_ctx(seed=3, checks=False): # the self-check reads samples of its own
        try: learn.fit(2, cbs=[seen,*[Checkpoint('c', 4)]*saves], resume=saves)
        except InterruptedError: learn.dls.train.dl._iterator = None # torchdata's loader keeps it, in a cycle: its workers take 10 s to end
    return seen.seen

def resumed(folder, kind):
    whole,parts = fit(folder, kind, saves=False),fit(folder, kind, stop=9)
    reads.clear()
    parts += fit(folder, kind)
    return parts==whole,len(reads),[o for e,o in whole if e==0]

def rank_resumes(folder):
    shared_store() # of the launch: it stays
    there = [k for k,(needs,*_) in kinds.items() if find_spec(needs) and (k,num_distrib())!=('nodes',2)] # it cannot be split
    return {k: caught(resumed, folder, k) for k in there}

@pytest.fixture(scope='module', params=[1,2])
def ranks(request, tmp_path_factory):
    path = tmp_path_factory.mktemp('streams')
    write_shards(path)
    return run_ranks(rank_resumes, request.param, path, timeout_s=200)

@pytest.mark.parametrize('kind', kinds)
def test_each_sample_once_and_no_batch_again(kind, ranks):
    W,(needs,_,n,unread) = len(ranks),kinds[kind]
    if kind not in ranks[0]: pytest.skip(f'{kind} on {W}')
    found = [o[kind] for o in ranks]
    for o in found: assert not isinstance(o, Failed), o
    assert all(same for same,_,_ in found) and sorted(o for *_,os in found for o in os)==[*range(n)]
    if unread is None: return
    for _,n_reads,own in found:
        if needs=='torchdata': assert 0<=n_reads-(2*len(own)-8*2)<=(4 if W>1 else 0) # and up to a batch an epoch that fills a share
        else: assert n_reads==2*n-(8*2*W//12*12 if unread else 0) # a rank reads the stream whole; it passes over whole shards of 12
