"""A session with one MCP server: how it is reached, its tools, and calls of them.

Outcomes of a call:

| what happens                                                              | then                                    |
|---------------------------------------------------------------------------|-----------------------------------------|
| the tool answers, or says that it failed                                  | text for the policy                     |
| the server refuses the call: unknown tool, wrong arguments                | text for the policy                     |
| no answer within `call_deadline_s`, and the server still lists its tools  | text for the policy                     |
| the connection or the session is lost, the server fails, a wrong protocol | it has failed: the episode is restarted |

A server is a process of the episode, over stdin and stdout, or a URL, over streamable HTTP. A process gets a separate
session, exits with the worker, and is killed with all that it started when the episode ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.agents.environments import program_process
from penstock.agents.environments.shared_options import optional_library
from penstock.protocol import parent_death
from penstock.protocol.errors import PenstockError
from penstock.serving.target_policy import TargetPolicy, resolve

_EXIT_S = 1.0  # a server whose input is closed may take that long to exit
_CONNECT_S = 5.0
LISTS_WITHIN_S = 10.0  # a server that has refused a call, or has not answered one, lists its tools within this time
_CLOSE_S = 5.0
_MOST_PAGES = 100
# JSON-RPC's codes of a server that failed; also what the library reports for a lost session and for HTTP 5xx.
_FAILURES = frozenset({-32000, -32603, -32600, -32700})
_TIMED_OUT = -32001
Mode = Literal["session", "auto"]


def library() -> Any:
    return optional_library("mcp", '"penstock[mcp]"')


class ServerProcess:
    """What is known of an ended process: the end of its standard error, and why its output was abandoned."""

    def __init__(self) -> None:
        self.output = ""
        self.problem = ""

    def text(self) -> str:
        said = f"; the end of its standard error:\n{self.output}" if self.output else ""
        return f"{self.problem}{said}"


@contextlib.asynccontextmanager
async def over_process(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], *, max_message_bytes: int, known: ServerProcess
) -> AsyncIterator[tuple[Any, Any]]:
    import anyio  # noqa: PLC0415 - comes with mcp

    temp_folder = tempfile.mkdtemp(prefix=f"{program_process.PREFIX}{program_process.mark()}-")
    words, mark = [*parent_death.command_words(os.getpid()), *command], program_process.episode_mark()
    output = program_process.Output()
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=output.write_end,
            cwd=folder, env={**variables, "TMPDIR": temp_folder, program_process.MARK: mark},
            start_new_session=True, limit=max_message_bytes,
        )  # fmt: skip
        try:
            to_client, from_server = anyio.create_memory_object_stream[Any](0)
            to_server, from_client = anyio.create_memory_object_stream[Any](0)
            async with to_client, from_server, to_server, from_client, anyio.create_task_group() as group:
                group.start_soon(_receive, process, to_client, known)
                group.start_soon(_send, process, from_client, to_client)
                try:
                    yield from_server, to_server
                finally:
                    group.cancel_scope.cancel()
        finally:
            await _end(process, mark)
    finally:
        output.close()
        known.output = output.text()
        shutil.rmtree(temp_folder, ignore_errors=True)


async def _receive(process: asyncio.subprocess.Process, to_client: Any, known: ServerProcess) -> None:
    import anyio  # noqa: PLC0415
    from mcp.shared.message import SessionMessage  # noqa: PLC0415
    from mcp_types import jsonrpc_message_adapter  # noqa: PLC0415

    assert process.stdout is not None
    async with to_client:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the session is over
            while True:
                try:
                    line = await process.stdout.readline()
                except ValueError:
                    known.problem = "; it sent a message that is longer than options.max_message_bytes"
                    return
                if not line:
                    return
                try:
                    message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                except ValueError as err:
                    known.problem = f"; its standard output is not JSON-RPC: {line[:100]!r}"
                    message = err
                await to_client.send(message)


async def _send(process: asyncio.subprocess.Process, from_client: Any, to_client: Any) -> None:
    assert process.stdin is not None
    try:
        async with from_client:
            async for envelope in from_client:
                process.stdin.write(
                    envelope.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                )
                await process.stdin.drain()
    except OSError:
        await to_client.aclose()


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """Close the server's input, let it exit, and kill the rest of its group and mark; finishes when cancelled too."""
    try:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await process.wait()
    finally:
        await program_process.kill_group(process, mark)


@contextlib.asynccontextmanager
async def over_http(
    url: str, headers: Mapping[str, str], policy: TargetPolicy, trusted: ssl.SSLContext, *, max_answer_bytes: int
) -> AsyncIterator[tuple[Any, Any]]:
    import httpx2  # noqa: PLC0415 - comes with mcp
    from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415

    class Counted(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            count = 0
            async for chunk in self._stream:
                count += len(chunk)
                if count > max_answer_bytes:
                    raise httpx2.ReadError(
                        f"{url} answers with more than {max_answer_bytes} bytes (options.max_message_bytes)"
                    )
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Checked(httpx2.AsyncHTTPTransport):
        """Connects to an address that was checked, and no other: a name is not resolved a second time."""

        async def handle_async_request(self, request: Any) -> Any:
            host, port = policy.check_url(str(request.url))
            address = await _checked_address(policy, host, port)
            request.extensions = {**request.extensions, "sni_hostname": host}
            request.url = request.url.copy_with(host=address)
            response = await super().handle_async_request(request)
            if response.headers.get("content-encoding", "identity") != "identity":
                await response.aclose()
                raise httpx2.ReadError(f"{url} compresses its answer, which was not requested")
            response.stream = Counted(response.stream)
            return response

    timeout = httpx2.Timeout(None, connect=_CONNECT_S)  # the caller has the other deadlines
    async with (
        httpx2.AsyncClient(
            transport=Checked(verify=trusted),
            timeout=timeout,
            headers={"Accept-Encoding": "identity", **headers},
            trust_env=False,
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=max_answer_bytes) as streams,
    ):
        yield streams[0], streams[1]


async def _checked_address(policy: TargetPolicy, host: str, port: int) -> str:
    with contextlib.suppress(ValueError):
        address = str(ipaddress.ip_address(host))
        policy.check_address(host, address, port)
        return address
    addresses = await resolve(host, port)
    for address in addresses:
        policy.check_address(host, address, port)
    return addresses[0]


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
        self, name: str, transport: AbstractAsyncContextManager[Any], *, mode: Mode, call_deadline_s: float,
        known: Callable[[], str],
    ) -> None:  # fmt: skip
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
        text = "\n".join(_text(block) for block in answer.content)
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
        """Return the result of work that needs the session; raises MCPError, and ServerFailed when the session ends."""
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
