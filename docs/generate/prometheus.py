"""The Prometheus metrics of every service, from the table that the services use."""

from __future__ import annotations

from docs.generate import table
from penstock.protocol.metrics.table import MAX_VALUES, METRICS, OPEN_LABELS, OTHER, Metric

_TITLES = {
    ("trainer", "rollout", "reward"): "Every service",
    ("trainer", "rollout"): "Trainer and rollout worker",
    ("trainer",): "Trainer",
    ("rollout",): "Rollout worker",
    ("reward",): "Reward service",
}


def text() -> str:
    """Return a table for each set of services, and the bound of the labels."""
    parts = []
    for services, title in _TITLES.items():
        rows = [_row(metric) for metric in METRICS.values() if metric.services == services]
        parts.append(f"## {title}\n\n" + table("metric", "type", "unit", "labels", "is", rows=rows))
    labels = ", ".join(f"`{label}`" for label in sorted(OPEN_LABELS))
    parts.append(
        "## Bounded labels\n\n"
        f"Values of {labels} come from users. The first {MAX_VALUES} of each in a metric of a process have series of their own; "
        f"counters and histograms of the others are added up as `{OTHER}`, and their gauges are left out.\n"
    )
    return "\n".join(parts)


def _row(metric: Metric) -> tuple[object, ...]:
    kind = metric.kind
    if metric.buckets:
        kind += f", up to {metric.buckets[-1]:g}"
    return f"`{metric.name}`", kind, metric.unit, ", ".join(f"`{label}`" for label in metric.labels), metric.help
