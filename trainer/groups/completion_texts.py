"""Holds the text of a completion, which was scored, against its token ids, which are trained on.

Only the trainer has both and the tokenizer. Decoding costs about 0.2 µs of CPU a token. Engines decode piece by piece and differ in spaces and in characters that no token
completes, so neither is compared. A group without any text is one of an engine that returns none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

from penstock.protocol.errors import TextMismatch
from penstock.protocol.trajectory import Group, Trajectory

_NO_CHARACTER = "\ufffd"  # what is decoded of bytes that are no character
_RANDOM = random.SystemRandom()  # a writer of packs must not know which row is decoded

Decode = Callable[[Sequence[Sequence[int]], bool], list[str]]  # token ids, whether special tokens are skipped


class CompletionTexts:
    def __init__(self, decode: Decode, *, rows: int | None) -> None:
        """Decode ``rows`` completions of a group, chosen at random, with ``decode``; None: all."""
        self._decode = decode
        self._rows = rows

    @classmethod
    def of(cls, check_texts: int | Literal["all"], decode: Decode) -> CompletionTexts | None:
        """Return what the setting ``trainer.check_texts`` asks for; None for 0."""
        if not check_texts:
            return None
        return cls(decode, rows=None if check_texts == "all" else check_texts)

    def check(self, groups: Sequence[Group]) -> None:
        """Raise TextMismatch if a chosen completion has a text that its tokens do not say; groups without texts pass."""
        chosen = [
            (group, number)
            for group in groups
            if any(row.completion_text for row in group.trajectories)
            for number in self._chosen(len(group.trajectories))
        ]
        if not chosen:
            return
        rows = [group.trajectories[number] for group, number in chosen]
        for (group, number), row, text in zip(
            chosen, rows, self._decode([_visible(row) for row in rows], True), strict=True
        ):
            if not any(_is_same(row, said) for said in (text, *self._others(row))):
                raise TextMismatch(
                    f"group {group.group_id}: completion {number} was scored as {row.completion_text[:200]!r}, and its tokens "
                    f"say {text[:200]!r}; an engine whose texts are others by design needs trainer.check_texts=0"
                )

    def _chosen(self, num_rows: int) -> Sequence[int]:
        if self._rows is None or self._rows >= num_rows:
            return range(num_rows)
        return _RANDOM.sample(range(num_rows), self._rows)

    def _others(self, row: Trajectory) -> list[str]:
        sampled = _sampled(row)
        return [
            self._decode([ids], skip)[0] for ids, skip in ((sampled, True), (_visible(row), False), (sampled, False))
        ]


def _sampled(row: Trajectory) -> list[int]:
    return row.token_ids[row.loss_mask].tolist()


def _visible(row: Trajectory) -> list[int]:
    sampled = _sampled(row)
    return sampled[:-1] if row.finish_reason == "stop" else sampled


def _is_same(row: Trajectory, decoded: str) -> bool:
    text, decoded = "".join(row.completion_text.split()), "".join(decoded.split())
    if text == decoded:
        return True
    if _NO_CHARACTER not in text and _NO_CHARACTER not in decoded and len(row.version_runs) == 1:
        return False
    return _ascii(text) == _ascii(decoded)  # a character was cut: by its end, or by an update of the weights


def _ascii(text: str) -> str:
    return text.encode("ascii", "ignore").decode()
