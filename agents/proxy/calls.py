"""The calls of an episode: a repeated request joins the running call, or gets the finished answer again.

A request repeats another one if it has the same Idempotency-Key, or if a client library counts it as a retry and its body
is equal. An equal body without such a mark is a new turn. A call that no client waits for any more is cancelled after a
short time, in which a retry may come.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.agents.proxy.messages import RequestRefused, RetryMark, invalid
from penstock.agents.proxy.tree import SampledTurn

_PROMPT_TOKENS = 32  # whose sampling takes as long as a usual prompt
_TIMES_THE_PACE = 4.0  # a request that takes longer has waited for the engine
_LEAST_S = 1.0  # that a request may always take
_MEASURED = 64  # answers


class Pace:
    """Seconds of an answer's tokens: the median of a worker's last answers."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_MEASURED)

    def measure(self, num_tokens: int, seconds: float) -> None:
        self._latest.append(seconds / (num_tokens + _PROMPT_TOKENS))

    def usual_end(self, num_tokens: int, started: float, ended: float) -> float:
        """Return when an answer would have ended that the engine did not delay; ``ended`` if it did not, or none is known."""
        if not self._latest:
            return ended
        usual_s = max(_LEAST_S, statistics.median(self._latest) * (num_tokens + _PROMPT_TOKENS))
        return started + usual_s if ended - started > _TIMES_THE_PACE * usual_s else ended


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of an episode: in which the policy answered, in which the engine stalled, and since the last request."""

    policy_s: float = 0.0
    engine_s: float = 0.0
    idle_s: float = 0.0


class Clock:
    """The requests of an episode: what of their time is the policy's, and what the engine's."""

    def __init__(self, pace: Pace, now: Callable[[], float] = time.monotonic) -> None:
        self._pace, self._now = pace, now
        self._running: dict[int, tuple[float, int]] = {}  # since when, and the most tokens
        self._ended: list[tuple[float, float, float]] = []  # began, usual end, end
        self._last_end = now()

    def begin(self, number: int, max_tokens: int) -> None:
        self._running[number] = (self._now(), max_tokens)

    def end(self, number: int, num_tokens: int | None, *, has_failed: bool = False) -> None:
        """Note that a request was answered with so many tokens; None: it was not, and failed, or was cancelled."""
        (began, usual, end), self._last_end = self._span(number, num_tokens), self._now()
        del self._running[number]
        self._ended.append((began, began if has_failed else usual, end))
        if num_tokens is not None:
            self._pace.measure(num_tokens, end - began)

    def is_stalled(self, number: int) -> bool:
        """Return True if a request has waited longer than the longest answer usually takes."""
        _, usual, now = self._span(number, None)
        return usual < now

    def spent(self) -> Spent:
        spans = [*self._ended, *(self._span(number, None) for number in self._running)]
        policy_s = _covered((began, usual) for began, usual, _ in spans)
        all_s = _covered((began, end) for began, _, end in spans)
        return Spent(policy_s, all_s - policy_s, 0.0 if self._running else self._now() - self._last_end)

    def _span(self, number: int, num_tokens: int | None) -> tuple[float, float, float]:
        began, max_tokens = self._running[number]
        now = self._now()
        return began, self._pace.usual_end(max_tokens if num_tokens is None else num_tokens, began, now), now


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    covered_s, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered_s += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered_s


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
