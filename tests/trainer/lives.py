"""Lives of a trainer that start quickly: a fork server has loaded torch and DeepSpeed, each life is a fork of it.

Each is a process of its own, with a pid to stop and to kill; nothing but the loaded code is shared.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["trainer.assemble", "trainer.train_command", "tests.trainer.lives"])


def _live(log: str, arguments: Sequence[str]) -> None:
    with Path(log).open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    import torch

    from trainer import train_command

    torch.set_num_threads(1)
    sys.exit(train_command.main(arguments))


class Life:
    """One life of a trainer, begun at once."""

    def __init__(self, run_file: Path, *overrides: str) -> None:
        """Start it on a run file."""
        self._log = run_file.with_name(f"life-{os.urandom(3).hex()}.log")
        self.process = _CONTEXT.Process(target=_live, args=(str(self._log), [str(run_file), *overrides]), daemon=True)
        self.process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self._log.read_text() if self._log.exists() else ""

    def wait(self, expected: int = 0, deadline_s: float = 120.0) -> str:
        """Wait for the end; fails with the log when it is another one than expected (-9: killed)."""
        self.process.join(deadline_s)
        assert self.process.exitcode == expected, f"exit code {self.process.exitcode}\n{self.log[-4000:]}"
        return self.log

    def kill(self) -> None:
        """End it with SIGKILL, whatever it does."""
        self.process.kill()
        self.process.join(10.0)
