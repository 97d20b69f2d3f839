"The Learner: the training loop, its events and callbacks. A `Learner` with all its methods"
from learnerdist.learner.learner import Learner
from learnerdist.learner import accumulation,predictions,progress,recorder,saving,schedule,techniques # noqa: F401

__all__ = ['Learner']
