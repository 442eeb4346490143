"""Write a published version as a folder, from its objects; needs no torch and no engine.

A model folder in Hugging Face's form, in which an adapter is merged into its base (``W + scale B A``, summed in float32
and rounded to the dtype of W, in numpy); or an adapter in PEFT's form, which a worker's engine loads too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.errors import ConfigError, MalformedWeights, StateMismatch
from penstock.protocol.files import new_folder
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.weights.adapter_format import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MAX_CONFIG_BYTES,
    AdapterConfig,
    pair_tensors,
)
from penstock.protocol.weights.layout import (
    Bucket,
    TensorDigest,
    WeightLayout,
    bucket_digests,
    shard_header,
    shard_index,
    shard_name,
)
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.patch_segment import Bytes
from penstock.protocol.weights.version_reader import WeightReader

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Factors:
    down: Floats
    up: Floats


def read_factors(config: AdapterConfig, layout: WeightLayout, raw: Bytes, base: WeightLayout) -> dict[str, Factors]:
    """Return the factors of an adapter's one bucket by the name of the weight of its base that they change.

    Raises MalformedWeights for tensors that are not finite, or not the pairs of its rank for layers of the base
    (`pair_tensors`).
    """
    bucket = layout.buckets[0]
    placed = {tensor.name: tensor for tensor in bucket.tensors}

    def values(name: str) -> Floats:
        tensor = placed[name]
        array = _decode(bucket.dtype, raw[tensor.byte_offset :][: tensor.num_bytes]).reshape(tensor.shape)
        if not np.isfinite(array).all():
            raise MalformedWeights(f"tensor {name} has values that are not finite")
        return array

    shapes, weights = ({t.name: t.shape for _, _, t in some.placed()} for some in (layout, base))
    pairs = pair_tensors(config, shapes, weights)
    return {f"{layer}.weight": Factors(values(pair.down), values(pair.up)) for layer, pair in pairs.items()}


def merge_into(raw: Bytes, bucket: Bucket, factors: Mapping[str, Factors], scale: float) -> None:
    """Add an adapter to one raw bucket of its base, in place; the factors are those of `read_factors`."""
    for placed in bucket.tensors:
        pair = factors.get(placed.name)
        if pair is not None:
            span = raw[placed.byte_offset :][: placed.num_bytes]
            weight = _decode(bucket.dtype, span).reshape(placed.shape)
            change = np.float32(scale) * (pair.up @ pair.down)
            merged = np.ascontiguousarray((weight + change).astype(np.float32, copy=False))
            span[:] = _CODECS[bucket.dtype][1](merged).reshape(-1).view(np.uint8)


def _decode(dtype: str, raw: Bytes) -> Floats:
    if dtype not in _CODECS:
        raise MalformedWeights(f"adapters of dtype {dtype} cannot be merged; supported are {', '.join(_CODECS)}")
    return _CODECS[dtype][0](np.ascontiguousarray(raw))


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


def export_version(manifest: VersionManifest, folder: Path, *, reader: WeightReader, blobs: Blobs) -> int:
    """Write a version into a model folder that must not exist yet, whole or not at all; returns the bytes fetched.

    Raises one of `version_reader.UNUSABLE` for a version that cannot be assembled, FileExistsError for a folder there.
    """
    before = reader.num_bytes
    model = manifest if manifest.base is None else reader.base(manifest)
    plan = reader.plan(model, None)
    layout = reader.layout_of(plan)
    digests: list[TensorDigest] = []
    with new_folder(folder) as partial:
        factors: dict[str, Factors] = {}
        scale = 0.0
        if manifest is not model:
            config, raw = read_adapter(manifest, reader, blobs)
            factors, scale = read_factors(config, reader.layout(manifest), raw, layout), config.scale
        for number, bucket in enumerate(layout.buckets):
            raw = np.zeros(bucket.num_bytes, np.uint8)
            reader.bring(plan, number, raw)
            digests += bucket_digests(bucket, raw.data)
            merge_into(raw, bucket, factors, scale)
            (partial / shard_name(number, len(layout.buckets))).write_bytes(shard_header(bucket) + raw.tobytes())
        _check_root(model, digests)
        (partial / "model.safetensors.index.json").write_bytes(shard_index(layout))
        for file in model.model_files:
            blobs.get_file(file.blob, partial / file.name)
    return reader.num_bytes - before


def export_adapter(manifest: VersionManifest, folder: Path, *, reader: WeightReader, blobs: Blobs) -> int:
    """Write an adapter into a folder in PEFT's form, whole or not at all; returns the bytes fetched.

    Its factors are compared with its base's layout. Raises as `export_version`; ConfigError for no adapter.
    """
    if manifest.base is None:
        raise ConfigError(f"version {manifest.version} is not an adapter; export it as a model")
    before = reader.num_bytes
    with new_folder(folder) as partial:
        config, raw = read_adapter(manifest, reader, blobs)
        layout = reader.layout(manifest)
        read_factors(config, layout, raw, reader.layout(reader.base(manifest)))
        (partial / ADAPTER_WEIGHTS).write_bytes(shard_header(layout.buckets[0]) + raw.tobytes())
        (partial / ADAPTER_CONFIG).write_bytes(config.to_json())
    return reader.num_bytes - before


def read_adapter(manifest: VersionManifest, reader: WeightReader, blobs: Blobs) -> tuple[AdapterConfig, Bytes]:
    blob = manifest.model_files[0].blob
    if blob.size_bytes > MAX_CONFIG_BYTES:
        raise MalformedWeights(f"{blob.key}: {blob.size_bytes} bytes, the limit is {MAX_CONFIG_BYTES}")
    config = AdapterConfig.from_json(blobs.get(blob))
    bucket = reader.layout(manifest).buckets[0]
    raw = np.zeros(bucket.num_bytes, np.uint8)
    reader.bring(reader.plan(manifest, None), 0, raw)
    _check_root(manifest, bucket_digests(bucket, raw.data))
    return config, raw


def _check_root(manifest: VersionManifest, digests: list[TensorDigest]) -> None:
    if (root := manifest.root_of(digests)) != manifest.state_root:
        raise StateMismatch(f"version {manifest.version}: its root is {root}, its manifest says {manifest.state_root}")
