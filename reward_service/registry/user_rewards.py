"""Rewards of the user's own by import path, file or entry point, as the run file names them.

Only names of the run file are loaded: a name that comes in a message never makes this service import anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.errors import RewardError, ScoreRefused, UserCodeFailed
from penstock.reward_service.registry.built_in import AUTO, BUILT_INS, BY_SOURCE, ENTRY_POINTS
from penstock.reward_service.rewards.reward import Verdict
from penstock.reward_service.scores import GroupScores, Outcome
from penstock.reward_service.user_code.worker_pool import WorkerPool


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
            found = await self.pool.score(group)
        except RewardError as err:
            return err
        # the digest is that of the process that scored: a file that changes during a run shows in the record
        return _outcome(self.name, group, found.scores, found.digest)


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
        """Return the scorer of a definition's part, None when it is not user code."""
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


def _outcome(name: str, group: GroupToScore, scores: Sequence[Score], digest: str) -> Outcome:
    where = f"reward {name}, group {group.group_id}"
    if len(scores) != len(group.completions):
        return UserCodeFailed(f"{where}: {len(scores)} scores for {len(group.completions)} completions")
    verdicts = []
    for number, score in enumerate(scores):
        if score.score is None or score.error is not None:
            return ScoreRefused(f"{where}, completion {number}: {score.error or 'score is null'}")
        verdicts.append(Verdict(score.score, score.parts))
    return GroupScores.of(verdicts, f"{name}@{digest}")
