"""fastai's vision_learner on pictures of digits, on as many processes as the launcher starts:

    python -m learnerdist.launch --nproc 2 examples/fastai_vision.py

The same global batches on one process: `python examples/fastai_vision.py --bs 64`. The numbers differ a little, as dropout draws
on each process by itself."""
# ruff: noqa: F403,F405
import argparse,tempfile

from fastai.vision.all import *
from learnerdist.fastai import *
from sklearn.datasets import load_digits
from torchvision.models import resnet18

def draw(folder, n):
    "The first `n` handwritten digits that come with scikit-learn, as PNG files; returns the folder"
    digits = load_digits()
    for i,(img,label) in enumerate(zip(digits.images[:n], digits.target)):
        file = folder/str(label)/f'{i:04}.png'
        if file.exists(): continue
        file.parent.mkdir(parents=True, exist_ok=True)
        PILImage.create((img*15.9).astype('uint8')).resize((32,32)).save(file)
    return folder

def get_dls(path, bs):
    return ImageDataLoaders.from_folder(path, valid_pct=.25, seed=42, bs=bs, batch_tfms=Normalize.from_stats([.3], [.4]), num_workers=0)

def parse_args():
    p = argparse.ArgumentParser(description="Train a ResNet18 on handwritten digits")
    p.add_argument('--epochs', type=int, default=4)
    p.add_argument('--bs', type=int, default=32, help='batch size of each process')
    p.add_argument('--lr', type=float, default=3e-3, help='highest rate of the cycle')
    p.add_argument('--pictures', type=int, default=600, help='number of pictures')
    p.add_argument('--path', type=Path, help='folder for the pictures; None: a temporary one')
    return p.parse_args()

def main():
    args = parse_args()
    path = args.path or Path(tempfile.gettempdir())/f'learnerdist_digits_{args.pictures}'
    rank0_first(draw, path, args.pictures)
    set_seed(42)
    learn = vision_learner(get_dls(path, args.bs), resnet18, pretrained=False, normalize=False, metrics=[accuracy,F1Score(average='macro')])
    with learn.distrib_ctx(seed=42):
        learn.fit_one_cycle(args.epochs, args.lr)
        preds,targs = learn.get_preds()
    if rank_distrib()==0: print(f'accuracy {float(accuracy(preds, targs)):.4f} on {len(targs)} pictures')

if __name__=='__main__': main()
