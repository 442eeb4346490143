"""The alerts of Prometheus as `rules.yml` has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert; ``wait`` is how long the expression must hold, in Prometheus' words, empty for at once."""

    name: str
    severity: Literal["page", "warning"]
    expr: str
    wait: str
    summary: str
    cause: str
    cure: str
    page: str  # of the documentation, for more


def read_alerts() -> tuple[Alert, ...]:
    (group,) = yaml.safe_load(Path(__file__).with_name("rules.yml").read_text(encoding="utf-8"))["groups"]
    return tuple(
        Alert(rule["alert"], expr=rule["expr"], wait=rule.get("for", ""), **rule["labels"], **rule["annotations"])
        for rule in group["rules"]
    )


ALERTS = read_alerts()
