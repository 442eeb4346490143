"""``python -m deploy.stored DIR -- COMMAND``: a command beside the servers of a local run that is over.

The servers run over the run's own store for as long as the command does; the command finds them in its environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.local import LocalStack
from protocol import logs
from protocol.errors import PenstockError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code, 1 when the servers do not start."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[1:2] != ["--"] or len(given) == 2:
        print("usage: python -m deploy.stored DIR -- COMMAND", file=sys.stderr)
        return 2
    logs.configure("stored", level="warning")
    try:
        with LocalStack(Path(given[0])) as stack:
            return subprocess.run(given[2:], env={**os.environ, **stack.environment()}, check=False).returncode
    except PenstockError as err:
        print(f"penstock: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the command has heard it too
        return 130


if __name__ == "__main__":
    sys.exit(main())
