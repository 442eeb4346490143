"""How many packs a worker holds when the number follows its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.rollout_service.packs import pack_loops
from penstock.rollout_service.packs.pack_loops import MOST_PACKS, EngineLoad, PackLimit, PackLoops

PER_PACK = 8


def follow(
    tokens_per_s: Callable[[float], float],
    *,
    slots: float,
    seconds: int = 120,
    packs: int = 10**6,
    num_servers: int = 1,
) -> list[int]:
    limit, generated, values = PackLimit(num_servers), 0.0, []
    for second in range(seconds):
        held = min(packs, limit.value)
        running = min(slots, PER_PACK * held)
        generated += tokens_per_s(running)
        values.append(limit.observe(EngineLoad(second, generated, running, PER_PACK * held - running, held), PER_PACK))
    return values


@pytest.mark.parametrize(
    ("tokens_per_s", "slots", "fewest", "most", "peak"),
    [
        (lambda running: 10.0 * running, 64, 64 + PER_PACK, 64 + 3 * PER_PACK, 0),
        (lambda running: 1000.0 * min(1.0, running / 100), 10**6, 95, 150, 0),
        (lambda running: 10.0 * running if running <= 100 else 500.0, 10**6, 80, 120, 101),
    ],
    ids=["its slots and one or two packs more", "what nearly reaches its best throughput", "fewer again"],
)
def test_an_engine_gets_what_it_makes_use_of(
    tokens_per_s: Callable[[float], float], slots: float, fewest: int, most: int, peak: int
) -> None:
    """More sequences gain little where a throughput saturates, and lose some where others are preempted."""
    values = follow(tokens_per_s, slots=slots)
    assert all(fewest <= PER_PACK * value <= most for value in values[100:])
    assert PER_PACK * max(values) >= peak


def test_an_engine_that_is_faster_with_more_gets_the_most() -> None:
    assert follow(lambda running: 10.0 * running, slots=10**6)[-1] == MOST_PACKS


def test_the_packs_are_counted_for_each_server() -> None:
    """Eight servers start with eight times the packs of one, and each gets what fills it."""
    eight = follow(lambda running: 10.0 * running, slots=8 * 64, num_servers=8)
    assert eight[0] == 16
    assert all(8 * (64 + PER_PACK) <= PER_PACK * value <= 8 * (64 + 3 * PER_PACK) for value in eight[60:])
    assert follow(lambda running: 10.0 * running, slots=10**6, num_servers=8)[-1] == 8 * MOST_PACKS


def test_a_worker_with_free_places_learns_nothing() -> None:
    """Where tasks are what is missing, a larger limit would only take them from another worker."""
    assert follow(lambda running: 10.0 * running, slots=64, packs=1) == [2] * 120


def test_an_engine_that_was_started_again_is_no_reason_to_change() -> None:
    limit = PackLimit(first=4)
    limit.observe(EngineLoad(0.0, 1e6, 32.0, 0.0, 4), PER_PACK)
    assert limit.observe(EngineLoad(1.0, 10.0, 32.0, 0.0, 4), PER_PACK) == 4


@dataclass
class _Source:
    """Packs without end, until it is told to stop."""

    stopped: bool = False
    fact: Any = field(
        default_factory=lambda: SimpleNamespace(tasks=(SimpleNamespace(group_size=PER_PACK, redundant_completions=0),))
    )

    async def take(self) -> Any:
        await asyncio.sleep(0)
        return None if self.stopped else SimpleNamespace(delivery=SimpleNamespace(fact=self.fact))


class _Engine:
    """Four slots for packs; reports what runs and what waits, or nothing."""

    num_servers = 1

    def __init__(self, *, reports: bool = True) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.slots = asyncio.Semaphore(4)
        self.held = self.done = self.most = self.num_samples = self.generated = 0
        self.reports = reports

    async def work(self, _: object) -> None:
        self.held += 1
        self.most = max(self.most, self.held)
        async with self.slots:
            await asyncio.sleep(0.002)
        self.held -= 1
        self.done += 1

    async def figures(self) -> dict[str, float]:
        running = min(4, self.held)
        self.num_samples += 1
        self.generated += 100 * running
        if not self.reports:
            return {}
        return {
            "engine_generated_tokens": float(self.generated),
            "engine_running": float(PER_PACK * running),
            "engine_queued": float(PER_PACK * (self.held - running)),
        }


async def _run(packs_in_flight: int, engine: _Engine, until: Callable[[PackLoops], bool]) -> PackLoops:
    source, given = _Source(), engine
    tasks: Any = source
    of_engine: Any = given
    loops = PackLoops(tasks, of_engine, engine.work, packs_in_flight)
    running = asyncio.ensure_future(loops.run())
    async with asyncio.timeout(120):
        while not until(loops):  # noqa: ASYNC110  counters, no event
            await asyncio.sleep(0.005)
        source.stopped = True
        await running
    return loops


async def test_a_fixed_number_of_packs_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them at once, and never more; the loops end together."""
    monkeypatch.setattr(pack_loops, "SAMPLE_S", 0.005)
    engine = _Engine()
    await _run(3, engine, lambda _: engine.done >= 60)
    assert engine.most == 3
    assert engine.held == 0


async def test_with_0_the_number_grows_until_the_engine_has_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """From two to the four that run and one or two that wait; when the worker stops, every pack is finished."""
    monkeypatch.setattr(pack_loops, "SAMPLE_S", 0.005)
    engine = _Engine()
    monkeypatch.setattr(pack_loops, "time", SimpleNamespace(monotonic=lambda: float(engine.num_samples)))
    loops = await _run(0, engine, lambda loops: loops.limit >= 5 and engine.num_samples >= 120)
    assert 5 <= engine.most <= 9
    assert 5 <= loops.limit <= 7
    assert engine.held == 0


async def test_an_engine_that_reports_nothing_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_loops, "SAMPLE_S", 0.001)
    monkeypatch.setattr(pack_loops, "_MOST_WITHOUT", 3)
    warnings: list[str] = []
    monkeypatch.setattr(pack_loops.log, "warning", lambda text, **_: warnings.append(text))
    engine = _Engine(reports=False)
    loops = await _run(0, engine, lambda _: engine.done >= 30 and bool(warnings))
    assert (loops.limit, engine.most, len(warnings)) == (2, 2, 1)
