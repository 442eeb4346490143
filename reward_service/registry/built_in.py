"""The built-in rewards, found among the files of `reward_service/rewards`, and what scores groups by each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.protocol.config.connection import Section
from penstock.protocol.extensions import Registry
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.program_tests.grade import SandboxPool
from penstock.reward_service.registry.scorers import GivenScorer, GradedScorer, LengthScorer, PureScorer, SandboxScorer
from penstock.reward_service.rewards.reward import GivenReward, GradedReward, LengthReward, Reward, SandboxedReward
from penstock.reward_service.scores import Scorer

AUTO = "auto"  # the reward name that means: by the row's data_source
ENTRY_POINTS = "penstock.rewards"

REWARDS = Registry("reward", Reward, package="penstock.reward_service.rewards", group=ENTRY_POINTS)
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
