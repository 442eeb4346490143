"""Everything between the groups that want one endpoint and its calls: the bulkhead of that endpoint.

Groups wait in line, whatever pack they came from. As soon as a call may be made (a free place, a token of
the rate, a breaker that lets it through) the first ones go together; the more wait, the more go together,
up to ``batch_size``. An endpoint that is too slow fills its own line and no more: what does not fit is
turned away with EndpointBusy, and waits at the broker.

The size of a batch adapts: it is halved when a call with several groups takes too long or is called too
large, and grows by one with every full call that succeeds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from pydantic import BaseModel

from penstock.protocol.group_pack import GroupTexts
from penstock.reward_service.endpoints.breaker import Breaker, BreakerState
from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.endpoint_call import Asker, CallCounts
from penstock.reward_service.endpoints.endpoint_http import EndpointHttp
from penstock.reward_service.endpoints.secret_store import NOTHING, EndpointSecrets
from penstock.reward_service.endpoints.token_bucket import TokenBucket
from penstock.reward_service.endpoints.wire import GroupToScore
from penstock.reward_service.errors import (
    BadGroundTruth,
    BreakerOpen,
    EndpointBusy,
    EndpointFailed,
    NotAsked,
    RewardCrashed,
    RewardError,
)
from penstock.reward_service.metrics import Timings
from penstock.reward_service.scores import GroupScores, Outcome

log = structlog.get_logger("reward_service.line")

_BUSY_S = 0.5  # when a group that was turned away comes again, at the earliest
_LINE_FACTOR = 2  # so many times what can be under way may wait


class LiveFigures(BaseModel):
    """How an endpoint has been doing, as this replica sees it since its start; times in seconds."""

    state: str = "ok"
    calls: int = 0
    errors: int = 0
    error_rate: float = 0.0
    under_way: int = 0
    waiting: int = 0
    turned_away: int = 0
    retries: int = 0
    hedges: int = 0
    batch_limit: int = 0
    breaker: BreakerState = BreakerState.CLOSED
    breaker_opened: int = 0
    retry_in_s: float = 0.0
    latency_p50_s: float = 0.0
    latency_p99_s: float = 0.0
    last_error: str = ""
    finishing: dict[str, int] = {}


@dataclass(slots=True, eq=False)
class Waiting:
    """One place in line."""

    group: GroupToScore
    attempt: int
    outcome: asyncio.Future[Outcome]


class Line:
    """The line before one version of one endpoint; a `Scorer`."""

    slow = True

    def __init__(self, endpoint: Endpoint, secrets: EndpointSecrets | None, http: EndpointHttp) -> None:
        """Start empty, with nothing known about the endpoint."""
        self.endpoint = endpoint
        self.counts = CallCounts()
        self.breaker = Breaker()
        self.timings = Timings()
        self._asker = Asker(endpoint, secrets or NOTHING, http, self.counts)
        self._waiting: deque[Waiting] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._under_way = 0  # groups in calls
        self._bucket = TokenBucket(endpoint.rate_per_s, time.monotonic())
        self._batch_limit = endpoint.batch_size
        self._most_waiting = _LINE_FACTOR * endpoint.concurrency * endpoint.batch_size
        self._timer: asyncio.TimerHandle | None = None
        self._turned_away = 0
        self._last_error = ""
        self._unhealthy = False

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        """Wait in line with the groups; on a redelivery each goes alone, so that one bad group fails only itself."""
        return await self.stand([GroupToScore.of(group) for group in groups], attempt=attempt)

    async def stand(self, groups: Sequence[GroupToScore], *, attempt: int) -> list[Outcome]:
        """Wait in line with groups as they stand on the wire."""
        entered = [self._enter(group, attempt) for group in groups]
        self._pump()
        try:
            return [_joined([await waiting.outcome for waiting in pieces]) for pieces in entered]
        finally:
            for pieces in entered:  # cancelled: what is still in line leaves it
                for waiting in pieces:
                    waiting.outcome.cancel()

    async def ask_now(self, groups: Sequence[GroupToScore]) -> list[Outcome]:
        """Call the endpoint past the line, as a test by hand does; breaker and rate are not asked."""
        outcomes: list[Outcome] = []
        size = self.endpoint.batch_size if self.endpoint.speaker.carries == "groups" else 1
        pieces = [_pieces(self.endpoint, group) for group in groups]
        flat = [piece for of_group in pieces for piece in of_group]
        for start in range(0, len(flat), size):
            outcomes += await self._timed(flat[start : start + size], 1)
        found = iter(outcomes)
        return [_joined([next(found) for _ in of_group]) for of_group in pieces]

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._waiting and not self._calls

    @property
    def num_under_way(self) -> int:
        """Groups (or single completions, where the dialect wants them so) in calls."""
        return self._under_way

    def figures(self) -> LiveFigures:
        """Return how the endpoint has been doing."""
        now = time.monotonic()
        return LiveFigures(
            calls=self.timings.num_calls,
            errors=self.timings.num_failed,
            error_rate=round(self.timings.num_failed / max(self.timings.num_calls, 1), 4),
            under_way=self._under_way,
            waiting=len(self._waiting),
            turned_away=self._turned_away,
            retries=self.counts.retries,
            hedges=self.counts.hedges,
            batch_limit=self._batch_limit,
            breaker=self.breaker.state(now),
            breaker_opened=self.breaker.num_opened,
            retry_in_s=round(self.breaker.retry_in_s(now), 3),
            latency_p50_s=round(self.timings.quantile(0.5), 6),
            latency_p99_s=round(self.timings.quantile(0.99), 6),
            last_error=self._last_error,
        )

    def hand_over(self, to: Line) -> None:
        """Another version takes over: what waits goes to its line, what is under way ends here."""
        to._waiting.extend(self._waiting)
        self._waiting.clear()
        to._pump()

    def turn_out(self, err: NotAsked) -> None:
        """Send everybody in line away; what is under way goes on."""
        while self._waiting:
            self._answer(self._waiting.popleft(), err)

    def healthy(self) -> None:
        """A health check passed: calls may go through again, if health checks were what stopped them."""
        if self._unhealthy:
            self._unhealthy = False
            self.breaker.close()
            log.info("endpoint is healthy again", endpoint=self.endpoint.scorer)
            self._pump()

    def unhealthy(self, problem: str) -> None:
        """Health checks failed: leave the endpoint alone for a while."""
        self._unhealthy = True
        self._last_error = f"health check: {problem}"
        self.breaker.trip(time.monotonic())
        self.turn_out(self._breaker_open(time.monotonic()))

    async def close(self) -> None:
        """Cancel what is under way."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    # ── how ───────────────────────────────────────────────────────────────────────────────────

    def _enter(self, group: GroupToScore, attempt: int) -> list[Waiting]:
        new_future = asyncio.get_running_loop().create_future
        refusal = self._refusal(group)
        if refusal is not None:
            refused = Waiting(group, attempt, new_future())
            refused.outcome.set_result(refusal)
            return [refused]
        entered = [Waiting(piece, attempt, new_future()) for piece in _pieces(self.endpoint, group)]
        self._waiting.extend(entered)
        return entered

    def _refusal(self, group: GroupToScore) -> RewardError | None:
        if self.endpoint.needs_ground_truth and group.ground_truth is None:
            return BadGroundTruth(
                f"endpoint {self.endpoint.name} needs a ground truth, the row of group {group.group_id} has none; "
                "map the right column with data.map"
            )
        if len(self._waiting) >= self._most_waiting:
            self._turned_away += 1
            return EndpointBusy(
                f"endpoint {self.endpoint.name} has {self._under_way} groups under way and {len(self._waiting)} in line, "
                "which is as many as it may; the group comes again (raise its concurrency, or start more of it)",
                retry_in_s=_BUSY_S,
            )
        return None

    def _pump(self) -> None:
        """Make as many calls as may be made now."""
        while self._waiting and len(self._calls) < self.endpoint.concurrency:
            now = time.monotonic()
            state = self.breaker.state(now)
            if state is not BreakerState.CLOSED and not self.breaker.admit(now):
                self.turn_out(self._breaker_open(now))
                return
            batch = self._next_batch(1 if state is BreakerState.HALF_OPEN else self._batch_limit)
            wait_s = self._bucket.take(now) if batch else 0.0
            if wait_s or not batch:
                self.breaker.withdraw()
                self._waiting.extendleft(reversed(batch))
                self._pump_in(wait_s)
                return
            self._under_way += len(batch)
            self._calls.add(asyncio.create_task(self._call(batch)))

    def _pump_in(self, wait_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._pump)

    def _next_batch(self, most: int) -> list[Waiting]:
        """Take the first in line, and with it those behind it that may go together."""
        batch: list[Waiting] = []
        names: set[str] = set()
        while self._waiting and len(batch) < most:
            first = self._waiting[0]
            if first.outcome.cancelled():
                self._waiting.popleft()
                continue
            alone = first.attempt > 1 or self.endpoint.speaker.carries != "groups"
            if batch and (alone or first.group.group_id in names):  # generated twice, as after a worker's death
                break
            names.add(first.group.group_id)
            batch.append(self._waiting.popleft())
            if alone:
                break
        return batch

    async def _call(self, batch: list[Waiting]) -> None:
        try:
            outcomes = await self._timed([waiting.group for waiting in batch], batch[0].attempt)
            for waiting, outcome in zip(batch, outcomes, strict=True):
                self._answer(waiting, outcome)
            blamed = outcomes[0] if all(isinstance(outcome, RewardError) for outcome in outcomes) else None
            opened = self.breaker.record(
                time.monotonic(), failed=isinstance(blamed, RewardError) and blamed.blames_endpoint
            )
            self._adapt(len(batch), blamed)
            if opened:
                log.warning("endpoint is left alone", endpoint=self.endpoint.scorer, reason=self._last_error)
        finally:
            self._under_way -= len(batch)
            self._calls.discard(asyncio.current_task())  # type: ignore[arg-type]
        self._pump()

    async def _timed(self, groups: Sequence[GroupToScore], attempt: int) -> list[Outcome]:
        started = time.monotonic()
        outcomes: list[Outcome]
        try:
            outcomes = await self._asker.ask(groups, attempt=attempt)
        except RewardError as err:
            outcomes = [err] * len(groups)
        except Exception as err:
            log.exception("a call could not be made", endpoint=self.endpoint.scorer)
            crash = RewardCrashed(f"calling endpoint {self.endpoint.name} raised {type(err).__name__}: {err}")
            outcomes = [crash] * len(groups)
        error = next((outcome for outcome in outcomes if isinstance(outcome, RewardError)), None)
        self.timings.record(time.monotonic() - started, failed=error is not None)
        if error is not None:
            self._last_error = f"{error.reason}: {error}"
        return outcomes

    def _adapt(self, size: int, error: Outcome | None) -> None:
        if size > 1 and isinstance(error, EndpointFailed):
            self._batch_limit = max(1, min(size, self._batch_limit) // 2)
        elif error is None and size >= self._batch_limit:
            self._batch_limit = min(self._batch_limit + 1, self.endpoint.batch_size)

    def _breaker_open(self, now: float) -> BreakerOpen:
        return BreakerOpen(
            f"endpoint {self.endpoint.name} ({self.endpoint.url}) fails too often and is left alone for now; "
            f"the last failure: {self._last_error}",
            retry_in_s=self.breaker.retry_in_s(now),
        )

    @staticmethod
    def _answer(waiting: Waiting, outcome: Outcome) -> None:
        if not waiting.outcome.done():
            waiting.outcome.set_result(outcome)


def _pieces(endpoint: Endpoint, group: GroupToScore) -> list[GroupToScore]:
    """Cut a group into what fits into one request of the endpoint's dialect."""
    if endpoint.speaker.carries == "completion":
        return [
            group.model_copy(update={"group_id": f"{group.group_id}#{number}", "completions": [text]})
            for number, text in enumerate(group.completions)
        ]
    return [group]


def _joined(pieces: list[Outcome]) -> Outcome:
    """Put the pieces of one group together; the first error is the group's."""
    if len(pieces) == 1:
        return pieces[0]
    error = next((piece for piece in pieces if isinstance(piece, RewardError)), None)
    if error is not None:
        return error
    scored = [piece for piece in pieces if isinstance(piece, GroupScores)]
    names = sorted({name for piece in scored for name in piece.parts})
    return GroupScores(
        rewards=tuple(reward for piece in scored for reward in piece.rewards),
        scorer=scored[0].scorer,
        parts={name: tuple(value for piece in scored for value in piece.parts.get(name, (0.0,))) for name in names},
    )
