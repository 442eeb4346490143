"""1 when a completion consists of the configured tags: each opened and closed once, in order, and nothing outside.

``partial = true`` gives the share of the rules that are kept instead: one for each tag (opened and closed exactly once,
after the one before), and one for nothing outside. White space outside is allowed, an empty element is not. Read
by ``str.find``, linear. No ground truth.

`format` has the tags ``<think>`` and ``<answer>``; `think_format` looks at the beginning alone.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from penstock.protocol.config.connection import Section
from penstock.reward_service.rewards.reward import PureReward, Verdict

NAME, FORMAT, THINK = "tags", "format", "think_format"
_THOUGHT = re.compile(r"<think>\s*(?!</think>|\s).*?</think>", re.DOTALL)


class Parameters(Section):
    tags: tuple[str, ...] = Field(
        default=("think", "answer"), min_length=1, max_length=16, description="Names of the tags, in order."
    )
    outside: Literal["nothing", "anything"] = Field(default="nothing", description="Text allowed outside the tags.")
    partial: bool = Field(default=False, description="Return the share of the rules that are kept, instead of 1 or 0.")

    @field_validator("tags")
    @classmethod
    def _names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not name or not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"a tag's name has letters, digits, - and _, got {name!r}; write think, not <think>")
        if len(set(value)) != len(value):
            raise ValueError("a tag is named twice; each is expected once")
        return value


def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    return [Verdict(_score(parameters, completion)) for completion in completions]


def judge_format(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    return judge(Parameters(), completions, truth)


def judge_think(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    """1 when a completion begins with its only ``<think>`` and closes it (TRL's `think_format_reward`); an empty chain is 0."""
    return [Verdict(float(text.count("<think>") == 1 and _THOUGHT.match(text) is not None)) for text in completions]


def _score(parameters: Parameters, completion: str) -> float:
    rules, kept = len(parameters.tags), right_tags(completion, parameters.tags)
    if parameters.outside == "nothing":
        kept += kept == rules and not outside(completion, parameters.tags)
        rules += 1
    return kept / rules if parameters.partial else float(kept == rules)


def right_tags(text: str, names: tuple[str, ...]) -> int:
    """Count the tags that are opened and closed exactly once, after the last one that is; none of them empty."""
    end, right = 0, 0
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        start, stop = text.find(opening), text.find(closing)
        if text.count(opening) != 1 or text.count(closing) != 1 or not end <= start < stop:
            continue
        content = text[start + len(opening) : stop]
        if not content.strip():
            continue
        end, right = stop + len(closing), right + 1
    return right


def outside(text: str, names: tuple[str, ...]) -> str:
    rest, at = [], 0
    for name in names:
        rest.append(text[at : text.find(f"<{name}>")])
        at = text.find(f"</{name}>") + len(name) + 3
    return "".join([*rest, text[at:]]).strip()


REWARD = PureReward(
    name=NAME,
    description="1 when the completion is the given tags, each once and in order, and nothing else; `partial`: the share of "
    "the rules that are kept",
    judge=judge,
    parameters=Parameters,
    notes="an empty element is wrong",
    success=1.0,
)

FORMAT_REWARD = PureReward(
    name=FORMAT,
    description="1 when the completion is <think>...</think> then <answer>...</answer> and nothing else",
    judge=judge_format,
    notes="an empty chain or answer is wrong",
    success=1.0,
)

THINK_REWARD = PureReward(
    name=THINK,
    description="1 when the completion begins with its only <think> and closes it (TRL)",
    judge=judge_think,
    notes="an empty chain is wrong; what follows is not checked",
    success=1.0,
)
