"""`python -m electra_fast`: the command line."""

import sys

from electra_fast.child_process import search_path

if __name__ == "__main__":
    sys.path[:] = search_path()

    from electra_fast.cli import main

    sys.exit(main())
