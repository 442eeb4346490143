"""Compute new rewards for stored groups: from a reward service, from the stored parts with other weights, or both."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from pydantic import ValidationError

from penstock.protocol.config.reward_settings import RewardDefinition
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import BlobRef, ScoredGroup
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.protocol.record.lineage import RecordedGroup

WHOLE = "reward"  # the name of the reward itself among the weights
_ATTEMPTS = 3  # for failures that a run would retry
_RETRY_S = 0.5
_CALL_GROUPS = 32  # per request


@dataclass(frozen=True, slots=True)
class Rule:
    """How to compute the new rewards; without ``reward`` from the stored ones."""

    reward: str | None
    weights: dict[str, float] = field(default_factory=dict)
    define: Mapping[str, RewardDefinition] = field(default_factory=dict)  # rewards by parts in the run's settings

    def __post_init__(self) -> None:
        if self.reward is None and not self.weights:
            raise ConfigError("no new reward given; add --reward NAME, --weights part=0.5,other=1, or both")


@dataclass(frozen=True, slots=True)
class GroupToScore:
    """A group to be scored again."""

    member: RecordedGroup
    pack: BlobRef
    text: GroupTexts


class Service(Protocol):
    """A reward service's HTTP API."""

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer of one request."""
        ...


Outcome = ScoredGroup | str  # or the reason why there is none


def parse_weights(text: str) -> dict[str, float]:
    """Read ``part=0.5,other=1``; raises ConfigError for anything else."""
    try:
        pairs = [one.split("=") for one in text.split(",") if one]
        return {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        raise ConfigError(
            f"--weights {text!r}: expected part=NUMBER, comma-separated; {WHOLE} is the reward itself"
        ) from None


def score_again(groups: Sequence[GroupToScore], rule: Rule, service: Service) -> dict[str, Outcome]:
    """Return each group's outcome by id; the service is called only when the rule names a reward."""
    if rule.reward is None:
        found: dict[str, Outcome] = {one.member.group_id: one.member.scored for one in groups}
    else:
        found = {}
        for start in range(0, len(groups), _CALL_GROUPS):
            found |= _from_service(groups[start : start + _CALL_GROUPS], rule.reward, service)
    define = rule.define if rule.reward is None else {}
    return {i: reweight(o, rule.weights, define) if isinstance(o, ScoredGroup) else o for i, o in found.items()}


def reweight(
    scored: ScoredGroup, weights: Mapping[str, float], define: Mapping[str, RewardDefinition] = MappingProxyType({})
) -> Outcome:
    """Return a group with rewards by other weights, or the reason when it lacks a part.

    For a reward defined by parts (``define``), other weights and gates are kept. Any other becomes the weighted sum of
    the named parts; ``reward`` is the reward itself.
    """
    if not weights:
        return scored
    columns = {**scored.parts, WHOLE: scored.rewards}
    definition = None if WHOLE in weights else define.get(scored.scorer.partition("(")[0])
    missing = sorted(set(weights) - set(columns))
    if missing and definition is None:
        return f"it has no part {missing[0]}; it has {', '.join(sorted(columns))}"
    if definition is not None:
        try:
            rewards = definition.reweighted(weights).totals(scored.parts)
        except ConfigError as err:
            return str(err)
    else:
        rows = range(len(scored.rewards))
        rewards = tuple(sum(weight * columns[name][row] for name, weight in weights.items()) for row in rows)
    shown = ",".join(f"{name}={weight:g}" for name, weight in weights.items())
    return scored.model_copy(update={"rewards": rewards, "scorer": f"{scored.scorer} weighed {shown}"})


def _from_service(groups: Sequence[GroupToScore], reward: str, service: Service) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    waiting = list(groups)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_RETRY_S * 2 ** (attempt - 1))
        answer = service.call("POST", "/v1/score", {"reward": reward, "groups": [_wire(one) for one in waiting]})
        retried = []
        for one, result in zip(waiting, answer["results"], strict=True):
            found[one.member.group_id] = _outcome(one, result)
            if result["error"] is not None and not result["error"]["permanent"]:
                retried.append(one)
        waiting = retried
        if not waiting:
            break
    return found


def _wire(one: GroupToScore) -> dict[str, Any]:
    text, truth = one.text, one.text.reward.ground_truth
    return {
        "group_id": text.group_id,
        "prompt": text.prompt_text,
        "completions": list(text.completions),
        "completion_tokens": list(one.member.scored.generated.completion_tokens),
        "data_source": text.reward.data_source,
        "ground_truth": None if truth is None else json.loads(truth),
        "extra_info": json.loads(text.reward.extra_info),
    }


def _outcome(one: GroupToScore, result: Mapping[str, Any]) -> Outcome:
    if result["error"] is not None:
        return f"{result['error']['reason']}: {result['error']['detail']}"
    scores = result["scores"]
    names = sorted({name for score in scores for name in score["parts"]})
    parts = {name: tuple(float(score["parts"].get(name, 0.0)) for score in scores) for name in names}
    rewards = tuple(float(score["score"]) for score in scores)
    try:
        return ScoredGroup(generated=one.member.scored.generated, rewards=rewards, parts=parts, scorer=result["scorer"])
    except ValidationError as err:
        return f"invalid answer: {err.errors()[0]['msg']}"
