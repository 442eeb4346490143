"""A swap takes a permit only where engines pause for long."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.weights import weight_swap
from penstock.rollout_service.weights.mirror import MirroredVersion
from penstock.rollout_service.weights.servable_versions import ServableVersions
from penstock.rollout_service.weights.weight_swap import WeightSwap


class _Engine:
    version: PolicyVersion | None = None
    mode = "none"
    is_released = False

    async def load(self, folder: Path, version: PolicyVersion, mode: str = "drain") -> None:
        self.version, self.mode = version, mode


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
