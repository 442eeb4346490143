"""Print one reference, or with no name the names of all: ``python -m docs.generate [NAME]``."""

from __future__ import annotations

import sys

from docs import generate

sys.stdout.write(generate.text(sys.argv[1]) if len(sys.argv) > 1 else "\n".join(generate.NAMES) + "\n")
