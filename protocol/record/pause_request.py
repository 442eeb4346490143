"""The request to pause a run: a file in its folder, which the trainer reads and `penstock train` removes when it starts.

A trainer that sees it issues no new tasks, trains what is under way, writes a checkpoint and exits. One that crashes meanwhile
sees it again.
"""

from __future__ import annotations

from pathlib import Path

from penstock.protocol.errors import ConfigError

PAUSE = "pause-requested"


def request(folder: Path) -> None:
    """Ask the trainer of a run to pause; raises ConfigError when the folder cannot be written."""
    try:
        (folder / PAUSE).touch()
    except OSError as err:
        raise ConfigError(f"{folder / PAUSE} cannot be written ({err.strerror}); change its permissions") from None


def is_requested(folder: Path) -> bool:
    return (folder / PAUSE).exists()


def clear(folder: Path) -> None:
    """Withdraw the request; raises ConfigError when the folder cannot be written."""
    try:
        (folder / PAUSE).unlink(missing_ok=True)
    except OSError as err:
        raise ConfigError(f"{folder / PAUSE} cannot be removed ({err.strerror}); remove it") from None
