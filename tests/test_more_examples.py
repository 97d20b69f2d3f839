"A GPT, LoRA and fastai's examples as a user runs them, by the launcher and on one process"
from concurrent.futures import ThreadPoolExecutor
import pytest,torch
from test_examples import launcher,root,run_script
pytestmark = pytest.mark.slow

def fit_and_last(res):
    "The numbers of a table, without the clock and a bar, and the line after it"
    assert res.returncode==0 and '\r' not in res.stdout, res.stderr
    header,*rows,last = [o for o in res.stdout.splitlines() if o.strip()]
    return header.split()[:-1],[[float(v) for v in o.split()[1:-1]] for o in rows],last

@pytest.mark.parametrize('name,bs,needs,tol', [pytest.param('sharded_gpt', 32, (), dict(rel=2e-3, abs=1e-4), marks=pytest.mark.long),
    ('lora', 8, ('transformers','peft'), dict(rel=2e-3, abs=1e-4)),
    pytest.param('fastai_tabular', 16, ('fastai',), dict(abs=2e-6), marks=pytest.mark.long)])
def test_on_two_processes_as_on_one(name, bs, needs, tol, tmp_path):
    "The same table; what is saved is the file of a whole model"
    for o in needs: pytest.importorskip(o)
    script,(here,there) = str(root/f'examples/{name}.py'),(tmp_path/'1',tmp_path/'2')
    for o in (here,there): o.mkdir()
    with ThreadPoolExecutor() as pool:
        one,two = pool.map(run_script, [(script,'--bs',str(bs)),(*launcher,script)], [here,there])
    (h1,rows1,last1),(h2,rows2,last2) = fit_and_last(one),fit_and_last(two)
    assert h1==h2 and last1==last2 and rows2==[pytest.approx(o, **tol) for o in rows1]
    assert rows1[-1][1]<rows1[0][1] and (name!='sharded_gpt' or last1=='346,347,348')
    a,b = [[torch.load(f)['model'] for f in (o/'models').glob('*.pth')] for o in (here,there)]
    assert len(a)==len(b)==(name!='fastai_tabular')
    for x,y in zip(a, b): assert {k: (v.shape,v.dtype) for k,v in x.items()}=={k: (v.shape,v.dtype) for k,v in y.items()}

@pytest.mark.long
def test_vision_example(tmp_path):
    args = '--epochs','1','--pictures','90','--bs','16','--path',str(tmp_path/'digits')
    _,rows,last = fit_and_last(run_script((*launcher,str(root/'examples/fastai_vision.py'),*args)))
    assert len(rows)==1 and f'{rows[0][2]:.4f}'==last.split()[-4] and last.endswith('on 22 pictures')
