"""`nemo_gym`: the policy calls the tools of a NeMo-Gym resources server, which verifies the episode; no package needed.

Each episode is a separate session, which the server keeps in its cookies: `/seed_session`, tools, `/verify`, as
`responses_api_agents/simple_agent` sends them. The row holds what the policy is shown, and its tools.

Outcomes of a call:

| what happens                                                             | then                                     |
|-----------------------------------------------------------------------|------------------------------------------|
| the tool answers                                                         | text for the policy                      |
| HTTP 4xx or 500: wrong arguments, or the tool raised                     | text for the policy                      |
| no answer within `call_deadline_s`, and the server still answers `GET /` | text for the policy                      |
| another status, no such path, no access, no UTF-8, a longer answer       | it has failed: the episode is restarted  |
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from penstock.agents.environments.over_http.servers import Server, ServerFull, Servers, open_session
from penstock.agents.environments.play import Play, Reply, Row, called, parsed_json, read_arguments
from penstock.agents.environments.shared_options import CallOptions, SessionOptions, read_token, urls_of
from penstock.agents.environments.turn_environment import ServerEnvironment, check_reply_deadline
from penstock.agents.proxy.api.responses import output_items, read_request
from penstock.agents.proxy.messages import Message, RequestRefused, ToolCall
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import PenstockError
from penstock.serving import strict_json
from penstock.serving.http_connections import PASSING, Answer, HttpConnections
from penstock.serving.target_policy import OwnServer

_PARAMS = "responses_create_params"
# A tool's name is a path of its server, which has these for itself (`RESERVED_MCP_TOOL_NAMES` of NeMo-Gym).
_RESERVED = frozenset({"verify", "seed_session", "close_session", "sandbox_access", "aggregate_metrics", "mcp"})
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# What is read of the parameters, or refused; sampling is the run's.
_READ = ("input", "instructions", "tools", "text", "previous_response_id", "conversation", "background", "prompt")
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
        description="Calls of one answer that are made, one after another; to the others an error is the answer. "
        "1 for a row with parallel_tool_calls = false.",
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
        if answer.status == 404 and parsed_json(text) == _NO_PATH:
            raise GymFailed(f"{self._server.url} has no tool {tool}, which the row names")
        return (f"error: HTTP {answer.status}: {text}", True) if is_text else (text, False)

    async def verify(self, body: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the reward, and its `reward_components`."""
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
        return self._number(value["reward"], "reward"), parts

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


@dataclass(frozen=True, slots=True)
class GymRow:
    fields: Mapping[str, Any]  # all of the row, unchanged
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]  # as the chat completions API writes them
    makes_one_call: bool  # of each answer

    @classmethod
    def of(cls, row: Row) -> Self:
        """Return what a row holds; raises ValueError, which names the field."""
        params = row.extra_info.get(_PARAMS)
        if not isinstance(params, dict):
            problem = f"its extra_info has no object {_PARAMS}: it is not a row of NeMo-Gym"
            raise ValueError(problem)  # noqa: TRY004 - a row's, not the caller's
        try:
            asked = read_request({name: params[name] for name in _READ if name in params}, 0.0)
        except RequestRefused as err:
            raise ValueError(f"{_PARAMS}: {err}") from None
        if params.get("tool_choice") not in (None, "auto"):
            raise ValueError(f"{_PARAMS}.tool_choice: expected auto, got {str(params['tool_choice'])[:100]}")
        parallel = params.get("parallel_tool_calls", True)
        if not isinstance(parallel, bool | None):
            problem = f"{_PARAMS}.parallel_tool_calls: expected true or false, got {str(parallel)[:100]}"
            raise ValueError(problem)  # noqa: TRY004
        for number, tool in enumerate(params.get("tools") or []):
            _check(tool, f"{_PARAMS}.tools[{number}]")
        names = [tool["function"]["name"] for tool in asked.tools]
        if len(set(names)) < len(names):
            raise ValueError(f"{_PARAMS}.tools: two have the same name; there are {', '.join(names)}")
        fields = dict(row.extra_info)
        if row.ground_truth is not None:
            fields.setdefault("ground_truth", row.ground_truth)
        return cls(fields, _shown(asked.messages, row), asked.tools, parallel is False)

    def verify(self, output: list[dict[str, Any]], response_id: str, created_s: float) -> dict[str, Any]:
        """Return the body of `/verify`: the row, and the episode as one response of the Responses API."""
        params = self.fields[_PARAMS]
        tools = [
            {"description": None, "parameters": None, "strict": None, **tool} for tool in params.get("tools") or []
        ]
        response = {
            "id": response_id, "object": "response", "created_at": created_s, "model": "policy",
            "status": "completed", "output": output, "parallel_tool_calls": not self.makes_one_call,
            "tool_choice": "auto", "tools": tools,
        }  # fmt: skip
        return {**self.fields, "response": response}


def _shown(messages: tuple[Message, ...], row: Row) -> tuple[Message, ...]:
    if not messages or messages[-1].role not in ("user", "tool"):
        last = f"the last is of the {messages[-1].role}" if messages else "there is none"
        raise ValueError(f"{_PARAMS}.input: expected messages, the last one of the user; {last}")
    if any(message.images for message in messages):
        raise ValueError(f"{_PARAMS}.input: a message has an image, which this environment does not show")
    if row.messages and row.messages[0].role == "system" and messages[0].role != "system":
        raise ValueError(
            f"its messages begin with a system message that {_PARAMS}.input does not have, from data.system_prompt or "
            "the column system; write system_prompt of [environment.define.NAME] instead"
        )
    return messages


def _check(tool: Mapping[str, Any], where: str) -> None:
    name = tool["name"]
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where}.name: expected 1 to 64 letters, digits, _ and -, got {name[:100]!a}")
    if name in _RESERVED:
        raise ValueError(f"{where}.name: {name} is a path that the server has for itself; no policy calls it")
    schema = tool.get("parameters")
    if schema is None:
        return
    if schema.get("type") != "object" or not isinstance(schema.get("properties", {}), dict):
        raise ValueError(
            f"{where}.parameters: expected a JSON schema of an object with properties, got {str(schema)[:200]}"
        )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise ValueError(f"{where}.parameters.required: expected a list of names, got {str(required)[:200]}")


class NemoGymPlay(Play):
    def __init__(self, seed: int, row: Row, options: NemoGymOptions, sessions: Sessions) -> None:
        self._row = GymRow.of(row)
        self.tools = self._row.tools
        self._names = frozenset(tool["function"]["name"] for tool in self.tools)
        self._seed, self._options, self._sessions = seed, options, sessions
        self._session: GymSession | None = None
        self._id = secrets.token_hex(8)
        self._output: list[dict[str, Any]] = []  # the episode as items of the Responses API

    async def start(self) -> Sequence[Message]:
        self._session = await self._sessions.open(self._row.fields, self._seed)
        return self._row.messages

    async def step(self, answer: Message) -> Reply:
        """Make the calls of an answer in turn; one without a call, or a tool, ends the episode. Raises GymFailed."""
        self._output += output_items(answer, f"{self._id}_{len(self._output)}")
        results: list[tuple[str, bool]] = []
        is_done = not answer.tool_calls
        for number, call in enumerate(answer.tool_calls):
            whole, is_error = await self._result(call, number)
            is_done = is_done or (self._options.use_done_flag and not is_error and _says_done(whole))
            results.append((self._options.shortened(whole), is_error))
            self._output.append({"type": "function_call_output", "call_id": call.id, "output": results[-1][0]})
        reply = called(answer.tool_calls, results)
        if not is_done:
            return reply
        reward, parts = await self._verify()
        return Reply(reward=reward, is_done=True, parts={**parts, **(reply.parts if results else {})})

    async def score(self) -> float:
        return (await self._verify())[0]

    async def close(self) -> None:
        if self._session is not None:
            self._session.end()

    async def _verify(self) -> tuple[float, dict[str, float]]:
        assert self._session is not None
        return await self._session.verify(self._row.verify(self._output, f"resp_{self._id}", time.time()))

    async def _result(self, call: ToolCall, number: int) -> tuple[str, bool]:
        most = 1 if self._row.makes_one_call else self._options.max_calls
        if number >= most:
            return f"error: only the first {most} calls of an answer are made", True
        if call.name not in self._names:  # every name is a path of the server, /verify too
            named = ", ".join(sorted(self._names)) or "none"
            return f"error: there is no tool {call.name[:100]!r}; there are {named}", True
        try:
            arguments = read_arguments(call)
        except ValueError as err:
            return f"error: {err}", True
        assert self._session is not None
        return await self._session.call(call.name, arguments)


def _says_done(text: str) -> bool:
    value = parsed_json(text)
    return isinstance(value, dict) and value.get("done") is True


class NemoGym(ServerEnvironment):
    name = "nemo_gym"
    options = NemoGymOptions
    sessions_class = Sessions
    play_class = NemoGymPlay

    def defined(self, name: str, definition: EnvironmentDefinition) -> Self:
        other = super().defined(name, definition)
        check_reply_deadline(name, definition, other.chosen.call_deadline_s, ALIVE_WITHIN_S)
        return other


NEMO_GYM = NemoGym()
