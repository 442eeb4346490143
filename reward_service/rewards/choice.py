r"""1 when the letter chosen is the ground truth's: multiple choice.

The choice is the start of the final answer: ``B``, ``(B)``, ``B. Paris``, ``\text{(B)}``, ``option B``. An answer that
names several letters chooses none. The text of a choice counts as its letter where the truth has it: ``B. Paris``, or
``{"answer": "B", "choices": ["Rome", "Paris"]}``. Part ``has_answer`` is 1 if a choice was found.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards import question_answer
from penstock.reward_service.rewards.parsing import final_answer, latex
from penstock.reward_service.rewards.parsing.final_answer import Where
from penstock.reward_service.rewards.reward import PureReward, Verdict, truth_text, verdicts_on

NAME = "multiple_choice"
_LEAD = re.compile(r"(?:(?:option|choice|answer|选项|选)\s{0,3}[:：]?\s{0,3})", re.IGNORECASE)
_BARE = re.compile(
    r"[(\[（]?\s?(?P<letter>[A-Za-z])\s?(?:[)\]）]|[.:：、,;!?](?=\s|$)|(?=$)|(?<=\s)(?=[-–—(（]|(?:because|since|as)\b))"
)
_OTHERS = re.compile(r"(?<![A-Za-z])[(\[（]?(?P<letter>[A-Z])(?:[)\]）]|(?![A-Za-z'’]))")
_SEVERAL = re.compile(  # B (50%), C (50%); B: x C: y; B? No, C
    r"[,;/|&+?→>]\s{0,3}[(\[]?(?P<joined>[A-Z])(?![A-Za-z'’])|(?<![A-Za-z])(?P<listed>[A-Z])\s?(?::|\([0-9])"
    r"|(?:[.,;)]\s+|\n|\s{2})(?P<begins>[A-Z])[.)]\s"
)
_JOINED = re.compile(r"\s{0,3}(?:and|or|和|或|/|,|&|\+|[-–—(（]\s{0,3}[A-Z](?![A-Za-z]))", re.IGNORECASE)
_SIGNS = re.compile(r"[<>=+*/^\\|≤≥≠±]|(?<!\w)(?<!\w\s)[-−](?=\s?\w)")
_MAX_CHARS = 400


class Parameters(Section):
    letters: str = Field(default="ABCDEFGHIJ", pattern=r"^[A-Z]{2,26}$", description="The letters to choose from.")
    where: Where = Field(default="auto", description="Place of the answer; auto: boxed, tags, ####, phrase, last line.")


def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    """Compare every completion's choice with the truth: a letter, by itself or before its text, or an object with choices."""
    gold, texts = _right(truth, parameters.letters)
    found = (final_answer.find(final_answer.spoken(completion), parameters.where) for completion in completions)
    letters = (None if answer is None else _choice(answer, texts, parameters.letters) for answer in found)
    return verdicts_on(letters, gold.__eq__)


def _right(truth: Any, letters: str) -> tuple[str, dict[str, str]]:
    """Return the right letter, and the known texts of letters. A number could count from 0 or from 1, and is refused."""
    options: Any = (
        next((truth[name] for name in ("choices", "options") if name in truth), None)
        if isinstance(truth, dict)
        else None
    )
    answer = (
        next((truth[name] for name in ("answer", "label", "answerKey") if name in truth), None) if options else truth
    )
    text = truth_text(answer, NAME)
    if options and isinstance(answer, int):
        raise BadGroundTruth(
            f"{NAME}: the row's answer {text} may be a place or the text of a choice; write the letter, or the text in quotes"
        )
    if isinstance(options, dict) and options.keys() == {"text", "label"}:  # as in ARC
        options = dict(zip(options["label"], options["text"], strict=True))
    if isinstance(options, list):
        options = dict(zip(letters, options, strict=False))
    texts = {str(letter).upper(): str(option) for letter, option in (options or {}).items()}
    gold = chosen(text, letters) or _named(text, texts)
    if gold is None or (texts and gold not in texts):
        raise BadGroundTruth(f"{NAME}: the row's ground_truth must be a letter of {letters}, got {text[:80]!r}")
    own = _after_letter(text)
    return gold, texts or ({gold: own} if own else {})


def _after_letter(text: str) -> str:
    plain = latex.plain_text(text[:_MAX_CHARS]).strip(" *_`$\n")
    match = _BARE.match(plain)
    rest = plain[match.end() :].strip() if match else ""
    return re.sub(r"^[-–—]\s+", "", rest) if question_answer.words(rest) else ""


def _named(said: str, texts: dict[str, str]) -> str | None:
    """Return the letter whose text is said; the case of letters counts where nothing else tells two choices apart."""
    for key in (_key, "".join):
        same = [letter for letter, text in texts.items() if text and key(text) == key(said)]
        if len(same) == 1:
            return same[0]
    return None


def _key(text: str) -> str:
    """Return the words of a text; of one with signs of mathematics the text itself."""
    plain = "".join(latex.plain_text(text).replace("−", "-").casefold().split()).rstrip(".")
    return plain if _SIGNS.search(text) else question_answer.key(text)


def _choice(answer: str, texts: dict[str, str], letters: str) -> str | None:
    """Return the letter that an answer names, or whose text it is; None if its letter and its text contradict each other."""
    letter = chosen(answer, letters)
    if letter is not None:
        return letter if _named(_after_letter(answer), texts) in {None, letter} else None
    return _named(latex.plain_text(answer[:_MAX_CHARS]), texts)


def chosen(answer: str, letters: str) -> str | None:
    """Return the letter that an answer chooses, in upper case; None for none or several."""
    plain = latex.plain_text(answer[:_MAX_CHARS]).strip(" *_`$.。!\"'“”\n")
    lead = _LEAD.match(plain)
    plain = plain[lead.end() :].lstrip(" *_`$") if lead else plain
    match = _BARE.match(plain)
    if match is None or match["letter"].upper() not in letters:
        return None
    rest = plain[match.end() :]
    others = {other["letter"] for other in _OTHERS.finditer(rest)}
    is_list = any(letter in letters and letter != match["letter"].upper() for letter in others)
    listed = {other[other.lastgroup or 0] for other in _SEVERAL.finditer(rest)}
    joined = (
        bool(listed & {*letters} - {match["letter"].upper()})
        or _JOINED.match(rest) is not None
        or plain[match.end() - 1] in ",;"
    )
    return None if is_list and joined else match["letter"].upper()


REWARD = PureReward(
    name=NAME,
    description="1 when the chosen letter is the ground truth's",
    judge=judge,
    reads="answer",
    parameters=Parameters,
    data_sources=("multiple_choice",),
    parts=("has_answer",),
    notes="the text of the choice counts where the truth has it (`B. Paris`); "
    "an answer with several letters chooses none; a ground truth that is a number is refused, because it may count "
    "from 0 or from 1",
    success=1.0,
)
