"""Rewards of the user by import path, file or entry point, as the run file names them, and their worker processes.

Only names of the run file are loaded: a name that comes in a message never makes this service import anything. The code runs in worker
processes, asked one group at a time and killed when they overrun. A process that ends, hangs or cannot load its code is an error of the
group it was asked about (`UserCodeFailed`), never a score; the next group gets a new process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.errors import ConfigError
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.endpoints.endpoint_call import verdicts_of
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.errors import BadGroundTruth, RewardError, UserCodeFailed
from penstock.reward_service.graders.grader_pool import EXIT_S, JsonProcess, ProcessPool, describe_exit
from penstock.reward_service.registry.built_in import AUTO, BUILT_INS, BY_SOURCE, ENTRY_POINTS
from penstock.reward_service.scores import GroupScores, Outcome

_SCORES: TypeAdapter[list[Score]] = TypeAdapter(list[Score])


class _Worker(JsonProcess):
    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        module = "penstock.reward_service.user_code.worker"
        super().__init__([sys.executable, "-P", "-m", module, name, json.dumps(dict(parameters)), str(os.getpid())])
        self._name = name
        self._digest = ""

    async def ready(self) -> str:
        if self.pid is None:
            first = await self._guarded(self.start(), "loading its code")
            if "digest" not in first:
                await self.kill(after_s=EXIT_S)
                raise UserCodeFailed(str(first.get("refused", first)))
            self._digest = str(first["digest"])
        return self._digest

    async def score(self, group: GroupToScore, timeout_s: float) -> tuple[list[Score], str]:
        """Return a group's scores, and the digest of the code that gave them."""
        digest = await self.ready()
        answer = await self._guarded(self._ask(group, timeout_s), f"scoring group {group.group_id}")
        if "bad_ground_truth" in answer:
            raise BadGroundTruth(f"{self._name}: {answer['bad_ground_truth']}")
        try:
            return _SCORES.validate_python(answer.get("scores")), digest
        except ValidationError as err:
            raise UserCodeFailed(f"reward {self._name!r} returned no scores: {err.errors()[0]['msg']}") from None

    async def _ask(self, group: GroupToScore, timeout_s: float) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            await self.write(group.model_dump(mode="json"))
            return await self.read()

    async def _guarded(self, waiting: Awaitable[dict[str, Any]], doing: str) -> dict[str, Any]:
        """Await an answer; whatever else happens kills the process, because its next line may be a late answer."""
        try:
            return await waiting
        except TimeoutError:
            await self.kill()
            raise UserCodeFailed(
                f"reward {self._name!r} did not answer in time while {doing} and was killed; make it faster, or raise "
                "reward_service.user_timeout_s"
            ) from None
        except (EOFError, ConnectionError, ValueError) as err:
            code = await self.kill(after_s=EXIT_S)
            raise UserCodeFailed(
                f"the process of reward {self._name!r} {describe_exit(code)} while {doing} ({type(err).__name__}); "
                "the service's stderr shows what it wrote"
            ) from None
        except BaseException:
            await self.kill()
            raise


class WorkerPool(ProcessPool[_Worker]):
    def __init__(self, name: str, parameters: Mapping[str, Any], *, num_workers: int, timeout_s: float) -> None:
        super().__init__([_Worker(name, parameters) for _ in range(num_workers)], exit_s=EXIT_S)
        self._timeout_s = timeout_s

    async def check(self) -> str:
        """Return the digest of the code; raises ConfigError for code that cannot be loaded."""
        async with self.lend() as worker:
            try:
                return await worker.ready()
            except UserCodeFailed as err:
                raise ConfigError(str(err)) from None

    async def score(self, group: GroupToScore) -> tuple[list[Score], str]:
        async with self.lend() as worker:
            return await worker.score(group, self._timeout_s)


def import_path(name: str) -> str | None:
    """Return ``module:attribute`` of a reward name that is user code, None for any other name.

    Nothing is imported: entry points are read from the metadata of installed packages.
    """
    if ":" in name:
        return name
    if name in BUILT_INS or name in BY_SOURCE or name == AUTO:
        return None
    return next((point.value for point in metadata.entry_points(group=ENTRY_POINTS, name=name)), None)


def installed() -> dict[str, str]:
    points = metadata.entry_points(group=ENTRY_POINTS)
    return {point.name: point.value for point in sorted(points) if point.name not in BUILT_INS}


@dataclass(frozen=True, slots=True, eq=False)
class UserScorer:
    name: str
    pool: WorkerPool
    slow: bool = True

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        return list(await asyncio.gather(*(self._score(GroupToScore.of(group)) for group in groups)))

    async def _score(self, group: GroupToScore) -> Outcome:
        try:
            scores, digest = await self.pool.score(group)
            # the digest is that of the process that scored: a file that changes during a run shows in the record
            verdicts = verdicts_of(f"reward {self.name}, group {group.group_id}", group, scores, UserCodeFailed)
        except RewardError as err:
            return err
        return GroupScores.of(verdicts, f"{self.name}@{digest}")


class UserRewards:
    def __init__(self, settings: RewardSettings, *, num_workers: int, timeout_s: float) -> None:
        self._scorers: dict[tuple[str, str], UserScorer] = {}
        for name, parameters in _named(settings):
            path = import_path(name)
            if path is not None and (name, _key(parameters)) not in self._scorers:
                pool = WorkerPool(path, parameters, num_workers=num_workers, timeout_s=timeout_s)
                self._scorers[name, _key(parameters)] = UserScorer(name, pool)

    @property
    def by_name(self) -> dict[str, UserScorer]:
        return {name: scorer for (name, parameters), scorer in self._scorers.items() if parameters == _key({})}

    def of(self, name: str, parameters: Mapping[str, Any]) -> UserScorer | None:
        return self._scorers.get((name, _key(parameters)))

    async def check(self) -> dict[str, str]:
        return {name: await scorer.pool.check() for (name, _), scorer in self._scorers.items()}

    async def close(self) -> None:
        await asyncio.gather(*(scorer.pool.close() for scorer in self._scorers.values()))


def _named(settings: RewardSettings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in (settings.name, *settings.by_source.values()):
        if name is not None and name not in settings.define:
            yield name, {}
    for definition in settings.define.values():
        for part in definition.parts.values():
            yield part.reward, part.parameters


def _key(parameters: Mapping[str, Any]) -> str:
    return json.dumps(dict(parameters), sort_keys=True)
