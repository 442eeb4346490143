"""What every HTTP server of the repository refuses before its own code sees a request, and that no server is without these guards."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from tests.console.web.control.api import Api
from tests.reward_service.processes import api_app
from tests.serving.test_hosted_servers import environment, reward

from penstock.console.web import serve
from penstock.protocol.transport import tls
from penstock.reward_service.endpoints.endpoint import Access
from penstock.rollout_service.embedded_engine.http.app import build_app
from penstock.serving import web_server

ROOT = Path(__file__).parents[2]
Build = Callable[[Path], uvicorn.Config]


def engine(_: Path) -> uvicorn.Config:
    state = SimpleNamespace(settings=SimpleNamespace(host="127.0.0.1"))
    return web_server.config_of(build_app(cast(Any, state), "key"), lifespan="off")


SERVERS: dict[str, tuple[Build, str, str]] = {  # how it is built; a path that takes JSON, and one that only reads
    "served reward": (lambda _: web_server.config_of(reward((), ()), lifespan="off"), "/score", "/metadata"),
    "served environment": (lambda _: web_server.config_of(environment((), ()), lifespan="off"), "/episodes", "/environment"),
    "embedded engine": (engine, "/update_weights_from_disk", "/flush_cache"),
    "reward service": (lambda _: web_server.config_of(api_app(Access([])), lifespan="off"), "/v1/score", "/v1/nothing"),
    "console": (lambda folder: serve.server_for(Api(folder).context, ()).config, "/v1/runs", "/v1/runs"),
}  # fmt: skip


@contextlib.asynccontextmanager
async def running(build: Build, folder: Path, limit: int) -> AsyncIterator[int]:
    config = build(folder)
    cast(Any, config).max_connections = limit
    server = web_server._Server(config)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        task = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def status(port: int, head: str, body: bytes = b"") -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        async with asyncio.timeout(60):
            return int((await reader.readline()).split()[1])
    finally:
        writer.close()


async def received(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:  # closed with bytes that it had not read
        return b""


HOST = "host: localhost"
JSON = "content-type: application/json\ncontent-length: 2"
SITE = "origin: http://evil.example\nsec-fetch-site: cross-site"
REFUSED = {  # of a POST with a body of two bytes; what a page of another site can send, and what is read in two ways
    f"host: evil.example\n{JSON}": {403},
    f"host: [::1].evil.example\n{JSON}": {400, 403},
    f"host: localhost.evil.example:80\n{JSON}": {403},
    f"{HOST}\nhost: evil.example\n{JSON}": {400},
    f"{HOST}\n{SITE}\n{JSON}": {401, 403},
    f"{HOST}\norigin: null\n{JSON}": {401, 403},
    f"{HOST}\norigin: http://localhost:1\n{JSON}": {401, 403},
    f"{HOST}\nsec-fetch-site: same-site\n{JSON}": {401, 403},
    f"{HOST}\ncontent-type: text/plain\ncontent-length: 2": {401, 415},
    f"{HOST}\ncontent-type: multipart/form-data\ncontent-length: 2": {401, 415},
    f"{HOST}\ncontent-length: 2": {401, 415},
    f"{HOST}\n{JSON}\ntransfer-encoding: chunked": {400},
    f"{HOST}\n{JSON}\nx: {'a' * 70_000}": {400, 431},
    f"{HOST}\ncontent-type: application/json\ncontent-length: 99999999999\nexpect: 100-continue": {400, 401, 413},
}


@pytest.mark.parametrize("name", SERVERS)
async def test_a_server_refuses_what_a_page_of_another_site_can_send(name: str, tmp_path: Path) -> None:
    """Host, origin, content type, framing and lengths; 401 where a token is asked for before the body is looked at."""
    build, path, reading = SERVERS[name]
    async with running(build, tmp_path, 64) as port:
        for headers, expected in REFUSED.items():
            got = await status(port, f"POST {path} HTTP/1.1\n{headers}", b"{}")
            assert got in expected, (headers, got)
        assert await status(port, f"GET {reading} HTTP/1.1\n{HOST}\n{SITE}") in {401, 403}


@pytest.mark.parametrize("name", SERVERS)
async def test_half_sent_requests_keep_nobody_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit those are closed that wait longest, from another machine its own alone; late ones are answered 408."""
    monkeypatch.setattr(web_server, "GRACE_S", 1.5)
    build, _, reading = SERVERS[name]
    async with running(build, tmp_path, 8) as port:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(24)]
        for _, writer in connections:
            writer.write(b"POST / HTTP/1.1\r\nhost: loc")
        assert await status(port, f"GET {reading} HTTP/1.1\n{HOST}") != 503
        async with asyncio.timeout(60):
            answers = [await received(reader) for reader, _ in connections]
        assert any(b"408" in answer for answer in answers)
        for _, writer in connections:
            writer.close()
        monkeypatch.setattr(tls, "is_loopback", lambda host: False)
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        async with asyncio.timeout(1.0):
            assert [await received(reader) for reader, _ in connections[:2]] == [b"", b""]
        for _, writer in connections:
            writer.close()


async def test_the_embedded_engine_asks_for_its_key(tmp_path: Path) -> None:
    """Any program of the machine could otherwise change the weights; health is for everybody."""
    async with running(engine, tmp_path, 64) as port:
        for key, expected in ((None, 401), ("other", 401), ("key", 400)):
            sent = "" if key is None else f"\nauthorization: Bearer {key}"
            request = f"POST /update_weights_from_disk HTTP/1.1\n{HOST}\n{JSON}{sent}"
            assert await status(port, request, b"{}") == expected
        assert await status(port, f"GET /health HTTP/1.1\n{HOST}") != 401


def test_every_server_is_configured_in_one_place() -> None:
    """A server that configures uvicorn itself, or listens by other means, has none of these guards."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pattern = re.compile(r"uvicorn\.(Config|run)\(|start_server\(|\bHTTPServer\(|create_app_runner|web\.AppRunner")
    servers = [
        name
        for name in listed.split()
        if not name.startswith(("tests/", "benchmarks/", "docs/", "examples/"))
        and pattern.search((ROOT / name).read_text())
    ]
    assert servers == ["protocol/metrics/server.py"]  # which answers one path, and closes what is late after 5 s
