"A script, a module or a function on several processes: `python -m learnerdist.launch`, `run`, and `ranks` that stay"
from learnerdist.launch.cli import main
from learnerdist.launch.processes import ranks,run

__all__ = ['main','run','ranks']
