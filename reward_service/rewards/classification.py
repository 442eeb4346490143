"""1 when the label is the ground truth's.

The final answer (tags, box, phrase or last line) gives a label if it equals one, ignoring case and punctuation, or
if exactly one label is mentioned in it, as a whole word and not after a negation. Several labels count as none (part
``ambiguous`` is 1). Part ``has_answer`` is 1 if a label was found. The patterns are in ``classification.toml``.
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
from penstock.reward_service.rewards.parsing.patterns import read_patterns
from penstock.reward_service.rewards.reward import PureReward, Verdict, truth_text

NAME = "classification"
_PATTERN = read_patterns(__file__)
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
    texts = map(final_answer.spoken, completions)
    return [_verdict(_find(text, parameters.where, labels), gold, labels) for text in texts]


def _find(text: str, where: Where, labels: tuple[str, ...]) -> str | None:
    """Return the answer at a place; the first line if the last one, after it, mentions no label."""
    answer = final_answer.find(text, where)
    if answer is None or where != "auto" or not labels or answer != final_answer.last_line(text):
        return answer
    first, _, rest = text.strip().partition("\n")
    return answer if _pattern(labels).search(plain(rest)) or final_answer.TAKES_BACK.search(rest) else first


def plain(label: str) -> str:
    """Return a label's words in lower case, without surrounding punctuation, separated by single spaces."""
    return re.sub(r"[^\w'+#&/-]+", " ", label.casefold().replace("_", " ")).strip(" '-/")


def mentioned(answer: str, labels: tuple[str, ...]) -> set[str]:
    """Return the labels that an answer mentions if it states one: of two that overlap the longer one, none that its clause negates."""
    mentions, is_stated = set(), False
    for clause in map(plain, _PATTERN["clause"].split(_PATTERN["affirmed"].sub(" ", answer.casefold()))):
        for match in _pattern(labels).finditer(clause):
            before = clause[: match.start()]
            if not _PATTERN["negated"].search(before) and not _PATTERN["denied"].match(clause, match.end()):
                mentions.add(labels[int((match.lastgroup or "_0")[1:])])
                is_stated |= bool(
                    _PATTERN["no_spaces"].search(match[0])
                    or _PATTERN["states"].search(_PATTERN["filler"].sub("", before))
                )
    return mentions if is_stated else set()


def _verdict(answer: str | None, gold: str, labels: tuple[str, ...]) -> Verdict:
    text = latex.plain_text(answer[:_MAX_CHARS]) if answer else ""
    said = plain(text)
    if not labels or said in labels:
        return Verdict(float(said == gold), {"has_answer": float(bool(said)), "ambiguous": 0.0})
    mentions = mentioned(text, labels)
    return Verdict(
        float(mentions == {gold}), {"has_answer": float(len(mentions) == 1), "ambiguous": float(len(mentions) > 1)}
    )


@lru_cache(64)
def _pattern(labels: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(range(len(labels)), key=lambda place: len(labels[place]), reverse=True)
    named = (f"(?P<_{place}>{_spelt(labels[place])})" for place in longest_first)
    return re.compile("|".join(named))


def _spelt(label: str) -> str:
    """Return a pattern of a label: by itself, except in a script without spaces; hyphens may be spaces or left out."""
    pattern = re.escape(label).replace("\\-", r"[- ]?")
    return pattern if _PATTERN["no_spaces"].search(label) else rf"(?<!\w){pattern}(?!\w)"


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
