"""fastai's tabular_learner on scikit-learn's wine data, on as many processes as the launcher starts:

    python -m learnerdist.launch --nproc 2 examples/fastai_tabular.py

The same run on one process, at the same global batch size: `python examples/fastai_tabular.py --bs 16`"""
# ruff: noqa: F403,F405
import argparse

from fastai.tabular.all import *
from learnerdist.fastai import *
from sklearn.datasets import load_wine

def get_dls(bs):
    "178 wines of three growers: 13 measurements of each, one of them made a category"
    df = load_wine(as_frame=True).frame
    df['colour'] = pd.qcut(df.pop('color_intensity'), 3, labels=['pale','medium','deep']).astype(object)
    names = [o for o in df.columns if o not in ('target','colour')]
    to = TabularPandas(df, [Categorify,Normalize], cat_names=['colour'], cont_names=names, y_names='target', y_block=CategoryBlock(),
                       splits=RandomSplitter(34/178, seed=42)(df))
    return to.dataloaders(bs=bs)

def parse_args():
    p = argparse.ArgumentParser(description='Tell wines apart')
    p.add_argument('--epochs', type=int, default=8)
    p.add_argument('--bs', type=int, default=8, help='batch size of each process')
    p.add_argument('--lr', type=float, default=1e-2, help='highest rate of the cycle')
    return p.parse_args()

def main():
    args = parse_args()
    set_seed(42)
    learn = tabular_learner(get_dls(args.bs), layers=[32], metrics=[accuracy,RocAuc()], cbs=EarlyStoppingCallback(patience=4))
    with learn.distrib_ctx(seed=42):
        learn.fit_one_cycle(args.epochs, args.lr)
        loss,acc,auc = learn.validate()
    if rank_distrib()==0: print(f'accuracy {acc:.4f}, area under the curve {auc:.4f}')

if __name__=='__main__': main()
