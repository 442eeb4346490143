"""``python -m penstock.deploy.stored DIR -- COMMAND``: a command beside the servers of a local run that is over.

The servers run over the run's own store for as long as the command does; the command finds them in its environment.
Ctrl-C reaches the command, which may end as it does alone; SIGTERM is passed on to it. Whatever ends this process, SIGKILL
included, ends the servers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.deploy.local import LocalStack
from penstock.protocol import logs
from penstock.protocol.errors import PenstockError

_FAREWELL_S = 10.0  # what a command has for its own end after Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code, 1 when the servers do not start."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[1:2] != ["--"] or len(given) == 2:
        print("usage: python -m penstock.deploy.stored DIR -- COMMAND", file=sys.stderr)
        return 2
    logs.configure("stored", level="warning")
    try:
        with LocalStack(Path(given[0])) as stack:
            return _run(given[2:], {**os.environ, **stack.environment()})
    except PenstockError as err:
        print(f"penstock: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the command began, or after its end
        return 130


def _run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; returns its exit code as a shell gives it."""
    process = subprocess.Popen(command, env=environ)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal has told the command too
        try:
            process.wait(_FAREWELL_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        return 130
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
