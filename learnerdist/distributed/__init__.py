"The same run on several processes: the names of `fastai.distributed`, for our Learner"
from learnerdist.core.collectives import distrib_barrier
from learnerdist.core.rank0 import rank0_first
from learnerdist.core.env import num_distrib,rank_distrib,setup_distrib,teardown_distrib
from learnerdist.data.distributed_dl import DistributedDL
from learnerdist.distributed.data_parallel import ParallelTrainer
from learnerdist.distributed.trainer import DistributedTrainer

__all__ = ['ParallelTrainer','DistributedTrainer','DistributedDL','setup_distrib','teardown_distrib','rank0_first',
           'rank_distrib',
           'num_distrib','distrib_barrier']
