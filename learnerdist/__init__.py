"Distributed training for fastai-style Learners"
__version__ = '0.1.0'
