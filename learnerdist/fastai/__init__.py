"fastai's own Learner, distributed: `from learnerdist.fastai import *` in place of `from fastai.distributed import *`"
from learnerdist.checkpoint.checkpoint import Checkpoint,Preempted,preempted_status
from learnerdist.core.collectives import distrib_barrier
from learnerdist.core.rank0 import rank0_first
from learnerdist.core.env import num_distrib,rank_distrib,teardown_distrib
from learnerdist.distributed.data_parallel import ParallelTrainer
from learnerdist.fastai.checkpoint import load_learner
from learnerdist.fastai.learner import setup_distrib
from learnerdist.fastai.loaders import DistributedDL
from learnerdist.fastai.trainer import DistributedTrainer
from learnerdist.learner.techniques import EMA

__all__ = ['ParallelTrainer','DistributedTrainer','DistributedDL','setup_distrib','teardown_distrib','rank0_first',
           'rank_distrib','num_distrib','distrib_barrier','Checkpoint','EMA','Preempted','preempted_status',
           'load_learner']

import fastai.learner as _learner
import learnerdist.core.docstrings as _docstrings
if _docstrings.is_interactive(): # so that `help` shows what parameters mean
    _ours = [o for o in vars(_learner.Learner).values() if getattr(o, '__module__', '').startswith('learnerdist.')]
    from learnerdist.distributed.replica import ddp_docments as _ddp
    _docstrings.add_docments([*(globals()[o] for o in __all__),*_ours], **_ddp())
