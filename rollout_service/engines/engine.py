"""The engine of this worker, whichever kind: which version it serves, and whether it is well.

A *managed* engine (`managed_engine.py`) is our child: when it dies or hangs, it is started again from the
newest weights it was given. An *attached* one (`attached_engine.py`) is somebody else's server at a URL:
when it was restarted and so forgot our weights, they are loaded again. Several of either kind act as one in
`engine_pool.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from penstock.protocol.facts import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.engine_metrics import read_figures
from penstock.rollout_service.engines.read_reply import Completion, EngineChecksum
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.update_mode import UpdateMode
from penstock.rollout_service.errors import EngineError, EngineUnreachable

_POLL_S = 0.05


class Generates(Protocol):
    """Who is asked for completions: one engine's client, or whoever chooses among several."""

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int, adapter: PolicyVersion | None = None
    ) -> list[list[Completion]]:
        """Sample ``n`` completions of every prompt, by a version's adapter if named; see `SglangClient.generate`."""
        ...


class Readiness(Protocol):
    """What of an `asyncio.Event` others may use."""

    def is_set(self) -> bool:
        """Say whether it can be asked to generate now."""
        ...

    async def wait(self) -> bool:
        """Wait until it can be."""
        ...


class Engine(Protocol):
    """What the worker needs of an engine."""

    @property
    def client(self) -> Generates:
        """Whom to ask now; another one after a restart."""
        ...

    @property
    def version(self) -> PolicyVersion | None:
        """The last version it confirmed, or the newest of its adapters; None before the first."""
        ...

    @property
    def applied(self) -> set[PolicyVersion]:
        """Every version it took, or is about to take: its tokens may be here before its load is confirmed to us."""
        ...

    @property
    def ready(self) -> Readiness:
        """Set while it can be asked to generate."""
        ...

    async def load(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None:
        """Serve ``version`` from a model folder, starting the engine if there is none.

        ``mode`` says what becomes of what runs; see `update_mode.py`.
        """
        ...

    async def reaches(self, version: PolicyVersion) -> None:
        """Wait until it can be asked for samples of ``version`` or a newer one; of several engines one suffices."""
        ...

    async def load_adapter(self, folder: Path, version: PolicyVersion) -> None:
        """Serve ``version``, an adapter in PEFT's format upon the weights of the last `load`, beside all others.

        Nothing pauses. Raises WeightsNotApplied when it is refused, or not listed as loaded afterwards: then nothing
        has changed.
        """
        ...

    async def unload_adapter(self, version: PolicyVersion) -> None:
        """Let a version's adapter go once no request uses it; one that is not loaded is fine."""
        ...

    async def weights_checksum(self) -> EngineChecksum | None:
        """Return what it says its weights are; None when it cannot say."""
        ...

    async def suspect(self) -> None:
        """Look after an engine that has just failed a request."""
        ...

    async def run(self) -> None:
        """Keep it well for as long as the worker lives."""
        ...

    async def stop(self) -> None:
        """End what is ours of it."""
        ...

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of this process and of the engine, as far as it is ours."""
        ...

    async def figures(self) -> dict[str, float]:
        """Return what its metrics page says, by the worker's names; empty when it says nothing."""
        ...


async def wait_until_it_answers(client: SglangClient, deadline_s: float, *, generating: bool = False) -> None:
    """Ask until the engine answers; raises EngineUnreachable when it does not within the deadline.

    A server may name its version long before it can generate: ``generating`` waits for that too. A server that
    somebody paused never does.
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


async def engine_figures(client: SglangClient) -> dict[str, float]:
    """Read an engine's metrics page; empty when it has none, or does not answer now."""
    try:
        return read_figures(await client.metrics())
    except EngineError:
        return {}
