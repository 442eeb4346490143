"""The adapter of an OpenAI-style chat endpoint: send one question, return the text and its token counts.

Transient failures (no connection, 429, 5xx) are retried. The API key is sent in one header and never appears in an
error or log.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError

from penstock.protocol.groups import first_problem
from penstock.reward_service.hosting.judge_settings import JudgeSettings
from penstock.serving.http_connections import Answer, AnswerRefused, ConnectionFailed, HttpConnections, Retries

_RETRY_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_KEEP_S = 5.0  # an idle connection
_SHOWN = 300


class NoVerdict(Exception):
    """The judge returned no complete text; the message says why, without the API key."""


@dataclass(frozen=True, slots=True)
class Said:
    text: str
    tokens_in: int
    tokens_out: int


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(BaseModel):
    choices: list[_Choice]
    usage: _Usage | None = None


@dataclass(slots=True)
class Cost:
    """The requests and tokens so far."""

    calls: int = 0
    retries: int = 0
    failures: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    untold: int = 0  # responses without token counts


class Chat:
    def __init__(self, settings: JudgeSettings, api_key: str) -> None:
        """Prepare; nothing is opened before the first question."""
        self.settings = settings
        self._places = asyncio.Semaphore(settings.concurrency)
        self.cost = Cost()
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = HttpConnections(keep_s=_KEEP_S, headers=headers)
        self._retries = Retries(first_s=0.5, longest_s=20.0, most=settings.retries, statuses=_RETRY_STATUS)

    async def close(self) -> None:
        await self._http.close()

    async def ask(self, question: str) -> Said:
        return await self.converse(self._body(question))

    async def converse(self, body: dict[str, Any]) -> Said:
        async with self._places:
            self.cost.calls += 1
            try:
                async with asyncio.timeout(self.settings.timeout_s):
                    return await self._answered(body)
            except TimeoutError:
                self.cost.failures += 1
                raise NoVerdict(f"{self._who} gave no answer within {self.settings.timeout_s:g} s") from None
            except NoVerdict:
                self.cost.failures += 1
                raise

    @property
    def _who(self) -> str:
        return f"judge {self.settings.model} at {self.settings.base_url}"

    async def _answered(self, body: dict[str, Any]) -> Said:
        def failed(_problem: Answer | ConnectionFailed, _pause_s: float) -> None:
            self.cost.retries += 1

        url, data = f"{self.settings.base_url}/chat/completions", json.dumps(body).encode()
        try:
            answer = await self._retries.send(partial(self._http.send, "POST", url, data), failed)
        except (ConnectionFailed, AnswerRefused) as err:
            raise NoVerdict(f"{self._who}: no answer ({err})") from None
        if answer.status == HTTPStatus.OK:
            return self._read(answer.body)
        raise NoVerdict(f"{self._who}: HTTP {answer.status}: {answer.body.decode('utf-8', 'replace')[:_SHOWN]}")

    def _body(self, question: str) -> dict[str, Any]:
        settings = self.settings
        messages = [{"role": "system", "content": settings.system}] if settings.system else []
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": [*messages, {"role": "user", "content": question}],
            "temperature": settings.temperature,
            settings.max_tokens_field: settings.max_tokens,
        }
        return body if settings.seed is None else {**body, "seed": settings.seed}

    def _read(self, body: bytes) -> Said:
        try:
            completion = _Completion.model_validate_json(body)
        except ValidationError as err:
            raise NoVerdict(f"{self._who} response is not a chat completion: {first_problem(err)}") from None
        usage = completion.usage or _Usage()
        self.cost.tokens_in += usage.prompt_tokens
        self.cost.tokens_out += usage.completion_tokens
        self.cost.untold += completion.usage is None
        if not completion.choices:
            raise NoVerdict(f"{self._who} response has no choices")
        choice = completion.choices[0]
        if choice.message.refusal:
            raise NoVerdict(f"{self._who} refused: {choice.message.refusal[:_SHOWN]}")
        if choice.finish_reason == "length":
            raise NoVerdict(f"{self._who} was cut off at its token limit; raise max_tokens")
        if not choice.message.content:
            raise NoVerdict(f"{self._who} response has no text (finish_reason {choice.finish_reason})")
        return Said(choice.message.content, usage.prompt_tokens, usage.completion_tokens)
