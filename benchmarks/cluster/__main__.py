"""``python -m benchmarks.cluster``."""

import sys

from benchmarks.cluster.run import main

if __name__ == "__main__":
    sys.exit(main())
