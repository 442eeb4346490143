"""The Runs API of `penstock console`, over HTTP: requests, what their errors say, and the events of a run.

A thread reads the stream of events, and connects again after the last event when it breaks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.transport import tls
from penstock.protocol.transport.tls import handshake_problem

_CONNECT_S = 5.0
_ANSWER_S = 120.0  # creating a run checks its settings and inputs
_QUIET_S = 60.0  # the stream of events sends something at least every 15 s


class ApiRefused(PenstockError):
    """The Runs API refused a request, or does not answer; ``status`` is 0 then."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class RunsApi:
    def __init__(self, url: str, token: str | None) -> None:
        """Prepare; raises ConfigError for a URL that is not one of http."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(
                f"Client({url!r}): expected 'local' or the URL of a console, such as 'http://127.0.0.1:8800'"
            )
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    @property
    def is_here(self) -> bool:
        """True if the API is reached over the loopback: its files are those of this machine."""
        return tls.is_loopback(self.host)

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Return the answer; raises ApiRefused with what the API says is wrong and what to do."""
        timeout = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S)
        try:
            with self._client(timeout) as client:
                response = client.request(method, self.url + path, json=body, params=query)
        except httpx.HTTPError as err:
            if problem := handshake_problem(err, self.url, tls.AUTHORITY):
                raise ApiRefused(problem) from None
            raise ApiRefused(
                f"no console answers at {self.url} ({type(err).__name__}); start one there: penstock console"
            ) from None
        if not response.is_success:
            raise _refusal(response, f"{method} {path}")
        try:
            return response.json() if response.content else None
        except (ValueError, RecursionError):
            raise ApiRefused(f"what answers at {self.url} is no console: its answer to {path} is not JSON") from None

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        """What every request verifies with: reading the system's authorities costs 20 ms of CPU."""
        return tls.trust_own_authority(httpx.create_ssl_context())

    def _client(self, timeout: httpx.Timeout) -> httpx.Client:
        return httpx.Client(headers=self._headers, timeout=timeout, trust_env=False, verify=self._tls)

    @contextmanager
    def stream(self, path: str, **query: Any) -> Iterator[httpx.Response]:
        """Give an answer whose lines arrive over time; raises ApiRefused, or httpx.HTTPError when the connection breaks."""
        timeout = httpx.Timeout(_QUIET_S, connect=_CONNECT_S)
        with self._client(timeout) as client, client.stream("GET", self.url + path, params=query) as response:
            if not response.is_success:
                response.read()
                raise _refusal(response, f"GET {path}")
            yield response


def _refusal(response: httpx.Response, what: str) -> ApiRefused:
    try:
        problem = response.json()
        parts = [str(problem["detail"])]
        parts += [f"{name} {problem[name]}" for name in ("expected", "got") if problem.get(name)]
        text = "; ".join([", ".join(parts), *([str(problem["fix"])] if problem.get("fix") else [])])
        text += "".join(f"\n{error}" for error in problem.get("errors", []) if error not in text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = f"{what}: HTTP {response.status_code}: {response.text[:300]}"
    return ApiRefused(text, response.status_code)


_RETRY_S = 1.0
_GIVE_UP_S = 300.0  # without a console; it may be restarted meanwhile
_MAY_PASS = frozenset({0, 429, 502, 503, 504})
_MAX_WAITING = 1000  # events; the API keeps the others
_STOP_S = 5.0


class RemoteEvents:
    """The messages of one stream, from the first event of the run; a context manager."""

    def __init__(self, api: RunsApi, run: str) -> None:
        self._api = api
        self._run = run
        self._arrived: queue.Queue[dict[str, Any] | PenstockError] = queue.Queue(_MAX_WAITING)
        self._closed = threading.Event()
        self._response: httpx.Response | None = None
        self._last = 0
        self._thread = threading.Thread(target=self._read, name="client-events", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._response is not None:  # wakes the thread, which waits for the next line
            sock = self._response.extensions["network_stream"].get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_STOP_S)

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message: an event with ``kind``, or a state with ``state``; None if none arrives in time.

        Raises ApiRefused when the API refuses, or no console has answered for five minutes.
        """
        try:
            message = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, PenstockError):
            raise message
        return message

    def _read(self) -> None:
        broken_at = 0.0
        while not self._closed.is_set():
            try:
                with self._api.stream(f"/v1/runs/{self._run}/events", after=self._last) as response:
                    broken_at = 0.0
                    self._take(response)
            except (httpx.HTTPError, OSError, ApiRefused) as err:
                broken_at = broken_at or time.monotonic()
                is_final = isinstance(err, ApiRefused) and err.status not in _MAY_PASS
                if is_final or time.monotonic() - broken_at > _GIVE_UP_S:
                    lost = ApiRefused(f"the events of run {self._run} are lost: no console answers at {self._api.url}")
                    self._put(err if isinstance(err, ApiRefused) else lost)
                    return
            self._closed.wait(_RETRY_S)

    def _take(self, response: httpx.Response) -> None:
        self._response = response
        try:
            for line in response.iter_lines():
                if self._closed.is_set():
                    return
                name, _, value = line.partition(":")
                if name != "data":
                    continue
                message = json.loads(value)
                self._last = int(message.get("sequence", self._last))
                self._put(message)
        finally:
            self._response = None

    def _put(self, message: dict[str, Any] | PenstockError) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._arrived.put(message, timeout=_RETRY_S)
                return
