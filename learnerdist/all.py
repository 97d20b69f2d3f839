"""Everything for training scripts: `from learnerdist.all import *`. What a module lists as public; all else is reached
through the module"""
# ruff: noqa: F403
# Processes: who am I, what ranks say to one another
from learnerdist.core.env import *
from learnerdist.core.rank0 import *
from learnerdist.core.collectives import *
from learnerdist.core.random import *
# Data
from learnerdist.data.loaders import *
from learnerdist.data.distributed_dl import *
# The Learner and its callbacks
from learnerdist.learner.callback import *
from learnerdist.learner.learner import *
from learnerdist.learner.metrics import *
from learnerdist.learner.recorder import *
from learnerdist.learner.loggers import *
from learnerdist.learner.trackers import *
from learnerdist.learner.techniques import *
from learnerdist.learner.schedule import *
from learnerdist.learner.saving import *
# Several processes
from learnerdist.distributed.batchnorm import *
from learnerdist.distributed.data_parallel import *
from learnerdist.distributed.compiling import *
from learnerdist.distributed.profiling import *
from learnerdist.distributed.loops import *
from learnerdist.distributed.replica import *
from learnerdist.distributed.trainer import *
# Interruption, and going on
from learnerdist.checkpoint.checkpoint import *

__all__ = [o for o in globals() if not o.startswith('_')]

import learnerdist.core.docstrings as _docstrings
if _docstrings.is_interactive(): # so that `help` shows what parameters mean
    _docstrings.add_docments([*map(globals().get, __all__)])
