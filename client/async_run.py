"""The handles of `AsyncClient`: each method calls that of the plain handle in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from penstock.client.events import Event
from penstock.client.fine_tuning import FineTuning
from penstock.client.metrics import Metrics
from penstock.client.processes import State
from penstock.client.run import Run

_SLICE_S = 0.25  # a wait that is cancelled occupies its thread so long


class AsyncRun:
    """`Run` with coroutines; what reads or waits is one, also where `Run` has a property."""

    def __init__(self, run: Run) -> None:
        """Called by `AsyncClient`."""
        self.run = run

    @property
    def id(self) -> str:
        """Name of the run."""
        return self.run.id

    @property
    def folder(self) -> Path | None:
        """The run's folder; None for a run on another machine."""
        return self.run.folder

    async def state(self) -> State:
        """See `Run.state`."""
        return await asyncio.to_thread(lambda: self.run.state)

    async def step(self) -> int:
        """See `Run.step`."""
        return await asyncio.to_thread(lambda: self.run.step)

    async def wait(self, timeout: float | None = None) -> Self:  # noqa: ASYNC109 - the same arguments as Run.wait
        """See `Run.wait`."""
        await _wait(self.run.wait, timeout)
        return self

    async def metrics(self, kind: Literal["step", "eval"] = "step") -> Metrics:
        """See `Run.metrics`."""
        return await asyncio.to_thread(self.run.metrics, kind)

    async def events(self) -> AsyncIterator[Event]:
        """See `Run.events`."""
        arriving = self.run._arriving()
        over = object()
        while (event := await asyncio.to_thread(next, arriving, over)) is not over:
            if isinstance(event, Event):
                yield event

    async def pause(self) -> None:
        """See `Run.pause`."""
        await asyncio.to_thread(self.run.pause)

    async def resume(self) -> None:
        """See `Run.resume`."""
        await asyncio.to_thread(self.run.resume)

    async def stop(self) -> None:
        """See `Run.stop`."""
        await asyncio.to_thread(self.run.stop)

    async def checkpoint(self) -> Path | None:
        """See `Run.checkpoint`."""
        return await asyncio.to_thread(self.run.checkpoint)

    async def weights(self) -> list[dict[str, Any]]:
        """See `Run.weights`."""
        return await asyncio.to_thread(self.run.weights)

    async def export(self, to: str | Path, version: int | None = None) -> Path:
        """See `Run.export`."""
        return await asyncio.to_thread(self.run.export, to, version)

    async def model(self) -> Path:
        """See `Run.model`."""
        return await asyncio.to_thread(lambda: self.run.model)

    async def report(self) -> Path:
        """See `Run.report`."""
        return await asyncio.to_thread(lambda: self.run.report)

    async def summary(self) -> dict[str, Any]:
        """See `Run.summary`."""
        return await asyncio.to_thread(self.run.summary)

    async def chat(
        self, prompt: str | Sequence[dict[str, str]], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        """See `Run.chat`."""
        return await asyncio.to_thread(self.run.chat, prompt, temperature=temperature, max_tokens=max_tokens)

    async def close(self) -> None:
        """See `Run.close`."""
        await asyncio.to_thread(self.run.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncFineTuning:
    """`FineTuning` with coroutines."""

    def __init__(self, training: FineTuning) -> None:
        """Called by `AsyncClient`."""
        self.training = training

    @property
    def id(self) -> str:
        """Name of the run whose folder it has."""
        return self.training.id

    @property
    def folder(self) -> Path | None:
        """See `FineTuning.folder`."""
        return self.training.folder

    async def state(self) -> State:
        """See `FineTuning.state`."""
        return await asyncio.to_thread(lambda: self.training.state)

    async def model(self) -> Path:
        """See `FineTuning.model`."""
        return await asyncio.to_thread(lambda: self.training.model)

    async def wait(self, timeout: float | None = None) -> Self:  # noqa: ASYNC109 - the same arguments as FineTuning.wait
        """See `FineTuning.wait`."""
        await _wait(self.training.wait, timeout)
        return self

    async def metrics(self, kind: Literal["step", "eval"] = "step") -> Metrics:
        """See `FineTuning.metrics`."""
        return await asyncio.to_thread(self.training.metrics, kind)

    async def stop(self) -> None:
        """See `FineTuning.stop`."""
        await asyncio.to_thread(self.training.stop)

    async def close(self) -> None:
        """See `FineTuning.close`."""
        await asyncio.to_thread(self.training.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _wait(wait: Callable[[float], object], timeout_s: float | None) -> None:
    """Wait in slices, so that a wait that is cancelled ends; raises what ``wait`` raises, TimeoutError at the end."""
    started = time.monotonic()
    while True:
        left_s = _SLICE_S if timeout_s is None else timeout_s - (time.monotonic() - started)
        try:
            await asyncio.to_thread(wait, max(0.0, min(_SLICE_S, left_s)))
        except TimeoutError:
            if left_s <= 0.0:
                raise TimeoutError(f"not over after {timeout_s} s; it continues: wait again, or stop() it") from None
        else:
            return
