"Small stand-ins for fastai's data sets and weights: their folders, and a server of their archives under fastai's names"
import json, pickle, random, shutil, tarfile
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
import numpy as np, pandas as pd, torch
from PIL import Image
from helpers import serve

breeds = ['Abyssinian','Bengal','Birman','Siamese','beagle','boxer','great_pyrenees','pug']
codes = ['Animal','Archway','Bicyclist','Bridge','Building','Car','Road','Void']

def picture(i=0, size=(32, 32), left=True):
    "Noise with a brighter rectangle in its left or right half, and the mask of that"
    w,h = size
    img,mask = np.random.RandomState(i).randint(0, 80, (h, w, 3)).astype('uint8'),np.zeros((h, w), 'uint8')
    mask[h//4:h*3//4, (0 if left else w//2):(w//2 if left else w)] = 1
    img[mask>0] += 120
    return Image.fromarray(img),Image.fromarray(mask)

def save(path, i=0, size=(32, 32), mode='RGB', left=True, mask=None):
    "The picture as a file, and its mask"
    for o,file in zip(picture(i, size, left), (path,mask)):
        if file is None: continue
        file.parent.mkdir(parents=True, exist_ok=True)
        (o if file==mask else o.convert(mode)).save(file)
    return path

def texts(n=80, n_words=(5, 30)):
    "Rows of made-up words with a label of 0 or 1; the last quarter is for validation"
    g = random.Random(1)
    words = [''.join(g.choices('abcdef', k=3)) for _ in range(30)]
    rows = [(' '.join(g.choices(words, k=g.randint(*n_words))), i%2, i>=n*3//4) for i in range(n)]
    return pd.DataFrame(rows, columns=['text','label','is_valid'])

# --- the folders --------------------------------------------------------------------------------------------------------------

def digits(path, **parts):
    "part='3 of them, 7 of them'"
    files = [save(path/part/d/f'{i}.png', i, (28, 28), 'L', d=='3') for part,ns in parts.items() for d,n in zip('37', ns) for i in range(n)]
    rows = [(o.relative_to(path).as_posix(), o.parent.name) for o in files]
    pd.DataFrame(rows, columns=['name','label']).to_csv(path/'labels.csv', index=False)

def mnist_tiny(path):
    digits(path, train=(346, 363), valid=(349, 350))
    for i in range(20): save(path/'test'/f'{i}.png', i, (28, 28), 'L')

def mnist_sample(path):
    digits(path, train=(80, 80), valid=(50, 50))
    save(path/'valid'/'3'/'8483.png', 0, (28, 28), 'L')

def pets(path):
    for i in range(168): save(path/'images'/f'{breeds[i%8]}_{i//8}.jpg', i, (48, 40), left=i%8<4)

def classes(path, **parts):
    for part,n in parts.items():
        for i in range(n):
            kind = ['n01440764','n02102040','n02979186','n03000684','n03028079'][i%5]
            save(path/part/kind/f'{kind}_{i}.JPEG', i, (40, 40))

def camvid(path, n=100, size=(128, 96)):
    for i in range(n): save(path/'images'/f'{i:04}.png', i, size, left=i%2==0, mask=path/'labels'/f'{i:04}_P.png')
    (path/'codes.txt').write_text('\n'.join(codes))
    (path/'valid.txt').write_text('\n'.join(f'{i:04}.png' for i in range(n*3//4, n)))

def coco(path):
    images = [dict(id=i, file_name=save(path/'train'/f'{i:06}.jpg', i, (48, 32)).name) for i in range(160)]
    boxes = [dict(image_id=i, category_id=1+i%2, bbox=[0, 8, 24, 16]) for i in range(160) for _ in range(1+i%3)]
    kinds = [dict(id=1, name='chair'),dict(id=2, name='vase')]
    (path/'train.json').write_text(json.dumps(dict(categories=kinds, images=images, annotations=boxes)))

def biwi(path):
    files = [save(path/'images'/f'{i:03}_frame_{i:05}_rgb.jpg', i, (64, 48)) for i in range(160)]
    (path/'centers.pkl').write_bytes(pickle.dumps({o.name: torch.tensor([10.+i%20, 20.]) for i,o in enumerate(files)}))

def biwi_head_pose(path):
    for i in range(160):
        folder = path/f'{(1,13)[i%5==4]:02}'
        save(folder/f'frame_{i:05}_rgb.jpg', i, (64, 48))
        (folder/f'frame_{i:05}_pose.txt').write_text('1 0 0\n0 1 0\n0 0 1\n\n10 20 900\n')
    for d in ('01','13'): (path/d/'rgb.cal').write_text('500 0 32\n0 500 24\n0 0 1\n'+'\n0 0 0'*6+'\n')

def pascal(path):
    rows = [(save(path/'train'/f'{i:06}.jpg', i, (48, 40)).name, ('car','car person','dog')[i%3], i>=132) for i in range(168)]
    pd.DataFrame(rows, columns=['fname','labels','is_valid']).to_csv(path/'train.csv', index=False)

def bedroom(path):
    for i in range(300): save(path/'a'/f'{i}.jpg', i, (64, 64))

def adult(path, n=10200):
    g = np.random.RandomState(0)
    pick = lambda *os: [' '+os[i] for i in g.randint(0, len(os), n)]
    whole = lambda lo,hi: g.randint(lo, hi, n)
    df = pd.DataFrame({'age': whole(17, 90), 'workclass': pick('Private','State-gov','?'), 'fnlwgt': whole(20000, 400000),
        'education': pick('HS-grad','Assoc-acdm','Masters'), 'education-num': whole(1, 16).astype(float),
        'marital-status': pick('Divorced','Married-civ-spouse'), 'occupation': pick('Sales','Craft-repair','?'),
        'relationship': pick('Wife','Husband','Not-in-family'), 'race': pick('White','Black','Other'), 'sex': pick('Male','Female'),
        'capital-gain': whole(0, 9), 'capital-loss': whole(0, 9), 'hours-per-week': whole(10, 60), 'native-country': pick('United-States')})
    df.loc[::50, 'education-num'] = np.nan
    df['salary'] = np.where(df.age>50, '>=50k', '<50k')
    df.to_csv(path/'adult.csv', index=False)

def ratings(path):
    g = np.random.RandomState(0)
    df = pd.DataFrame(dict(userId=g.randint(1, 100, 3000), movieId=g.randint(1, 100, 3000), rating=g.randint(1, 6, 3000), timestamp=1))
    df.to_csv(path/'ratings.csv', index=False)
    df.to_csv(path/'u.data', sep='\t', header=False, index=False)
    (path/'u.item').write_text('\n'.join(f'{i}|Film {i} (1995)|x' for i in range(1, 100)), encoding='latin-1')

def imdb_sample(path): texts(800, (20, 40))[['label','text','is_valid']].to_csv(path/'texts.csv', index=False)

def imdb(path):
    for i,(text,label,is_valid) in enumerate(texts(240, (20, 60)).values):
        file = path/('test' if is_valid else 'train')/('neg','pos')[label]/f'{i}.txt'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (path/'unsup').mkdir()
    (path/'unsup'/'0.txt').write_text('abc def')

def wikitext(path):
    for name,n in dict(train=300, test=200).items(): texts(n, (150, 250))[['text']].to_csv(path/f'{name}.csv', index=False, header=False)

def wt103(path, name='lstm_fwd'):
    "Untrained, and of a few words"
    from fastai.text.all import AWD_LSTM, get_language_model
    words = ['xxunk','xxpad','xxbos','xxeos','xxmaj','.',',','the','this','movie','was','abc']
    torch.save(get_language_model(AWD_LSTM, len(words)).state_dict(), path/f'{name}.pth')
    (path/f'{name.replace("lstm", "itos")}.pkl').write_bytes(pickle.dumps(words))

def scan(file, i, size=64):
    "A picture as a DICOM file, by pydicom"
    from pydicom.dataset import FileDataset,FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian,SecondaryCaptureImageStorage
    pixels,meta,name = np.asarray(picture(i, (size, size), i%2==0)[0].convert('L')),FileMetaDataset(),f'1.{i+1}'
    meta.TransferSyntaxUID,meta.MediaStorageSOPInstanceUID = ExplicitVRLittleEndian,name
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    dcm = FileDataset(str(file), {}, file_meta=meta, preamble=bytes(128))
    about = dict(SOPInstanceUID=name, PatientID=name, Modality='CR', Rows=size, Columns=size, PixelSpacing=[1, 1], SamplesPerPixel=1,
        PhotometricInterpretation='MONOCHROME2', PixelRepresentation=0, BitsAllocated=8, BitsStored=8, HighBit=7, PixelData=bytes(pixels))
    for k,v in about.items(): setattr(dcm, k, v)
    file.parent.mkdir(parents=True, exist_ok=True)
    dcm.save_as(file)

def siim(path):
    rows = [(f'train/{label}/{i:06}.dcm', label) for i,label in enumerate(['Pneumothorax','No Pneumothorax']*40)]
    for i,(name,_) in enumerate(rows): scan(path/name, i)
    pd.DataFrame(rows, columns=['file','label']).to_csv(path/'labels.csv', index=False)

makers = dict(MNIST_TINY=mnist_tiny, MNIST_SAMPLE=mnist_sample, PETS=pets, CAMVID_TINY=camvid, CAMVID=camvid, COCO_TINY=coco,
    BIWI_SAMPLE=biwi, BIWI_HEAD_POSE=biwi_head_pose, PASCAL_2007=pascal, LSUN_BEDROOMS=bedroom, ADULT_SAMPLE=adult, ML_SAMPLE=ratings,
    ML_100k=ratings, IMDB_SAMPLE=imdb_sample, IMDB=imdb, WIKITEXT_TINY=wikitext, WT103_FWD=wt103,
    IMAGENETTE_160=lambda o: classes(o, train=160, val=40), IMAGEWOOF_320=lambda o: classes(o, train=160, val=40),
    **(dict(SIIM_SMALL=siim) if find_spec('pydicom') else {}))

def archive(name, url, folder):
    "Make the archive of a data set in `folder`, under the file name of its URL"
    made,file = folder/'made'/name/Path(url).stem,folder/Path(url).name
    made.mkdir(parents=True)
    makers[name](made)
    if file.suffix=='.zip': shutil.make_archive(file.with_suffix(''), 'zip', made.parent)
    else:
        with tarfile.open(file, 'w:gz', compresslevel=1) as f: f.add(made, made.name)
    shutil.rmtree(made)

def resnet_weights(folder):
    "Untrained ones, where torch looks for those that it has downloaded"
    import torchvision
    (folder/'hub'/'checkpoints').mkdir(parents=True)
    for name in ('resnet18','resnet34'):
        url = torchvision.models.get_model_weights(name).IMAGENET1K_V1.url
        torch.save(getattr(torchvision.models, name)().state_dict(), folder/'hub'/'checkpoints'/Path(url).name)

@contextmanager
def standing_in(folder, URLs, names=makers):
    "A server of them; yields the address of each, by its name in fastai's `URLs`"
    for k in names: archive(k, getattr(URLs, k), folder)
    with serve(folder) as (url,_): yield {k: url+Path(getattr(URLs, k)).name for k in names}
