"""The proxy's HTTP application, and how it is served on a socket of this process, in its event loop.

A request is read, answered and marked as delivered; a client that disconnected is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from penstock.agents.proxy.api import anthropic_messages, chat_completions, responses
from penstock.agents.proxy.messages import AgentRequest, Declared, Lenience, RequestRefused, RetryMark, invalid
from penstock.agents.proxy.session import AgentProxy, EpisodeSession
from penstock.agents.proxy.tree import SampledTurn
from penstock.serving import web_server
from penstock.serving.request_checks import Guard, Rules
from penstock.serving.web_server import LONG_BACKLOG

log = structlog.get_logger("rollout.proxy")

MODEL = "policy"  # the name of the one model
_COUNT_TOKENS = "messages/count_tokens"
_MAX_KEY = 256
_MAX_BODIES = 64  # of the longest; a body is held until it is answered, and hundreds of agents ask at a time
_JSON = (b"content-type", b"application/json")
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class Api(Protocol):
    """A module of `api/`, each of which has the functions of the others."""

    PREFIX: str

    def read_request(self, body: Mapping[str, Any], temperature: float, lenience: Lenience) -> AgentRequest: ...
    def reply(self, turn: SampledTurn, model: str, created: int, request_id: str) -> dict[str, Any]: ...
    def events(
        self, turn: SampledTurn, body: Mapping[str, Any], model: str, created: int, request_id: str
    ) -> list[bytes]: ...
    def error(self, refused: RequestRefused) -> dict[str, Any]: ...


APIS: dict[str, Api] = {"chat/completions": chat_completions, "responses": responses, "messages": anthropic_messages}


def _is_of_anthropic(name: str, scope: Scope) -> bool:
    return name.startswith("messages/") or any(key == b"anthropic-version" for key, _ in scope["headers"])


def _asked(scope: Scope) -> tuple[str, str, str, Api]:
    """Return the first two parts of the path, what is asked for below them, and the API whose form an error has."""
    _, first, secret, rest = ([*scope["path"].split("/", 3), "", "", "", ""])[:4]
    name = rest.removeprefix("v1/")
    return (
        first,
        secret,
        name,
        APIS.get(name) or APIS["messages" if _is_of_anthropic(name, scope) else "chat/completions"],
    )


def _refusal(proxy: AgentProxy, status: int, text: str, scope: Scope) -> Response:
    if status == 503:
        with contextlib.suppress(RequestRefused):
            proxy.find(_asked(scope)[1]).fail("server_busy")
    code = "request_too_large" if status == 413 else "server_busy" if status == 503 else "invalid_request"
    headers = {"retry-after": "1"} if status == 503 else None
    return JSONResponse(_asked(scope)[3].error(RequestRefused(status, code, text)), status, headers=headers)


def guarded(proxy: AgentProxy, hosts: Sequence[str] | None) -> Guard:
    """Return the proxy's app behind the checks of every server; the secret of an episode in its path is what a sender has to know."""
    limit = proxy.limits.max_body_bytes
    fix = "the Host header must be localhost or 127.0.0.1"
    rules = Rules(hosts, any_body=True, answer=functools.partial(_refusal, proxy), fix=fix)
    return Guard(ProxyApp(proxy), rules, max_bytes=limit, max_total_bytes=_MAX_BODIES * limit)


class ProxyApp:
    def __init__(self, proxy: AgentProxy) -> None:
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        first, secret, name, api = _asked(scope)
        episode: EpisodeSession | None = None
        try:
            if first != "episodes" or (name not in APIS and name not in ("models", _COUNT_TOKENS)):
                raise RequestRefused(404, "not_found", f"{scope['path'].rpartition('/')[2][:80]}: no such path")
            episode = self._proxy.find(secret)
            if name == "models":
                await _send_json(send, 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
                return
            if scope["method"] != "POST":
                raise RequestRefused(405, "method_not_allowed", f"{scope['method']}: use POST")
            await self._answer(api, name, episode, scope, receive, send)
        except RequestRefused as refused:
            await _send_json(send, refused.status, api.error(refused))
        except Exception:
            log.exception("request failed", path=name)
            if episode is not None:
                episode.fail("internal_error")
            said = "internal error of the proxy, please report; see the worker's log"
            await _send_json(send, 500, api.error(RequestRefused(500, "internal_error", said)))

    async def _answer(
        self, api: Api, name: str, episode: EpisodeSession, scope: Scope, receive: Receive, send: Send
    ) -> None:
        limits = self._proxy.limits
        data = await _read_body(scope, receive, limits.body_deadline_s)
        try:
            body = _parse(data)
            if not isinstance(body.get("stream"), bool | None):
                raise invalid("stream must be true or false", "stream")
            is_counted = name == _COUNT_TOKENS  # nothing is decoded, so that nothing constrains it
            lenience = Lenience(limits.unknown_tools == "drop", is_counted or limits.forced_choice == "auto")
            request = replace(
                api.read_request(body, episode.temperature, lenience), conversation=_conversation(scope["headers"])
            )
            _check_messages(request, limits.max_messages, is_counted=is_counted)
        except RequestRefused as refused:
            episode.counts[f"refused.{refused.code}"] += 1
            raise
        if is_counted:
            await _send_json(send, 200, {"input_tokens": await episode.count_tokens(request)})
            return
        mark = _mark(scope["headers"], name, data)
        exchange = _Exchange(api, body, send, receive)
        turn = await exchange.run(
            episode.answer(request, mark), stream=body.get("stream") is True, wait_s=limits.stream_wait_s,
            comment_s=limits.stream_comment_s,
        )  # fmt: skip
        if turn is not None:
            turn.delivered = True


class _Exchange:
    def __init__(self, api: Api, body: Mapping[str, Any], send: Send, receive: Receive) -> None:
        self._api = api
        self._body = body
        self._send = send
        self._receive = receive
        self._id = api.PREFIX + secrets.token_hex(12)

    async def run(self, answering: Any, *, stream: bool, wait_s: float, comment_s: float) -> SampledTurn | None:
        gone = asyncio.create_task(self._disconnected())
        answer: asyncio.Task[SampledTurn] = asyncio.create_task(answering)
        try:
            began = await self._wait(answer, gone, wait_s if stream else None, comment_s)
            # a connection that was lost is reported now; afterwards its end is that of the answer
            await asyncio.sleep(0)
            if not answer.done() or gone.done():
                return None
            created, model = int(time.time()), str(self._body.get("model") or MODEL)
            if began:
                await self._end_stream(answer, model, created)
            elif stream:
                turn = answer.result()
                await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                await self._send_events(self._api.events(turn, self._body, model, created, self._id))
            else:
                await _send_json(self._send, 200, self._api.reply(answer.result(), model, created, self._id))
            return None if answer.exception() is not None else answer.result()
        finally:
            for task in (gone, answer):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone

    async def _wait(
        self, answer: asyncio.Task[SampledTurn], gone: asyncio.Task[None], wait_s: float | None, comment_s: float
    ) -> bool:
        """Wait for the answer or until the client has disconnected; return True if a stream was begun meanwhile."""
        await asyncio.wait({answer, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        began = False
        while not (answer.done() or gone.done()):
            if not began:
                await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                began = True
            await self._send({"type": "http.response.body", "body": b": sampling\n\n", "more_body": True})
            await asyncio.wait({answer, gone}, timeout=comment_s, return_when=asyncio.FIRST_COMPLETED)
        return began

    async def _end_stream(self, answer: asyncio.Task[SampledTurn], model: str, created: int) -> None:
        error = answer.exception()
        if isinstance(error, RequestRefused):
            told = json.dumps(self._api.error(error)).encode()
            await self._send_events([b"event: error\ndata: " + told + b"\n\n"])
            return
        await self._send_events(self._api.events(answer.result(), self._body, model, created, self._id))

    async def _send_events(self, events: Sequence[bytes]) -> None:
        await self._send({"type": "http.response.body", "body": b"".join(events), "more_body": False})

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _read_body(scope: Scope, receive: Receive, deadline_s: float) -> bytes:
    try:
        async with asyncio.timeout(deadline_s):
            return await Request(scope, receive).body()
    except ClientDisconnect:
        raise RequestRefused(400, "disconnected", "the connection was closed before the end of the body") from None
    except TimeoutError:
        raise RequestRefused(408, "request_timeout", f"the body did not arrive within {deadline_s:g} s") from None


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
        data.decode()
    except (ValueError, RecursionError) as err:
        raise invalid(f"the body is not JSON in UTF-8: {str(err)[:200]}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid(f"the body must be a JSON object, got {type(body).__name__}", code="invalid_json")
    return body


def _check_messages(request: AgentRequest, most: int, *, is_counted: bool) -> None:
    if not 0 < len(request.messages) <= most:
        raise invalid(f"{len(request.messages)} messages, expected 1 to {most}", "messages")
    if request.messages[-1].role == "assistant" and not is_counted:
        raise invalid(
            "the last message is an answer, and nothing follows it that could be answered: end with a user's or a tool's message",
            "messages",
        )
    if request.messages[-1].role == "system" and len(request.messages) == 1:
        raise invalid("a system message alone has no answer: add a user's message", "messages")


def _conversation(headers: Sequence[tuple[bytes, bytes]]) -> Declared:
    declared = next((value.decode("latin-1") for key, value in headers if key == b"x-penstock-conversation"), "")
    if declared not in ("", "main", "side"):
        raise invalid(f"x-penstock-conversation is {declared[:40]!r}, expected main or side", "x-penstock-conversation")
    return declared


def _mark(headers: Sequence[tuple[bytes, bytes]], name: str, data: bytes) -> RetryMark:
    digest = hashlib.blake2b(name.encode() + b"\0" + data, digest_size=16).digest()
    retry_headers = {key: value for key, value in headers if key in (b"idempotency-key", b"x-stainless-retry-count")}
    key = retry_headers.get(b"idempotency-key", b"").decode("latin-1")
    if len(key) > _MAX_KEY:
        raise invalid(f"Idempotency-Key of {len(key)} characters, at most {_MAX_KEY}")
    count = retry_headers.get(b"x-stainless-retry-count", b"0")
    return RetryMark(digest, key or None, is_retry=count.isdigit() and count.strip(b"0") != b"")


async def _send_json(send: Send, status: int, value: Any) -> None:
    data = json.dumps(value).encode()
    headers = [_JSON, (b"content-length", str(len(data)).encode())]
    if status in (429, 503):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def serving(proxy: AgentProxy) -> contextlib.AbstractAsyncContextManager[str]:
    """Serve the proxy on the loopback inside the block; yields its URL, to which `session.path` is appended."""
    return web_server.serving_app(guarded(proxy, ()), "127.0.0.1", 0, key="the proxy's port")


@contextlib.asynccontextmanager
async def serving_at(proxy: AgentProxy, path: Path) -> AsyncIterator[None]:
    """Serve the proxy on a Unix socket inside the block, which any user may open who can enter its folder; raises OSError."""
    with _listening_at(path) as listener:
        async with web_server.serving_long(guarded(proxy, None), listener):
            yield


def _listening_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(LONG_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
