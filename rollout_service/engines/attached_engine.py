"""An engine at a URL: a server that the worker did not start."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from penstock.protocol.heartbeats import cpu_seconds
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.checks.check_weights import check_adapter
from penstock.rollout_service.engines.engine import SingleEngine, wait_until_it_answers
from penstock.rollout_service.engines.engine_client import EngineClient, UpdateMode
from penstock.rollout_service.errors import EngineError, EngineMisconfigured, EngineUnreachable, WeightsNotApplied

log = structlog.get_logger("rollout.engine")

UNREACHABLE_LIMIT_S = 600.0  # then the worker ends with the error
_POLL_S = 2.0
_LOAD_ATTEMPTS = 2


class AttachedEngine(SingleEngine):
    """A server at a URL, which must see the worker's cache folder under the same path.

    One worker for each server: a second one would replace the weights while requests of the first one run.
    """

    def __init__(self, client: EngineClient, *, start_deadline_s: float) -> None:
        super().__init__()
        self.client = client
        self._start_deadline_s = start_deadline_s
        self._loading = asyncio.Lock()
        self._answered_at = time.monotonic()

    async def prepare(self) -> None:
        """Do nothing: the server runs."""

    async def load(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None:
        """Have the server serve ``version`` from a folder, waiting for a server that does not answer yet.

        Raises WeightsNotApplied when it does not confirm the version: its weights are then unknown. Adapters of the
        weights before are unloaded.
        """
        self._wanted = (folder, version)
        async with self._loading:
            await self._load(mode)

    async def load_adapter(self, folder: Path, version: PolicyVersion) -> None:
        """Have the server serve ``version`` as an adapter of the weights it serves, next to all others; nothing pauses.

        Raises WeightsNotApplied when it refuses, EngineUnreachable when it does not answer.
        """
        async with self._loading:
            if self._wanted is None:
                raise WeightsNotApplied(
                    f"version {version} is an adapter, but {self.client.url} has loaded no weights yet"
                )
            is_new = version not in self.applied
            self.applied.add(version)
            try:
                await asyncio.to_thread(check_adapter, folder, version, self._wanted[0])
                await self.client.load_adapter(folder, version)
            except EngineError:
                if is_new:
                    self.applied.discard(version)
                raise
            self._serving.confirm_adapter(version, folder)

    async def unload_adapter(self, version: PolicyVersion) -> None:
        self._serving.forget_adapter(version)
        await self.client.unload_adapter(version)

    async def _inspect(self, folder: Path) -> None:
        report = await self.client.inspect()
        if report.objections:
            raise EngineMisconfigured(
                f"{self.client.url} was started with {'; '.join(report.objections)}; restart it without"
            )
        if report.untested_version:
            log.warning("the server's version was never tested", url=self.client.url, version=report.untested_version)
        self.client.limits = ModelLimits.of(folder).within(report.context_tokens)
        if report.takes_adapters and self._serving.base is None:
            await self.client.drop_adapters()  # of a previous worker

    async def release(self, mode: UpdateMode) -> None:
        """Raise EngineMisconfigured: the server's memory outlives this worker, and nothing would free it after a crash."""
        raise EngineMisconfigured(f"{self.client.url} was not started by this worker, and cannot share a GPU in turns")

    async def check_health(self) -> None:
        await self._check()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            problem = await self._check()
            if problem is not None and time.monotonic() - self._answered_at > UNREACHABLE_LIMIT_S:
                raise EngineUnreachable(f"{problem}; no answer for {UNREACHABLE_LIMIT_S:.0f} s")

    async def stop(self) -> None:
        await self.client.close()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of this process; those of the server are unknown."""
        return cpu_seconds()

    async def _check(self) -> EngineError | None:
        async with self._loading:
            try:
                served = await self.client.served_version()
                if served != self._serving.base:
                    log.warning(
                        "the engine serves other weights than it loaded; loading them again",
                        url=self.client.url,
                        served=served,
                    )
                    self.client.mark_unverified(f"it loaded version {self._serving.base} but serves {served}")
                    self.ready.clear()
                    await self._load("drain")
                await self._reload_lost_adapters()
            except (WeightsNotApplied, EngineMisconfigured):
                raise
            except EngineError as err:
                if self.ready.is_set():
                    log.warning("waiting for the engine", url=self.client.url, error=str(err))
                self.ready.clear()
                return err
            self._answered_at = time.monotonic()
            self.ready.set()
            return None

    async def _reload_lost_adapters(self) -> None:
        if wanted := self._serving.adapters:
            await self.client.forget_lost_adapters()
            for version, folder in wanted.items():
                await self.client.load_adapter(folder, version)

    async def _load(self, mode: UpdateMode) -> None:
        assert self._wanted is not None
        folder, version = self._wanted
        self.applied.add(version)
        for attempt in range(1, _LOAD_ATTEMPTS + 1):
            await wait_until_it_answers(self.client, self._start_deadline_s)
            await self._inspect(folder)
            try:
                await self.client.load_weights(folder, version, mode)
            except EngineError as err:
                self.client.mark_unverified(f"version {version} was not applied: {err}")
                if attempt == _LOAD_ATTEMPTS:
                    raise
                log.warning("weights were not applied", policy_version=version, error=str(err))
            else:
                break
        self.client.mark_verified()
        self.ready.set()
        self._serving.confirm(version)
