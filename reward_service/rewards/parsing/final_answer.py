r"""Find a completion's final answer: in ``\boxed{}``, in tags, after ``####`` or a phrase, or at its end.

Every search is one or two passes over the text, whatever its content. An answer is returned without surrounding
white space; None means that there is none, an empty text that its place is empty.
"""

from __future__ import annotations

import re
from typing import Literal

from penstock.reward_service.program_tests.code_blocks import THINKING, before_end, ends_thinking
from penstock.reward_service.rewards.parsing import latex

Where = Literal["auto", "boxed", "tags", "hashes", "phrase", "last_line", "whole"]

_OPEN, _CLOSE = "<answer>", "</answer>"
_WRONG = (  # before "answer: B", which then is none
    "wrong|(?:second|next)[\\s-]best|incorrect|false|rejected|discarded|falsche|fausse|неправильный|неверный|fout|fel|yanlış|गलत|错误|錯誤|오|誤|(?:not|n['’]t)\\s(?:\\w{1,12}\\s)?(?:sure|confident|certain|think|believe|say|convinced)\\s(?:that\\s|if\\s|whether\\s)?(?:the\\s)?(?:\\w{1,12})?"
)
TAKES_BACK = re.compile(
    r"\b(?:wait|actually|no|changing|change|correction|wrong|mistake|instead|reflection|reconsider\w*)\b|\?",
    re.IGNORECASE,
)
_NOUNS = (
    "answers", "ans", "answer", "antwort", "réponse", "respuesta", "risposta", "resposta", "antwoord", "svaret", "svar", "vastaus", "odpowiedź", "odpowiedz",
    "odpověď", "răspuns", "válasz", "cevap", "yanıt", "jawabannya", "jawaban", "ответ", "відповідь", "απάντηση", "תשובה", "đáp án",
)  # fmt: skip
_NOUNS_IN_WORDS = ("答案", "答え", "正解", "正答", "정답", "الإجابة", "الجواب", "उत्तर", "คำตอบ")
_PHRASE = re.compile(
    rf"""(?P<wrong>(?:{_WRONG})\s{{0,3}})?
    (?:(?<![^\W_])(?:{"|".join(map(re.escape, _NOUNS))})(?![^\W_])|{"|".join(_NOUNS_IN_WORDS)}|(?<![가-힣])답)
    (?:\s{{1,4}}(?:corre(?:ct|tt?)[ae]?|finale?|giusta|esatta|exacte|đúng|الصحيحة|الصحيح|النهائية))?[*_"']{{0,3}}(?:,\s\w{{1,12}},)?
    (?:(?:\s{{1,4}}(?:is|ist|lautet|est|es|è|é|är|adalah|là|هي|هو)(?!\w)|\s?(?:は|[은는](?=\s)|คือ|为|為|是|[选選]择?))?\s{{0,4}}[:：】]
    |\s{{1,4}}(?:is|ist|lautet|est|es|è|é|är|adalah|là|هي|هو)(?!\w)(?:[ ,]{{1,2}}(?:therefore|thus|hence|then|simply|indeed|just)\b,?){{0,3}}|\s?(?:は|[은는](?=\s)|คือ|[应應][该該]?[为為是])|(?<=đáp\sán)\s(?=\S{{1,3}}\W*$)|\s{{0,4}}[=→]|\s{{1,4}}(?:[—–](?=\s)|-(?=\s[^\W\d]))
    |(?<=案)[是为為选選]?|(?<=ied[zź])\sto(?!\w)|(?<=उत्तर)\s(?=\S{{1,40}}\sहै))[ \t*_"“「『【]{{0,8}}""",
    re.IGNORECASE | re.VERBOSE,
)
_SAYS_IT_IS = re.compile(r"\s?(?:です|である|だ|となります|입니다|이다|이에요|예요|है)[。.!।]{0,2}$")
_SOLUTION = re.compile(r"^(?:solution|lösung|解答)\s?[:：]\s*", re.IGNORECASE)
_MARKDOWN = "*_` \t"
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


def find(text: str, where: Where) -> str | None:
    """Return the answer at a place; ``auto`` takes the first place, in order, that has one."""
    match where:
        case "boxed":
            return latex.last_boxed(text)
        case "tags":
            return in_tags(text)
        case "hashes":
            return after_hashes(text)
        case "phrase":
            return after_phrase(text)
        case "last_line":
            return last_line(text)
        case "whole":
            return text.strip()
        case "auto":
            ways = (latex.last_boxed, in_tags, after_hashes, after_phrase, last_line)
            return next((answer for answer in (way(text) for way in ways) if answer is not None), None)


def spoken(text: str) -> str:
    """Return what follows the last chain of thought, without end tokens; a chain that was not finished has no answer."""
    begin, thinks = 0, False
    for tag in THINKING.finditer(text):
        begin, thinks = tag.end(), not ends_thinking(tag)
    return "" if thinks else before_end(text[begin:])


def in_tags(text: str) -> str | None:
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(_OPEN) : end].strip()


def after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last ``####``, or the next line if nothing follows on the same line."""
    start = text.rfind("####")
    return None if start < 0 else _first_line(text[start + 4 :].lstrip())


def after_phrase(text: str) -> str | None:
    """Return the rest of the line after the last "answer is", "answer:" or the same in another language."""
    for line in reversed(text.split("\n")):
        if "답" not in line and not any(map(line.lower().__contains__, (*_NOUNS, *_NOUNS_IN_WORDS))):
            continue
        ends = [match.end() for match in _PHRASE.finditer(line) if not match["wrong"]]
        if ends:
            rest = _SAYS_IT_IS.sub("", line[ends[-1] :].strip(_MARKDOWN + "\r"))
            return rest if rest.strip("。.") else None
    return None


def last_line(text: str) -> str | None:
    return _SOLUTION.sub("", text.rstrip().rsplit("\n", 1)[-1].strip()) or None


def _first_line(text: str) -> str:
    return text.partition("\n")[0].strip()


def words(text: str) -> list[str]:
    """Split a text, in order, at white space and around every character that is a word by itself."""
    return _WORD.findall(text)
