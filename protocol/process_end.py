"""How the output of a process ends: with one line for people after an unexpected exception, and without a traceback when its reader has ended.

Errors of Penstock are printed without a traceback by each command. Anything else that reaches the top of a process is either
one of the hardware, which has a fix (`hardware_errors.py`), or an internal error, which is to be reported.
"""

from __future__ import annotations

import functools
import os
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from penstock.protocol.hardware_errors import fault_of
from penstock.protocol.secret_values import scrub

_PACKAGE = Path(__file__).parent.parent  # its files are named relative to it
EXIT_CODE = 128 + 13  # as a shell reports a process that SIGPIPE ended


def install(service: str) -> None:
    sys.excepthook = functools.partial(_report, service)


def explain(service: str, err: BaseException) -> str:
    """Return one line: which process, what happened, where, and what to do; of a group its first error."""
    if (fault := fault_of(err)) is not None:
        return scrub(f"penstock {service}: {fault.text(service)}")
    while isinstance(err, BaseExceptionGroup):
        err = err.exceptions[0]
    what = " ".join(scrub(f"{type(err).__name__}: {err}").split())[:500]
    return f"penstock {service}: internal error, please report it with the traceback above: {what}{_place(err)}"


def _place(err: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(err.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_PACKAGE):
            return f" ({path.relative_to(_PACKAGE)}:{frame.lineno} in {frame.name})"
    return ""


def _report(service: str, kind: type[BaseException], err: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(scrub("".join(traceback.format_exception(kind, err, trace))))
    if isinstance(err, Exception):
        sys.stderr.write(explain(service, err) + "\n")


@contextmanager
def ends_quietly() -> Iterator[None]:
    """Write all output before the block ends; exit with EXIT_CODE if nothing reads standard output any more.

    A broken pipe of the command itself is still an error.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        sys.exit(EXIT_CODE)


def _has_lost_its_reader(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
