"""Read the groups of one run from its record and its packs in S3, a page at a time and with a bound on what is read.

Chapters of the record are read from the newest to the oldest, as few as a request needs.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from penstock.console.record.lineage import version_lineage
from penstock.console.web.reading.recorded_groups import (
    Entry,
    GroupQuery,
    QueryRefused,
    entries,
    group_row,
    parse_cursor,
    trajectory_rows,
)
from penstock.console.web.reading.stored_logprobs import RecentObjects, StoredLogprobs
from penstock.protocol.errors import BlobError, PackError, RecordBroken
from penstock.protocol.facts import decode
from penstock.protocol.groups import BlobRef
from penstock.protocol.packs import group_pack
from penstock.protocol.packs.group_texts import GroupTexts
from penstock.protocol.record.lineage import LineageChapter
from penstock.protocol.record.stored_record import StoredRecord, end_of_record
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs

_CHAPTER_CACHE_BYTES = 16 * 1024**2  # of chapters as stored; decoded they are about ten times as large
_PACK_BYTES = 64 * 1024**2  # a larger pack is not opened for a page
_CLOSED_PACK_BYTES = 16 * 1024**2  # of a dropped or evaluated group, whose size no message bounds
_CACHE_BYTES = 48 * 1024**2  # of packs
_EXCERPT = 300  # characters of a text in a list
_LINEAGE_BYTES = 64 * 1024**2  # of a whole record
_RECENT_CHAPTERS = 4  # whose rewards are the distribution
_RECENT_REWARDS = 20_000
G = TypeVar("G", Group, GroupTexts)


class ReadBudget:
    """What one request may still read of a run's objects."""

    def __init__(self, *, num_bytes: int = 32 * 1024**2, num_objects: int = 400, seconds: float = 3.0) -> None:
        self._num_bytes = num_bytes
        self._num_objects = num_objects
        self._until = time.monotonic() + seconds
        self.read_bytes = 0
        self.read_objects = 0

    def take(self, num_bytes: int) -> None:
        self.read_bytes += num_bytes
        self.read_objects += 1

    @property
    def is_spent(self) -> bool:
        is_read = self.read_bytes >= self._num_bytes or self.read_objects >= self._num_objects
        return is_read or time.monotonic() >= self._until


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
        self._cache = RecentObjects[tuple[str, int], LineageChapter](_CHAPTER_CACHE_BYTES)  # by key and size
        self.last: int = 0

    def set_end(self, end: BlobRef, budget: ReadBudget) -> None:
        """Make ``end`` the last chapter; what a resumed trainer wrote replaces what is known from there on.

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
        if budget.is_spent and (ref.key, ref.size_bytes) not in self._cache:
            return None
        return self._read(ref, budget)

    def span(self, number: int) -> tuple[int | None, int | None] | None:
        """Return the first and last step of a chapter that was read before, (None, None) for one without steps."""
        return self._spans.get(number) if number in self._refs else None

    def _read(self, ref: BlobRef, budget: ReadBudget) -> LineageChapter:
        if (cached := self._cache.get((ref.key, ref.size_bytes))) is not None:
            return cached
        chapter = decode(self._fetch(ref), LineageChapter)
        budget.take(ref.size_bytes)
        if chapter.run_id != self._run_id:
            raise RecordBroken(
                f"the record of run {self._run_id} has a chapter of run {chapter.run_id}; run penstock audit"
            )
        self._cache.put((ref.key, ref.size_bytes), chapter, ref.size_bytes)
        steps = chapter.steps
        self._spans[chapter.number] = (steps[0].step, steps[-1].step) if steps else (None, None)
        if chapter.parent is not None and self._refs:
            self._refs.setdefault(chapter.number - 1, chapter.parent)
        return chapter


class StoredGroups:
    """The groups of one run. Not thread-safe: its user holds a lock."""

    def __init__(self, run_id: str, folder: Path, blobs: Blobs, pointer: Callable[[], bytes | None]) -> None:
        """``pointer`` reads the key ``checkpoint`` of the run's state bucket, see `end_of_record`."""
        self._run_id = run_id
        self._folder = folder
        self._blobs = blobs
        self._pointer = pointer
        self._chapters = ChapterReader(run_id, blobs.get)
        self._packs = RecentObjects[str, bytes](_CACHE_BYTES)
        self.logprobs = StoredLogprobs(run_id, blobs)

    def page(self, query: GroupQuery) -> dict[str, Any]:
        """Return the next groups, or trajectories, that a query accepts, the newest first.

        ``next`` is the cursor of the rest, None at the end. A page may be short, or empty, and still have one: what one
        request reads is bounded. Raises QueryRefused, RecordBroken or what the object store raises.
        """
        budget = self._begin()
        number, place = parse_cursor(query.cursor) if query.cursor else (self._chapters.last, 0)
        items: list[dict[str, Any]] = []
        after: tuple[int, int] | None = (min(number, self._chapters.last), place)
        while after is not None and len(items) < query.limit and not budget.is_spent:
            after = self._scan_chapter(after, query, items, budget)
        return {
            "items": items,
            "next": None if after is None else f"{after[0]}.{after[1]}",
            "searched_to_step": self._step_at(after, budget),
            "read_bytes": budget.read_bytes,
            "read_objects": budget.read_objects,
        }

    def walk(self, query: GroupQuery) -> Iterator[tuple[Entry, GroupTexts | None]]:
        """Yield the generated groups that a query accepts with their texts, the newest first, without the bounds of a page."""
        budget = self._begin(num_bytes=sys.maxsize, num_objects=sys.maxsize, seconds=math.inf)
        for chapter in self._newest(budget, range(self._chapters.last, 0, -1)):
            for entry in filter(query.accepts, entries(chapter)):
                yield entry, self._texts(entry, budget)

    def find(self, group_id: str, *, chapter: int | None) -> Entry:
        """Return a group by its id; ``chapter`` says where to begin. Raises QueryRefused when it is not found.

        A group that was trained several times is found by its newest use.
        """
        budget = self._begin(num_bytes=96 * 1024**2, num_objects=2000, seconds=8.0)
        for read in self._newest(budget, range(self._chapters.last, 0, -1) if chapter is None else (chapter,)):
            for entry in entries(read, is_last=read.number == self._chapters.last):
                if entry.group_id == group_id:
                    return entry
        raise QueryRefused(
            f"group {group_id} is not in {f'chapter {chapter}' if chapter is not None else 'the newest chapters'} of the "
            f"record of run {self._run_id}; name its chapter as the list of groups does, or: penstock lineage "
            f"{self._run_id} --group {group_id}"
        )

    def group(self, entry: Entry) -> tuple[Group | None, str]:
        """Return a group with its tokens, or None and the reason why it cannot be shown."""
        if entry.pack is None:
            return None, f"no pack of it is recorded ({entry.status})"
        try:
            group = self._decoded(entry, entry.pack, ReadBudget(), group_pack.decode)
        except (BlobError, PackError, QueryRefused) as err:
            return None, str(err)
        return group, f"its pack {entry.pack.key} does not hold it" if group is None else ""

    def recent_rewards(self) -> tuple[dict[str, list[float]], int]:
        """Return the rewards and parts of the newest trained trajectories by name, and from how many steps they are."""
        budget = self._begin(num_objects=_RECENT_CHAPTERS + 2, num_bytes=8 * 1024**2, seconds=2.0)
        last = self._chapters.last
        values: dict[str, list[float]] = {"reward": []}
        steps: set[int] = set()
        for chapter in self._newest(budget, range(last, max(last - _RECENT_CHAPTERS, 0), -1)):
            if len(values["reward"]) >= _RECENT_REWARDS:
                break
            for entry in entries(chapter):
                if entry.scored is not None and entry.step is not None:
                    steps.add(entry.step)
                    values["reward"].extend(entry.scored.rewards)
                    for name, column in entry.scored.parts.items():
                        values.setdefault(name, []).extend(column)
        return values, len(steps)

    def lineage(self, version: int | None) -> dict[str, Any]:
        """Return the lineage of a version (None: the last), without texts. Raises QueryRefused for a record beyond the bound."""
        num_bytes = 0

        def fetch(ref: BlobRef) -> bytes:
            nonlocal num_bytes
            num_bytes += ref.size_bytes
            if num_bytes > _LINEAGE_BYTES:
                raise QueryRefused(
                    f"the record of run {self._run_id} is larger than {_LINEAGE_BYTES} bytes, which a page does not read; "
                    f"run: penstock lineage {self._run_id}"
                )
            return self._blobs.get(ref)

        record = StoredRecord.read(self._run_id, self._end(), fetch)
        full_lineage = version_lineage(record, record.last_version if version is None else version)
        document = asdict(full_lineage)
        document["chain"] = document["chain"][:500]
        document["num_links"] = len(full_lineage.chain)
        document["chapters"] = {
            step.step: c.number for c in record.chapters for step in c.steps if step.step == full_lineage.link.step
        }
        return document

    def config(self) -> bytes | None:
        """Return the settings of the newest recorded session as JSON, None where the newest chapters have none."""
        budget = self._begin(num_objects=200, seconds=2.0)
        newest = self._newest(budget, range(self._chapters.last, 0, -1))
        lives = next((chapter.lives for chapter in newest if chapter.lives), ())
        return self._blobs.get(lives[-1].config) if lives else None

    def _begin(self, **bounds: Any) -> ReadBudget:
        """Return what a request may read, and read the end of the record."""
        budget = ReadBudget(**bounds)
        self._chapters.set_end(self._end(), budget)
        return budget

    def _newest(self, budget: ReadBudget, numbers: Iterable[int]) -> Iterator[LineageChapter]:
        """Yield chapters by number, until there is none or the budget is spent."""
        for number in numbers:
            if (chapter := self._chapters.chapter(number, budget)) is None:
                return
            yield chapter

    def _end(self) -> BlobRef:
        return end_of_record(self._run_id, self._folder, self._pointer)

    def _scan_chapter(
        self, at: tuple[int, int], query: GroupQuery, items: list[dict[str, Any]], budget: ReadBudget
    ) -> tuple[int, int] | None:
        """Add what a query accepts of one chapter from a place on; return where the rest begins, None at the end."""
        number, place = at
        span = self._chapters.span(number)
        if span is not None and not query.may_be_in(*span):
            return (number - 1, 0) if number > 1 else None
        chapter = self._chapters.chapter(number, budget)
        if chapter is None:
            return at if budget.is_spent else None
        listed = list(entries(chapter, is_last=number == self._chapters.last))
        for position in range(place, len(listed)):
            if len(items) >= query.limit or (budget.is_spent and (query.texts or query.prompt)):
                return number, position
            if query.accepts(listed[position]):
                items.extend(self._rows(listed[position], query, budget))
        return (number - 1, 0) if number > 1 else None

    def _rows(self, entry: Entry, query: GroupQuery, budget: ReadBudget) -> Iterable[dict[str, Any]]:
        group_texts = self._texts(entry, budget) if query.texts or query.prompt else None
        rows = trajectory_rows(entry, query) if query.each_trajectory else [group_row(entry)]
        needle = query.prompt.casefold()
        kept = []
        for row in rows:
            index = row.get("index")
            completions: Sequence[str] = () if group_texts is None else group_texts.completions
            if index is not None:
                completions = completions[index : index + 1]
            if needle and (group_texts is None or not _contains(needle, group_texts.prompt_text, *completions)):
                continue
            if group_texts is not None:
                row["prompt"] = group_texts.prompt_text[:_EXCERPT]
                if index is not None and completions:
                    row["completion"] = completions[0][:_EXCERPT]
            kept.append(row)
        return kept

    def _texts(self, entry: Entry, budget: ReadBudget) -> GroupTexts | None:
        try:
            return None if entry.pack is None else self._decoded(entry, entry.pack, budget, group_pack.decode_texts)
        except (BlobError, PackError, QueryRefused):
            return None

    def _decoded(self, entry: Entry, pack: BlobRef, budget: ReadBudget, decode: Callable[..., list[G]]) -> G | None:
        """Return a group as ``decode`` reads it from its pack; None when the pack does not hold it."""
        if entry.scored is None:  # its size and place are in no message
            groups = decode(self._pack(pack, budget, most=_CLOSED_PACK_BYTES), None)
            return next((group for group in groups if group.group_id == entry.group_id), None)
        generated = entry.scored.generated
        return decode(self._pack(pack, budget, most=_PACK_BYTES), [generated.row_group], described=[generated])[0]

    def _pack(self, ref: BlobRef, budget: ReadBudget, *, most: int) -> bytes:
        if (cached := self._packs.get(ref.key)) is not None:
            return cached
        if ref.size_bytes > most:
            raise QueryRefused(f"pack {ref.key} has {ref.size_bytes} bytes, the page opens at most {most}")
        data = self._blobs.get(ref)
        budget.take(len(data))
        self._packs.put(ref.key, data, len(data))
        return data

    def _step_at(self, after: tuple[int, int] | None, budget: ReadBudget) -> int | None:
        """Return the step at which the rest begins; None at the end, and where that is not of a step."""
        if after is None:
            return None
        chapter = self._chapters.chapter(after[0], budget) if after[1] else None
        if chapter is not None:
            return next((entry.step for entry in islice(entries(chapter), after[1], None)), None)
        return (self._chapters.span(after[0]) or (None, None))[1]


def _contains(needle: str, *texts: str) -> bool:
    return any(needle in text.casefold() for text in texts)
