"""Read the chapters of a run's record from the newest to the oldest, as few as a request needs."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from penstock.protocol.errors import RecordBroken
from penstock.protocol.facts import BlobRef, decode
from penstock.protocol.record.lineage import LineageChapter

_CACHE_BYTES = 16 * 1024**2  # of chapters as stored; decoded they are about ten times as large


class ReadBudget:
    """What one request may still read of a run's objects."""

    def __init__(self, *, num_bytes: int = 32 * 1024**2, num_objects: int = 400, seconds: float = 3.0) -> None:
        """Start the time."""
        self._num_bytes = num_bytes
        self._num_objects = num_objects
        self._until = time.monotonic() + seconds
        self.read_bytes = 0
        self.read_objects = 0

    def take(self, num_bytes: int) -> None:
        """Count one object."""
        self.read_bytes += num_bytes
        self.read_objects += 1

    @property
    def is_spent(self) -> bool:
        """Whether no further object should be read."""
        return (
            self.read_bytes >= self._num_bytes
            or self.read_objects >= self._num_objects
            or time.monotonic() >= self._until
        )


class ChapterReader:
    """The chapters of one run, by number. Not thread-safe.

    A chapter is reached from the one after it only, so the numbers that are known are those from some chapter to the last.
    """

    def __init__(self, run_id: str, fetch: Callable[[BlobRef], bytes]) -> None:
        """``fetch`` returns a verified object (`Blobs.get`)."""
        self._run_id = run_id
        self._fetch = fetch
        self._refs: dict[int, BlobRef] = {}
        self._spans: dict[int, tuple[int | None, int | None]] = {}  # first and last step of chapters that were read
        self._cache: OrderedDict[str, tuple[LineageChapter, int]] = OrderedDict()
        self.last: int = 0

    def set_end(self, end: BlobRef, budget: ReadBudget) -> None:
        """Make ``end`` the last chapter; what a resumed trainer wrote anew replaces what is known from there on.

        Raises BlobMissing, BlobCorrupt, WireError or RecordBroken.
        """
        if self.last and self._refs.get(self.last) == end:
            return
        fresh: dict[int, BlobRef] = {}
        older: dict[int, BlobRef] = {}
        ref: BlobRef | None = end
        while ref is not None:
            chapter = self._read(ref, budget)
            fresh[chapter.number] = ref
            ref = chapter.parent
            if ref is not None and self._refs.get(chapter.number - 1) == ref:
                older = {n: known for n, known in self._refs.items() if n < chapter.number}
                break
            if ref is not None and (not self._refs or budget.is_spent):  # what was known is read again when asked for
                older = {chapter.number - 1: ref}
                break
        self._spans = {n: span for n, span in self._spans.items() if n in older or n in fresh}
        self._refs = older | fresh
        self.last = max(fresh)

    def chapter(self, number: int, budget: ReadBudget) -> LineageChapter | None:
        """Return a chapter, reading those after it if need be; None when the budget does not suffice or there is none."""
        while number not in self._refs:
            lowest = min(self._refs, default=0)
            if not 0 < number < lowest or budget.is_spent:
                return None
            self._read(self._refs[lowest], budget)
            if lowest - 1 not in self._refs:
                return None
        ref = self._refs[number]
        if budget.is_spent and ref.key not in self._cache:
            return None
        return self._read(ref, budget)

    def span(self, number: int) -> tuple[int | None, int | None] | None:
        """Return the first and last step of a chapter that was read before, (None, None) for one without steps."""
        return self._spans.get(number) if number in self._refs else None

    def _read(self, ref: BlobRef, budget: ReadBudget) -> LineageChapter:
        cached = self._cache.get(ref.key)
        if cached is not None and cached[1] == ref.size_bytes:
            self._cache.move_to_end(ref.key)
            return cached[0]
        chapter = decode(self._fetch(ref), LineageChapter)
        budget.take(ref.size_bytes)
        if chapter.run_id != self._run_id:
            raise RecordBroken(
                f"the record of run {self._run_id} has a chapter of run {chapter.run_id}; run penstock audit"
            )
        self._cache[ref.key] = (chapter, ref.size_bytes)
        while len(self._cache) > 1 and sum(size for _, size in self._cache.values()) > _CACHE_BYTES:
            self._cache.popitem(last=False)
        steps = chapter.steps
        self._spans[chapter.number] = (steps[0].step, steps[-1].step) if steps else (None, None)
        if chapter.parent is not None and self._refs:
            self._refs.setdefault(chapter.number - 1, chapter.parent)
        return chapter
