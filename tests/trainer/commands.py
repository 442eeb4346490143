"""Trainer commands that start quickly: a fork server has loaded torch and DeepSpeed, each command is a fork of it."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["trainer.assemble", "trainer.replay", "trainer.train_command", "tests.trainer.commands"]
)


def _run(out: str, err: str, arguments: Sequence[str], environ: dict[str, str]) -> None:
    for number, path in ((1, out), (2, err)):
        with Path(path).open("a") as file:
            os.dup2(file.fileno(), number)
    os.environ.update(environ)
    import torch

    from trainer import __main__

    torch.set_num_threads(1)
    code = __main__.main(arguments)
    sys.stdout.flush()
    sys.exit(code)


class Command:
    """``python -m trainer ...`` begun at once, in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, **environ: str) -> None:
        """Start it; what it says goes to files in ``folder``."""
        name = os.urandom(3).hex()
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        for path in (self._out, self._err):
            path.touch()
        self.process = _CONTEXT.Process(
            target=_run, args=(str(self._out), str(self._err), arguments, environ), daemon=True
        )
        self.process.start()

    @property
    def err(self) -> str:
        """What it has said on stderr so far."""
        return self._err.read_text()

    def wait(self, expected: int = 0, deadline_s: float = 120.0) -> str:
        """Wait for the end and return stdout; fails with stderr when it is another end (-9: killed)."""
        self.process.join(deadline_s)
        assert self.process.exitcode == expected, (
            f"exit code {self.process.exitcode}\n{self._out.read_text()}{self.err}"
        )
        return self._out.read_text()
