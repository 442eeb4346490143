"""How built-in rewards score groups: in this process, by length, in grader processes, in a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.protocol.packs.group_texts import EpisodeTexts, GroupTexts
from penstock.reward_service.errors import LengthsUnknown, RewardCrashed, RewardError, RewardNotGiven
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.rewards import length
from penstock.reward_service.rewards.reward import Verdict
from penstock.reward_service.scores import GroupScores, Outcome, extra_info, ground_truth

log = structlog.get_logger("reward_service.scorers")

Judge = Callable[[tuple[str, ...], Any], list[Verdict]]
GradedJudge = Callable[..., Awaitable[list[Verdict]]]  # completions, truth, grade=
SandboxedJudge = Callable[[tuple[str, ...], Any, Any], Awaitable[list[Verdict]]]  # completions, truth, extra_info


@dataclass(frozen=True, slots=True)
class PureScorer:
    """A reward that needs nothing but the texts."""

    name: str
    judge: Judge
    slow: bool = False

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        """Score the groups; a reward that raises fails its group, not the pack."""
        return [_outcome(self.name, group, self._verdicts) for group in groups]

    def _verdicts(self, group: GroupTexts) -> list[Verdict]:
        return self.judge(group.completions, ground_truth(group.reward))


@dataclass(frozen=True, slots=True)
class LengthScorer:
    name: str
    unit: length.Unit
    judge: Callable[[list[int]], list[Verdict]]
    slow: bool = False

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        return [_outcome(self.name, group, self._verdicts) for group in groups]

    def _verdicts(self, group: GroupTexts) -> list[Verdict]:
        if self.unit == "tokens" and len(group.completion_tokens) != len(group.completions):
            raise LengthsUnknown(
                f"{self.name} counts the policy's tokens, and group {group.group_id} was sent by hand without them: "
                'send completion_tokens, or try it with the parameter unit = "words"'
            )
        return self.judge(length.measure(group.completions, group.completion_tokens, self.unit))


@dataclass(frozen=True, slots=True)
class GivenScorer:
    name: str
    judge: Callable[[tuple[EpisodeTexts, ...]], list[Verdict]]
    slow: bool = False

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        return [_outcome(self.name, group, self._verdicts) for group in groups]

    def _verdicts(self, group: GroupTexts) -> list[Verdict]:
        missing = [number for number, one in enumerate(group.given) if one.reward is None]
        if missing or not group.given:
            what = f"episodes {missing[:8]} have no reward" if missing else "the group has no episodes"
            raise RewardNotGiven(
                f"{self.name} reads the reward that an environment gave, and {what} (group {group.group_id}); name a reward "
                "that scores texts, or an environment that rewards its episodes"
            )
        return self.judge(group.given)


@dataclass(frozen=True, slots=True)
class GradedScorer:
    """A reward whose hard cases go to grader processes."""

    name: str
    judge: GradedJudge
    pool: GraderPool
    slow: bool = True

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        return list(await asyncio.gather(*(_waited(self.name, group, self._verdicts) for group in groups)))

    async def _verdicts(self, group: GroupTexts) -> list[Verdict]:
        return await self.judge(group.completions, ground_truth(group.reward), grade=self.pool.for_group())


@dataclass(frozen=True, slots=True)
class SandboxScorer:
    name: str
    judge: SandboxedJudge
    slow: bool = True

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        return list(await asyncio.gather(*(_waited(self.name, group, self._verdicts) for group in groups)))

    async def _verdicts(self, group: GroupTexts) -> list[Verdict]:
        return await self.judge(group.completions, ground_truth(group.reward), extra_info(group.reward))


def _outcome(name: str, group: GroupTexts, verdicts: Callable[[GroupTexts], list[Verdict]]) -> Outcome:
    try:
        return GroupScores.of(verdicts(group), name)
    except RewardError as err:
        return err
    except Exception as err:  # noqa: BLE001 a bug in one reward must not take the other groups with it
        return _crashed(name, group.group_id, err)


async def _waited(name: str, group: GroupTexts, verdicts: Callable[[GroupTexts], Awaitable[list[Verdict]]]) -> Outcome:
    try:
        return GroupScores.of(await verdicts(group), name)
    except RewardError as err:
        return err
    except Exception as err:  # noqa: BLE001 a bug in one reward must not take the other groups with it
        return _crashed(name, group.group_id, err)


def _crashed(name: str, group_id: str, err: Exception) -> RewardCrashed:
    log.error("a built-in reward raised", reward=name, group_id=group_id, exc_info=err)
    return RewardCrashed(f"built-in reward {name} raised {type(err).__name__}: {err} (group {group_id})")
