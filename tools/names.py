"""Write docs/names.md: what `from learnerdist.all import *` hands out, with a line each; `tests/test_house.py` compares"""
import re
from pathlib import Path

from learnerdist import all as public

root = Path(__file__).parent.parent
constants = dict(preempted_status='75: the exit status of a run that has saved its state after a signal, and is to be started again')

def first_sentence(name):
    doc = constants.get(name) or getattr(public, name).__doc__
    return re.split(r'(?<=[^.]\.) (?=[A-Z`])', ' '.join(doc.split()))[0].rstrip('.').replace('|', '\\|')

def table()->str:
    "The page, in the groups of all.py"
    source = Path(public.__file__).read_text().partition('__all__')[0]
    intro = '`from learnerdist.all import *` hands these out, and no more; `help(name)` says the rest. Written by `tools/names.py`.'
    lines = ['# Public names',intro]
    for title,body in re.findall(r'^# (.+)\n((?:(?!# ).*\n)*)', source, re.M):
        names = re.findall(r'\w+', ' '.join(re.findall(r'import\s+(\([^)]*\)|.*)', body)))
        lines += ['',f'## {title}','| | |','|---|---|',*[f'| `{o}` | {first_sentence(o)} |' for o in names]]
    return '\n'.join(lines)+'\n'

if __name__=='__main__': (root/'docs/names.md').write_text(table())
