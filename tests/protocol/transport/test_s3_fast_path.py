"""The fast path to S3 on a server that answers in every way: what is not plainly right is left to the other client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.facts import BlobRef
from penstock.protocol.transport.s3_fast_path import S3FastPath

_OK = b"HTTP/1.1 200 OK\r\n"
_SHA256 = "0" * 64


@contextmanager
def _server(*answers: bytes, closes: bool = False) -> Iterator[tuple[S3FastPath, list[bytes]]]:
    """Give each request the next of the answers, whatever it asks; ``closes``: each connection takes one request only."""
    requests: list[bytes] = []
    left = iter(answers)

    def serve(listening: socket.socket) -> None:
        for _ in answers:
            try:
                connection, _address = listening.accept()
            except OSError:
                return
            with connection:
                while request := connection.recv(65536):
                    requests.append(request)
                    connection.sendall(next(left))
                    if closes:
                        break

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        port = listening.getsockname()[1]
        settings = S3Settings(endpoint=f"http://127.0.0.1:{port}", access_key="a", secret_key="s", bucket="bucket")
        yield S3FastPath(settings, None, timeout_s=5.0), requests


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (_OK + b"Content-Length: 4\r\n\r\ndata", b"data"),
        (_OK + b"CONTENT-LENGTH:4\r\nConnection: close\r\n\r\ndata", b"data"),
        (_OK + b"Content-Length: 5\r\n\r\ndata5", None),
        (_OK + b"Content-Length: 4\r\n\r\ndat", None),
        (_OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\ndata\r\n0\r\n\r\n", None),
        (_OK + b"\r\ndata", None),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\ndata", None),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ndata", None),
        (b"nonsense", None),
        (b"", None),
    ],
)
def test_only_a_plain_answer_of_the_promised_size_is_used(answer: bytes, expected: bytes | None) -> None:
    """An answer of another status, size or form is None, and does not stay for the next request."""
    with _server(answer, answer, closes=True) as (store, _):
        assert store.get(BlobRef(key="a/b", size_bytes=4, sha256=_SHA256)) == expected


@pytest.mark.parametrize(
    ("answered", "expected"), [(b"10-13", b"data"), (b"11-14", None), (b"0-99", None), (b"", None)]
)
def test_a_part_is_used_if_the_server_says_it_is_this_part(answered: bytes, expected: bytes | None) -> None:
    """A server that ignores the range, or sends another, is found out, whatever its status."""
    header = b"Content-Range: bytes " + answered + b"/100\r\n" if answered else b""
    with _server(_OK + header + b"Content-Length: 4\r\n\r\ndata") as (store, requests):
        assert store.get_range(BlobRef(key="a/b", size_bytes=100, sha256=_SHA256), 10, 4) == expected
    assert b"\r\nRange: bytes=10-13\r\n" in requests[0]


def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    """The second request finds its connection closed, and is sent again on a new one."""
    answer = _OK + b"Content-Length: 0\r\n\r\n"
    with _server(answer, answer, closes=True) as (store, requests):
        assert store.put("a/b c", b"body", _SHA256)
        assert store.put("a/b c", b"body", _SHA256)
    assert len(requests) == 2
    assert requests[0].startswith(b"PUT /bucket/a/b%20c HTTP/1.1\r\n")
    assert requests[0].endswith(b"\r\n\r\nbody")


def test_a_server_that_does_not_answer_is_given_up() -> None:
    """A request ends with its deadline, and is not repeated on a second connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        settings = S3Settings(endpoint=f"http://127.0.0.1:{listening.getsockname()[1]}", bucket="bucket")
        assert not S3FastPath(settings, None, timeout_s=0.3).put("a/b", b"body", _SHA256)
