"""Which versions workers refuse, and when to publish the newest one again."""

from __future__ import annotations

from collections import Counter

from penstock.protocol.facts import WeightsRefused
from penstock.trainer.publishing.version_writer import Written

_MAX_REPUBLICATIONS = 3


class Refusals:
    """Collects the refusals of workers. Not thread-safe: guarded by its owner's lock."""

    def __init__(self) -> None:
        """Start without a refusal."""
        self._refused: dict[str, set[str]] = {}  # sha256 of a manifest -> workers that cannot use it
        self._num_republications: Counter[int] = Counter()  # by version

    def add(self, fact: WeightsRefused) -> None:
        """Record that a worker cannot use a version."""
        self._refused.setdefault(fact.manifest.sha256, set()).add(fact.worker_id)

    def need_republication(self, newest: Written | None) -> bool:
        """Return True if the newest version should be published again."""
        if newest is None:
            return False
        workers = self._refused.get(newest.reference.sha256, set())
        version = newest.manifest.version
        return republication_is_due(newest.manifest.kind, workers, self._num_republications[version])

    def clear(self, newest: Written) -> None:
        """Count a republication of the newest version, and forget who refused it."""
        del self._refused[newest.reference.sha256]
        self._num_republications[newest.manifest.version] += 1


def republication_is_due(kind: str, refused_by: set[str], num_republications: int) -> bool:
    """Return True if a refused version should be published again; ``num_republications`` times it was already.

    One worker is enough for a patch or an adapter: an object that it needs is missing or wrong. A full snapshot, or
    a version that was published again, counts as refused only if two workers refuse it: one alone has a problem of
    its own. After three attempts storing it once more will not help.
    """
    if num_republications >= _MAX_REPUBLICATIONS:
        return False
    return len(refused_by) >= (1 if kind != "anchor" and num_republications == 0 else 2)
