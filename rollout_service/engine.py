"""The engine of this worker, whichever kind: which version it serves, and whether it is well.

A *managed* engine (`managed_engine.py`) is our child: when it dies or hangs, it is started again from the
newest weights it was given. An *attached* one (`attached_engine.py`) is somebody else's server at a URL:
when it was restarted and so forgot our weights, they are loaded again.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Protocol

from protocol.versions import PolicyVersion
from rollout_service.errors import EngineError, EngineUnreachable
from rollout_service.sglang_client import SglangClient

_POLL_S = 0.05


class Engine(Protocol):
    """What the worker needs of an engine."""

    client: SglangClient
    version: PolicyVersion | None  # last version it confirmed; None before the first
    applied: set[PolicyVersion]  # every version it ever confirmed to us
    ready: asyncio.Event  # set while it can be asked to generate

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        """Serve ``version`` from a model folder, starting the engine if there is none."""
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


async def wait_until_it_answers(client: SglangClient, deadline_s: float) -> None:
    """Ask until the engine answers; raises EngineUnreachable when it does not within the deadline."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            await client.served_version()
        except EngineError as err:
            if time.monotonic() > deadline:
                raise EngineUnreachable(f"no usable engine within {deadline_s:.0f} s: {err}") from None
            await asyncio.sleep(_POLL_S)
        else:
            return
