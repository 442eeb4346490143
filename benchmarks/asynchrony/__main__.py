"""``python -m benchmarks.asynchrony``; see `run.py`."""

import sys

from benchmarks.asynchrony.run import main

sys.exit(main())
