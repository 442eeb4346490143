r"""1 when the letter chosen is the ground truth's: multiple choice.

The choice is the start of the final answer: ``B``, ``(B)``, ``B. Paris``, ``\text{(B)}``, ``option B``. An answer that
names several letters chooses none. If it names none, a later sentence that states one counts (``so B is correct``,
``I'd pick B``, ``故选：B``), or the first line before an explanation. The text of a choice counts as its letter where
the truth has it: ``B. Paris``, or ``{"answer": "B", "choices": ["Rome", "Paris"]}``. Part ``has_answer`` is 1 if a
choice was found.
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
_LEAD = re.compile(
    r"(?:(?:option|choice|answer|选项|选|probably|likely|most likely|definitely|clearly)\s{0,3}[:：]?\s{0,3})+",
    re.IGNORECASE,
)
_BARE = re.compile(
    r"""[(\[（]?\s?(?P<letter>[A-Za-z])\s?
    (?:[)\]）]|[.:：、,;!?](?=\s|$)|(?=$)|(?<=\s)(?=[-–—(（]|(?:because|since|as)\b)|(?=选?项(?:$|[。，,.]|是?正确)))""",
    re.VERBOSE,
)
_OTHERS = re.compile(r"(?<![A-Za-z])[(\[（]?(?P<letter>[A-Z])(?:[)\]）]|(?![A-Za-z'’]))")
_SEVERAL = re.compile(  # B (50%), C (50%); B: x C: y; B? No, C
    r"[,;/|&+?→>]\s{0,3}[(\[]?(?P<joined>[A-Z])(?![A-Za-z'’])|(?<![A-Za-z])(?P<listed>[A-Z])\s?(?::|\([0-9])"
    r"|(?:[.,;)]\s+|\n|\s{2})(?P<begins>[A-Z])[.)]\s"
)
_JOINED = re.compile(r"\s{0,3}(?:and|or|和|或|/|,|&|\+|[-–—(（]\s{0,3}[A-Z](?![A-Za-z]))", re.IGNORECASE)
_SIGNS = re.compile(r"[<>=+*/^\\|≤≥≠±]|(?<!\w)(?<!\w\s)[-−](?=\s?\w)")
_LETTER = r"""
    (?:\*\*|[$\"'“`])?[(（\[]?
    (?P<{}>(?![AI]\s(?!(?:because|since|as|over|is|and|or|nor)\b)[a-z])[A-Z])  # no article, no pronoun
    [)）\]]?(?![*-]*[A-Za-z0-9'’^_=<>])[*$\"'”`]{{0,2}}
"""
_SURE = r"(?:\s(?:probably|likely|most\slikely|clearly|definitely|therefore|thus|option|choice|the\sletter)){0,2}"
_STATED = re.compile(
    rf"""\b(?i:(?:
        (?:answer|option|choice|letter)\s(?:is|would\sbe|should\sbe|must\sbe)  # the correct choice is B
        |(?:I|I['’](?:d|ll)|I\swould|I\swill|we|let['’]s)\s(?:choose|chose|pick|select|go\swith|say|answer)  # I'd pick B
        |(?:(?:so|thus|hence|therefore),?|it(?:['’]s|\sis|\smust\sbe|\shas\sto\sbe))(?={_SURE}\s\S{{1,6}}\W*$)  # so B
    ){_SURE}):?\s{{0,3}}{_LETTER.format("after")}
    |(?:选(?:择|项)?|答案)\s?[是为]?\s?[:：]?\s?{_LETTER.format("chinese")}
    |(?<![A-Za-z0-9]){_LETTER.format("before")}(?:
        \sis\s(?:the\s)?(?:most\slikely\s)?(?:correct|right|best|answer)(?:\s(?:answer|choice|option|one|letter))?
        (?=\W{{0,3}}(?:$|[.,;:!?(\n]|(?:because|since|as|and|but|while|so|too|also|only|if|unless|when)\b))
        |\s?(?:选?项)?[是也]?正确
    )(?!\s(?:only|if|unless|when)\b)  # B is correct""",
    re.VERBOSE,
)
_FOLLOWS = re.compile(
    r"""\s{0,3}(?:$|[.!,;:()\n。，；！（]|(?:because|since|as|over|rather|instead)\b|选?项|是?正确
    |(?<=[)）\]])\s(?!(?:is|was|isn|can|and|or|would)\b))""",
    re.VERBOSE,
)
_JOINED_AFTER = re.compile(r"\s?(?:and|or|nor|和|或|、|/|,|&)\s?(?:option\s)?[(（\[]?[A-Z](?![A-Za-z'’])")
_JOINED_BEFORE = re.compile(r"(?<![A-Za-z])[A-Z][)）\]]?\s?(?:and|or|nor|和|或|、|,|/|&)\s?[(（\[*$]*$")
_SUBJECT = re.compile(  # before the letter of "B is correct", which is no subject in "vitamin B is correct"
    r"""(?:^|[.,;:!?\n。，；：！？、一-鿿]
    |\b(?:option|choice|answer|letter|so|thus|hence|therefore|only|that|and|but|then|is|think))[\s(（\[*$"'“`]*$""",
    re.IGNORECASE | re.VERBOSE,
)
_DOUBTS = re.compile(
    r"""\b(?:not|none|never|if|whether|unless|might|may|could|suppose|assum\w+|why|first|initially|neither|wrong|false)\b
    |n['’]t\b|不|非|如果|错""",
    re.IGNORECASE | re.VERBOSE,
)
_TURNS = re.compile(
    r"\b(?:but|actually|wait|no|however|instead|so|thus|hence|therefore|reflection)\b|但|所以|故|因此", re.IGNORECASE
)
_CLAUSE = re.compile(r"[.,;!?\n，。；！？]")
_REJECTED = re.compile(  # B, not A
    r"""[,;]?\s(?:and\s|but\s)?(?:not|rather\sthan|instead\sof)
    (?:(?:\s(?:or|nor))?\s(?:option\s|choice\s)?[(\[]?[A-Z][)\]]?(?![A-Za-z'’])){1,4}""",
    re.VERBOSE,
)
_EXPLAINED = re.compile(r"(?i:explanation|reason(?:ing)?|rationale|justification|because|why|解析|解释|理由)\b")
_WIDE = str.maketrans({0xFF21 + place: chr(0x41 + place) for place in range(26)})
_MAX_CHARS = 400


class Parameters(Section):
    letters: str = Field(default="ABCDEFGHIJ", pattern=r"^[A-Z]{2,26}$", description="The letters to choose from.")
    where: Where = Field(default="auto", description="Place of the answer; auto: boxed, tags, ####, phrase, last line.")


def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    """Compare each choice with the truth: a letter, by itself or before its text, or an object with choices."""
    gold, texts = _right(truth, parameters.letters)
    found = (find(completion, parameters.where, parameters.letters) for completion in completions)
    letters = (None if answer is None else letter_of(answer, texts, parameters.letters) for answer in found)
    return verdicts_on(letters, gold.__eq__)


def find(completion: str, where: Where, letters: str) -> str | None:
    """Return the answer of a completion at a place: the first line before an explanation that states no other."""
    answer = final_answer.find(text := final_answer.spoken(completion), where)
    first, _, rest = text.strip().partition("\n")
    if where == "auto" and answer == final_answer.last_line(text) and _EXPLAINED.match(rest.lstrip(" *_#\n")):
        return first if _stated(rest[-_MAX_CHARS:], letters) in {None, chosen(first, letters)} else answer
    return answer


def _stated(answer: str, letters: str) -> str | None:
    """Return the letter that the last sentence about one states to be right; None if it doubts it or states two."""
    stated, said, end, answer = None, None, 0, _REJECTED.sub("", answer)
    for match in _STATED.finditer(answer):
        letter, before = match[match.lastgroup or 0], answer[: match.start()]
        is_noun = match["before"] and not _SUBJECT.search(before)
        is_open = (
            is_noun
            or _DOUBTS.search(_CLAUSE.split(before)[-1])
            or _JOINED_BEFORE.search(before if match["before"] else before.rstrip(" ,、"))
        )
        goes_on = not (match["before"] or _FOLLOWS.match(answer, match.end()))
        is_list = _JOINED_AFTER.match(answer, match.end())
        is_second = said not in {None, letter} and not _TURNS.search(answer, end, match.start())
        stated = None if is_open or goes_on or is_list or is_second or letter not in letters else letter
        said, end = (said if is_open or (goes_on and not is_list) else letter), match.end()
    return stated


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


def letter_of(answer: str, texts: dict[str, str], letters: str) -> str | None:
    """Return the letter that an answer names, or whose text it is; None if its letter and its text contradict each other."""
    letter = chosen(answer, letters)
    if letter is not None:
        return letter if _named(_after_letter(answer), texts) in {None, letter} else None
    plain = latex.plain_text(answer[:_MAX_CHARS])
    return _named(plain, texts) or _stated(latex.plain_text(answer[-_MAX_CHARS:]).translate(_WIDE), letters)


def chosen(answer: str, letters: str) -> str | None:
    """Return the letter that an answer chooses, in upper case; None for none or several."""
    plain = latex.plain_text(answer[:_MAX_CHARS]).translate(_WIDE).strip(" *_`$.。!\"'“”】[]{}<>\n")
    lead = _LEAD.match(plain)
    plain = plain[lead.end() :].lstrip(" *_`$") if lead else plain
    plain = _REJECTED.sub("", plain)
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
