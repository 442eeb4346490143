"""Calls to environment servers: signed, bounded in time and size, each safe to repeat."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from penstock.agents.environments.over_http.wire import Problem
from penstock.protocol.errors import PenstockError
from penstock.serving import signature, strict_json
from penstock.serving.http_connections import Answer, ConnectionFailed, HttpConnections, retry_after_s

Body = TypeVar("Body", bound=BaseModel)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
PASSING = frozenset({429, 502, 503, 504})  # another try may succeed


class ServerUnreachable(PenstockError):
    """No answer: what became of the call is not known."""


class ServerRefused(PenstockError):
    def __init__(self, text: str, *, status: int, code: str, retry_after_s: float) -> None:
        """``code`` is that of `Problem`, empty if the answer was none."""
        super().__init__(text)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s

    @property
    def is_passing(self) -> bool:
        """True where the server is busy, or something before it failed."""
        return self.status in PASSING


class AnswerUnfit(PenstockError):
    """The server answered what the protocol does not allow; no part of it is used."""


class EnvironmentClient:
    def __init__(self, connections: HttpConnections, secrets: Sequence[str] = ()) -> None:
        """With ``secrets`` (``whsec_...``) every call is signed by Standard Webhooks."""
        self._connections = connections
        self._secrets = tuple(secrets)

    async def close(self) -> None:
        await self._connections.close()

    async def call(self, method: str, url: str, call_id: str, body: BaseModel | None, expected: type[Body]) -> Body:
        """Return the answer to one call; the caller sets the deadline.

        ``call_id`` is signed with the body: it binds a call to its episode and its step.
        Raises ServerUnreachable, ServerRefused, AnswerUnfit, and what `HttpConnections.send` raises.
        """
        answer = await self._send(method, url, call_id, body)
        if answer.status != 200:
            raise _refusal(answer, url)
        try:
            return expected.model_validate(strict_json.loads(answer.body, strict_json.MAX_DEPTH))
        except strict_json.AmbiguousJson as err:
            raise AnswerUnfit(f"{url} answers what is no {expected.__name__}: {err}") from None
        except ValidationError as err:
            first = err.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))[:200] or "the body"
            raise AnswerUnfit(f"{url} answers what is no {expected.__name__}: {where}: {first['msg'][:200]}") from None

    async def call_until_answered(
        self,
        url: str,
        call_id: str,
        body: BaseModel,
        expected: type[Body],
        deadline_s: float,
        may_repeat: Callable[[], bool],
    ) -> Body:
        """Post a body until it is answered: the server knows a repeated one, and answers it without acting twice.

        Raises as `call` does; after ``deadline_s`` the last failure, and sooner if it is not to be repeated any more.
        """
        ends, pause_s = time.monotonic() + deadline_s, _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(ends - time.monotonic()):
                    return await self.call("POST", url, call_id, body, expected)
            except TimeoutError:
                raise ServerUnreachable(f"{url} gave no answer within {deadline_s:g} s") from None
            except ServerUnreachable as err:
                if not may_repeat():
                    raise ServerUnreachable(f"{err}; its lease has expired, or it is registered no more") from None
                if time.monotonic() + pause_s > ends:
                    raise
            except ServerRefused as err:
                pause_s = max(pause_s, err.retry_after_s)
                if not err.is_passing or time.monotonic() + pause_s > ends:
                    raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret
            pause_s = min(pause_s * 2.0, _LONGEST_PAUSE_S)

    async def delete(self, url: str, call_id: str) -> None:
        """Send a DELETE; one that does not find its target has succeeded. Raises as `call` does."""
        answer = await self._send("DELETE", url, call_id, None)
        if answer.status not in (200, 204, 404):
            raise _refusal(answer, url)

    async def _send(self, method: str, url: str, call_id: str, body: BaseModel | None) -> Answer:
        data = None if body is None else body.model_dump_json().encode()
        headers: dict[str, str] = {}
        if self._secrets:
            headers = signature.headers(self._secrets, message_id=call_id, timestamp=int(time.time()), body=data or b"")
        try:
            return await self._connections.send(method, url, data, headers)
        except ConnectionFailed as err:
            raise ServerUnreachable(str(err)) from None


def _refusal(answer: Answer, url: str) -> ServerRefused:
    """Return the problem of an answer; of one that is no `Problem` nothing is quoted."""
    try:
        problem = Problem.model_validate(strict_json.loads(answer.body))
        said = "".join(letter if letter.isprintable() else "?" for letter in problem.message[:500])
        code, text = problem.code, f": {problem.code}: {said}"
    except (strict_json.AmbiguousJson, ValidationError):
        code, text = "", f", {len(answer.body)} bytes that are no Problem"
    return ServerRefused(
        f"{url} answers HTTP {answer.status}{text}",
        status=answer.status,
        code=code,
        retry_after_s=retry_after_s(answer.headers),
    )
