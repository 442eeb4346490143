"""Clients that send a request slowly or not at all, against the web server alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from penstock.protocol.transport import tls
from penstock.serving import web_server
from penstock.serving.web_server import RequestClock

HEAD = b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n"
WHOLE = HEAD + b"\r\nabcdef"
GRACE_S = 2.0
LARGE = 20_000_000  # more than the kernel keeps of an answer


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    app = FastAPI()

    @app.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    @app.post("/slow")
    async def slow(request: Request) -> int:
        await request.body()
        await asyncio.sleep(2 * GRACE_S)
        return 1

    @app.get("/large")
    async def large(parts: int) -> StreamingResponse:
        return StreamingResponse(iter([b"x" * (LARGE // parts)] * parts))

    done = asyncio.Event()
    with tls.listen("127.0.0.1", 0, key="port") as bound:
        task = asyncio.create_task(web_server.serve(app, bound, done))
        try:
            yield bound.getsockname()[1]
        finally:
            done.set()
            await task


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "GRACE_S", GRACE_S)


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
        async with asyncio.timeout(60):
            return await received
    finally:
        writer.close()


def test_time_is_earned_by_bytes_alone() -> None:
    """A request has its grace and what its bytes take at the slowest rate; one that is there has no limit."""
    clock = RequestClock(100.0)
    assert clock.left_s(100.0) == pytest.approx(GRACE_S)
    clock.arrived(100.2, web_server.MIN_BYTES_PER_S)
    assert clock.left_s(100.2) == pytest.approx(GRACE_S + 0.8)
    clock.arrived(101.0, 1)
    assert clock.left_s(101.1 + GRACE_S) < 0.0
    clock.complete()
    assert clock.left_s(1e9) == float("inf")
    clock.arrived(2e9, 1)
    assert clock.left_s(2e9) == pytest.approx(GRACE_S, abs=1e-3)


CASES: dict[str, tuple[list[bytes], list[bytes]]] = {  # what is sent, with pauses, and the answers
    "nothing": ([], []),
    "2 letters": ([b"PO"], [b"408"]),
    "half the headers": ([HEAD], [b"408"]),
    "half the body": ([HEAD + b"\r\nabc"], [b"408"]),
    "headers in drops": ([bytes([letter]) for letter in HEAD[:5]], [b"408"]),
    "a body in drops": ([HEAD + b"\r\n", b"a", b"b", b"c", b"d"], [b"408"]),
    "a second one begun": ([WHOLE, b"POST"], [b"200", b"408"]),
    "a second one piped": ([WHOLE + HEAD], [b"200", b"408"]),
    "half a second body piped": ([WHOLE + HEAD + b"\r\nabc"], [b"200", b"408"]),
    "idle": ([WHOLE], [b"200"]),
    "answered before its body": ([HEAD.replace(b"/size", b"/none") + b"\r\nabc"], [b"404"]),
    "a slow answer": ([WHOLE.replace(b"/size", b"/slow")], [b"200"]),
}


async def test_a_connection_that_waits_for_its_client_ends() -> None:
    """Without a whole request in time the client gets 408 and the connection is closed, also if it is the second one of it."""
    async with serving() as port:
        received = await asyncio.gather(*(talk(port, *parts, pause_s=GRACE_S / 10) for parts, _ in CASES.values()))
    found = {
        name: [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
        for name, answer in zip(CASES, received, strict=True)
    }
    assert found == {name: answers for name, (_, answers) in CASES.items()}


async def test_a_full_server_closes_who_has_sent_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of connections a new one is served in place of the oldest half request; requests in work are kept."""
    monkeypatch.setattr(web_server, "GRACE_S", 30.0)
    monkeypatch.setattr(web_server, "MAX_CONNECTIONS", 4)
    async with serving() as port:
        working = [asyncio.create_task(talk(port, WHOLE.replace(b"/size", b"/slow"))) for _ in range(2)]
        await asyncio.sleep(0.2)
        halves = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(2)]
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
        monkeypatch.setattr(web_server, "GRACE_S", 0.1)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


@pytest.mark.parametrize(("grace_s", "reads_slowly", "num_whole"), [(600.0, False, 1), (0.2, False, 0), (2.0, True, 2)])
async def test_an_answer_that_is_not_taken_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch, grace_s: float, reads_slowly: bool, num_whole: int
) -> None:
    """Who does not read is cut off for another client, and otherwise after its time; who reads slowly gets everything."""
    for name, value in (
        ("GRACE_S", grace_s),
        ("MAX_CONNECTIONS", 2),
        ("MIN_BYTES_PER_S", 1e5 if reads_slowly else 1e9),
    ):
        monkeypatch.setattr(web_server, name, value)
    async with serving() as port, asyncio.timeout(60):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in clients:
            writer.write(
                b"GET /large?parts=%d HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % (20 if num_whole == 1 else 1)
            )
        await asyncio.sleep(0 if reads_slowly else 1)
        if num_whole == 1:
            assert b"200 OK" in await talk(port, WHOLE.replace(b"host: x", b"host: x\r\nconnection: close"))
        sizes = await asyncio.gather(*(taken(reader, 0.02 * reads_slowly) for reader, _ in clients))
        for _, writer in clients:
            writer.close()
    assert sum(size > LARGE for size in sizes) == num_whole


async def taken(reader: asyncio.StreamReader, pause_s: float) -> int:
    size = 0
    with contextlib.suppress(ConnectionResetError):
        while part := await reader.read(LARGE // 50):
            size += len(part)
            await asyncio.sleep(pause_s)
    return size
