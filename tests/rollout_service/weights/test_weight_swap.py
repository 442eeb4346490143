"""A swap takes a turn among the workers only where engines stand still for long."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.metrics import Figures
from penstock.rollout_service.weights import weight_swap
from penstock.rollout_service.weights.mirror import MirroredVersion
from penstock.rollout_service.weights.servable_versions import ServableVersions
from penstock.rollout_service.weights.weight_swap import WeightSwap


class _Engine:
    """Serves whatever it is told at once."""

    version: PolicyVersion | None = None

    async def load(self, folder: Path, version: PolicyVersion, mode: str = "drain") -> None:
        self.version = version


class _Turns:
    """Counts the turns taken."""

    num_taken = 0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        self.num_taken += 1
        yield


def mirrored(version: int) -> MirroredVersion:
    return MirroredVersion(PolicyVersion(version), Path(f"v{version}"), num_bytes=1, fetch_s=0.0, checksum="c")


@pytest.mark.parametrize(("worth_s", "expected"), [(60.0, [0, 1, 1, 1]), (-1.0, [0, 1, 2, 3])])
async def test_only_long_pauses_take_turns(
    worth_s: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first load pauses nobody, the second may be long; after that the pause before says what is worth it."""
    monkeypatch.setattr(weight_swap, "WORTH_A_TURN_S", worth_s)
    semaphore, engine = _Turns(), _Engine()
    swap = WeightSwap(
        engine=engine,  # type: ignore[arg-type]
        servable=ServableVersions(engine),  # type: ignore[arg-type]
        semaphore=semaphore,
        announcements=None,
        figures=Figures(),
        check_every=0,
        update_mode="drain",  # type: ignore[arg-type]
    )
    taken = []
    for version in range(4):
        swapped = await swap.load(mirrored(version))
        assert swapped is not None
        assert swapped.previous == (version - 1 if version else None)
        taken.append(semaphore.num_taken)
    assert taken == expected
    assert engine.version == 3
    assert await swap.load(mirrored(3)) is None
