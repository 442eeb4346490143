"""Refuses a run folder that only some of the nodes see: every rank writes its part of a checkpoint into it."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from penstock.protocol.errors import ConfigError
from penstock.trainer.ranks import Ranks

_VISIBLE_S = 10.0  # a file that one node has made may be seen late on another, by a network file system


def check_shared(folder: Path, ranks: Ranks, *, deadline_s: float = _VISIBLE_S) -> None:
    """Make a file on rank 0 and look for it on every rank (all ranks); raises ConfigError on each if one does not see it."""
    if ranks.num_ranks == 1:
        return
    name = ""
    if ranks.is_leader:
        name = f".seen-by-all-{secrets.token_hex(8)}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    mark = folder / ranks.broadcast(name or None)
    deadline = time.monotonic() + deadline_s
    while not (is_seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    (num_seeing,) = ranks.sum([float(is_seen)])
    if ranks.is_leader:
        mark.unlink()
    if num_seeing < ranks.num_ranks:
        raise ConfigError(
            f"run.dir: {folder.absolute()} of rank 0 is seen by {num_seeing:.0f} of {ranks.num_ranks} ranks; every rank writes its "
            "part of a checkpoint there: set run.dir to a folder on storage that all nodes share, at the same path"
        )
