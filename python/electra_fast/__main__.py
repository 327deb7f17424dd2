"""`python -m electra_fast`: the command line."""

import sys

from electra_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
