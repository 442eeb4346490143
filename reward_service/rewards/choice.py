r"""1 when the letter chosen is the ground truth's: multiple choice.

The choice is the start of the final answer: ``B``, ``(B)``, ``B. Paris``, ``\text{(B)}``, ``option B``. An answer that
names several letters chooses none. Part ``has_answer`` is 1 if a choice was found.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.parsing import final_answer, latex
from penstock.reward_service.rewards.parsing.final_answer import Where
from penstock.reward_service.rewards.reward import PureReward, Verdict, truth_text

NAME = "multiple_choice"
_LEAD = re.compile(r"(?:(?:option|choice|answer|选项|选)\s{0,3}[:：]?\s{0,3})", re.IGNORECASE)
_BARE = re.compile(r"[(\[（]?\s?(?P<letter>[A-Za-z])\s?(?:[)\]）]|[.:：、,;](?=\s|$)|(?=$))")
_OTHERS = re.compile(r"(?<![A-Za-z])[(\[（]?(?P<letter>[A-Z])(?:[)\]）]|(?![A-Za-z'’]))")
_MAX_CHARS = 400


class Parameters(Section):
    letters: str = Field(default="ABCDEFGHIJ", pattern=r"^[A-Z]{2,26}$", description="The letters to choose from.")
    where: Where = Field(default="auto", description="Place of the answer; auto: boxed, tags, ####, phrase, last line.")


def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    """Compare every completion's choice with the truth, a letter: a number could count from 0 or from 1."""
    text = truth_text(truth, NAME)
    gold = chosen(text, parameters.letters)
    if gold is None:
        raise BadGroundTruth(
            f"{NAME}: the row's ground_truth must be a letter of {parameters.letters}, got {text[:80]!r}"
        )
    verdicts = []
    for completion in completions:
        answer = final_answer.find(completion, parameters.where)
        letter = None if answer is None else chosen(answer, parameters.letters)
        verdicts.append(Verdict(float(letter == gold), {"has_answer": float(letter is not None)}))
    return verdicts


def chosen(answer: str, letters: str) -> str | None:
    """Return the letter that an answer chooses, in upper case; None for none or several."""
    plain = latex.plain_text(answer[:_MAX_CHARS]).strip(" *_`$.。\n")
    lead = _LEAD.match(plain)
    plain = plain[lead.end() :].lstrip(" *_`$") if lead else plain
    match = _BARE.match(plain)
    if match is None or match["letter"].upper() not in letters:
        return None
    rest = plain[match.end() :]
    others = {found["letter"] for found in _OTHERS.finditer(rest)}
    is_list = any(letter in letters and letter != match["letter"].upper() for letter in others)
    joined = (
        re.match(r"\s{0,3}(?:and|or|和|或|/|,|&|\+)", rest, re.IGNORECASE) is not None or plain[match.end() - 1] in ",;"
    )
    return None if is_list and joined else match["letter"].upper()


REWARD = PureReward(
    name=NAME,
    description="1 when the chosen letter is the ground truth's",
    judge=judge,
    parameters=Parameters,
    data_sources=("multiple_choice",),
    parts=("has_answer",),
    notes="an answer with several letters chooses none; a ground truth that is a number is refused, because it may count "
    "from 0 or from 1",
    success=1.0,
)
