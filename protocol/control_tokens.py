"""Finds the texts of control tokens in messages, and encodes them as ordinary text.

In a rendered chat the text of a control token is that token, whoever wrote it. An escaped text has a code point of a private use plane
in its place, which the encoding turns into the tokens of its characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

_FIRST = 0x100000  # the code point that stands for the first text


class ControlTokens:
    def __init__(self, texts: Iterable[str], as_plain_text: Callable[[], Tokenizer]) -> None:
        """``as_plain_text`` returns a tokenizer that has no such tokens; it is called when a text is encoded first."""
        self._texts = sorted(texts, key=len, reverse=True)
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._escaped = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + len(self._texts))}]")
        self._as_plain_text = as_plain_text
        self._plain: Tokenizer | None = None

    def found_in(self, value: Any) -> set[str]:
        """Return the texts of control tokens in a message or a part of it, keys too, and the code points that stand for them here."""
        if isinstance(value, str):
            return {*self._pattern.findall(value), *self._escaped.findall(value)}
        parts = (
            (*value, *value.values())
            if isinstance(value, Mapping)
            else value
            if isinstance(value, list | tuple)
            else ()
        )
        return set().union(*map(self.found_in, parts))

    def escaped(self, value: Any) -> Any:
        """Return a message, or a part of it, with a code point for each text of a control token."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: chr(_FIRST + self._numbers[match[0]]), value)
        if isinstance(value, Mapping):
            return {self.escaped(key): self.escaped(item) for key, item in value.items()}
        return [self.escaped(item) for item in value] if isinstance(value, list | tuple) else value

    def has_escaped(self, text: str) -> bool:
        return self._escaped.search(text) is not None

    def restored(self, text: str) -> str:
        return self._escaped.sub(lambda match: self._texts[ord(match[0]) - _FIRST], text)

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of an escaped text; ``encode`` makes those of what lies around the parts that have an escaped text."""
        if self._plain is None:
            self._plain = self._as_plain_text()
        ids: list[int] = []
        ordinary = ""
        for part in re.split(f"({self._pattern.pattern})", text):
            if not self.has_escaped(part):
                ordinary += part
                continue
            ids += encode(ordinary) + self._plain.encode(self.restored(part), add_special_tokens=False).ids
            ordinary = ""
        return ids + encode(ordinary)
