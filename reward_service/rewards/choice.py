r"""1 when the letter chosen is the ground truth's: multiple choice.

The choice is the start of the final answer: ``B``, ``(B)``, ``B. Paris``, ``\text{(B)}``, ``option B``. An answer that
names several letters chooses none. The text of a choice counts as its letter where the truth has it: ``B. Paris``, or
``{"answer": "B", "choices": ["Rome", "Paris"]}``. Part ``has_answer`` is 1 if a choice was found.

`classification`: the final answer (tags, box, phrase or last line) gives a label if it equals one, ignoring case and punctuation, or
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
    joined = (
        re.match(r"\s{0,3}(?:and|or|和|或|/|,|&|\+|[-–—(（]\s{0,3}[A-Z](?![A-Za-z]))", rest, re.IGNORECASE) is not None
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


CLASSIFICATION = "classification"
_NEGATIONS = frozenset({"not", "no", "non", "never", "neither", "nor", "isn't", "isnt", "wasn't", "cannot", "without"})
_MAX_LABEL_CHARS = 2000


class LabelParameters(Section):
    labels: tuple[str, ...] = Field(
        default=(), max_length=1000, description="All labels; none: only an answer that is exactly the label counts."
    )
    where: Where = Field(default="auto", description="Place of the answer; auto: boxed, tags, ####, phrase, last line.")


def judge_labels(parameters: LabelParameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    text = truth_text(truth, CLASSIFICATION)
    gold, labels = plain(text), tuple(plain(label) for label in parameters.labels)
    if not gold or (labels and gold not in labels):
        known = f" of {', '.join(parameters.labels[:10])}" if labels else ""
        raise BadGroundTruth(f"{CLASSIFICATION}: the row's ground_truth must be a label{known}, got {text[:80]!r}")
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
    said = plain(latex.plain_text(answer[:_MAX_LABEL_CHARS])) if answer else ""
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


LABEL_REWARD = PureReward(
    name=CLASSIFICATION,
    description="1 when the label is the ground truth's; an answer with several labels has none",
    judge=judge_labels,
    reads="answer",
    parameters=LabelParameters,
    data_sources=("classification",),
    parts=("has_answer", "ambiguous"),
    notes='without `labels` the whole answer is compared; a label after "not", "no" or "non-" does not count',
    success=1.0,
)
