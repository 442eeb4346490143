"""Write a published version as a folder, from its objects; needs no torch and no engine.

A model folder in Hugging Face's form, in which an adapter is merged into its base; or an adapter in PEFT's form, which a
worker's engine loads too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.protocol.errors import ConfigError, MalformedWeights, StateMismatch
from penstock.protocol.files import new_folder
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.weights.adapter_format import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MAX_CONFIG_BYTES,
    AdapterConfig,
)
from penstock.protocol.weights.adapter_merge import Factors, check_fit, merge_into, read_factors
from penstock.protocol.weights.digest import TensorDigest
from penstock.protocol.weights.layout import bucket_digests, shard_header, shard_index, shard_name
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.patch_segment import Bytes
from penstock.protocol.weights.version_reader import WeightReader


def export_version(manifest: VersionManifest, folder: Path, *, reader: WeightReader, blobs: Blobs) -> int:
    """Write a version into a model folder that must not exist yet, whole or not at all; returns the bytes fetched.

    Raises one of `version_reader.UNUSABLE` when the version cannot be assembled, FileExistsError when the
    folder exists.
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
            factors, scale = read_factors(config, reader.layout(manifest), raw), config.scale
            check_fit(factors, layout)
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

    Its factors are compared with the layout of its base, which is not fetched. Raises as `export_version`; ConfigError
    for a version that is no adapter.
    """
    if manifest.base is None:
        raise ConfigError(f"version {manifest.version} is not an adapter; export it as a model")
    before = reader.num_bytes
    with new_folder(folder) as partial:
        config, raw = read_adapter(manifest, reader, blobs)
        layout = reader.layout(manifest)
        check_fit(read_factors(config, layout, raw), reader.layout(reader.base(manifest)))
        (partial / ADAPTER_WEIGHTS).write_bytes(shard_header(layout.buckets[0]) + raw.tobytes())
        (partial / ADAPTER_CONFIG).write_bytes(config.to_json())
    return reader.num_bytes - before


def read_adapter(manifest: VersionManifest, reader: WeightReader, blobs: Blobs) -> tuple[AdapterConfig, Bytes]:
    """Return an adapter's config and its raw bucket, verified; raises one of `version_reader.UNUSABLE`."""
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
