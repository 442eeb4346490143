"""The worker's Prometheus metrics: its newest heartbeat under the names of the table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from penstock.protocol.config.shared_sections import MetricsSettings
from penstock.protocol.facts import Heartbeat
from penstock.protocol.metrics.exporter import NO_CERTIFICATES, NO_FOLDERS, Exporter
from penstock.protocol.metrics.samples import Samples
from penstock.protocol.metrics.server import MetricsServer
from penstock.rollout_service.heartbeat import HeartbeatWriter

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
        "episodes_stored": ("penstock_rollout_episodes_total", {"outcome": "stored"}),
        "episodes_not_stored": ("penstock_rollout_episodes_total", {"outcome": "not_stored"}),
        "episodes_continued": ("penstock_rollout_episodes_total", {"outcome": "continued"}),
        "tokens_per_s": ("penstock_rollout_tokens_per_second", {}),
        "packs_held": ("penstock_rollout_packs_held", {}),
        "engine_running": ("penstock_engine_running", {}),
        "engine_queued": ("penstock_engine_queued", {}),
        "engine_paused": ("penstock_engine_paused", {}),
        "engine_tokens_per_s": ("penstock_engine_tokens_per_second", {}),
        "engine_generated_tokens": ("penstock_engine_generated_tokens_total", {}),
        "engine_prompt_tokens": ("penstock_engine_prompt_tokens_total", {}),
        "engine_cached_tokens": ("penstock_engine_cached_tokens_total", {}),
        "engine_aborted": ("penstock_engine_aborted_total", {}),
        "engine_retracted": ("penstock_engine_retracted_total", {}),
        "engine_kv_usage": ("penstock_engine_kv_cache_ratio", {}),
        "engine_cache_hit_rate": ("penstock_engine_cache_hit_ratio", {}),
    }
)


def collect(beat: Heartbeat | None, samples: Samples) -> None:
    """Add the metrics of a heartbeat."""
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
