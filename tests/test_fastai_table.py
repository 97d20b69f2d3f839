"The table in the docs of what fastai's side does on 1, 2 and 3 ranks"
from fastai_lines import committed, is_there, path, points, render

def test_every_line_is_shown_by_a_test_that_exists_on_1_2_and_3_ranks():
    rows = committed()
    assert {o[0] for o in rows if not is_there(o[0])}==set()
    ranks = {}
    for _,line,W,_ in rows: ranks.setdefault(line, []).append(W)
    assert {int(o.split()[0]) for o in ranks}==set(points)
    assert {line: o for line,o in ranks.items() if o!=([2,3] if line.startswith('8') else [1,2,3])}=={}

def test_the_page_is_what_the_rows_make(): assert path.read_text()==render(committed())
