"""`python -m penstock.trainer train run.toml [overrides]`: one rank of the trainer, from the run file to the exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence

import structlog

from penstock.protocol import logs
from penstock.protocol.config.run_file import config_document, load, split_arguments
from penstock.protocol.errors import PenstockError
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer")

MISTAKE = 2  # exit code of an error that is explained


def main(arguments: Sequence[str]) -> int:
    """Train; returns 0, 130 or 143 when a signal asked to stop, 2 for an error that is explained on stderr."""
    files, overrides = split_arguments(arguments)
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ)
    settings = loaded.settings
    logs.configure("trainer")
    from penstock.trainer.assemble import train  # noqa: PLC0415  a mistake in the run file need not wait for torch
    from penstock.trainer.ranks import Ranks  # noqa: PLC0415

    ranks = Ranks()
    stop = threading.Event()
    code = 0
    signals = _stop_on_signals(stop, is_leader=ranks.is_leader)
    config = (json.dumps(config_document(loaded), indent=1) + "\n").encode()
    try:
        train(settings, config, ranks, stop)
        code = 128 + signals[0] if signals else 0
    except PenstockError as err:
        log.debug("the run ends", exc_info=True)
        sys.stderr.write(f"{err}\n")
        code = MISTAKE
    ranks.leave(code)
    return code


def _stop_on_signals(stop: threading.Event, *, is_leader: bool) -> list[int]:
    """Make the first SIGINT or SIGTERM ask for a checkpoint and the end, and the second one end at once.

    The other ranks ignore both: rank 0 tells them when it is over.
    """
    received: list[int] = []

    def ask(number: int, _: object) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask if is_leader else signal.SIG_IGN)
    return received
