"""Runs one command of a package that trains: `python -m penstock.trainer COMMAND`, and those of the packages above it.

SIGINT, SIGTERM and the end of torchrun end a training command; the first signal makes a checkpoint.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence

from penstock.protocol import process_end
from penstock.protocol.errors import PenstockError
from penstock.protocol.hardware_errors import fault_of
from penstock.protocol.parent_death import end_with_parent
from penstock.trainer import process_memory

_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
STOPPED = 128 + 2  # exit code after Ctrl-C, as of a shell
USAGE_ERROR = 2  # exit code of an error that is explained on stderr
Commands = Mapping[str, tuple[str, str]]  # name -> arguments, description


def stop_on_signals(stop: threading.Event, *, is_leader: bool) -> list[int]:
    """Make the first SIGINT or SIGTERM to rank 0 request a checkpoint and a stop, and the second one stop at once."""
    received: list[int] = []

    def request_stop(number: int, _: object) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop if is_leader else signal.SIG_IGN)
    return received


def explained(err: Exception) -> str:
    """Return the text of an error that has a fix, below the traceback if it is of the hardware; raises any other again."""
    if isinstance(err, PenstockError):
        return process_end.error_text(f"{err}\n")
    fault = fault_of(err, rank=int(os.environ["RANK"]) if os.environ.get("WORLD_SIZE", "1") != "1" else None)
    if fault is None:
        raise err
    return process_end.error_text(f"{''.join(traceback.format_exception(err))}{fault.text()}\n")


def end_with_torchrun(environ: Mapping[str, str]) -> None:
    """Have the kernel kill this rank when its torchrun ends: one that is killed leaves its ranks training."""
    if _OF_TORCHRUN not in environ:
        return
    if not end_with_parent(os.getppid()):
        signal.raise_signal(signal.SIGKILL)


def start_process() -> None:
    """Report internal errors, and set what torch reads when it is imported; to be called before anything else."""
    process_end.install("trainer")
    process_memory.configure_torch(os.environ)


def run_command(
    module: str, commands: Commands, arguments: Sequence[str], run: Callable[[str, Sequence[str]], int]
) -> int:
    if not arguments or arguments[0] not in commands:
        lines = [f"  {name} {usage}\n      {about}\n" for name, (usage, about) in commands.items()]
        sys.stderr.write(f"usage: python -m {module} COMMAND ...\n\n" + "".join(lines))
        return USAGE_ERROR
    return with_errors_explained(arguments[0], arguments[1:], run)


def with_errors_explained(name: str, arguments: Sequence[str], run: Callable[[str, Sequence[str]], int]) -> int:
    """Run a command; return its exit code, 2 for an error that is explained on stderr, 130 after Ctrl-C."""
    try:
        return run(name, arguments)
    except PenstockError as err:
        sys.stderr.write(process_end.error_text(f"{err}\n"))
        return USAGE_ERROR
    except KeyboardInterrupt:  # a training writes a checkpoint first, once it has started
        again = f"penstock {name.replace('-', ' ')} {shlex.join(arguments)}"
        sys.stderr.write(f"\nstopped on request; start it again with: {again.strip()}\n")
        return STOPPED
