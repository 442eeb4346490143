"""Which versions workers refuse, and when to publish the newest one again.

Any process with the login of a worker may refuse any version in the name of any worker. So what is kept of refusals is
bounded, and so is the number of republications in a given time, each of which stores a full snapshot.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from penstock.protocol.facts import WeightsRefused
from penstock.trainer.publishing.version_writer import Written

_MAX_REPUBLICATIONS = 3
_BUDGET = 6  # republications, however many versions are refused
_REFILL_S = 600.0  # until one more is allowed
_ENOUGH_WORKERS = 2  # more refusals of one manifest change nothing
_MAX_MANIFESTS = 64  # remembered; a refusal may arrive before its version is known to be the newest


class Refusals:
    """Collects the refusals of workers. Not thread-safe: guarded by its owner's lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a refusal."""
        self._refused: OrderedDict[str, set[str]] = OrderedDict()  # sha256 of a manifest -> workers that cannot use it
        self._num_republications: Counter[int] = Counter()  # by version
        self._clock = clock
        self._left = float(_BUDGET)
        self._counted_at = clock()

    def add(self, fact: WeightsRefused, newest: Written | None) -> bool:
        """Record that a worker cannot use a version; return True if it is the newest one and this refusal counts."""
        workers = self._refused.setdefault(fact.manifest.sha256, set())
        if fact.worker_id in workers or len(workers) >= _ENOUGH_WORKERS:
            return False
        workers.add(fact.worker_id)
        if newest is not None and newest.reference.sha256 in self._refused:
            self._refused.move_to_end(newest.reference.sha256)
        while len(self._refused) > _MAX_MANIFESTS:
            self._refused.popitem(last=False)
        return newest is not None and newest.reference.sha256 == fact.manifest.sha256

    def need_republication(self, newest: Written | None) -> bool:
        """Return True if the newest version should be published again."""
        if newest is None:
            return False
        workers = self._refused.get(newest.reference.sha256, set())
        version = newest.manifest.version
        is_due = republication_is_due(newest.manifest.kind, workers, self._num_republications[version])
        return is_due and self._refilled() >= 1

    def clear(self, newest: Written) -> None:
        """Count a republication of the newest version, and forget who refused it."""
        del self._refused[newest.reference.sha256]
        version = newest.manifest.version
        self._num_republications = Counter({version: self._num_republications[version] + 1})
        self._left = self._refilled() - 1

    def _refilled(self) -> float:
        now = self._clock()
        self._left = min(_BUDGET, self._left + (now - self._counted_at) / _REFILL_S)
        self._counted_at = now
        return self._left


def republication_is_due(kind: str, refused_by: set[str], num_republications: int) -> bool:
    """Return True if a refused version should be published again; ``num_republications`` times it was already.

    One worker is enough for a patch or an adapter: an object that it needs is missing or wrong. A full snapshot, or
    a version that was published again, counts as refused only if two workers refuse it: one alone has a problem of
    its own. After three attempts storing it once more will not help.
    """
    if num_republications >= _MAX_REPUBLICATIONS:
        return False
    return len(refused_by) >= (1 if kind != "anchor" and num_republications == 0 else 2)
