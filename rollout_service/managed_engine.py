"""An engine that is our child: started on the first weights, and again whenever it ends."""

from __future__ import annotations

import asyncio
import collections
import time
from pathlib import Path

import structlog

from protocol.activity import cpu_seconds
from protocol.versions import PolicyVersion
from rollout_service.engine import wait_until_it_answers
from rollout_service.engine_process import EngineProcess, LaunchCommand, process_cpu_seconds
from rollout_service.errors import EngineError, EngineKeepsDying, EngineUnreachable, WeightsNotApplied
from rollout_service.sglang_client import SglangClient

log = structlog.get_logger("rollout.engine")

MAX_RESTARTS = 8  # more than one poisonous pack can cause before it goes to the dead letters
RESTART_WINDOW_S = 600.0


class ManagedEngine:
    """An engine that is our child process."""

    client: SglangClient

    def __init__(
        self, command: LaunchCommand, *, log_file: Path, request_deadline_s: float, start_deadline_s: float
    ) -> None:
        """``command`` makes the command line; nothing is started before the first `load`."""
        self.version: PolicyVersion | None = None
        self.applied: set[PolicyVersion] = set()
        self.ready = asyncio.Event()
        self._command = command
        self._log_file = log_file
        self._request_deadline_s = request_deadline_s
        self._start_deadline_s = start_deadline_s
        self._process: EngineProcess | None = None
        self._wanted: tuple[Path, PolicyVersion] | None = None
        self._restarts: collections.deque[float] = collections.deque(maxlen=MAX_RESTARTS)

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        """Serve ``version`` from a model folder, starting the engine if there is none.

        An engine that does not confirm the version twice is not believed any more: it is killed and
        started anew from that folder. Raises EngineUnreachable when the first start fails.
        """
        self._wanted = (folder, version)
        if self._process is None:
            await self._start()
            return
        for _ in range(2):
            await self.ready.wait()
            if self.version == version:  # restarted from it meanwhile
                return
            try:
                await self.client.load_weights(folder, version)
            except EngineError as err:
                log.warning("weights were not applied", policy_version=version, error=str(err))
            else:
                self._confirm(version)
                return
        self.ready.clear()
        self._process.kill()
        await self.ready.wait()
        if self.version != version:
            raise WeightsNotApplied(f"the engine was restarted for version {version} but serves {self.version}")

    async def suspect(self) -> None:
        """Kill the engine when it does not even answer a question that costs nothing."""
        if self._process is not None and self.ready.is_set():
            try:
                await self.client.served_version()
            except EngineError as err:
                log.warning("the engine does not answer; it is killed and started again", error=str(err))
                self.ready.clear()
                self._process.kill()

    async def run(self) -> None:
        """Restart the engine whenever it ends; raises EngineKeepsDying when that happens too often."""
        while self._process is not None:
            how = await self._process.wait()
            self.ready.clear()
            now = time.monotonic()
            if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < RESTART_WINDOW_S:
                raise EngineKeepsDying(
                    f"the engine died {MAX_RESTARTS + 1} times within {now - self._restarts[0]:.0f} s; the last time {how}"
                )
            self._restarts.append(now)
            log.error("engine died, restarting it", restarts=len(self._restarts), how=how)
            dead = self.client
            try:
                await self._start()
            except EngineUnreachable as err:
                log.warning("engine did not start", error=str(err))  # the next round counts it
            await dead.close()

    async def stop(self) -> None:
        """End the engine."""
        if self._process is not None:
            self.ready.clear()
            process, self._process = self._process, None
            await process.stop()
            await self.client.close()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of this process and of its engines, past and present."""
        return cpu_seconds() + (process_cpu_seconds(self._process.pid) if self._process else 0.0)

    async def _start(self) -> None:
        assert self._wanted is not None
        folder, version = self._wanted
        process, url = await EngineProcess.start(
            self._command, folder, version, log=self._log_file, deadline_s=self._start_deadline_s
        )
        self._process = process
        self.client = SglangClient(url, request_deadline_s=self._request_deadline_s)
        try:
            await wait_until_it_answers(self.client, self._start_deadline_s)
            served = await self.client.served_version()
            if served != version:
                raise EngineUnreachable(f"the engine was started with version {version} but says it serves {served}")
        except BaseException:
            process.kill()
            raise
        self._confirm(version)
        log.info("engine is ready", url=url, policy_version=version, pid=process.pid)
        self.ready.set()

    def _confirm(self, version: PolicyVersion) -> None:
        self.version = version
        self.applied.add(version)
