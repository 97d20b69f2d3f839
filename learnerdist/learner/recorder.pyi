# Made by tools/stubs.py from the modules: do not edit
from typing import Any
from torch import Tensor
from learnerdist.learner.callback import Callback

__all__: Any

class Recorder(Callback):
    """History of a fit over all ranks: `losses`, `lrs` per step; `values` (losses, metrics), `iters` (steps so far)
    per epoch"""
    avg_loss: Any
    mets: Any
    metric_names: Any
    measuring: Any
    reduced: Any
    lrs: Any
    iters: Any
    losses: Any
    values: Any
    steps: Any
    log: Any
    start: Any
    lr_now: Any
    n_samples: Any
    n_before: Any
    parts: Any
    order: Any
    fit_state: Any
    rank_state: Any
    totals_by_step: Any

    def __init__(self):
        ...

    def of_loop(self):
        ...

    def before_fit(self):
        ...

    def before_epoch(self):
        ...

    def before_train(self):
        ...

    def before_batch(self):
        ...

    def before_validate(self):
        ...

    def reset_metrics(self):
        """Make new metrics and start them for a validation loop"""

    @property
    def valid_mets(self) -> list:
        """The `Metric`s of a validation loop: the loss, if it is read, then the learner's"""

    @property
    def valid_values(self) -> list:
        """Loss and metrics of the last validation loop, over all ranks"""

    @property
    def totals(self) -> Tensor:
        """The totals of this epoch's steps so far, (steps,3), float64, CPU: loss × items, items, samples; of this rank,
        until their sum over ranks is assigned"""

    @totals.setter
    def totals(self, v):
        ...

    def after_batch(self):
        ...

    def all_steps(self) -> list:
        """What `totals` holds, as numbers and tensors"""

    def flush(self, totals: Tensor):
        """Enter `totals` into the history"""

    def after_train(self):
        ...

    def after_validate(self):
        ...

    def after_epoch(self):
        ...

    def after_cancel_fit(self):
        ...

    @property
    def times(self) -> list:
        """For each epoch's training loop: this rank's seconds for data, step, comm and in total, and the samples per second
    of all ranks. See `Timer`"""

    def plot_loss(self, skip_start: int=0, with_valid: bool=True, ax=None):
        """Plot each step's training loss and each epoch's validation loss; returns the axes"""

    def plot_lr(self, ax=None):
        """Plot each step's learning rate (of the last parameter group); returns the axes. ax: matplotlib's axes; None: new
    ones"""

def as_totals(steps: list) -> Tensor:
    """The numbers of steps as one tensor on the CPU. steps: from `all_steps`; returns: as `totals` gives them"""

def stacked(os) -> Tensor:
    """Numbers and tensors () as one float64 tensor on the CPU"""
