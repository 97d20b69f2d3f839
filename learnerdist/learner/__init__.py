"The Learner: the training loop, its events and callbacks. A `Learner` with all its methods"
from learnerdist.learner.learner import Learner
from learnerdist.learner import (accumulation,exporting,fine_tuning,finder,predictions,progress,recorder, # noqa: F401
                                 saving,schedule,showing,techniques,tta)

__all__ = ['Learner']
