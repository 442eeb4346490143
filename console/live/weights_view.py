"""Fold what is published, applied and refused of a run's weights into totals; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.console.report import event_fields
from penstock.console.report.event_fields import PublicationFields
from penstock.console.report.run_summary import WeightsSummary
from penstock.protocol.facts import WeightsApplied, WeightsRefused


@dataclass(slots=True)
class WeightsView:
    """Folds facts and events in any order; not thread-safe."""

    publications: dict[int, PublicationFields] = field(default_factory=dict)  # by version
    pauses_s: list[float] = field(default_factory=list)
    fetched_bytes: int = 0
    num_refused: int = 0

    def fold_publication(self, data: Mapping[str, Any]) -> None:
        """Take the trainer's metrics of one version; raises UnreadableEvent."""
        found = event_fields.read(PublicationFields, data)
        if found.version is not None:
            self.publications[found.version] = found

    def fold_applied(self, fact: WeightsApplied) -> None:
        self.fetched_bytes += fact.num_bytes
        if fact.previous_version is not None:
            self.pauses_s.append(fact.pause_s)

    def fold_refused(self, fact: WeightsRefused) -> str:
        """Take a worker's refusal; return it as text."""
        self.num_refused += 1
        return f"{fact.worker_id} cannot use version {fact.version}: {fact.reason}"

    def summary(self) -> WeightsSummary:
        patches = [p for p in self.publications.values() if p.kind == "patch"]
        pauses = sorted(self.pauses_s)
        return WeightsSummary(
            raw_bytes=sum(p.raw_bytes for p in self.publications.values()),
            sent_bytes=sum(p.sent_bytes for p in self.publications.values()),
            fetched_bytes=self.fetched_bytes,
            mean_density=sum(p.density or 0.0 for p in patches) / len(patches) if patches else None,
            pause_p50_s=_quantile(pauses, 0.5),
            pause_p99_s=_quantile(pauses, 0.99),
            refused=self.num_refused,
        )


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
