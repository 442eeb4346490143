"""The engine of a worker, of whichever kind: what it serves and whether it can generate.

A *managed* engine (`managed_engine.py`) is a child process: when it exits or hangs, it is restarted with the newest
weights it received. An *attached* one (`attached_engine.py`) is a server at a URL that the worker did not start: when
it was restarted and lost the weights, they are loaded again. Several of either act as one in `engine_pool.py`.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import structlog

from penstock.protocol.versions import PolicyVersion, is_newer, newest_of
from penstock.rollout_service.engines.completion import EngineChecksum
from penstock.rollout_service.engines.engine_client import EngineClient, Generates, UpdateMode
from penstock.rollout_service.engines.weight_changes import NoChanges, TakesChanges, WeightChanges
from penstock.rollout_service.errors import EngineError, EngineUnreachable

log = structlog.get_logger("rollout.engine")
_POLL_S = 0.05


class Readiness(Protocol):
    """The part of `asyncio.Event` that others may use."""

    def is_set(self) -> bool: ...

    async def wait(self) -> bool: ...


class Engine(TakesChanges, Protocol):
    """After any doubt about a patch it loads the folder it had last. A restart does so too, until `keep`; until then `applied` lacks the version."""

    @property
    def client(self) -> Generates:
        """The client to ask now; another one after a restart."""
        ...

    @property
    def version(self) -> PolicyVersion | None:
        """The last version it confirmed, or the newest of its adapters; None before the first."""
        ...

    @property
    def applied(self) -> set[PolicyVersion]:
        """Every version it loaded or is loading: its tokens may arrive before the load is confirmed."""
        ...

    @property
    def ready(self) -> Readiness:
        """Set while it can be asked to generate."""
        ...

    @property
    def num_servers(self) -> int: ...

    async def prepare(self) -> None:
        """Start what needs no weights, so that the first `load` waits less; returns at once."""
        ...

    async def load(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None:
        """Serve ``version`` from a model folder, starting the engine if there is none.

        ``mode`` is what happens to running sequences; see `engine_client.py`.
        """
        ...

    @property
    def withdrawn_at(self) -> float:
        """When `withdraw` ended last, by `time.monotonic`: what had begun by then may be sampled by weights that nobody has verified."""
        ...

    async def keep(self, folder: Path, version: PolicyVersion) -> bool:
        """Load this folder after a restart from now on: it holds the patched version, verified. False where another is served; not during a load."""
        ...

    async def withdraw(self, version: PolicyVersion, reason: str) -> None:
        """Load the last folder again if ``version`` was patched in since, and refuse what that is sampling."""
        ...

    async def wait_for_version(self, version: PolicyVersion) -> None:
        """Wait until it can be asked for samples of ``version`` or a newer one; of several engines one suffices."""
        ...

    async def load_adapter(self, folder: Path, version: PolicyVersion) -> None:
        """Serve ``version``, an adapter in PEFT's format of the weights of the last `load`, next to all others.

        Nothing pauses. Raises WeightsNotApplied when it is refused, or not listed as loaded afterwards: then nothing
        has changed.
        """
        ...

    async def unload_adapter(self, version: PolicyVersion) -> None:
        """Unload a version's adapter once no request uses it; one that is not loaded is fine."""
        ...

    @property
    def is_released(self) -> bool:
        """True from `release` to the next `load`: it is not ready, and its device's memory is free."""
        ...

    async def release(self, mode: UpdateMode) -> None:
        """Free the device's memory, or end the server; ``mode`` is what happens to running sequences, as `ReleasesMemory` says.

        The next `load` resumes it with that version, and with the adapters of its weights.
        """
        ...

    async def weights_checksum(self) -> EngineChecksum | None:
        """Return the engine's checksum of its weights; None when it reports none."""
        ...

    async def check_health(self) -> None:
        """Check the health of an engine that has just failed a request."""
        ...

    async def run(self) -> None:
        """Supervise the engine until the worker stops."""
        ...

    async def stop(self) -> None:
        """Stop the processes and close the connections of this worker."""
        ...

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of this process and of the engine processes that it started."""
        ...

    async def figures(self) -> dict[str, float]:
        """Return the engine's metrics by the worker's names; empty when it reports none."""
        ...


async def wait_until_it_answers(client: EngineClient, deadline_s: float, *, generating: bool = False) -> None:
    """Poll until the engine answers; raises EngineUnreachable when it does not within the deadline.

    A server may name its version long before it can generate: ``generating`` waits for that too. A server that was
    paused never generates.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            await client.served_version()
            if generating:
                await client.health()
        except EngineError as err:
            if time.monotonic() > deadline:
                raise EngineUnreachable(f"no usable engine within {deadline_s:.0f} s: {err}") from None
            await asyncio.sleep(_POLL_S)
        else:
            return


async def first_of(*waits: Coroutine[Any, Any, object], timeout_s: float | None = None) -> None:
    """Wait until one of several has come, or ``timeout_s`` has passed; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class ServedVersion:
    """For one event loop. Kept across restarts of the engine: a new process loads what is recorded here."""

    def __init__(self) -> None:
        self.base: PolicyVersion | None = None  # its base weights
        self._adapters: dict[PolicyVersion, Path] = {}
        self._changed = asyncio.Event()  # replaced by a fresh one at every change

    @property
    def value(self) -> PolicyVersion | None:
        return newest_of([self.base, *self._adapters])

    @property
    def adapters(self) -> Mapping[PolicyVersion, Path]:
        return dict(self._adapters)

    def confirm(self, version: PolicyVersion) -> None:
        """Note that the engine's base weights are ``version``; it may be older than before.

        Adapters of other base weights are forgotten.
        """
        if version != self.base:
            self._adapters.clear()
        self.base = version
        self._notify()

    def confirm_adapter(self, version: PolicyVersion, folder: Path) -> None:
        self._adapters[version] = folder
        self._notify()

    def forget_adapter(self, version: PolicyVersion) -> None:
        self._adapters.pop(version, None)

    async def wait_for_version(self, version: PolicyVersion) -> None:
        while is_newer(version, self.value):
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class SingleEngine(ABC):
    """What a managed and an attached engine share: one server, its client, and what it confirmed to serve."""

    client: EngineClient
    num_servers = 1

    def __init__(self) -> None:
        self._serving = ServedVersion()
        self._wanted: tuple[Path, PolicyVersion] | None = None  # what it is to load, or loaded last
        self._served: tuple[Path, PolicyVersion] | None = None  # the folder whose version it confirmed last
        self.applied: set[PolicyVersion] = set()
        self.ready = asyncio.Event()
        self.is_released = False
        self.withdrawn_at = -math.inf

    @property
    def version(self) -> PolicyVersion | None:
        return self._serving.value

    async def wait_for_version(self, version: PolicyVersion) -> None:
        await self._serving.wait_for_version(version)

    @property
    def max_changed_share(self) -> float:
        client = self.client
        return client.max_changed_share if self.ready.is_set() and isinstance(client, TakesChanges) else 0.0

    async def stage(self, changes: WeightChanges | NoChanges) -> bool:
        client = self.client
        return self.ready.is_set() and isinstance(client, TakesChanges) and await client.stage(changes)

    @abstractmethod
    async def load(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None: ...

    async def patch(self, version: PolicyVersion, mode: UpdateMode = "drain") -> bool:
        if self.version == version:
            return True
        if not self.ready.is_set() or not isinstance(self.client, TakesChanges):
            return False
        self.applied.discard(version)
        try:
            if not await self.client.patch(version, mode):
                return False
        except EngineError as err:
            await self._load_again(f"the patch to version {version} failed: {err}")
            return False
        self._serving.confirm(version)
        return True

    async def keep(self, folder: Path, version: PolicyVersion) -> bool:
        self.applied.add(version)
        if not self.is_released:
            await self.ready.wait()
        if self.version != version:
            return False
        self._wanted = self._served = (folder, version)
        await self.client.started_with(folder, version)
        return True

    async def withdraw(self, version: PolicyVersion, reason: str) -> None:
        if self.version == version and self._wanted is not None and self._wanted[1] != version:
            await self.stage("withdrawn")
            await self._load_again(reason)
        self.withdrawn_at = time.monotonic()

    async def _load_again(self, reason: str) -> None:
        assert self._wanted is not None
        self.client.mark_unverified(reason)
        log.error("loading the last folder again", policy_version=self._wanted[1], reason=reason)
        await self.load(*self._wanted, "abort")

    async def weights_checksum(self) -> EngineChecksum | None:
        return await self.client.weights_checksum()

    async def figures(self) -> dict[str, float]:
        if not self.ready.is_set():
            return {}
        try:
            return await self.client.metrics()
        except EngineError:
            return {}
