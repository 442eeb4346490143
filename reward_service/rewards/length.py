"""Rewards for the length of a completion; no ground truth.

`length` is 1 inside the bounds and 0 outside. `overlong` is DAPO's soft punishment (arXiv 2503.14476, eq. 13): 0 up
to ``longest - buffer``, then linear down to ``-factor`` at ``longest`` and beyond.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section
from penstock.reward_service.rewards.parsing.final_answer import words
from penstock.reward_service.rewards.reward import LengthReward, Verdict

NAME, OVERLONG = "length", "overlong"

Unit = Literal["tokens", "words", "characters"]


class _Measured(Section):
    unit: Unit = Field(default="tokens", description="Unit of the length; tokens are those of the policy's tokenizer.")


class Parameters(_Measured):
    shortest: int = Field(default=0, ge=0, description="Smallest allowed length.")
    longest: int | None = Field(default=None, ge=1, description="Largest allowed length; none: no bound.")

    @model_validator(mode="after")
    def _bounded(self) -> Parameters:
        if self.shortest == 0 and self.longest is None:
            raise ValueError("length: set shortest or longest, or every completion passes")
        if self.longest is not None and self.shortest > self.longest:
            raise ValueError(f"length: shortest = {self.shortest} is more than longest = {self.longest}")
        return self


class OverlongParameters(_Measured):
    longest: int = Field(ge=1, description="Length at which the full punishment is reached.")
    buffer: int = Field(ge=1, description="The punishment grows linearly over this length below `longest`.")
    factor: float = Field(default=1.0, gt=0.0, le=1e3, description="The full punishment.")

    @model_validator(mode="after")
    def _fits(self) -> OverlongParameters:
        if self.buffer > self.longest:
            raise ValueError(f"overlong: buffer = {self.buffer} is more than longest = {self.longest}")
        return self


def measure(completions: tuple[str, ...], num_tokens: tuple[int, ...], unit: Unit) -> list[int]:
    if unit == "tokens":
        return list(num_tokens)
    return [len(words(text)) if unit == "words" else len(text) for text in completions]


def judge(parameters: Parameters, lengths: list[int]) -> list[Verdict]:
    """Return 1 for every length inside the bounds, else 0. Part ``length``."""
    longest = parameters.longest
    return [
        Verdict(float(parameters.shortest <= n and (longest is None or n <= longest)), {"length": float(n)})
        for n in lengths
    ]


def judge_overlong(parameters: OverlongParameters, lengths: list[int]) -> list[Verdict]:
    """Return the punishment of every length, in [-factor, 0]. Part ``length``."""
    start = parameters.longest - parameters.buffer
    return [
        Verdict(-parameters.factor * min(max((n - start) / parameters.buffer, 0.0), 1.0), {"length": float(n)})
        for n in lengths
    ]


REWARD = LengthReward(
    name=NAME,
    description="1 when the completion's length is inside the bounds",
    judge=judge,
    parameters=Parameters,
    parts=("length",),
    notes="one bound is needed; texts that are sent by hand need `completion_tokens`",
)

OVERLONG_REWARD = LengthReward(
    name=OVERLONG,
    description="DAPO's soft punishment of completions that come close to a length, in [-factor, 0]",
    judge=judge_overlong,
    parameters=OverlongParameters,
    parts=("length",),
    notes="does not fall further beyond `longest` (verl's does)",
)
