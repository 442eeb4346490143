"""What ends a training command: SIGINT and SIGTERM, the first one with a checkpoint, and the end of torchrun."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

from penstock.protocol.parent_death import end_with_parent

_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"


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


def end_with_torchrun(environ: Mapping[str, str]) -> None:
    """Have the kernel kill this rank when the torchrun that started it ends: one that is killed leaves its ranks training."""
    if _OF_TORCHRUN not in environ:
        return
    if not end_with_parent(os.getppid()):
        signal.raise_signal(signal.SIGKILL)
