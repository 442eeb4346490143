"""`penstock.AsyncClient`: `Client` with coroutines."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Self

from penstock.client.async_run import AsyncFineTuning, AsyncRun
from penstock.client.client import LOCAL, Client, Model, Rewards, Settings
from penstock.client.data_files import Data

if TYPE_CHECKING:
    from penstock.console.evaluation.results import EvaluationResult


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
        if isinstance(target, AsyncRun):
            target = target.run
        if isinstance(target, AsyncFineTuning):
            target = target.training
        return await asyncio.to_thread(self.client.evaluate, target, data, **options)

    async def close(self) -> None:
        """See `Client.close`."""
        await asyncio.to_thread(self.client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
