"""Reads the packs of scored groups for the collector: held against their tasks, and marked while they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from penstock.protocol import blob_keys
from penstock.protocol.errors import PackError, ReaderKilled, TextMismatch, UnpublishedVersion
from penstock.protocol.facts import BlobRef, ScoredGroup
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.trajectory import Group
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.groups.completion_texts import CompletionTexts
from penstock.trainer.groups.reading_mark import ReadingMark
from penstock.trainer.groups.stored_groups import read_groups
from penstock.trainer.learner.image_reader import ImageReader

NeverPublished = Callable[[Iterable[PolicyVersion]], Sequence[PolicyVersion]]


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
        """Read objects with ``fetch``.

        Args:
            fetch: Returns the verified bytes of an object.
            vocab_size: Of the model; token ids beyond it are refused. None: not known.
            mark: Where the pack that is being read is marked; None: a pack that kills the trainer is not quarantined.
            texts: Decodes completions again; None: texts are not compared with tokens.
            never_published: Returns those versions that the run has not published; None: not known.
            images: Reads the images of rows; None: the model reads none, and a group with one is refused.
        """
        self._fetch = fetch
        self._vocab_size = vocab_size
        self._mark = mark
        self._texts = texts
        self._never_published = never_published
        self._images = images

    def read(self, pack: BlobRef, wanted: Sequence[ScoredGroup], promises: Sequence[TaskPromise]) -> list[Group]:
        """Return groups of one pack; ``promises`` are what their tasks asked for.

        Raises BlobMissing, BlobCorrupt, BlobStoreUnreachable, PackError, and ReaderKilled for a pack that has killed the
        trainer twice.
        """
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
