"Files that were damaged, mixed up or made up: none loads as other data without a word, none runs code, each is named by one ValueError"
import io,json,os,pickle,random,shutil,tarfile
import pytest, torch
from torch import nn
import test_files
from learnerdist.checkpoint import snapshot
from learnerdist.distributed.comparison import digest

names = ['epoch_0000-step_00000001','epoch_0000-step_00000002']
files = ['model.pt','state.pt','manifest.json']

def parts(i): return dict(model=dict(w=torch.arange(40.)+i), state=dict(opt=dict(lr=.1*i, m=torch.ones(3)*i), cbs={}, ranks=[(i,'a')]))

class Code:
    "Unpickled, it leaves a folder"
    def __init__(self, ran): self.ran = ran
    def __reduce__(self): return os.mkdir,(str(self.ran),)

def zipped(o, legacy=False):
    buf = io.BytesIO()
    torch.save(o, buf, _use_new_zipfile_serialization=not legacy)
    return buf.getvalue()

def tarred(o):
    "As torch wrote files in 2016"
    buf = io.BytesIO()
    with tarfile.open(fileobj=buf, mode='w') as t:
        for name in ('storages','tensors','pickle','sys_info'):
            data = pickle.dumps(o)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    return buf.getvalue()

def damaged(rng, data):
    kind = rng.choice(['flip','flip','flip','cut','append','swap'])
    if kind=='cut': return data[:rng.randrange(len(data))]
    if kind=='append': return data+rng.randbytes(rng.choice([1,26,400]))
    data,i = bytearray(data),rng.randrange(len(data)-8)
    if kind=='swap': data[i:i+8] = data[i:i+8][::-1]
    else: data[i] ^= 1<<rng.randrange(8)
    return bytes(data)

def damage(rng, folder, file, ran): (folder/file).write_bytes(damaged(rng, (folder/file).read_bytes()))
def swap_some(rng, folder, file, ran):
    "With a file or the folder of the other checkpoint, or with a file of this one"
    other = folder.parent/names[0]
    swap(*rng.choice([(folder/file,other/file), (folder/file,folder/rng.choice(files)), (folder,other)]))

def swap(a, b):
    if a==b: return
    tmp = a.with_suffix('.swap')
    a.rename(tmp)
    b.rename(a)
    tmp.rename(b)

def code(rng, folder, file, ran):
    "A pickle with code, in several formats, with a manifest that fits or not"
    c = rng.choice([Code(ran), dict(w=Code(ran)), [Code(ran)], {Code(ran): 1}])
    make = rng.choice([pickle.dumps, zipped, lambda o: zipped(o, True), tarred, lambda o: zipped(5)[:-22]+pickle.dumps(o)])
    (folder/file).write_bytes(make(c))
    if file!='manifest.json' and rng.random()<.7: fitting_manifest(folder)

def odd(rng, folder, file, ran):
    "Data of another kind or none, with a manifest that fits"
    o = rng.choice([b'', b'PK\3\4', b'PK\3\4'+rng.randbytes(300), zipped(5), zipped([1]), zipped(None), rng.randbytes(200), b'['*100_000])
    (folder/file).write_bytes(o)
    if file!='manifest.json': fitting_manifest(folder)

def fitting_manifest(folder, **kw):
    res = {k:v for k,v in json.loads((folder/'manifest.json').read_text()).items() if k!='crc32'}
    for k in res['files']:
        data = (folder/k).read_bytes()
        res['files'][k] = [len(data),snapshot.zlib.crc32(data)]
    res |= kw
    (folder/'manifest.json').write_text(json.dumps(res | dict(crc32=snapshot._crc(res))))

kinds = [damage,swap_some,code,odd]

@pytest.fixture(scope='module')
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp('two')
    for i,name in enumerate(names, 1): snapshot.write_snapshot(path/name, parts(i), dict(epoch=0, step=i))
    return path

@pytest.mark.parametrize('kind', kinds, ids=lambda o: o.__name__)
def test_checkpoints(kind, two, tmp_path):
    ran,n_found,n = tmp_path/'ran',0,75 if kind is damage else 25
    for i in range(n):
        rng,path = random.Random(1000*kinds.index(kind)+i),tmp_path/f'{i}'
        shutil.copytree(two, path)
        kind(rng, path/names[1], rng.choice(files), ran)
        try: found = snapshot.newest_good(path)
        except ValueError as e: assert any(f'{path/o/f}' in str(e) for o in names for f in files), (i,e)
        else:
            n_found += 1
            assert found.folder.name in names and digest(found.parts)==digest(parts(1+names.index(found.folder.name))), i
            if found.folder.name==names[0]: assert len(found.bad)==1 and f'{path/names[1]}/' in found.bad[0], i
            try: alone = snapshot.weights_in(snapshot.newest_in(path))
            except ValueError as e: assert found.folder.name==names[0] and f'{path/names[1]}/' in str(e), (i,e)
            else: assert digest(alone)==digest(parts(2)['model']), i # of the newest, or of none
        assert not ran.exists(), i
    if kind is damage: assert n_found==n # the one before is good

def learner(path): return test_files.make(path, opt=torch.optim.Adam)

@pytest.mark.parametrize('name', ['a','a.safetensors'])
def test_files_of_save(name, tmp_path):
    learn = learner(tmp_path)
    learn.create_opt()
    file = learn.save(name)
    whole,data,n_bad = digest(learn.model.state_dict()),file.read_bytes(),0
    for i in range(60):
        file.write_bytes(damaged(random.Random(i), data))
        nn.init.zeros_(learn.model[0].weight)
        try: learn.load(name)
        except ValueError as e:
            n_bad += 1
            assert f'{file}' in str(e), (i,e)
        else: assert digest(learn.model.state_dict())==whole, i
    assert n_bad>50

def test_files_of_plain_torch(tmp_path):
    learn = learner(tmp_path)
    (tmp_path/'models').mkdir()
    file,ran = tmp_path/'models/a.pth',tmp_path/'ran'
    for legacy in (False,True):
        state = learner(tmp_path).model.state_dict()
        file.write_bytes(zipped(state, legacy))
        nn.init.zeros_(learn.model[0].weight)
        assert digest(learn.load('a').model.state_dict())==digest(state)
    good = dict(model=learn.model.state_dict(), opt=dict(state={}, param_groups=[]))
    for o in (5, None, [1,2], 'a', {}, {1: torch.ones(2)}, good|dict(opt=3), good|dict(model=None), {'a': 1}, good|dict(model={'a': 1})):
        file.write_bytes(zipped(o))
        with pytest.raises((ValueError,RuntimeError), match=f'{file}|Missing key'): learn.load('a')
    for make in (pickle.dumps, zipped, tarred, lambda o: zipped(o, True)):
        file.write_bytes(make(dict(model=Code(ran), opt={})))
        with pytest.raises(ValueError, match=f'{file}'): learn.load('a')
    for data in (b'', b'PK', b'PK\3\4', b'a'*1000):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=f'{file}'): learn.load('a')
    assert not ran.exists()
