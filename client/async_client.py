"""`penstock.AsyncClient`: `Client` with coroutines, and its handles; each method calls the plain one in a thread."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self

from penstock.client.client import LOCAL, Client, Handle, Model, Rewards, Settings
from penstock.client.data_files import Data
from penstock.client.events import Event
from penstock.client.handles import FineTuning, Run
from penstock.client.metrics import Metrics
from penstock.client.processes import State

if TYPE_CHECKING:
    from penstock.console.evaluation_results import EvaluationResult


_SLICE_S = 0.25  # a wait that is cancelled occupies its thread so long


class _AsyncHandle(Generic[Handle]):
    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    @property
    def id(self) -> str:
        """Name of the run."""
        return self._handle.id

    @property
    def folder(self) -> Path | None:
        """The run's folder; None for one on another machine."""
        return self._handle.folder

    async def state(self) -> State:
        """See `Run.state`."""
        return await asyncio.to_thread(lambda: self._handle.state)

    async def wait(self, timeout: float | None = None) -> Self:  # noqa: ASYNC109 - the same arguments as Run.wait
        """See `Run.wait`."""
        await _wait(self._handle.wait, timeout)
        return self

    async def metrics(self, kind: Literal["step", "eval"] = "step") -> Metrics:
        """See `Run.metrics`."""
        return await asyncio.to_thread(self._handle.metrics, kind)

    async def model(self) -> Path:
        """See `Run.model` and `FineTuning.model`."""
        return await asyncio.to_thread(lambda: self._handle.model)

    async def stop(self) -> None:
        """See `Run.stop`."""
        await asyncio.to_thread(self._handle.stop)

    async def close(self) -> None:
        """See `Run.close`."""
        await asyncio.to_thread(self._handle.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncRun(_AsyncHandle[Run]):
    """`Run` with coroutines; what reads or waits is one, also where `Run` has a property."""

    def __init__(self, run: Run) -> None:
        """Called by `AsyncClient`."""
        super().__init__(run)
        self.run = run

    async def step(self) -> int:
        """See `Run.step`."""
        return await asyncio.to_thread(lambda: self._handle.step)

    async def events(self) -> AsyncIterator[Event]:
        """See `Run.events`."""
        arriving = self._handle._arriving()
        over = object()
        while (event := await asyncio.to_thread(next, arriving, over)) is not over:
            if isinstance(event, Event):
                yield event

    async def pause(self) -> None:
        """See `Run.pause`."""
        await asyncio.to_thread(self._handle.pause)

    async def resume(self) -> None:
        """See `Run.resume`."""
        await asyncio.to_thread(self._handle.resume)

    async def checkpoint(self) -> Path | None:
        """See `Run.checkpoint`."""
        return await asyncio.to_thread(self._handle.checkpoint)

    async def weights(self) -> list[dict[str, Any]]:
        """See `Run.weights`."""
        return await asyncio.to_thread(self._handle.weights)

    async def export(self, to: str | Path, version: int | None = None) -> Path:
        """See `Run.export`."""
        return await asyncio.to_thread(self._handle.export, to, version)

    async def report(self) -> Path:
        """See `Run.report`."""
        return await asyncio.to_thread(lambda: self._handle.report)

    async def summary(self) -> dict[str, Any]:
        """See `Run.summary`."""
        return await asyncio.to_thread(self._handle.summary)

    async def chat(
        self, prompt: str | Sequence[dict[str, str]], *, temperature: float = 0.0, max_tokens: int | None = None
    ) -> str:
        """See `Run.chat`."""
        return await asyncio.to_thread(self._handle.chat, prompt, temperature=temperature, max_tokens=max_tokens)


class AsyncFineTuning(_AsyncHandle[FineTuning]):
    """`FineTuning` with coroutines."""

    def __init__(self, training: FineTuning) -> None:
        """Called by `AsyncClient`."""
        super().__init__(training)
        self.training = training


class AsyncClient:
    """`Client` for asyncio: the same arguments, and each method a coroutine.

        async with penstock.AsyncClient() as client:
            run = await client.train(model="models/Qwen3-0.6B", data=rows, reward=my_function)
            async for event in run.events():
                print(event.kind)
            await run.wait()

    A reward function is called on a thread; one that is ``async`` runs on that thread's own event loop.
    """

    def __init__(self, where: str = LOCAL, *, token: str | None = None, runs: str | os.PathLike[str] = "runs") -> None:
        """See `Client`."""
        self.client = Client(where, token=token, runs=runs)

    async def train(
        self,
        *,
        model: Model,
        data: Data | Settings,
        reward: Rewards,
        algorithm: str | Settings = "async_grpo",
        run_id: str | None = None,
        workers: int = 2,
        **settings: Any,
    ) -> AsyncRun:
        """See `Client.train`."""
        given = {"model": model, "data": data, "reward": reward, "algorithm": algorithm, "run_id": run_id}
        return AsyncRun(await asyncio.to_thread(self.client.train, **given, workers=workers, **settings))

    async def run(self, run_id: str) -> AsyncRun:
        """See `Client.run`."""
        return AsyncRun(await asyncio.to_thread(self.client.run, run_id))

    async def sft(
        self, *, model: Model, data: Data | Settings, run_id: str | None = None, **settings: Any
    ) -> AsyncFineTuning:
        """See `Client.sft`."""
        return AsyncFineTuning(
            await asyncio.to_thread(self.client.sft, model=model, data=data, run_id=run_id, **settings)
        )

    async def dpo(
        self, *, model: Model, data: Data | Settings, run_id: str | None = None, **settings: Any
    ) -> AsyncFineTuning:
        """See `Client.dpo`."""
        return AsyncFineTuning(
            await asyncio.to_thread(self.client.dpo, model=model, data=data, run_id=run_id, **settings)
        )

    async def evaluate(self, target: Any, data: Data, **options: Any) -> EvaluationResult:
        """See `Client.evaluate`; ``target`` may also be a handle of this client."""
        if isinstance(target, AsyncRun | AsyncFineTuning):
            target = target._handle
        return await asyncio.to_thread(self.client.evaluate, target, data, **options)

    async def close(self) -> None:
        """See `Client.close`."""
        await asyncio.to_thread(self.client.close)

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
