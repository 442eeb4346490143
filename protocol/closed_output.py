"""End a command without a traceback when the program that reads its output has ended, as `head` does."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 128 + 13  # as a shell reports a process that SIGPIPE ended


@contextmanager
def ends_quietly() -> Iterator[None]:
    """Write all output before the block ends; exit with EXIT_CODE if nothing reads standard output any more.

    A pipe of the command's own that breaks is still an error.
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
