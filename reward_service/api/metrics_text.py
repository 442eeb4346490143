"""The metrics page for Prometheus (exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.protocol.activity import Activity, cpu_seconds
from penstock.reward_service.endpoints.breaker import BreakerState
from penstock.reward_service.endpoints.endpoint_queue import EndpointMetrics
from penstock.reward_service.metrics import ServiceMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "penstock_reward_"

Sample = tuple[Mapping[str, str], float]


def render(
    metrics: ServiceMetrics, activity: Activity, endpoints: Mapping[str, EndpointMetrics], *, num_held: int
) -> str:
    """Return all metrics of this replica; durations in seconds."""
    busy_s, idle_s = activity.totals()
    of = endpoints.items()
    packs = metrics.packs
    families = (
        _family(
            "groups_scored_total",
            "counter",
            "Groups announced.",
            [({"scorer": s}, n) for s, n in metrics.scored.items()],
        ),
        _family("completions_scored_total", "counter", "Completions announced.", [({}, metrics.completions)]),
        _family(
            "groups_dead_total",
            "counter",
            "Groups dead-lettered.",
            [({"reason": r}, n) for r, n in metrics.dead.items()],
        ),
        _family(
            "groups_waited_total",
            "counter",
            "Groups that were requeued.",
            [({"reason": r}, n) for r, n in metrics.waited.items()],
        ),
        _family("packs_total", "counter", "Deliveries worked on.", [({}, packs.num_calls)]),
        _family(
            "pack_errors_total", "counter", "Deliveries with a failure.", [({}, packs.num_failed + metrics.num_errors)]
        ),
        _family(
            "pack_seconds",
            "summary",
            "Time a delivery took.",
            [({"quantile": q}, packs.quantile(float(q))) for q in ("0.5", "0.99")],
        ),
        _family("pack_seconds_sum", "", "", [({}, packs.total_s)]),
        _family("pack_seconds_count", "", "", [({}, packs.num_calls)]),
        _family("packs_held", "gauge", "Packs in progress in this process.", [({}, num_held)]),
        _family("packs_waiting", "gauge", "Packs waiting at the broker.", [({}, metrics.queue)]),
        _family("busy_seconds_total", "counter", "Time with work in progress.", [({}, busy_s)]),
        _family("idle_seconds_total", "counter", "Time without work.", [({}, idle_s)]),
        _family("cpu_seconds_total", "counter", "CPU time of this process.", [({}, cpu_seconds())]),
        _family(
            "endpoint_calls_total", "counter", "Calls to an endpoint.", [({"endpoint": n}, f.calls) for n, f in of]
        ),
        _family("endpoint_errors_total", "counter", "Calls that failed.", [({"endpoint": n}, f.errors) for n, f in of]),
        _family("endpoint_under_way", "gauge", "Groups in calls.", [({"endpoint": n}, f.under_way) for n, f in of]),
        _family("endpoint_waiting", "gauge", "Groups queued.", [({"endpoint": n}, f.waiting) for n, f in of]),
        _family("endpoint_retries_total", "counter", "Further tries.", [({"endpoint": n}, f.retries) for n, f in of]),
        _family(
            "endpoint_hedges_total", "counter", "Hedged second requests.", [({"endpoint": n}, f.hedges) for n, f in of]
        ),
        _family(
            "endpoint_turned_away_total",
            "counter",
            "Groups rejected because the queue was full.",
            [({"endpoint": n}, f.turned_away) for n, f in of],
        ),
        _family(
            "endpoint_breaker_open",
            "gauge",
            "1 while the circuit breaker is open.",
            [({"endpoint": n}, float(f.breaker is not BreakerState.CLOSED)) for n, f in of],
        ),
        _family(
            "endpoint_seconds",
            "summary",
            "Time a call took, over the most recent ones.",
            [
                ({"endpoint": name, "quantile": quantile}, value)
                for name, live in of
                for quantile, value in (("0.5", live.latency_p50_s), ("0.99", live.latency_p99_s))
            ],
        ),
    )
    return "".join(families)


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"] if kind else []
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels.items())
        lines.append(f"{_PREFIX}{name}{{{inside}}} {value}" if inside else f"{_PREFIX}{name} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
