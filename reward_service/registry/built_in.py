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

AUTO = "auto"  # the reward name that means: by the row's data_source
ENTRY_POINTS = "penstock.rewards"
REWARDS = Registry("reward", Reward, package="penstock.reward_service.rewards", group=ENTRY_POINTS)
_COMMAND = "python -m penstock.reward_service rewards --write docs/graders.md"
BUILT_INS: Mapping[str, Reward] = REWARDS.built_in


@dataclass(frozen=True, slots=True)
class BuiltInScorer:
    """Scores each group alone: a reward that raises fails its group, not the pack.

    A ``slow`` one asks processes, whose pool bounds how many work at once.
    """

    name: str
    verdicts: Callable[[GroupTexts], list[Verdict] | Awaitable[list[Verdict]]]
    slow: bool = False

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        if self.slow:
            return list(await asyncio.gather(*(self._outcome(group) for group in groups)))
        return [await self._outcome(group) for group in groups]

    async def _outcome(self, group: GroupTexts) -> Outcome:
        try:
            verdicts = self.verdicts(group)
            return GroupScores.of(verdicts if isinstance(verdicts, list) else await verdicts, self.name)
        except RewardError as err:
            return err
        except Exception as err:
            log.exception("a built-in reward raised", reward=self.name, group_id=group.group_id)
            return RewardCrashed(
                f"built-in reward {self.name} raised {type(err).__name__}: {err} (group {group.group_id})"
            )


def _lengths(name: str, group: GroupTexts, unit: length.Unit) -> list[int]:
    if unit == "tokens" and len(group.completion_tokens) != len(group.completions):
        raise LengthsUnknown(
            f"{name} counts the policy's tokens, and group {group.group_id} was sent by hand without them: "
            'send completion_tokens, or try it with the parameter unit = "words"'
        )
    return length.measure(group.completions, group.completion_tokens, unit)


def _given(name: str, group: GroupTexts) -> tuple[EpisodeTexts, ...]:
    missing = [number for number, episode in enumerate(group.given) if episode.reward is None]
    if missing or not group.given:
        what = f"episodes {missing[:8]} have no reward" if missing else "the group has no episodes"
        raise RewardNotGiven(
            f"{name} reads the reward that an environment gave, and {what} (group {group.group_id}); name a reward "
            "that scores texts, or an environment that rewards its episodes"
        )
    return group.given


def _read(reward: Reward, group: GroupTexts) -> tuple[str, ...]:
    """Return a group's completions, for a reward that reads answers with the ``<think>`` that their prompt ends with."""
    if reward.reads and group.prompt_text.rstrip().endswith("<think>"):
        return tuple(f"<think>{text}" for text in group.completions)
    return group.completions


def _by_source() -> dict[str, str]:
    names: dict[str, str] = {}
    for reward in BUILT_INS.values():
        for source in reward.data_sources:
            if names.setdefault(source, reward.name) != reward.name:
                raise TypeError(f"data source {source!r} is claimed by the rewards {names[source]} and {reward.name}")
    return names


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
    judge, name = reward.bind(parameters), reward.name
    match reward:
        case LengthReward():
            return BuiltInScorer(name, lambda group: judge(_lengths(name, group, parameters.unit)))
        case GivenReward():
            return BuiltInScorer(name, lambda group: judge(_given(name, group)))
        case GradedReward():
            pool = graders.math if reward.grader == "math" else graders.pattern
            graded = lambda group: judge(_read(reward, group), ground_truth(group.reward), grade=pool.for_group())  # noqa: E731
            return BuiltInScorer(name, graded, slow=True)
        case SandboxedReward():
            if graders.sandboxes is None:
                return None
            run = partial(judge, grade=graders.sandboxes.grade, all_or_nothing=graders.all_or_nothing)
            return BuiltInScorer(
                name,
                lambda group: run(
                    group.completions, ground_truth(group.reward), extra_info(group.reward), prompt=group.prompt_text
                ),
                slow=True,
            )
        case _:
            return BuiltInScorer(
                name, lambda group: judge(_read(reward, group), ground_truth(group.reward), **_further(reward, group))
            )


def _further(reward: Reward, group: GroupTexts) -> dict[str, Any]:
    if reward.reads == "answer and columns":
        return {"extra": extra_info(group.reward)}
    return {"prompt": group.prompt_text} if reward.reads == "answer and prompt" else {}


def scorers(graders: Graders) -> dict[str, Scorer]:
    defaults: dict[str, Section | None] = {name: reward.default for name, reward in BUILT_INS.items()}
    made = {
        name: scorer(BUILT_INS[name], section, graders) for name, section in defaults.items() if section is not None
    }
    return {name: candidate for name, candidate in made.items() if candidate is not None}


def update_tables(text: str) -> str:
    for name, lines in (("rewards", _reward_table()), ("data sets", _data_set_table())):
        begin, end = f"<!-- {name}: generated by {_COMMAND} -->", f"<!-- {name}: end -->"
        head, opened, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (opened and closed):
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
