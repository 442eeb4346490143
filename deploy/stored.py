"""``python -m penstock.deploy.stored DIR -- COMMAND``: run a command with the servers of a finished local run.

The servers run over the run's store until the command exits; it finds them by its environment variables.
Ctrl-C reaches the command, which may exit as it does alone; SIGTERM is passed on to it. The servers stop when this
process exits, SIGKILL included.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.deploy.local import LocalStack
from penstock.deploy.processes.child import exit_status
from penstock.protocol import logs
from penstock.protocol.errors import PenstockError
from penstock.protocol.files import links_below
from penstock.protocol.process_end import error_text

_STOP_GRACE_S = 10.0  # of the command, after Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv[1:2] != ["--"] or len(argv) == 2:
        print("usage: python -m penstock.deploy.stored DIR -- COMMAND", file=sys.stderr)
        return 2
    logs.configure("stored", level="warning")
    if links := links_below(Path(argv[0])):
        print(
            f"penstock: {links[0]} is a link or no regular file: the servers would read and write what it leads to. Remove it, or, if "
            f"the store is yours, start the servers yourself: penstock up --data {argv[0]}",
            file=sys.stderr,
        )
        return 1
    try:
        with LocalStack(Path(argv[0])) as stack:
            return run_command(argv[2:], {**os.environ, **stack.environment()})
    except PenstockError as err:
        print(error_text(f"penstock: {err}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the command started, or after it exited
        return 130


def run_command(command: Sequence[str], environ: Mapping[str, str]) -> int:
    process = subprocess.Popen(command, env=environ)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal signals the command too
        try:
            process.wait(_STOP_GRACE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        return 130
    return exit_status(code)


if __name__ == "__main__":
    sys.exit(main())
