"What the tests of fastai's side have shown, line by line, and the table of it in the docs"
from lines import Table,is_there # noqa: F401

points = {2:'Training', 3:'Evaluation, prediction, files', 4:'Loaders', 5:'Metrics', 6:'Callbacks', 7:'Applications',
          8:'Outside of a context'}

head = """# fastai's Learner on 1, 2 and 3 ranks

Written by the tests, `python -m pytest tests/test_fastai*.py --fastai-table`: do not edit. Each test fails where it shows something else
than this table says.

One process, without a context, is fastai as it is; it reads the training data in the order that the context deals. A number is the largest
difference that the test allows, absolute or relative, on every rank of 1, 2 or 3 processes; "the same bits" is what it says. Models are
in float64 unless a line says otherwise, fastai's Recorder keeps float32."""

fastai = Table('fastai_table', 'test_fastai', points, (1,2,3), head)
shows,committed,render,path = fastai.shows,fastai.committed,fastai.render,fastai.path
