"""Merge an adapter into the weights of its base, in numpy: ``W + scale B A``, summed in float32, rounded to W's dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.errors import MalformedWeights
from penstock.protocol.weights.adapter_format import AdapterConfig, factor_pairs
from penstock.protocol.weights.layout import Bucket, WeightLayout
from penstock.protocol.weights.patch_segment import Bytes

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Factors:
    """The two factors of one layer: ``down`` [r, in], ``up`` [out, r]."""

    down: Floats
    up: Floats


def read_factors(config: AdapterConfig, layout: WeightLayout, raw: Bytes) -> dict[str, Factors]:
    """Return the factors of an adapter's one bucket by the name of the weight they change.

    Raises MalformedWeights for tensors that are not pairs of finite factors of the adapter's rank.
    """
    bucket = layout.buckets[0]
    placed = {tensor.name: tensor for tensor in bucket.tensors}

    def values(name: str) -> Floats:
        tensor = placed[name]
        found = _decode(bucket.dtype, raw[tensor.byte_offset :][: tensor.num_bytes]).reshape(tensor.shape)
        if not np.isfinite(found).all():
            raise MalformedWeights(f"tensor {name} has values that are not finite")
        return found

    found = {}
    for weight, down, up in factor_pairs(placed):
        shapes = placed[down].shape, placed[up].shape
        if [len(shape) for shape in shapes] != [2, 2] or not shapes[0][0] == shapes[1][1] == config.r:
            raise MalformedWeights(
                f"the factors of {weight} are {shapes[0]} and {shapes[1]}, the adapter's rank is {config.r}"
            )
        found[weight] = Factors(values(down), values(up))
    return found


def check_fit(factors: Mapping[str, Factors], base: WeightLayout) -> None:
    """Check that every weight an adapter changes is in the base, with its shape.

    Raises MalformedWeights.
    """
    shapes = {tensor.name: tensor.shape for _, _, tensor in base.placed()}
    for weight, pair in factors.items():
        expected = (pair.up.shape[0], pair.down.shape[1])
        if shapes.get(weight) != expected:
            raise MalformedWeights(
                f"the adapter changes {weight} {expected}, its base has {shapes.get(weight, 'no such weight')}"
            )


def merge_into(raw: Bytes, bucket: Bucket, factors: Mapping[str, Factors], scale: float) -> None:
    """Add an adapter to one raw bucket of its base, in place; the factors must have passed `check_fit`."""
    for placed in bucket.tensors:
        pair = factors.get(placed.name)
        if pair is not None:
            span = raw[placed.byte_offset :][: placed.num_bytes]
            weight = _decode(bucket.dtype, span).reshape(placed.shape)
            change = np.float32(scale) * (pair.up @ pair.down)
            span[:] = _encode(bucket.dtype, (weight + change).astype(np.float32, copy=False))


def _decode(dtype: str, raw: Bytes) -> Floats:
    if dtype not in _CODECS:
        raise MalformedWeights(f"adapters of dtype {dtype} cannot be merged; supported are {', '.join(_CODECS)}")
    return _CODECS[dtype][0](np.ascontiguousarray(raw))


def _encode(dtype: str, values: Floats) -> Bytes:
    return _CODECS[dtype][1](np.ascontiguousarray(values)).reshape(-1).view(np.uint8)


def _to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


_CODECS: dict[str, tuple[Callable[[Bytes], Floats], Callable[[Floats], NDArray[np.generic]]]] = {
    "float32": (lambda raw: raw.view(np.float32), lambda values: values),
    "float16": (lambda raw: raw.view(np.float16).astype(np.float32), lambda values: values.astype(np.float16)),
    "bfloat16": (lambda raw: (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32), _to_bfloat16),
}
