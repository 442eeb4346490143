"""Shorten what a tool answers; pure."""

from __future__ import annotations

from typing import Literal

Cut = Literal["end", "middle", "start"]


def shortened(text: str, limit: int, cut: Cut) -> str:
    """Return a text of at most ``limit`` characters and one mark, which says how many were left out at its ``cut``."""
    over = len(text) - limit
    if over <= 0:
        return text
    mark = f"[{over} characters left out]"
    if cut == "end":
        return f"{text[:limit]}\n{mark}"
    if cut == "start":
        return f"{mark}\n{text[over:]}"
    head = (limit + 1) // 2
    return f"{text[:head]}\n{mark}\n{text[len(text) - (limit - head) :]}"
