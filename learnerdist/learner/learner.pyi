# Made by tools/stubs.py from the modules: do not edit
from typing import Any
import torch
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from learnerdist.learner.callback import Callback
from learnerdist.learner.losses import loss_trace

__all__: Any

class TrainEvalCallback(Callback):
    """Set the model to training or evaluation mode; count `learn.train_iter` (batches) and `learn.pct_train` (0 to
    1) of this fit"""
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

_cancels: Any

def trainable_params(model) -> list:
    """The parameters of `model` with `requires_grad`, as one group: the default `splitter`"""

def get_model(model):
    """The user's model inside a `DataParallel` or `DistributedDataParallel` wrapper; a model without a wrapper is
    returned as it is"""

class StartAt(NamedTuple):
    """The point at which a fit begins. An earlier run has done what comes before it"""
    epoch: int = 0
    batches: int = 0
    trained: bool = False

def check_arguments(dls, model, metrics, **functions):
    """ValueError for what a learner cannot use"""

class LocalLoop:
    """What a learner asks of the batches of a loop. These are the answers of a process that trains alone"""
    repeated: Any
    model: Any
    more: Any
    more_parts: Any
    weighs: Any

    def parts(self, i, b):
        """The parts of batch `i` of a loop that this process computes, one after the other: batches of the learner"""

    def step_totals(self, n, is_last) -> tuple:
        """How many samples all who take part have in a training batch, of which this process has `n`; and whether it is
        the last batch of any of them"""

    def accumulate(self, is_last, n_acc):
        """Hear whether the optimizer's step comes after the present batch. n_acc: samples of a step"""

    def check_second(self):
        """ValueError where a batch can have no further pass by `Learner.wrapper`"""

    def note_items(self, items):
        """Hear the items of an accumulated step, whose gradients the callback scales itself"""

    def answer(self):
        """Before ranks wait for one another in a batch. Sync point with several ranks"""

    def defers(self, e, event) -> bool:
        """Whether the exception waits for the end of the batch. e: a Cancel exception that a callback has raised"""

class Runner:
    """What a learner asks while it runs. These are the answers of a process that trains alone; a context replaces it"""
    is_alone: Any
    loop: Any

    def loader(self, dl):
        """What is read of a loader: all of its data, if another learner's context has split it"""

    def aside(self):
        """Context for a loop within another"""

    def total(self, t):
        """The sum of a number over all who take part"""

    def anyone(self, wish) -> bool:
        """Whether anyone who takes part has this wish"""

    def least(self, n):
        """The smallest of the numbers of all who take part"""

    def add_up(self, parts: list):
        """The numbers of steps, from those of their parts"""

    def track(self, o):
        """Let the tensors by name in `o.weights` be the same for all who take part; and if a context has split the
        model, make them whole at its end"""

def check_fit(n_epoch, start_epoch, reset_opt):
    """ValueError for numbers of epochs that are none, and if `reset_opt` is neither true nor false, such as a text"""

def check_loss(loss, training=False):
    """ValueError if a loss function has returned no tensor, or in training several numbers"""

def check_targets(learn):
    """ValueError if a training batch has no targets, since nothing would be trained"""

def is_oom(e) -> bool:
    """Whether an exception says that memory has run out, on a GPU or on the host"""

def advise_on_memory(e, learn, n: int | None=None):
    """If the exception says that memory has run out, add the size of the batch and a remedy to it. e: an exception
    that has ended a fit; learn: ours or fastai's; n: the samples of the batch; None: of the learner's"""

def group_lrs(lr, n: int) -> list:
    """The learning rate of each parameter group. ValueError for a list of another length. lr: a number for all groups;
    a list, one for each; `slice(a,b)`: from a to b in equal ratios; `slice(b)`: b/10, and b for the last; n: number
    of parameter groups"""

fit_flags: Any

_hints: Any

_loop_state: Any

class Learner:
    """Data, model, loss and optimizer, with the training loop over them"""
    loss_func: Any
    splitter: Any
    train_bn: Any
    metrics: Any
    model_dir: Any
    path: Any
    cbs: Any
    logger: Any
    training: Any
    fitting: Any
    epoch: Any
    iter: Any
    n_epoch: Any
    start_at: Any
    xb: Any
    yb: Any
    opt: Any
    dl: Any
    n_iter: Any
    pred: Any
    loss_grad: Any
    loss: Any
    items: Any
    loss_trace: Any
    model: Any
    opt_func: Any
    lr: Any
    final_record: Any
    runner: Any
    recorder: Any
    progress: Any
    train_eval: Any
    distributed_trainer: Any
    timer: Any

    def __init__(self, dls, model: torch.nn.Module, loss_func=None, opt_func=..., lr=..., splitter=..., cbs=None, metrics=None, path=None, model_dir='models', *, train_bn=True):
        ...

    @property
    def dls(self):
        """The loaders. New ones can be assigned; in `distrib_ctx` they are sharded then"""

    @dls.setter
    def dls(self, dls):
        ...

    @property
    def device(self) -> torch.device:
        """The device for model and batches: that of `dls`, or this process's own"""

    @property
    def x(self):
        """The inputs of this rank's current batch; without the tuple around a single one"""

    @property
    def y(self):
        """The targets of this rank's current batch; without the tuple around a single one"""

    @property
    def wrapper(self):
        """What a callback calls for a further forward pass of a training batch (SAM): `model`, in a context in DDP or
        FSDP2. Gradients of a further pass count by the items of the ranks"""

    @property
    def repeated(self):
        """Whether nothing of the current batch is recorded: it repeats samples, since other ranks have more in this
        epoch, or a callback of this rank has cancelled it before its loss. A callback that counts samples skips it"""

    def add_cb(self, cb):
        """Add a callback (an instance or a class), and make it an attribute, as in `learn.recorder`. ValueError if that
        hides another attribute"""

    def remove_cb(self, cb):
        """Remove a callback, or every callback of a class"""

    def add_cbs(self, cbs):
        """Add one callback or several"""

    def remove_cbs(self, cbs):
        """Remove one callback or several"""

    @contextmanager
    def added_cbs(self, cbs):
        """Context in which the learner has these callbacks, too"""

    def __call__(self, event):
        """Call the callbacks that handle `event`, in their order"""

    def no_logging(self):
        """Context in which the learner prints no lines of its table"""

    def no_bar(self):
        """Context without a progress bar; the lines of the table still appear"""

    def fit(self, n_epoch: int, lr=None, *, cbs=None, reset_opt: bool=False, start_epoch: int=0, ddp=None, amp=None, resume=None, **flags):
        """Train for `n_epoch` epochs. A second fit goes on with the weights and the optimizer of the first

        n_epoch: Number of epochs, those before `start_epoch` included
        lr: Learning rate for this fit; None: the learner's
        cbs: Callbacks for this fit only
        reset_opt: Make a new optimizer, without the state of the old one
        start_epoch: Skip the epochs before this one
        ddp: True, or a dict of options of `distrib_ctx`: fit in this context
        amp: True, 'fp16' or 'bf16': mixed precision, see `MixedPrecision`
        resume: True: go on from the fit's `Checkpoint`; a folder: as `Checkpoint(folder, resume=True)`
        flags: Other options that modules register in `fit_flags`"""

    @contextmanager
    def flagged(self, flags: dict):
        """Context that applies `flags` to the learner. TypeError for an unknown flag. flags: from keywords of `fit` to
        their values; None or False: off"""

    def all_batches(self):
        """Run every batch of `self.dl`"""

    def one_batch(self, i: int, b):
        """Run one batch: prediction and loss; in training also the backward pass and the optimizer's step. i: index of
        the batch in this loop; b: the batch, as the loader gave it"""

    def validate(self, ds_idx: int=1, dl=None, cbs=None) -> list:
        """Loss and metrics of the present model over a whole data set

        ds_idx: Index of the loader in `dls`
        dl: Another loader instead
        cbs: Callbacks for this loop only
        returns: The loss, then the metrics; in `distrib_ctx` of all ranks together"""

    @contextmanager
    def aside(self):
        """Context for another loop over data, also within a fit: the state of the outer loop is restored afterwards"""

    def prepare(self, lr, reset_opt=False):
        """Move the model to its device, make an optimizer if there is none, and set the rates of its parameter groups

        reset_opt: as in `fit`"""

    def prepare_model(self):
        """Move the model to its device, and a loss that is a module, such as one with class weights. ValueError for a
        model on the meta device, which has no values"""

    def create_opt(self):
        """Make a new optimizer over the model's parameter groups. ValueError if no parameter is trainable"""

    def compile(self, regional: bool=False, **kw) -> Learner:
        """Run the model compiled by torch in fits, validation and predictions, also in `distrib_ctx`. A second call
        replaces the first

        self: noqa: A001
        regional: Each repeated block by itself, as in a sharded model; False: the whole model
        kw: Of `torch.compile`: backend, mode, dynamic, fullgraph, options"""

    def uncompile(self) -> Learner:
        """Undo `compile`"""

    def to_parallel(self, device_ids=None) -> Learner:
        """Use several GPUs in every fit from now on; a second call replaces the first

        device_ids: Indices of the GPUs to train on; None: every visible one
        returns: `self`"""

    def detach_parallel(self) -> Learner:
        """Undo `to_parallel`; without one it does nothing"""

    @contextmanager
    def parallel_ctx(self, device_ids=None):
        """Use several GPUs in the fits of the body; afterwards the learner is restored, also after an exception

        device_ids: Indices of the GPUs to train on; None: every visible one"""

    def to_distributed(self, sync_bn: bool=True, *, device: Any=..., split_batches: Any=..., seed: Any=..., check_every: Any=..., checks: Any=..., comm_hook: Any=..., shard: Any=..., sample_seeds: Any=..., timeout_s: Any=..., global_bs: Any=..., max_bs: Any=..., broadcast_buffers: Any=..., bucket_cap_mb: Any=..., find_unused_parameters: Any=..., gradient_as_bucket_view: Any=..., static_graph: Any=..., mixed_precision: Any=..., **kwargs) -> Learner:
        """Train, evaluate and predict on all ranks from now on, until `detach_distributed`

        sync_bn: BatchNorm over the global batch
        device: This process's accelerator, an index or 'cuda:1'; None: by local rank, or the CPU. `cuda_id`: its old name
        split_batches: The training loader's batch size is the global one, as global_bs says it
        seed: Of shuffling; None: drawn from torch's generator on rank 0
        check_every: Compare the ranks' weights every so many steps of an epoch, and raise where they differ; None: at its end
        checks: What a finding of the self-check or the comparison becomes: 'warn', 'error', or False: none
        comm_hook: How gradients travel: a name in `comm_hooks`, or as in `register_comm_hook`; None: 'shm' where it can be
        shard: True, or a dict of `ShardOptions`: a part of the model on each rank, by FSDP2
        sample_seeds: Seed what is drawn for a sample by (seed, epoch, index), so that it is the same at any number of ranks
        timeout_s: Seconds after which a collective gives up on an absent rank; None: as in the group around this, or 1800
        global_bs: Samples in a step of all ranks together, whatever their number; None: the loader's batch size on each rank
        max_bs: Samples of a part of a step, at most. With `global_bs` a power of two times as many, the run has the same bits on 1, 2, 4, … ranks. 'auto': as many as fit in memory
        kwargs: and DDP's: bucket_cap_mb, find_unused_parameters, gradient_as_bucket_view, static_graph, broadcast_buffers, mixed_precision"""

    def detach_distributed(self) -> Learner:
        """Undo `to_distributed`: model, loaders, BatchNorm classes and callbacks are what they were, and the group is
        closed if we opened it"""

    @contextmanager
    def distrib_ctx(self, sync_bn: bool=True, *, device: Any=..., split_batches: Any=..., seed: Any=..., check_every: Any=..., checks: Any=..., comm_hook: Any=..., shard: Any=..., sample_seeds: Any=..., timeout_s: Any=..., global_bs: Any=..., max_bs: Any=..., broadcast_buffers: Any=..., bucket_cap_mb: Any=..., find_unused_parameters: Any=..., gradient_as_bucket_view: Any=..., static_graph: Any=..., mixed_precision: Any=..., **kwargs):
        """Train, evaluate and predict on all ranks within the body; afterwards the learner is restored, also after an
        exception

        sync_bn: BatchNorm over the global batch
        device: This process's accelerator, an index or 'cuda:1'; None: by local rank, or the CPU. `cuda_id`: its old name
        split_batches: The training loader's batch size is the global one, as global_bs says it
        seed: Of shuffling; None: drawn from torch's generator on rank 0
        check_every: Compare the ranks' weights every so many steps of an epoch, and raise where they differ; None: at its end
        checks: What a finding of the self-check or the comparison becomes: 'warn', 'error', or False: none
        comm_hook: How gradients travel: a name in `comm_hooks`, or as in `register_comm_hook`; None: 'shm' where it can be
        shard: True, or a dict of `ShardOptions`: a part of the model on each rank, by FSDP2
        sample_seeds: Seed what is drawn for a sample by (seed, epoch, index), so that it is the same at any number of ranks
        timeout_s: Seconds after which a collective gives up on an absent rank; None: as in the group around this, or 1800
        global_bs: Samples in a step of all ranks together, whatever their number; None: the loader's batch size on each rank
        max_bs: Samples of a part of a step, at most. With `global_bs` a power of two times as many, the run has the same bits on 1, 2, 4, … ranks. 'auto': as many as fit in memory
        kwargs: and DDP's: bucket_cap_mb, find_unused_parameters, gradient_as_bucket_view, static_graph, broadcast_buffers, mixed_precision"""

    def lr_find(self, start_lr=1e-07, end_lr=10, num_it: int=100, stop_div: bool=True, show_plot: bool=True) -> Rates:
        """Train with a rising rate, and suggest one. Afterwards the learner is as before. ValueError if too few losses
        are finite

        end_lr: Rates of the first and the last step; for parameter groups also a `slice` or a list
        num_it: Number of steps, at least 6
        stop_div: Stop when the loss is four times the best one
        show_plot: Plot losses by rate, on rank 0, if matplotlib is installed
        returns: The rate that fastai's `valley` suggests; rates and losses"""

    def get_preds(self, ds_idx: int=1, dl=None, with_input: bool=False, *, with_loss: bool=False, act=None, reorder: bool=True, gather='all', cbs=None) -> tuple:
        """Predictions and targets of a whole data set; in `distrib_ctx` those of all ranks, on every rank. ValueError
        for another `gather`

        ds_idx: Index of the loader in `dls`
        dl: Another loader instead
        with_input: Also return the inputs, before the predictions
        with_loss: Also return the loss of each sample, after the targets
        act: A function to apply to the predictions; None: the loss function's `activation`, if it has one
        reorder: True: in the order of the data set; False: in the order of the loader
        gather: 'rank0': on other ranks all results are None
        cbs: Callbacks for this loop only
        returns: (predictions, targets) in the model's structure: CPU tensors, or lists of what does not fit one tensor"""

    def predict(self, item, *, act=None):
        """The prediction for one item; each rank computes it

        item: An input as in the data set, without target; a tuple for several inputs
        act: As in `get_preds`"""

    def save(self, file, with_opt: bool | None=None) -> Path:
        """Write the model's weights atomically, with a checksum. Only rank 0 writes, and no rank waits; if the model is
        sharded, all must call

        file: File name within `model_dir`, an absolute path or an address: `.pth` is added, unless it ends in `.safetensors`
        with_opt: Also save the optimizer's state; None: yes, except in safetensors, which cannot hold it
        returns: The file"""

    def load(self, file, *, with_opt: bool=True, strict: bool=True):
        """Load what `save` or a `Checkpoint` wrote. Reads only tensors and plain data, so a file cannot run code.
        ValueError for a damaged file

        file: As in `save`; or the folder of a `Checkpoint` or of one of its checkpoints, within the learner's path
        with_opt: Also load the optimizer's state, if the file has it; a checkpoint gives weights only
        strict: The keys of the file and of the model must be the same"""

    def fit_one_cycle(self, n_epoch: int, lr_max=None, div=25.0, div_final=100000.0, pct_start=0.25, *, cbs=None, reset_opt=False, start_epoch=0, ddp: Any=..., amp: Any=..., resume: Any=..., **kwargs):
        """Fit with one cycle of rates, up and then down, and momentum the other way round (Smith, 2018, arXiv:1803.09820)

        n_epoch: As in `fit`
        lr_max: Highest rate; a `slice` or a list for parameter groups; None: the learner's `lr`
        div: The first rate is `lr_max/div`
        div_final: The last rate is `lr_max/div_final`
        pct_start: Fraction of the steps in which the rate rises
        cbs: Callbacks for this fit only
        reset_opt: As in `fit`
        start_epoch: Skip the epochs before this one: the rate is what it would be then
        ddp: True, or a dict of options of `distrib_ctx`: fit in this context
        amp: True, 'fp16' or 'bf16': mixed precision, see `MixedPrecision`
        resume: True: go on from the fit's `Checkpoint`; a folder: as `Checkpoint(folder, resume=True)`"""

    def freeze_to(self, n: int):
        """Freeze the parameter groups before `n`, train the others, and forget the state of the optimizer. ValueError if
        that leaves no group

        n: Groups from `n` on are trained, and those before it frozen; a negative number counts from the end"""

    def freeze(self):
        """Train the last parameter group only. ValueError if there is one group"""

    def unfreeze(self):
        """Train all parameter groups"""

    def fine_tune(self, epochs: int, base_lr: float=0.002, freeze_epochs: int=1, lr_mult: float=100, pct_start: float=0.3, div: float=5.0, **kwargs):
        """Train the last parameter group for `freeze_epochs`, then all of them for `epochs`, each time by `fit_one_cycle`

        epochs: With all groups
        base_lr: Highest rate of the head while the rest is frozen; then half of it
        freeze_epochs: Before that, with the last group only
        lr_mult: The lowest group's rate is the head's, divided by this
        div: As in `fit_one_cycle`, for the fit of all groups
        kwargs: Of `fit_one_cycle`, for both fits"""

    def to_fp32(self) -> Learner:
        """Train and evaluate in the model's own precision, without mixed precision"""

    def to_fp16(self, **kw) -> Learner:
        """Train and evaluate in mixed precision with float16. kw: options of `torch.amp.GradScaler`, such as `init_scale`"""

    def to_bf16(self) -> Learner:
        """Train and evaluate in mixed precision with bfloat16"""
