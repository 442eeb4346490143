r"""The layout of weights: tensors packed into buckets, deterministically; and one digest of a set of weights.

A bucket holds whole tensors of one dtype, without gaps; its raw bytes are exactly the data of one safetensors file, so
that `shard_header(bucket)` followed by the bucket is a file that engines load. A patch numbers the words of a bucket;
the layout maps them to tensors. The layout's id is the sha256 of its JSON; it changes with any name, dtype, shape or
bucket size. Patches exist within one layout only: a new layout starts with a full snapshot.

The digest is equal wherever it is computed: trainer, worker, audit, replay. Each tensor has an xxh3-128 over its raw
bytes (little-endian, row-major, as safetensors stores them); the root is a sha256 over these, sorted by name:

    sha256( "<name>\0<dtype>\0<d0,d1,...>\0<32 hex digits of xxh3-128>\n" for each tensor, UTF-8 )

Two levels, because a version that changes a few tensors needs only these hashed again, and because xxh3 runs at memory
speed. xxh3 detects accidental changes; against forgery each object has a sha256.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import xxhash
from pydantic import Field, ValidationError, model_validator

from penstock.protocol.errors import MalformedFact
from penstock.protocol.groups import Count, Wire, first_problem

# The code of a safetensors header: its name as a layout spells it, and bytes per value.
SAFETENSORS_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
}
BUCKET_BYTES = 64 * 1024**2
MAX_LAYOUT_BYTES = 256 * 1024**2
_MAX_DIMS = 16  # the product of millions of sizes takes hours
_HASHED_AT_ONCE = 256 * 1024  # bytes, which stay in the cache of a core
_ALIGNMENT = 64  # the data of a shard file begins at a multiple of it, so that a mapped file has aligned words
_DTYPES = {dtype: (code, num_bytes) for code, (dtype, num_bytes) in SAFETENSORS_DTYPES.items()}
TensorName = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00\n]+$")]


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """One tensor: ``dtype`` as in `SAFETENSORS_DTYPES`, ``xxh3`` as 32 hex digits over its raw bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    xxh3: str


def tensor_digest(name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> TensorDigest:
    return TensorDigest(name, dtype, tuple(shape), xxhash.xxh3_128_hexdigest(data))


def weights_digest(tensors: Iterable[TensorDigest]) -> str:
    """Return the root over all tensors, 64 hex digits; independent of their order.

    Raises ValueError when two tensors share a name, or a name contains a separator.
    """
    root = hashlib.sha256()
    last: str | None = None
    for tensor in sorted(tensors, key=lambda t: t.name):
        if tensor.name == last or "\0" in tensor.name or "\n" in tensor.name:
            raise ValueError(f"tensor {tensor.name!r}: names must be unique, without NUL and line break")
        shape = ",".join(map(str, tensor.shape))
        root.update(f"{tensor.name}\0{tensor.dtype}\0{shape}\0{tensor.xxh3}\n".encode())
        last = tensor.name
    return root.hexdigest()


class TensorSpec(NamedTuple):
    """A tensor of a model; ``dtype`` as in `SAFETENSORS_DTYPES` ("bfloat16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class PlacedTensor(Wire):
    """A tensor in its bucket: its raw bytes are ``[byte_offset, byte_offset + num_bytes)``."""

    name: TensorName
    shape: Annotated[tuple[Count, ...], Field(max_length=_MAX_DIMS)]
    byte_offset: Count
    num_bytes: Count


class Bucket(Wire):
    """Consecutive tensors of one dtype."""

    dtype: str
    tensors: Annotated[tuple[PlacedTensor, ...], Field(min_length=1)]

    @property
    def num_bytes(self) -> int:
        return self.tensors[-1].byte_offset + self.tensors[-1].num_bytes

    @property
    def word_bytes(self) -> int:
        """Bytes of one value: the word of the patch segments."""
        return _DTYPES[self.dtype][1]

    @property
    def num_words(self) -> int:
        return self.num_bytes // self.word_bytes

    @model_validator(mode="after")
    def _gapless(self) -> Bucket:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; known are {', '.join(_DTYPES)}")
        offset = 0
        for tensor in self.tensors:
            size = math.prod(tensor.shape) * self.word_bytes
            if (tensor.byte_offset, tensor.num_bytes) != (offset, size):
                raise ValueError(
                    f"{tensor.name}: {tensor.num_bytes} bytes at {tensor.byte_offset}, expected {size} at {offset}"
                )
            offset += size
        return self


class WeightLayout(Wire):
    """All tensors of a model in their buckets; ``tied`` names share the bytes of another, stored tensor."""

    buckets: tuple[Bucket, ...]
    tied: dict[TensorName, TensorName] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _unique(self) -> WeightLayout:
        names = [tensor.name for bucket in self.buckets for tensor in bucket.tensors]
        known = set(names)
        if len(known) != len(names):
            raise ValueError("a tensor is placed twice")
        for name, owner in self.tied.items():
            if name in known or owner not in known:
                raise ValueError(f"tied tensor {name}: must not be placed itself, and {owner} must be")
        return self

    @property
    def num_words(self) -> int:
        return sum(bucket.num_words for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def layout_id(self) -> str:
        return hashlib.sha256(self.to_json()).hexdigest()

    def placed(self) -> Iterator[tuple[int, Bucket, PlacedTensor]]:
        for number, bucket in enumerate(self.buckets):
            for tensor in bucket.tensors:
                yield number, bucket, tensor

    def to_json(self) -> bytes:
        fields = self.model_dump(mode="json")
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WeightLayout:
        if len(data) > MAX_LAYOUT_BYTES:
            raise MalformedFact(f"weight layout: {len(data)} bytes, the limit is {MAX_LAYOUT_BYTES}")
        try:
            return cls.model_validate_json(data)
        except ValidationError as err:
            raise MalformedFact(f"weight layout: {first_problem(err)}") from None


def build_layout(
    tensors: Iterable[TensorSpec], *, bucket_bytes: int = BUCKET_BYTES, tied: Mapping[str, str] | None = None
) -> WeightLayout:
    """Pack tensors into buckets of at most ``bucket_bytes``; independent of their order.

    Tensors are sorted by dtype and name, so that the same tensors always give the same layout, and a safetensors file
    of a bucket has its tensors in the usual order of that format. A tensor larger than ``bucket_bytes`` has a separate
    bucket. ``tied`` is the name of a tensor that is not stored -> that of the stored one with the same bytes. Raises
    ValueError for an unknown dtype, a duplicate name, or a tie to a missing tensor.
    """
    buckets: list[Bucket] = []
    placed: list[PlacedTensor] = []
    dtype_now, filled = "", 0
    for name, dtype, shape in sorted(tensors, key=lambda spec: (spec.dtype, spec.name)):
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name}: unknown dtype {dtype!r}; supported are {', '.join(_DTYPES)}")
        size = math.prod(shape) * _DTYPES[dtype][1]
        if placed and (dtype != dtype_now or filled + size > bucket_bytes):
            buckets.append(Bucket(dtype=dtype_now, tensors=tuple(placed)))
            placed, filled = [], 0
        placed.append(PlacedTensor(name=name, shape=tuple(shape), byte_offset=filled, num_bytes=size))
        dtype_now, filled = dtype, filled + size
    if placed:
        buckets.append(Bucket(dtype=dtype_now, tensors=tuple(placed)))
    return WeightLayout(buckets=tuple(buckets), tied=dict(tied or {}))


def shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def shard_header(bucket: Bucket) -> bytes:
    """Return the header that makes a safetensors file of the raw bytes of a bucket.

    Deterministic; its length is a multiple of 64.
    """
    code = _DTYPES[bucket.dtype][0]
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in bucket.tensors:
        offsets = [tensor.byte_offset, tensor.byte_offset + tensor.num_bytes]
        entries[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": offsets}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def shard_index(layout: WeightLayout) -> bytes:
    count = len(layout.buckets)
    weight_map = {tensor.name: shard_name(number, count) for number, _, tensor in layout.placed()}
    return json.dumps({"metadata": {"total_size": layout.num_bytes}, "weight_map": weight_map}, indent=2).encode()


def bucket_digests(bucket: Bucket, data: memoryview) -> list[TensorDigest]:
    view = memoryview(data).cast("B")
    if len(view) != bucket.num_bytes:
        raise ValueError(f"the bucket of {bucket.tensors[0].name} has {bucket.num_bytes} bytes, got {len(view)}")
    return [
        tensor_digest(t.name, bucket.dtype, t.shape, view[t.byte_offset : t.byte_offset + t.num_bytes])
        for t in bucket.tensors
    ]


class BucketHashes(NamedTuple):
    digests: list[TensorDigest]
    xxh3: str  # of the whole bucket


def hash_bucket(bucket: Bucket, data: memoryview, tensors: Iterable[PlacedTensor]) -> BucketHashes:
    """Hash a bucket and some of its tensors, in their order, in one pass over its memory."""
    view, whole, wanted, digests = memoryview(data).cast("B"), xxhash.xxh3_128(), {t.name for t in tensors}, []
    for tensor in bucket.tensors:
        is_wanted, apart, end = tensor.name in wanted, xxhash.xxh3_128(), tensor.byte_offset + tensor.num_bytes
        for start in range(tensor.byte_offset, end, _HASHED_AT_ONCE):
            block = view[start : min(end, start + _HASHED_AT_ONCE)]
            whole.update(block)
            if is_wanted:
                apart.update(block)  # while the block is in the cache
        if is_wanted:
            digests.append(TensorDigest(tensor.name, bucket.dtype, tensor.shape, apart.hexdigest()))
    return BucketHashes(digests, whole.hexdigest())
