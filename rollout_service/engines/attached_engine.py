"""An engine that somebody else runs: a SGLang server at a URL."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import structlog

from penstock.protocol.activity import cpu_seconds
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.checks.check_adapter import check_adapter
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.engines.engine import engine_figures, wait_until_it_answers
from penstock.rollout_service.engines.read_reply import EngineChecksum
from penstock.rollout_service.engines.served_version import ServedVersion
from penstock.rollout_service.engines.server_check import TESTED_VERSIONS, context_length, is_tested, objections
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.update_mode import UpdateMode
from penstock.rollout_service.errors import (
    EngineError,
    EngineMisconfigured,
    EngineRefused,
    EngineUnreachable,
    WeightsNotApplied,
)

log = structlog.get_logger("rollout.engine")

PATIENCE_S = 600.0  # how long the server may be away before the worker gives up
_POLL_S = 2.0
_LOAD_ATTEMPTS = 2


class AttachedEngine:
    """A server at a URL, which must see the worker's cache folder under the same path.

    One worker for each server: a second one would swap the weights under the first one's requests.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str,
        request_deadline_s: float,
        start_deadline_s: float,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Nothing is sent before the first `load`."""
        self._serving = ServedVersion()
        self.applied: set[PolicyVersion] = set()
        self.ready = asyncio.Event()
        self.client = SglangClient(url, api_key=api_key, request_deadline_s=request_deadline_s)
        self._start_deadline_s = start_deadline_s
        self._patience_s = patience_s
        self._wanted: tuple[Path, PolicyVersion] | None = None
        self._loading = asyncio.Lock()
        self._seen = time.monotonic()

    @property
    def version(self) -> PolicyVersion | None:
        """The newest version it confirmed, as weights of its own or as an adapter; None before the first."""
        return self._serving.value

    async def reaches(self, version: PolicyVersion) -> None:
        """Wait until it serves ``version`` or a newer one."""
        await self._serving.reaches(version)

    async def load(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None:
        """Have the server serve ``version`` from a folder, waiting for the server when it is not there yet.

        Raises WeightsNotApplied when it does not confirm the version: what it serves is then unknown. Adapters go: they
        change the weights before, and no others.
        """
        self._wanted = (folder, version)
        async with self._loading:
            await self._load(mode)

    async def load_adapter(self, folder: Path, version: PolicyVersion) -> None:
        """Have the server serve ``version`` as an adapter of the weights it serves, beside all others; nothing pauses.

        Raises WeightsNotApplied when it refuses, EngineUnreachable when it is away.
        """
        async with self._loading:
            if self._wanted is None:
                raise WeightsNotApplied(
                    f"version {version} is an adapter, and {self.client.url} was given no weights yet"
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
        """Let a version's adapter go once no request uses it; one that is not loaded is fine."""
        self._serving.forget_adapter(version)
        await self.client.unload_adapter(version)

    async def _inspect(self, folder: Path) -> None:
        """Refuse a server that was started in a way the contract does not allow; note its limits."""
        info: dict[str, Any] = {}
        with contextlib.suppress(EngineRefused):  # a server without that page
            info = await self.client.server_info()
        if reasons := objections(info):
            raise EngineMisconfigured(f"{self.client.url} was started with {'; '.join(reasons)}; start it without")
        if not is_tested(info):
            log.warning("SGLang of another version than tested", version=info["version"], tested=TESTED_VERSIONS)
        self.client.limits = ModelLimits.of(folder).within(context_length(info))
        if info.get("enable_lora") and self._serving.base is None:
            await self.client.drop_adapters()  # of a worker before this one

    async def weights_checksum(self) -> EngineChecksum | None:
        """Return what the engine says its weights are; None when it cannot say."""
        return await self.client.weights_checksum()

    async def suspect(self) -> None:
        """Look at once whether the server still serves what it was given."""
        await self._look()

    async def run(self) -> None:
        """Watch the server; raises EngineUnreachable when it is away for too long."""
        while True:
            await asyncio.sleep(_POLL_S)
            problem = await self._look()
            if problem is not None and time.monotonic() - self._seen > self._patience_s:
                raise EngineUnreachable(f"{problem}; gave up after {self._patience_s:.0f} s")

    async def stop(self) -> None:
        """Drop the connections; the server is not ours to end."""
        await self.client.close()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of this process; the server's are not ours to know."""
        return cpu_seconds()

    async def figures(self) -> dict[str, float]:
        """Return what the engine's metrics page says, by the worker's names."""
        return await engine_figures(self.client) if self.ready.is_set() else {}

    async def _look(self) -> EngineError | None:
        """Give the server its weights again when it lost them; returns why it cannot be used, if it cannot."""
        async with self._loading:
            try:
                served = await self.client.served_version()
                if served != self._serving.base:
                    log.warning("the engine forgot its weights, loading them again", url=self.client.url)
                    self.client.distrust(f"it was given version {self._serving.base} but serves {served}")
                    self.ready.clear()
                    await self._load("drain")
                await self._give_lost_adapters_again()
            except (WeightsNotApplied, EngineMisconfigured):
                raise
            except EngineError as err:
                if self.ready.is_set():
                    log.warning("waiting for the engine", url=self.client.url, error=str(err))
                self.ready.clear()
                return err
            self._seen = time.monotonic()
            self.ready.set()
            return None

    async def _give_lost_adapters_again(self) -> None:
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
                self.client.distrust(f"version {version} was not applied: {err}")
                if attempt == _LOAD_ATTEMPTS:
                    raise
                log.warning("weights were not applied", policy_version=version, error=str(err))
            else:
                break
        self.client.trust()
        self.ready.set()
        self._serving.confirm(version)
