"""Publish a model folder as version 0 of a run, bucket by bucket, without loading it into torch."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.console.models.tensor_files import open_model
from penstock.protocol import blob_keys
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import BlobRef, Head
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.bucket_codec import bucket_xxh3
from penstock.protocol.weights.digest import SAFETENSORS_DTYPES, TensorDigest, weights_digest
from penstock.protocol.weights.layout import (
    TensorSpec,
    WeightLayout,
    bucket_digests,
    build_layout,
    shard_header,
    shard_name,
)
from penstock.protocol.weights.manifest import BucketState, StoredRange
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.head import HeadKey
from penstock.trainer.publishing.rank_publisher import StoredObjects
from penstock.trainer.publishing.version_writer import Content, Label, VersionWriter

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import SigningKey

VERSION = PolicyVersion(0)


def publish_folder(connections: Connections, folder: Path, signing_key: SigningKey | None = None) -> str:
    """Store the tensors of a model folder as a full snapshot and point the run's head to it; return its state root.

    Raises ConfigError for a folder without safetensors, BlobError, and PublicationFailed.
    """
    tensors = open_model(folder)
    layout = build_layout([TensorSpec(t.name, SAFETENSORS_DTYPES[t.dtype][0], t.shape) for t in tensors.values()])
    attempt = secrets.token_hex(8)
    digests: list[TensorDigest] = []
    objects: list[BlobRef] = []
    states: list[BucketState] = []
    for number, bucket in enumerate(layout.buckets):
        raw = np.concatenate([tensors[placed.name].raw() for placed in bucket.tensors])
        digests += bucket_digests(bucket, raw.data)
        name = shard_name(number, len(layout.buckets))
        key = blob_keys.weights_shard(connections.run_id, VERSION, attempt, name)
        blob = connections.blobs.put(key, shard_header(bucket) + raw.tobytes())
        states.append(
            BucketState(
                codec="safetensors",
                stored=StoredRange(object=number, offset=0, size_bytes=blob.size_bytes, sha256=blob.sha256),
                num_words=bucket.num_words,
                num_changed=bucket.num_words,
                new_xxh3=bucket_xxh3(raw),
            )
        )
        objects.append(blob)
    writer = VersionWriter(connections, folder, signing_key)
    root = weights_digest(digests)
    stored = StoredObjects(attempt, tuple(objects), tuple(states))
    content = Content(layout, writer.small_files(_dtype(folder, layout)), stored, root)
    written = writer.write("anchor", Label(VERSION, 0, 0), content, parent=None)
    HeadKey(connections.bus, connections.run_id).move(Head(version=VERSION, step=0, manifest=written.reference))
    return root


def _dtype(folder: Path, layout: WeightLayout) -> str:
    """Return the dtype of a model: that of its config.json, else the one of most of its values."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        named = config.get("dtype") or config.get("torch_dtype")
    except (OSError, ValueError, AttributeError):
        raise ConfigError(f"{folder / 'config.json'} is not readable; restore it") from None
    if isinstance(named, str):
        return named
    sizes: Counter[str] = Counter()
    for bucket in layout.buckets:
        sizes[bucket.dtype] += bucket.num_words
    return sizes.most_common(1)[0][0]
