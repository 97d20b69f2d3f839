"The examples as a user runs them: the README's, digits by the launcher and on one process, FashionMNIST from a server here"
import gzip,hashlib,os,re
from collections import Counter
from importlib.util import module_from_spec,spec_from_file_location
import pytest,torch
from learnerdist.testing import run_ranks
from learnerdist.launch.cli import run_target
from helpers import Fork,environment,free_port,root,serve,start
pytestmark = pytest.mark.slow

path = os.pathsep.join(o for o in (str(root),os.environ.get('PYTHONPATH')) if o) # extras may be installed elsewhere

def run_scripts(*commands, folders=None):
    "What these print, at the same time, in these folders. A command: a script and its arguments, or after them the launcher's"
    env = environment(PYTHONPATH=path, OMP_NUM_THREADS='1')
    runs = []
    for folder,(args,*options) in zip(folders or [root]*len(commands), commands):
        how = dict(env=env, cwd=folder)
        runs.append(start(*options, *args, **how) if options else Fork(run_target, [*map(str, args)], **how))
    found = [o.result(300) for o in runs]
    assert [o.returncode for o in found]==[0]*len(found), [o.stderr for o in found]
    return [o.stdout for o in found]

def parse_table(out):
    "The columns and the numbers of the only table in `out`, without the clock, and the words of the line after it"
    assert '\r' not in out # no bar
    header,*rows,last = [o.split() for o in out.splitlines() if o.strip()]
    assert {len(o) for o in rows}=={len(header)} and [int(o[0]) for o in rows]==[*range(len(rows))]
    return header[:-1],[[float(v) for v in o[1:-1]] for o in rows],last

@pytest.mark.parametrize('n_launchers', [1, pytest.param(2, marks=pytest.mark.long)])
def test_digits_on_two_processes_as_on_one_process(n_launchers):
    "The README's commands: with one launcher, or with two at an address that they share; and without"
    script = 'examples/digits.py','--epochs','2'
    options = ['--nproc',2] if n_launchers==1 else ['--nnodes',2,'--nproc',1,'--rdzv-endpoint',f'127.0.0.1:{free_port()}']
    one,*two = run_scripts([(*script,'--bs','64')], *[(script,*options)]*n_launchers)
    header,rows,last = parse_table(one)
    assert header==['epoch','train_loss','valid_loss','accuracy'] and len(rows)==2 and last[0]=='accuracy' and float(last[1])>=.9
    want = header,[pytest.approx(o, rel=1e-3, abs=1e-5) for o in rows],last
    assert parse_table(''.join(two))==want # rank 0 is with one of the launchers, and the other one prints nothing
    in_readme = re.findall(r'^\$ .*digits.*\n([^$`]*)', (root/'README.md').read_text(), re.M)
    assert in_readme and all(parse_table(o)==want for o in in_readme)

def write_idx(file, t):
    "Bytes in the format of MNIST: kind, number of dimensions, sizes, values"
    head = bytes([0, 0, 8, t.ndim]) + b''.join(n.to_bytes(4, 'big') for n in t.shape)
    file.write_bytes(gzip.compress(head+t.numpy().tobytes()))

def write_fashion_mnist(folder, sizes):
    "Random files in the form of FashionMNIST's: each one's name and md5"
    g = torch.Generator().manual_seed(0)
    for name,n in sizes.items():
        write_idx(folder/f'{name}-images-idx3-ubyte.gz', torch.randint(256, (n,28,28), generator=g).byte())
        write_idx(folder/f'{name}-labels-idx1-ubyte.gz', torch.randint(10, (n,), generator=g).byte())
    return [(o.name, hashlib.md5(o.read_bytes()).hexdigest()) for o in sorted(folder.iterdir())]

def train_fashion_mnist(n, url, resources, *args):
    "The example's last row, `n` times: after a download from `url`, and again from what is there by then"
    from torchvision.datasets import FashionMNIST
    FashionMNIST.mirrors,FashionMNIST.resources = [url],resources
    spec = spec_from_file_location('fashion_mnist', root/'examples/fashion_mnist.py')
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    return [example.main([*args]) for _ in range(n)]

def test_fashion_mnist_is_downloaded_once_for_all_ranks(tmp_path):
    (served := tmp_path/'served').mkdir()
    resources = write_fashion_mnist(served, dict(train=24, t10k=13))
    args = '--root',str(tmp_path/'data'),'--epochs','1','--bs','8','--resize','32','--limit','20'
    with serve(served) as (url,fetched):
        two = run_ranks(train_fashion_mnist, 2, 2, url, resources, *args, env=dict(no_proxy='127.0.0.1'))
        assert Counter(fetched) == {name: 1 for name,_ in resources}
        one, = run_ranks(train_fashion_mnist, 1, 1, url, resources, *args)
        assert len(fetched) == len(resources)
    assert two[0]==two[1] and two[0][0]==two[0][1]
    assert two[0][0]==pytest.approx(one[0], rel=1e-3)

# --- a GPT, LoRA and fastai's -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name,bs,needs,tol', [pytest.param('sharded_gpt', 32, (), dict(rel=2e-3, abs=1e-4), marks=pytest.mark.long),
    ('lora', 8, ('transformers','peft'), dict(rel=2e-3, abs=1e-4)),
    pytest.param('fastai_tabular', 16, ('fastai',), dict(abs=2e-6), marks=pytest.mark.long)])
def test_on_two_processes_as_on_one(name, bs, needs, tol, tmp_path):
    "The same table; what is saved is the file of a whole model"
    for o in needs: pytest.importorskip(o)
    script,(here,there) = str(root/f'examples/{name}.py'),(tmp_path/'1',tmp_path/'2')
    for o in (here,there): o.mkdir()
    one,two = run_scripts([(script,'--bs',str(bs))], [(script,),'--nproc',2], folders=[here,there])
    header,rows,last = parse_table(one)
    head2,rows2,last2 = parse_table(two)
    assert (head2,last2)==(header,last) and [o[:2] for o in rows2]==[pytest.approx(o[:2], **tol) for o in rows]
    if name=='sharded_gpt': tol = dict(abs=1/198) # one answer, which a last bit decides
    assert [o[2:] for o in rows2]==[pytest.approx(o[2:], **tol) for o in rows]
    assert rows[-1][1]<rows[0][1] and (name!='sharded_gpt' or last==['346,347,348'])
    a,b = [[torch.load(f)['model'] for f in (o/'models').glob('*.pth')] for o in (here,there)]
    assert len(a)==len(b)==(name!='fastai_tabular')
    for x,y in zip(a, b): assert {k: (v.shape,v.dtype) for k,v in x.items()}=={k: (v.shape,v.dtype) for k,v in y.items()}

@pytest.mark.long
def test_vision_example(tmp_path):
    args = '--epochs','1','--pictures','90','--bs','16','--path',str(tmp_path/'digits')
    out, = run_scripts([(root/'examples/fastai_vision.py',*args),'--nproc',2])
    _,rows,last = parse_table(out)
    assert len(rows)==1 and f'{rows[0][2]:.4f}'==last[-4] and last[-3:]==['on','22','pictures']
