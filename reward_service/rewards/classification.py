"""1 when the label is the ground truth's.

The final answer (tags, box, phrase or last line) gives a label if it equals one, ignoring case and punctuation, or
if exactly one label is mentioned in it, as a whole word and not after a negation. Several labels count as none (part
``ambiguous`` is 1). Part ``has_answer`` is 1 if a label was found.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.parsing import final_answer, latex
from penstock.reward_service.rewards.parsing.final_answer import Where
from penstock.reward_service.rewards.reward import PureReward, Verdict, truth_text

NAME = "classification"
_NEGATIONS = frozenset({"not", "no", "non", "never", "neither", "nor", "isn't", "isnt", "wasn't", "cannot", "without"})
_MAX_CHARS = 2000


class Parameters(Section):
    labels: tuple[str, ...] = Field(
        default=(), max_length=1000, description="All labels; none: only an answer that is exactly the label counts."
    )
    where: Where = Field(default="auto", description="Place of the answer; auto: boxed, tags, ####, phrase, last line.")


def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    text = truth_text(truth, NAME)
    gold, labels = plain(text), tuple(plain(label) for label in parameters.labels)
    if not gold or (labels and gold not in labels):
        known = f" of {', '.join(parameters.labels[:10])}" if labels else ""
        raise BadGroundTruth(f"{NAME}: the row's ground_truth must be a label{known}, got {text[:80]!r}")
    return [
        _verdict(final_answer.find(final_answer.spoken(completion), parameters.where), gold, labels)
        for completion in completions
    ]


def plain(label: str) -> str:
    """Return a label's words in lower case, without surrounding punctuation, separated by single spaces."""
    return re.sub(r"[^\w'+#&/-]+", " ", label.casefold().replace("_", " ")).strip(" '-/")


def mentioned(answer: str, labels: tuple[str, ...]) -> set[str]:
    """Return the labels that an answer mentions; of two that overlap only the longer one, and no negated ones."""
    mentions = set()
    for match in _pattern(labels).finditer(answer):
        before = answer[: match.start()].split()[-3:]
        if not _NEGATIONS.intersection(before) and not answer[: match.start()].endswith(("non-", "un-")):
            mentions.add(match[0])
    return mentions


def _verdict(answer: str | None, gold: str, labels: tuple[str, ...]) -> Verdict:
    said = plain(latex.plain_text(answer[:_MAX_CHARS])) if answer else ""
    if not labels or said in labels:
        return Verdict(float(said == gold), {"has_answer": float(bool(said)), "ambiguous": 0.0})
    mentions = mentioned(said, labels)
    return Verdict(
        float(mentions == {gold}), {"has_answer": float(len(mentions) == 1), "ambiguous": float(len(mentions) > 1)}
    )


@lru_cache(64)
def _pattern(labels: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(labels, key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


REWARD = PureReward(
    name=NAME,
    description="1 when the label is the ground truth's; an answer with several labels has none",
    judge=judge,
    reads="answer",
    parameters=Parameters,
    data_sources=("classification",),
    parts=("has_answer", "ambiguous"),
    notes='without `labels` the whole answer is compared; a label after "not", "no" or "non-" does not count',
    success=1.0,
)
