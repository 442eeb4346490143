"""TLS of our own HTTP servers and clients, by the variables PENSTOCK_TLS_*."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from penstock.client.remote.runs_api import ApiRefused, RunsApi
from penstock.console.tools.rewards import RewardService, RewardServiceError
from penstock.deploy import certificates
from penstock.protocol.errors import ConfigError
from penstock.protocol.metrics.server import MetricsServer
from penstock.protocol.transport import tls
from penstock.serving import web_server
from penstock.serving.http_connections import ConnectionFailed, HttpConnections
from penstock.serving.target_policy import TargetPolicy
from penstock.serving.web_server import serving_app

ANY = "0.0.0.0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of penstock certs, and those of another authority."""
    made = tmp_path_factory.mktemp("http-tls")
    certificates.write_certificates(made / "tls", services=("api",))
    certificates.write_certificates(made / "other", services=("api",))
    return made


@pytest.fixture
def variables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's certificate, and its authority for clients."""
    monkeypatch.setenv(tls.CERTIFICATE, str(folder / "tls" / "api.pem"))
    monkeypatch.setenv(tls.KEY, str(folder / "tls" / "api.key"))
    monkeypatch.setenv(tls.AUTHORITY, str(folder / "tls" / "ca.pem"))


def api() -> FastAPI:
    app = FastAPI()
    app.add_api_route("/v1/rewards", lambda: {"rewards": []})
    return app


@contextlib.contextmanager
def in_thread(serve: Callable[[asyncio.Event], object]) -> Iterator[None]:
    """Run a server's coroutine in a thread with its own loop."""
    begun, parts = threading.Event(), []

    async def run() -> None:
        done = asyncio.Event()
        parts.extend((asyncio.get_running_loop(), done))
        begun.set()
        await serve(done)  # type: ignore[misc]

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        parts[0].call_soon_threadsafe(parts[1].set)
        thread.join(60.0)


@contextlib.contextmanager
def metrics(host: str) -> Iterator[str]:
    with MetricsServer(host, 0, lambda _: (b"page", "text/plain"), key="trainer_port") as server:
        assert server.url.startswith("https://") is (host == ANY)
        yield f"127.0.0.1:{server.url.rpartition(':')[2]}"


@contextlib.contextmanager
def reward_api(host: str) -> Iterator[str]:
    with tls.listen(host, 0, key="port") as bound, in_thread(lambda done: web_server.serve(api(), bound, done)):
        yield f"127.0.0.1:{bound.getsockname()[1]}/v1/rewards"


@contextlib.contextmanager
def environment_server(host: str) -> Iterator[str]:
    urls: list[str] = []
    ready = threading.Event()

    async def serve(done: asyncio.Event) -> None:
        async with serving_app(api(), host, 0, key="port") as url:
            urls.append(url)
            ready.set()
            await done.wait()

    with in_thread(serve):
        ready.wait()
        assert urls[0].startswith("https://") is (host == ANY)
        yield f"127.0.0.1:{urls[0].rpartition(':')[2]}/v1/rewards"


@pytest.mark.parametrize("server", [metrics, reward_api, environment_server])
def test_a_server_that_others_reach_speaks_tls_only(variables: None, folder: Path, server) -> None:
    """A client of its authority gets the answer; one without, with another, or without TLS gets none. The loopback is plain."""
    trusting = tls.aiohttp_trust()
    with server(ANY) as where:
        assert httpx.get(f"https://{where}", verify=trusting, timeout=60).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://{where}", timeout=60)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{where}", timeout=60)
    with server("127.0.0.1") as where:
        assert httpx.get(f"http://{where}", timeout=60).status_code == 200


@pytest.mark.parametrize("name", ["localhost", "127.1"])
def test_a_name_of_the_loopback_is_plain(variables: None, name: str) -> None:
    """The address that is listened on decides, for the server and for the URL that others are given alike."""
    assert tls.server_options(name) == {}
    with MetricsServer(name, 0, lambda _: (b"page", "text/plain"), key="trainer_port") as server:
        assert server.url.startswith("http://")
        assert httpx.get(server.url, timeout=60).status_code == 200


def test_our_clients_verify(variables: None, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Those of the reward service, of the console, of environments and engines, and of endpoints; the error names the variable."""

    async def get(url: str, policy: TargetPolicy | None) -> int:
        connections = HttpConnections(keep_s=1.0, policy=policy)
        try:
            return (await connections.send("GET", url)).status
        finally:
            await connections.close()

    policies = (None, TargetPolicy(["127.0.0.0/8"], []))  # of engines; of endpoints and environments

    with reward_api(ANY) as where:
        url = f"https://{where.partition('/')[0]}"
        for client in (RewardService(url), RunsApi(url, "")):
            contexts = []
            for _ in range(2):
                assert client.call("GET", "/v1/rewards") == {"rewards": []}
                contexts.append(client._tls)
            assert contexts[0] is contexts[1], "the authorities are read once, not for every request"
        for policy in policies:
            assert asyncio.run(get(f"{url}/v1/rewards", policy)) == 200
        monkeypatch.setenv(tls.AUTHORITY, str(folder / "other" / "ca.pem"))
        text = f"certificate is refused.*{tls.AUTHORITY}"
        with pytest.raises(RewardServiceError, match=text):
            RewardService(url).call("GET", "/v1/rewards")
        with pytest.raises(ApiRefused, match=text):
            RunsApi(url, "").call("GET", "/v1/rewards")
        for policy in policies:
            with pytest.raises(ConnectionFailed, match=text):
                asyncio.run(get(f"{url}/v1/rewards", policy))


def test_files_that_cannot_be_used_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate without key, the key of another one, and a file without certificates, each named with its variable."""
    monkeypatch.setenv(tls.CERTIFICATE, str(folder / "tls" / "api.pem"))
    monkeypatch.delenv(tls.KEY, raising=False)
    with pytest.raises(ConfigError, match=f"{tls.KEY} is not"):
        tls.server_files(ANY)
    for key in (folder / "other" / "api.key", tmp_path / "missing"):
        monkeypatch.setenv(tls.KEY, str(key))
        with pytest.raises(ConfigError, match="no certificate with its key"):
            tls.server_options(ANY)
    (tmp_path / "empty.pem").touch()
    monkeypatch.setenv(tls.AUTHORITY, str(tmp_path / "empty.pem"))
    with pytest.raises(ConfigError, match=f"{tls.AUTHORITY} = .*penstock certs"):
        RewardService("https://127.0.0.1:1").call("GET", "/")


def test_a_client_that_makes_no_handshake_delays_no_other(variables: None) -> None:
    """A scrape is answered while other clients hold connections open in silence."""
    with metrics(ANY) as where:
        host, port = where.partition("/")[0].split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(8)]
        assert httpx.get(f"https://{where}", verify=tls.aiohttp_trust(), timeout=60).status_code == 200
        for one in silent:
            one.close()
