"""What Prometheus scrapes from a reward service is what its heartbeat and its endpoint API say."""

from __future__ import annotations

from penstock.protocol.heartbeats import Activity
from penstock.protocol.metrics.exporter import Exporter
from penstock.protocol.metrics.table import METRICS, REQUEST_BUCKETS
from penstock.reward_service.api import app
from penstock.reward_service.endpoints.endpoint_call import BreakerState, EndpointMetrics
from penstock.reward_service.metrics import ServiceMetrics, Timings


def test_samples_are_the_counters_of_heartbeat_and_endpoints() -> None:
    """Groups, packs and calls of endpoints have the same numbers as the heartbeat; every metric of the table is there."""
    metrics, timings = ServiceMetrics(), Timings()
    metrics.scored.update({"exact_match": 3, "mine@2": 4})
    metrics.completions = 28
    metrics.dead["RewardCrashed"] += 2
    metrics.waited.update(["EndpointBusy", "EndpointBusy", "BreakerOpen"])
    metrics.packs.record(0.5, failed=True)
    metrics.queue = 9
    for seconds, failed in ((0.002, False), (0.2, False), (40.0, True)):
        timings.record(seconds, failed=failed)
    live = EndpointMetrics(calls=3, errors=1, under_way=5, waiting=6, breaker=BreakerState.OPEN, latency_p50_s=0.2)
    exporter = Exporter(
        "reward",
        run_id="r",
        service_id="r0",
        heartbeat=lambda: None,
        collect=lambda samples: app.collect_samples(
            samples, metrics, Activity(), {"mine": (live, timings)}, num_held=7
        ),
    )
    samples = exporter.samples()
    numbers = {
        name: sum(series.values())
        for name, series in samples.series.items()
        if METRICS[name].kind in ("counter", "gauge")
    }
    beat = metrics.as_dict()
    assert numbers["penstock_reward_groups_scored_total"] == beat["groups_scored"] == 7
    assert numbers["penstock_reward_completions_scored_total"] == beat["completions_scored"]
    assert numbers["penstock_reward_groups_dead_total"] == beat["groups_dead"]
    assert numbers["penstock_reward_groups_waited_total"] == beat["groups_waited"]
    assert numbers["penstock_reward_packs_total"] == beat["packs"]
    assert numbers["penstock_reward_pack_errors_total"] == beat["errors"]
    assert numbers["penstock_reward_packs_waiting"] == beat["queue"]
    assert samples.series["penstock_groups_total"] == {
        ("scored", ""): 7, ("dead_lettered", "RewardCrashed"): 2, ("requeued", "EndpointBusy"): 2,
        ("requeued", "BreakerOpen"): 1,
    }  # fmt: skip
    assert samples.series["penstock_reward_endpoint_breaker_open"] == {("mine",): 1.0}
    requests = samples.series["penstock_reward_request_seconds"]
    assert requests["mine", "ok"].count + requests["mine", "failed"].count == live.calls
    assert requests["mine", "failed"].count == live.errors
    assert requests["mine", "ok"].cumulative()[0] == (REQUEST_BUCKETS[0], 1)
    expected = {name for name, metric in METRICS.items() if "reward" in metric.services}
    of_heartbeat = {name for name in expected if "role" in METRICS[name].labels} - {"penstock_service_info"}
    shown = {*samples.series}
    assert shown == expected - of_heartbeat - {"penstock_trace_spans_total"}, "no span; no certificate is in use"
