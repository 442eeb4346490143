"""The handle of a training on given answers: `Client.sft` and `Client.dpo`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from penstock.client import metrics as metrics_by_step
from penstock.client.backend import TrainingBackend
from penstock.client.metrics import Metrics
from penstock.client.processes import State
from penstock.protocol.errors import PenstockError


class FineTuning:
    """A training that `Client.sft` or `Client.dpo` started; it needs no NATS, S3 or engine."""

    def __init__(self, verb: str, backend: TrainingBackend) -> None:
        """Called by `Client`."""
        self._verb = verb
        self._backend = backend

    def __repr__(self) -> str:
        return f"<penstock {self._verb} {self.id}: {self.state}>"

    @property
    def id(self) -> str:
        """Name of the run whose folder it has."""
        return self._backend.run_id

    @property
    def state(self) -> State:
        """How it is: "running", "finished", "stopped" or "failed"; of a console's also "queued" and "paused"."""
        return self._backend.state

    @property
    def folder(self) -> Path | None:
        """The folder with its run file, logs and metrics; None for one on another machine."""
        return self._backend.folder

    @property
    def model(self) -> Path:
        """The model folder that it wrote, for `Client.train`: a path of the machine it ran on; PenstockError before it is finished."""
        if (state := self.state) != "finished":
            raise PenstockError(f"{self._verb} {self.id} has no model: it is {state}; wait() for its end")
        return self._backend.output

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until it is over and return this handle.

        Args:
            timeout: Seconds; None waits as long as the process runs.

        Raises:
            TimeoutError: It was still going on after ``timeout``; it continues.
            RunFailed: It ended with an error; the text has the end of its log.
        """
        if not self._backend.wait(timeout):
            raise TimeoutError(
                f"{self._verb} {self.id} was not over after {timeout} s; it continues: wait again, or stop() it"
            )
        if self.state == "failed":
            raise self._backend.failure()
        return self

    def metrics(self, kind: Literal["step", "eval"] = "step") -> Metrics:
        """Return the figures of all steps so far, or of all validations, as one array for each figure."""
        return metrics_by_step.from_rows(row for row in self._backend.rows() if row.get("kind") == kind)

    def stop(self) -> None:
        """Stop it after a checkpoint; idempotent."""
        self._backend.stop()

    def close(self) -> None:
        """Stop it if it was started on this machine and is going on; one of a console goes on. Idempotent."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
