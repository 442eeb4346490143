"""Compare the checksums that all workers report for a version. Pure.

Every worker reads the same facts from the weights stream in the same order, so all see the same disagreement without
exchanging further messages. Any login of a worker can publish under any worker's id: a disagreement is a reason for a worker to
compare its engine with the verified files (`weight_follower.py`), and never proves that an engine is wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.protocol.facts import WeightsApplied
from penstock.protocol.versions import PolicyVersion

_MAX_VERSIONS = 64  # a version is compared while workers apply it; older ones are forgotten
_MAX_WORKERS = 2_000  # that are compared for one version: each report compares all of them
_MAX_VOTES = 20_000  # of all versions
_MAX_CHARS = 256  # of a checksum or a layout; what is longer is none, and would be kept for each worker


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Engines with one weight layout that report different checksums for one version."""

    version: PolicyVersion
    layout: str  # of their checksums
    minority: tuple[str, ...]  # ids of the workers whose engine differs
    expected: str  # the checksum of the majority
    is_tie: bool = False  # as many have another checksum: either may be wrong

    def __str__(self) -> str:
        """Return a sentence for people."""
        if len(self.minority) == 1:
            who = f"the engine of worker {self.minority[0]} serves"
        else:
            who = f"the engines of workers {', '.join(self.minority)} serve"
        return f"{who} other weights than the others as version {self.version}"


class EngineVotes:
    """Folds `WeightsApplied` in the order of the stream."""

    def __init__(self) -> None:
        """Start without votes."""
        self._votes: dict[tuple[int, str], dict[str, str]] = {}  # (version, layout) -> worker -> checksum

    def add(self, fact: WeightsApplied) -> Disagreement | None:
        """Add one engine's checksum; returns the disagreement about its version and layout, if there is one.

        The less frequent checksums are the minority; of equally frequent ones, those that were reported later.
        """
        if max(len(fact.checksum), len(fact.layout)) > _MAX_CHARS:
            return None
        key = (fact.version, fact.layout)
        votes = self._votes.setdefault(key, {})
        if votes.pop(fact.worker_id, None) is None and len(votes) >= _MAX_WORKERS:
            return None
        # A worker that applies a version again replaces its vote, and votes last.
        votes[fact.worker_id] = fact.checksum
        while len(self._votes) > _MAX_VERSIONS or (
            len(self._votes) > 1 and sum(map(len, self._votes.values())) > _MAX_VOTES
        ):
            del self._votes[next(iter(self._votes))]
        counts = Counter(votes.values())
        if len(counts) == 1:
            return None
        (expected, most), (_, second) = counts.most_common(2)  # of equal counts, the one that was reported first
        minority = tuple(worker for worker, checksum in votes.items() if checksum != expected)
        return Disagreement(PolicyVersion(fact.version), fact.layout, minority, expected, most == second)
