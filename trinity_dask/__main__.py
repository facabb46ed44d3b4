"""``python -m trinity_dask``: the same commands as ``trinity-dask``."""

import sys

from trinity_dask.cli import main

if __name__ == "__main__":
    sys.exit(main())
