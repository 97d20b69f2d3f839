"The table in the docs of what fastai's side does on 1, 2 and 3 ranks"
import re
from fastai_lines import points, rows, tests

def is_there(test):
    file,name = test.split('::')
    return re.search(rf'^def {name}\(', (tests/file).read_text(), re.M) is not None

def test_every_line_is_shown_by_a_test_that_exists_on_1_2_and_3_ranks():
    assert {test for _,test in rows.values() if not is_there(test)}==set()
    lines = {line for line,_ in rows}
    assert {int(o.split()[0]) for o in lines}==set(points)
    assert [(o, W) for o in lines for W in ((2,3) if o.startswith('8') else (1,2,3)) if (o, W) not in rows]==[]
