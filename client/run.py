"""The handle of a run: follow it, steer it, and use its model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from penstock.client import metrics as metrics_by_step
from penstock.client.backend import RunBackend
from penstock.client.conversation import Conversation, has_final_model
from penstock.client.events import Event
from penstock.client.metrics import Metrics
from penstock.client.processes import State
from penstock.console.report import report
from penstock.protocol.errors import PenstockError


class Run:
    """A run that `Client.train` started.

    It goes on without this handle being used, until it is over or stopped; on this machine also until this Python process ends.
    """

    def __init__(self, backend: RunBackend) -> None:
        """Called by `Client`."""
        self._backend = backend
        self._conversation: Conversation | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<penstock run {self.id}: {self.state}>"

    @property
    def id(self) -> str:
        """Name of the run, as the verbs of `penstock` take it."""
        return self._backend.run_id

    @property
    def state(self) -> State:
        """How the run is: "running", "paused", "finished", "stopped" or "failed"."""
        return self._backend.state

    @property
    def folder(self) -> Path | None:
        """The run's folder with its logs, metrics, checkpoints and report; None for a run on another machine."""
        return self._backend.folder

    @property
    def step(self) -> int:
        """The last optimizer step; 0 before the first one."""
        return max((row["step"] for row in self._backend.rows() if isinstance(row.get("step"), int)), default=0)

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the run is over and return this handle.

        Args:
            timeout: Seconds; None waits as long as the run's processes run.

        Raises:
            TimeoutError: The run was still going on after ``timeout``; it continues.
            RunFailed: It ended with an error; the text has the end of its log.
        """
        if not self._backend.wait(timeout):
            raise TimeoutError(f"run {self.id} was not over after {timeout} s; it continues: wait again, or stop() it")
        if self.state == "failed":
            raise self._backend.failure()
        return self

    def metrics(self, kind: Literal["step", "eval"] = "step") -> Metrics:
        """Return the figures of all steps so far, or of all evaluations, as one array for each figure.

        docs/metrics.md describes them. ``run.metrics().to_pandas()`` is a data frame.
        """
        return metrics_by_step.from_rows(row for row in self._backend.rows() if row.get("kind") == kind)

    def events(self) -> Iterator[Event]:
        """Yield the run's events from its first one, as they are published, until it is over.

        Of a run that is over already, its steps and evaluations.
        """
        return (event for event in self._arriving() if event is not None)

    def _arriving(self) -> Iterator[Event | None]:
        """Yield what `events` does, and None several times a second while none arrives."""
        return self._backend.events()

    def pause(self) -> None:
        """Pause the run: no new work is issued, what is under way is trained, a checkpoint is written."""
        self._backend.pause()

    def resume(self) -> None:
        """Have a paused or stopped run go on from its newest checkpoint."""
        self._backend.resume()

    def stop(self) -> None:
        """Stop the run's processes in order, after a checkpoint; `resume` continues it. Idempotent."""
        self._end_conversation()
        self._backend.stop()

    def checkpoint(self) -> Path | None:
        """Return the folder of the newest checkpoint; None before the first one, and for a run on another machine."""
        folder = self.folder
        found = sorted((folder / "checkpoints").glob("step*[0-9]")) if folder is not None else []
        return found[-1] if found else None

    def weights(self) -> list[dict[str, Any]]:
        """Return the stored versions of the weights, oldest first, as `penstock weights RUN --json` prints them."""
        return self._backend.versions()

    def export(self, to: str | Path, version: int | None = None) -> Path:
        """Write a version as a Hugging Face model folder, which must not exist; without ``version`` the best one."""
        folder = Path(to).absolute()
        self._backend.export(version, folder)
        return folder

    @property
    def model(self) -> Path:
        """The model folder that the run wrote at its end; raises PenstockError before that."""
        if self.folder is None or not has_final_model(self):
            raise PenstockError(
                f"run {self.id} has no model yet: it is written when the run ends; wait() for it, or export() a version"
            )
        return self.folder / "model"

    @property
    def report(self) -> Path:
        """The report that is written when the run ends; raises PenstockError before that."""
        folder = self.folder
        if folder is None or not (folder / "report.md").is_file():
            raise PenstockError(f"run {self.id} has no report yet: it is written when the run ends; wait() for it")
        return folder / "report.md"

    def summary(self) -> dict[str, Any]:
        """Return the figures of the report, as `penstock train --json` prints them; empty before the run's end."""
        found = report.stored_summary(self.folder) if self.folder is not None else None
        return {} if found is None else found.model_dump(mode="json")

    def chat(
        self, prompt: str | Sequence[dict[str, str]], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        """Return the model's answer to a prompt, or to a conversation: ``[{"role": "user", "content": ...}, ...]``.

        The model is the run's own; while the run is going on, its newest stored version. The first call starts an engine.

        Raises:
            ChatRefused: The engine refuses the conversation, for example because it is too long.
            PenstockError: There is no model, or the engine failed.
        """
        with self._lock:
            if self._conversation is None or self._conversation.is_outdated(self):
                self._end_conversation()
                self._conversation = Conversation(self)
            return self._conversation.answer(prompt, temperature=temperature, max_tokens=max_tokens)

    def close(self) -> None:
        """End the engine of `chat` and what serves the run's reward; a run that was started on this machine is stopped. Idempotent."""
        self._end_conversation()
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_conversation(self) -> None:
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            conversation.close()
