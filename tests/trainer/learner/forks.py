"""Trainer processes that start fast: each is forked from one that has loaded all modules.

Each has its own pid to stop and to kill, and shares nothing but the loaded code. Several ranks use a store that the
test holds, as torchrun's agent does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests import forked
from torch.distributed import TCPStore


class _Trainer(forked.Popen):
    later = (forked.TRAINER,)


class Fork:
    """Runs the ``main`` of a module with arguments in one process, or in one for each rank."""

    def __init__(self, folder: Path, module: str, *arguments: str, num_ranks: int = 1) -> None:
        """Start it; its output goes to files in ``folder``."""
        name = os.urandom(3).hex()
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        for path in (self._out, self._err):
            path.touch()
        environ: dict[str, str] = {}
        if num_ranks > 1:
            self._store = TCPStore(
                "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
            )
            environ = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(num_ranks),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
        self.processes = []
        command = forked.call(module, *arguments, given="sys.argv[1:]")
        for rank in range(num_ranks):
            own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else environ
            with self._out.open("a") as out, self._err.open("a") as err:
                given = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "env": {**os.environ, **own}}
                self.processes.append(_Trainer(command, cwd=forked.ROOT, **given))

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def signal(self, number: signal.Signals) -> None:
        self.processes[0].send_signal(number)

    def wait(self, expected: int = 0, deadline_s: float = 300.0) -> str:
        """Wait for the exit and return stdout; fails with its output for another exit code (-9: killed)."""
        codes = []
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(deadline_s)
            codes.append(process.poll())
        assert codes == [expected] * len(codes), f"exit codes {codes}\n{self.out[-4000:]}{self.err[-4000:]}"
        return self.out

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(60.0)


def results(
    folder: Path, module: str, *arguments: str, ranks: Sequence[int] = (1,), deadline_s: float = 300.0
) -> dict[int, Any]:
    """Run a module by each of these numbers of ranks, all at once; return the JSON on the last line of each output."""
    forks = {num: Fork(folder, module, *arguments, num_ranks=num) for num in ranks}
    try:
        return {num: json.loads(fork.wait(deadline_s=deadline_s).splitlines()[-1]) for num, fork in forks.items()}
    finally:
        for fork in forks.values():
            fork.kill()


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
