"Whoever comes from fastai gives arguments by position as there: where our order is another one, they are keywords only"
import ast, functools, inspect, json, re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
import pytest
pytest.importorskip('accelerate') # as for fastai.distributed
from fastai.learner import Learner as FastaiLearner
from test_fastai import make
import learnerdist.all as ours
import learnerdist.fastai as with_fastai
from learnerdist.fastai import checkpoint as fastai_checkpoint, learner as fastai_learner

@functools.cache
def theirs():
    modules = [import_module(f'fastai.{o}') for o in ('vision.all','text.all','tabular.all','callback.all','distributed')]
    return {k: v for o in modules for k,v in vars(o).items()}

# Ours to fastai's: another word for the same, or for something with the same place in a call
words = dict(pred='inp', model='m', optimizer='opt', device='gpu', dtype='amp_mode', dataset='dl', state_dict='sd')
# What cannot be given by position: `Name.method` to the first argument of fastai's that has another meaning there
keywords = {'Learner': 'wd', 'Learner.fit': 'wd', 'Learner.fit_one_cycle': 'wd', 'Learner.get_preds': 'with_decoded',
            'Learner.load': 'device', 'Learner.predict': 'rm_type_tfms', 'DataLoaders.test_dl': 'rm_type_tfms',
            'TfmdDL': 'num_workers', 'DistributedDL': 'device', 'AccumMetric': 'activation', 'Recorder.plot_loss': 'log',
            'SaveModelCallback': 'every_epoch',
            'default_device': 'use'}

def positions(f):
    "The names of arguments that can be given by position"
    return [p.name for p in parameters(f) if p.kind==p.POSITIONAL_OR_KEYWORD and p.name!='self']

def parameters(f):
    try: return [*inspect.signature(f if isinstance(f, type) else inspect.unwrap(f)).parameters.values()]
    except ValueError: return [] # an exception, of C

def pairs(names, module):
    "(name, ours, fastai's) of functions, classes and methods with the same name"
    for k in names:
        a,b = getattr(module, k),theirs().get(k)
        if b is None or a is b or not callable(a): continue
        yield k,a,b
        if not isinstance(a, type): continue
        for m in dir(a):
            of_a,of_b = getattr(a, m),getattr(b, m, None)
            if not m.startswith('_') and callable(of_a) and callable(of_b) and of_a is not of_b: yield f'{k}.{m}',of_a,of_b

def differs(a, b):
    "The first argument of fastai's that means another one of ours; None without"
    for x,y in zip(positions(a), positions(b)):
        if x!=y and words.get(x)!=y: return x,y
    return None

originals = dict(fit=fastai_learner._fit, get_preds=fastai_learner._get_preds, save=fastai_checkpoint._save, load=fastai_checkpoint._load)

@pytest.mark.parametrize('names,module', [(ours.__all__,ours), (with_fastai.__all__,with_fastai)])
def test_by_position_everything_means_what_it_means_in_fastai(names, module):
    assert {k: found for k,a,b in pairs(names, module) if (found := differs(a, b))} == {}

def test_patched_methods_have_fastais_order():
    for k,f in originals.items(): assert differs(getattr(FastaiLearner, k), f) is None and positions(f), k
    for k in ('distrib_ctx','to_distributed'):
        assert positions(getattr(FastaiLearner, k))[:2]==['sync_bn','in_notebook']

def test_what_comes_after_an_argument_that_we_lack_is_a_keyword():
    found = {}
    for k,a,b in pairs(ours.__all__, ours):
        if k in ('Learner.distrib_ctx','Learner.to_distributed'): continue # fastai's are those of learnerdist.fastai now
        b = originals.get(k.removeprefix('Learner.'), b) if k.startswith('Learner.') else b
        x,y = positions(a),positions(b)
        more = [p.name for p in parameters(a) if p.kind==p.KEYWORD_ONLY]
        if len(x)<len(y) and more: found[k] = y[len(x)]
    assert found==keywords
    with pytest.raises(TypeError, match='positional argument'): ours.Learner.fit(None, 1, .1, .01)
    flags = ours.Learner.flagged(None, dict(wd=.1))
    with pytest.raises(TypeError, match=r"no option 'wd'; it is of the optimizer: opt_func=partial\(AdamW"), flags: pass

def test_the_star_has_what_scripts_use():
    internal = 'planned_group await_save was_saved carried fit_flags preempted_status sum_grads mk_metric Compiled TrainEvalCallback'
    assert not {*internal.split()} & {*ours.__all__,*with_fastai.__all__} and len(ours.__all__)<=73

root = Path(__file__).parent.parent
def test_every_option_of_theirs():
    "Those of `fastai.distributed` and of Accelerate: each is taken, or is an error and in the docs"
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
