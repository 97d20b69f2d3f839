"The rows of docs/clients.md whose libraries the dev extra has, on 2 ranks: each is what the table says"
import re, sys
from configparser import ConfigParser
from pathlib import Path
import pytest, torch
root = Path(__file__).parent.parent
sys.path.insert(0, str(root/'tools'))
import clients

torch.set_num_threads(1)

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
