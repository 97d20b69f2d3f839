"The table in the docs of what is shown of sharded training"
from sharded_lines import committed, is_there, path, points, render

def test_every_line_is_shown_by_a_test_that_exists():
    rows = committed()
    assert {o[0] for o in rows if not is_there(o[0])}==set()
    assert {int(o[1].split()[0]) for o in rows}<=set(points)

def test_the_page_is_what_the_rows_make(): assert path.read_text()==render(committed())
