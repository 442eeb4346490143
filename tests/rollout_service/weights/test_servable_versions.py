"""Which versions requests name, which adapters are unloaded, and what a change of the model removes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.errors import EngineError, EngineRefused
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.weights.mirror import MirroredVersion
from penstock.rollout_service.weights.servable_versions import ServableVersions
from penstock.rollout_service.weights.weight_swap import WeightSwap

V = PolicyVersion


class _Engine:
    """Records its calls; `fails` is raised by the next load or unload of an adapter."""

    def __init__(self) -> None:
        self.version: PolicyVersion | None = None
        self.is_released = False
        self.calls: list[tuple[str, int | None]] = []
        self.fails: EngineError | None = None
        self.client = self

    async def load(self, folder: Path, version: PolicyVersion, mode: str = "drain") -> None:
        self.calls.append(("load", version))
        self.version = version

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


class _Permits:
    @contextlib.asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        yield


class _Worker:
    def __init__(self) -> None:
        self.engine = _Engine()
        self.servable = ServableVersions(self.engine)  # type: ignore[arg-type]
        self.swap = WeightSwap(
            engine=self.engine, servable=self.servable, semaphore=_Permits(), announcements=None, metrics=WorkerMetrics(), check_every=0,  # type: ignore[arg-type]
            update_mode="drain",
        )  # fmt: skip

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
