"""The HTTP server of /metrics: its own thread, its own deadlines, one path."""

from __future__ import annotations

import contextlib
import gc
import socket
import time

import pytest

from penstock.protocol.errors import ConfigError
from penstock.protocol.metrics import server
from penstock.protocol.metrics.server import MetricsServer


def served(port: int = 0) -> MetricsServer:
    return MetricsServer(
        "127.0.0.1", port, lambda accept: (f"accept={accept}\n".encode(), "text/plain"), key="trainer_port"
    )


SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connected(running: MetricsServer) -> socket.socket:
    port = int(running.url.rsplit(":", 1)[1].split("/")[0])
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def received(client: socket.socket) -> bytes:
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionResetError):  # closed while it still sent
        while part := client.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def ask(running: MetricsServer, request: bytes = SCRAPE) -> bytes:
    with connected(running) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(request)
        return received(client)


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("GET /metrics HTTP/1.1", "Host: localhost:1\r\nAccept: x", b"200"),
        ("GET /metrics?a=b HTTP/1.1", "Host: 127.0.0.1", b"200"),
        ("HEAD /metrics HTTP/1.1", "host: [::1]:8", b"200"),
        ("GET /metrics HTTP/1.1", "Host: evil.example\r\nHost: localhost", b"403"),
        ("GET /metrics HTTP/1.1", "Host : localhost", b"403"),
        ("GET /metrics HTTP/1.1", "X: a\r\n Host: localhost", b"403"),
        ("GET / HTTP/1.1", "Host: localhost", b"404"),
        ("GET /metrics/../../etc/passwd HTTP/1.1", "Host: localhost", b"404"),
        ("POST /metrics HTTP/1.1", "Host: localhost", b"405"),
        ("GET /metrics HTTP/1.1", "Host: evil.example", b"403"),
        ("GET /metrics HTTP/1.1", "X: y", b"403"),
        ("\x00\xff", "\xff: \x00", b"403"),
    ],
)
def test_only_get_metrics_of_this_machine_is_answered(request_line: str, headers: str, status: bytes) -> None:
    """Another path, method, or the name of a web page as Host gets an error and no figures."""
    with served() as running:
        answer = ask(running, f"{request_line}\r\n{headers}\r\n\r\n".encode("latin-1"))
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert (b"accept=" in answer) == (status == b"200" and not request_line.startswith("HEAD"))


def test_clients_that_send_nothing_do_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow and excessive connections are closed; a scrape is answered meanwhile, and afterwards."""
    monkeypatch.setattr(server, "_REQUEST_S", 2.0)
    with served() as running:
        idle = [connected(running) for _ in range(8)]
        assert ask(running).startswith(b"HTTP/1.1 200")
        idle += [connected(running) for _ in range(40)]
        assert ask(running, b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\n\r\n") == b"", "too long a head is closed"
        for client in idle:
            assert client.recv(1) == b"", "closed after the deadline"
            client.close()
        assert ask(running).startswith(b"HTTP/1.1 200")


def test_a_taken_port_is_an_error_with_the_fix() -> None:
    """A second service on the same port exits with the setting to change; port 0 takes a free one each time."""
    with served() as first, served() as second:
        assert first.url != second.url
        port = int(first.url.rsplit(":", 1)[1].split("/")[0])
        with pytest.raises(ConfigError, match=r"set metrics\.trainer_port to a free port, or 0"):
            served(port)


def test_a_page_that_cannot_be_made_is_an_error_of_that_scrape_only() -> None:
    answers = iter([ZeroDivisionError(), None])

    def page(_accept: str) -> tuple[bytes, str]:
        if error := next(answers):
            raise error
        return b"x 1\n", "text/plain"

    with MetricsServer("127.0.0.1", 0, page, key="trainer_port") as running:
        assert ask(running).startswith(b"HTTP/1.1 500")
        assert ask(running).endswith(b"x 1\n")


def test_stopping_does_not_wait_for_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service ends at once although a client holds a connection open."""
    monkeypatch.setattr(server, "_REQUEST_S", 120.0)
    with served() as running:
        client = connected(running)
        started = time.monotonic()
    assert time.monotonic() - started < 100
    client.close()


def test_a_client_that_connects_while_the_server_stops_is_closed() -> None:
    """No socket of such a client stays open in the service: pytest reports one that does."""
    for _ in range(30):
        with served() as running:
            clients = [connected(running) for _ in range(3)]
        for client in clients:
            client.close()
        gc.collect()


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client did not take within the deadline is not kept for it: it gets a part of the page and a reset."""
    monkeypatch.setattr(server, "_REQUEST_S", 0.2)
    size = 30_000_000
    large = MetricsServer("127.0.0.1", 0, lambda _accept: (b"x" * size, "text/plain"), key="trainer_port")
    with large as running, connected(running) as client:
        client.sendall(SCRAPE)
        time.sleep(0.6)
        assert len(received(client)) < size


def test_more_clients_than_allowed_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seventeenth connection is answered in place of the oldest, long before the deadline of the others."""
    monkeypatch.setattr(server, "_REQUEST_S", 120.0)
    with served() as running:
        idle = [connected(running) for _ in range(16)]
        assert ask(running).startswith(b"HTTP/1.1 200")
        assert received(idle[0]) == b""
        for client in idle:
            client.close()
