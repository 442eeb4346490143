"""Do all engines that serve a version serve the same weights? Pure.

Every reader of the weights stream sees the same facts in the same order, so all come to the same
verdict without talking to one another: the workers, of which the odd one stops, and the console,
which raises the alarm.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.protocol.facts import WeightsApplied
from penstock.protocol.versions import PolicyVersion

_VERSIONS = 64  # remembered; a version is compared while workers take it, not for ever


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Engines of one layout that serve one version differently."""

    version: PolicyVersion
    odd: tuple[str, ...]  # ids of the workers whose engine is not believed
    expected: str  # the checksum of the others

    def __str__(self) -> str:
        """Say it to people."""
        who = "engine of worker " + self.odd[0] if len(self.odd) == 1 else f"engines of workers {', '.join(self.odd)}"
        return f"the {who} serves other weights than the others as version {self.version}"


class EngineVotes:
    """Folds `WeightsApplied` in the order of the stream."""

    def __init__(self) -> None:
        """Begin with no votes."""
        self._votes: dict[tuple[int, str], dict[str, str]] = {}  # (version, layout) -> worker -> checksum

    def add(self, fact: WeightsApplied) -> Disagreement | None:
        """Take one engine's word; returns the disagreement that it is a part of, or makes known.

        The fewest are odd; of equally many, the later ones, since the first were believed before.
        """
        key = (fact.version, fact.layout)
        votes = self._votes.setdefault(key, {})
        votes.pop(fact.worker_id, None)  # applied again: its newest word counts, as the latest
        votes[fact.worker_id] = fact.checksum
        while len(self._votes) > _VERSIONS:
            del self._votes[next(iter(self._votes))]
        counts = Counter(votes.values())
        if len(counts) == 1:
            return None
        expected = counts.most_common(1)[0][0]  # of equal counts, the one that was there first
        odd = tuple(worker for worker, checksum in votes.items() if checksum != expected)
        return Disagreement(PolicyVersion(fact.version), odd, expected)
