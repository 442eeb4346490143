"""The handle of a training on given answers: `Client.sft` and `Client.dpo`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from penstock.client import metrics as metrics_by_step
from penstock.client.metrics import Metrics
from penstock.client.processes import LocalProcess, State
from penstock.console.report import curves
from penstock.protocol.errors import PenstockError


class FineTuning:
    """A training that `Client.sft` or `Client.dpo` started; it needs no NATS, S3 or engine."""

    def __init__(self, verb: str, folder: Path, output: Path, process: LocalProcess) -> None:
        """Called by `Client`."""
        self._verb = verb
        self._folder = folder
        self._output = output
        self._process = process

    def __repr__(self) -> str:
        return f"<penstock {self._verb} {self.id}: {self.state}>"

    @property
    def id(self) -> str:
        """Name of the run whose folder it has."""
        return self._folder.name

    @property
    def state(self) -> State:
        """How it is: "running", "finished", "stopped" or "failed"."""
        return self._process.state

    @property
    def folder(self) -> Path:
        """The folder with its run file, logs and metrics."""
        return self._folder

    @property
    def model(self) -> Path:
        """The model folder that it wrote, for `Client.train`; raises PenstockError before it is finished."""
        if self.state != "finished":
            raise PenstockError(f"{self._verb} {self.id} has no model: it is {self.state}; wait() for its end")
        return self._output

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until it is over and return this handle.

        Args:
            timeout: Seconds; None waits as long as the process runs.

        Raises:
            TimeoutError: It was still going on after ``timeout``; it continues.
            RunFailed: It ended with an error; the text has the end of its log.
        """
        if not self._process.wait(timeout):
            raise TimeoutError(
                f"{self._verb} {self.id} was not over after {timeout} s; it continues: wait again, or stop() it"
            )
        if self.state == "failed":
            raise self._process.failure(f"{self._verb} {self.id}")
        return self

    def metrics(self, kind: Literal["step", "eval"] = "step") -> Metrics:
        """Return the figures of all steps so far, or of all validations, as one array for each figure."""
        rows = curves.rows(self._folder / f"{self._verb}-training")
        return metrics_by_step.from_rows(row for row in rows if row.get("kind") == kind)

    def stop(self) -> None:
        """Stop it after a checkpoint; idempotent."""
        self._process.stop()

    def close(self) -> None:
        """Stop it if it is going on; idempotent."""
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
