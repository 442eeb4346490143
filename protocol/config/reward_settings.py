"""The section ``[reward]`` of a run file: which reward scores which row, and rewards made of parts.

The reward service computes the parts and stores them with every trajectory. The rule that combines them into one
reward is defined here, so that a reader of stored parts can apply it again, also with other weights:

    definition = settings.reward.define["mine"]
    rewards = definition.totals({"correct": (1.0, 0.0), "form": (1.0, 1.0)})
    other = definition.reweighted({"form": 0.5}).totals(stored.parts)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import Finite, Identifier, RewardName

MAX_PARTS = 16

PartName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,48}$")]
_Weight = Annotated[Finite, Field(ge=-1e6, le=1e6)]
SuccessThreshold = Finite | dict[PartName, Finite]


class RewardPart(Section):
    """One part of a reward: its scorer, its weight, and an optional gate."""

    reward: RewardName = Field(
        description="A built-in reward, a registered endpoint, your own code (my_pkg.rewards:tilted, "
        "my_rewards.py:tilted), or auto (by data_source)."
    )
    weight: _Weight = Field(default=1.0, description="Factor of its score in the sum; 0: the score is only stored.")
    needs: Finite | None = Field(
        default=None,
        description="Gate: a score below this sets the whole reward to `otherwise`, regardless of the sum.",
    )
    otherwise: _Weight = Field(default=0.0, description="The whole reward when the gate is closed.")
    parameters: dict[str, Any] = Field(
        default={},
        description="Parameters of a built-in reward (`python -m penstock.reward_service rewards NAME` lists them), or "
        "arguments of your own function.",
    )

    @model_validator(mode="after")
    def _gate_is_whole(self) -> RewardPart:
        if self.needs is None and self.otherwise != 0.0:
            raise ValueError("`otherwise` has no effect without `needs`; set it to the score below which it applies")
        return self

    def is_open(self, score: float) -> bool:
        return self.needs is None or score >= self.needs


class RewardDefinition(Section):
    """A reward made of parts: the weighted sum of their scores, unless a gate is closed."""

    parts: dict[PartName, RewardPart] = Field(
        min_length=1, max_length=MAX_PARTS, description="The parts by name, in the order in which gates are checked."
    )

    def total(self, scores: Mapping[str, float]) -> float:
        """Return a completion's reward from the scores of its parts; raises ConfigError for a part without a score.

        The first part, in the order of the definition, whose score is below its ``needs`` decides alone: the reward is
        its ``otherwise``. Otherwise the reward is the sum of weight times score.
        """
        self._require_all(scores, "score")
        closed = next((part for name, part in self.parts.items() if not part.is_open(scores[name])), None)
        if closed is not None:
            return closed.otherwise
        return sum(part.weight * scores[name] for name, part in self.parts.items())

    def totals(self, parts: Mapping[str, Sequence[float]]) -> tuple[float, ...]:
        """Return the reward of every completion of a group from the scores by part, as in `ScoredGroup.parts`.

        Other parts are ignored. Raises ConfigError if a part is missing, or the parts are not equally long.
        """
        self._require_all(parts, "scores")
        columns = [parts[name] for name in self.parts]
        if len({len(column) for column in columns}) != 1:
            lengths = ", ".join(f"{name} {len(parts[name])}" for name in self.parts)
            raise ConfigError(f"the parts of a group need one score for each completion, got {lengths}")
        return tuple(self.total(dict(zip(self.parts, row, strict=True))) for row in zip(*columns, strict=True))

    def _require_all(self, names: Collection[str], what: str) -> None:
        if missing := [name for name in self.parts if name not in names]:
            there = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"no {what} of the part {', '.join(missing)}; there are {there}")

    def reweighted(self, weights: Mapping[str, float]) -> RewardDefinition:
        """Return the same definition with other weights; raises ConfigError for a part it does not have."""
        strangers = sorted(weights.keys() - self.parts.keys())
        if strangers:
            raise ConfigError(f"the reward has no part {', '.join(strangers)}; its parts are {', '.join(self.parts)}")
        document = self.model_dump()
        for name, weight in weights.items():
            document["parts"][name]["weight"] = weight
        return RewardDefinition.model_validate(document)

    @property
    def digest(self) -> str:
        """Digest of 16 hexadecimal digits; equal definitions have the same one in any process."""
        document = [(name, part.model_dump(mode="json")) for name, part in self.parts.items()]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


class RewardSettings(Section):
    """The reward of each row, and the definitions of rewards made of parts."""

    name: RewardName | None = Field(
        default=None,
        description="Reward of rows that by_source does not name: built in, an endpoint, or code "
        "(my_rewards.py:tilted); none: chosen by the row's data_source.",
    )
    by_source: dict[str, RewardName] = Field(default={}, description='Reward by data_source: gsm8k = "my_reward".')
    define: dict[Identifier, RewardDefinition] = Field(
        default={}, description="Rewards made of parts with weights, gates and parameters, by name (docs/graders.md)."
    )
    success: dict[RewardName, SuccessThreshold] = Field(
        default={},
        description="From which reward on a held-out completion counts as correct, by reward: my_reward = 0.5, or from "
        "which scores of its parts on: my_reward = {correct = 1.0}. Built-in graders of 0 and 1: 1. Without any: no "
        "accuracy, only the mean reward.",
    )

    @model_validator(mode="after")
    def _parts_are_no_definitions(self) -> RewardSettings:
        for name, definition in self.define.items():
            nested = [
                f"parts.{part}"
                for part, part_settings in definition.parts.items()
                if part_settings.reward in self.define
            ]
            if nested:
                raise ValueError(
                    f"reward.define.{name}.{nested[0]}.reward is itself made of parts; list its parts here instead"
                )
        return self
