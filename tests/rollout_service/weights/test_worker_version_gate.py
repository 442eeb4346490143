"""The gate between ordinary generation, pinned evaluation and weight swaps."""

from __future__ import annotations

import asyncio
import random

import pytest

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.weights.servable_versions import VersionGate


class SwappedEngine:
    """A minimal engine that has only a version, and detects concurrent swaps."""

    def __init__(self) -> None:
        self.version = 0
        self.newest = 0
        self.loads = 0
        self._loading = False

    async def load(self, version: int) -> None:
        if self.version == version:
            return
        assert not self._loading
        self._loading = True
        await asyncio.sleep(0)
        self._loading = False
        self.version = version
        self.loads += 1


async def pinned(gate: VersionGate, engine: SwappedEngine, version: int, iterations: int) -> None:
    """Evaluate with a version for some iterations of the event loop; it must be served all the time."""
    async with gate.pinned(
        PolicyVersion(version), lambda: engine.load(version), is_older=lambda: version != engine.newest
    ):
        for _ in range(iterations):
            assert engine.version == version
            await asyncio.sleep(0)


async def follow(gate: VersionGate, engine: SwappedEngine) -> None:
    async with gate.swap():
        await engine.load(engine.newest)


@pytest.mark.parametrize("seed", range(20))
async def test_a_pinned_version_is_served_while_it_is_held(seed: int):
    """For any order of pins, swaps and new versions, the version never changes under a pin, and all finish."""
    rng = random.Random(seed)
    gate, engine = VersionGate(linger_s=0.0), SwappedEngine()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for _ in range(60):
            match rng.randrange(4):
                case 0:
                    engine.newest += 1
                    tasks.create_task(follow(gate, engine))
                case 1 | 2:
                    tasks.create_task(pinned(gate, engine, rng.randint(0, engine.newest), rng.randrange(4)))
                case 3:
                    tasks.create_task(gate.wait_for_ordinary())
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        tasks.create_task(follow(gate, engine))
        await asyncio.sleep(0)
        while gate.serves_older:  # the follower is notified of every released pin
            await follow(gate, engine)
    await follow(gate, engine)
    assert engine.version == engine.newest
    await asyncio.wait_for(gate.wait_for_ordinary(), 60)


async def test_training_waits_while_an_older_version_is_evaluated():
    """Its samples would be stale immediately; it starts when the newest version is served again."""
    gate, engine = VersionGate(linger_s=0.0), SwappedEngine()
    engine.version = engine.newest = 5
    hold = asyncio.Event()

    async def evaluate() -> None:
        async with gate.pinned(PolicyVersion(3), lambda: engine.load(3), is_older=lambda: True):
            await hold.wait()

    evaluation = asyncio.create_task(evaluate())
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.version == 3
    training = asyncio.create_task(gate.wait_for_ordinary())
    swap = asyncio.create_task(follow(gate, engine))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not training.done()
    assert engine.version == 3
    hold.set()
    await asyncio.wait_for(asyncio.gather(evaluation, swap, training), 60)
    assert engine.version == 5


async def test_training_does_not_wait_while_the_newest_version_is_evaluated():
    gate, engine = VersionGate(linger_s=0.0), SwappedEngine()
    async with gate.pinned(PolicyVersion(0), lambda: engine.load(0), is_older=lambda: False):
        await asyncio.wait_for(gate.wait_for_ordinary(), 60)


async def test_packs_of_one_evaluation_share_their_pin():
    """Two holders of one version cost one load, and a swap waits for both."""
    gate, engine = VersionGate(linger_s=0.0), SwappedEngine()
    engine.newest = engine.version = 2
    await asyncio.gather(*(pinned(gate, engine, 1, 3) for _ in range(2)))
    assert engine.loads == 1


async def test_a_swap_lingers_for_the_next_pack_of_an_evaluation_unless_ordinary_generation_waits():
    """A pin that follows soon finds its version still served; once training waits, the evaluation's queue is empty."""
    gate, engine = VersionGate(linger_s=60.0), SwappedEngine()
    await pinned(gate, engine, 0, 1)
    engine.newest = 1
    swap = asyncio.create_task(follow(gate, engine))
    await pinned(gate, engine, 0, 1)
    assert engine.loads == 0
    with gate.ordinary_waiting():
        await asyncio.wait_for(swap, 60)
    assert engine.version == 1


async def test_after_a_failed_load_the_next_swap_admits_training():
    gate = VersionGate(linger_s=0.0)

    async def fail() -> None:
        raise OSError("no such folder")

    with pytest.raises(OSError, match="no such folder"):
        async with gate.pinned(PolicyVersion(1), fail, is_older=lambda: True):
            pass
    assert gate.serves_older
    async with gate.swap():
        pass
    await asyncio.wait_for(gate.wait_for_ordinary(), 60)


async def test_a_cancelled_waiter_does_not_block_swaps():
    gate, engine = VersionGate(linger_s=0.0), SwappedEngine()
    async with gate.pinned(PolicyVersion(0), lambda: engine.load(0), is_older=lambda: False):
        waiting = asyncio.create_task(pinned(gate, engine, 7, 1))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.wait_for(follow(gate, engine), 60)
