# Made by tools/stubs.py from the modules: do not edit
from typing import Any
from torch.utils.data import DataLoader

__all__: Any

def apply(func, b, method: str='to'):
    """Apply `func` to each leaf of a nested batch. func: called with each leaf; b: a leaf, or nested tuples,
    namedtuples, lists and dicts; method: an object that has this method is a leaf, even if it is a container;
    returns: the results of `func`, in the same structure and types"""

def to_device(b, device, non_blocking=None):
    """Move the tensors of a batch, and its objects with a method `to`, to `device`"""

def to_cpu(b):
    """The batch with its tensors on the CPU, when they have arrived there"""

def to_detach(b):
    """The batch with its tensors detached from the autograd graph"""

def find_bs(b) -> int:
    """The number of samples in a batch: the length of its first tensor, or of a list with one entry per sample"""

_OPTIONS: Any

_BATCHES: Any

_REPLACES: Any

_WORKER_OPTIONS: Any

def check_options(kw, more=...):
    """Raise ValueError if a name in `kw` is neither a setting of `DataLoader` nor in `more`"""

def is_shuffled(sampler) -> bool:
    """Is this the sampler that `shuffle=True` makes, which yields each sample once?"""

_COLLATES: Any

def loader_settings(dl: DataLoader) -> dict:
    """The arguments of `DataLoader`, other than the data set, that make a loader like `dl`"""

def changed(dl: DataLoader, dataset=None, **kw) -> DataLoader:
    """A copy of `dl` with another data set or other settings. ValueError for an unknown setting, or a sampler made for
    another data set. dataset: another data set; None: that of `dl`; kw: settings of `DataLoader`; `bs` is
    `batch_size`; returns: a copy, of the class of `dl` and with its other attributes"""

def as_list(fs) -> list:
    """One function, several, or none as a list"""

def pipe(fs, o):
    """Apply the functions `fs` to `o`, one after the other"""

class Collate:
    """Item transforms, then the collate function of the loader; both run in the workers"""
    after_item: Any
    collate_fn: Any
    batched: Any

    def __init__(self, after_item, collate_fn, batched):
        ...

    def __call__(self, o):
        ...

class FrameRows:
    """A data frame as a data set of rows, read one batch at a time"""
    items: Any

    def __init__(self, items):
        ...

    def __len__(self):
        ...

    def __getitem__(self, i):
        ...

    def __getitems__(self, idxs):
        ...

def data_len(dataset):
    """The length of a data set or a loader; None if it has none"""

class LoaderWrapper:
    """Around a loader or a sampler: attributes that the wrapper does not have are those of what is inside"""
    inside: Any

    def __getattr__(self, k):
        ...

def read_loader(dl):
    """Iterator over any loader"""

def batch_shape(dl) -> tuple:
    """What a loader shows of its batches. dl: any loader; returns: (samples in a batch, None if not known; whether
    an incomplete last batch is dropped)"""

all_inputs: Any

def split_batch(b, n_inp=None):
    """Split a batch into the inputs of the model and the targets of the loss. b: a tuple or list, a dict, or a single
    tensor; n_inp: number of elements of a tuple that are inputs of the model; None: all but the last; `all_inputs`;
    returns: (inputs, targets), two tuples"""

def call_model(f, xb, model):
    """The prediction of `f` for a batch. Keys of a dict that `forward` does not name are dropped. f: the model, or a
    wrapper around it; xb: the inputs of a batch, each an argument. A single dict whose keys `forward` takes by name
    becomes keyword arguments; model: the model whose `forward` is looked at; of a wrapper, the one inside"""

def single(b):
    """The only element of a tuple or list; `b` itself if it has several, or none"""

def one_batch(dl):
    """The first batch of any loader, read in this process, without disturbing an epoch in progress. ValueError if
    the loader is empty"""

class TfmdDL(DataLoader):
    """A `DataLoader` with transforms of items (in the workers) and of batches (in the main process)"""
    after_item: Any
    after_batch: Any
    collate_fn: Any
    bs: Any
    n: Any

    def __init__(self, dataset, bs=64, shuffle=False, after_item=None, after_batch=None, drop_last=False, num_workers=0, **kw):
        ...

    def __iter__(self):
        ...

    def new(self, dataset=None, **kw):
        """A copy with another data set, other settings or other transforms. dataset: another data set; None: the same;
        kw: settings to change, by the names of `TfmdDL`"""

    def one_batch(self):
        """The first batch, read in this process, with its transforms. ValueError if there is none"""

class DataLoaders:
    """The loaders of a learner: the first for training, the second for validation"""
    loaders: Any
    path: Any
    device: Any
    n_inp: Any
    train: Any

    def __init__(self, train, valid=None, *more, path='.', device=None, n_inp: int | None | None=None):
        ...

    @classmethod
    def from_dsets(cls, train_ds, valid_ds=None, bs=64, shuffle=True, valid_bs=None, path='.', device=None, n_inp=None, **kw):
        """`TfmdDL`s for these data sets; validation reads its whole data set in order"""

    def __getitem__(self, i):
        ...

    def __len__(self):
        ...

    def __iter__(self):
        ...

    @property
    def valid(self):
        """The second loader; None if there is none"""

    def one_batch(self, i=0):
        """The first batch of loader `i`, moved to `device`. i: index of the loader"""

    def to(self, device):
        """Set the device for batches, and return these loaders"""

    def test_dl(self, test_items, with_labels=False, **kw):
        """The validation loader, for other data: for `get_preds(dl=…)`, `validate(dl=…)`"""

def loaders_of(dls) -> list:
    """Its loaders, without those that are None. dls: a `DataLoaders`, ours or fastai's, or an object with `train` and
    `valid`"""
