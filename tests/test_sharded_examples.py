"A GPT and LoRA as a user runs them, by the launcher and on one process"
from concurrent.futures import ThreadPoolExecutor
import pytest,torch
from test_examples import launcher,root,run_script
pytestmark = pytest.mark.slow

def fit_and_last(res):
    "The numbers of a table, without the clock, and the line after it"
    assert res.returncode==0, res.stderr
    header,*rows,last = [o for o in res.stdout.splitlines() if o.strip()]
    return header.split()[:-1],[[float(v) for v in o.split()[1:-1]] for o in rows],last

@pytest.mark.parametrize('name,needs', [pytest.param('sharded_gpt', (), marks=pytest.mark.long),
                                        ('lora',('transformers','peft'))])
def test_sharded_on_two_processes_as_on_one(name, needs, tmp_path):
    "The same table; what is saved is the file of a whole model"
    for o in needs: pytest.importorskip(o)
    script,(here,there) = str(root/f'examples/{name}.py'),(tmp_path/'1',tmp_path/'2')
    for o in (here,there): o.mkdir()
    bs = dict(sharded_gpt=32, lora=8)[name]
    with ThreadPoolExecutor() as pool:
        one,two = pool.map(run_script, [(script,'--bs',str(bs)),(*launcher,script)], [here,there])
    (h1,rows1,last1),(h2,rows2,last2) = fit_and_last(one),fit_and_last(two)
    assert h1==h2 and last1==last2 and rows2==[pytest.approx(o, rel=2e-3, abs=1e-4) for o in rows1]
    assert rows1[-1][1]<rows1[0][1] and (name!='sharded_gpt' or last1=='346,347,348')
    a,b = [torch.load(next((o/'models').glob('*.pth')))['model'] for o in (here,there)]
    assert {k: (v.shape,v.dtype) for k,v in a.items()}=={k: (v.shape,v.dtype) for k,v in b.items()}
