"""One rank of a trainer that publishes with other ranks and does not train; rank 0 publishes the versions on its stdin.

python -m tests.trainer.publishing.rank_publisher_kill < connections and run as JSON, one line; then on rank 0 versions, one a line
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch

from penstock.protocol import logs
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer import crash_points
from penstock.trainer.connections import Connections
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.rank_publisher import PublishCoordinator, RankPublisher
from penstock.trainer.publishing.weight_buckets import (
    ModelWeights,
    Snapshot,
    WeightBuckets,
    assign_buckets,
    copy_to_buckets,
    layout_of,
)
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy
from penstock.trainer.ranks import Ranks

NUM_TENSORS = 4
_EVERY_SECOND = FullSnapshotPolicy(max_ratio=1.0, max_versions=100)  # a patch is two thirds of a full snapshot


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Weights of which each version changes three bytes of four."""
    random = torch.Generator().manual_seed(version)
    dense = [torch.randn(1024, generator=random).view(torch.int32) & ~0xFF for _ in range(NUM_TENSORS)]
    return {f"t{number}": tensor.view(torch.float32) for number, tensor in enumerate(dense)}


def whole(version: int) -> WeightBuckets:
    return copy_to_buckets(tensors(version), copy_id=version, bucket_bytes=4096)


def _own(version: int, dims: ParallelDims) -> WeightBuckets:
    layout, share = layout_of(tensors(version), 4096), dims.buckets
    buckets = WeightBuckets(layout, assign_buckets(layout, share.count)[share.index], copy_id=version)
    for name in buckets.names:
        buckets.put(name, tensors(version)[name])
    buckets.seal()
    return buckets


def main() -> None:
    """Publish the versions on stdin (rank 0), or answer rank 0 until killed."""
    setup = json.loads(sys.stdin.readline())
    logs.configure("rank_publisher_kill")  # on stderr
    ranks = Ranks()
    crash_points.arm(setup["kill_at"], rank=ranks.rank)
    blobs = Blobs(S3Settings.model_validate(setup["s3"]), deadline_s=setup["deadline_s"])
    dims = ParallelDims(ranks)
    own = RankPublisher(blobs, setup["run_id"], dims.buckets)
    coordinator = PublishCoordinator(own, ranks)
    if not ranks.is_leader:
        for version in range(NUM_TENSORS):
            own.hold(_own(version, dims))
        threading.Event().wait()
    connections = Connections(
        setup["run_id"], Bus.connect(NatsSettings.model_validate(setup["nats"]), name="rank 0"), blobs
    )
    for line in sys.stdin:
        version = PolicyVersion(int(line))
        publisher = Publisher(
            connections,
            model_folder=Path(setup["model"]),
            policy=_EVERY_SECOND,
            coordinator=coordinator,
        )
        weights = ModelWeights(_own(version, dims))
        publisher.submit(Snapshot(version, version, weights, "float32", must_publish=True))
        try:
            publisher.close()
            print(json.dumps("published"), flush=True)
        except PublicationFailed as err:
            print(json.dumps(str(err)), flush=True)
    ranks.leave(1)


if __name__ == "__main__":
    main()
