"""A deadline for one part of a test, which then fails by itself instead of by the time limit of the whole test."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Raise AssertionError in what still runs after ``seconds``. For the main thread; pytest-timeout's timer goes on afterwards."""

    def fail(*_: object) -> None:
        raise AssertionError(f"still running after {seconds:g} s")

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, fail)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, remaining - (time.monotonic() - started)))
