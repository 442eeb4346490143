"""The client library's connection with shorter ways for what every message costs; the only file that overrides its internals.

The library gives each message to a queue and a task of its subscription, each write to another queue and task, and a
request three wrappers around its answer. Here a message is handed to its receiver as soon as it is parsed, what is
published in one turn of the event loop is written at its end, and an answer sets the future that the request waits for.
Everything else (connecting, TLS, reconnecting, JetStream's requests) is the library's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

Receiver = Callable[[Msg], None]


class LeanClient(Client):
    """One connection to NATS, on one event loop."""

    def __init__(self) -> None:
        """Prepare a connection; `connect` makes it."""
        super().__init__()
        self._receivers: dict[int, Receiver] = {}  # by the number of the subscription
        self._is_write_due = False
        self._num_requests = 0

    async def receive(self, subject: str, receiver: Receiver) -> Subscription:
        """Subscribe; ``receiver`` is called with each message, in order, on the event loop. It neither waits nor raises."""
        number = self._sid + 1  # what `subscribe` takes before it waits for anything
        self._receivers[number] = receiver
        try:
            return await self.subscribe(subject)
        except BaseException:
            self._receivers.pop(number, None)
            raise

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._receivers.pop(sid, None)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        receiver = self._receivers.get(sid)
        if receiver is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            found = await self._process_headers(headers) if headers else None
            receiver(Msg(self, subject.decode(), reply.decode(), data, found, _sid=sid))

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if force_flush or not self.is_connected:
            return await super()._flush_pending(force_flush)
        if not self._is_write_due:
            self._is_write_due = True
            asyncio.get_running_loop().call_soon(self._write_pending)
        return None

    def _write_pending(self) -> None:
        self._is_write_due = False
        if self.is_connected and self._transport is not None:
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            if pending:
                self._transport.writelines(pending)  # the reader finds out that a connection is lost

    async def _init_request_sub(self) -> None:
        self._resp_map = {}
        prefix = self.new_inbox() + "."  # random: no other login can guess it
        self._resp_sub_prefix = bytearray(prefix.encode())
        await self.receive(f"{prefix}*", self._on_answer)

    def _on_answer(self, msg: Msg) -> None:
        answer = self._resp_map.get(msg.subject.rpartition(".")[2])
        if answer is not None and not answer.done():
            answer.set_result(msg)

    async def _request_new_style(
        self,
        subject: str,
        payload: bytes,
        timeout: float = 1,  # noqa: ASYNC109  the library's signature
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        if self.is_draining_pubs:
            raise nats.errors.ConnectionDrainingError
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        assert self._resp_sub_prefix is not None
        loop = asyncio.get_running_loop()
        self._num_requests += 1
        token = str(self._num_requests)
        answer: asyncio.Future[Msg] = loop.create_future()
        self._resp_map[token] = answer
        timer = loop.call_later(timeout, _time_out, answer)
        try:
            await self.publish(subject, payload, reply=self._resp_sub_prefix.decode() + token, headers=headers)
            return await answer
        finally:
            timer.cancel()
            self._resp_map.pop(token, None)


def _time_out(answer: asyncio.Future[Msg]) -> None:
    if not answer.done():
        answer.set_exception(nats.errors.TimeoutError())
