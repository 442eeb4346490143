"""Trainer processes that start fast: each is forked from one that has loaded all modules, see `tests.forked`.

Each has its own pid to stop and to kill. Several ranks use a store that the test holds, as torchrun's agent does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from tests.forked import ForkedProcess
from torch.distributed import TCPStore

_LOADED = "tests.trainer.learner.loaded"


class Fork:
    """Runs the ``main`` of a module with arguments in one process, or in one for each rank."""

    def __init__(self, folder: Path, module: str, *arguments: str, num_ranks: int = 1) -> None:
        """Start it; its output goes to files in ``folder``."""
        name = os.urandom(3).hex()
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        for path in (self._out, self._err):
            path.touch()
        environ = dict(os.environ)
        if num_ranks > 1:
            self._store = TCPStore(
                "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
            )
            environ |= {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(num_ranks),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
        self.processes = []
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}
            self.processes.append(
                ForkedProcess(
                    _LOADED, arguments=[module, *arguments], log=self._out, err=self._err, environ=environ | own
                )
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.processes[0].pid, number)

    def wait(self, expected: int = 0, deadline_s: float = 300.0) -> str:
        """Wait for the exit and return stdout; fails with its output for another exit code (-9: killed)."""
        deadline, codes = time.monotonic() + deadline_s, []
        for process in self.processes:
            try:
                codes.append(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        assert codes == [expected] * len(codes), f"exit codes {codes}\n{self.out[-4000:]}{self.err[-4000:]}"
        return self.out

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(60.0)


_PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "replay": ("forensics.replay",),
    **{name: ("fine_tuning", name) for name in ("sft", "dpo", "rm")},
}


class Command(Fork):
    """``python -m penstock.trainer ...``, or the package above it that has the command."""

    def __init__(self, folder: Path, command: str, *arguments: str, num_ranks: int = 1) -> None:
        """Start it; its output goes to files in ``folder``."""
        package, *given = _PROGRAMS.get(command, ("trainer", command))
        super().__init__(folder, f"penstock.{package}.__main__", *given, *arguments, num_ranks=num_ranks)


class ForkedTrainer(ForkedProcess):
    """``python -m penstock.trainer ...`` in a session of its own."""

    def __init__(self, arguments: Sequence[str], *, log: Path, environ: Mapping[str, str]) -> None:
        """Start it with a whole environment; its output is appended to ``log``."""
        given = ["penstock.trainer.__main__", *arguments]
        super().__init__(_LOADED, arguments=given, log=log, environ=environ, new_session=True)
