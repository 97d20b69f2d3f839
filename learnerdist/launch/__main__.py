"The command `python -m learnerdist.launch`"
import sys
from learnerdist.launch.cli import main

if __name__=='__main__': sys.exit(main())
