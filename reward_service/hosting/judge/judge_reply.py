"""Read a judge's text as a number or a winner; pure. Text that cannot be read is an error, never a score."""

from __future__ import annotations

import math
import re
from typing import Literal

Winner = Literal["a", "b", "tie"]

_ORNAMENT = r"[\s*_`#>\"'.\[\]()]*"
_BULLET = r"(?:[-+]\s)?"
_SCORE = re.compile(
    rf"{_BULLET}{_ORNAMENT}score{_ORNAMENT}[:=]{_ORNAMENT}([-+]?\d+(?:\.\d+)?)(\s*/\s*\d+(?:\.\d+)?)?{_ORNAMENT}", re.I
)
_WINNER = re.compile(rf"{_BULLET}{_ORNAMENT}winner{_ORNAMENT}[:=]{_ORNAMENT}(?:answer\s+)?(a|b|tie){_ORNAMENT}", re.I)
_THINKING = re.compile(r"\A\s*<think>.*?</think>", re.S)
_SHOWN = 160


class Unreadable(ValueError):
    """The judge's text does not end in a verdict; the message shows its end."""


def read_score(text: str, *, lowest: float, highest: float) -> float:
    """Return the number of the last line ``SCORE: 7`` (``7/10`` too, if that is the scale); raises Unreadable."""
    found = _SCORE.fullmatch(_last_line(text))
    if found is None:
        raise Unreadable(f"the judge's last line must be SCORE: number, got {_end(text)!r}")
    if found.group(2) and float(found.group(2).strip(" /")) != highest:
        raise Unreadable(f"the judge scored out of {found.group(2).strip(' /')}, expected out of {highest:g}")
    score = float(found.group(1))
    if not math.isfinite(score) or not lowest <= score <= highest:
        raise Unreadable(f"the judge's score {found.group(1)[:20]} is outside [{lowest:g}, {highest:g}]")
    return score


def read_winner(text: str) -> Winner:
    """Return the winner named in the last line ``WINNER: A``; raises Unreadable."""
    found = _WINNER.fullmatch(_last_line(text))
    if found is None:
        raise Unreadable(f"the judge's last line must be WINNER: A, B or TIE, got {_end(text)!r}")
    match found.group(1).lower():
        case "a":
            return "a"
        case "b":
            return "b"
        case _:
            return "tie"


def _last_line(text: str) -> str:
    lines = [line for line in _THINKING.sub("", text).splitlines() if line.strip(" \t`*_")]
    return lines[-1][:200] if lines else ""


def _end(text: str) -> str:
    return text.strip()[-_SHOWN:]
