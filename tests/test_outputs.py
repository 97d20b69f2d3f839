"Outputs in the notebooks: what `tools/outputs.py` keeps and compares. CI runs the notebooks and compares all of them"
import ast,json,re,sys
from pathlib import Path
import pytest

root = Path(__file__).parent.parent
shown = 'core','data','learner','distributed','checkpoint','launch','fastai','tutorials' # folders

@pytest.fixture
def outputs(monkeypatch):
    monkeypatch.syspath_prepend(root/'tools')
    import outputs
    yield outputs
    del sys.modules['outputs']

def stream(text, name='stdout'): return dict(output_type='stream', name=name, text=text)
def display(**data): return dict(output_type='display_data', metadata={'x': 1}, data={k.replace('_', '/'): v for k,v in data.items()})

def test_same(outputs):
    "Close numbers, other times and another drawing are the same; other words, numbers, shapes, or no picture are not"
    old = [stream('1  0.333333 00:00 of 2026-11-22 04:03:59\n'),display(image_png='a', text_plain='<Figure>')]
    def other(text, *more): return outputs.same(old, [stream(text),*more])
    assert other('1  0.333334 00:01 of 2027-01-02 14:03:59\n', display(image_png='b', text_plain='<Figure>'))
    assert not other('1  0.333333 00:00 of 2026-11-22 04:03:59\n')
    assert outputs.same([stream('[1, 2e-17]')], [stream('[1, 3e-16]')])
    for text in ('[1, 3]','[1, 2.1]','[1, 2, 2]','[1 2]','[1, -2]','[1, 2 3]','x [1, 2]',''):
        assert not outputs.same([stream('[1, 2]')], [stream(text)]), text

def notebook(path, *cells):
    cells = [dict(cell_type='code', id=k, source=[src], outputs=[stream(o)] if o else []) for k,src,o in cells]
    path.write_text(json.dumps(dict(cells=cells)))
    return path

def test_compare_and_write(outputs, tmp_path):
    "A difference is named by its cell, `#| varies` and cells without an output are passed over; writing mends it"
    held = notebook(tmp_path/'a.ipynb', ('c1', 'f()', '1'), ('c2', '#| varies\n', '2'), ('c3', 'g()', ''))
    gives = notebook(tmp_path/'b.ipynb', ('c1', 'f()', '5'), ('c2', '#| varies\n', '6'), ('c3', 'g()', '7'))
    line, = outputs.compare(held, gives)
    assert 'c1' in line and "['1']" in line and "['5']" in line
    outputs.write(held, gives)
    assert outputs.compare(held, gives)==[] and [outputs.text_of(o['outputs'][0]) for o in outputs.cells(held)]==['5','6','7']

def does(statement): return isinstance(statement, (ast.Expr,ast.With))

@pytest.mark.parametrize('folder', shown)
def test_each_section_shows_an_output(folder):
    "Of those that have an example: a cell that does more than import, assign and define"
    for file in (root/'nbs'/folder).glob('*.ipynb'):
        has,section = {},''
        for o in json.loads(file.read_text())['cells']:
            src = ''.join(o['source'])
            if o['cell_type']=='markdown': section = (re.findall('^## (.+)', src, re.M) or [section])[-1]
            elif not re.match(r'#\| (export|hide|default_exp)', src) and any(map(does, ast.parse(src).body)):
                has[section] = has.get(section) or bool(o['outputs'])
        assert [k for k,v in has.items() if not v]==[], file.name
