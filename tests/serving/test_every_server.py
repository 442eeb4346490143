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
from starlette.requests import Request
from starlette.responses import Response
from tests.console.web.control.api import Api
from tests.reward_service.processes import api_app
from tests.serving.test_hosted_servers import environment, reward

from penstock.agents.proxy.server import guarded
from penstock.agents.proxy.session import AgentProxy, EpisodeLimits
from penstock.console.web import serve
from penstock.protocol.transport import tls
from penstock.reward_service.endpoints.endpoint import Access
from penstock.rollout_service.embedded_engine.http.app import build_app
from penstock.rollout_service.weights import peers
from penstock.serving import web_server
from penstock.serving.request_checks import check_signature

ROOT = Path(__file__).parents[2]
Build = Callable[[Path], uvicorn.Config]


def engine(_: Path) -> uvicorn.Config:
    state = SimpleNamespace(settings=SimpleNamespace(host="127.0.0.1"))
    return web_server.config_of(build_app(cast(Any, state), "key"), lifespan="off")


def proxy(_: Path) -> uvicorn.Config:
    return web_server.config_of(guarded(AgentProxy(EpisodeLimits()), ()), lifespan="off")


def peer(_: Path) -> uvicorn.Config:
    async def segment(request: Request) -> Response:
        await check_signature(["whsec_" + "A" * 43 + "="], request)
        return Response()

    return web_server.config_of(peers.app_of(segment, "192.0.2.1"), lifespan="off")


def of_reward(_: Path) -> uvicorn.Config:
    return web_server.config_of(reward((), ()), lifespan="off")


SERVERS: dict[str, tuple[Build, str, str]] = {  # by the file that starts it: how it is built; a path that takes JSON, and one that only reads
    "reward_service/hosting/served_reward.py": (of_reward, "/score", "/metadata"),
    "client/rewards.py": (of_reward, "/score", "/metadata"),
    "agents/hosting/serve.py": (lambda _: web_server.config_of(environment((), ()), lifespan="off"), "/episodes", "/environment"),
    "agents/proxy/server.py": (proxy, "/episodes/guess/v1/messages", "/episodes/guess/v1/models"),
    "rollout_service/embedded_engine/run_engine.py": (engine, "/update_weights_from_disk", "/flush_cache"),
    "reward_service/service.py": (lambda _: web_server.config_of(api_app(Access([])), lifespan="off"), "/v1/score", "/v1/nothing"),
    "rollout_service/weights/peers.py": (peer, "/segments", "/segments"),
    "console/web/serve.py": (lambda folder: serve.server_for(Api(folder).context, ()).config, "/v1/runs", "/v1/runs"),
}  # fmt: skip
METRICS = "protocol/metrics/server.py"  # answers one path, reads no body, and closes what is late after 5 s


@contextlib.asynccontextmanager
async def running(build: Build, folder: Path, limit: int) -> AsyncIterator[int]:
    config = build(folder)
    cast(Any, config).max_connections = limit
    server = web_server.Server(config)
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
    f"host: 127.0.0.1@evil.example\n{JSON}": {400, 403},
    f"host: 127.0.0.1:80.evil.example\n{JSON}": {400, 403},
    f"host: localhost:80@evil.example\n{JSON}": {400, 403},
    f"host: [::1]evil.example:8800\n{JSON}": {400, 403},
    f"host:\n{JSON}": {400, 403},
    f"{HOST}\nhost: evil.example\n{JSON}": {400},
    f"{HOST}\nauthorization: Bearer a\nauthorization: Bearer b\n{JSON}": {400},
    f"{HOST}\norigin: http://localhost\norigin: http://localhost\n{JSON}": {400},
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
        assert await status(port, f"GET {reading}?{'a' * 5000} HTTP/1.1\n{HOST}") == 414
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
        monkeypatch.setattr(web_server, "GRACE_S", 60.0)
        other, other_writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        async with asyncio.timeout(20):
            assert [await received(reader) for reader, _ in connections[:2]] == [b"", b""]
        assert not other.at_eof()
        for writer in (other_writer, *(writer for _, writer in connections)):
            writer.close()


async def test_the_embedded_engine_asks_for_its_key(tmp_path: Path) -> None:
    """Any program of the machine could otherwise change the weights; health is for everybody."""
    async with running(engine, tmp_path, 64) as port:
        for key, expected in ((None, 401), ("other", 401), ("key", 400)):
            sent = "" if key is None else f"\nauthorization: Bearer {key}"
            request = f"POST /update_weights_from_disk HTTP/1.1\n{HOST}\n{JSON}{sent}"
            assert await status(port, request, b"{}") == expected
        assert await status(port, f"GET /health HTTP/1.1\n{HOST}") != 401


LISTENS = re.compile(  # whatever opens a listening socket, or names a library that does
    r"^\s*(?:from|import) .*\b(?:uvicorn|hypercorn|wsgiref|socketserver|websockets|grpc|zmq|gradio|web_server)\b"
    r"|\b(?:http|xmlrpc)\.server\b|aiohttp(?:\.| import )web\b|multiprocessing\.(?:connection|managers)|\.listen\("
    r"|\b(?:(?:create|start|make)(?:_\w+)?_(?:server|listener)|serve_tcp|ray\.serve)\b",
    re.MULTILINE,
)
NO_SERVER = {
    "agents/environments/adapters/harbor_box.py",  # in a sandbox: passes bytes on to the proxy
    "agents/environments/inside_sandbox.py",
    "console/tools/checks.py",  # whether a port is free
    "protocol/transport/tls.py",  # a socket for the servers here
    "reward_service/__main__.py",  # its heap
    "rollout_service/embedded_engine/__main__.py",  # the socket of run_engine
    "sandbox/canary.py",  # what a program must not reach
    "serving/web_server.py",
}
OTHERS = [
    "from uvicorn import run", "import uvicorn as u", "from asyncio import start_server", "loop.create_server(f)", "loop.create_unix_server(f)",
    "bound.listen()", "import socketserver", "from http.server import HTTPServer as S", "from aiohttp import web", "import aiohttp.web",
    "from prometheus_client import start_http_server", "import penstock.serving.web_server as w", "from wsgiref.simple_server import make_server",
    "from multiprocessing.managers import BaseManager", "import grpc", "run([sys.executable, '-m', 'http.server'])",
]  # fmt: skip


def test_every_server_passes_this_suite() -> None:
    """A new server is one of `SERVERS`; one that configures uvicorn itself, or listens by other means, has none of these guards."""
    assert [code for code in OTHERS if not LISTENS.search(code)] == []
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.split() if not name.startswith(("tests/", "benchmarks/", "docs/", "examples/"))]
    assert {name for name in files if LISTENS.search((ROOT / name).read_text())} == {*SERVERS, METRICS, *NO_SERVER}
