r"""1 when the letter chosen is the ground truth's: multiple choice.

The choice is the start of the final answer: ``B``, ``(B)``, ``B. Paris``, ``\text{(B)}``, ``option B``. An answer that
names several letters chooses none. If it names none, a later sentence that states one counts (``so B is correct``,
``I'd pick B``, ``故选：B``), or the first line before an explanation. The text of a choice counts as its letter where
the truth has it: ``B. Paris``, or ``{"answer": "B", "choices": ["Rome", "Paris"]}``. Part ``has_answer`` is 1 if a
choice was found. The patterns are in ``choice.toml``.
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
from penstock.reward_service.rewards.parsing.patterns import read_patterns
from penstock.reward_service.rewards.reward import PureReward, Verdict, truth_text, verdicts_on

NAME = "multiple_choice"
_PATTERN = read_patterns(__file__)
_WIDE = str.maketrans({0xFF21 + place: chr(0x41 + place) for place in range(26)})
_MAX_CHARS = 400


class Parameters(Section):
    letters: str = Field(default="ABCDEFGHIJ", pattern=r"^[A-Z]{2,26}$", description="The letters to choose from.")
    where: Where = Field(default="auto", description="Place of the answer; auto: boxed, tags, ####, phrase, last line.")


def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    """Compare each choice with the truth: a letter, by itself or before its text, or an object with choices."""
    gold, texts = _right(truth, parameters.letters)
    return verdicts_on((_letter(completion, parameters, texts) for completion in completions), gold.__eq__)


def _letter(completion: str, parameters: Parameters, texts: dict[str, str]) -> str | None:
    """Return the letter that a completion chooses: of its answer, or of the last sentence at its end that states one."""
    answer, letters = find(completion, parameters.where, parameters.letters), parameters.letters
    letter = None if answer is None else letter_of(answer, texts, letters)
    text = final_answer.spoken(completion)
    if answer is None or parameters.where != "auto" or answer != final_answer.last_line(text):
        return letter
    before = final_answer.last_line(text.rstrip()[: -len(answer)]) or ""
    if letter is not None:  # not a list of letters
        return (
            letter if not re.fullmatch(r"\W*[A-Za-z]\W*", before) or chosen(before, letters) in {None, letter} else None
        )
    if chosen(answer, letters) is not None:
        return None
    first, _, rest = text.strip().partition("\n")  # a letter, and then why
    is_alone = not final_answer.TAKES_BACK.search(rest) and not {
        other["letter"] for other in _PATTERN["others"].finditer(rest)
    } & {*letters[1:]}
    return _stated(text[-_MAX_CHARS:], letters) or (chosen(first, letters) if rest and is_alone else None)


def find(completion: str, where: Where, letters: str) -> str | None:
    """Return the answer of a completion at a place: the first line before an explanation that states no other."""
    answer = final_answer.find(text := final_answer.spoken(completion), where)
    first, _, rest = text.strip().partition("\n")
    if (
        where == "auto"
        and answer == final_answer.last_line(text)
        and _PATTERN["explained"].match(rest.lstrip(" *_#\n"))
    ):
        return first if _stated(rest[-_MAX_CHARS:], letters) in {None, chosen(first, letters)} else answer
    return answer


def _stated(answer: str, letters: str) -> str | None:
    """Return the letter that the last sentence about one states to be right; None if it doubts it or states two."""
    stated, said, end, answer = None, None, 0, _PATTERN["rejected"].sub("", answer)
    for match in _PATTERN["stated"].finditer(answer):
        letter, before = match[match.lastgroup or 0], answer[: match.start()]
        is_noun = match["before"] and not _PATTERN["subject"].search(before)
        is_open = (
            is_noun
            or _PATTERN["doubts"].search(_PATTERN["clause"].split(before)[-1])
            or _PATTERN["joined_before"].search(before if match["before"] else before.rstrip(" ,、"))
        )
        goes_on = not (match["before"] or _PATTERN["follows"].match(answer, match.end()))
        is_list = _PATTERN["joined_after"].match(answer, match.end())
        is_second = said not in {None, letter} and not _PATTERN["turns"].search(answer, end, match.start())
        stated = None if is_open or goes_on or is_list or is_second or letter not in letters else letter
        said, end = (said if is_open or (goes_on and not is_list) else letter), match.end()
    return None if final_answer.TAKES_BACK.search(answer[end:].partition("\n")[2]) else stated


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
    match = _PATTERN["bare"].match(plain)
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
    return plain if _PATTERN["signs"].search(text) else question_answer.key(text)


def letter_of(answer: str, texts: dict[str, str], letters: str) -> str | None:
    """Return the letter that an answer names, or whose text it is; None if its letter and its text contradict each other."""
    letter = chosen(answer, letters)
    if letter is not None:
        return letter if _named(_after_letter(answer), texts) in {None, letter} else None
    plain = _PATTERN["bullet"].sub("", latex.plain_text(answer[:_MAX_CHARS])).strip(" *_`")
    end = re.sub(r"['‘]([A-Z])['’]", r"\1", latex.plain_text(answer[-_MAX_CHARS:]).translate(_WIDE))
    return _named(plain, texts) or _stated(end, letters) or _at_end(end, letters)


def _at_end(answer: str, letters: str) -> str | None:
    """Return the letter at the end of an answer that names no other one, and refuses none."""
    last = _PATTERN["at_end"].search(answer)
    others = {other["letter"] for other in _PATTERN["others"].finditer(re.sub(r"\b[AI] (?=[a-z])", "", answer))} & {
        *letters
    }
    return last["last"] if last and not _PATTERN["refuses"].search(answer) and others <= {last["last"]} else None


def chosen(answer: str, letters: str) -> str | None:
    """Return the letter that an answer chooses, in upper case; None for none or several."""
    plain = latex.plain_text(answer[:_MAX_CHARS]).translate(_WIDE)
    plain = _PATTERN["bullet"].sub("", plain).strip(" *_`$.。!\"'“”【】「」『』«»[]{}<>\n")
    lead = _PATTERN["lead"].match(plain)
    plain = plain[lead.end() :].lstrip(" *_`$") if lead else plain
    plain = _PATTERN["rejected"].sub("", plain)
    match = _PATTERN["bare"].match(plain)
    if match is None or match["letter"].upper() not in letters:
        return None
    rest = re.split(r"\b(?:because|since)\b", plain[match.end() :])[0]
    if (_PATTERN["said_of"].match(rest) and _PATTERN["refuses"].search(rest)) or _PATTERN["called_wrong"].match(rest):
        return None
    others = {other["letter"] for other in _PATTERN["others"].finditer(rest)}
    is_list = any(letter in letters and letter != match["letter"].upper() for letter in others)
    listed = {other[other.lastgroup or 0] for other in _PATTERN["several"].finditer(rest)}
    joined = (
        bool(listed & {*letters} - {match["letter"].upper()})
        or _PATTERN["joined"].match(rest) is not None
        or plain[match.end() - 1] in ",;?"
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
