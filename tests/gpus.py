"""This machine's GPUs, which only test_cuda.py and tests marked `cuda` use: all others are of the CPU's numbers, and do not see
them. Import it before torch"""
import os
from pathlib import Path

kept = 'LEARNERDIST_TEST_GPUS' # for pytest's workers and the ranks of a test
if kept not in os.environ:
    os.environ[kept] = os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(o.name[6:] for o in Path('/dev').glob('nvidia[0-9]*')))
    if os.environ[kept]: os.environ['CUDA_VISIBLE_DEVICES'] = ''
visible = [*filter(None, os.environ[kept].split(','))]
hidden = dict(CUDA_VISIBLE_DEVICES='') if visible else {}
