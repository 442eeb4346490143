"""Which versions requests name, which adapters are unloaded, and which swaps take a permit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.completion import EngineChecksum
from penstock.rollout_service.errors import EngineError, EngineRefused
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.weights import weight_swap
from penstock.rollout_service.weights.mirror import MirroredVersion
from penstock.rollout_service.weights.servable_versions import ServableVersions
from penstock.rollout_service.weights.weight_swap import WeightSwap

V = PolicyVersion


class _Engine:
    """Records its calls; `fails` is raised by the next load or unload of an adapter, and a load waits for `loads`."""

    def __init__(self) -> None:
        self.version: PolicyVersion | None = None
        self.is_released = False
        self.calls: list[tuple[str, int | None]] = []
        self.mode, self.kept_at = "none", -1
        self.fails: EngineError | None = None
        self.loads = asyncio.Event()
        self.loads.set()
        self.client = self

    async def load(self, folder: Path, version: PolicyVersion, mode: str = "drain") -> None:
        await self.loads.wait()
        self.calls.append(("load", version))
        self.version, self.mode = version, mode

    async def keep(self, folder: Path, version: PolicyVersion) -> bool:
        self.kept_at = self.version or 0
        return self.version == version

    async def weights_checksum(self) -> EngineChecksum:
        return EngineChecksum("the engine's", "tp 1")

    async def load_adapter(self, folder: Path, version: PolicyVersion) -> None:
        self._fail()
        self.calls.append(("load_adapter", version))
        self.version = max(version, self.version or version)

    async def unload_adapter(self, version: PolicyVersion) -> None:
        self._fail()
        self.calls.append(("unload_adapter", version))

    async def generate(
        self, prompts: Sequence[object], sampling: Sampling, n: int, adapter: int | None = None, seeds: object = None
    ) -> list:
        self.calls.append(("generate", adapter))
        return []

    def _fail(self) -> None:
        error, self.fails = self.fails, None
        if error is not None:
            raise error


class _Worker:
    """A swap of an engine and permits that are counted."""

    def __init__(self, update_mode: Any = "drain") -> None:
        self.engine, self.num_permits = _Engine(), 0
        engine: Any = self.engine
        semaphore: Any = self
        announcements: Any = None
        self.servable = ServableVersions(engine)
        self.swap = WeightSwap(
            engine=engine,
            servable=self.servable,
            semaphore=semaphore,
            announcements=announcements,
            metrics=WorkerMetrics(),
            check_every=0,
            update_mode=update_mode,
        )

    @contextlib.asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        self.num_permits += 1
        yield

    async def give(self, version: int, base: int | None = None) -> tuple[int | None, float] | None:
        """Load a version; returns the previous version and the pause of the swap."""
        model = None if base is None else mirrored(base)
        swapped = await self.swap.load(mirrored(version, model))
        return None if swapped is None else (swapped.previous, swapped.pause_s)

    async def ask(self, pin: int | None = None) -> None:
        await self.servable.sampler(None if pin is None else V(pin)).generate([[1]], Sampling(max_new_tokens=1), 1)


def mirrored(version: int, base: MirroredVersion | None = None) -> MirroredVersion:
    return MirroredVersion(V(version), Path(f"v{version}"), num_bytes=1, fetch_s=0.0, checksum="c", base=base)


async def test_adapters_of_one_model_are_served_together_without_a_pause() -> None:
    """The model is loaded once, then only adapters; each request names the newest, or the one it is pinned to."""
    worker = _Worker()
    assert await worker.give(1, base=0) == (None, 0.0)
    assert await worker.give(2, base=0) == (1, 0.0)
    await worker.ask()
    await worker.ask(pin=1)
    await worker.ask(pin=0)
    assert worker.engine.calls == [
        ("load", 0), ("load_adapter", 1), ("load_adapter", 2), ("generate", 2), ("generate", 1), ("generate", None),
    ]  # fmt: skip
    assert await worker.give(2, base=0) is None
    assert await worker.give(0) is None  # the model itself is served already


async def test_an_older_adapter_does_not_replace_a_newer_one() -> None:
    """An evaluation has it loaded; ordinary requests still name the newest."""
    worker = _Worker()
    await worker.give(5, base=0)
    assert await worker.give(3, base=0) is None
    await worker.ask()
    await worker.ask(pin=3)
    assert worker.engine.calls[-2:] == [("generate", 5), ("generate", 3)]
    assert worker.engine.version == 5


async def test_unused_adapters_are_unloaded() -> None:
    """The newest, used and pinned ones are kept; ``on_unused`` is called when the last request ends."""
    worker, idle = _Worker(), []
    worker.servable.on_unused = lambda: idle.append(1)
    for version in (1, 2, 3, 4):
        await worker.give(version, base=0)
    with worker.servable.using(V(2), Sampling(max_new_tokens=8)):
        await worker.swap.unload_unused(lambda: {V(3)})
        assert worker.engine.calls[-1] == ("unload_adapter", 1)
        assert worker.servable.adapters == {2, 3, 4}
    assert idle
    worker.engine.fails = EngineError("unreachable")
    await worker.swap.unload_unused(set)
    assert worker.servable.adapters == {2, 4}  # retried by the next call
    await worker.swap.unload_unused(set)
    assert worker.servable.adapters == {4}


async def test_another_model_removes_the_adapters_of_the_one_before() -> None:
    worker = _Worker()
    await worker.give(1, base=0)
    swapped = await worker.give(8, base=7)
    assert swapped is not None
    assert swapped[0] == 1
    assert swapped[1] > 0.0
    assert worker.engine.calls[-2:] == [("load", 7), ("load_adapter", 8)]
    with pytest.raises(EngineRefused, match="version 1 is not served any more"):
        await worker.ask(pin=1)
    await worker.give(9)
    await worker.ask()
    assert worker.engine.calls[-2:] == [("load", 9), ("generate", None)]


@pytest.mark.parametrize(("needs_permit_s", "expected"), [(60.0, [0, 1, 1, 1]), (-1.0, [0, 1, 2, 3])])
async def test_only_long_pauses_take_permits(
    needs_permit_s: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first load pauses nothing; the second takes a permit; later ones do after a long pause."""
    monkeypatch.setattr(weight_swap, "NEEDS_PERMIT_S", needs_permit_s)
    worker, taken = _Worker(), []
    for version in range(4):
        swapped = await worker.give(version)
        assert swapped is not None
        assert swapped[0] == (version - 1 if version else None)
        taken.append(worker.num_permits)
    assert taken == expected
    assert worker.engine.version == 3
    assert await worker.give(3) is None


async def test_a_copy_that_ends_while_another_version_is_loaded_is_not_recorded() -> None:
    """Neither is the checksum of the other version, nor one of memory that is freed."""
    worker = _Worker()
    engine, swap = worker.engine, worker.swap
    await swap.load(mirrored(1))
    engine.loads.clear()
    loading, keeping = asyncio.create_task(swap.load(mirrored(0))), asyncio.create_task(swap.keep(mirrored(1)))
    await asyncio.sleep(0.01)
    engine.loads.set()
    await loading
    assert (await keeping, engine.kept_at) == (False, 0)
    swap.check_every = 1
    assert [(await swap._checksum(mirrored(version))).value for version in (0, 1)] == ["the engine's", "c"]
    engine.is_released = True
    assert (await swap._checksum(mirrored(0))).value == "c"
    assert await swap.patch(PolicyVersion(1), PolicyVersion(2)) is None  # it was made for version 1


async def test_no_model_is_loaded_without_the_gate_once_another_one_was() -> None:
    """It waited for an evaluation's load: the adapter's base, which the evaluation would sample from, is not loaded."""
    worker = _Worker()
    engine, swap = worker.engine, worker.swap
    await swap.load(mirrored(1))
    engine.loads.clear()
    evaluation = asyncio.create_task(swap.load(mirrored(0)))
    await asyncio.sleep(0)
    adapter = asyncio.create_task(swap.load(replace(mirrored(2), base=mirrored(1)), keeps_model=True))
    await asyncio.sleep(0.01)
    engine.loads.set()
    await evaluation
    assert (await adapter, engine.version, swap.servable.model) == (None, 0, 0)


async def test_auto_waits_only_for_short_completions() -> None:
    """The longest completion that runs when a version is loaded decides, whichever ended before."""
    worker = _Worker("auto")
    await worker.give(1)
    for version, running, mode in (
        (2, [8], "drain"),
        (3, [8, 4096], "retract"),
        (4, [], "drain"),
        (5, [4096], "retract"),
        (1, [4096], "drain"),  # for an evaluation of an older version, which interrupts nothing
    ):
        with contextlib.ExitStack() as requests:
            for longest in running:
                requests.enter_context(worker.servable.using(None, Sampling(max_new_tokens=longest)))
            await worker.give(version)
        assert worker.engine.mode == mode, version
