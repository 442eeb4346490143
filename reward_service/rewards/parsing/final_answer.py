r"""Find a completion's final answer: in ``\boxed{}``, in tags, after ``####`` or a phrase, or at its end.

Every search is one or two passes over the text, whatever its content. An answer is returned without surrounding
white space; None means that there is none, an empty text that its place is empty.
"""

from __future__ import annotations

import re
from typing import Literal

from penstock.reward_service.program_tests.code_blocks import THINKING, before_end, ends_thinking
from penstock.reward_service.rewards.parsing import latex
from penstock.reward_service.rewards.parsing.patterns import read_patterns

Where = Literal["auto", "boxed", "tags", "hashes", "phrase", "last_line", "whole"]

_OPEN, _CLOSE = "<answer>", "</answer>"
TAKES_BACK = re.compile(
    r"\b(?:wait|actually|no|changing|change|correction|wrong|mistake|instead|reflection|reconsider\w*)\b|\?",
    re.IGNORECASE,
)
_PATTERN = read_patterns(__file__)
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
        if not _PATTERN["noun"].search(line):
            continue
        ends = [match.end() for match in _PATTERN["phrase"].finditer(line) if not match["wrong"]]
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
