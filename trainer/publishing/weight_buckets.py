"""Some or all buckets of one version, each as the contiguous bytes that are published.

A model is copied straight into its buckets. The same memory is compared, hashed, stored and kept as the base of
the next patch, so it is never written to once it is sealed.

A `Snapshot` is what the training thread submits: the weights of one version on the CPU, as they were when the step ended. A run that publishes
adapters submits the low-rank factors alone, complete on rank 0; the model that they are applied to, their base, is published once.

A Hugging Face model folder has shards of safetensors, their index, and small files, which are the same in a published version and in
the exported model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.protocol.files import atomic_write, target_outside
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import AdapterConfig, adapter_digest
from penstock.protocol.weights.bucket_codec import bucket_xxh3
from penstock.protocol.weights.layout import (
    BUCKET_BYTES,
    TensorDigest,
    TensorSpec,
    WeightLayout,
    bucket_digests,
    build_layout,
    shard_header,
    shard_index,
    shard_name,
    weights_digest,
)
from penstock.protocol.weights.manifest import SMALL_FILE
from penstock.protocol.weights.manifest_chain import CatchUp
from penstock.protocol.weights.patch_segment import Bytes
from penstock.protocol.weights.version_reader import WeightReader, for_buckets
from penstock.trainer.errors import UnsupportedModel

MAX_SHARD_BYTES = 1024**3
_MAX_SMALL_FILE_BYTES = 64 * 1024**2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class TensorSink(Protocol):
    @property
    def names(self) -> Collection[str]: ...

    def put(self, name: str, tensor: Tensor) -> None:
        """Take a whole tensor; it changes afterwards."""
        ...


class WeightBuckets:
    """Buckets ``numbers`` of a layout. Written by one thread, then sealed, then read by any."""

    def __init__(self, layout: WeightLayout, numbers: Iterable[int], *, copy_id: int = 0) -> None:
        self.layout, self.copy_id = layout, copy_id
        self.raw: dict[int, Bytes] = {n: np.empty(layout.buckets[n].num_bytes, np.uint8) for n in numbers}
        self._places = {t.name: (n, t) for n in self.raw for t in layout.buckets[n].tensors}
        self._digests: Future[list[TensorDigest]] | None = None
        self._xxh3: dict[int, str] = {}

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy a whole tensor to its place, rounded to the layout's dtype on the tensor's device."""
        place, source = self._place(name), tensor.detach()
        if source.device.type != "cpu":
            source = source.to(place.dtype)  # so that only the smaller copy is transferred
        place.copy_(source)

    def seal(self) -> None:
        pool = ThreadPoolExecutor(1, "digest")
        self._digests = pool.submit(
            lambda: [d for n, raw in self.raw.items() for d in bucket_digests(self.layout.buckets[n], raw.data)]
        )
        pool.shutdown(wait=False)

    @property
    def hashed(self) -> Future[list[TensorDigest]]:
        assert self._digests is not None, "buckets are sealed before they are read"
        return self._digests

    def digests(self) -> list[TensorDigest]:
        return self.hashed.result()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors as views of the buckets; they must not be written to."""
        return {name: self._place(name) for name in self._places}

    def xxh3(self, number: int) -> str:
        if number not in self._xxh3:
            self._xxh3[number] = bucket_xxh3(self.raw[number])
        return self._xxh3[number]

    def set_xxh3(self, number: int, known: str | None) -> None:
        if known is None:
            self.xxh3(number)
        else:
            self._xxh3[number] = known

    def _place(self, name: str) -> Tensor:
        number, placed = self._places[name]
        raw = torch.from_numpy(self.raw[number])[placed.byte_offset : placed.byte_offset + placed.num_bytes]
        return raw.view(getattr(torch, self.layout.buckets[number].dtype)).view(placed.shape)


def assign_buckets(layout: WeightLayout, num_shares: int) -> list[list[int]]:
    """Return the bucket numbers of each share, as equal in bytes as whole buckets allow.

    The largest bucket goes first, to the share with the fewest bytes. Depends on nothing but the layout, so every
    rank computes the same result.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    filled = [0] * num_shares
    for number in sorted(range(len(layout.buckets)), key=lambda n: (-layout.buckets[n].num_bytes, n)):
        index = min(range(num_shares), key=lambda i: (filled[i], i))
        shares[index].append(number)
        filled[index] += layout.buckets[number].num_bytes
    return [sorted(share) for share in shares]


def layout_of(tensors: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> WeightLayout:
    return build_layout(
        [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()],
        bucket_bytes=bucket_bytes,
    )


def copy_to_buckets(
    tensors: Mapping[str, Tensor], *, copy_id: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> WeightBuckets:
    layout = layout_of(tensors, bucket_bytes)
    buckets = WeightBuckets(layout, range(len(layout.buckets)), copy_id=copy_id)
    for name, tensor in tensors.items():
        buckets.put(name, tensor)
    buckets.seal()
    return buckets


def read_buckets(plan: CatchUp, reader: WeightReader, numbers: Iterable[int] | None = None) -> WeightBuckets:
    """Read buckets of a version, by default all; raises one of `version_reader.UNUSABLE`, and BlobStoreUnreachable."""
    layout = reader.layout(plan.target)
    buckets = WeightBuckets(layout, range(len(layout.buckets)) if numbers is None else numbers)
    for raw in buckets.raw.values():
        raw[:] = 0
    if buckets.raw:
        for_buckets(list(buckets.raw), lambda number: reader.bring(plan, number, buckets.raw[number]))
    buckets.seal()
    return buckets


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The model that a run's adapters are applied to, as it is published: this rank's buckets of it."""

    buckets: WeightBuckets
    config: AdapterConfig  # the same for all adapters of a run
    root: str  # the `weights_digest` over all ranks' buckets


@dataclass(frozen=True, slots=True)
class ModelWeights:
    buckets: WeightBuckets
    all_ranks_root: Callable[[], str] | None = None  # root over all ranks' buckets; None if all are here

    def root_later(self) -> Callable[[], str]:
        if self.all_ranks_root is not None:
            return self.all_ranks_root
        hashed = self.buckets.hashed
        return lambda: weights_digest(hashed.result())

    def root(self) -> str:
        return self.root_later()()


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter to publish: its factors in one bucket, and the base that it is applied to."""

    buckets: WeightBuckets
    base: AdapterBase

    @classmethod
    def of(cls, factors: Mapping[str, Tensor], base: AdapterBase, *, copy_id: int = 0) -> AdapterWeights:
        return cls(copy_to_buckets(factors, copy_id=copy_id, bucket_bytes=sys.maxsize), base)

    def root_later(self) -> Callable[[], str]:
        hashed, base = self.buckets.hashed, self.base
        config = hashlib.sha256(base.config.to_json()).hexdigest()
        return lambda: adapter_digest(base.root, config, hashed.result())

    def root(self) -> str:
        return self.root_later()()


Weights = ModelWeights | AdapterWeights
W = TypeVar("W", ModelWeights, AdapterWeights, Weights)


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[W]):
    version: PolicyVersion
    step: int
    weights: W
    dtype: str
    must_publish: bool = False  # never skipped: an evaluation needs this version, or it is the last


class ModelFiles:
    """Some of a folder's files of weights, a bucket each, written tensor by tensor; a context manager."""

    def __init__(self, folder: Path, layout: WeightLayout, numbers: Iterable[int]) -> None:
        self._folder, self._layout = folder, layout
        self._places = {t.name: (n, t) for n in numbers for t in layout.buckets[n].tensors}
        self._files: dict[int, tuple[BinaryIO, int]] = {}  # with the length of its header
        self._opened = ExitStack()

    def __enter__(self) -> ModelFiles:
        for number in sorted({number for number, _ in self._places.values()}):
            file = self._opened.enter_context((self._folder / _file_name(self._layout, number)).open("wb"))
            header = shard_header(self._layout.buckets[number])
            file.write(header)
            self._files[number] = file, len(header)
        return self

    def __exit__(self, *_: object) -> None:
        with self._opened:
            for file, _header_bytes in self._files.values():
                file.flush()
                os.fsync(file.fileno())

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def put(self, name: str, tensor: Tensor) -> None:
        number, placed = self._places[name]
        file, header_bytes = self._files[number]
        dtype = getattr(torch, self._layout.buckets[number].dtype)
        whole = tensor.detach().to(dtype).to("cpu").contiguous().reshape(-1).view(torch.uint8)
        file.seek(header_bytes + placed.byte_offset)
        file.write(whole.numpy().data)


def _file_name(layout: WeightLayout, number: int) -> str:
    count = len(layout.buckets)
    return "model.safetensors" if count == 1 else shard_name(number, count)


def write_small_files(
    folder: Path, layout: WeightLayout, *, like: Path, dtype: str, changed: Mapping[str, Any] | None = None
) -> None:
    index = {"model.safetensors.index.json": shard_index(layout)} if len(layout.buckets) > 1 else {}
    for name, data in {**small_files(like, dtype, changed), **index}.items():
        atomic_write(folder / name, data, sync=True)


def small_files(model_folder: Path, dtype: str, changed: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """Return the files of a model folder besides its weights that a manifest may name: config, tokenizer, templates.

    ``config.json`` gets the ``dtype`` of the new weights, and what else has ``changed``. Raises UnsupportedModel for a link out of the folder: what it
    links to would be published.
    """
    files = {
        path.name: path.read_bytes()
        for path in sorted(model_folder.iterdir())
        if path.is_file()
        and _NAME.fullmatch(path.name)
        and SMALL_FILE.fullmatch(path.name)
        and path.stat().st_size <= _MAX_SMALL_FILE_BYTES
        and _is_own(path)
    }
    config = json.loads(files["config.json"])
    config.pop("torch_dtype", None)
    config |= {"dtype": dtype, **(changed or {})}
    files["config.json"] = json.dumps(config, indent=2).encode()
    return files


def _is_own(path: Path) -> bool:
    if (target := target_outside(path, path.parent)) is None:
        return True
    raise UnsupportedModel(
        f"{path} links to {target}, outside of the model folder, and would be published with the model; copy the file there, "
        "or remove the link"
    )
