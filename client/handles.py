"""The handles of runs and trainings: follow one, steer it, and use its model."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from penstock.client.events import Event
from penstock.client.metrics import Metrics, metrics_of_rows
from penstock.client.processes import GOING_ON, RunFailed, State
from penstock.console.report import report
from penstock.console.tools.chat import ChatEngine, answer_length, trained_with
from penstock.protocol.errors import PenstockError

AnyBackend = TypeVar("AnyBackend", bound="Backend")


class Backend(Protocol):
    """What a handle needs of the place where its run or training is: this machine, or behind a Runs API."""

    @property
    def run_id(self) -> str: ...

    @property
    def state(self) -> State: ...

    @property
    def folder(self) -> Path | None: ...

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; returns False when ``timeout_s`` passed first."""
        ...

    def failure(self) -> RunFailed: ...

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of its metrics: ``kind`` is "step" or "eval"."""
        ...

    def stop(self) -> None:
        """Stop it after a checkpoint."""
        ...

    def close(self) -> None: ...


class TrainingBackend(Backend, Protocol):
    @property
    def output(self) -> Path:
        """The model folder that it writes at its end."""
        ...


class RunBackend(Backend, Protocol):
    def events(self) -> Iterator[Event | None]:
        """Yield its events until it is over, and None several times a second while none arrives."""
        ...

    def pause(self) -> None:
        """Have the trainer stop issuing work."""
        ...

    def resume(self) -> None:
        """Have a paused or stopped run go on."""
        ...

    def versions(self) -> list[dict[str, Any]]:
        """Return its stored versions, oldest first."""
        ...

    def export(self, version: int | None, to: Path) -> None:
        """Write a version as a model folder; without a ``version`` the one with the best evaluation."""
        ...


class _Handle(Generic[AnyBackend]):
    def __init__(self, backend: AnyBackend, what: str) -> None:
        self._backend = backend
        self._what = what

    def __repr__(self) -> str:
        return f"<penstock {self._what} {self.id}: {self.state}>"

    @property
    def id(self) -> str:
        """Name of the run, as the verbs of `penstock` take it."""
        return self._backend.run_id

    @property
    def state(self) -> State:
        """How it is: "running", "paused", "finished", "stopped" or "failed"; of a console's also "queued"."""
        return self._backend.state

    @property
    def folder(self) -> Path | None:
        """The run's folder with its run file, logs, metrics, checkpoints and report; None for one on another machine."""
        return self._backend.folder

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until it is over and return this handle.

        Args:
            timeout: Seconds; None waits as long as its processes run.

        Raises:
            TimeoutError: It was still going on after ``timeout``; it continues.
            RunFailed: It ended with an error; the text has the end of its log.
        """
        if not self._backend.wait(timeout):
            what = f"{self._what} {self.id}"
            raise TimeoutError(f"{what} was not over after {timeout} s; it continues: wait again, or stop() it")
        if self.state == "failed":
            raise self._backend.failure()
        return self

    def metrics(self, kind: Literal["step", "eval"] = "step") -> Metrics:
        """Return the figures of all steps so far, or of all evaluations, as one array for each figure.

        docs/metrics.md describes them. ``run.metrics().to_pandas()`` is a data frame.
        """
        return metrics_of_rows(row for row in self._backend.rows() if row.get("kind") == kind)

    def stop(self) -> None:
        """Stop it after a checkpoint; idempotent. `Run.resume` continues a run."""
        self._backend.stop()

    def close(self) -> None:
        """Stop it if it was started on this machine and is going on; one of a console goes on. Idempotent."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Run(_Handle[RunBackend]):
    """A run that `Client.train` started.

    It goes on without this handle being used, until it is over or stopped; on this machine also until this Python process ends.
    """

    def __init__(self, backend: RunBackend) -> None:
        """Called by `Client`."""
        super().__init__(backend, "run")
        self._conversation: Conversation | None = None
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        """The last optimizer step; 0 before the first one."""
        return max((row["step"] for row in self._backend.rows() if isinstance(row.get("step"), int)), default=0)

    def events(self) -> Iterator[Event]:
        """Yield the run's events from its first one, as they are published, until it is over.

        Of a run that is over already, its steps and evaluations.
        """
        return (event for event in self._backend.events() if event is not None)

    def pause(self) -> None:
        """Pause the run: no new work is issued, what is under way is trained, a checkpoint is written."""
        self._backend.pause()

    def resume(self) -> None:
        """Have a paused or stopped run go on from its newest checkpoint."""
        self._backend.resume()

    def stop(self) -> None:
        """Stop the run's processes in order, after a checkpoint; `resume` continues it. Idempotent."""
        self._end_conversation()
        super().stop()

    def checkpoint(self) -> Path | None:
        """Return the folder of the newest checkpoint; None before the first one, and for a run on another machine."""
        folder = self.folder
        checkpoints = sorted((folder / "checkpoints").glob("step*[0-9]")) if folder is not None else []
        return checkpoints[-1] if checkpoints else None

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
        run_summary = report.stored_summary(self.folder) if self.folder is not None else None
        return {} if run_summary is None else run_summary.model_dump(mode="json")

    def chat(
        self, prompt: str | Sequence[dict[str, str]], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        """Return the model's answer to a prompt, or to a conversation: ``[{"role": "user", "content": ...}, ...]``.

        The model is that of the run; while the run is going on, its newest stored version. The first call starts an engine.

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
        super().close()

    def _end_conversation(self) -> None:
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            conversation.close()


class FineTuning(_Handle[TrainingBackend]):
    """A training that `Client.sft` or `Client.dpo` started; it needs no NATS, S3 or engine."""

    def __init__(self, verb: str, backend: TrainingBackend) -> None:
        """Called by `Client`."""
        super().__init__(backend, verb)

    @property
    def model(self) -> Path:
        """The model folder that it wrote, for `Client.train`: a path of the machine it ran on; PenstockError before it is finished."""
        if (state := self.state) != "finished":
            raise PenstockError(f"{self._what} {self.id} has no model: it is {state}; wait() for its end")
        return self._backend.output


class Conversation:
    """An engine that serves the newest weights that a run had when this was made."""

    def __init__(self, run: Run) -> None:
        """Start the engine and wait until it is ready; raises PenstockError."""
        self._scratch: Path | None = None
        self._is_final = has_final_model(run)
        model = run.model if self._is_final else self._newest(run)
        dtype, self._system = trained_with(run.folder) if run.folder is not None else ("float32", "")
        self._max_tokens = answer_length(model)
        self._engine = ChatEngine(model, device="cpu", dtype=dtype)
        try:
            self._engine.__enter__()
        except BaseException:
            self.close()
            raise

    def is_outdated(self, run: Run) -> bool:
        """Return True if the run has ended since, so that its final model is to answer."""
        return not self._is_final and has_final_model(run)

    def answer(self, prompt: str | Sequence[dict[str, str]], *, temperature: float, max_tokens: int | None) -> str:
        """Return the answer to a prompt, after the run's system prompt, or to a whole conversation; raises ChatEngineError."""
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
        )
        if self._system and self._engine.is_chat and isinstance(prompt, str):
            messages = [{"role": "system", "content": self._system}, *messages]
        return self._engine.answer(messages, temperature=temperature, max_tokens=max_tokens or self._max_tokens)

    def close(self) -> None:
        self._engine.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _newest(self, run: Run) -> Path:
        versions = run.weights()
        if not versions:
            raise PenstockError(f"run {run.id} has no weights yet: wait for its first step")
        self._scratch = Path(tempfile.mkdtemp(prefix="penstock-chat-"))
        return run.export(self._scratch / "model", int(versions[-1]["version"]))


def has_final_model(run: Run) -> bool:
    return run.state not in GOING_ON and run.folder is not None and (run.folder / "model" / "config.json").is_file()
