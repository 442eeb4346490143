"""The alerts of Prometheus, from the table that ``rules.yml`` is written from."""

from __future__ import annotations

from docs.generate import table
from penstock.deploy.monitoring.alerts import ALERTS


def text() -> str:
    """Return a table of all alerts: name, when it fires, cause, cure."""
    rows: list[tuple[object, ...]] = [
        (f"`{alert.name}`", alert.severity, _plain(alert.summary), alert.cause, alert.cure) for alert in ALERTS
    ]
    return table("alert", "severity", "says", "usual cause", "cure", rows=rows)


def _plain(summary: str) -> str:
    return summary.replace("{{ $labels.", "").replace(" }}", "")
