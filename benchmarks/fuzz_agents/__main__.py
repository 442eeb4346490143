"""`python -m benchmarks.fuzz_agents`: see `run.py`."""

import sys

from benchmarks.fuzz_agents.run import main

if __name__ == "__main__":
    sys.exit(main())
