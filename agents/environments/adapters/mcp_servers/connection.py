"""A session with one MCP server: its tools, and calls of them.

Outcomes of a call:

| what happens                                                                   | then                                   |
|--------------------------------------------------------------------------------|----------------------------------------|
| the tool answers, or says that it failed                                       | text for the policy                    |
| the server refuses the call: unknown tool, wrong arguments                     | text for the policy                    |
| no answer within `call_deadline_s`, and the server still lists its tools        | text for the policy                    |
| the connection breaks, the session is lost, the server fails or answers outside the protocol | the server has failed: the episode is restarted |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal

from penstock.agents.environments.adapters.mcp_servers.transports import library
from penstock.protocol.errors import PenstockError

LISTS_WITHIN_S = 10.0  # a server that has refused a call, or has not answered one, lists its tools within this time
_CLOSE_S = 5.0
_MOST_PAGES = 100
# JSON-RPC's codes of a server that failed; also what the library reports for a lost session and for HTTP 5xx.
_FAILURES = frozenset({-32000, -32603, -32600, -32700})
_TIMED_OUT = -32001

Mode = Literal["session", "auto"]


class ServerFailed(PenstockError):
    """A server has exited, or does not follow the protocol; the policy did not cause it."""


@dataclass(frozen=True, slots=True)
class Result:
    text: str
    is_error: bool
    structured: Any = None  # what the tool returns besides, as JSON
    is_late: bool = False  # there was no answer in time


class McpConnection:
    """A session with one server; for one event loop."""

    def __init__(
        self,
        name: str,
        transport: AbstractAsyncContextManager[Any],
        *,
        mode: Mode,
        call_deadline_s: float,
        known: Callable[[], str],
    ) -> None:
        """Note how the server is reached; ``known`` says more of a failure, once the transport is closed."""
        self._name, self._transport, self._mode = name, transport, mode
        self._call_deadline_s, self._known = call_deadline_s, known
        self._client: Any = None
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._held: asyncio.Task[None] | None = None

    async def open(self) -> list[Any]:
        self._held = asyncio.create_task(self._hold(), name=f"mcp {self._name}")
        await self._until_done(asyncio.ensure_future(self._ready.wait()), "does not start a session")
        return await self._until_done(asyncio.ensure_future(self._list()), "does not list its tools")

    async def _hold(self) -> None:
        """Hold the session open: the library wants its contexts to be left by the task that entered them."""
        mode = "legacy" if self._mode == "session" else "auto"
        async with library().Client(self._transport, mode=mode, cache=None) as client:
            self._client = client
            self._ready.set()
            await self._closing.wait()

    async def _list(self) -> list[Any]:
        tools: list[Any] = []
        cursor = None
        for _ in range(_MOST_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools
        raise ServerFailed(f"MCP server {self._name} lists its tools in more than {_MOST_PAGES} pages")

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Result:
        work = self._client.call_tool(tool, dict(arguments), read_timeout_seconds=self._call_deadline_s)
        try:
            answer = await self._until_done(asyncio.ensure_future(work), f"does not answer a call of {tool}")
        except library().MCPError as err:
            if err.code in _FAILURES:
                raise await self._failed(f"does not answer a call of {tool}", err) from None
            await self._check_lists(tool)
            if err.code == _TIMED_OUT:
                return Result(f"error: no answer within {self._call_deadline_s:g} seconds", is_error=True, is_late=True)
            return Result(f"error: {err.message}", is_error=True)
        text = "\n".join(_text(one) for one in answer.content)
        if answer.is_error:
            return Result(text if text.lower().startswith("error") else f"error: {text}", is_error=True)
        return Result(text, is_error=False, structured=answer.structured_content)

    async def _check_lists(self, tool: str) -> None:
        what = f"did not answer a call of {tool}, and does not list its tools either"
        try:
            async with asyncio.timeout(LISTS_WITHIN_S):
                await self._until_done(asyncio.ensure_future(self._client.list_tools()), what)
        except (TimeoutError, library().MCPError) as err:
            raise await self._failed(what, err) from None

    async def _until_done(self, work: asyncio.Future[Any], problem: str) -> Any:
        """Return the result of work that the session is needed for; raises MCPError, and ServerFailed when the session ends."""
        assert self._held is not None
        try:
            await asyncio.wait({work, self._held}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise await self._failed(problem, None)
            try:
                return work.result()
            except (library().MCPError, ServerFailed):
                raise
            except Exception as err:  # noqa: BLE001 - the library raises what its parts raise
                raise await self._failed(problem, err) from None
        finally:
            work.cancel()

    async def _failed(self, problem: str, err: BaseException | None) -> ServerFailed:
        cause = await self._close()
        reason = _reason(cause or err)
        return ServerFailed(f"MCP server {self._name} {problem}{reason}{self._known()}")

    async def close(self) -> None:
        await self._close()

    async def _close(self) -> BaseException | None:
        self._closing.set()
        held = self._held
        if held is None:
            return None
        try:
            await asyncio.wait({held}, timeout=_CLOSE_S)
        finally:
            held.cancel()  # also where this is cancelled itself
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({held}, timeout=_CLOSE_S)
        return None if not held.done() or held.cancelled() else held.exception()


def _reason(err: BaseException | None) -> str:
    while isinstance(err, BaseExceptionGroup):
        err = err.exceptions[0]
    return "" if err is None else f": {type(err).__name__}: {str(err)[:500]}"


def _text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    resource = getattr(block, "resource", None)
    if resource is not None and getattr(resource, "text", None) is not None:
        return str(resource.text)
    data = getattr(block, "data", None) or getattr(resource, "blob", None) or ""
    kind = getattr(block, "mime_type", None) or getattr(resource, "mime_type", None) or block.type
    return f"[{kind}, {len(data) * 3 // 4} bytes]"
