"""The digests of the tensors of a safetensors file, for the simulated engine, and for tests that compare a file with its buckets."""

from __future__ import annotations

import json
import math

from penstock.protocol.errors import MalformedWeights
from penstock.protocol.weights.layout import SAFETENSORS_DTYPES, TensorDigest, tensor_digest

_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 1000 * 1000  # the limit of the format itself


def safetensors_digests(data: bytes | memoryview) -> list[TensorDigest]:
    view = memoryview(data).cast("B")
    size = int.from_bytes(view[:_HEADER_LENGTH_BYTES], "little")
    start = _HEADER_LENGTH_BYTES + size
    if len(view) < start or size > _MAX_HEADER_BYTES:
        raise MalformedWeights(f"not safetensors: {len(view)} bytes cannot hold a header of {size}")
    try:
        header = json.loads(bytes(view[_HEADER_LENGTH_BYTES:start]))
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        return [_entry_digest(name, entry, view[start:]) for name, entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise MalformedWeights(f"not safetensors: {type(err).__name__}: {err}") from None


def _entry_digest(name: str, entry: dict[str, object], body: memoryview) -> TensorDigest:
    dtype, num_bytes = SAFETENSORS_DTYPES[str(entry["dtype"])]
    shape, (begin, end) = _sizes(entry["shape"]), _sizes(entry["data_offsets"])
    expected = math.prod(shape) * num_bytes
    if end - begin != expected or end > len(body):
        raise ValueError(f"tensor {name}: bytes {begin} to {end} of {len(body)}, its shape needs {expected}")
    return tensor_digest(name, dtype, shape, body[begin:end])


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(size, int) and size >= 0 for size in value):
        raise ValueError(f"expected a list of sizes, got {value!r}")
    return tuple(value)
