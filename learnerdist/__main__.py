"The command `python -m learnerdist`"
import sys
from learnerdist.command import main

if __name__=='__main__': sys.exit(main())
