"""A session with a NeMo-Gym resources server: `/seed_session`, its tools, `/verify`; and a free server among several.

The requests are those of `responses_api_agents/simple_agent`; the session is what the server keeps in its cookies.

Outcomes of a call:

| what happens                                                              | then                                              |
|---------------------------------------------------------------------------|---------------------------------------------------|
| the tool answers                                                          | text for the policy                               |
| HTTP 4xx or 500: wrong arguments, or the tool raised                      | text for the policy                               |
| no answer within `call_deadline_s`, and the server still answers `GET /`   | text for the policy                               |
| another status, no such path, no access, no UTF-8, a longer answer        | the server has failed: the episode is restarted |
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from penstock.agents.environments.over_http.servers import PASSING, Server, ServerFull, Servers, open_session
from penstock.agents.environments.shared_options import CallOptions, SessionOptions, read_token, urls_of
from penstock.protocol.errors import PenstockError
from penstock.serving import strict_json
from penstock.serving.http_connections import Answer, HttpConnections
from penstock.serving.target_policy import OwnServer

ALIVE_WITHIN_S = 10.0  # a server that has not answered a call answers anything within this time
_KEEP_S = 60.0
_MAX_COOKIE_CHARS = 8192  # of all cookies of a session
_MAX_PARTS = 64
_MAX_REWARD = 1e30  # a whole number of JSON may be larger than a float
_NO_ACCESS = (401, 403, 405, 407)  # the run file is wrong, not the policy
_NO_PATH = {"detail": "Not Found"}  # FastAPI's answer where nothing is served; a 404 of a tool says what was not found


class NemoGymOptions(SessionOptions, CallOptions):
    """Options of ``nemo_gym``."""

    token_file: Path | None = Field(
        None, description="File with a token that is sent to the URLs as `Authorization: Bearer`."
    )
    max_calls: int = Field(
        8, ge=1, le=256,
        description="Calls of one answer that are made, one after another; to the others an error is the answer. 1 for a row with parallel_tool_calls = false.",
    )  # fmt: skip
    use_done_flag: bool = Field(
        False, description="An answer of a tool that is a JSON object with a true `done` ends the episode."
    )
    max_message_bytes: int = Field(
        16 * 1024 * 1024, ge=1024, le=64 * 1024 * 1024,
        description="Longest answer of the server that is read; that of /verify holds the whole conversation again.",
    )  # fmt: skip


class GymFailed(PenstockError):
    """The server failed, or answers what the protocol does not know: the episode is restarted."""


@dataclass(frozen=True, slots=True)
class Verified:
    reward: float
    parts: Mapping[str, float]  # `reward_components`


class GymSession:
    def __init__(self, connections: HttpConnections, server: Server, seed: int, call_deadline_s: float) -> None:
        self._connections, self._server, self._seed = connections, server, seed
        self._call_deadline_s = call_deadline_s
        self._cookies: dict[str, str] = {}

    async def begin(self, row: Mapping[str, Any]) -> None:
        answer = await self._post("seed_session", row)
        if answer.status in PASSING:
            raise ServerFull(self._said("seed_session", answer))
        self._value("seed_session", answer)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        try:
            async with asyncio.timeout(self._call_deadline_s):
                answer = await self._post(tool, arguments)
        except TimeoutError:
            await self._check_answers(tool)
            return f"error: no answer within {self._call_deadline_s:g} seconds", True
        is_text = answer.status == 500 or (400 <= answer.status < 500 and answer.status not in _NO_ACCESS)
        if answer.status in PASSING or not (is_text or 200 <= answer.status < 300):
            raise GymFailed(self._said(tool, answer))
        try:
            text = answer.body.decode("utf-8")
        except UnicodeDecodeError:
            raise GymFailed(f"{self._server.url}/{tool} answers what is not UTF-8") from None
        if answer.status == 404 and _parsed(text) == _NO_PATH:
            raise GymFailed(f"{self._server.url} has no tool {tool}, which the row names")
        return (f"error: HTTP {answer.status}: {text}", True) if is_text else (text, False)

    async def verify(self, body: Mapping[str, Any]) -> Verified:
        value = self._value("verify", await self._post("verify", body))
        if not isinstance(value, dict) or "reward" not in value:
            raise GymFailed(f"{self._server.url}/verify answers no object with a reward")
        if value.get("mask_sample"):
            reason = f"{value.get('failure_kind')}: {value.get('failure_reason')}"
            raise GymFailed(
                f"{self._server.url}/verify says that its reward is not a measurement (mask_sample): {reason[:500]}"
            )
        components = value.get("reward_components")
        named = components if isinstance(components, dict) else {}
        if len(named) > _MAX_PARTS:
            raise GymFailed(f"{self._server.url}/verify answers {len(named)} reward_components, at most {_MAX_PARTS}")
        parts = {name: self._number(component, f"reward_components.{name[:100]}") for name, component in named.items()}
        return Verified(self._number(value["reward"], "reward"), parts)

    def end(self) -> None:
        """Give the place back; the protocol has no end of a session that an agent began."""
        self._server.running -= 1

    async def _post(self, path: str, body: Mapping[str, Any]) -> Answer:
        headers = {"Penstock-Seed": str(self._seed)}
        if self._cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        answer = await self._connections.send("POST", f"{self._server.url}/{path}", json.dumps(body).encode(), headers)
        self._cookies |= answer.cookies
        if sum(len(name) + len(value) for name, value in self._cookies.items()) > _MAX_COOKIE_CHARS:
            raise GymFailed(f"{self._server.url} sets cookies of more than {_MAX_COOKIE_CHARS} characters")
        return answer

    async def _check_answers(self, tool: str) -> None:
        problem = f"no answer within {ALIVE_WITHIN_S:g} s"
        try:
            async with asyncio.timeout(ALIVE_WITHIN_S):
                await self._connections.send("GET", f"{self._server.url}/")
                return
        except TimeoutError:
            pass
        except PenstockError as err:
            problem = str(err)
        raise GymFailed(
            f"{self._server.url} did not answer a call of {tool}, and does not answer GET / either: {problem}"
        )

    def _value(self, path: str, answer: Answer) -> Any:
        if answer.status != 200:
            raise GymFailed(self._said(path, answer))
        try:
            return strict_json.loads(answer.body)
        except strict_json.AmbiguousJson as err:
            raise GymFailed(f"{self._server.url}/{path} answers with something other than JSON: {err}") from None

    def _said(self, path: str, answer: Answer) -> str:
        where = answer.headers.get("Location")
        body = answer.body[:300].decode("utf-8", "replace")
        said = f"to {where[:200]!a}, which is not followed" if where else ascii(body)
        return f"{self._server.url}/{path} answers HTTP {answer.status}: {said}"

    def _number(self, value: Any, field: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _MAX_REWARD:
            raise GymFailed(f"{self._server.url}/verify: {field} is {str(value)[:100]!a}, expected a number")
        return float(value)


class Sessions:
    def __init__(self, options: NemoGymOptions, own_servers: Sequence[OwnServer]) -> None:
        token = read_token(options.token_file, "options.token_file") if options.token_file else ""
        headers, most = {"Authorization": f"Bearer {token}"} if token else {}, options.max_message_bytes
        policy = options.policy(own_servers)
        self._connections = HttpConnections(keep_s=_KEEP_S, headers=headers, policy=policy, max_answer_bytes=most)
        self._servers = Servers(urls_of(options.url))
        self._options = options

    async def open(self, row: Mapping[str, Any], seed: int) -> GymSession:
        """Return a session that a server has begun; waits for one that takes it. Raises GymFailed."""

        async def start(server: Server, _: AsyncExitStack) -> GymSession:
            session = GymSession(self._connections, server, seed, self._options.call_deadline_s)
            await session.begin(row)
            return session

        return await open_session(self._servers, start, self._options.place_deadline_s, GymFailed)

    async def close(self) -> None:
        await self._connections.close()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
