"""SIGINT and SIGTERM of a training command: the first one asks for a checkpoint, the second one ends at once."""

from __future__ import annotations

import signal
import threading


def stop_on_signals(stop: threading.Event, *, is_leader: bool) -> list[int]:
    """Make the first SIGINT or SIGTERM request a checkpoint and a stop, and the second one stop at once.

    The other ranks ignore both: rank 0 ends them with its last order.
    """
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
