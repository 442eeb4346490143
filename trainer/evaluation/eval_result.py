"""One evaluation: its prompts, the groups that it waits for, and its result (accuracy, rewards, pass@k); pure.

The run file says from which reward, or from which scores of the reward's parts, a completion is correct
(``reward.success``); otherwise the built-in graders whose rewards are 0 or 1 do. For any other reward (a length, a
weighted sum, an endpoint) there is no accuracy: its mean is reported under its name.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.protocol.config.reward_settings import SuccessThreshold
from penstock.protocol.groups import BlobRef, RewardRequest, Sampling, ScoredGroup
from penstock.protocol.rewards_offered import RewardsOffered
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.data.dataset import AUTO_REWARD, Prompt, PromptSet
from penstock.trainer.data_settings import EvalSettings

_ROUNDING = 1e-6  # a reward this far below its threshold reaches it


@dataclass(frozen=True, slots=True)
class SuccessRule:
    reward: str
    threshold: SuccessThreshold  # of the reward, or of each of these parts

    @property
    def text(self) -> str:
        if not isinstance(self.threshold, dict):
            return f"{self.reward} ≥ {self.threshold:g}"
        return " and ".join(f"{self.reward}.{part} ≥ {least:g}" for part, least in self.threshold.items())

    def missing_part(self, group: ScoredGroup) -> str | None:
        parts = self.threshold if isinstance(self.threshold, dict) else ()
        return next((part for part in parts if part not in group.parts), None)

    def correct(self, rewards: Sequence[float], parts: Mapping[str, Sequence[float]]) -> tuple[bool, ...]:
        if not isinstance(self.threshold, dict):
            return tuple(reward >= self.threshold - _ROUNDING for reward in rewards)
        columns = [[score >= least - _ROUNDING for score in parts[p]] for p, least in self.threshold.items()]
        return tuple(all(row) for row in zip(*columns, strict=True))


@dataclass(frozen=True, slots=True)
class SuccessRules:
    thresholds: Mapping[str, SuccessThreshold] = field(default_factory=dict)
    by_source: Mapping[str, str] = field(default_factory=dict)  # the reward of a data set, and of an alias

    @classmethod
    def make(cls, overrides: Mapping[str, SuccessThreshold], offers: Iterable[RewardsOffered]) -> SuccessRules:
        thresholds: dict[str, SuccessThreshold] = {}
        by_source: dict[str, str] = {}
        for offer in offers:
            thresholds |= offer.success
            by_source |= offer.by_source
        return cls({**thresholds, **overrides}, by_source)

    def rule(self, request: RewardRequest) -> SuccessRule | None:
        name = request.data_source if request.name == AUTO_REWARD else request.name
        for candidate in (name, self.by_source.get(name, name)):
            if candidate in self.thresholds:
                return SuccessRule(candidate, self.thresholds[candidate])
        return None


def count_correct(
    groups: Sequence[ScoredGroup], rules: Mapping[str, SuccessRule | None]
) -> tuple[tuple[int, ...] | None, str]:
    """Return the number of correct completions of each group, and the rules by which they are counted.

    None where nothing says for every group when a completion is correct; then the text is empty, or says why.
    """
    of_groups = [rules.get(group.generated.group_id) for group in groups]
    known = [rule for rule in of_groups if rule is not None]
    if not known or len(known) < len(of_groups):
        return None, ""
    for rule, group in zip(known, groups, strict=True):
        if (part := rule.missing_part(group)) is not None:
            parts = ", ".join(sorted(group.parts)) or "none"
            return None, (
                f"unknown: the reward {rule.reward} has no part {part}; its parts are {parts}; "
                f"correct reward.success.{rule.reward}"
            )
    text = ", ".join(dict.fromkeys(rule.text for rule in known))
    return tuple(sum(rule.correct(g.rewards, g.parts)) for rule, g in zip(known, groups, strict=True)), text


@dataclass(frozen=True, slots=True)
class EvalResult:
    step: int
    version: int
    num_prompts: int
    num_samples: int  # completions of each prompt
    accuracy: float | None  # share of correct completions; None: nothing says when one is (`success`)
    reward_mean: float
    pass_at: dict[int, float]  # k -> share of prompts solved by k samples, unbiased; empty without accuracy
    completion_tokens_mean: float
    truncated_share: float  # completions cut off at max_new_tokens
    eval_s: float
    success: str = ""  # what counts as correct, as people read it
    split: str = "eval"  # the source of the prompts

    @property
    def score(self) -> tuple[str, float]:
        return ("mean reward", self.reward_mean) if self.accuracy is None else (self.success, self.accuracy)

    def score_by(self, metric: str) -> tuple[str, float] | None:
        """Return the score by a named metric, as people read it, and its value; None where it is not measured.

        ``metric`` is accuracy, reward, pass@K, or empty for `score`.
        """
        if not metric:
            return self.score
        if metric == "reward":
            return "mean reward", self.reward_mean
        value = self.accuracy if metric == "accuracy" else self.pass_at.get(int(metric.removeprefix("pass@")))
        return None if value is None else (f"{self.split} {metric}", value)


@dataclass(frozen=True, slots=True)
class LostEvaluation:
    """An evaluation that ended without a result; ``step`` made its version, None if that is no longer known."""

    version: int
    step: int | None
    reason: str
    split: str = "eval"


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of ``k`` samples is correct (unbiased, arXiv 2107.03374)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def summarise(
    groups: Sequence[ScoredGroup], rules: Mapping[str, SuccessRule | None], *, step: int, version: int, eval_s: float
) -> EvalResult:
    rewards = [reward for group in groups for reward in group.rewards]
    tokens = [count for group in groups for count in group.generated.completion_tokens]
    finishes = [reason for group in groups for reason in group.generated.finish_reasons]
    num_samples = min(len(group.rewards) for group in groups)
    by_group, text = count_correct(groups, rules)
    ks = [2**i for i in range(num_samples.bit_length())] if num_samples > 1 else []
    return EvalResult(
        step=step,
        version=version,
        num_prompts=len(groups),
        num_samples=num_samples,
        accuracy=None if by_group is None else sum(by_group) / len(rewards),
        reward_mean=sum(rewards) / len(rewards),
        pass_at={k: sum(pass_at_k(num_samples, c, k) for c in by_group) / len(groups) for k in ks} if by_group else {},
        completion_tokens_mean=sum(tokens) / len(tokens),
        truncated_share=finishes.count("length") / len(finishes),
        eval_s=eval_s,
        success=text,
    )


@dataclass(frozen=True, slots=True)
class EvaluatedSource:
    name: str
    prompts: PromptSet
    settings: EvalSettings  # of this source
    sampling: Sampling

    @property
    def num_prompts(self) -> int:
        return min(self.settings.num_prompts or len(self.prompts), len(self.prompts))


@dataclass(slots=True)
class Evaluation:
    version: PolicyVersion
    source: EvaluatedSource
    step: int
    started: float
    waiting_for: set[str]
    is_of_session: bool = True  # False: an earlier session issued its groups, perhaps with other settings
    is_issued: bool = False
    groups: dict[str, ScoredGroup] = field(default_factory=dict)
    packs: dict[str, BlobRef] = field(default_factory=dict)  # of these groups, for the record
    dead_lettered: dict[str, str] = field(default_factory=dict)  # the reason, by group id; they may arrive all the same
    changed_at: float = field(default_factory=time.monotonic)  # when a group or a dead letter arrived
    failure: str = ""
    is_closed: bool = False  # its result is reported and its groups are closed in the accounting

    def note_dead_letter(self, group_ids: Iterable[str], reason: str) -> None:
        self.dead_lettered |= dict.fromkeys(self.waiting_for.intersection(group_ids), reason)
        self.changed_at = time.monotonic()

    @property
    def only_dead_lettered_are_missing(self) -> bool:
        return bool(self.waiting_for) and self.waiting_for <= self.dead_lettered.keys()

    @property
    def missing(self) -> str:
        return f"evaluation of version {self.version}: {len(self.waiting_for)} of {self.source.num_prompts} groups"

    @property
    def is_over(self) -> bool:
        return bool(self.failure) or not self.waiting_for


class NumberedSources:
    """The sources of an evaluator, their prompts numbered together; group ids follow from version and number."""

    def __init__(self, sources: Sequence[EvaluatedSource]) -> None:
        self.sources = tuple(sources)
        ends = list(itertools.accumulate((source.num_prompts for source in sources), initial=0))
        self.numbers = {s.name: range(*span) for s, span in zip(sources, itertools.pairwise(ends), strict=True)}

    def prompt(self, source: EvaluatedSource, number: int) -> Prompt:
        return source.prompts[number - self.numbers[source.name].start]

    def ids(self, version: PolicyVersion, name: str) -> set[str]:
        return {group_id_of(version, number) for number in self.numbers.get(name, ())}

    def all_ids(self, version: PolicyVersion) -> set[str]:
        return set().union(*(self.ids(version, name) for name in self.numbers))

    def by_source(self, ids: Iterable[str]) -> dict[str, set[str]]:
        by_name: dict[str, set[str]] = {}
        for group_id in ids:
            number = index_of(group_id)
            name = next((name for name, numbers in self.numbers.items() if number in numbers), self.sources[-1].name)
            by_name.setdefault(name, set()).add(group_id)
        return by_name


def group_id_of(version: PolicyVersion, index: int) -> str:
    return f"eval.v{version}.p{index}"


def index_of(group_id: str) -> int:
    return int(group_id.rpartition(".p")[2])


def version_of(group_id: str) -> PolicyVersion:
    return PolicyVersion(int(group_id.split(".")[1].removeprefix("v")))
