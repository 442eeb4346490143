"""A swap takes a permit only where engines pause for long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.completion import EngineChecksum
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.weights import weight_swap
from penstock.rollout_service.weights.mirror import MirroredVersion
from penstock.rollout_service.weights.servable_versions import ServableVersions
from penstock.rollout_service.weights.weight_swap import WeightSwap


class _Engine:
    version: PolicyVersion | None = None
    mode = "none"
    is_released = False
    kept_at = -1

    def __init__(self) -> None:
        self.loads = asyncio.Event()
        self.loads.set()

    async def load(self, folder: Path, version: PolicyVersion, mode: str = "drain") -> None:
        await self.loads.wait()
        self.version, self.mode = version, mode

    async def keep(self, folder: Path, version: PolicyVersion) -> bool:
        self.kept_at = self.version or 0
        return self.version == version

    async def weights_checksum(self) -> EngineChecksum:
        return EngineChecksum("the engine's", "tp 1")


class _Permits:
    num_taken = 0

    @contextlib.asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        self.num_taken += 1
        yield


def swap_of(engine: _Engine, semaphore: _Permits, update_mode: str) -> WeightSwap:
    return WeightSwap(
        engine=engine,  # type: ignore[arg-type]
        servable=ServableVersions(engine),  # type: ignore[arg-type]
        semaphore=semaphore,  # type: ignore[arg-type]
        announcements=None,  # type: ignore[arg-type]
        metrics=WorkerMetrics(),
        check_every=0,
        update_mode=update_mode,  # type: ignore[arg-type]
    )


def mirrored(version: int) -> MirroredVersion:
    return MirroredVersion(PolicyVersion(version), Path(f"v{version}"), num_bytes=1, fetch_s=0.0, checksum="c")


@pytest.mark.parametrize(("needs_permit_s", "expected"), [(60.0, [0, 1, 1, 1]), (-1.0, [0, 1, 2, 3])])
async def test_only_long_pauses_take_permits(
    needs_permit_s: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first load pauses nothing; the second takes a permit; later ones do after a long pause."""
    monkeypatch.setattr(weight_swap, "NEEDS_PERMIT_S", needs_permit_s)
    semaphore, engine = _Permits(), _Engine()
    swap = swap_of(engine, semaphore, "drain")
    taken = []
    for version in range(4):
        swapped = await swap.load(mirrored(version))
        assert swapped is not None
        assert swapped.previous == (version - 1 if version else None)
        taken.append(semaphore.num_taken)
    assert taken == expected
    assert engine.version == 3
    assert await swap.load(mirrored(3)) is None


async def test_a_copy_that_ends_while_another_version_is_loaded_is_not_recorded() -> None:
    """Neither is the checksum of the other version, nor one of memory that is freed."""
    engine = _Engine()
    swap = swap_of(engine, _Permits(), "drain")
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
    """What is to be loaded waited for an evaluation's load: of the adapter's base nothing is loaded, which the evaluation would sample from."""
    engine = _Engine()
    swap = swap_of(engine, _Permits(), "drain")
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
    engine = _Engine()
    swap = swap_of(engine, _Permits(), "auto")
    await swap.load(mirrored(0))
    for version, running, mode in (
        (1, [8], "drain"),
        (2, [8, 4096], "retract"),
        (3, [], "drain"),
        (4, [4096], "retract"),
    ):
        with contextlib.ExitStack() as requests:
            for longest in running:
                requests.enter_context(swap.servable.using(None, Sampling(max_new_tokens=longest)))
            await swap.load(mirrored(version))
        assert engine.mode == mode, version
