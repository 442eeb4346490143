"""One copy of a model on this host: a Hugging Face folder that patches are applied to, in place.

    <mirror>/a/config.json tokenizer.json … model-00001-of-00003.safetensors … model.safetensors.index.json
    <mirror>/a.json        what the folder holds, or what was being made of it

The journal comes first: before a byte is written, ``a.json`` says what the folder was and what it is becoming.
A process that is killed in between leaves a torn folder. It is never served; applying the same patches again,
from what it was, heals it, because their values are absolute. What a finished ``a.json`` claims is hashed
before it is believed by another process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from penstock.protocol.errors import StateMismatch
from penstock.protocol.facts import BlobRef, Count, Sha256, Wire
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.digest import TensorDigest, weights_digest
from penstock.protocol.weights.layout import Bucket, WeightLayout, bucket_digests, shard_header, shard_index, shard_name
from penstock.protocol.weights.manifest import ModelFile
from penstock.protocol.weights.manifest_chain import CatchUp, Held
from penstock.protocol.weights.patch_segment import Bytes
from penstock.protocol.weights.version_reader import WeightReader, for_buckets

_INDEX = "model.safetensors.index.json"
_SHARDS = "*.safetensors"
_JOURNAL_BLOCK = 4096  # bytes that are written at once: a journal is filled up to a multiple of it

Link = Callable[[ModelFile, Path], None]  # puts a small file of a version into a folder


class HeldVersion(Wire):
    """What a folder holds."""

    version: Count
    manifest: BlobRef
    state_root: Sha256
    layout: BlobRef


class SlotState(Wire):
    """The journal: ``becoming`` is None of a folder that is finished."""

    holds: HeldVersion | None
    becoming: HeldVersion | None = None


class Slot:
    """One folder and its journal. Blocking; one thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Read what an earlier process left; nothing is believed before `verify`."""
        self.folder = folder
        self._journal = folder.with_suffix(".json")
        self.state = _read(self._journal)
        self._digests: list[list[TensorDigest]] | None = None  # of what it holds; None: not known to be true

    @property
    def version(self) -> PolicyVersion | None:
        """The version that can be served from here; None of a folder that is empty, torn or not verified."""
        if self.state.holds is None or self.state.becoming is not None or self._digests is None:
            return None
        return PolicyVersion(self.state.holds.version)

    @property
    def base(self) -> Held | None:
        """What patches may start from: what it holds, or held before it was torn."""
        holds = self.state.holds
        return None if holds is None else Held(PolicyVersion(holds.version), holds.state_root)

    @property
    def reference(self) -> HeldVersion | None:
        """The version it holds or held, with the object that names it."""
        return self.state.holds

    def verify(self, reader: WeightReader) -> None:
        """Hash a finished folder that another process left; one that is not what it claims is as good as torn."""
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
        """Make the folder the plan's target; raises what `WeightReader.bring` does, and leaves it torn then."""
        layout, target = reader.layout(plan.target), plan.target
        becoming = HeldVersion(
            version=target.version, manifest=reference, state_root=target.state_root, layout=target.layout
        )
        known, self._digests = self._digests, None
        if plan.anchor is not None:  # all of it comes anew; files that fit are written over
            known = None
        self._write(SlotState(holds=self.state.holds if plan.anchor is None else None, becoming=becoming))
        self._lay_out(layout, target.model_files, link)
        digests = known or [[] for _ in layout.buckets]
        touched = [n for n in range(len(layout.buckets)) if known is None or plan.changes_of(n)]

        def bring(number: int) -> None:
            raw = self._map(layout, number)
            reader.bring(plan, number, raw)
            digests[number] = bucket_digests(layout.buckets[number], raw.data)

        for_buckets(touched, bring)
        root = weights_digest(tensor for bucket in digests for tensor in bucket)
        if root != target.state_root:
            self._empty()
            raise StateMismatch(
                f"version {target.version}: its root is {root}, its manifest promised {target.state_root}"
            )
        self._write(SlotState(holds=becoming))
        self._digests = digests

    def copy(self, other: Slot) -> None:
        """Become a copy of a folder that can be served: cheaper than fetching an anchor."""
        self._empty()
        self._write(SlotState(holds=None, becoming=other.state.holds))
        for path in other.folder.iterdir():
            if path.match(_SHARDS) or path.name == _INDEX:  # these are written to
                shutil.copyfile(path, self.folder / path.name)
            else:
                os.link(path, self.folder / path.name)
        self._write(other.state)
        self._digests = None if other._digests is None else [*other._digests]

    def remove(self) -> None:
        """Leave nothing."""
        self._journal.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.state, self._digests = SlotState(holds=None), None

    def _empty(self) -> None:
        self.remove()
        self.folder.mkdir()

    def _lay_out(self, layout: WeightLayout, files: Sequence[ModelFile], link: Link) -> None:
        """Make every file of the folder, shards as large as they must be; files of no use go."""
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
        """Put the journal down: over the old one where it is as long, since a rename costs as much as a small model.

        A journal that was torn all the same says nothing, and the folder is made anew.
        """
        data = state.model_dump_json().encode()
        data += b" " * (-len(data) % _JOURNAL_BLOCK)
        if self._journal.exists() and self._journal.stat().st_size == len(data):
            with self._journal.open("r+b", buffering=0) as file:
                file.write(data)
        else:
            partial = self._journal.with_suffix(".partial")
            partial.write_bytes(data)
            partial.replace(self._journal)
        self.state = state


def _read(journal: Path) -> SlotState:
    try:
        return SlotState.model_validate_json(journal.read_bytes())
    except (OSError, ValidationError):
        return SlotState(holds=None)


def _make_shard(path: Path, bucket: Bucket) -> None:
    """Make a file with the bucket's header and room for its bytes, unless it is there already."""
    header = shard_header(bucket)
    size = len(header) + bucket.num_bytes
    if path.exists() and path.stat().st_size == size:
        with path.open("rb") as file:
            if file.read(len(header)) == header:
                return
    with path.open("wb") as file:
        file.write(header)
        file.flush()
        if bucket.num_bytes:  # a full disk is an error here, not a fatal signal when the mapped file is written to
            os.posix_fallocate(file.fileno(), len(header), bucket.num_bytes)
