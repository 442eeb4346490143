"""The interface of the kinds of versions: `ModelVersions` for whole models, `AdapterVersions` for adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from penstock.trainer.publishing.snapshot import AdapterBase, AdapterWeights, ModelWeights, Snapshot
from penstock.trainer.publishing.version_writer import Written

W = TypeVar("W", ModelWeights, AdapterWeights)


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version that is stored but not committed."""

    written: Written
    density: float  # share of the values whose bits changed since the parent
    raw_bytes: int  # of the whole model
    diff_s: float  # compare and encode; wall-clock time


class VersionKind(Protocol[W]):
    """Stores versions of one kind; ``newest`` is always the version that the head names."""

    def hold(self, snapshot: Snapshot[W]) -> None:
        """Hold on this rank what a later `store` needs. Called on the training thread."""
        ...

    def resume(self, weights: W, dtype: str, newest: Written) -> bool:
        """Return True if these weights equal the newest version's bit for bit; the next version then follows on it."""
        ...

    def missing_base(self, weights: W, newest: Written | None) -> AdapterBase | None:
        """Return the base that these weights need and that is not stored; None if nothing is missing."""
        ...

    def store(self, snapshot: Snapshot[W], newest: Written | None) -> StoredVersion:
        """Store the objects of a version, then its manifest; nothing refers to it yet."""
        ...

    def committed(self, snapshot: Snapshot[W], written: Written) -> None:
        """Update state after the head was moved to a snapshot's version."""
        ...

    def store_again(self, newest: Written) -> Written | None:
        """Store the newest version again under its own number; None if its weights are not at hand."""
        ...

    def close(self, deadline_s: float) -> None:
        """Wait for what is being stored in the background."""
        ...
