"""Which completions count as correct: from which reward on, or from which scores of the reward's parts on; pure.

The run file says so (``reward.success``); otherwise the built-in graders whose rewards are 0 or 1 do. For any other reward
(a length, a weighted sum, an endpoint) there is no accuracy: its mean is reported under its own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.protocol.config.reward_settings import SuccessThreshold
from penstock.protocol.facts import RewardRequest, ScoredGroup
from penstock.protocol.rewards_offered import RewardsOffered
from penstock.trainer.data.dataset import AUTO_REWARD

_ROUNDING = 1e-6  # a reward this far below its threshold reaches it


@dataclass(frozen=True, slots=True)
class SuccessRule:
    """What counts as correct for one reward."""

    reward: str
    threshold: SuccessThreshold  # of the reward, or of each of these parts

    @property
    def text(self) -> str:
        """The rule as people read it, such as ``gsm8k ≥ 1``."""
        if not isinstance(self.threshold, dict):
            return f"{self.reward} ≥ {self.threshold:g}"
        return " and ".join(f"{self.reward}.{part} ≥ {least:g}" for part, least in self.threshold.items())

    def missing_part(self, group: ScoredGroup) -> str | None:
        """Return the first part that the rule needs and the group lacks."""
        parts = self.threshold if isinstance(self.threshold, dict) else ()
        return next((part for part in parts if part not in group.parts), None)

    def num_correct(self, group: ScoredGroup) -> int:
        """Return how many completions of a group are correct; raises KeyError for a missing part."""
        return sum(self.correct(group.rewards, group.parts))

    def correct(self, rewards: Sequence[float], parts: Mapping[str, Sequence[float]]) -> tuple[bool, ...]:
        """Return for every completion whether it is correct; raises KeyError for a missing part."""
        if not isinstance(self.threshold, dict):
            return tuple(reward >= self.threshold - _ROUNDING for reward in rewards)
        columns = [[score >= least - _ROUNDING for score in parts[p]] for p, least in self.threshold.items()]
        return tuple(all(row) for row in zip(*columns, strict=True))


@dataclass(frozen=True, slots=True)
class SuccessRules:
    """The rules of a run, by reward name."""

    thresholds: Mapping[str, SuccessThreshold] = field(default_factory=dict)
    by_source: Mapping[str, str] = field(default_factory=dict)  # the reward of a data set, and of an alias

    @classmethod
    def make(cls, given: Mapping[str, SuccessThreshold], offers: Iterable[RewardsOffered]) -> SuccessRules:
        """Join what the run file says with what the reward services offer; the run file has precedence."""
        thresholds: dict[str, SuccessThreshold] = {}
        by_source: dict[str, str] = {}
        for offer in offers:
            thresholds |= offer.success
            by_source |= offer.by_source
        return cls({**thresholds, **given}, by_source)

    def rule(self, request: RewardRequest) -> SuccessRule | None:
        """Return the rule for the completions of a prompt; None if nothing says when they are correct."""
        name = request.data_source if request.name == AUTO_REWARD else request.name
        for candidate in (name, self.by_source.get(name, name)):
            if candidate in self.thresholds:
                return SuccessRule(candidate, self.thresholds[candidate])
        return None


@dataclass(frozen=True, slots=True)
class Correct:
    """The correct completions of an evaluation."""

    by_group: tuple[int, ...] | None  # None: nothing says for every group when it is correct
    text: str  # the rules, or why they cannot be applied; empty without any


def count_correct(groups: Sequence[ScoredGroup], rules: Mapping[str, SuccessRule | None]) -> Correct:
    """Count the correct completions of every group; ``rules`` are by group id."""
    of_groups = [rules.get(group.generated.group_id) for group in groups]
    known = [rule for rule in of_groups if rule is not None]
    if not known or len(known) < len(of_groups):
        return Correct(None, "")
    for rule, group in zip(known, groups, strict=True):
        if (part := rule.missing_part(group)) is not None:
            parts = ", ".join(sorted(group.parts)) or "none"
            text = f"unknown: the reward {rule.reward} has no part {part}; its parts are {parts}; correct reward.success.{rule.reward}"
            return Correct(None, text)
    text = ", ".join(dict.fromkeys(rule.text for rule in known))
    return Correct(tuple(rule.num_correct(group) for rule, group in zip(known, groups, strict=True)), text)
