"""``serve-grader GRADER.json``: a grader in OpenAI's form, evaluated here, as a reward endpoint."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.protocol.errors import ConfigError
from penstock.reward_service.endpoints.dialects.openai_grader import item_of
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.hosting.commands import ChatOptions
from penstock.reward_service.hosting.judge.chat_client import Chat
from penstock.reward_service.hosting.judge.settings import JudgeSettings
from penstock.reward_service.hosting.openai_graders import grader as graders
from penstock.reward_service.hosting.openai_graders.evaluate_grader import evaluate
from penstock.reward_service.hosting.openai_graders.grader import Grader, Multi, ScoreModel

_ROUNDS = 4.0


class GraderReward:
    batched = True

    def __init__(self, file: Path, reference_key: str, model_settings: JudgeSettings | None) -> None:
        self._file = file
        self._reference_key = reference_key
        self._grader: Grader = graders.load(file)
        self._settings = model_settings
        self._chat: Chat | None = None
        self._key = model_settings.api_key() if model_settings is not None else ""
        if _asks_a_model(self._grader) and model_settings is None:
            raise ConfigError(f"{file}: a score_model grader needs a chat endpoint: name it with --base-url")

    @property
    def title(self) -> str:
        return f"{self._file.name}: {self._grader.type} grader"

    @property
    def version(self) -> str:
        where = "" if self._settings is None else self._settings.base_url
        return hashlib.sha256(f"{self._grader.model_dump_json()}\n{where}".encode()).hexdigest()[:8]

    @property
    def terms(self) -> Mapping[str, Any]:
        """Allow long calls, because a grading model may take minutes."""
        if self._settings is None:
            return {}
        return {"timeout_s": min(3600.0, self._settings.timeout_s * _ROUNDS), "batch_size": 4}

    @property
    def figures(self) -> Mapping[str, float]:
        return {} if self._chat is None else asdict(self._chat.cost)

    async def open(self) -> None:
        if self._settings is not None:
            self._chat = Chat(self._settings, self._key)

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        return list(await asyncio.gather(*(self._group(group) for group in groups)))

    async def _group(self, group: GroupToScore) -> list[Score]:
        item = item_of(group, self._reference_key)
        return list(
            await asyncio.gather(*(evaluate(self._grader, item, text, self._chat) for text in group.completions))
        )

    async def close(self) -> None:
        if self._chat is not None:
            await self._chat.close()


def _asks_a_model(grader: Grader) -> bool:
    inner = grader.graders.values() if isinstance(grader, Multi) else [grader]
    return any(isinstance(one, ScoreModel) for one in inner)


def model_settings(options: ChatOptions) -> JudgeSettings | None:
    if not options.base_url:
        return None
    try:
        return JudgeSettings(
            base_url=options.base_url,
            model="of the grader",
            timeout_s=options.timeout_s,
            concurrency=options.concurrency,
            api_key_env=options.api_key_env,
            api_key_file=options.api_key_file,
        )
    except ValidationError as err:
        raise ConfigError(
            "; ".join(f"--{one['loc'][0] if one['loc'] else ''}: {one['msg']}" for one in err.errors())
        ) from None
