"""The built-in rewards, found among the files of `reward_service/rewards`; what scores groups by each; the tables of docs/graders.md.

Rewards are scored in this process, by length, in grader processes, or in a sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from pydantic_core import PydanticUndefined

from penstock.protocol.config.connection import Section
from penstock.protocol.errors import ConfigError
from penstock.protocol.extensions import Registry
from penstock.protocol.packs.group_texts import EpisodeTexts, GroupTexts
from penstock.reward_service.errors import LengthsUnknown, RewardCrashed, RewardError, RewardNotGiven
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.program_tests.grade import SandboxPool
from penstock.reward_service.rewards import length
from penstock.reward_service.rewards.reward import (
    GivenReward,
    GradedReward,
    LengthReward,
    Reward,
    SandboxedReward,
    Verdict,
)
from penstock.reward_service.scores import GroupScores, Outcome, Scorer, extra_info, ground_truth

log = structlog.get_logger("reward_service.scorers")

Judge = Callable[[tuple[str, ...], Any], list[Verdict]]
GradedJudge = Callable[..., Awaitable[list[Verdict]]]  # completions, truth, grade=
SandboxedJudge = Callable[[tuple[str, ...], Any, Any], Awaitable[list[Verdict]]]  # completions, truth, extra_info
AUTO = "auto"  # the reward name that means: by the row's data_source
ENTRY_POINTS = "penstock.rewards"
REWARDS = Registry("reward", Reward, package="penstock.reward_service.rewards", group=ENTRY_POINTS)
_COMMAND = "python -m penstock.reward_service rewards --write docs/graders.md"


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


BUILT_INS: Mapping[str, Reward] = REWARDS.built_in


def _by_source() -> dict[str, str]:
    found: dict[str, str] = {}
    for reward in BUILT_INS.values():
        for source in reward.data_sources:
            if found.setdefault(source, reward.name) != reward.name:
                raise TypeError(f"data source {source!r} is claimed by the rewards {found[source]} and {reward.name}")
    return found


# The built-in reward of each data set, by `data_source` as verl, ROLL and the usual collections write it. Such a name
# works as a reward name too: `reward.name = "math_reasoning"` is `math_flexible`.
BY_SOURCE: Mapping[str, str] = _by_source()


@dataclass(frozen=True, slots=True)
class Graders:
    """What built-in rewards are scored with; ``sandboxes`` is None where no sandbox works."""

    math: GraderPool
    pattern: GraderPool
    sandboxes: SandboxPool | None
    all_or_nothing: bool = False  # a program counts only when it passes all tests


def scorer(reward: Reward, parameters: Any, graders: Graders) -> Scorer | None:
    """Return what scores groups by a reward with parameters; None where this machine cannot run it."""
    judge = reward.bind(parameters)
    match reward:
        case LengthReward():
            return LengthScorer(reward.name, parameters.unit, judge)
        case GivenReward():
            return GivenScorer(reward.name, judge)
        case GradedReward():
            pool = graders.math if reward.grader == "math" else graders.pattern
            return GradedScorer(reward.name, judge, pool)
        case SandboxedReward():
            if graders.sandboxes is None:
                return None
            judge = partial(judge, grade=graders.sandboxes.grade, all_or_nothing=graders.all_or_nothing)
            return SandboxScorer(reward.name, judge)
        case _:
            return PureScorer(reward.name, judge)


def scorers(graders: Graders) -> dict[str, Scorer]:
    defaults: dict[str, Section | None] = {name: reward.default for name, reward in BUILT_INS.items()}
    made = {name: scorer(BUILT_INS[name], given, graders) for name, given in defaults.items() if given is not None}
    return {name: one for name, one in made.items() if one is not None}


def update_tables(text: str) -> str:
    for name, lines in (("rewards", _reward_table()), ("data sets", _data_set_table())):
        begin, end = f"<!-- {name}: generated by {_COMMAND} -->", f"<!-- {name}: end -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise ConfigError(f"the page has no lines {begin!r} and {end!r}; add them where the table belongs")
        text = "\n".join([head + begin, *lines, end + tail])
    return text


def _reward_table() -> Iterator[str]:
    yield "| name | parameters (default) | returns | parts | how it is scored |"
    yield "|---|---|---|---|---|"
    for name, reward in BUILT_INS.items():
        parameters = ", ".join(
            f"`{key}` ({_default(field.default)})" for key, field in reward.parameters.model_fields.items()
        )
        parts = ", ".join(f"`{part}`" for part in reward.parts)
        scored = "; ".join(filter(None, (_how(reward), reward.notes)))
        yield f"| `{name}` | {parameters} | {_escape(reward.description)} | {parts} | {_escape(scored)} |"


def _data_set_table() -> Iterator[str]:
    yield "| reward | data sets (`data_source`) |"
    yield "|---|---|"
    for name, reward in BUILT_INS.items():
        if reward.data_sources:
            yield f"| `{name}` | {', '.join(f'`{source}`' for source in reward.data_sources)} |"


def _how(reward: Reward) -> str:
    if isinstance(reward, GradedReward):
        return f"process (`{reward.grader}_timeout_s`)"
    return "sandbox" if isinstance(reward, SandboxedReward) else "pure"


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None or value in {"", ()}:
        return "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("<", "\\<").replace("|", "\\|")
