"How many samples a batch holds, which decides how ranks' losses are weighed; the losses themselves are scenes of test_scenes.py"
from types import SimpleNamespace
import torch
from torch.utils.data import IterableDataset
from learnerdist.all import TfmdDL
from learnerdist.learner.losses import batch_rows

class Pictures(IterableDataset):
    "A stream of (picture of its own height, boxes)"
    def __iter__(self): return ((torch.zeros(3+i, 6), dict(boxes=torch.zeros(2, 4))) for i in range(3))

def test_samples_of_a_streams_last_batch_of_lists():
    "It has one picture with two boxes, which is not the batch size of two"
    dl = TfmdDL(Pictures(), 2, collate_fn=lambda items: tuple(map(list, zip(*items))))
    assert [batch_rows(SimpleNamespace(xb=b[:1], yb=b[1:], dl=dl, iter=i)) for i,b in enumerate(dl)]==[2,1]

def test_samples_of_pictures_and_masks():
    def rows(x, y, **kw): return batch_rows(SimpleNamespace(xb=(torch.zeros(x),), yb=(torch.zeros(y),), iter=0, **kw))
    said = dict(dl=SimpleNamespace(bs=4, n=8))
    assert rows((5,3,8,8), (5,8,8), **said)==5 and rows((5,3), (5,), **said)==5 and rows((5,), (5,), **said)==5
    assert rows((7,4), (7,4), **said)==4 # time first, as the loader says
    assert rows((5,3,8,8), (5,8,8), n_rows=9, **said)==9 # put together from the rows of all ranks
