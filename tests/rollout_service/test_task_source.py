"""How often a worker without packs asks for some, and when it stops asking."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.rollout_service.packs import pack_loops
from penstock.rollout_service.packs.pack_loops import TaskSource, pause_s


@dataclass
class _Delivery:
    """A pack that is given back when nobody may generate it."""

    num_given_back: int = 0

    async def give_back(self, delay_s: float) -> None:
        self.num_given_back += 1


@dataclass
class _Inbox:
    """A queue that holds a pack for the n-th request, or none."""

    pack_at: int | None = None
    num_fetches: int = 0
    delivery: _Delivery = field(default_factory=_Delivery)
    num_held: int = 0

    async def fetch(self, max_messages: int, wait_s: float) -> list[_Delivery]:
        self.num_fetches += 1
        if self.num_fetches == self.pack_at:
            return [self.delivery]
        await asyncio.sleep(wait_s)
        return []


class _Engine:
    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.ready.set()


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a request 10 ms long, and pauses as long as a worker was idle."""
    monkeypatch.setattr(pack_loops, "_FETCH_S", 0.01)
    monkeypatch.setattr(pack_loops, "_IDLE_SHARE", 1.0)


def _source(inboxes: dict[str, _Inbox], period_s: float) -> tuple[TaskSource, Any, asyncio.Event]:
    engine: Any = _Engine()
    stop = asyncio.Event()
    given: Any = inboxes
    return TaskSource(given, engine, stop, period_s=lambda: period_s), engine, stop


def test_the_pause_grows_with_the_idle_time_up_to_the_period_of_the_heartbeats() -> None:
    """A small run never pauses; of a thousand workers, each asks every ten seconds after fifty without a pack."""
    assert [pause_s(idle_s, 1.0) for idle_s in (0.0, 10.0, 1e6)] == [0.0, 0.0, 0.0]
    assert [pause_s(idle_s, 10.0) for idle_s in (0.0, 5.0, 25.0, 50.0, 1e6)] == [0.0, 0.0, 4.0, 9.0, 9.0]
    for idle_s, period_s in itertools.product((0.0, 7.0, 30.0, 1e4), (1.0, 3.0, 10.0)):
        assert pause_s(idle_s, period_s) <= min(0.2 * idle_s, period_s)


@pytest.mark.usefixtures("_quick")
async def test_an_idle_worker_asks_once_in_a_period_and_still_gets_its_pack() -> None:
    """Of a pause of 90 ms after each request of 10 ms: a tenth of the requests, for both queues; then the pack."""
    inboxes = {"eval": _Inbox(), "train": _Inbox(pack_at=6)}
    source, _, _ = _source(inboxes, 0.1)
    began = asyncio.get_running_loop().time()
    received = await source.take()
    assert received is not None
    assert received.split == "train"
    assert asyncio.get_running_loop().time() - began > 0.2
    assert inboxes["eval"].num_fetches <= 7


@pytest.mark.usefixtures("_quick")
async def test_a_pausing_worker_stops_at_once_and_asks_for_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop ends the pause; no request follows that could take a pack from another worker."""
    monkeypatch.setattr(pack_loops, "_IDLE_SHARE", 1e12)
    inboxes = {"eval": _Inbox(), "train": _Inbox()}
    source, _, stop = _source(inboxes, 3600.0)
    taking = asyncio.ensure_future(source.take())
    await asyncio.sleep(0.2)
    asked = inboxes["train"].num_fetches
    stop.set()
    async with asyncio.timeout(5):
        assert await taking is None
        await source.close()
    assert inboxes["train"].num_fetches == asked


@pytest.mark.usefixtures("_quick")
async def test_a_worker_whose_engine_failed_in_a_pause_asks_for_nothing() -> None:
    inboxes = {"eval": _Inbox(), "train": _Inbox()}
    source, engine, stop = _source(inboxes, 0.1)
    taking = asyncio.ensure_future(source.take())
    await asyncio.sleep(0.15)
    engine.ready.clear()
    await asyncio.sleep(0.15)
    asked = inboxes["train"].num_fetches
    await asyncio.sleep(0.25)
    assert inboxes["train"].num_fetches == asked
    stop.set()
    assert await taking is None


@pytest.mark.usefixtures("_quick")
async def test_a_pack_that_arrives_after_the_stop_is_given_back() -> None:
    inboxes = {"train": _Inbox(pack_at=1)}
    source, _, stop = _source(inboxes, 1.0)
    source._fetches["train"] = asyncio.ensure_future(inboxes["train"].fetch(1, 0.01))  # type: ignore[arg-type]
    stop.set()
    assert await source.take() is None
    await source.close()
    assert inboxes["train"].delivery.num_given_back == 1
