"The command `python -m learnerdist.launch`"
import os,sys
from learnerdist.launch.cli import main

if __name__=='__main__':
    os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR') # read when torch is imported. Else c10d warns of each address that has no name
    sys.exit(main())
