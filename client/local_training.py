"""A training on given answers on this machine: the process of `penstock sft` or `dpo`, and what it writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.client.errors import RunFailed
from penstock.client.processes import LocalProcess, State
from penstock.console.report import curves, fine_tuned


class LocalTraining:
    """One training of this machine; it ends with this Python process."""

    def __init__(self, verb: str, folder: Path, output: Path, process: LocalProcess) -> None:
        self.run_id = folder.name
        self.folder = folder
        self.output = output
        self._verb = verb
        self._process = process

    @property
    def state(self) -> State:
        return self._process.state

    def wait(self, timeout_s: float | None) -> bool:
        return self._process.wait(timeout_s)

    def failure(self) -> RunFailed:
        return self._process.failure(f"{self._verb} {self.run_id}")

    def rows(self) -> Iterator[Mapping[str, Any]]:
        return curves.rows(fine_tuned.training_folder(self.folder, self._verb))

    def stop(self) -> None:
        self._process.stop()

    def close(self) -> None:
        self.stop()
