"""Write docs/names.md: what `from learnerdist.all import *` hands out, with a line each; `tests/test_house.py` compares"""
import re
from importlib import import_module
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
    seen = set()
    for title,body in re.findall(r'^# (.+)\n((?:(?!# ).*\n)*)', source, re.M):
        found = dict.fromkeys(o for m in re.findall(r'^from (\S+) import', body, re.M) for o in import_module(m).__all__)
        names = [o for o in found if o not in seen]
        seen |= found.keys()
        if names: lines += ['',f'## {title}','| | |','|---|---|',*[f'| `{o}` | {first_sentence(o)} |' for o in names]]
    return '\n'.join(lines)+'\n'

if __name__=='__main__': (root/'docs/names.md').write_text(table())
