"""Records which versions are kept: the best evaluated ones, and milestones. `weight_gc` deletes none of them.

The record is a key of the state bucket, changed by compare-and-swap. It is written before what it names could be
deleted: a version with a good evaluation while its evaluation still pins it, a milestone in the sweep that would retire
it. An evaluation counts as finished in a checkpoint only after that, so that a trainer killed in between repeats it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import structlog

from penstock.protocol import streams
from penstock.protocol.errors import BusError, CompareAndSwapFailed, WireError
from penstock.protocol.facts import BlobRef, KeptVersion, KeptVersions, decode, encode
from penstock.protocol.transport.key_value import KeyValue
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.trainer.publishing.weight_retention import KeepRule, best_versions, milestone_versions

kept_log = structlog.get_logger("trainer.kept_versions")

_SWAPS = 5
_FAILURES = 3  # sweeps in a row whose record could not be written, before the rest is collected without

Stored = Mapping[PolicyVersion, tuple[int, BlobRef]]  # step and manifest of the versions that the head leads to


class KeptVersionsKey:
    """The record of kept versions of one run; used by the evaluator's thread and by garbage collection."""

    def __init__(self, state: KeyValue, rule: KeepRule) -> None:
        """Read and write the record in the run's state bucket."""
        self._state, self._rule = state, rule
        self._lock = threading.Lock()
        self._unwritten: list[KeptVersion] = []  # evaluated while NATS did not answer
        self._num_failures = 0

    def add_result(self, evaluated: KeptVersion) -> None:
        """Record an evaluation, before its version is unpinned; kept in memory while NATS does not answer."""
        if not self._rule.best:
            return
        with self._lock:
            self._unwritten.append(evaluated)
            try:
                self._write_results()
            except BusError as err:
                kept_log.warning("evaluated version not recorded yet", policy_version=evaluated.version, error=str(err))

    def unwritten(self) -> set[PolicyVersion]:
        """Return the evaluated versions that are not recorded yet: they are pinned."""
        with self._lock:
            return {PolicyVersion(one.version) for one in self._unwritten}

    def update(self, stored: Stored) -> KeptVersions:
        """Add what is due and return the record: results not written yet, milestones, and where the versions are stored.

        Raises BusError when it cannot be written, but not for ever: a NATS user made before this key existed has no right
        to write it, and garbage must be collected all the same. Then no further version is kept.
        """
        try:
            with self._lock:
                self._write_results()
                kept = self._change(lambda kept: _located(_with_milestones(kept, stored, self._rule), stored))
        except BusError as err:
            self._num_failures += 1
            if self._num_failures < _FAILURES:
                raise
            kept_log.warning("no further version is kept: renew the rights of the trainer's NATS user", error=str(err))
            with self._lock:
                self._unwritten.clear()
            return self.read()
        self._num_failures = 0
        return kept

    def read(self) -> KeptVersions:
        """Return the record; an unreadable one, which a newer build may have written, is as if there were none."""
        return self._read()[0]

    def _write_results(self) -> None:
        if self._unwritten:
            results = tuple(self._unwritten)
            measure, most = results[-1].measure, self._rule.best
            self._change(
                lambda kept: kept.model_copy(
                    update={"best": best_versions((*kept.best, *results), measure=measure, most=most)}
                )
            )
            self._unwritten.clear()

    def _change(self, change: Callable[[KeptVersions], KeptVersions]) -> KeptVersions:
        num_swaps = 0
        while True:
            before, revision = self._read()
            if (after := change(before)) == before:
                return before
            try:
                self._state.swap(streams.KEPT_KEY, encode(after), revision).wait()
            except CompareAndSwapFailed:
                num_swaps += 1
                if num_swaps == _SWAPS:
                    raise
            else:
                return after

    def _read(self) -> tuple[KeptVersions, int | None]:
        entry = self._state.get(streams.KEPT_KEY).wait()
        if entry is None:
            return KeptVersions(), None
        try:
            return decode(entry.value, KeptVersions), entry.revision
        except WireError as err:
            kept_log.warning("the record of kept versions cannot be read: it is written again", error=str(err))
            return KeptVersions(), entry.revision


def _with_milestones(kept: KeptVersions, stored: Stored, rule: KeepRule) -> KeptVersions:
    """Replace the milestones by those that are due among the kept and the stored versions."""
    known = {PolicyVersion(one.version): one for one in kept.milestones}
    for version, (step, manifest) in stored.items():
        known.setdefault(version, KeptVersion(version=version, step=step, manifest=manifest))
    milestones = tuple(known[version] for version in milestone_versions(known, rule))
    return kept.model_copy(update={"milestones": milestones, "best": kept.best[: rule.best]})


def _located(kept: KeptVersions, stored: Stored) -> KeptVersions:
    """Add the manifests of the best versions; one that was not found before and is not stored is left out."""
    best, newest = list[KeptVersion](), max(stored, default=PolicyVersion(0))
    for one in kept.best:
        version = PolicyVersion(one.version)
        if one.manifest is not None or is_newer(version, newest):  # published since the head was read
            best.append(one)
        elif version in stored:
            best.append(one.model_copy(update={"manifest": stored[version][1]}))
        else:
            kept_log.warning("an evaluated version is not stored any more: it is not kept", policy_version=version)
    return kept.model_copy(update={"best": tuple(best)})
