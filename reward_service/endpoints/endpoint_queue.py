"""The queues of groups before the endpoints, and the calls made from them: the bulkhead of each endpoint.

Groups of all packs share the queue of an endpoint. As soon as a call may be made (fewer than ``concurrency`` are in progress, the
rate limit has a token, the breaker is closed) the first groups are sent in one batch, at most ``batch_size`` of them. A slow
endpoint fills only its queue: what does not fit is rejected with EndpointBusy and waits at the broker.

The batch limit adapts: it is halved when a call with several groups times out or is refused as too large, and grows by
one with every full call that succeeds.

`EndpointClient` holds the queues of this replica, and replaces one with its endpoint's version; `check_health` requests health URLs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from penstock.protocol.errors import PenstockError
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.protocol.traces.traces import Value
from penstock.reward_service.endpoints import endpoint_call
from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.endpoint_call import (
    Breaker,
    BreakerState,
    EndpointCaller,
    EndpointMetrics,
    TokenBucket,
)
from penstock.reward_service.endpoints.endpoint_registry import NOTHING, EndpointRegistry, EndpointSecrets, SecretStore
from penstock.reward_service.endpoints.wire import CALL_HEADER, GroupToScore
from penstock.reward_service.errors import (
    BadGroundTruth,
    BreakerOpen,
    EndpointBusy,
    EndpointFailed,
    NotCalled,
    RewardCrashed,
    RewardError,
    RewardUnavailable,
)
from penstock.reward_service.metrics import Timings
from penstock.reward_service.pack_trace import CURRENT_TRACE, PackTrace
from penstock.reward_service.scores import Outcome
from penstock.serving.http_connections import HttpConnections, within
from penstock.serving.target_policy import TargetPolicy

log = structlog.get_logger("reward_service.endpoint_queue")

_BUSY_S = 0.5  # shortest wait before a rejected group is retried
_QUEUE_FACTOR = 2  # size of the queue as a multiple of the groups that can be in progress


@dataclass(slots=True, eq=False)
class QueuedGroup:
    group: GroupToScore
    attempt: int
    outcome: asyncio.Future[Outcome]
    trace: PackTrace | None = None
    traced_id: str = ""  # of the whole group


class EndpointQueue:
    slow = True

    def __init__(self, endpoint: Endpoint, secrets: EndpointSecrets | None, http: HttpConnections) -> None:
        self.endpoint = endpoint
        self.counts = EndpointMetrics(batch_limit=endpoint.batch_size)
        self.breaker = Breaker()
        self.timings = Timings()
        self._caller = EndpointCaller(endpoint, secrets or NOTHING, http, self.counts)
        self._waiting: deque[QueuedGroup] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._bucket = TokenBucket(endpoint.rate_per_s, time.monotonic())
        self._most_waiting = _QUEUE_FACTOR * endpoint.concurrency * endpoint.batch_size
        self._timer: asyncio.TimerHandle | None = None
        self._unhealthy = False

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        """Queue the groups and return their outcomes; on a redelivery each is sent alone, so that it fails only itself."""
        return await self.score_groups([GroupToScore.of(group) for group in groups], attempt=attempt)

    async def score_groups(self, groups: Sequence[GroupToScore], *, attempt: int) -> list[Outcome]:
        entered = [self._enqueue(group, attempt) for group in groups]
        self._start_calls()
        try:
            return [endpoint_call.join_pieces([await waiting.outcome for waiting in pieces]) for pieces in entered]
        finally:
            for pieces in entered:  # cancelled: what is still queued is skipped
                for waiting in pieces:
                    waiting.outcome.cancel()

    async def call_now(self, groups: Sequence[GroupToScore]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        size = self.endpoint.batch_size if self.endpoint.speaker.carries == "groups" else 1
        pieces = [endpoint_call.cut_group(self.endpoint, group) for group in groups]
        flat = [piece for of_group in pieces for piece in of_group]
        for start in range(0, len(flat), size):
            outcomes += await self._timed(flat[start : start + size], 1)
        remaining = iter(outcomes)
        return [endpoint_call.join_pieces([next(remaining) for _ in of_group]) for of_group in pieces]

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._calls

    def metrics(self) -> EndpointMetrics:
        now, timings = time.monotonic(), self.timings
        computed = {
            "calls": timings.num_calls, "errors": timings.num_failed, "waiting": len(self._waiting),
            "error_rate": round(timings.num_failed / max(timings.num_calls, 1), 4),
            "breaker": self.breaker.state(now), "breaker_opened": self.breaker.num_opened,
            "retry_in_s": round(self.breaker.retry_in_s(now), 3),
            "latency_p50_s": round(timings.quantile(0.5), 6), "latency_p99_s": round(timings.quantile(0.99), 6),
        }  # fmt: skip
        return self.counts.model_copy(update=computed)

    def transfer_to(self, to: EndpointQueue) -> None:
        """Move the queued groups to another version's queue; calls in progress finish here."""
        to._waiting.extend(self._waiting)
        self._waiting.clear()
        to._start_calls()

    def reject_waiting(self, err: NotCalled) -> None:
        while self._waiting:
            self._answer(self._waiting.popleft(), err)

    def healthy(self) -> None:
        if self._unhealthy:
            self._unhealthy = False
            self.breaker.close()
            log.info("endpoint is healthy again", endpoint=self.endpoint.scorer)
            self._start_calls()

    def unhealthy(self, problem: str) -> None:
        self._unhealthy = True
        self.counts.last_error = f"health check: {problem}"
        self.breaker.trip(time.monotonic())
        self.reject_waiting(self._breaker_open(time.monotonic()))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _enqueue(self, group: GroupToScore, attempt: int) -> list[QueuedGroup]:
        new_future = asyncio.get_running_loop().create_future
        refusal = self._refusal(group)
        if refusal is not None:
            refused = QueuedGroup(group, attempt, new_future())
            refused.outcome.set_result(refusal)
            return [refused]
        trace = CURRENT_TRACE.get()
        pieces = endpoint_call.cut_group(self.endpoint, group)
        entered = [QueuedGroup(piece, attempt, new_future(), trace, group.group_id) for piece in pieces]
        self._waiting.extend(entered)
        return entered

    def _refusal(self, group: GroupToScore) -> RewardError | None:
        if self.endpoint.needs_ground_truth and group.ground_truth is None:
            return BadGroundTruth(
                f"endpoint {self.endpoint.name} needs a ground truth, the row of group {group.group_id} has none; "
                "map the right column with data.map"
            )
        if len(self._waiting) >= self._most_waiting:
            self.counts.turned_away += 1
            return EndpointBusy(
                f"endpoint {self.endpoint.name} has {self.counts.under_way} groups in progress and {len(self._waiting)} queued, "
                "which is its limit; the group is retried. Raise its concurrency, or start more instances",
                retry_in_s=_BUSY_S,
            )
        return None

    def _start_calls(self) -> None:
        while self._waiting and len(self._calls) < self.endpoint.concurrency:
            now = time.monotonic()
            state = self.breaker.state(now)
            if state is not BreakerState.CLOSED and not self.breaker.admit(now):
                self.reject_waiting(self._breaker_open(now))
                return
            batch = self._next_batch(1 if state is BreakerState.HALF_OPEN else self.counts.batch_limit)
            wait_s = self._bucket.take(now) if batch else 0.0
            if wait_s or not batch:
                self.breaker.withdraw()
                self._waiting.extendleft(reversed(batch))
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._start_calls)
                return
            self.counts.under_way += len(batch)
            self._calls.add(asyncio.create_task(self._call(batch)))

    def _next_batch(self, most: int) -> list[QueuedGroup]:
        batch: list[QueuedGroup] = []
        names: set[str] = set()
        while self._waiting and len(batch) < most:
            first = self._waiting[0]
            if first.outcome.cancelled():
                self._waiting.popleft()
                continue
            alone = first.attempt > 1 or self.endpoint.speaker.carries != "groups"
            if batch and (alone or first.group.group_id in names):  # generated twice, as after a worker was killed
                break
            names.add(first.group.group_id)
            batch.append(self._waiting.popleft())
            if alone:
                break
        return batch

    async def _call(self, batch: list[QueuedGroup]) -> None:
        started = time.time()
        try:
            outcomes = await self._timed([waiting.group for waiting in batch], batch[0].attempt)
            self._trace(batch, outcomes, started)
            for waiting, outcome in zip(batch, outcomes, strict=True):
                self._answer(waiting, outcome)
            failure = outcomes[0] if all(isinstance(outcome, RewardError) for outcome in outcomes) else None
            opened = self.breaker.record(
                time.monotonic(), failed=isinstance(failure, RewardError) and failure.counts_against_endpoint
            )
            self._adapt(len(batch), failure)
            if opened:
                log.warning("circuit breaker opened", endpoint=self.endpoint.scorer, reason=self.counts.last_error)
        finally:
            self.counts.under_way -= len(batch)
            self._calls.discard(asyncio.current_task())  # type: ignore[arg-type]
        self._start_calls()

    def _trace(self, batch: Sequence[QueuedGroup], outcomes: Sequence[Outcome], started: float) -> None:
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if waiting.trace is not None:
                error = type(outcome).__name__ if isinstance(outcome, RewardError) else ""
                attributes: dict[str, Value] = {
                    "endpoint": self.endpoint.name,
                    "attempt": waiting.attempt,
                    "num_groups": len(batch),
                    "num_completions": len(waiting.group.completions),
                }
                waiting.trace.requested(waiting.traced_id, started, attributes, error)

    async def _timed(self, groups: Sequence[GroupToScore], attempt: int) -> list[Outcome]:
        started = time.monotonic()
        outcomes: list[Outcome]
        try:
            outcomes = await self._caller.call(groups, attempt=attempt)
        except RewardError as err:
            outcomes = [err] * len(groups)
        except Exception as err:
            log.exception("calling an endpoint raised", endpoint=self.endpoint.scorer)
            crash = RewardCrashed(
                f"calling endpoint {self.endpoint.name} raised {type(err).__name__}; the traceback is in the log of this "
                "replica: please report it"
            )  # the exception's text may hold a part of the answer
            outcomes = [crash] * len(groups)
        error = next((outcome for outcome in outcomes if isinstance(outcome, RewardError)), None)
        self.timings.record(time.monotonic() - started, failed=error is not None)
        if error is not None:
            self.counts.last_error = f"{error.reason}: {error}"
        return outcomes

    def _adapt(self, size: int, error: Outcome | None) -> None:
        if size > 1 and isinstance(error, EndpointFailed):
            self.counts.batch_limit = max(1, min(size, self.counts.batch_limit) // 2)
        elif error is None and size >= self.counts.batch_limit:
            self.counts.batch_limit = min(self.counts.batch_limit + 1, self.endpoint.batch_size)

    def _breaker_open(self, now: float) -> BreakerOpen:
        return BreakerOpen(
            f"endpoint {self.endpoint.name} ({self.endpoint.url}) fails too often; its circuit breaker is open. "
            f"Last failure: {self.counts.last_error}",
            retry_in_s=self.breaker.retry_in_s(now),
        )

    @staticmethod
    def _answer(waiting: QueuedGroup, outcome: Outcome) -> None:
        if not waiting.outcome.done():
            waiting.outcome.set_result(outcome)


_KEEP_S = 5.0  # an idle connection
PERIOD_S = 3.0
_DEADLINE_S = 2.0
_FAILURES = 2  # in a row before the breaker opens


class EndpointClient:
    def __init__(self, policy: TargetPolicy, *, max_response_bytes: int, secrets: SecretStore | None = None) -> None:
        """``policy`` decides which addresses may be called; longer answers than the maximum are not read."""
        self._secrets = secrets
        self._queues: dict[str, EndpointQueue] = {}
        self._finishing: list[EndpointQueue] = []  # earlier versions with calls in progress
        self.http = HttpConnections(
            keep_s=_KEEP_S, policy=policy, max_answer_bytes=max_response_bytes,
            max_answer_key="reward_service.max_response_bytes",
        )  # fmt: skip

    async def __aenter__(self) -> EndpointClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for queue in [*self._queues.values(), *self._finishing]:
            await queue.close()
        await self.http.close()

    def follow(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Apply the registered endpoints: replace the queues of new versions, empty those of unregistered endpoints."""
        for name, queue in list(self._queues.items()):
            if name in endpoints:
                self.queue(endpoints[name])
            elif not queue.idle:
                queue.reject_waiting(RewardUnavailable(f"endpoint {name} was unregistered or drained meanwhile"))

    def queue(self, endpoint: Endpoint) -> EndpointQueue:
        """Return the queue of an endpoint, the scorer of its groups.

        A new version takes over the queue; calls in progress finish at the old one.
        """
        queue = self._queues.get(endpoint.name)
        if queue is None or (queue.endpoint is not endpoint and queue.endpoint != endpoint):
            secrets = self._secrets.of(endpoint) if self._secrets is not None else None
            new = EndpointQueue(endpoint, secrets, self.http)
            self._queues[endpoint.name] = new
            if queue is not None:
                self._finishing = [*(old for old in self._finishing if not old.idle), queue]
                queue.transfer_to(new)
            return new
        return queue

    def metrics(self, endpoint: Endpoint, state: str = "ok") -> EndpointMetrics:
        finishing = {
            queue.endpoint.scorer: queue.counts.under_way
            for queue in self._finishing
            if queue.endpoint.name == endpoint.name and queue.counts.under_way
        }
        return self.queue(endpoint).metrics().model_copy(update={"state": state, "finishing": finishing})


async def check_health(registry: EndpointRegistry, client: EndpointClient, done: asyncio.Event) -> None:
    """Request the health URLs of the endpoints in service until ``done``; the breaker of an unhealthy one opens."""
    failed: Counter[str] = Counter()

    async def check(endpoint: Endpoint) -> None:
        problem = await _problem(client.http, endpoint.health_url or "")
        if not problem:
            failed.pop(endpoint.scorer, None)
            client.queue(endpoint).healthy()
            return
        failed[endpoint.scorer] += 1
        if failed[endpoint.scorer] == _FAILURES:
            log.warning("endpoint is unhealthy", endpoint=endpoint.scorer, problem=problem)
        if failed[endpoint.scorer] >= _FAILURES:
            client.queue(endpoint).unhealthy(problem)

    while not done.is_set():
        await asyncio.gather(*(check(endpoint) for endpoint in registry.in_service().values() if endpoint.health_url))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), PERIOD_S)


async def _problem(http: HttpConnections, url: str) -> str:
    try:
        async with within(_DEADLINE_S, url):
            answer = await http.send("GET", url, headers={CALL_HEADER: "1"})
    except PenstockError as err:
        return str(err)
    return "" if 200 <= answer.status < 300 else f"{url}: HTTP {answer.status}"
