"""Score groups with a judge: each answer alone, or each answer against others of its group.

Pairwise, the score of an answer is the share of its comparisons that it won, a tie counting half, so the scores of
a group whose answers are all compared with one another sum to half its size. Each pair is asked in both orders,
because judges favour a position.

Text of a judge that cannot be read as a number or a winner is an error, never a score.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.hosting.judge.chat_client import Chat, NoVerdict, Said
from penstock.reward_service.hosting.judge.settings import JudgeSettings

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


@dataclass(frozen=True, slots=True)
class Match:
    """One question about two answers of a group, by index; ``first`` is answer A."""

    first: int
    second: int


def pairs(num: int, *, opponents: int | None, both_orders: bool) -> list[Match]:
    """Return the pairs to compare: all pairs, or for each answer its neighbours on both sides of a ring.

    With ``opponents`` every answer is compared with the same number of others: ``opponents``, or one more.
    """
    reach = num // 2 if opponents is None else min((opponents + 1) // 2, num // 2)
    met = {frozenset({place, (place + step) % num}) for place in range(num) for step in range(1, reach + 1)}
    ordered = sorted(tuple(sorted(pair)) for pair in met if len(pair) == 2)
    matches = []
    for one, other in ordered:
        if both_orders:
            matches += [Match(one, other), Match(other, one)]
        else:  # alternate the order, so that no answer always comes first
            matches.append(Match(one, other) if (one + other) % 2 else Match(other, one))
    return matches


class Panel:
    def __init__(self, settings: JudgeSettings, chat: Chat) -> None:
        self._settings = settings
        self._question = settings.question
        self._chat = chat

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        """Return the scores of every group; a missing or unreadable verdict is the error of its score."""
        one = self._pointwise if self._settings.mode == "pointwise" else self._pairwise
        return list(await asyncio.gather(*(one(group) for group in groups)))

    async def _pointwise(self, group: GroupToScore) -> list[Score]:
        return list(await asyncio.gather(*(self._one(group, text) for text in group.completions)))

    async def _one(self, group: GroupToScore, text: str) -> Score:
        settings = self._settings
        try:
            said = await self._ask(group, answer=text)
            raw = read_score(said.text, lowest=settings.min_score, highest=settings.max_score)
        except (NoVerdict, Unreadable) as err:
            return Score(error=str(err))
        span = settings.max_score - settings.min_score
        score = (raw - settings.min_score) / span if settings.scale else raw
        parts = {"judge_score": raw, "tokens_in": float(said.tokens_in), "tokens_out": float(said.tokens_out)}
        return Score(score=score, parts=parts)

    async def _pairwise(self, group: GroupToScore) -> list[Score]:
        texts = group.completions
        if len(texts) < 2:
            return [Score(error="a pairwise judge needs groups of two answers or more")]
        matches = pairs(len(texts), opponents=self._settings.opponents, both_orders=self._settings.both_orders)
        asked = [asyncio.create_task(self._compare(group, match)) for match in matches]
        try:
            results = await asyncio.gather(*asked)
        except (NoVerdict, Unreadable) as err:
            return [Score(error=str(err))] * len(texts)
        finally:
            for task in asked:  # one comparison failed, so the others are not needed
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        won, met = [0.0] * len(texts), [0] * len(texts)
        tokens_in, tokens_out = [0.0] * len(texts), [0.0] * len(texts)
        for match, (winner, said) in zip(matches, results, strict=True):
            won[match.first] += {"a": 1.0, "tie": 0.5, "b": 0.0}[winner]
            won[match.second] += {"b": 1.0, "tie": 0.5, "a": 0.0}[winner]
            for place in (match.first, match.second):
                met[place] += 1
                tokens_in[place] += said.tokens_in / 2
                tokens_out[place] += said.tokens_out / 2
        rows = zip(won, met, tokens_in, tokens_out, strict=True)
        return [
            Score(score=wins / num, parts={"comparisons": float(num), "tokens_in": sent, "tokens_out": got})
            for wins, num, sent, got in rows
        ]

    async def _compare(self, group: GroupToScore, match: Match) -> tuple[Winner, Said]:
        first, second = group.completions[match.first], group.completions[match.second]
        if first == second:
            return "tie", Said("", 0, 0)
        said = await self._ask(group, answer_a=first, answer_b=second)
        return read_winner(said.text), said

    async def _ask(self, group: GroupToScore, **answers: str) -> Said:
        longest = max(map(len, answers.values()))
        if longest > self._settings.max_answer_chars:
            raise NoVerdict(f"an answer of {longest} characters exceeds max_answer_chars")
        values: dict[str, Any] = {
            "prompt": group.prompt,
            "ground_truth": group.ground_truth,
            "data_source": group.data_source,
            "extra_info": group.extra_info,
            "min_score": self._settings.min_score,
            "max_score": self._settings.max_score,
            **answers,
        }
        try:
            question = self._question.fill(values)
        except KeyError as err:
            raise NoVerdict(f"the row has no column {err.args[0]!r}that the template uses") from None
        return await self._chat.ask(question)
