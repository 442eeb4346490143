"""Writes a published version as a Hugging Face model folder, from its anchor and chain; no torch, no engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from protocol.errors import StateMismatch
from protocol.transport.blobs import Blobs
from protocol.weight_layout import bucket_digests, shard_header, shard_index, shard_name
from protocol.weight_reader import WeightReader
from protocol.weights import VersionManifest
from protocol.weights_digest import TensorDigest, weights_digest


def export_version(manifest: VersionManifest, folder: Path, *, reader: WeightReader, blobs: Blobs) -> int:
    """Write a version into a folder that must not exist yet, whole or not at all; returns the bytes fetched.

    Raises one of `weight_reader.UNUSABLE` when the version cannot be put together, FileExistsError when the
    folder is there.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; name another folder, or remove it")
    before = reader.num_bytes
    plan, layout = reader.plan(manifest, None), reader.layout(manifest)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    digests: list[TensorDigest] = []
    try:
        for number, bucket in enumerate(layout.buckets):
            raw = np.zeros(bucket.num_bytes, np.uint8)
            reader.bring(plan, number, raw)
            digests += bucket_digests(bucket, raw.data)
            (partial / shard_name(number, len(layout.buckets))).write_bytes(shard_header(bucket) + raw.tobytes())
        if (root := weights_digest(digests)) != manifest.state_root:
            raise StateMismatch(
                f"version {manifest.version}: its root is {root}, its manifest promised {manifest.state_root}"
            )
        (partial / "model.safetensors.index.json").write_bytes(shard_index(layout))
        for file in manifest.model_files:
            blobs.get_file(file.blob, partial / file.name)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return reader.num_bytes - before
