"""An engine that the worker starts: with the first weights, and again whenever it exits or serves unknown weights."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import structlog

from penstock.protocol.heartbeats import cpu_seconds
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.checks.check_weights import check_adapter
from penstock.rollout_service.engines.engine import SingleEngine, wait_until_it_answers
from penstock.rollout_service.engines.engine_client import EngineClient, ReleasesMemory, UpdateMode
from penstock.rollout_service.engines.engine_process import (
    NOTHING_MORE,
    EngineProcess,
    Inherited,
    LaunchCommand,
    PreparedProcess,
    process_cpu_seconds,
)
from penstock.rollout_service.errors import (
    EngineError,
    EngineMisconfigured,
    EngineRestartLimit,
    EngineUnreachable,
    WeightsNotApplied,
    WeightsUnusable,
)

log = structlog.get_logger("rollout.engine")

MAX_RESTARTS = 8  # more than one pack that crashes engines can cause before it is dead-lettered
RESTART_WINDOW_S = 600.0
FIRST_BACK_OFF_S = 1.0  # before the second restart within the window; doubles with each
_LONGEST_BACK_OFF_S = 30.0
CHECK_S = 2.0
_ADAPTER_ATTEMPTS = 3  # engine processes that may crash or hang during the load of one adapter


class ManagedEngine(SingleEngine):
    def __init__(
        self,
        command: LaunchCommand,
        connect: Callable[[str], EngineClient],
        *,
        log_file: Path,
        start_deadline_s: float,
        inherited: Inherited = NOTHING_MORE,
        context_length: int | None = None,
        prepare: Sequence[str] = (),
        kind: str = "",
    ) -> None:
        """``command`` returns the command line, ``connect`` a client of a URL; the first `load` starts the process.

        ``inherited`` is what its process has of the worker; ``context_length`` is the limit it is
        started with, where that is less than the model's; ``prepare`` is the command of a `PreparedProcess`;
        ``kind`` is the engine's, for the settings that an error names.
        """
        super().__init__()
        self._command = command
        self._connect = connect
        self._context_length = context_length
        self._log_file = log_file
        self._start_deadline_s = start_deadline_s
        self._prepare = prepare
        self._kind = kind
        self._prepared: PreparedProcess | None = None
        self._process: EngineProcess | None = None
        self._discarded = False  # killed by this worker, and not replaced yet
        self._restarts: collections.deque[float] = collections.deque(maxlen=MAX_RESTARTS)
        self._inherited = inherited
        self._starting = asyncio.Lock()
        self._may_start = asyncio.Event()  # cleared while its memory is released
        self._may_start.set()

    async def prepare(self) -> None:
        if self._prepare and self._process is None:
            self._prepared = await PreparedProcess.start(self._prepare, log=self._log_file, inherited=self._inherited)

    async def load(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None:
        """Serve ``version`` from a model folder, starting the engine if there is none.

        An engine that fails twice to confirm the version is killed and restarted from that folder. What it samples
        between the first failure and its confirmation is refused. Raises EngineUnreachable when the first start fails,
        WeightsUnusable when a later version can neither be loaded nor started from: then it serves the previous one
        again. Adapters of the weights before are unloaded.
        """
        self._wanted = (folder, version)
        is_new = version not in self.applied
        self.applied.add(version)
        if self._process is None:
            await self._start()
            return
        if self.is_released and await self._resume(folder, version):
            return
        process = self._process
        for _ in range(2):
            await self.ready.wait()
            if self._serving.base == version and self._process is not process:  # it was restarted with this version
                return
            try:
                await self.client.load_weights(folder, version, mode)
            except EngineError as err:
                self.client.mark_unverified(f"version {version} was not applied: {err}")
                log.warning("weights were not applied", policy_version=version, error=str(err))
            else:
                self._confirm(version)
                return
        self._discard()
        await self.ready.wait()
        if self._serving.base != version:
            if is_new:
                self.applied.discard(version)
            raise WeightsUnusable(
                f"the engine neither loaded version {version} nor started with it; see {self._log_file}"
            )

    async def release(self, mode: UpdateMode) -> None:
        """Free the device's memory; a server that does not is killed. No other is started before the next `load`."""
        self._may_start.clear()
        async with self._starting:  # a start that is under way ends first
            self.ready.clear()
            self.is_released = True
            if self._process is None:
                return
            try:
                if not isinstance(self.client, ReleasesMemory):
                    raise EngineMisconfigured(f"{type(self.client).__name__} cannot release memory")
                await self.client.release(mode)
            except EngineError as err:
                log.warning("engine did not release its memory; killing it", error=str(err))
                self._discard()
                await self._process.wait()

    async def _resume(self, folder: Path, version: PolicyVersion) -> bool:
        """Have the released server load a version; False if it must be restarted, which has begun."""
        self._may_start.set()
        self.is_released = False
        client = self.client
        try:
            await client.load_weights(folder, version)
        except EngineError as err:
            client.mark_unverified(f"version {version} was not applied: {err}")
            log.warning(
                "the released engine did not load weights; restarting it", policy_version=version, error=str(err)
            )
            self._discard()
            return False
        self._confirm(version)
        self.ready.set()
        return True

    async def load_adapter(self, folder: Path, version: PolicyVersion) -> None:
        """Serve ``version`` as an adapter of the weights that are served, next to all others; nothing pauses.

        Raises WeightsNotApplied when it is refused. An engine that crashes or hangs during the load is asked again
        after its restart, a few times.
        """
        is_new = version not in self.applied
        self.applied.add(version)
        try:
            await self._load_adapter(folder, version)
        except EngineError as err:
            if is_new:
                self.applied.discard(version)
            if isinstance(err, WeightsNotApplied):
                raise
            raise WeightsNotApplied(f"version {version} is not served: {err}") from None

    async def _load_adapter(self, folder: Path, version: PolicyVersion) -> None:
        if self._served is None:
            raise EngineUnreachable("it is an adapter, and no engine runs before the first weights")
        await asyncio.to_thread(check_adapter, folder, version, self._served[0])
        attempts = 0
        while True:
            await self.ready.wait()
            client, attempts = self.client, attempts + 1
            try:
                await client.load_adapter(folder, version)
            except WeightsNotApplied:
                raise
            except EngineError as err:
                if attempts == _ADAPTER_ATTEMPTS:
                    raise
                log.warning("adapter was not loaded", policy_version=version, error=str(err))
                await self.check_health()
            else:
                self._serving.confirm_adapter(version, folder)
                if client is self.client:  # else it was restarted during the load, without this adapter
                    return

    async def unload_adapter(self, version: PolicyVersion) -> None:
        self._serving.forget_adapter(version)
        if self.ready.is_set():
            await self.client.unload_adapter(version)

    async def check_health(self) -> None:
        """Kill the engine when it cannot generate one token; it gets no requests during the check."""
        if self._process is None or not self.ready.is_set():
            return  # a check or a restart is already under way
        client = self.client
        self.ready.clear()
        try:
            await client.served_version()
            await client.health()
        except EngineError as err:
            if client is self.client:  # not restarted during the check
                log.warning("engine does not answer; killing and restarting it", error=str(err))
                self._discard()
        else:
            if client is self.client and not self._discarded and not self.is_released:
                self.ready.set()

    async def run(self) -> None:
        """Restart the engine whenever it exits; raises EngineRestartLimit when that happens too often."""
        while self._process is not None:
            how = await self._watch(self._process)
            self.ready.clear()
            previous = self.client
            previous.mark_unverified("the engine process exited")
            await self._restart(how)
            await previous.close()

    async def stop(self) -> None:
        if self._prepared is not None:
            prepared, self._prepared = self._prepared, None
            await prepared.stop()
        if self._process is not None:
            self.ready.clear()
            process, self._process = self._process, None
            await process.stop()
            await self.client.close()

    def cpu_seconds(self) -> float:
        of_prepared = process_cpu_seconds(self._prepared.pid) if self._prepared else 0.0
        return cpu_seconds() + of_prepared + (self._process.cpu_seconds() if self._process else 0.0)

    async def _watch(self, process: EngineProcess) -> str:
        ending = asyncio.create_task(process.wait())
        try:
            while not ending.done():
                await asyncio.wait({ending}, timeout=CHECK_S)
                if self.ready.is_set() and not ending.done():
                    await self._check()
            return ending.result()
        finally:
            ending.cancel()

    async def _check(self) -> None:
        try:
            served = await self.client.served_version()
        except EngineError:
            return  # a server that does not answer is noticed by the requests to it
        if self.ready.is_set() and served != self._serving.base:
            log.error("the engine serves another version than it loaded", loaded=self._serving.base, served=served)
            self.client.mark_unverified(f"it loaded version {self._serving.base} but serves {served}")
            self._discard()

    def _discard(self) -> None:
        assert self._process is not None
        self.ready.clear()
        self._discarded = True
        self._process.kill()

    async def _restart(self, how: str) -> None:
        """Start it with the newest weights, or with those it served before when that fails."""
        while True:
            self._note_restart(how)
            try:
                await asyncio.sleep(self._back_off_s())
                await self._start()
            except EngineUnreachable as err:
                how = str(err)
                if self._served is not None and self._wanted != self._served:
                    log.warning("engine cannot start with the newest version", starting_with=self._served[1], error=how)
                    self._wanted = self._served
            else:
                return

    def _note_restart(self, how: str) -> None:
        now = time.monotonic()
        if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < RESTART_WINDOW_S:
            raise EngineRestartLimit(
                f"the engine exited {MAX_RESTARTS + 1} times within {now - self._restarts[0]:.0f} s; the last time {how}"
            )
        self._restarts.append(now)
        log.error("engine exited; restarting it", restarts=len(self._restarts), how=how)

    def _back_off_s(self) -> float:
        since = time.monotonic() - RESTART_WINDOW_S
        recent = sum(at > since for at in self._restarts)
        return 0.0 if recent < 2 else min(FIRST_BACK_OFF_S * 2 ** (recent - 2), _LONGEST_BACK_OFF_S)

    async def _start(self) -> None:
        while True:
            await self._may_start.wait()
            async with self._starting:
                if self._may_start.is_set():
                    await self._start_now()
                    return

    async def _start_now(self) -> None:
        assert self._wanted is not None
        folder, version = self._wanted
        try:
            process, url = await EngineProcess.start(
                self._command,
                folder,
                version,
                log=self._log_file,
                deadline_s=self._start_deadline_s,
                prepared=self._prepared,
                kind=self._kind,
                inherited=self._inherited,
            )
        finally:
            # Only now: its CPU seconds count at every moment, or the worker would seem to have restarted.
            self._prepared = None
        self._process, self._discarded = process, False
        self.client = self._connect(url)
        try:
            await _while_running(process, wait_until_it_answers(self.client, self._start_deadline_s, generating=True))
            await self.client.started_with(folder, version)
            served = await self.client.served_version()
            if served != version:
                raise EngineUnreachable(f"the engine was started with version {version} but reports version {served}")
            self.client.limits = ModelLimits.of(folder).within(self._context_length)
            if version == self._serving.base:
                await _while_running(process, self._reload_adapters())
        except EngineError as err:
            process.kill()
            await self.client.close()
            raise EngineUnreachable(f"{err}\n{await process.wait()}") from None
        except BaseException:
            process.kill()
            await self.client.close()
            raise
        process.started()
        self._confirm(version)
        log.info("engine is ready", url=url, policy_version=version, pid=process.pid)
        self.ready.set()

    async def _reload_adapters(self) -> None:
        for version, folder in self._serving.adapters.items():
            await self.client.load_adapter(folder, version)

    def _confirm(self, version: PolicyVersion) -> None:
        self._served = self._wanted
        self.client.mark_verified()
        self._serving.confirm(version)


async def _while_running(process: EngineProcess, answering: Coroutine[Any, Any, None]) -> None:
    first = asyncio.create_task(answering)
    ending = asyncio.create_task(process.wait())
    try:
        await asyncio.wait({first, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            raise EngineUnreachable("the engine ended before it answered")
        await first
    finally:
        first.cancel()
        ending.cancel()
        await asyncio.wait({first, ending})  # until the request has closed its connection
