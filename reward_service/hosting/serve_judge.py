"""``serve-judge JUDGE.toml``: a language model as judge, as a reward endpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.hosting.judge import settings as judge_settings
from penstock.reward_service.hosting.judge.chat_client import Chat
from penstock.reward_service.hosting.judge.judge_groups import Panel
from penstock.reward_service.hosting.judge.settings import JudgeSettings

_ROUNDS = 4.0  # a call has one or more groups, and its questions wait in a queue with those of other calls


class JudgeReward:
    batched = True

    def __init__(self, file: Path) -> None:
        self._file = file
        self._settings: JudgeSettings = judge_settings.load(file)
        self._key = self._settings.api_key()
        self._chat: Chat | None = None

    @property
    def title(self) -> str:
        return f"{self._file.name}: {self._settings.mode} judge {self._settings.model}"

    @property
    def version(self) -> str:
        return hashlib.sha256(self._settings.model_dump_json().encode()).hexdigest()[:8]

    @property
    def terms(self) -> Mapping[str, Any]:
        """Small calls with a long deadline, because a judge model may take minutes."""
        settings = self._settings
        timeout_s = min(3600.0, settings.timeout_s * _ROUNDS)
        lowest, highest = (settings.min_score, settings.max_score)
        if settings.scale or settings.mode == "pairwise":
            lowest, highest = (0.0, 1.0)
        return {"timeout_s": timeout_s, "batch_size": 4, "min_score": lowest, "max_score": highest}

    @property
    def figures(self) -> Mapping[str, float]:
        if self._chat is None:
            return {}
        cost, settings = self._chat.cost, self._settings
        price = (cost.tokens_in * settings.price_in + cost.tokens_out * settings.price_out) / 1e6
        return {**asdict(cost), "price": price}

    async def open(self) -> None:
        self._chat = Chat(self._settings, self._key)

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        assert self._chat is not None
        return await Panel(self._settings, self._chat).score(groups)

    async def close(self) -> None:
        if self._chat is not None:
            await self._chat.close()
