"""`penstock.AsyncClient`: `Client` with coroutines, and its handles; each method calls the plain one in a thread."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from penstock.client.client import LOCAL, Client, Handle
from penstock.client.data_files import Data
from penstock.client.events import Event
from penstock.client.handles import FineTuning, Run
from penstock.client.processes import State

if TYPE_CHECKING:
    from penstock.console.evaluation_results import EvaluationResult


_SLICE_S = 0.25  # a wait that is cancelled occupies its thread so long

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
AsyncKind = TypeVar("AsyncKind", bound="_AsyncHandle[Any]")


def _in_thread(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Result]]:
    """Return a method of a plain handle as a coroutine of the asynchronous one, with its arguments and its docstring."""

    @functools.wraps(method)
    async def call(self: _AsyncHandle[Any], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return await asyncio.to_thread(getattr(self._handle, method.__name__), *args, **kwargs)

    return call


class _AsyncHandle(Generic[Handle]):
    def __init__(self, handle: Handle) -> None:
        """Called by `AsyncClient`."""
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

    async def model(self) -> Path:
        """See `Run.model` and `FineTuning.model`."""
        return await asyncio.to_thread(lambda: self._handle.model)

    metrics = _in_thread(FineTuning.metrics)
    stop = _in_thread(FineTuning.stop)
    close = _in_thread(FineTuning.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncRun(_AsyncHandle[Run]):
    """`Run` with coroutines; what reads or waits is one, also where `Run` has a property."""

    @property
    def run(self) -> Run:
        """The plain handle."""
        return self._handle

    async def step(self) -> int:
        """See `Run.step`."""
        return await asyncio.to_thread(lambda: self._handle.step)

    async def events(self) -> AsyncIterator[Event]:
        """See `Run.events`."""
        arriving = self._handle._backend.events()
        over = object()
        while (event := await asyncio.to_thread(next, arriving, over)) is not over:
            if isinstance(event, Event):
                yield event

    async def report(self) -> Path:
        """See `Run.report`."""
        return await asyncio.to_thread(lambda: self._handle.report)

    pause = _in_thread(Run.pause)
    resume = _in_thread(Run.resume)
    checkpoint = _in_thread(Run.checkpoint)
    weights = _in_thread(Run.weights)
    export = _in_thread(Run.export)
    summary = _in_thread(Run.summary)
    chat = _in_thread(Run.chat)


class AsyncFineTuning(_AsyncHandle[FineTuning]):
    """`FineTuning` with coroutines."""

    @property
    def training(self) -> FineTuning:
        """The plain handle."""
        return self._handle


def _starting(
    method: Callable[Concatenate[Any, Arguments], Any], kind: type[AsyncKind]
) -> Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, AsyncKind]]:
    """Return a method of `Client` as a coroutine of `AsyncClient` that returns a handle of ``kind``."""

    @functools.wraps(method)
    async def call(self: AsyncClient, *args: Arguments.args, **kwargs: Arguments.kwargs) -> AsyncKind:
        return kind(await asyncio.to_thread(getattr(self.client, method.__name__), *args, **kwargs))

    call.__signature__ = inspect.signature(method).replace(return_annotation=kind.__name__)  # pyright: ignore[reportAttributeAccessIssue]
    return call


class AsyncClient:
    """`Client` for asyncio: the same arguments, and each method a coroutine.

        async with penstock.AsyncClient() as client:
            run = await client.train(model="models/Qwen3-0.6B", data=rows, reward=my_function)
            async for event in run.events():
                print(event.kind)
            await run.wait()

    A reward function is called on a thread; one that is ``async`` runs on that thread's event loop.
    """

    def __init__(self, where: str = LOCAL, *, token: str | None = None, runs: str | os.PathLike[str] = "runs") -> None:
        """See `Client`."""
        self.client = Client(where, token=token, runs=runs)

    train = _starting(Client.train, AsyncRun)
    run = _starting(Client.run, AsyncRun)
    sft = _starting(Client.sft, AsyncFineTuning)
    dpo = _starting(Client.dpo, AsyncFineTuning)

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
