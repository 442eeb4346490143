"""The words of a text: runs of letters and digits, and every Chinese or Japanese character for itself."""

from __future__ import annotations

import re

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


def words(text: str) -> list[str]:
    """Split a text, in order, at white space and around every character that is a word by itself."""
    return _WORD.findall(text)
