"The Learner: the training loop, its events and callbacks. A `Learner` with all its methods"
from learnerdist.learner.learner import Learner
from learnerdist.learner import finder,loggers,predictions,recorder # noqa: F401
from learnerdist.learner import saving,schedule,techniques,trackers # noqa: F401

__all__ = ['Learner']
