"""The engine behind `Run.chat`: one model, one process, kept for the next prompt."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.client.processes import GOING_ON, State
from penstock.console.tools.chat import ChatEngine, answer_length, trained_with
from penstock.protocol.errors import PenstockError


class HasModel(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def state(self) -> State: ...

    @property
    def folder(self) -> Path | None: ...

    @property
    def model(self) -> Path:
        """Its final model; raises PenstockError before that exists."""
        ...

    def weights(self) -> list[dict[str, Any]]: ...

    def export(self, to: str | Path, version: int | None = None) -> Path: ...


class Conversation:
    """An engine that serves the newest weights that a run had when this was made."""

    def __init__(self, run: HasModel) -> None:
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

    def is_outdated(self, run: HasModel) -> bool:
        """Return True if the run has ended since, so that its final model is to answer."""
        return not self._is_final and has_final_model(run)

    def answer(self, prompt: str | Sequence[dict[str, str]], *, temperature: float, max_tokens: int | None) -> str:
        """Return the answer to a prompt, after the run's system prompt, or to a whole conversation; raises ChatEngineError."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
        if self._system and self._engine.is_chat and isinstance(prompt, str):
            messages = [{"role": "system", "content": self._system}, *messages]
        return self._engine.answer(messages, temperature=temperature, max_tokens=max_tokens or self._max_tokens)

    def close(self) -> None:
        self._engine.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _newest(self, run: HasModel) -> Path:
        versions = run.weights()
        if not versions:
            raise PenstockError(f"run {run.id} has no weights yet: wait for its first step")
        self._scratch = Path(tempfile.mkdtemp(prefix="penstock-chat-"))
        return run.export(self._scratch / "model", int(versions[-1]["version"]))


def has_final_model(run: HasModel) -> bool:
    return run.state not in GOING_ON and run.folder is not None and (run.folder / "model" / "config.json").is_file()
