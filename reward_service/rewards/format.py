"""1 when a completion is ``<think>...</think>`` then ``<answer>...</answer>``, each once, and nothing else.

White space around and between the two is allowed, an empty chain or answer is not. Read by ``str.find``:
linear in the length of the completion, whatever its content. Needs no ground truth.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.reward_service.rewards.reward import PureReward, Verdict

_THOUGHT = re.compile(r"<think>\s*(?!</think>|\s).*?</think>", re.DOTALL)
NAME = "format"
THINK = "think_format"
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def judge(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    return [Verdict(float(is_well_formed(completion))) for completion in completions]


def judge_think(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    """1 when a completion begins with its only ``<think>`` and closes it (TRL's `think_format_reward`); an empty chain is 0."""
    return [Verdict(float(text.count("<think>") == 1 and _THOUGHT.match(text) is not None)) for text in completions]


def is_well_formed(completion: str) -> bool:
    """Return True if a completion has exactly the four tags, in order, with nothing outside them."""
    text = completion.strip()
    positions = [text.find(tag) for tag in _TAGS]
    if any(text.count(tag) != 1 for tag in _TAGS) or positions != sorted(positions):
        return False
    think_start, think_end, answer_start, answer_end = positions
    return (
        text.startswith(_TAGS[0])
        and text.endswith(_TAGS[3])
        and not text[think_end + len(_TAGS[1]) : answer_start].strip()
        and bool(text[think_start + len(_TAGS[0]) : think_end].strip())
        and bool(text[answer_start + len(_TAGS[2]) : answer_end].strip())
    )


REWARD = PureReward(
    name=NAME,
    description="1 when the completion is <think>...</think> then <answer>...</answer> and nothing else",
    judge=judge,
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
