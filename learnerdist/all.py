"""Everything for training scripts: `from learnerdist.all import *`. What stands here is public; all else is reached
through its module"""
# Processes: who am I, what ranks say to one another
from learnerdist.core.env import (default_device, group_rank, group_size, is_rank0, local_rank, num_distrib,
                                  process_group, rank_distrib,
                                  setup_distrib, teardown_distrib)
from learnerdist.core.rank0 import RankError,rank0_first
from learnerdist.core.saves import await_save,save_once
from learnerdist.core.deferred import deferred
from learnerdist.core.collectives import all_mean,all_sum,broadcast_object,distrib_barrier,gather_objects
from learnerdist.core.random import set_seed
# Data
from learnerdist.data.loaders import DataLoaders, TfmdDL, to_device
from learnerdist.data.distributed_dl import DistributedDL
# The Learner and its callbacks
from learnerdist.learner.callback import (Callback, CancelBackwardException, CancelBatchException, CancelEpochException,
                                          CancelFitException, CancelStepException, CancelTrainException,
                                          CancelValidException)
from learnerdist.learner.learner import Learner, TrainEvalCallback, get_model, trainable_params
from learnerdist.learner.metrics import (AccumMetric,AvgLoss,AvgMetric,Metric,TorchMetric,accuracy,error_rate,
                                         mk_metric,skm_metric,
                                         top_k_accuracy)
from learnerdist.learner.recorder import Recorder
from learnerdist.learner.progress import ProgressCallback
from learnerdist.learner.loggers import CSVLogger, LogWriter, TensorBoardLogger
from learnerdist.learner.accumulation import GradientAccumulation,steps_per_epoch
from learnerdist.learner.techniques import GradientClip,Lookahead,MixedPrecision
from learnerdist.learner.schedule import (EarlyStoppingCallback, ReduceLROnPlateauCallback, SaveModelCallback,
                                          Scheduler,
                                          TerminateOnNaNCallback, TrackerCallback, lr_scale, warm_up)
from learnerdist.learner.exporting import load_learner
# Several processes
from learnerdist.distributed.batchnorm import sync_batchnorm
from learnerdist.distributed.data_parallel import ParallelTrainer
from learnerdist.distributed.timer import Timer
from learnerdist.distributed.compiling import Compiled
from learnerdist.distributed.profiling import FlopCount,Profile
from learnerdist.distributed.loss_weights import gather_with_grad
from learnerdist.distributed.replica import average_grads
from learnerdist.distributed.trainer import DistributedTrainer
from learnerdist.distributed.memory import find_batch_size
# Interruption, and going on
from learnerdist.checkpoint.preemption import Preempted, preempted_status
from learnerdist.checkpoint.checkpoint import Checkpoint

__all__ = [
    'default_device', 'group_rank', 'group_size', 'is_rank0', 'local_rank', 'num_distrib', 'process_group',
    'rank_distrib',
    'setup_distrib', 'teardown_distrib',
    'RankError', 'all_mean', 'all_sum', 'await_save', 'broadcast_object', 'distrib_barrier', 'gather_objects',
    'rank0_first', 'save_once',
    'set_seed', 'deferred', 'DataLoaders', 'TfmdDL', 'DistributedDL', 'to_device',
    'Callback', 'CancelBackwardException', 'CancelBatchException', 'CancelEpochException', 'CancelFitException',
    'CancelStepException',
    'CancelTrainException', 'CancelValidException', 'Learner', 'TrainEvalCallback', 'get_model', 'trainable_params',
    'AccumMetric', 'AvgLoss', 'AvgMetric', 'Metric', 'Recorder', 'TorchMetric', 'accuracy', 'error_rate', 'mk_metric',
    'skm_metric',
    'top_k_accuracy', 'ProgressCallback', 'CSVLogger', 'LogWriter', 'TensorBoardLogger',
    'GradientAccumulation', 'GradientClip', 'Lookahead', 'MixedPrecision', 'steps_per_epoch',
    'EarlyStoppingCallback', 'ReduceLROnPlateauCallback', 'SaveModelCallback', 'Scheduler', 'TerminateOnNaNCallback',
    'TrackerCallback',
    'lr_scale', 'warm_up', 'load_learner',
    'sync_batchnorm', 'gather_with_grad', 'average_grads', 'ParallelTrainer', 'Timer', 'Compiled', 'FlopCount',
    'Profile',
    'DistributedTrainer', 'find_batch_size',
    'Preempted', 'preempted_status', 'Checkpoint']

import learnerdist.checkpoint.restoring as _restoring # noqa: F401 - fits that go on from where they were saved
import learnerdist.core.docstrings as _docstrings
if _docstrings.is_interactive(): _docstrings.add_docments([globals()[o] for o in __all__]) # so that `help` shows them
