# Made by tools/stubs.py from the modules: do not edit
from typing import Any
import torch
from typing import NamedTuple
from learnerdist.learner.callback import Callback
from learnerdist.learner.losses import loss_trace

__all__: Any

class TrainEvalCallback(Callback):
    """Set the model to training or evaluation mode; count `learn.train_iter` (batches) and `learn.pct_train` (0 to 1) of this fit"""
    order: Any
    run_valid: Any

    def before_fit(self):
        ...

    def before_train(self):
        ...

    def before_validate(self):
        ...

    def after_batch(self):
        ...

defaults: Any

def trainable_params(model) -> list:
    """The parameters of `model` with `requires_grad`, as one group: the default `splitter`"""

def get_model(model):
    """The user's model inside a `DataParallel` or `DistributedDataParallel` wrapper; a model without a wrapper is returned as it is"""

class StartAt(NamedTuple):
    """The point at which a fit begins. An earlier run has done what comes before it"""
    epoch: int = 0
    batches: int = 0
    trained: bool = False

class Learner:
    """Data, model, loss and optimizer, with the training loop over them"""
    train_bn: Any
    path: Any
    model: Any
    loss_func: Any
    opt_func: Any
    lr: Any
    splitter: Any
    metrics: Any
    model_dir: Any
    opt: Any
    training: Any
    fitting: Any
    logger: Any
    cbs: Any
    epoch: Any
    n_epoch: Any
    iter: Any
    n_iter: Any
    dl: Any
    xb: Any
    yb: Any
    pred: Any
    loss_grad: Any
    loss: Any
    start_at: Any
    items: Any
    global_items: Any
    wrapper: Any
    repeated: Any
    loss_trace: Any

    def __init__(self, dls, model: torch.nn.Module, loss_func=None, opt_func=..., lr=..., splitter=..., cbs=None, metrics=None, path=None, model_dir='models', train_bn=True):
        ...

    @property
    def dls(self):
        """The loaders. New ones can be assigned; in `distrib_ctx` they are sharded then"""

    @dls.setter
    def dls(self, dls):
        ...

    def __call__(self, event):
        ...

fit_flags: Any

def is_oom(e) -> bool:
    """Whether an exception says that memory has run out, on a GPU or on the host"""

def advise_on_memory(e, learn):
    """If the exception says that memory has run out, add the size of the batch and a remedy to it"""

_loop_state: Any

def group_lrs(lr, n: int) -> list:
    """The learning rate of each parameter group. ValueError for a list of another length"""
