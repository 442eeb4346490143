"""The queue of one endpoint, over real HTTP: batches that adapt, hedges, rates, breakers, signatures."""

# pyright: reportCallIssue=false  (fields of models that have defaults)

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.reward_service.processes import Answer, EndpointServer, StartEndpoint, blocking, good, raw

from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.endpoint_call import MIN_CALLS, BreakerState
from penstock.reward_service.endpoints.endpoint_queue import EndpointClient, EndpointQueue
from penstock.reward_service.endpoints.endpoint_registry import EndpointSecrets
from penstock.reward_service.endpoints.wire import GroupToScore
from penstock.reward_service.errors import (
    BadGroundTruth,
    BreakerOpen,
    EndpointBusy,
    EndpointFailed,
    EndpointNonsense,
    RewardUnavailable,
)
from penstock.reward_service.scores import GroupScores, Outcome
from penstock.serving import signature
from penstock.serving.http_connections import HttpConnections
from penstock.serving.target_policy import PRIVATE_TARGETS, TargetPolicy

MakeLine = Callable[..., EndpointQueue]


@pytest.fixture
async def line() -> AsyncIterator[MakeLine]:
    """A factory of endpoint queues, closed after the test."""
    http = HttpConnections(keep_s=5.0, policy=TargetPolicy(PRIVATE_TARGETS), max_answer_bytes=100_000)
    made: list[EndpointQueue] = []

    def make(server: EndpointServer, secrets: EndpointSecrets | None = None, **limits: Any) -> EndpointQueue:
        made.append(EndpointQueue(Endpoint(name="e", url=server.url, **limits), secrets, http))
        return made[-1]

    yield make
    for one in made:
        await one.close()
    await http.close()


_numbers = itertools.count()


def groups(number: int, **more: Any) -> list[GroupToScore]:
    return [GroupToScore(group_id=f"g{next(_numbers)}", completions=["a", "b"], **more) for _ in range(number)]


def rewards(outcomes: list[Outcome]) -> list[tuple[float, ...]]:
    assert all(isinstance(outcome, GroupScores) for outcome in outcomes), outcomes
    return [outcome.rewards for outcome in outcomes if isinstance(outcome, GroupScores)]


async def test_groups_of_many_packs_share_a_call_when_the_endpoint_is_slow(
    start_endpoint: StartEndpoint, line: MakeLine
) -> None:
    """Groups of any pack that arrive during a call wait and then go together in one call."""
    slow, started, release = blocking(0.5)
    server = start_endpoint(slow)
    one = line(server, concurrency=1, batch_size=16)
    first = asyncio.create_task(one.score_groups(groups(1), attempt=1))
    await asyncio.to_thread(started.wait, 10)
    of_packs = [groups(3) for _ in range(4)]
    packs = [asyncio.create_task(one.score_groups(pack, attempt=1)) for pack in of_packs]
    again = asyncio.create_task(one.score_groups(of_packs[0][:1], attempt=1))
    await asyncio.sleep(0)
    release.set()
    for outcomes in await asyncio.gather(first, *packs, again):
        rewards(outcomes)
    assert [len(request["groups"]) for request in server.requests] == [1, 12, 1], "a group goes once into a call"


async def test_a_batch_shrinks_when_calls_fail_and_grows_when_they_succeed(
    start_endpoint: StartEndpoint, line: MakeLine
) -> None:
    """An endpoint that cannot take sixteen groups at once soon gets fewer, and later more again."""

    def small(request: dict[str, Any]) -> Answer:
        return raw("too large", 413)(request) if len(request["groups"]) > 4 else good(0.5)(request)

    one = line(start_endpoint(small), concurrency=1, batch_size=16)
    outcomes = await one.score_groups(groups(28), attempt=1)
    assert [isinstance(outcome, EndpointFailed) for outcome in outcomes] == [True] * 24 + [False] * 4
    assert one.metrics().batch_limit == 5
    assert one.metrics().breaker is BreakerState.CLOSED, "413 says nothing about other calls"


async def test_a_full_queue_refuses_groups(start_endpoint: StartEndpoint, line: MakeLine) -> None:
    slow, _, release = blocking(0.5)
    one = line(start_endpoint(slow), concurrency=1, batch_size=2)
    waiting = asyncio.create_task(one.score_groups(groups(2), attempt=1))
    await asyncio.sleep(0)
    more = [asyncio.create_task(one.score_groups(groups(1), attempt=1)) for _ in range(6)]
    done, _ = await asyncio.wait(more, return_when=asyncio.FIRST_COMPLETED)
    turned_away = [task.result()[0] for task in done]
    assert all(isinstance(outcome, EndpointBusy) for outcome in turned_away)
    release.set()
    outcomes = [await task for task in more]
    await waiting
    assert sum(isinstance(outcome, EndpointBusy) for (outcome,) in outcomes) == one.metrics().turned_away == 2
    assert (one.metrics().errors, one.idle) == (0, True)


async def test_a_hedge_wins_over_a_slow_answer(start_endpoint: StartEndpoint, line: MakeLine) -> None:
    """When the first request stalls, a second one with the same idempotency key is sent and its answer used."""
    numbers, release = itertools.count(), threading.Event()

    def first_stalls(request: dict[str, Any]) -> Answer:
        if next(numbers) == 0:
            release.wait(20)
        return good(0.5)(request)

    server = start_endpoint(first_stalls)
    one = line(server, hedge_after_s=0.1, timeout_s=15)
    assert rewards(await one.score_groups(groups(1), attempt=1)) == [(0.5, 0.5)]
    assert one.metrics().hedges == 1
    assert len(set(server.keys)) == 1
    release.set()


async def test_a_failing_endpoint_is_paused_and_tried_again(start_endpoint: StartEndpoint, line: MakeLine) -> None:
    """After five failed calls groups are refused at once; after the pause one group tries it, then all are sent again."""
    server = start_endpoint(raw("out of order", 500))
    one = line(server, concurrency=8, batch_size=1, retries=0)
    outcomes = await one.score_groups(groups(MIN_CALLS), attempt=1)
    assert all(isinstance(outcome, EndpointFailed) for outcome in outcomes)
    asked = len(server.requests)
    (refused,) = await one.score_groups(groups(1), attempt=1)
    assert isinstance(refused, BreakerOpen)
    assert "HTTP 500, 12 bytes" in str(refused)
    assert 0 < refused.retry_in_s <= 1.0
    assert len(server.requests) == asked
    server.behaviour = good(0.5)
    deadline = time.monotonic() + 20
    while one.breaker.state(time.monotonic()) is BreakerState.OPEN:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert rewards(await one.score_groups(groups(1), attempt=1)) == [(0.5, 0.5)]
    assert one.metrics().breaker is BreakerState.CLOSED
    assert one.metrics().breaker_opened == 1


async def test_health_checks_open_and_close_the_breaker(start_endpoint: StartEndpoint, line: MakeLine) -> None:
    one = line(start_endpoint(good(0.5)))
    one.unhealthy("HTTP 503")
    (refused,) = await one.score_groups(groups(1), attempt=1)
    assert isinstance(refused, BreakerOpen)
    assert "health check: HTTP 503" in str(refused)
    one.healthy()
    assert rewards(await one.score_groups(groups(1), attempt=1)) == [(0.5, 0.5)]


async def test_a_rate_is_kept(start_endpoint: StartEndpoint, line: MakeLine) -> None:
    """Twelve calls at ten a second, with a burst of ten, take at least the time of the other two."""
    server = start_endpoint(good(0.5))
    one = line(server, rate_per_s=10, batch_size=1, concurrency=32)
    started = time.monotonic()
    await one.score_groups(groups(12), attempt=1)
    assert time.monotonic() - started >= 0.19
    assert len(server.requests) == 12


async def test_requests_are_signed_and_carry_the_api_key(start_endpoint: StartEndpoint, line: MakeLine) -> None:
    """The endpoint can check every try by Standard Webhooks: id, time and body under its key."""
    key = b"k" * 32
    secret = signature.PREFIX + base64.b64encode(key).decode()
    answers = [raw("busy", 503), good(1.0)]
    server = start_endpoint(lambda request: answers.pop(0)(request))  # noqa: PLW0108 a behaviour is taken at each request
    one = line(server, EndpointSecrets((secret,), "sk-123"))
    await one.score_groups(groups(1), attempt=1)
    assert len(server.headers) == 2
    for headers, body in zip(server.headers, server.bodies, strict=True):
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        assert headers["webhook-id"] == headers["idempotency-key"]
        assert headers["authorization"] == "Bearer sk-123"
        assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
    assert server.keys[0] == server.keys[1]


async def test_answers_are_checked_against_the_registration(start_endpoint: StartEndpoint, line: MakeLine) -> None:
    """A row without ground truth is refused without a call; a score without a declared part is a malformed answer."""
    server = start_endpoint(good(0.5))
    (refused,) = await line(server, needs_ground_truth=True).score_groups(groups(1), attempt=1)
    assert isinstance(refused, BadGroundTruth)
    assert not server.requests
    (nonsense,) = await line(server, returns_parts=("length", "style")).score_groups(
        groups(1, ground_truth=1), attempt=1
    )
    assert isinstance(nonsense, EndpointNonsense)
    assert "missing: style" in str(nonsense)


async def test_queued_groups_of_an_unregistered_endpoint_are_retried(start_endpoint: StartEndpoint) -> None:
    slow, started, release = blocking(0.25)
    endpoint = Endpoint(name="e", url=start_endpoint(slow).url, concurrency=1, batch_size=1)
    async with EndpointClient(TargetPolicy(PRIVATE_TARGETS), max_response_bytes=10_000) as client:
        under_way = asyncio.create_task(client.queue(endpoint).score_groups(groups(1), attempt=1))
        await asyncio.to_thread(started.wait, 10)
        in_line = asyncio.create_task(client.queue(endpoint).score_groups(groups(1), attempt=1))
        await asyncio.sleep(0)
        client.follow({})
        (outcome,) = await in_line
        assert isinstance(outcome, RewardUnavailable)
        release.set()
        assert rewards(await under_way) == [(0.25, 0.25)]
