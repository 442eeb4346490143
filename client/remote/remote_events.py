"""The events of a run from a Runs API: a thread reads the stream, and connects again after the last event when it breaks."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from typing import Any, Self

import httpx

from penstock.client.remote.runs_api import ApiRefused, RunsApi
from penstock.protocol.errors import PenstockError

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
            found = self._response.extensions["network_stream"].get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                found.shutdown(socket.SHUT_RDWR)
        self._thread.join(_STOP_S)

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message: an event with ``kind``, or a state with ``state``; None if none arrives in time.

        Raises ApiRefused when the API refuses, or no console has answered for five minutes.
        """
        try:
            found = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, PenstockError):
            raise found
        return found

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
                found = json.loads(value)
                self._last = int(found.get("sequence", self._last))
                self._put(found)
        finally:
            self._response = None

    def _put(self, found: dict[str, Any] | PenstockError) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._arrived.put(found, timeout=_RETRY_S)
                return
