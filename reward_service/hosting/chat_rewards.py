"""Endpoints that ask a language model: a judge (``serve-judge``), and graders in OpenAI's form (``serve-grader``).

A judge scores each answer alone, or against others of its group. Pairwise, the score of an answer is the share of its
comparisons that it won, a tie counting half, so the scores of a group whose answers are all compared with one another
sum to half its size. Each pair is asked in both orders, because judges favour a position.

Text of a judge that cannot be read as a number or a winner is an error, never a score.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import ValidationError

from penstock.protocol.errors import ConfigError
from penstock.reward_service.endpoints.dialects.libraries import item_of
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.hosting import judge_settings, openai_grader
from penstock.reward_service.hosting.chat_client import Chat, NoVerdict, Said
from penstock.reward_service.hosting.commands import ChatOptions
from penstock.reward_service.hosting.judge_settings import JudgeSettings
from penstock.reward_service.hosting.openai_grader import Multi, ScoreModel, evaluate
from penstock.reward_service.hosting.served_reward import Hosted

Winner = Literal["a", "b", "tie"]

_ORNAMENT = r"[\s*_`#>\"'.\[\]()]*"
_BULLET = r"(?:[-+]\s)?"
_SCORE = re.compile(
    rf"{_BULLET}{_ORNAMENT}score{_ORNAMENT}[:=]{_ORNAMENT}([-+]?\d+(?:\.\d+)?)(\s*/\s*\d+(?:\.\d+)?)?{_ORNAMENT}", re.I
)
_WINNER = re.compile(rf"{_BULLET}{_ORNAMENT}winner{_ORNAMENT}[:=]{_ORNAMENT}(?:answer\s+)?(a|b|tie){_ORNAMENT}", re.I)
_THINKING = re.compile(r"\A\s*<think>.*?</think>", re.S)
_SHOWN = 160
_ROUNDS = 4.0  # a call has one or more groups, and its questions wait in a queue with those of other calls


class Unreadable(ValueError):
    """The judge's text does not end in a verdict; the message shows its end."""


def read_score(text: str, *, lowest: float, highest: float) -> float:
    """Return the number of the last line ``SCORE: 7`` (``7/10`` too, if that is the scale); raises Unreadable."""
    matched = _SCORE.fullmatch(_last_line(text))
    if matched is None:
        raise Unreadable(f"the judge's last line must be SCORE: number, got {_end(text)!r}")
    if matched.group(2) and float(matched.group(2).strip(" /")) != highest:
        raise Unreadable(f"the judge scored out of {matched.group(2).strip(' /')}, expected out of {highest:g}")
    score = float(matched.group(1))
    if not math.isfinite(score) or not lowest <= score <= highest:
        raise Unreadable(f"the judge's score {matched.group(1)[:20]} is outside [{lowest:g}, {highest:g}]")
    return score


def read_winner(text: str) -> Winner:
    matched = _WINNER.fullmatch(_last_line(text))
    if matched is None:
        raise Unreadable(f"the judge's last line must be WINNER: A, B or TIE, got {_end(text)!r}")
    return cast(Winner, matched.group(1).lower())


def _last_line(text: str) -> str:
    lines = [line for line in _THINKING.sub("", text).splitlines() if line.strip(" \t`*_")]
    return lines[-1][:200] if lines else ""


def _end(text: str) -> str:
    return text.strip()[-_SHOWN:]


def pairs(num: int, *, opponents: int | None, both_orders: bool) -> list[tuple[int, int]]:
    """Return the pairs to compare, the first one shown first: all, or of each answer its neighbours in a ring.

    With ``opponents`` every answer is compared with the same number of others: ``opponents``, or one more.
    """
    reach = num // 2 if opponents is None else min((opponents + 1) // 2, num // 2)
    met = {frozenset({place, (place + step) % num}) for place in range(num) for step in range(1, reach + 1)}
    ordered = sorted(tuple(sorted(pair)) for pair in met if len(pair) == 2)
    matches = []
    for one, other in ordered:
        if both_orders:
            matches += [(one, other), (other, one)]
        else:  # alternate the order, so that no answer always comes first
            matches.append((one, other) if (one + other) % 2 else (other, one))
    return matches


class Panel:
    def __init__(self, settings: JudgeSettings, chat: Chat) -> None:
        self._settings = settings
        self._question = settings.question
        self._chat = chat

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        """Return the scores of every group; a missing or unreadable verdict is the error of its score."""
        score = self._pointwise if self._settings.mode == "pointwise" else self._pairwise
        return list(await asyncio.gather(*(score(group) for group in groups)))

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
        asked = [asyncio.create_task(self._compare(group, texts[first], texts[second])) for first, second in matches]
        try:
            results = await asyncio.gather(*asked)
        except (NoVerdict, Unreadable) as err:
            return [Score(error=str(err))] * len(texts)
        finally:
            for task in asked:  # one comparison failed, so the others are not needed
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        won: list[list[float]] = [[] for _ in texts]  # of each comparison: 1, or 0.5 for a tie
        parts: list[dict[str, float]] = [{"comparisons": 0.0, "tokens_in": 0.0, "tokens_out": 0.0} for _ in texts]
        for (first, second), (winner, said) in zip(matches, results, strict=True):
            for place, name in ((first, "a"), (second, "b")):
                won[place].append(0.5 if winner == "tie" else float(winner == name))
                parts[place]["comparisons"] += 1
                parts[place]["tokens_in"] += said.tokens_in / 2
                parts[place]["tokens_out"] += said.tokens_out / 2
        return [Score(score=sum(wins) / len(wins), parts=own) for wins, own in zip(won, parts, strict=True)]

    async def _compare(self, group: GroupToScore, first: str, second: str) -> tuple[Winner, Said]:
        if first == second:
            return "tie", Said("", 0, 0)
        said = await self._ask(group, answer_a=first, answer_b=second)
        return read_winner(said.text), said

    async def _ask(self, group: GroupToScore, **answers: str) -> Said:
        longest = max(map(len, answers.values()))
        if longest > self._settings.max_answer_chars:
            raise NoVerdict(f"an answer of {longest} characters exceeds max_answer_chars")
        values: dict[str, Any] = {
            "prompt": group.prompt, "ground_truth": group.ground_truth, "data_source": group.data_source,
            "extra_info": group.extra_info, "min_score": self._settings.min_score,
            "max_score": self._settings.max_score, **answers,
        }  # fmt: skip
        try:
            question = self._question.fill(values)
        except KeyError as err:
            raise NoVerdict(f"the row has no column {err.args[0]!r} that the template uses") from None
        return await self._chat.ask(question)


class ChatReward(Hosted):
    """A reward that may ask a chat endpoint, with long deadlines and small calls, because a model may take minutes."""

    def __init__(self, chat: Chat | None) -> None:
        self._chat = chat
        if chat is not None:
            self.terms = {"timeout_s": min(3600.0, chat.settings.timeout_s * _ROUNDS), "batch_size": 4}

    @property
    def figures(self) -> Mapping[str, float]:
        return {} if self._chat is None else asdict(self._chat.cost)

    async def close(self) -> None:
        if self._chat is not None:
            await self._chat.close()


class JudgeReward(ChatReward):
    def __init__(self, file: Path) -> None:
        judge = self._judge = judge_settings.load(file)
        chat = Chat(judge, judge.api_key())
        super().__init__(chat)
        self._panel, self._cost = Panel(judge, chat), chat.cost
        is_share = judge.scale or judge.mode == "pairwise"
        lowest, highest = (0.0, 1.0) if is_share else (judge.min_score, judge.max_score)
        self.terms = {**self.terms, "min_score": lowest, "max_score": highest}
        self.title = f"{file.name}: {judge.mode} judge {judge.model}"
        self.version = hashlib.sha256(judge.model_dump_json().encode()).hexdigest()[:8]

    @property
    def figures(self) -> Mapping[str, float]:
        price = self._cost.tokens_in * self._judge.price_in + self._cost.tokens_out * self._judge.price_out
        return {**super().figures, "price": price / 1e6}

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        return await self._panel.score(groups)


class GraderReward(ChatReward):
    def __init__(self, file: Path, reference_key: str, model_settings: JudgeSettings | None) -> None:
        self._reference_key = reference_key
        grader = self._grader = openai_grader.load(file)
        super().__init__(None if model_settings is None else Chat(model_settings, model_settings.api_key()))
        inner = grader.graders.values() if isinstance(grader, Multi) else [grader]
        if model_settings is None and any(isinstance(part, ScoreModel) for part in inner):
            raise ConfigError(f"{file}: a score_model grader needs a chat endpoint: name it with --base-url")
        where = "" if model_settings is None else model_settings.base_url
        self.title = f"{file.name}: {grader.type} grader"
        self.version = hashlib.sha256(f"{grader.model_dump_json()}\n{where}".encode()).hexdigest()[:8]

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        return list(await asyncio.gather(*(self._group(group) for group in groups)))

    async def _group(self, group: GroupToScore) -> list[Score]:
        item = item_of(group, self._reference_key)
        graded = (evaluate(self._grader, item, text, self._chat) for text in group.completions)
        return list(await asyncio.gather(*graded))


def model_settings(options: ChatOptions) -> JudgeSettings | None:
    if not options.base_url:
        return None
    try:
        return JudgeSettings(
            base_url=options.base_url, model="of the grader", timeout_s=options.timeout_s,
            concurrency=options.concurrency, api_key_env=options.api_key_env, api_key_file=options.api_key_file,
        )  # fmt: skip
    except ValidationError as err:
        problems = (f"--{error['loc'][0] if error['loc'] else ''}: {error['msg']}" for error in err.errors())
        raise ConfigError("; ".join(problems)) from None
