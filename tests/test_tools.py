"""The tools' own tests: what they take for a fault, and what they write. The sweep's random cases are trained on 2 and 3 processes before a
release, one in four in float32; ports of public code need its checkouts"""
import json, os, re, subprocess, sys
from configparser import ConfigParser
from itertools import count, islice
from pathlib import Path
import pytest, torch
root = Path(__file__).parent.parent
sys.path.insert(0, str(root/'tools'))
import clients, sweep

# --- sweep: random cases ----------------------------------------------------------------------------------------------------

# What is not exact yet: a class that becomes so leaves this table, and its cases are then among the twenty
not_exact = dict(loss=('focal_by_weight','boxes'), norm=('own','bn_nostats'))
def is_exact(c): return all(c[k] not in v for k,v in not_exact.items())

@pytest.mark.long # the table of test_scenes stands for it
def test_twenty_cases():
    drawn = (sweep.draw_case(0, k, dtype='float32' if k%4==3 else 'float64') for k in count())
    cs = [*islice(filter(is_exact, drawn), 20)]
    for c,v in zip(cs, sweep.verdicts(cs)): # the loss of pairs of samples cannot be exact, and is told
        assert v[0]=='told' if c['loss']=='distances' else v[0]=='same' and not v[1], (v, sweep.named(c))

def test_a_fault_is_found_and_made_smaller():
    "On a sweep without faults this would be the only sign that it looks"
    c = sweep.fitting(sweep.base | dict(norm='bn', clip=1., opt='rms', lr=.01))
    alone,ranks = sweep.guarded(c, 2),[sweep.guarded(c, 2)]*2
    assert sweep.judged(c, alone, ranks)==('same', '', 0.)
    off = dict(ranks[1], weights=[o+1e-6 for o in ranks[1]['weights']])
    what,where,by = sweep.judged(c, alone, [ranks[0],off])
    assert (what,where)==('DIFFERENT','weights between ranks') and abs(by-1e-6)<1e-9
    assert [sweep.class_of(o) for o in sweep.parts_of(c)]==['norm=bn','opt=rms','clip=1.0']

# --- clients: the rows of docs/clients.md whose libraries the dev extra has ------------------------------------------------------

def of_dev():
    "Names of rows, by what settings.ini installs"
    cfg = ConfigParser(delimiters=['='])
    cfg.read(root/'settings.ini', encoding='utf-8')
    have = {re.split(r'[<>=\[]', o)[0] for k in ('requirements','extra_dev') for o in cfg['DEFAULT'][k].split()}
    return [k for k,o in clients.rows.items() if have.issuperset(o['packages'])]

@pytest.mark.long
def test_rows_are_as_documented():
    names,told = of_dev(),clients.documented()
    assert {clients.rows[o]['packages'][0] for o in names} >= {'timm','torchvision','torchmetrics','webdataset','torchdata'}
    for name,verdict,detail in clients.run_rows(names, [2]):
        assert told[clients.rows[name]['about']].split(' | ')[2:]==[verdict, f'{detail} |'], name

def test_a_difference_needs_a_warning_of_its_own():
    def of(w, *messages): return dict(losses=[.5], values=[.5], preds=torch.ones(2), weights=[torch.tensor([w])], messages=messages)
    def verdict(*ranks): return clients.judge('timm', of(1.), ranks)[0]
    assert verdict(of(1.), of(1.))==verdict(of(1.), of(1., '[mixes-samples] predictions'))=='same'
    assert verdict(of(1.), of(1.1))==verdict(of(1.1, '[unused-parameters] the loss'))==verdict(of(float('nan')))=='differs'
    assert verdict(of(1.), of(1.1, '[mixes-samples] predictions'))=='warned'
    assert verdict(of(1.), dict(error='ValueError: no', messages=[]))=='error'

# --- public ----------------------------------------------------------------------------------------------------------------

@pytest.mark.long
@pytest.mark.skipif('PUBLIC_CHECKOUTS' not in os.environ, reason='PUBLIC_CHECKOUTS names no folders of checkouts')
def test_ports_of_public_code():
    checkouts = os.environ['PUBLIC_CHECKOUTS'].split(os.pathsep)
    p = subprocess.run([sys.executable, root/'tools/public.py', *checkouts], capture_output=True, text=True)
    assert p.returncode==0, p.stdout+p.stderr

# --- gpu_check: what fails is told at its end; packages come from wheels; all of it runs on a simulated GPU ----------------------

def check(out, *args, python=sys.executable, timeout=60, **env):
    env = {**os.environ, 'PYTHON': str(python), **env}
    call = 'bash',root/'tools/gpu_check.sh','--out',out,*args
    return subprocess.run(call, env=env, capture_output=True, text=True, timeout=timeout)

def test_failures_stand_at_the_end(tmp_path):
    res = check(tmp_path/'out', python='false')
    assert res.returncode==1 and res.stdout.splitlines()[-2:]==['FAILED: 1', '  machine (status 1)']
    assert check(tmp_path/'out', '--faster').returncode==2

@pytest.mark.long
def test_rehearsal(tmp_path):
    res = check(tmp_path, '--rehearse', timeout=600)
    assert res.returncode==0 and res.stdout.splitlines()[-1]=='nothing failed', res.stdout
    skipped = re.findall(r'<skipped [^>]*message="([^"]*)"', (tmp_path/'tests.xml').read_text())
    assert {*skipped}<={'needs a real GPU'}
    figures = json.loads((tmp_path/'gpu-rehearsal.json').read_text())
    assert len(figures['sections'])==6 and figures['failed']=={} and '| a vote, sockets |' in (tmp_path/'tables.md').read_text()
