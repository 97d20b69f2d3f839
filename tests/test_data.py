"Loaders, sets of loaders and batches of any structure"
from collections import OrderedDict, namedtuple
import pandas as pd, pytest, torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (BatchSampler, DataLoader, SequentialSampler, Subset, TensorDataset, WeightedRandomSampler,
                              default_collate)
from helpers import Stream
from learnerdist.data.distributed_dl import DistributedDL
from learnerdist.data.loaders import (DataLoaders, TfmdDL, changed, is_shuffled, loader_settings, to_cpu, to_detach,
                                      to_device)

Pair = namedtuple('Pair', 'x y')

class MyList(list): pass
class MyTuple(tuple): pass

def half(o): return o/2

STRUCTURES = [torch.ones(2), [torch.ones(2)], (torch.ones(2), 'a', None), Pair(torch.ones(2), [torch.ones(1)]),
    {'a': (torch.ones(2),)},    OrderedDict(b=torch.ones(1), a=3), MyList([torch.ones(2)]),
    MyTuple([torch.ones(2), 1]), pack_sequence([torch.ones(2)]), (), [], {}, 'text']

@pytest.mark.parametrize('b', STRUCTURES, ids=lambda b: type(b).__name__)
@pytest.mark.parametrize('f', [to_cpu, to_detach, lambda b: to_device(b, 'cpu'), lambda b: to_device(b, None)])
def test_structure_is_kept(b, f):
    res = f(b)
    assert type(res) is type(b)
    assert str(res)==str(b)

LOADERS = [lambda: DataLoader(range(7), 3, drop_last=True), lambda: DataLoader(range(7), 3, sampler=[5,1,2]),
    lambda: DataLoader(range(7), None),
    lambda: DataLoader(range(7), batch_sampler=[[1,2],[3]]), lambda: DataLoader(range(7), batch_sampler=BatchSampler([3,4,5], 2, True)),
    lambda: DataLoader(Stream(range(7)), 3, drop_last=True), lambda: DataLoader(Stream(range(7)), None),
    lambda: TfmdDL(range(7), 3, after_item=half)]

@pytest.mark.parametrize('make', LOADERS)
def test_changed_nothing(make):
    for other in (changed(make()), changed(changed(make(), num_workers=1, timeout=9, persistent_workers=True), num_workers=0)):
        assert str(list(other)) == str(list(make()))
        assert type(other) is type(make())
    assert str(list(DataLoader(make().dataset, **loader_settings(make())))) == str(list(make()))

def test_changed_data_set():
    shuffled = changed(DataLoader(range(3), shuffle=True), range(10))
    assert sorted(int(o) for o in shuffled) == list(range(10)) and shuffled.sampler.data_source == range(10)
    with pytest.raises(ValueError, match='WeightedRandomSampler was made for another'):
        changed(DataLoader(range(3), sampler=WeightedRandomSampler([1.,1.,1.], 3)), range(10))
    assert len(changed(DataLoader(range(3), sampler=[0]), range(10), shuffle=False))==10

def test_data_frame():
    df = pd.DataFrame(dict(a=range(5), b=[.5]*5), index=list('vwxyz'))
    assert [o.tolist() for o in TfmdDL(df, 3)][1] == [[3.,.5],[4.,.5]]
    assert TfmdDL(df['a'], 3).one_batch().tolist() == [0,1,2]
    frames = list(TfmdDL(df, 2, collate_fn=lambda o: o))
    assert [list(o.index) for o in frames] == [['v','w'],['x','y'],['z']]
    assert TfmdDL(df, None).one_batch().tolist() == [0,.5]
    assert len(TfmdDL(df).new(df[:2], bs=1)) == 2
    assert sorted(torch.cat(list(TfmdDL(df, 2, shuffle=True, num_workers=1)))[:,0].tolist()) == [0,1,2,3,4]
    with pytest.raises(ValueError, match='give a collate_fn'): TfmdDL(pd.DataFrame(dict(a=['x']))).one_batch()
    with pytest.raises(ValueError, match='after_item'): TfmdDL(df, after_item=half)

def test_dataloaders():
    dls = DataLoaders.from_dsets(range(10), range(7), bs=4, drop_last=True, valid_bs=3, sampler=[3,1,2,5,6], path='p', n_inp=1)
    assert [o.tolist() for o in dls.train]==[[3,1,2,5]] and [len(o) for o in dls.valid]==[3,3,1]
    assert (str(dls.path), dls.n_inp, len(dls), dls[1] is dls.valid, list(dls)==dls.loaders) == ('p', 1, 2, True, True)
    assert dls.to('meta').one_batch().device.type=='meta' and dls.device=='meta'
    assert DataLoaders.from_dsets(Stream(range(3)), bs=2).valid is None
    plain = DataLoaders(DataLoader(range(3)), [1,2], [3])
    assert (plain.one_batch(1), plain.one_batch().tolist(), len(plain)) == (1, [0], 3)
    assert is_shuffled(DataLoaders.from_dsets(range(4), range(4)).train.sampler)
    assert type(DataLoaders.from_dsets(range(4), range(4)).valid.sampler) is SequentialSampler

class Squares(TensorDataset):
    def __getitem__(self, i): return self.tensors[0][i]**2,self.tensors[1][i]

def test_rows_of_tensors_are_those_of_torchs_loader():
    x,y = torch.randn(23, 2, 3),torch.arange(23)
    ds,seen = TensorDataset(x, y),[]
    def noted(b):
        seen.append(len(b))
        return default_collate(b)
    class Last(torch.utils.data.Sampler): # keys that only the data set's own rules say what they are
        def __iter__(self): return iter([-1,torch.tensor(3),5])
        def __len__(self): return 3
    cases = [(ds,{}), (ds,dict(drop_last=True)), (ds,dict(shuffle=True)), (Subset(Subset(ds, range(2, 20)), [5,0,5,9]),{}),
             (Squares(x, y),{}), (ds,dict(sampler=Last())), (ds,dict(collate_fn=noted)),
             (TensorDataset(x.transpose(0, 1).contiguous().transpose(0, 1), y),{}),
             (TensorDataset(x.clone().requires_grad_(), y),{})]
    for ds_,kw in cases:
        dl = DataLoader(ds_, batch_size=4, **kw)
        for share in (DistributedDL.from_dl(dl, 0, 1), DistributedDL.from_dl(TfmdDL(ds_, bs=4, **kw), 0, 1)):
            torch.manual_seed(1)
            got,state = [*share],torch.get_rng_state()
            torch.manual_seed(1)
            want = [*DataLoader.__iter__(share.dl)]
            assert len(got)==len(want) and torch.get_rng_state().equal(state)
            for a,b in zip(got, want):
                assert type(a) is type(b)
                assert all(o.equal(p) and (o.stride(),o.requires_grad)==(p.stride(),p.requires_grad) for o,p in zip(a, b))
    assert len(seen)==24 # each batch of that case, by both loaders, also as torch reads it
    with pytest.raises(IndexError): [*DistributedDL.from_dl(DataLoader(ds, sampler=[40]), 0, 1)]

def test_a_callback_may_change_tensors_between_batches():
    ds = TensorDataset(torch.zeros(4))
    it = iter(DistributedDL.from_dl(DataLoader(ds, 2), 0, 1))
    next(it)
    ds.tensors = torch.ones(4),
    assert next(it)[0].tolist()==[1,1]
