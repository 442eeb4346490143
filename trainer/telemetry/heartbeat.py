"""The trainer's heartbeat: a record in the live bucket, written every second by a separate thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import structlog

from penstock.protocol import heartbeats, streams
from penstock.protocol.errors import BusUnreachable, MissingStream
from penstock.protocol.facts import Heartbeat, encode
from penstock.protocol.heartbeats import Activity, cpu_seconds, thread_cpu_seconds
from penstock.protocol.metrics.gpu import GpuSampler
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion

log = structlog.get_logger("trainer.telemetry.heartbeat")

SERVICE_ID = "trainer"


class HeartbeatWriter:
    def __init__(
        self, *, bus: Bus, run_id: str, activity: Activity, gpus: GpuSampler, clock: Callable[[], float]
    ) -> None:
        self._bucket = bus.key_value(streams.live_bucket(run_id).bucket).wait()
        self._activity = activity
        self._gpus = gpus
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self.version: PolicyVersion | None = None
        self.figures: dict[str, float] = {}
        self.newest: Heartbeat | None = None
        self.metrics_url: str | None = None

    def __enter__(self) -> HeartbeatWriter:
        self._thread.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)
        if failure is None:
            with contextlib.suppress(BusUnreachable, MissingStream):
                self.publish(has_exited=True)

    def publish(self, *, has_exited: bool = False) -> None:
        busy_s, idle_s = self._activity.totals()
        record = Heartbeat(
            role="trainer",
            service_id=SERVICE_ID,
            at=self._clock(),
            state=heartbeats.EXITED if has_exited else self._activity.state,
            version=self.version,
            busy_s=busy_s,
            idle_s=idle_s,
            cpu_s=cpu_seconds(),
            figures={**self.figures, **self._gpus.figures(), **thread_cpu_seconds()},
            period_s=heartbeats.PERIOD_S,
            metrics_url=self.metrics_url,
        )
        self.newest = record
        expiry_s = heartbeats.EXITED_TTL_S if has_exited else heartbeats.expires_after_s(heartbeats.PERIOD_S)
        self._bucket.put(streams.heartbeat_key("trainer", SERVICE_ID), encode(record), ttl_s=expiry_s).wait()

    def _work(self) -> None:
        while True:
            try:
                self.publish()
            except (BusUnreachable, MissingStream) as err:  # the bucket is missing while it is made again
                log.debug("heartbeat not published", error=str(err))
            if self._stop.wait(heartbeats.PERIOD_S):
                return
