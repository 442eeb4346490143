"""1 when the answer between the last ``<answer>`` tags is one of the accepted ones, by its words (SQuAD, Search-R1).

Words are compared in lower case, without punctuation, articles and extra spaces. `qa_em` requires all of them,
`qa_subem` an accepted answer somewhere inside. Part ``has_answer`` is 1 if there were tags; verl gives
a wrong answer in tags 0.1, here it is 0. `qa_f1` is the harmonic mean of precision and recall of the words (of Chinese
and Japanese: the characters), the best over the accepted answers; two empty answers are equal, an
empty and a non-empty one are not.
"""

from __future__ import annotations

import string
from collections import Counter
from typing import Any

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.parsing import final_answer
from penstock.reward_service.rewards.parsing.final_answer import Where
from penstock.reward_service.rewards.parsing.final_answer import words as split
from penstock.reward_service.rewards.reward import PureReward, Verdict, truth_text

EXACT, INSIDE, F1 = "qa_em", "qa_subem", "qa_f1"
_ARTICLES = frozenset({"a", "an", "the"})
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DATA_SETS = (
    "qa", "trivia", "searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa",
    "searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle",
)  # fmt: skip


class Parameters(Section):
    where: Where = Field(default="tags", description="Place of the answer; auto: boxed, tags, ####, phrase, last line.")


def judge_exact(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    accepted = _accepted(truth, EXACT)
    return [_verdict(answer, float(answer in accepted)) for answer in _answers(completions, parameters)]


def judge_inside(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    accepted = _accepted(truth, INSIDE)
    return [
        _verdict(answer, float(answer is not None and any(one in answer for one in accepted)))
        for answer in _answers(completions, parameters)
    ]


def judge_f1(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    accepted = _accepted(truth, F1)
    return [
        _verdict(answer, 0.0 if answer is None else max(f1(one, answer) for one in accepted))
        for answer in _answers(completions, parameters)
    ]


def f1(gold: str, answer: str) -> float:
    """Return the F1 of the bags of words of two normalised texts, as in SQuAD's evaluation."""
    wanted, given = Counter(split(gold)), Counter(split(answer))
    shared = (wanted & given).total()
    if not wanted or not given:
        return float(wanted == given)
    return 2.0 * shared / (wanted.total() + given.total())


def words(text: str) -> str:
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(word for word in plain.split() if word not in _ARTICLES)


def _accepted(truth: Any, reward: str) -> set[str]:
    if isinstance(truth, dict) and truth.keys() == {"target"}:  # the form in verl's rows of Search-R1
        truth = truth["target"]
    alternatives = truth if isinstance(truth, list) else [truth]
    if not alternatives:
        raise BadGroundTruth(f"{reward}: the row's ground_truth is an empty list of alternatives")
    return {words(truth_text(alternative, reward)) for alternative in alternatives}


def _answers(completions: tuple[str, ...], parameters: Parameters) -> list[str | None]:
    found = [final_answer.find(completion, parameters.where) for completion in completions]
    return [None if answer is None else words(answer) for answer in found]


def _verdict(answer: str | None, reward: float) -> Verdict:
    return Verdict(reward, {"has_answer": float(answer is not None)})


EXACT_REWARD = PureReward(
    name=EXACT,
    description="1 when the answer in the last <answer> tags is an accepted one, by its words (SQuAD's normalisation)",
    judge=judge_exact,
    parameters=Parameters,
    data_sources=_DATA_SETS,
    parts=("has_answer",),
    success=1.0,
)

INSIDE_REWARD = PureReward(
    name=INSIDE,
    description="1 when an accepted answer is inside the last <answer> tags",
    judge=judge_inside,
    parameters=Parameters,
    parts=("has_answer",),
    notes="a long answer that lists many candidates passes",
    success=1.0,
)

F1_REWARD = PureReward(
    name=F1,
    description="F1 of the words (Chinese and Japanese: characters) shared with the best accepted answer, in [0, 1]",
    judge=judge_f1,
    parameters=Parameters,
    parts=("has_answer",),
)
