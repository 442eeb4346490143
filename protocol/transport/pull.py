"""Pull requests to one consumer over one subscription; the client library's own ``fetch`` waits too long.

A pull returns as soon as there is a message, never leaves an unfinished request that would take
messages from another reader, and sends its request again after a reconnect.

While messages arrive one by one, the next request is sent a few milliseconds later: those that arrive meanwhile come
with one request and one wake-up of the reader, which cost more than a message does. The first one after a pause never waits.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.protocol.transport.nats_connection import Connection

_LINGER_S = 5.0  # the longest single pull request
_LATE_S = 0.25  # how late the server's status of an expired request may arrive
_GATHER_S = 0.01  # between two requests of which the first got messages, and fewer than it asked for
_REDELIVER_S = 1.0  # deadline of a redelivery; the acknowledgement is retried anyway
_NO_MESSAGES = ("404", "408")


class PullRefused(Exception):
    """The server ended a pull request for another reason than that there are no messages."""


class Pull:
    """The pull requests of one reader; its calls take turns."""

    def __init__(
        self, connection: Connection, stream: str, consumer: str, renews: Callable[[Msg], bool] = lambda _: False
    ) -> None:
        """Prepare for a consumer; `open` subscribes. ``renews`` returns True for a redelivery of a held message, whose handle it replaces."""
        self._connection = connection
        self._renews = renews
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._reply = connection.client.new_inbox()
        self._number = 0
        self._arrived: collections.deque[Msg] = collections.deque()
        self._ended: Msg | None = None  # the status message that ended the current request
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._next_at = 0.0  # of time.monotonic(): when the next request is sent
        self._sub: Subscription | None = None

    async def open(self) -> None:
        """Subscribe to the answers."""
        self._sub = await self._connection.client.subscribe(f"{self._reply}.*", cb=self._on_message)
        self._connection.watch(self._changed)

    async def close(self) -> None:
        """Unsubscribe; messages that arrived and were not taken are dropped here and redelivered."""
        self._connection.unwatch(self._changed)
        if self._sub is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._sub.unsubscribe()

    async def take(self, max_messages: int, wait_s: float) -> list[Msg]:
        """Return the available messages, or wait for the first; raises PullRefused for a status other than "no messages".

        Returns when the server has ended the request, which is ``wait_s`` and the way there and back: a message
        that the server sent in its last moment would otherwise wait here until the next call.
        """
        async with self._turn:
            deadline = time.monotonic() + wait_s
            if not self._arrived and (pause_s := min(self._next_at, deadline) - time.monotonic()) > 0.0:
                await asyncio.sleep(pause_s)
            if not self._arrived and max_messages > 1:
                # with no_wait and expires the server waits for the first message, sends those available, and ends the request
                await self._ask({"batch": max_messages, "no_wait": True}, max_messages, deadline)
            while not self._arrived and deadline > time.monotonic():
                await self._ask({"batch": 1}, 1, deadline)
            taken = [self._arrived.popleft() for _ in range(min(max_messages, len(self._arrived)))]
            if 0 < len(taken) < max_messages:
                self._next_at = time.monotonic() + _GATHER_S
            return taken

    @property
    def waiting(self) -> list[Msg]:
        """Messages that have arrived and were not taken yet."""
        return list(self._arrived)

    async def redeliver(self, num_messages: int) -> None:
        """Pull up to so many messages that the server no longer counts as delivered; those not held wait for `take`.

        For a restarted server, whose consumer may have lost its delivery state.
        """
        client = self._connection.client
        answers = await client.subscribe(client.new_inbox())
        try:
            request = json.dumps({"batch": num_messages, "no_wait": True}).encode()
            await client.publish(self._subject, request, reply=answers.subject)
            with contextlib.suppress(nats.errors.TimeoutError):  # it has no more
                for _ in range(num_messages):
                    msg = await answers.next_msg(timeout=_REDELIVER_S)
                    if msg.subject == answers.subject:  # a status message: there are no more
                        break
                    if not self._renews(msg):
                        self._arrived.append(msg)
                        self._changed.set()
        finally:
            await answers.unsubscribe()

    async def _ask(self, body: dict[str, Any], enough: int, deadline: float) -> None:
        """Send a request that expires: one that the server lost (its stream was deleted) is sent again soon."""
        linger = min(max(0.0, deadline - time.monotonic()), _LINGER_S)
        until = time.monotonic() + linger + _LATE_S
        expires = {"expires": int(linger * 1e9)} if linger > 0 else {}
        await self._request(body | expires, enough, until)

    async def _on_message(self, msg: Msg) -> None:
        if not (msg.headers and "Status" in msg.headers and not msg.data and msg.subject.startswith(self._reply)):
            self._arrived.append(msg)
        elif msg.subject == f"{self._reply}.{self._number}" and msg.headers["Status"] != "100":
            self._ended = msg
        self._changed.set()

    async def _request(self, body: dict[str, Any], enough: int, deadline: float) -> None:
        """Send one request and wait for its messages, its end, a lost connection, or the deadline."""
        if not self._connection.is_up:
            await self._wait_for_change(deadline)
            return
        self._number += 1
        self._ended = None
        reply = f"{self._reply}.{self._number}"
        await self._connection.client.publish(self._subject, json.dumps(body).encode(), reply=reply)
        transitions = self._connection.num_transitions
        while len(self._arrived) < enough and self._ended is None:
            if not await self._wait_for_change(deadline) or transitions != self._connection.num_transitions:
                return
        if self._ended is not None and self._ended.headers and self._ended.headers["Status"] not in _NO_MESSAGES:
            raise PullRefused(f"{self._ended.headers['Status']} {self._ended.headers.get('Description', '')}")

    async def _wait_for_change(self, deadline: float) -> bool:
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
