"""A panel of a dashboard: by default its query follows from the metric's kind, its unit and description from the table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.protocol.metrics.table import METRICS, Metric

INTERVAL = "$__rate_interval"  # Grafana's: at least four scrapes
INFO = "penstock_service_info"  # has the worker's name, which samples of one service only do not repeat
_SELECTOR = re.compile(r"\b(penstock_\w+)(?:\{([^}]*)\})?")
_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression without the choice of a run, and the legend of its series."""

    expr: str
    legend: str

    def of_run(self) -> str:
        """Return the expression with every metric restricted to the run that is chosen in the dashboard; "All" is `.*`."""
        return _SELECTOR.sub(lambda found: f'{found[1]}{{run=~"$run"{", " + found[2] if found[2] else ""}}}', self.expr)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; ``needs`` says what must have happened before it has data, empty where every run has some."""

    title: str
    queries: tuple[Query, ...]
    unit: str
    description: str
    needs: str = ""


def of(title: str, name: str, *, expr: str = "", legend: str = "", needs: str = "", unit: str = "") -> Panel:
    """Return the panel of a metric: by default what its kind is read by, over time.

    A counter is shown as its rate, a histogram or summary by three quantiles, a gauge as it is; what one process of several
    shows is joined with its name. Raises KeyError for a metric that the table does not have.
    """
    metric = METRICS[name]
    queries = (Query(expr, legend),) if expr else tuple(_queries(metric))
    return Panel(title, queries, unit or _unit(metric), metric.help, needs)


def _queries(metric: Metric) -> Iterator[Query]:
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    by = ", ".join(metric.labels)
    if metric.kind == "counter":
        yield Query(f"sum by ({by}) (rate({metric.name}[{INTERVAL}]))", legend or "all")
    elif metric.kind == "histogram":
        buckets = f"sum by ({', '.join((*metric.labels, 'le'))}) (rate({metric.name}_bucket[{INTERVAL}]))"
        for q in _QUANTILES:
            yield Query(f"histogram_quantile({q}, {buckets})", f"{legend} p{100 * q:g}".strip())
    elif metric.kind == "summary":
        yield Query(metric.name, f"{legend} p{{{{quantile}}}}".strip())
    elif metric.services != ("trainer",) and "worker" not in metric.labels:
        yield Query(
            f"{metric.name} * on (job, instance) group_left (worker) {INFO}", f"{{{{worker}}}} {legend}".strip()
        )
    else:
        yield Query(metric.name, legend or "{{run}}")


def _unit(metric: Metric) -> str:
    """Return Grafana's name of a unit."""
    if metric.kind == "counter":
        return "percentunit" if metric.unit == "s" else f"suffix: {metric.unit}/s"
    known = {"s": "s", "0 to 1": "percentunit", "bytes": "bytes", "": "short", "0 or 1": "bool"}
    return known.get(metric.unit, f"suffix: {metric.unit}")
