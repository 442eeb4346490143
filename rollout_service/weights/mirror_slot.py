"""One copy of a model on this host: a Hugging Face folder that patches are applied to, in place; and which of several to write to.

    <cache>/a/config.json tokenizer.json … model-00001-of-00003.safetensors … model.safetensors.index.json
    <cache>/a.json        the journal: which version the folder holds, and which is being written to it

The journal is written first: before a byte of the folder changes, ``a.json`` names the version before and the version
after. A process that is killed in between leaves a torn folder. It is never served; applying the same patches again
from the version before repairs it, because patches hold absolute values. Another process hashes a finished folder
before it serves it.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from penstock.protocol.errors import ConfigError, StateMismatch
from penstock.protocol.files import atomic_write
from penstock.protocol.groups import BlobRef, Count, Sha256, Wire
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.protocol.weights.layout import (
    Bucket,
    TensorDigest,
    WeightLayout,
    bucket_digests,
    shard_header,
    shard_index,
    shard_name,
    weights_digest,
)
from penstock.protocol.weights.manifest import ModelFile, VersionManifest
from penstock.protocol.weights.manifest_chain import CatchUp, Held
from penstock.protocol.weights.patch_segment import Bytes
from penstock.protocol.weights.version_reader import ChangedWords, WeightReader, for_buckets
from penstock.rollout_service.engines.weight_changes import NUM_THREADS, NoChanges, TensorChange, WeightChanges

NUM_REGULAR_SLOTS = 2  # the version that is served, and the next one; further slots hold pinned versions
_INDEX = "model.safetensors.index.json"
_SHARDS = "*.safetensors"
_JOURNAL_BLOCK = 4096  # bytes written at once: a journal is padded to a multiple of it
Link = Callable[[ModelFile, Path], None]  # puts a config or tokenizer file of a version into a folder


@dataclass(frozen=True, slots=True)
class SlotContents:
    base: Held | None  # what patches may start from; None: nothing
    servable: PolicyVersion | None  # None: empty, torn or not verified


def slot_to_write(slots: Sequence[SlotContents], in_use: Collection[PolicyVersion]) -> int:
    """Return the number of the slot to write the next version to; it holds no version in ``in_use``.

    Of the regular slots, the one with the newest contents: it needs the fewest patches. Otherwise an empty further slot.
    Raises ConfigError when all slots are in use.
    """
    free = [number for number, slot in enumerate(slots) if slot.servable is None or slot.servable not in in_use]
    regular = [number for number in free if number < NUM_REGULAR_SLOTS]
    usable = regular or [number for number in free if slots[number].base is None]
    if not usable:
        held = [slot.servable for slot in slots]
        raise ConfigError(f"all {len(slots)} model folders are in use at once, by versions {held}; please report this")
    bases = [-1 if slot.base is None else slot.base.version for slot in slots]
    return max(usable, key=lambda number: bases[number])


def nearest_source(slots: Sequence[SlotContents], target: PolicyVersion) -> int | None:
    servable = {n: slot.servable for n, slot in enumerate(slots) if slot.servable is not None}
    candidates = {number: version for number, version in servable.items() if not is_newer(version, target)}
    return max(candidates, key=lambda number: candidates[number], default=None)


class HeldVersion(Wire):
    """A version that a folder holds; stored in the journal."""

    version: Count
    manifest: BlobRef
    state_root: Sha256
    layout: BlobRef


class SlotState(Wire):
    """The journal, stored as JSON: ``becoming`` is the version being written; None when the folder is finished."""

    holds: HeldVersion | None
    becoming: HeldVersion | None = None


class Slot:
    """One folder and its journal. Blocking; one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._journal = folder.with_suffix(".json")
        self.state = _read(self._journal)
        self._digests: list[list[TensorDigest]] | None = None  # of what it holds; None: not verified
        self.is_patched = False  # what it holds is the version before and patches, in this process

    @property
    def version(self) -> PolicyVersion | None:
        """The version that can be served from here; None when the folder is empty, torn or not verified."""
        if self.state.holds is None or self.state.becoming is not None or self._digests is None:
            return None
        return PolicyVersion(self.state.holds.version)

    @property
    def base(self) -> Held | None:
        """What patches may start from: the version it holds, or held before it was torn; None when empty."""
        holds = self.state.holds
        return None if holds is None else Held(PolicyVersion(holds.version), holds.state_root)

    @property
    def contents(self) -> SlotContents:
        return SlotContents(base=self.base, servable=self.version)

    def holds(self, target: VersionManifest) -> bool:
        return self.version is not None and self.base == Held(PolicyVersion(target.version), target.state_root)

    def verify(self, reader: WeightReader) -> None:
        """Hash a finished folder that another process left.

        One whose hash differs stays unverified, like a torn one; one whose files are missing or short is emptied. Raises one of `version_reader.UNUSABLE` when the manifest or layout of its version is gone.
        """
        holds = self.state.holds
        if holds is None or self.state.becoming is not None or self._digests is not None:
            return
        layout = reader.layout(reader.manifest(holds.manifest, PolicyVersion(holds.version)))
        try:
            digests = [bucket_digests(b, self._map(layout, n).data) for n, b in enumerate(layout.buckets)]
        except (OSError, ValueError):  # files are missing or short
            self._empty()
            return
        if weights_digest(tensor for bucket in digests for tensor in bucket) == holds.state_root:
            self._digests = digests

    def advance(self, plan: CatchUp, reference: BlobRef, reader: WeightReader, link: Link) -> None:
        """Bring the folder to the plan's target; raises what `WeightReader.bring` raises, and leaves it torn then."""
        layout, target = reader.layout_of(plan), plan.target
        becoming = HeldVersion(
            version=target.version, manifest=reference, state_root=target.state_root, layout=target.layout
        )
        known, self._digests, self.is_patched = self._digests, None, plan.anchor is None
        if plan.anchor is not None:  # every bucket is fetched; files of the right size are overwritten
            known = None
        self._write(SlotState(holds=self.state.holds if plan.anchor is None else None, becoming=becoming))
        self._lay_out(layout, target.model_files, link)
        digests = known or [[] for _ in layout.buckets]
        touched = [n for n in range(len(layout.buckets)) if known is None or plan.changes_of(n)]

        def bring(number: int) -> None:
            raw = self._map(layout, number)
            if not reader.bring(plan, number, raw):
                self.is_patched = False
            digests[number] = bucket_digests(layout.buckets[number], raw.data)

        for_buckets(touched, bring)
        root = weights_digest(tensor for bucket in digests for tensor in bucket)
        if root != target.state_root:
            self._empty()
            raise StateMismatch(f"version {target.version}: its root is {root}, its manifest says {target.state_root}")
        self._write(SlotState(holds=becoming))
        self._digests = digests

    def copy(self, other: Slot) -> None:
        self._empty()
        self._write(SlotState(holds=None, becoming=other.state.holds))
        for path in other.folder.iterdir():
            if path.match(_SHARDS) or path.name == _INDEX:  # these are written to
                shutil.copyfile(path, self.folder / path.name)
            else:
                os.link(path, self.folder / path.name)
        self._write(other.state)
        self._digests = None if other._digests is None else [*other._digests]

    def changes(self, target: VersionManifest, reader: WeightReader, limit: float) -> WeightChanges | NoChanges:
        """Return what turns the version that is held here into another; see `Mirror.changes`."""
        plan, base = reader.plan(target, self.base), self.version
        if plan.anchor is not None or base is None:
            return "chain"
        layout = reader.layout(target)
        if sum(patch.num_changed for patch in plan.patches) > limit * layout.num_words:
            return "dense"
        of_buckets: dict[int, Sequence[TensorChange]] = {}

        def find(number: int) -> None:
            found = reader.changed_words(plan, number, self._map(layout, number))
            of_buckets[number] = _tensor_changes(layout.buckets[number], found)

        numbers = [number for number in range(len(layout.buckets)) if plan.changes_of(number)]
        for_buckets(numbers, find, at_once=NUM_THREADS)
        tensors = itertools.chain.from_iterable(of_buckets[number] for number in numbers)
        return WeightChanges(base, PolicyVersion(target.version), layout.num_words, tuple(tensors))

    def remove(self) -> None:
        self._journal.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.state, self._digests = SlotState(holds=None), None

    def _empty(self) -> None:
        self.remove()
        self.folder.mkdir()

    def _lay_out(self, layout: WeightLayout, files: Sequence[ModelFile], link: Link) -> None:
        self.folder.mkdir(exist_ok=True)
        count = len(layout.buckets)
        wanted = {_INDEX, *(file.name for file in files), *(shard_name(n, count) for n in range(count))}
        for path in self.folder.iterdir():
            if path.name not in wanted:
                path.unlink()
        for number, bucket in enumerate(layout.buckets):
            _make_shard(self.folder / shard_name(number, count), bucket)
        index, wanted_index = self.folder / _INDEX, shard_index(layout)
        if not index.exists() or index.read_bytes() != wanted_index:
            index.write_bytes(wanted_index)
        for file in files:
            link(file, self.folder)

    def _map(self, layout: WeightLayout, number: int) -> Bytes:
        bucket, path = layout.buckets[number], self.folder / shard_name(number, len(layout.buckets))
        header = shard_header(bucket)
        if bucket.num_bytes == 0:
            return np.empty(0, np.uint8)
        if path.stat().st_size != len(header) + bucket.num_bytes:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, expected {len(header) + bucket.num_bytes}")
        return np.memmap(path, np.uint8, mode="r+", offset=len(header), shape=(bucket.num_bytes,))

    def _write(self, state: SlotState) -> None:
        """Write the journal: over the old one where it is as long, since a rename costs as much as a small model.

        A journal that is torn by this cannot be read, and the folder is then treated as empty.
        """
        data = state.model_dump_json().encode()
        data += b" " * (-len(data) % _JOURNAL_BLOCK)
        if self._journal.exists() and self._journal.stat().st_size == len(data):
            with self._journal.open("r+b", buffering=0) as file:
                file.write(data)
        else:
            atomic_write(self._journal, data)
        self.state = state


def _tensor_changes(bucket: Bucket, found: ChangedWords) -> list[TensorChange]:
    words, old, new = found
    differs = old != new
    if not differs.all():
        words, old, new = words[differs], old[differs], new[differs]
    starts = [tensor.byte_offset // bucket.word_bytes for tensor in bucket.tensors]
    cuts = [*np.searchsorted(words, starts), len(words)]
    return [
        TensorChange(tensor.name, bucket.dtype, words[first:end] - start, new[first:end], old[first:end])
        for tensor, start, first, end in zip(bucket.tensors, starts, cuts, cuts[1:], strict=False)
        if end > first
    ]


def _read(journal: Path) -> SlotState:
    try:
        return SlotState.model_validate_json(journal.read_bytes())
    except (OSError, ValidationError):
        return SlotState(holds=None)


def _make_shard(path: Path, bucket: Bucket) -> None:
    header = shard_header(bucket)
    size = len(header) + bucket.num_bytes
    if path.exists() and path.stat().st_size == size:
        with path.open("rb") as file:
            if file.read(len(header)) == header:
                return
    with path.open("wb") as file:
        file.write(header)
        file.flush()
        if bucket.num_bytes:  # a full disk raises an error here, not SIGBUS when the mapped file is written to
            os.posix_fallocate(file.fileno(), len(header), bucket.num_bytes)
