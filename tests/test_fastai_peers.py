"Options of `fastai.distributed` and of Accelerate: each is taken, or is an error and in the docs"
import ast, json, re
from importlib.util import find_spec
from pathlib import Path
import pytest
pytest.importorskip('fastai')
pytest.importorskip('accelerate')
from test_fastai import make

root = Path(__file__).parent.parent

def test_every_option_of_theirs():
    page = json.loads((root/'nbs/tutorials/from_fastai_distributed.ipynb').read_text())
    named = {*re.findall(r'`(\w+)[=`]', '\n'.join(''.join(o['source']) for o in page['cells']))}
    lib = find_spec('accelerate').submodule_search_locations[0]
    source = ast.parse(Path(lib, 'accelerator.py').read_text()) # not imported, as it changes the environment
    init = next(f for c in source.body if getattr(c, 'name', '')=='Accelerator' for f in c.body if getattr(f, 'name', '')=='__init__')
    options = {o.arg for o in init.args.args} - {'self'}
    assert {'device_placement','dataloader_config'} < options and options <= named
    learn = make()
    for o in options-{'split_batches','mixed_precision'}: # the latter is an option of DDP's
        with pytest.raises(ValueError, match=o): learn.to_distributed(**{o: 1})
