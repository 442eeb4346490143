"""1 when the answer between the last ``<answer>`` tags is one of the accepted ones, by its words (SQuAD, Search-R1).

Words are compared in lower case, without punctuation, articles and extra spaces. `qa_em` wants all of them,
`qa_subem` an accepted answer somewhere inside. Part ``has_answer`` says whether there were tags; verl gives
such a wrong answer 0.1, here it is wrong.
"""

from __future__ import annotations

import string
from typing import Any

from reward_service.errors import BadGroundTruth
from reward_service.rewards.verdict import Verdict, truth_text

EXACT, INSIDE = "qa_em", "qa_subem"
_ARTICLES = frozenset({"a", "an", "the"})
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def judge_exact(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    """Compare every completion's answer with the truth: a text, a number, or a list of such alternatives.

    Raises BadGroundTruth when there is nothing to compare with.
    """
    accepted = _accepted(truth, EXACT)
    return [_verdict(answer, answer in accepted) for answer in map(_answer, completions)]


def judge_inside(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    """Look for an accepted answer inside every completion's; raises BadGroundTruth as `judge_exact` does."""
    accepted = _accepted(truth, INSIDE)
    return [
        _verdict(answer, answer is not None and any(one in answer for one in accepted))
        for answer in map(_answer, completions)
    ]


def words(text: str) -> str:
    """Return the words that are compared."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(word for word in plain.split() if word not in _ARTICLES)


def _accepted(truth: Any, reward: str) -> set[str]:
    alternatives = truth if isinstance(truth, list) else [truth]
    if not alternatives:
        raise BadGroundTruth(f"{reward}: the row's ground_truth is an empty list of alternatives")
    return {words(truth_text(alternative, reward)) for alternative in alternatives}


def _answer(completion: str) -> str | None:
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else words(completion[start + len("<answer>") : end])


def _verdict(answer: str | None, is_right: bool) -> Verdict:
    return Verdict(float(is_right), {"has_answer": float(answer is not None)})
