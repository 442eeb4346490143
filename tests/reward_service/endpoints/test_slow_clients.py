"""Clients that send a request slowly or not at all, against the web server alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI, Request

from penstock.reward_service.api import request_clock, web_server
from penstock.reward_service.api.request_clock import RequestClock

HEAD = b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n"
WHOLE = HEAD + b"\r\nabcdef"


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    app = FastAPI()

    @app.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    @app.post("/slow")
    async def slow(request: Request) -> int:
        await request.body()
        await asyncio.sleep(1.0)
        return 1

    done = asyncio.Event()
    with web_server.listen("127.0.0.1", 0, key="port") as bound:
        task = asyncio.create_task(web_server.serve(app, bound, done))
        try:
            yield bound.getsockname()[1]
        finally:
            done.set()
            await task


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_clock, "GRACE_S", 0.4)


async def talk(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send parts with pauses between them; return all that comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = asyncio.create_task(reader.read())
    try:
        with contextlib.suppress(OSError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause_s)
        async with asyncio.timeout(10):
            return await received
    finally:
        writer.close()


def test_time_is_earned_by_bytes_alone() -> None:
    """A request has its grace and what its bytes take at the slowest rate; one that is there has no limit."""
    clock = RequestClock(100.0)
    assert clock.left_s(100.0) == pytest.approx(0.4)
    clock.arrived(100.2, request_clock.MIN_BYTES_PER_S)
    assert clock.left_s(100.2) == pytest.approx(1.2)
    clock.arrived(101.0, 1)
    assert clock.left_s(101.5) < 0.0
    clock.complete()
    assert clock.left_s(1e9) == float("inf")
    clock.arrived(2e9, 1)
    assert clock.left_s(2e9) == pytest.approx(0.4, abs=1e-3)


@pytest.mark.parametrize(
    ("parts", "answers"),
    [
        ([], []),
        ([b"PO"], [b"408"]),
        ([HEAD], [b"408"]),
        ([HEAD + b"\r\nabc"], [b"408"]),
        ([bytes([letter]) for letter in HEAD[:30]], [b"408"]),
        ([HEAD + b"\r\n", b"a", b"b", b"c", b"d"], [b"408"]),
        ([WHOLE, b"POST"], [b"200", b"408"]),
        ([WHOLE + HEAD], [b"200", b"408"]),
        ([WHOLE + HEAD + b"\r\nabc"], [b"200", b"408"]),
        ([WHOLE], [b"200"]),
        ([HEAD.replace(b"/size", b"/none") + b"\r\nabc"], [b"404"]),
        ([WHOLE.replace(b"/size", b"/slow")], [b"200"]),
    ],
    ids=["nothing", "2 letters", "half the headers", "half the body", "headers in drops", "a body in drops", "a second one begun",
         "a second one piped", "half a second body piped", "idle", "answered before its body", "a slow answer"],
)  # fmt: skip
async def test_a_connection_that_waits_for_its_client_ends(parts: list[bytes], answers: list[bytes]) -> None:
    """Without a whole request in time the client gets 408 and the connection is closed, also if it is the second one of it."""
    async with serving() as port:
        received = await talk(port, *parts, pause_s=0.15)
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == answers


async def test_a_full_server_closes_who_has_sent_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of connections a new one is served in place of the oldest half request; requests in work are kept."""
    monkeypatch.setattr(request_clock, "GRACE_S", 30.0)
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 4)
    async with serving() as port:
        working = [asyncio.create_task(talk(port, WHOLE.replace(b"/size", b"/slow"))) for _ in range(2)]
        await asyncio.sleep(0.2)
        halves = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(2)]
        for half in halves:
            half.sendall(HEAD)
            await asyncio.sleep(0.05)
        close = WHOLE.replace(b"host: x", b"host: x\r\nconnection: close")
        assert b"200 OK" in await talk(port, close)
        assert halves[0].recv(100).startswith(b"HTTP/1.1 503")
        halves[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            halves[1].recv(1)
        for half in halves:
            half.close()
        monkeypatch.setattr(request_clock, "GRACE_S", 0.1)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
