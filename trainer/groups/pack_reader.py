"""Reads the packs of scored groups for the collector: held against their tasks, and marked while they are read.

`CompletionTexts` holds the text of a completion, which was scored, against its token ids, which are trained on.
Only the trainer has both and the tokenizer. Decoding costs about 0.2 µs of CPU a token. Engines decode
piece by piece and differ in spaces and in characters that no token completes, so neither is compared. A
group without any text is one of an engine that returns none.

`ReadingMark` marks the pack that is being read in the run folder, so that a pack that kills the trainer is known by name.
The mark survives the process and not the machine: a file that is written and not synced. It is set when the bytes of a
pack have arrived and removed when its groups are held, so a trainer that is killed at any other moment, or stopped, leaves
none. A pack that was marked when two trainers ended is not read a third time.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import structlog

from penstock.protocol import blob_keys
from penstock.protocol.errors import PackError, PenstockError, ReaderKilled, TextMismatch, UnpublishedVersion
from penstock.protocol.files import atomic_write
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.packs import group_pack, pack_bounds
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.record.lineage import RecordedGroup
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.learner.vision import ImageReader

log = structlog.get_logger("trainer.groups.reading_mark")

_NO_CHARACTER = "\ufffd"  # what is decoded of bytes that are no character
_RANDOM = random.SystemRandom()  # a writer of packs must not know which row is decoded

Decode = Callable[[Sequence[Sequence[int]], bool], list[str]]  # token ids, whether special tokens are skipped

_MARK, _COUNTS = "reading", "readers_killed.json"
_MOST_KILLED = 2
_MAX_KNOWN = 1000  # packs with a count; the oldest are forgotten
NeverPublished = Callable[[Iterable[PolicyVersion]], Sequence[PolicyVersion]]


class CompletionTexts:
    def __init__(self, decode: Decode, *, rows: int | None) -> None:
        """Decode ``rows`` completions of a group, chosen at random, with ``decode``; None: all."""
        self._decode, self._rows = decode, rows

    @classmethod
    def of(cls, check_texts: int | Literal["all"], decode: Decode) -> CompletionTexts | None:
        """Return what the setting ``trainer.check_texts`` asks for; None for 0."""
        if not check_texts:
            return None
        return cls(decode, rows=None if check_texts == "all" else check_texts)

    def check(self, groups: Sequence[Group]) -> None:
        """Raise TextMismatch if a chosen completion has a text that its tokens do not say; groups without texts pass."""
        chosen = [
            (group, number)
            for group in groups
            if any(row.completion_text for row in group.trajectories)
            for number in self._chosen(len(group.trajectories))
        ]
        if not chosen:
            return
        rows = [group.trajectories[number] for group, number in chosen]
        for (group, number), row, text in zip(
            chosen, rows, self._decode([_visible(row) for row in rows], True), strict=True
        ):
            if not any(_is_same(row, said) for said in (text, *self._others(row))):
                raise TextMismatch(
                    f"group {group.group_id}: completion {number} was scored as {row.completion_text[:200]!r}, and its tokens "
                    f"say {text[:200]!r}; an engine whose texts are others by design needs trainer.check_texts=0"
                )

    def _chosen(self, num_rows: int) -> Sequence[int]:
        if self._rows is None or self._rows >= num_rows:
            return range(num_rows)
        return _RANDOM.sample(range(num_rows), self._rows)

    def _others(self, row: Trajectory) -> list[str]:
        sampled = _sampled(row)
        return [
            self._decode([ids], skip)[0] for ids, skip in ((sampled, True), (_visible(row), False), (sampled, False))
        ]


def _sampled(row: Trajectory) -> list[int]:
    return row.token_ids[row.loss_mask].tolist()


def _visible(row: Trajectory) -> list[int]:
    sampled = _sampled(row)
    return sampled[:-1] if row.finish_reason == "stop" else sampled


def _is_same(row: Trajectory, decoded: str) -> bool:
    text, decoded = "".join(row.completion_text.split()), "".join(decoded.split())
    if text == decoded:
        return True
    if _NO_CHARACTER not in text and _NO_CHARACTER not in decoded and len(row.version_runs) == 1:
        return False
    return _ascii(text) == _ascii(decoded)  # a character was cut: by its end, or by an update of the weights


def _ascii(text: str) -> str:
    return text.encode("ascii", "ignore").decode()


class ReadingMark:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._counts_path = folder / _COUNTS
        self._file = os.open(folder / _MARK, os.O_RDWR | os.O_CREAT, 0o644)
        self._killed = self._read_counts()
        if left := os.pread(self._file, 4096, 0).split(b"\n")[0].decode("utf-8", "replace"):
            self._killed[left] = self._killed.pop(left, 0) + 1
            log.warning("the trainer was killed while it read a pack", pack=left, times=self._killed[left])
            self._write_counts()
        self.clear()

    def is_quarantined(self, pack: BlobRef) -> bool:
        return self._killed.get(_name(pack), 0) >= _MOST_KILLED

    def set(self, pack: BlobRef) -> None:
        os.pwrite(self._file, _name(pack).encode() + b"\n", 0)

    @contextlib.contextmanager
    def cleared_unless_fatal(self) -> Iterator[None]:
        """Clear the mark at the end of the block, or when it refuses the pack; any other exception ends the trainer."""
        try:
            yield
        except PenstockError:
            self.clear()
            raise
        self.clear()

    def clear(self) -> None:
        os.pwrite(self._file, b"\n", 0)

    def close(self) -> None:
        os.close(self._file)

    def _read_counts(self) -> dict[str, int]:
        try:
            stored = json.loads(self._counts_path.read_bytes())
            return {str(name): int(count) for name, count in stored.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as err:
            log.warning("counts of packs that killed the trainer are unreadable: counted anew", error=str(err))
            return {}

    def _write_counts(self) -> None:
        newest = dict(list(self._killed.items())[-_MAX_KNOWN:])
        atomic_write(self._counts_path, json.dumps(newest))


def _name(pack: BlobRef) -> str:
    return pack.key.replace("\n", " ")


class PackReader:
    def __init__(
        self,
        fetch: Callable[[BlobRef], bytes],
        *,
        vocab_size: int | None = None,
        mark: ReadingMark | None = None,
        texts: CompletionTexts | None = None,
        never_published: NeverPublished | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """Read objects with ``fetch``, which verifies them; what is None is not checked, or not marked.

        Without ``images`` the model reads none, and a group with one is refused.
        """
        self._fetch, self._vocab_size, self._mark = fetch, vocab_size, mark
        self._texts, self._never_published, self._images = texts, never_published, images

    def read(self, pack: BlobRef, wanted: Sequence[ScoredGroup], promises: Sequence[TaskPromise]) -> list[Group]:
        """Return groups of one pack; raises as `read_groups`, and ReaderKilled for a quarantined pack."""
        if self._mark is not None and self._mark.is_quarantined(pack):
            raise ReaderKilled(
                f"two sessions of the trainer were killed while they read {pack.key}: it is not read again, and its groups "
                "are issued again; keep the object and report it"
            )
        with self._mark.cleared_unless_fatal() if self._mark is not None else contextlib.nullcontext():
            groups = read_groups(pack, wanted, self._marked_fetch, promises=promises, vocab_size=self._vocab_size)
            self._check_versions(pack, groups)
            self._check_images(pack, groups)
            if self._texts is not None:
                self._check_texts(pack, groups, promises)
            return groups

    def _check_versions(self, pack: BlobRef, groups: Sequence[Group]) -> None:
        if self._never_published is None:
            return
        for group in groups:
            unknown = self._never_published({run.version for row in group.trajectories for run in row.version_runs})
            if unknown:
                raise UnpublishedVersion(
                    f"{pack.key}: group {group.group_id} names version {unknown[0]} for its tokens, which this run has never "
                    "published: no engine had its weights. Look for the worker that stored the pack, and change its login"
                )

    def _check_images(self, pack: BlobRef, groups: Sequence[Group]) -> None:
        for group in groups:
            if self._images is not None:
                self._images.check(blob_keys.owner_of_pack(pack.key), group)
            elif group.image_processor is not None:
                raise PackError(
                    f"{pack.key}: group {group.group_id} has images, and the model that is trained reads none"
                )

    def _check_texts(self, pack: BlobRef, groups: Sequence[Group], promises: Sequence[TaskPromise]) -> None:
        assert self._texts is not None
        decoded = [group for group, promise in zip(groups, promises, strict=True) if promise.is_one_completion]
        try:
            self._texts.check(decoded)
        except TextMismatch as err:
            raise TextMismatch(f"{pack.key}: {err}") from None
        except Exception as err:  # noqa: BLE001  whatever the tokenizer raises: no pack may end its reader
            raise PackError(
                f"{pack.key}: its tokens cannot be decoded: {type(err).__name__}: {str(err)[:300]}"
            ) from None

    def close(self) -> None:
        if self._mark is not None:
            self._mark.close()

    def _marked_fetch(self, pack: BlobRef) -> bytes:
        data = self._fetch(pack)
        if self._mark is not None:
            self._mark.set(pack)
        return data


def read_groups(
    pack: BlobRef,
    wanted: Sequence[ScoredGroup],
    fetch: Callable[[BlobRef], bytes],
    *,
    promises: Sequence[TaskPromise] = (),
    vocab_size: int | None = None,
) -> list[Group]:
    """Fetch and decode groups of one pack, and check them against the messages that describe them.

    ``promises`` are what the task of each group asked for; () where the groups are recorded ones, which were checked.
    Raises BlobMissing, BlobCorrupt, BlobStoreUnreachable, or PackError if the pack holds something else.
    """
    described = [scored.generated for scored in wanted]
    try:
        for summary, promise in zip(described, promises, strict=bool(promises)):
            promise.check_lengths(
                summary.group_id, summary.completion_tokens, summary.has_baseline, len(summary.abandoned)
            )
        pack_bounds.check_message(pack, described)
        groups = group_pack.decode(
            fetch(pack), [summary.row_group for summary in described], described=described, vocab_size=vocab_size
        )
        for group, promise in zip(groups, promises, strict=bool(promises)):
            promise.check(group)
    except PackError as err:
        raise PackError(f"{pack.key}: {err}") from None
    return groups


def ready_groups(
    packs: Sequence[BlobRef], groups: Sequence[RecordedGroup], fetch: Callable[[BlobRef], bytes]
) -> list[ReadyGroup]:
    by_pack: dict[int, list[Group]] = {}
    for number, pack in enumerate(packs):
        by_pack[number] = read_groups(pack, [g.scored for g in groups if g.pack == number], fetch)
    taken = {number: iter(read) for number, read in by_pack.items()}
    return [ReadyGroup(g.scored, packs[g.pack], next(taken[g.pack])) for g in groups]
