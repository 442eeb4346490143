"""The worker processes of one user reward: started, asked one group at a time, killed when they overrun.

The service never imports the code. A process that ends, hangs or cannot load its code is an error of the group it was
asked about (`UserCodeFailed`), never a score; the next group gets a new process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock.protocol.errors import ConfigError
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.errors import BadGroundTruth, UserCodeFailed
from penstock.reward_service.graders.grader_pool import JsonProcess, describe_exit

_SETTINGS_PREFIX = "PENSTOCK_"  # settings of the service, passwords among them
_EXIT_S = 5.0  # from a closed pipe to the exit of its process
_SCORES: TypeAdapter[list[Score]] = TypeAdapter(list[Score])


@dataclass(frozen=True, slots=True)
class UserScores:
    scores: Sequence[Score]
    digest: str


class WorkerPool:
    def __init__(self, name: str, parameters: Mapping[str, Any], *, num_workers: int, timeout_s: float) -> None:
        """``name`` is ``module:attribute``; ``timeout_s`` are seconds by the clock for one group."""
        self._name = name
        self._timeout_s = timeout_s
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._all = [_Worker(name, parameters) for _ in range(num_workers)]
        for worker in self._all:
            self._idle.put_nowait(worker)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._all if worker.pid]

    async def check(self) -> str:
        worker = await self._idle.get()
        try:
            return await worker.ready()
        except UserCodeFailed as err:
            raise ConfigError(str(err)) from None
        finally:
            self._idle.put_nowait(worker)

    async def score(self, group: GroupToScore) -> UserScores:
        worker = await self._idle.get()
        try:
            return await worker.score(group, self._timeout_s)
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._all))


class _Worker:
    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        module = "penstock.reward_service.user_code.worker"
        command = [sys.executable, "-P", "-m", module, name, json.dumps(dict(parameters)), str(os.getpid())]
        environ = {key: value for key, value in os.environ.items() if not key.startswith(_SETTINGS_PREFIX)}
        self._name = name
        self._digest = ""
        self._process = JsonProcess(command, environ=environ, own_group=True)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def ready(self) -> str:
        if self._process.pid is not None:
            return self._digest
        first = await self._guarded(self._process.start(), "loading its code")
        if "digest" not in first:
            await self._process.kill(after_s=_EXIT_S)
            raise UserCodeFailed(str(first.get("refused", first)))
        self._digest = str(first["digest"])
        return self._digest

    async def score(self, group: GroupToScore, timeout_s: float) -> UserScores:
        digest = await self.ready()
        answer = await self._guarded(self._ask(group, timeout_s), f"scoring group {group.group_id}")
        if "bad_ground_truth" in answer:
            raise BadGroundTruth(f"{self._name}: {answer['bad_ground_truth']}")
        try:
            return UserScores(_SCORES.validate_python(answer.get("scores")), digest)
        except ValidationError as err:
            raise UserCodeFailed(f"reward {self._name!r} returned no scores: {err.errors()[0]['msg']}") from None

    async def close(self) -> None:
        await self._process.kill(after_s=_EXIT_S)

    async def _ask(self, group: GroupToScore, timeout_s: float) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            await self._process.write(group.model_dump(mode="json"))
            return await self._process.read()

    async def _guarded(self, waiting: Any, doing: str) -> dict[str, Any]:
        """Await an answer; whatever else happens kills the process, because its next line may be a late answer."""
        try:
            return await waiting
        except TimeoutError:
            await self._process.kill()
            raise UserCodeFailed(
                f"reward {self._name!r} did not answer in time while {doing} and was killed; make it faster, or raise "
                "reward_service.user_timeout_s"
            ) from None
        except (EOFError, ConnectionError, ValueError) as err:
            code = await self._process.kill(after_s=_EXIT_S)
            raise UserCodeFailed(
                f"the process of reward {self._name!r} {describe_exit(code)} while {doing} ({type(err).__name__}); "
                "the service's stderr shows what it wrote"
            ) from None
        except BaseException:
            await self._process.kill()
            raise
