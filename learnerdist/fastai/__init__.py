"fastai's own Learner, distributed: `from learnerdist.fastai import *` in place of `from fastai.distributed import *`"
from learnerdist.checkpoint.checkpoint import Checkpoint,Preempted
from learnerdist.core.collectives import all_mean,all_sum,broadcast_object,distrib_barrier,gather_objects
from learnerdist.core.rank0 import rank0_first
from learnerdist.core.env import num_distrib,process_group,rank_distrib,teardown_distrib
from learnerdist.distributed.batchnorm import sync_batchnorm
from learnerdist.distributed.data_parallel import ParallelTrainer
from learnerdist.distributed.loops import gather_with_grad
from learnerdist.distributed.profiling import Timer
from learnerdist.distributed.replica import average_grads
from learnerdist.fastai.checkpoint import load_learner
from learnerdist.fastai.learner import setup_distrib
from learnerdist.fastai.loaders import DistributedDL
from learnerdist.fastai.trainer import DistributedTrainer
from learnerdist.learner.techniques import EMA
from learnerdist.learner.trackers import MLflowLogger,TensorBoardLogger,WandbLogger

__all__ = ['ParallelTrainer','DistributedTrainer','DistributedDL','setup_distrib','teardown_distrib','rank0_first',
           'rank_distrib','num_distrib','distrib_barrier','all_sum','all_mean','gather_objects','broadcast_object',
           'gather_with_grad','average_grads','sync_batchnorm','Checkpoint','Preempted',
           'process_group','load_learner','EMA','Timer','WandbLogger','MLflowLogger','TensorBoardLogger']

import fastai.learner as _learner
import learnerdist.core.docstrings as _docstrings
if _docstrings.is_interactive(): # so that `help` shows what parameters mean
    _ours = [o for o in vars(_learner.Learner).values() if getattr(o, '__module__', '').startswith('learnerdist.')]
    _docstrings.add_docments([*map(globals().get, __all__),*_ours])
