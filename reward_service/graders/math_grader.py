"""A grader process of the math reward (`grader_process`): ``python -m penstock.reward_service.graders.math_grader``.

math-verify's own time-outs (SIGALRM, wall clock) are off. A tower of powers ends in a MemoryError or the CPU limit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

from penstock.reward_service.graders import grader_process

_KNOWN_GOLDS = 256


@lru_cache(_KNOWN_GOLDS)
def read_gold(text: str) -> tuple[Any, ...]:
    """Parse the gold answer, and compare it with 0 once: its own cost must not count for an answer."""
    gold = _parse(text)
    verify(gold, _parse("0"), timeout_seconds=None)
    return tuple(gold)


def is_equal(gold: tuple[Any, ...], answer: str) -> bool:
    parsed = _parse(answer)
    return bool(parsed) and verify(list(gold), parsed, timeout_seconds=None)


def _parse(text: str) -> list[Any]:
    return parse(
        f"\\boxed{{{text}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType] None is what switches it off
    )


if __name__ == "__main__":
    grader_process.serve(read_gold, is_equal, example=("x+\\frac{1}{2}", "\\frac{1}{2}+x"))
