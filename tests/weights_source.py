"""Publishes versions with the trainer's own code; can store other bytes than the manifest specifies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.facts import Fact, WeightsPublished
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.fact_publisher import Receipt
from penstock.protocol.transport.loop_thread import Pending
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import AdapterConfig
from penstock.protocol.weights.layout import BUCKET_BYTES
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.protocol.weights.signature import SigningKey
from penstock.protocol.weights.version_reader import WeightReader
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.publication import VersionPublisher
from penstock.trainer.publishing.rank_publisher import PublishCoordinator, RankPublisher
from penstock.trainer.publishing.version_writer import VersionWriter
from penstock.trainer.publishing.weight_buckets import (
    AdapterBase,
    AdapterWeights,
    ModelWeights,
    Snapshot,
    copy_to_buckets,
    read_buckets,
)
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy

NEVER = FullSnapshotPolicy(max_ratio=1e9, max_versions=10**9)


class _Store(Blobs):
    """A store that alters the last byte of the objects whose key ends in one of ``corrupt``."""

    def __init__(self, settings: S3Settings) -> None:
        super().__init__(settings)
        self.corrupt: tuple[str, ...] = ()

    def put(self, key: str, data: bytes) -> BlobRef:
        reference = super().put(key, data)
        if self.corrupt and key.endswith(self.corrupt):
            super().put(key, data[:-1] + bytes([data[-1] ^ 1]))
        return reference


class _NotSent:
    def wait(self) -> Receipt:
        return Receipt(sequence=0, duplicate=False)


class _Bus:
    """A bus that records the last announcement, and sends none while it is ``quiet``."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.quiet = False
        self.last: WeightsPublished | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    def publish(self, subject: str, fact: Fact, **options: Any) -> Pending[Any] | _NotSent:
        if isinstance(fact, WeightsPublished):
            self.last = fact
            if self.quiet:
                return _NotSent()
        return self._bus.publish(subject, fact, **options)


def adapter_base(tensors: Mapping[str, Tensor], config: AdapterConfig) -> AdapterBase:
    buckets = copy_to_buckets(tensors)
    return AdapterBase(buckets, config, ModelWeights(buckets).root())


def read_version(
    blobs: Blobs, run_id: str, version: int, manifest: BlobRef, shared: SharedSegments | None = None
) -> dict[str, Tensor]:
    reader = WeightReader(blobs, run_id, shared=shared)
    buckets = read_buckets(reader.plan(reader.manifest(manifest, PolicyVersion(version)), None), reader)
    return {
        tensor.name: torch.frombuffer(
            bytearray(buckets.raw[number][tensor.byte_offset : tensor.byte_offset + tensor.num_bytes].tobytes()),
            dtype=getattr(torch, bucket.dtype),
        ).reshape(tensor.shape)
        for number, bucket, tensor in buckets.layout.placed()
    }


class WeightsSource:
    """What a trainer publishes with, without its thread."""

    def __init__(
        self,
        bus: Bus,
        blobs: Blobs,
        run_id: str,
        model_folder: Path,
        *,
        policy: FullSnapshotPolicy = NEVER,
        bucket_bytes: int = BUCKET_BYTES,
        epoch: int = 0,
        signing_key: SigningKey | None = None,
    ) -> None:
        self._store = _Store(blobs._settings)
        self._bus: Any = _Bus(bus)
        connections = Connections(run_id, self._bus, self._store)
        self._bucket_bytes = bucket_bytes
        self._coordinator = PublishCoordinator(RankPublisher(self._store, run_id))
        self._num_copies = 0
        writer = VersionWriter(connections, model_folder, signing_key)
        self.publisher = VersionPublisher(connections, writer, self._coordinator, policy=policy, epoch=epoch)

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        base: AdapterBase | None = None,
        corrupt: tuple[str, ...] = (),
        announce: bool = True,
    ) -> WeightsPublished:
        """Publish a version; ``corrupt`` are ends of keys whose stored bytes differ from the manifest.

        Shared memory has no others then, from which workers of this host would take the right ones. With a ``base`` that was
        published before, the tensors are an adapter. Without ``announce`` only the head moves.
        """
        self._store.corrupt, self._bus.quiet = corrupt, not announce
        self._num_copies += 1
        if base is None:
            buckets = copy_to_buckets(tensors, copy_id=self._num_copies, bucket_bytes=self._bucket_bytes)
            weights = ModelWeights(buckets)
        else:
            weights = AdapterWeights.of(tensors, base, copy_id=self._num_copies)
        snapshot = Snapshot(PolicyVersion(version), version, weights, "float32")
        if isinstance(weights, ModelWeights):
            self._coordinator.own.hold(weights.buckets)
        for coordinator in (self._coordinator, self.publisher._adapters._alone):
            coordinator.own._shared = SharedSegments("nobody's" if corrupt else self.publisher._run_id)
        self.publisher.publish(snapshot)
        self.publisher.models.full_snapshots.close(20.0)
        self._store.corrupt, self._bus.quiet = (), False
        return self._bus.last

    def answer(self) -> WeightsPublished:
        assert self.publisher.publish_again()
        return self._bus.last
