"The command `python -m learnerdist.launch`"
import os,sys
from learnerdist.launch.cli import main

if __name__=='__main__':
    # read when torch is imported. Else c10d warns of each address that has no name
    os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR')
    sys.exit(main())
