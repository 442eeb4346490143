"""The calls of an episode: a repeated request joins the running call, or gets the finished answer again.

A request repeats another one if it has the same Idempotency-Key, or if a client library counts it as a retry and its body
is equal. An equal body without such a mark is a new turn. A call that no client waits for any more is cancelled after a
short time, in which a retry may come.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from penstock.agents.proxy.messages import RequestRefused, RetryMark, invalid
from penstock.agents.proxy.tree import SampledTurn


@dataclass(eq=False, slots=True)
class _Call:
    mark: RetryMark
    task: asyncio.Task[SampledTurn]
    began: float
    num_waiting: int = 0


class Calls:
    def __init__(self, *, grace_s: float, kept: int, kept_s: float) -> None:
        """``grace_s``: how long a call without a client goes on. ``kept``: finished calls that a retry may ask for again."""
        self._grace_s = grace_s
        self._kept = kept
        self._kept_s = kept_s
        self._calls: OrderedDict[int, _Call] = OrderedDict()  # oldest first
        self._next = 0

    async def run(
        self, mark: RetryMark, sample: Callable[[], Coroutine[Any, Any, SampledTurn]]
    ) -> tuple[SampledTurn, bool]:
        """Return the answer, and whether it is that of a call made before.

        Raises RequestRefused: as the call does, or because a key is used again with another body.
        """
        self._forget_old()
        call = self._repeated(mark)
        joined = call is not None
        if call is None:
            call = _Call(mark, asyncio.create_task(sample()), time.monotonic())
            call.task.add_done_callback(_take_error)
            self._calls[self._next] = call
            self._next += 1
        call.num_waiting += 1
        try:
            return await asyncio.shield(call.task), joined
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if call.task.cancelled() and (current is None or not current.cancelling()):
                raise RequestRefused(404, "episode_ended", "the episode ended while this was sampled") from None
            raise
        finally:
            call.num_waiting -= 1
            if not call.task.done() and not call.num_waiting:
                asyncio.get_running_loop().call_later(self._grace_s, _cancel_without_client, call)

    def cancel(self) -> None:
        for call in self._calls.values():
            call.task.cancel()
        self._calls.clear()

    def _repeated(self, mark: RetryMark) -> _Call | None:
        for call in reversed(self._calls.values()):
            same = call.mark.digest == mark.digest
            if mark.key is not None and call.mark.key == mark.key:
                if not same:
                    raise invalid(
                        f"Idempotency-Key {mark.key[:80]!r} was used with another body: use a new key for a new request",
                        code="idempotency_key_reused",
                    )
                return call
            if mark.is_retry and same:
                return call
        return None

    def _forget_old(self) -> None:
        now = time.monotonic()
        finished = [number for number, call in self._calls.items() if call.task.done()]
        for place, number in enumerate(finished):
            call = self._calls[number]
            failed = call.task.cancelled() or call.task.exception() is not None
            if failed or len(finished) - place > self._kept or now - call.began > self._kept_s:
                del self._calls[number]


def _cancel_without_client(call: _Call) -> None:
    if not call.num_waiting:
        call.task.cancel()


def _take_error(task: asyncio.Task[SampledTurn]) -> None:
    """Take the error of a call that nothing waits for any more, which asyncio would report otherwise."""
    if not task.cancelled():
        task.exception()
