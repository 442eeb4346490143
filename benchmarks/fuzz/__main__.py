"""`python -m benchmarks.fuzz`: see `run.py`."""

import sys

from benchmarks.fuzz.run import main

if __name__ == "__main__":
    sys.exit(main())
