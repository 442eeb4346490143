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
    r"(?:(?:option|choice|answer|ans\.?|(?:l['’])?option|вариант|antwort|réponse|respuesta|choose|pick|选项|選択肢|[应應]?[选選]|probably|likely|most likely|definitely|clearly|opción|opção|opzione|letra|lettre|donc|also|es\sist|c['’]est|è|é|thus|so|hence|therefore|(?:it|that)(?:['’]s| is| would be)"
    r"|(?-i:l[ae]|a|el|die)(?-i:(?=\s(?:opción|letra|lettre|opção|[(\[]?[A-Z](?![A-Za-z])))))\s{0,3}[:：,]?\s{0,3})+",
    re.IGNORECASE,
)
_BARE = re.compile(
    r"""[(\[（]?\s?(?P<letter>[A-Za-z])\s?
    (?:[)\]）]|[.:：、,;!?](?=\s|$)|(?=$)|(?<=\s)(?=[-–—(（]|(?:because|since|as)\b)|(?=选?项(?:$|[。，,.]|是?正确|符合))
    |["'](?=\s?[,}])|(?=[번番]$)|(?=\s[^\w\s?~/+&,;:|-]{1,3}$))""",
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
    (?P<{}>(?![AI]\s(?!(?:because|since|as|over|is|and|or|nor|ist|es|est)\b)[a-zéè])[A-Z])  # no article, no pronoun
    [)）\]]?(?![*-]*[A-Za-z0-9'’^_=<>])[*$\"'”`]{{0,2}}
"""
_SURE = r"(?:\s(?:probably|likely|most\slikely|clearly|definitely|therefore|thus|option|choice|the\sletter)){0,2}"
_STATED = re.compile(
    rf"""\b(?i:(?:
        (?:answer|option|choice|letter|pick|guess|selection|vote|winner)\s(?:is|would\sbe|should\sbe|must\sbe)  # the correct choice is B
        |(?:(?:final|correct|right|best|chosen|selected|my)\s(?:option|choice|letter|pick|guess|selection|vote)|(?:^|\n)\W*(?:pick|guess|vote|choice))\s?:
        |(?:best|correct|right)\s(?:answer|option|choice)\s[\w\s]{{1,30}}?\sis
        |(?:I|I['’]m|I\sam|(?:I|you|we)['’](?:d|ll)|I\swould|I\swill|(?:you|we|one)\s(?:should|must)|we|let['’]s|(?:^|[.\n]\s?)(?:\*\*)?(?=choose|pick|select|mark|tick|go))(?:\s|(?<=[.\n*])|^)
        (?:going\sto\s)?(?:choos(?:e|ing)|chose|take|pick|select|mark|tick|get|lean\stowards?|bet\son|opt\sfor|settle\son|go(?:ing)?\s(?:with|for)|say|answer)  # I'd pick B
        |(?:this|that|which|it)\sleaves(?:\sus)?(?:\swith)?(?:\sonly)?
        |(?:(?:so|thus|hence|therefore),?|(?:it|that)(?:['’]s|\sis|\swould\sbe|\smust\sbe|\shas\sto\sbe))(?={_SURE}\s\S{{1,6}}\W*$)  # so B
    ){_SURE}):?\s{{0,3}}{_LETTER.format("after")}
    |(?:选(?:择|项)?|答案)\s?[是为]?\s?[:：]?\s?{_LETTER.format("chinese")}
    |(?<![A-Za-z0-9]){_LETTER.format("before")}(?:
        \s(?:fits|works|satisfies|holds|matches)|\sit\sis(?=\W*(?:$|\n))
        |\s(?:is|must\sbe|has\sto\sbe|(?:seems|looks|appears|would\sbe|should\sbe)(?=[^.!?\n]{{3,40}}\W*\Z)(?!.*\bbut\b))\s(?:to\sbe\s)?(?:(?:the|my|our)\s)?(?:(?:most|only)\s)?(?:likely\s)?
        (?:correct|right|true|best|answer|accurate|appropriate|one)(?:\s(?:answer|choice|option|one|letter|response|statement))?(?:\shere)?
        (?=\W{{0,3}}(?:$|[.,;:!(\n]|(?:because|since|as|and|but|while|so|too|also|only|if|unless|when)\b))
        |\s(?:ist|es|est|é|è|—)\s(?:l?a\s|die\s)?(?:richtige?|korrekte?|bonne|corre(?:ct|tt?)[aeo]?|правильный|верный|(?:respuesta|resposta|risposta|réponse)\scorre\w+)
        (?:\s(?:antwort|réponse|ответ|lösung|option))?(?=\W*(?:$|\n))|\sremains(?=\W*(?:$|\n))|\s?(?:选?项)?(?:[是也]?正确|符合)|가\s정답|番?が(?:正解|正しい|答え)|\s(?:richtig|korrekt)(?=\W*(?:$|\n))
    )(?!\s(?:only|if|unless|when)\b)  # B is correct""",
    re.VERBOSE,
)
_FOLLOWS = re.compile(
    r"""\s{0,3}(?:$|[.!,;:()\n。，；！（]|(?:because|since|as|over|rather|instead|here|then)\b|选?项|是?正确|符合
    |(?<=[)）\]])\s(?!(?:is|was|isn|can|and|or|would)\b))""",
    re.VERBOSE,
)
_JOINED_AFTER = re.compile(r"\s?(?:and|or|nor|和|或|、|/|,|&)\s?(?:option\s)?[(（\[]?[A-Z](?![A-Za-z'’])")
_JOINED_BEFORE = re.compile(r"(?<![A-Za-z])[A-Z][)）\]]?\s?(?:and|or|nor|和|或|、|,|/|&)\s?[(（\[*$]*$")
_SUBJECT = re.compile(  # before the letter of "B is correct", which is no subject in "vitamin B is correct"
    r"""(?:^|[.,;:!?\n。，；：！？、一-鿿]
    |\b(?:(?:statement|claim)\sin|option|choice|answer|antwort|réponse|respuesta|opción|letter|so|thus|hence|therefore|only|that|and|but|then|is|ist|think|means|believe))[\s(（\[*$"'“`]*$""",
    re.IGNORECASE | re.VERBOSE,
)
_DOUBTS = re.compile(
    r"""\b(?:not|none|never|if|whether|unless|might|may|could|suppose|assum\w+|why|first|initially|neither|wrong|false|incorrect|worst|avoid|неправильный|неверный)\b|\b(?:rejected|eliminated|discarded|excluded)\W*$
    |n['’]t\b|不|非|如果|错""",
    re.IGNORECASE | re.VERBOSE,
)
_TURNS = re.compile(
    r"\b(?:but|actually|wait|no|however|instead|so|thus|hence|therefore|reflection)\b|但|所以|故|因此", re.IGNORECASE
)
_AT_END = re.compile(  # the best option: B; since the others are solid, B; mercury (B); la opción correcta es la B
    rf"""(?i:[,→—–]\s?|\b(?:option|choice|letter|opción|opção|вариант|réponse|letra|antwort)\s|.(?=[(（])|\b(?:points?|leads?|corresponds?|comes\sdown)\s(?:us\s)?to\s|\bgives\s|\b(?:wähle|choisis|elijo|escolho|scelgo|выбираю)\s|(?:应该|應該)?是\s?
    |\b(?:option|choice|letter|pick|guess|selection|winner|one|statement|lösung|opción|opção|opzione|alternativa|вариант|ответ|réponse|risposta|resposta|respuesta|seçenek|richtig(?:e)?
    |antwort|correct|right|best|key|response|verdict|final|conclusion|decision|result|vote|верно|答案|正解|정답)\b[^.!?\n]{{0,40}}(?:(?<!\w)(?:is|be|ist|est|es|sería|é|è|[—–])\s|[:：=]\**\s?)(?:l?a\s|l['’])?(?:option\s|opción\s|letra\s|вариант\s)?){_LETTER.format("last")}\W*\Z""",
    re.VERBOSE,
)
_SAID_OF = re.compile(
    r"\W{0,3}(?:is|was|can|could|may|might|does|would|seems|looks|fails?|ist|est|es|é|è|(?=не))(?:n['’]t|not)?(?=\s|не)"
)
_CALLED_WRONG = re.compile(  # C. Berlin is wrong
    r"(?!.*\b(?:others?|else|rest|because|since|as|[A-Z])\b)[^.!?;\n]{0,80}\b(?:is|was|are)\s(?:wrong\b|incorrect\b|false\b|not\b[^,]{0,40}$)"
)
_REFUSES = re.compile(
    r"""\b(?:not|no|non|none|never|neither|nor|cannot|wrong|incorrect\w*|false|fail\w*|except|but|unlike|eliminat\w*|exclud\w*|reject\w*|out|discard\w*|avoid\w*|contradict\w*|problem|against|away|second|mistake\w*|tempt\w*|mauvaise?|yanlış|worst|least
    |if|whether|or|might|may|could|maybe|perhaps|first|initially|was|were|than|nicht|kein\w*|falsch\w*|pas|fausse|ni|errad\w*|sbagliat\w*|não|не|неправильн\w*|неверн\w*|inte|niet)\b
    |n['’]t\b|[?不非错誤]|ない|ません|아[니닙]|오답""",
    re.IGNORECASE | re.VERBOSE,
)
_BULLET = re.compile(r"^(?:[-–•>✅☑✓✔→]\ufe0f?\s+)+(?=[^\W\d])|[✅✔☑\ufe0f\s]+$")
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
        other["letter"] for other in _OTHERS.finditer(rest)
    } & {*letters[1:]}
    return _stated(text[-_MAX_CHARS:], letters) or (chosen(first, letters) if rest and is_alone else None)


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
    plain = _BULLET.sub("", latex.plain_text(answer[:_MAX_CHARS])).strip(" *_`")
    end = re.sub(r"['‘]([A-Z])['’]", r"\1", latex.plain_text(answer[-_MAX_CHARS:]).translate(_WIDE))
    return _named(plain, texts) or _stated(end, letters) or _at_end(end, letters)


def _at_end(answer: str, letters: str) -> str | None:
    """Return the letter at the end of an answer that names no other one, and refuses none."""
    last = _AT_END.search(answer)
    others = {other["letter"] for other in _OTHERS.finditer(re.sub(r"\b[AI] (?=[a-z])", "", answer))} & {*letters}
    return last["last"] if last and not _REFUSES.search(answer) and others <= {last["last"]} else None


def chosen(answer: str, letters: str) -> str | None:
    """Return the letter that an answer chooses, in upper case; None for none or several."""
    plain = latex.plain_text(answer[:_MAX_CHARS]).translate(_WIDE)
    plain = _BULLET.sub("", plain).strip(" *_`$.。!\"'“”【】「」『』«»[]{}<>\n")
    lead = _LEAD.match(plain)
    plain = plain[lead.end() :].lstrip(" *_`$") if lead else plain
    plain = _REJECTED.sub("", plain)
    match = _BARE.match(plain)
    if match is None or match["letter"].upper() not in letters:
        return None
    rest = re.split(r"\b(?:because|since)\b", plain[match.end() :])[0]
    if (_SAID_OF.match(rest) and _REFUSES.search(rest)) or _CALLED_WRONG.match(rest):
        return None
    others = {other["letter"] for other in _OTHERS.finditer(rest)}
    is_list = any(letter in letters and letter != match["letter"].upper() for letter in others)
    listed = {other[other.lastgroup or 0] for other in _SEVERAL.finditer(rest)}
    joined = (
        bool(listed & {*letters} - {match["letter"].upper()})
        or _JOINED.match(rest) is not None
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
