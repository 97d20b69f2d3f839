"What the tests of sharded training have shown, line by line, and the table of it in the docs"
from lines import Table,is_there # noqa: F401

points = {1:'Options', 2:'The same run', 3:'Memory', 4:'Building and files', 5:'Checkpoints', 6:"fastai's Learner", 7:'Models',
          8:'Refused, with an error that names the remedy'}

head = """# `distrib_ctx(shard=…)` on 1, 2, 3 and 4 ranks

Written by the tests, `python -m pytest -m '' tests/test_sharded*.py --sharded-table`: do not edit. Each test fails where it shows something
else than this table says.

A number is the largest difference from the run of one process that the test allows, on every rank: in weights, optimizer state, recorded
losses and metrics, predictions. "The same bits" is what it says. Models are in float64 unless a line says otherwise; gloo on the CPU. One
rank has nothing to spread, and trains whole."""

sharded = Table('sharded_table', 'test_sharded', points, (1,2,3,4), head)
shows,committed,render,path = sharded.shows,sharded.committed,sharded.render,sharded.path
