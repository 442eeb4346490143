"""Get and put small objects by one plain HTTP request on a connection that stays open.

A client for every case spends ten times as long on an object of 150 KB as the kernel does on its bytes: headers become
objects, bodies are copied, other threads are woken. Here a request is one write, its answer two reads: the header, and
a body of the length that it states, which the kernel writes into place. A failure is not explained here: the result is
None or False, and `blobs` repeats the request with the client of `s3_requests`, which translates every server's errors.

Requests are signed as AWS Signature Version 4 says (docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html).
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import re
import socket
import ssl
import struct
import time
import weakref
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.facts import BlobRef

_MAX_BYTES = 64 * 1024 * 1024  # larger objects are sent in parts by the other client
_MAX_HEADER_BYTES = 16 * 1024
_CONNECT_S = 5.0
_MAX_IDLE = 32  # open connections that wait for a request
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_UNSIGNED = "UNSIGNED-PAYLOAD"
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})[ \r]")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,19})[ \t]*\r\n", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r\n", re.IGNORECASE)
_RANGE = re.compile(rb"\r\ncontent-range:[ \t]*bytes (\d{1,19})-(\d{1,19})/", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)


class _Failed(Exception):
    """A request that has no answer of the expected form."""


class _Ended(_Failed):
    """The server closed the connection instead of an answer."""


class S3FastPath:
    """Gets and puts small objects of one bucket. Thread-safe."""

    def __init__(self, settings: S3Settings, tls: ssl.SSLContext | None, *, timeout_s: float) -> None:
        """Prepare; nothing is sent before the first call. ``tls`` is for an endpoint with https."""
        url = urlsplit(settings.endpoint)
        self._address = (url.hostname or "", url.port or (443 if tls is not None else 80))
        self._tls, self._timeout_s = tls, timeout_s
        self._is_used = url.path in {"", "/"}  # a server below a path is left to the other client
        # Readers verify a sha256; one more on the server matters only on an unencrypted network.
        self._signs_bodies = tls is None and url.hostname not in _LOOPBACK
        self._signer = _Signer(url.netloc, settings.region, settings.access_key, settings.secret())
        self._prefix = f"/{quote(settings.bucket, safe='')}/"
        self._idle: collections.deque[_Channel] = collections.deque()

    def put(self, key: str, data: bytes, sha256: str) -> bool:
        """Store an object; return False unless the server confirmed it."""
        if len(data) > _MAX_BYTES:
            return False
        header = f"Content-Length: {len(data)}\r\n"
        return self._request("PUT", key, header, data, sha256 if self._signs_bodies else _UNSIGNED) is not None

    def get(self, ref: BlobRef) -> bytes | None:
        """Fetch an object of the promised size, unverified; None when that failed or the size differs."""
        return self.get_range(ref, 0, ref.size_bytes)

    def get_range(self, ref: BlobRef, offset: int, size_bytes: int) -> bytes | None:
        """Fetch a part of an object, unverified; None when that failed.

        Some servers answer a range with status 200: the part is known by its ``Content-Range``.
        """
        if not 0 < size_bytes <= _MAX_BYTES:
            return None
        is_part = (offset, size_bytes) != (0, ref.size_bytes)
        header = f"Range: bytes={offset}-{offset + size_bytes - 1}\r\n" if is_part else ""
        answer = self._request("GET", ref.key, header, b"", _EMPTY_SHA256, size_bytes)
        if answer is None:
            return None
        if is_part:
            found = _RANGE.search(answer.header)
            if found is None or (int(found[1]), int(found[2])) != (offset, offset + size_bytes - 1):
                return None
        return answer.body

    def _request(
        self, method: str, key: str, header: str, body: bytes, sha256: str, expected: int = 0
    ) -> _Answer | None:
        """Return the answer to one request; a connection that was closed while it was idle is replaced once."""
        if not self._is_used:
            return None
        path = self._prefix + quote(key, safe="/~")
        head = f"{method} {path} HTTP/1.1\r\n{self._signer.headers(method, path, sha256)}{header}\r\n".encode()
        channel = self._take()
        answer = None if channel is None else self._exchange(channel, head, body, expected)
        if answer is None and (channel is None or channel.was_closed):
            try:
                channel = _Channel(self._address, self._tls, self._timeout_s)
            except OSError:
                return None
            answer = self._exchange(channel, head, body, expected)
        if answer is None or channel is None:
            return None
        if answer.closes or len(self._idle) >= _MAX_IDLE:
            channel.close()
        else:
            self._idle.append(channel)
        return answer if answer.is_success else None

    def _take(self) -> _Channel | None:
        try:
            return self._idle.pop()
        except IndexError:  # another thread may have taken the last one
            return None

    @staticmethod
    def _exchange(channel: _Channel, head: bytes, body: bytes, expected: int) -> _Answer | None:
        try:
            return channel.exchange(head, body, expected)
        except (OSError, _Failed):
            channel.close()
            return None
        except BaseException:
            channel.close()
            raise


@dataclass(frozen=True, slots=True)
class _Answer:
    is_success: bool
    header: bytes
    body: bytes
    closes: bool  # the connection takes no further request


class _Channel:
    """One open connection. A plain one has its timeout in the kernel: Python's own would be one more call for each read.

    Attributes:
        was_closed: The server had closed the connection before it read the last request.
    """

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext | None, timeout_s: float) -> None:
        """Connect; raises OSError."""
        self._timeout_s = timeout_s
        self.was_closed = False
        sock = socket.create_connection(address, min(_CONNECT_S, timeout_s))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._is_plain = tls is None
            self._socket: socket.socket = sock if tls is None else tls.wrap_socket(sock, server_hostname=address[0])
            self._socket.settimeout(None if self._is_plain else timeout_s)
            limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO) if self._is_plain else ():
                self._socket.setsockopt(socket.SOL_SOCKET, option, limit)
        except BaseException:
            sock.close()
            raise
        weakref.finalize(self, self._socket.close)  # of a client that is no longer used

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def exchange(self, head: bytes, body: bytes, expected: int) -> _Answer:
        """Send a request and return its answer; a body of another length than ``expected`` is not read.

        Raises OSError, or _Failed for an answer that is not plain HTTP of a known length.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            self._send(head, body)
            header, rest = self._header(deadline)
        except (BrokenPipeError, ConnectionResetError, _Ended):
            self.was_closed = True
            raise
        found, length = _STATUS.match(header), _LENGTH.search(header)
        if found is None or length is None or _CHUNKED.search(header):
            raise _Failed
        is_success, size = found[1] in {b"200", b"206"}, int(length[1])
        if not is_success or size != expected:
            return _Answer(is_success and expected == 0, header, b"", closes=size > 0)
        return _Answer(True, header, self._body(size, rest, deadline), _CLOSES.search(header) is not None)

    def _send(self, head: bytes, body: bytes) -> None:
        if self._is_plain:
            sent = self._socket.sendmsg((head, body))
            if sent < len(head):
                self._socket.sendall(head[sent:])
                sent = len(head)
            if left := memoryview(body)[sent - len(head) :]:
                self._socket.sendall(left)
        else:
            self._socket.sendall(head)
            self._socket.sendall(body)

    def _header(self, deadline: float) -> tuple[bytes, bytes]:
        """Return the header of an answer, and what was read after it: nothing on a plain connection, where it is looked at first."""
        data = b""
        while True:
            part = self._socket.recv(_MAX_HEADER_BYTES, socket.MSG_PEEK if self._is_plain else 0)
            end = (data + part).find(b"\r\n\r\n")
            taken = len(part) if end < 0 else end + 4 - len(data)
            if self._is_plain:
                part = self._socket.recv(taken)
            data += part
            if not part:
                raise _Failed if data else _Ended
            if len(data) > 2 * _MAX_HEADER_BYTES or time.monotonic() > deadline:
                raise _Failed
            if end >= 0:
                return data[: end + 4], data[end + 4 :]

    def _body(self, size: int, rest: bytes, deadline: float) -> bytes:
        """Return the body; the kernel waits for all of it where it can, so that this thread is woken once."""
        parts, left = ([rest] if rest else []), size - len(rest)
        while left > 0:
            part = self._socket.recv(left, socket.MSG_WAITALL if self._is_plain else 0)
            if not part or time.monotonic() > deadline:
                raise _Failed
            parts.append(part)
            left -= len(part)
        if left < 0:
            raise _Failed
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Signer:
    """Headers that name the server, and sign a request where there are credentials."""

    def __init__(self, host: str, region: str, access_key: str, secret: str) -> None:
        self._host, self._region, self._access_key, self._secret = host, region, access_key, secret
        self._key: tuple[str, bytes] = ("", b"")  # a day, and the key that signs on it

    def headers(self, method: str, path: str, sha256: str) -> str:
        """Return the headers of a request without a query."""
        if not self._secret:
            return f"Host: {self._host}\r\n"
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        day = now[:8]
        scope = f"{day}/{self._region}/s3/aws4_request"
        signed = "host;x-amz-content-sha256;x-amz-date"
        request = f"{method}\n{path}\n\nhost:{self._host}\nx-amz-content-sha256:{sha256}\nx-amz-date:{now}\n\n{signed}\n{sha256}"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = hmac.digest(self._key_of(day), text.encode(), "sha256").hex()
        return (
            f"Host: {self._host}\r\nx-amz-content-sha256: {sha256}\r\nx-amz-date: {now}\r\n"
            f"Authorization: AWS4-HMAC-SHA256 Credential={self._access_key}/{scope}, SignedHeaders={signed}, "
            f"Signature={signature}\r\n"
        )

    def _key_of(self, day: str) -> bytes:
        if self._key[0] != day:
            key = f"AWS4{self._secret}".encode()
            for part in (day, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._key = (day, key)
        return self._key[1]
