"The Learner: the training loop, its events and callbacks. A `Learner` with all its methods"
from learnerdist.learner.learner import Learner
from learnerdist.learner import (accumulation,fine_tuning,finder,predictions,progress,recorder,saving,schedule, # noqa: F401
                                 techniques)

__all__ = ['Learner']
