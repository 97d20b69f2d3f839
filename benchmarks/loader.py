"""Samples a second from a folder of JPEG files: our `TfmdDL`, torch's `DataLoader` and fastai's, and resuming in mid-epoch

    python benchmarks/loader.py"""
import tempfile,time
from functools import partial
from pathlib import Path

import torch
from common import bars,main,on_ranks,peer,quartiles,ratio_text,ratios,slowest,table,turns,verdict
from learnerdist.all import TfmdDL,group_rank,group_size,process_group
from learnerdist.distributed import DistributedDL
from torch.utils.data import DataLoader,Dataset

n_files,side,bs = 2000,64,64

def write_files(folder, n):
    "JPEG files of 64 to 256 pixels a side, in folders of ten classes: smooth pictures with noise, as large as photographs of their size"
    from torchvision.io import encode_jpeg
    g = torch.Generator().manual_seed(0)
    for i in range(n):
        h,w = torch.randint(64, 257, (2,), generator=g).tolist()
        smooth = torch.nn.functional.interpolate(torch.rand(1, 3, 5, 5, generator=g), (h,w), mode='bicubic')[0]
        image = (255*(smooth+.05*torch.randn(3, h, w, generator=g))).clamp(0, 255).byte()
        path = folder/str(i%10)/f'{i}.jpg'
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_jpeg(image, 85).numpy().tobytes())

def files(folder): return sorted(folder.rglob('*.jpg'))
def label(path): return int(path.parent.name)

# --- the ways: each returns a loader of (float32 images (bs,3,64,64) from 0 to 1, class indices (bs,)) ----------------------

class ImageFiles(Dataset):
    "Images (3,side,side), uint8, decoded and resized as tensors, and labels"
    def __init__(self, folder): self.files = files(folder)
    def __len__(self): return len(self.files)
    def __getitem__(self, i):
        from torchvision.io import ImageReadMode,decode_image,read_file
        image = decode_image(read_file(str(self.files[i])), ImageReadMode.RGB)
        if image.shape[1:]!=(side,side):
            image = torch.nn.functional.interpolate(image[None], (side,side), mode='bilinear', antialias=True)[0]
        return image,label(self.files[i])

def to_floats(b): return b[0].float().div_(255),b[1]

class PerItem(Dataset):
    "As one writes it by hand, with torchvision's transforms"
    def __init__(self, folder):
        from torchvision import transforms as T
        self.files,self.tfm = files(folder),T.Compose([T.Resize((side,side)), T.ToTensor()])
    def __len__(self): return len(self.files)
    def __getitem__(self, i):
        from PIL import Image
        return self.tfm(Image.open(self.files[i]).convert('RGB')),label(self.files[i])

def by_hand(folder, workers): return DataLoader(PerItem(folder), bs, num_workers=workers)
def ours(folder, workers): return TfmdDL(ImageFiles(folder), bs, after_batch=to_floats, num_workers=workers)

def fastais(folder, workers):
    from fastai.vision.all import CategoryBlock,DataBlock,ImageBlock,Resize,ResizeMethod
    block = DataBlock((ImageBlock,CategoryBlock), get_items=files, get_y=label, splitter=lambda os: (range(len(os)),[]),
                      item_tfms=Resize(side, method=ResizeMethod.Squish))
    return block.dataloaders(folder, bs=bs, num_workers=workers, device='cpu', shuffle=False).train.new(shuffle=False, drop_last=False)

ways = {'TfmdDL over ImageFiles': ours, "torch's DataLoader": by_hand, "fastai's": fastais}

def epoch(dl): return sum(len(b[1]) for b in dl)

def same_pictures(loaders):
    "All ways read the same pictures, to the rounding of their decoders and interpolations"
    first = {k: next(iter(dl)) for k,dl in loaders.items()}
    x,y = first['TfmdDL over ImageFiles']
    for k,b in first.items():
        far = (b[0].as_subclass(torch.Tensor)-x).abs().mean().item()
        if far>.01 or b[1].tolist()!=y.tolist(): raise SystemExit(f'{k} does not read the same: {far:.3f} from 255ths')

def measure_rank(folder, names, n_rounds):
    torch.set_num_threads(1)
    res = {}
    with process_group():
        for workers in (0,1,2):
            whole = {k: ways[k](Path(folder), workers) for k in names}
            if not workers: same_pictures(whole)
            if "fastai's" in names: import learnerdist.fastai # noqa: F401
            dls = {k: DistributedDL.from_dl(dl, group_rank(), group_size()) for k,dl in whole.items()}
            res[workers] = turns({k: partial(_read, dl) for k,dl in dls.items()}, n_rounds)
    return res

def _read(dl):
    epoch(dl)

# --- resuming ---------------------------------------------------------------------------------------------------------------

class Million(Dataset):
    "1e6 samples, of which each read takes some time"
    n = 10**6
    def __len__(self): return self.n
    def __getitems__(self, idxs): return [*torch.tensor(idxs)[:,None].float()]
    def __getitem__(self, i): return torch.tensor([float(i)])

def measure_resume(at=.9):
    "Seconds until the first batch of an epoch's last tenth: by reading all of it again, and by its place in the order"
    from learnerdist.checkpoint.position import PlacedLoader,Seeds,go_back,place_in_epoch
    res = {}
    for workers in (0,2):
        dl = DistributedDL(Million(), 0, 2, bs=100, shuffle=True, num_workers=workers)
        n = int(len(dl)*at)
        start = time.perf_counter()
        want = next(b for i,b in enumerate(dl) if i==n)
        read = time.perf_counter()-start
        start = time.perf_counter()
        placed = PlacedLoader(dl, Seeds(0, 0, 0))
        go_back(placed, place_in_epoch(placed, n), True, None)
        got = next(iter(placed))
        res[workers] = dict(read=read, skip=time.perf_counter()-start, same=torch.equal(got, want))
    return res

def measure(quick, W=2):
    names = [k for k in ways if k!="fastai's" or peer('fastai')]
    with tempfile.TemporaryDirectory() as d:
        write_files(Path(d), 200 if quick else n_files)
        ranks = {w: on_ranks(measure_rank, w, d, names, 2 if quick else 5) for w in (1,W)}
    times = {f'{w}, {k}': slowest([o[k] for o in os]) for w,os in ranks.items() for k in os[0]}
    return dict(n=200 if quick else n_files, times=times, resume=measure_resume())

def report(res):
    rows,lines = [],[]
    for case,times in res['times'].items():
        rs = ratios(times, 'TfmdDL over ImageFiles')
        for i,(k,v) in enumerate(times.items()):
            rows.append([case if not i else '', k, f"{res['n']/quartiles(v)[1]:.0f}", ratio_text(rs[k]) if k in rs else '1'])
        if "fastai's" in rs and case.endswith(' 0'):
            lines.append(verdict(f"{case} workers: ours over fastai's", 1/rs["fastai's"][1], .5))
    text = table(['ranks, workers of a rank', 'loader', 'samples a second, all ranks', 'seconds over ours: median (quartiles)'], rows)
    back = table(['workers', 's to read 90 % again', 's by the place in the order'],
                 [[k, f"{o['read']:.2f}", f"{o['skip']:.3f}"] for k,o in res['resume'].items()])
    return text+'\n\n'+'\n'.join(lines)+'\n\nThe first batch after 90 % of a shuffled epoch of 1e6 samples, one rank of 2:\n\n'+back

def plot(res, path):
    speeds = {k: {w: [res['n']/o for o in quartiles(v)[::-1]] for w,v in t.items()} for k,t in res['times'].items()}
    bars(path, speeds, 'samples a second', 'A folder of JPEG files')

if __name__=='__main__': main('loader', measure, report, plot)
