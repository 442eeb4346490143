"""What a process writes of its errors: a line after an unexpected exception, nothing when its reader has ended.

Neither secrets nor control characters of others are in it.

Errors of Penstock are printed without a traceback by each command. Anything else that reaches the top of a process is
either one of the hardware, which has a fix (`hardware_errors.py`), or an internal error, which is to be reported.
"""

from __future__ import annotations

import functools
import os
import re
import select
import sys
import traceback
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from penstock.protocol.hardware_errors import fault_of
from penstock.protocol.secret_values import scrub

_PACKAGE = Path(__file__).parent.parent  # its files are named relative to it
EXIT_CODE = 128 + 13  # as a shell reports a process that SIGPIPE ended
_KEPT = frozenset("\n\t\u200c\u200d")  # the last two join letters of Persian and parts of emoji
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0e\U000e0000-\U000e0fff]"
)  # though letters or marks by their category


def printable(text: object) -> str:
    """Return a text with control characters as their escapes: printed, they could change what a terminal shows.

    So are marks of direction, characters without a width, tags and U+2028. Line feeds and tabs are kept.
    """
    shown = str(text)
    if shown.isprintable() and not _INVISIBLE.search(shown):
        return shown
    return "".join(c if c in _KEPT or not _is_control(c) else c.encode("unicode_escape").decode() for c in shown)


def error_text(text: object) -> str:
    """Return a `printable` text without known secrets, for a command's error: it may quote a file of others."""
    return printable(scrub(str(text)))


def _is_control(letter: str) -> bool:
    return unicodedata.category(letter) in {"Cc", "Cf", "Cs", "Zl", "Zp"} or _INVISIBLE.match(letter) is not None


def install(service: str) -> None:
    sys.excepthook = functools.partial(_report, service)


def explain(service: str, err: BaseException) -> str:
    """Return one line: which process, what happened, where, and what to do; of a group its first error."""
    if (fault := fault_of(err)) is not None:
        return error_text(f"penstock {service}: {fault.text(service)}")
    while isinstance(err, BaseExceptionGroup):
        err = err.exceptions[0]
    what = " ".join(error_text(f"{type(err).__name__}: {err}").split())[:500]
    return f"penstock {service}: internal error, please report it with the traceback above: {what}{_place(err)}"


def _place(err: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(err.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_PACKAGE):
            return f" ({path.relative_to(_PACKAGE)}:{frame.lineno} in {frame.name})"
    return ""


def _report(service: str, kind: type[BaseException], err: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(error_text("".join(traceback.format_exception(kind, err, trace))))
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
