"""The samples of a reward service for Prometheus, read from the counters that its heartbeats show too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.protocol.heartbeats import Activity, cpu_seconds
from penstock.protocol.metrics.samples import Samples
from penstock.reward_service.endpoints.breaker import BreakerState
from penstock.reward_service.endpoints.endpoint_queue import EndpointMetrics
from penstock.reward_service.metrics import ServiceMetrics, Timings

_PREFIX = "penstock_reward_"


@dataclass(frozen=True, slots=True)
class EndpointState:
    metrics: EndpointMetrics
    timings: Timings


def collect(
    samples: Samples,
    metrics: ServiceMetrics,
    activity: Activity,
    endpoints: Mapping[str, EndpointState],
    *,
    num_held: int,
) -> None:
    def add(name: str, value: float, **labels: str) -> None:
        samples.add(_PREFIX + name, value, **labels)

    for scorer, number in metrics.scored.items():
        add("groups_scored_total", number, scorer=scorer)
    samples.add("penstock_groups_total", metrics.scored.total(), outcome="scored", reason="")
    add("completions_scored_total", metrics.completions)
    for reason, number in metrics.dead.items():
        add("groups_dead_total", number, reason=reason)
        samples.add("penstock_groups_total", number, outcome="dead_lettered", reason=reason)
    for reason, number in metrics.waited.items():
        add("groups_waited_total", number, reason=reason)
        samples.add("penstock_groups_total", number, outcome="requeued", reason=reason)
    packs = metrics.packs
    add("packs_total", packs.num_calls)
    add("pack_errors_total", packs.num_failed + metrics.num_errors)
    samples.add_quantiles(
        f"{_PREFIX}pack_seconds",
        {"0.5": packs.quantile(0.5), "0.99": packs.quantile(0.99), "sum": packs.total_s, "count": packs.num_calls},
    )
    add("packs_held", num_held)
    add("packs_waiting", metrics.queue)
    busy_s, idle_s = activity.totals()
    add("busy_seconds_total", busy_s)
    add("idle_seconds_total", idle_s)
    add("cpu_seconds_total", cpu_seconds())
    for name, state in endpoints.items():
        _endpoint(samples, name, state)


def _endpoint(samples: Samples, name: str, state: EndpointState) -> None:
    live = state.metrics
    for metric, value in {
        "calls_total": live.calls,
        "errors_total": live.errors,
        "under_way": live.under_way,
        "waiting": live.waiting,
        "retries_total": live.retries,
        "hedges_total": live.hedges,
        "turned_away_total": live.turned_away,
        "breaker_open": float(live.breaker is not BreakerState.CLOSED),
    }.items():
        samples.add(f"{_PREFIX}endpoint_{metric}", value, endpoint=name)
    quantiles = {"0.5": live.latency_p50_s, "0.99": live.latency_p99_s}
    samples.add_quantiles(f"{_PREFIX}endpoint_seconds", quantiles, endpoint=name)
    for outcome, histogram in state.timings.by_outcome.items():
        samples.add_histogram(f"{_PREFIX}request_seconds", histogram, endpoint=name, outcome=outcome)
