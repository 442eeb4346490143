"""One digest of a set of weights, equal wherever it is computed: trainer, worker, audit, replay.

Each tensor has an xxh3-128 over its raw bytes (little-endian, row-major, as safetensors stores them);
the root is a sha256 over all of them with their names, dtypes and shapes, sorted by name:

    sha256( "<name>\\0<dtype>\\0<d0,d1,...>\\0<32 hex digits of xxh3-128>\\n" for each tensor, UTF-8 )

Two levels, because a version that changes a few tensors needs only these hashed again, and because
xxh3 runs at memory speed. xxh3 detects accidental changes; against forgery each object has its own sha256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

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


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """One tensor: ``dtype`` as in `SAFETENSORS_DTYPES`, ``xxh3`` as 32 hex digits over its raw bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    xxh3: str


def tensor_digest(name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> TensorDigest:
    """Digest one tensor; ``data`` is its raw bytes, contiguous, row-major, little-endian."""
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
