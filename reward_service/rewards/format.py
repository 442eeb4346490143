"""1 when a completion is ``<think>...</think>`` then ``<answer>...</answer>``, each once, and nothing else.

White space around and between the two is allowed, an empty answer is not. Read by ``str.find``:
linear in the length of the completion, whatever its content. Needs no ground truth.
"""

from __future__ import annotations

from typing import Any

from penstock.reward_service.rewards.reward import PureReward, Verdict

NAME = "format"
THINK = "think_format"
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def judge(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    return [Verdict(float(is_well_formed(completion))) for completion in completions]


def judge_think(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    """1 when a completion begins with its only ``<think>`` and closes it (TRL's `think_format_reward`)."""
    return [
        Verdict(float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text))
        for text in completions
    ]


def is_well_formed(completion: str) -> bool:
    """Return True if a completion has exactly the four tags, in order, with nothing outside them."""
    text = completion.strip()
    positions = [text.find(tag) for tag in _TAGS]
    if any(text.count(tag) != 1 for tag in _TAGS) or positions != sorted(positions):
        return False
    _, think_end, answer_start, answer_end = positions
    return (
        text.startswith(_TAGS[0])
        and text.endswith(_TAGS[3])
        and not text[think_end + len(_TAGS[1]) : answer_start].strip()
        and bool(text[answer_start + len(_TAGS[2]) : answer_end].strip())
    )


REWARD = PureReward(
    name=NAME,
    description="1 when the completion is <think>...</think> then <answer>...</answer> and nothing else",
    judge=judge,
    success=1.0,
)

THINK_REWARD = PureReward(
    name=THINK,
    description="1 when the completion begins with its only <think> and closes it (TRL)",
    judge=judge_think,
    notes="what follows is not checked",
    success=1.0,
)
