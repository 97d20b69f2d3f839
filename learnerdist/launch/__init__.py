"A script, a module or a function on several processes: `python -m learnerdist.launch` and `run`"
from learnerdist.launch.cli import main,run

__all__ = ['main','run']
