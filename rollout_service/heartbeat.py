"""Write the worker's heartbeat to the live bucket, and serve its newest one as Prometheus metrics.

The heartbeat has the worker's version, state, busy time and metrics. It is written each second in a small run; the more workers
there are, the less often (`protocol/heartbeats.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import structlog

from penstock.protocol import heartbeats, streams
from penstock.protocol.config.shared_sections import MetricsSettings
from penstock.protocol.errors import BusUnreachable, MissingStream
from penstock.protocol.facts import Heartbeat, encode
from penstock.protocol.heartbeats import ENGINE_CPU, Activity, cpu_seconds, thread_cpu_seconds
from penstock.protocol.metrics.exporter import NO_CERTIFICATES, NO_FOLDERS, Exporter
from penstock.protocol.metrics.server import MetricsServer
from penstock.protocol.metrics.table import Samples
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.shared_segments import MISSES, PEER_MISSES, STORES
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.engines.weight_changes import LOAD_WAYS

log = structlog.get_logger("rollout.heartbeat")

_ENGINE_PERIOD_S = 5.0
_EXIT_DEADLINE_S = 2.0
_COUNT_EVERY = 10  # heartbeats: how often the services are counted
# Metrics of the heartbeat: key -> name in the table and labels.
_FIGURES: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "packs_announced": ("penstock_rollout_packs_total", {"outcome": "announced"}),
        "packs_given_back": ("penstock_rollout_packs_total", {"outcome": "requeued"}),
        "packs_distrusted": ("penstock_rollout_packs_unverified_total", {}),
        "groups_generated": ("penstock_groups_total", {"outcome": "generated", "reason": ""}),
        "groups_dead_lettered": ("penstock_groups_total", {"outcome": "dead_lettered", "reason": ""}),
        "tokens_generated": ("penstock_tokens_total", {"outcome": "generated"}),
        "completions_abandoned": ("penstock_rollout_abandoned_completions_total", {}),
        "tokens_abandoned": ("penstock_tokens_total", {"outcome": "abandoned"}),
        "weights_applied": ("penstock_rollout_weights_applied_total", {}),
        **{
            heartbeats.apply_figure(stage): ("penstock_rollout_weights_seconds_total", {"stage": stage})
            for stage in heartbeats.APPLY_STAGES
        },
        **{f"weights_bytes_{store}": ("penstock_rollout_weights_bytes_total", {"store": store}) for store in STORES},
        **{f"weights_misses_{why}": ("penstock_rollout_shared_misses_total", {"reason": why}) for why in MISSES},
        **{
            f"weights_peer_misses_{why}": ("penstock_rollout_peer_misses_total", {"reason": why}) for why in PEER_MISSES
        },
        "episodes_stored": ("penstock_rollout_episodes_total", {"outcome": "stored"}),
        "episodes_not_stored": ("penstock_rollout_episodes_total", {"outcome": "not_stored"}),
        "episodes_continued": ("penstock_rollout_episodes_total", {"outcome": "continued"}),
        "turns": ("penstock_device_turns_total", {"role": "engine"}),
        "turn_wait_s": ("penstock_device_turn_seconds_total", {"role": "engine", "phase": "wait"}),
        "turn_move_s": ("penstock_device_turn_seconds_total", {"role": "engine", "phase": "move"}),
        "tokens_per_s": ("penstock_rollout_tokens_per_second", {}),
        "packs_held": ("penstock_rollout_packs_held", {}),
        "engine_running": ("penstock_engine_running", {}),
        "engine_slots": ("penstock_engine_slots", {}),
        "engine_queued": ("penstock_engine_queued", {}),
        "engine_paused": ("penstock_engine_paused", {}),
        "engine_tokens_per_s": ("penstock_engine_tokens_per_second", {}),
        "engine_generated_tokens": ("penstock_engine_generated_tokens_total", {}),
        "engine_prompt_tokens": ("penstock_engine_prompt_tokens_total", {}),
        "engine_cached_tokens": ("penstock_engine_cached_tokens_total", {}),
        "engine_aborted": ("penstock_engine_aborted_total", {}),
        "engine_retracted": ("penstock_engine_retracted_total", {}),
        **{f"engine_loads_{way}": ("penstock_engine_weight_loads_total", {"way": way}) for way in LOAD_WAYS},
        "engine_patch_bytes": ("penstock_engine_patch_bytes_total", {}),
        "engine_kv_usage": ("penstock_engine_kv_cache_ratio", {}),
        "engine_cache_hit_rate": ("penstock_engine_cache_hit_ratio", {}),
    }
)


@dataclass(eq=False, kw_only=True)
class HeartbeatWriter:
    bus: Bus
    engine: Engine
    activity: Activity
    figures: Callable[[], dict[str, float]]
    needs_version: Callable[[], PolicyVersion | None]
    run_id: str
    worker_id: str
    has_turn: Callable[[], bool] = lambda: True  # on a GPU that the trainer uses too

    def __post_init__(self) -> None:
        self.period_s = heartbeats.PERIOD_S  # adapted to the number of services
        self.newest: Heartbeat | None = None
        self.metrics_url: str | None = None
        self._engine_metrics: dict[str, float] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_engine())
            tasks.create_task(self._write())

    async def _read_engine(self) -> None:
        while True:
            self._engine_metrics = await self.engine.figures()
            await asyncio.sleep(_ENGINE_PERIOD_S)

    async def _write(self) -> None:
        live = await self.bus.key_value(streams.live_bucket(self.run_id).bucket)
        key = streams.heartbeat_key("rollout", self.worker_id)
        for beat in itertools.count():
            try:
                if beat % _COUNT_EVERY == 0:
                    state = await live.state()
                    self.period_s = heartbeats.worker_period_s(state.num_keys, state.ttl_s)
                await live.put(key, encode(self._heartbeat()), ttl_s=heartbeats.expires_after_s(self.period_s))
            except (BusUnreachable, MissingStream) as err:  # the bucket is missing while it is made again
                log.debug("heartbeat not written", error=str(err))
            # not all of them at once; the announced period is the longest
            await asyncio.sleep(self.period_s * random.uniform(0.8, 1.0))  # noqa: S311  keeps no secret

    async def say_exited(self) -> None:
        """Write the last heartbeat of a worker that was asked to stop, with its totals; without NATS, nothing."""
        beat = self._heartbeat().model_copy(update={"state": heartbeats.EXITED})
        key = streams.heartbeat_key("rollout", self.worker_id)
        with contextlib.suppress(BusUnreachable, MissingStream, TimeoutError):
            async with asyncio.timeout(_EXIT_DEADLINE_S):
                live = await self.bus.key_value(streams.live_bucket(self.run_id).bucket)
                await live.put(key, encode(beat), ttl_s=heartbeats.EXITED_TTL_S)

    def _heartbeat(self) -> Heartbeat:
        busy_s, idle_s = self.activity.totals()
        cpu_s = self.engine.cpu_seconds()
        of_engine = max(0.0, cpu_s - cpu_seconds())
        self.newest = Heartbeat(
            role="rollout",
            service_id=self.worker_id,
            at=time.time(),
            state=self._state(),
            version=self.engine.version,
            needs_version=self.needs_version(),
            busy_s=busy_s,
            idle_s=idle_s,
            cpu_s=cpu_s,
            # `figures` is the stored name of what is called metrics here.
            figures={**self.figures(), **self._engine_metrics, ENGINE_CPU: of_engine, **thread_cpu_seconds()},
            period_s=self.period_s,
            metrics_url=self.metrics_url,
        )
        return self.newest

    def _state(self) -> str:
        if not self.has_turn():
            return "waiting for its turn on the GPU"
        if not self.engine.ready.is_set():
            return "waiting for the engine"
        if reader := self.bus.waits_for:
            return f"waiting for {reader}"
        return self.activity.state


def collect(beat: Heartbeat | None, samples: Samples) -> None:
    for key, value in beat.figures.items() if beat is not None else ():
        if key in _FIGURES:
            name, labels = _FIGURES[key]
            samples.add(name, value, **labels)


@contextlib.contextmanager
def serving(
    settings: MetricsSettings,
    run_id: str,
    worker_id: str,
    heartbeat: HeartbeatWriter,
    spans: Callable[[], Mapping[str, int]] = dict,
    folders: Mapping[str, Path] = NO_FOLDERS,
    certificates: Mapping[str, float] = NO_CERTIFICATES,
) -> Iterator[None]:
    """Serve the worker's metrics in the block if a port is set; raises ConfigError when it cannot be listened on.

    ``spans`` returns the spans of traces so far by outcome; ``folders`` are those whose disk may fill, by setting;
    ``certificates`` the ends of those that it uses.
    """
    if settings.rollout_port is None:
        yield
        return
    exporter = Exporter(
        "rollout",
        run_id=run_id,
        service_id=worker_id,
        heartbeat=lambda: heartbeat.newest,
        collect=lambda samples: collect(heartbeat.newest, samples),
        spans=spans,
        folders=folders,
        certificates=certificates,
    )
    with MetricsServer(settings.host, settings.rollout_port, exporter.page, key="rollout_port") as server:
        heartbeat.metrics_url = server.url
        yield
