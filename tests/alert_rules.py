"""Files of rules for Prometheus and promtool."""

from __future__ import annotations

import json
from collections.abc import Iterable

from penstock.deploy.monitoring.alerts import Alert


def rules(alerts: Iterable[Alert]) -> str:
    """Return a file of rules with these alerts; JSON is YAML."""
    found = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            **({"for": alert.wait} if alert.wait else {}),
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary},
        }
        for alert in alerts
    ]
    return json.dumps({"groups": [{"name": "penstock", "rules": found}]})
