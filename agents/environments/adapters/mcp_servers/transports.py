"""How an MCP server is reached: a process of the episode over its standard input and output, or a URL over streamable HTTP.

Each is what the client of the library `mcp` takes as a transport. A process gets a session of its own, exits with the worker, and is killed with
all that it started when the episode ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import shutil
import signal
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.agents.environments import program_process
from penstock.protocol import parent_death
from penstock.protocol.errors import ConfigError
from penstock.serving.target_policy import TargetPolicy, resolve

_EXIT_S = 1.0  # a server whose input is closed may take that long to exit
_REAP_S = 10.0
_CONNECT_S = 5.0


def library() -> Any:
    try:
        import mcp  # noqa: PLC0415 - only a worker that plays with MCP servers needs it
    except ImportError as err:
        raise ConfigError(f'mcp is not installed ({err}); run: pip install "penstock[mcp]"') from None
    return mcp


class ServerProcess:
    """What is known of a process after it has ended: the end of what it wrote to standard error, and why its output was given up."""

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

    own = tempfile.mkdtemp(prefix=f"{program_process.PREFIX}{program_process.mark()}-")
    words = [*parent_death.command_words(os.getpid()), *command]
    output = program_process.Output()
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output.write_end,
            cwd=folder,
            env={**variables, "TMPDIR": own, program_process.MARK: program_process.mark()},
            start_new_session=True,
            limit=max_message_bytes,
        )
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
            await _end(process)
    finally:
        output.close()
        known.output = output.text()
        shutil.rmtree(own, ignore_errors=True)


async def _receive(process: asyncio.subprocess.Process, to_client: Any, known: ServerProcess) -> None:
    """Pass each line of the server's output on; the end of its output ends the stream, and so the session."""
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
    """Write each message of the client as a line; a server that reads no more ends the session."""
    assert process.stdin is not None
    try:
        async with from_client:
            async for one in from_client:
                process.stdin.write(one.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await process.stdin.drain()
    except OSError:
        await to_client.aclose()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the server's input, let it exit, and kill what is left of its process group; finishes when cancelled too."""
    try:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_S):
                await process.wait()


@contextlib.asynccontextmanager
async def over_http(
    url: str, headers: Mapping[str, str], policy: TargetPolicy, trusted: ssl.SSLContext, *, max_answer_bytes: int
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the streams of messages from and to a server at a URL; every address is checked before it is connected to."""
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
