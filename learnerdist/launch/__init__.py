"A script, a module or a function on several processes: `python -m learnerdist.launch`, `run`, and `ranks` that stay"
from learnerdist.launch.cli import main,run
from learnerdist.launch.pool import ranks

__all__ = ['main','run','ranks']
