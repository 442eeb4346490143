"""Text of messages, models and servers, made safe for a terminal; pure."""

from __future__ import annotations

_KEPT = frozenset("\n\t")


def printable(text: object) -> str:
    """Return a text with control characters as their escapes: printed, they could change what a terminal shows.

    Line feeds and tabs are kept, except a carriage return, which would overwrite the line.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c in _KEPT or not _is_control(c) else c.encode("unicode_escape").decode() for c in shown)


def _is_control(letter: str) -> bool:
    """Return True for C0, DEL, C1, surrogates, and the characters that change the direction of text."""
    code = ord(letter)
    return (
        code < 0x20
        or 0x7F <= code < 0xA0
        or 0xD800 <= code < 0xE000
        or 0x202A <= code <= 0x202E
        or 0x2066 <= code <= 0x2069
    )
