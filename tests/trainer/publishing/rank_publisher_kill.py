"""One rank of a trainer that publishes by shares, with nothing to train; rank 0 does what its stdin says.

python -m tests.trainer.share_kill < connections and run as JSON, one line; then on rank 0 versions, one a line
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
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.publish_coordinator import Lines, Shares, serve
from penstock.trainer.publishing.rank_publisher import Share
from penstock.trainer.publishing.snapshot import Snapshot
from penstock.trainer.publishing.weight_buckets import Part, layout_of, part_of, split
from penstock.trainer.publishing.weight_retention import AnchorPolicy
from penstock.trainer.ranks import Ranks

NUM_TENSORS = 4
_EVERY_SECOND = AnchorPolicy(max_ratio=1.0, max_versions=100)  # a patch is two thirds of an anchor


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Weights of which each version changes three bytes of four."""
    random = torch.Generator().manual_seed(version)
    dense = [torch.randn(1024, generator=random).view(torch.int32) & ~0xFF for _ in range(NUM_TENSORS)]
    return {f"t{number}": tensor.view(torch.float32) for number, tensor in enumerate(dense)}


def whole(version: int) -> Part:
    """A version as one process holds it: one bucket for each tensor."""
    return part_of(tensors(version), taken=version, bucket_bytes=4096)


def _mine(version: int, ranks: Ranks) -> Part:
    layout = layout_of(tensors(version), 4096)
    part = Part(layout, split(layout, ranks.num_ranks)[ranks.rank], taken=version)
    for name in part.names:
        part.put(name, tensors(version)[name])
    part.seal()
    return part


def main() -> None:
    """Publish as told (rank 0), or answer rank 0 until killed."""
    told = json.loads(sys.stdin.readline())
    logs.configure("share_kill")  # on stderr
    ranks = Ranks()
    crash_points.arm(told["kill_at"], rank=ranks.rank)
    blobs = Blobs(S3Settings.model_validate(told["s3"]), deadline_s=told["deadline_s"])
    share = Share(blobs, told["run_id"], rank=ranks.rank, num_ranks=ranks.num_ranks)
    lines = Lines(ranks.channel(), ranks.channel())
    if not ranks.is_leader:
        for version in range(NUM_TENSORS):
            share.hold(_mine(version, ranks))
        serve(share, lines)
        threading.Event().wait()
    connections = Connections(
        told["run_id"], Bus.connect(NatsSettings.model_validate(told["nats"]), name="rank 0"), blobs
    )
    for line in sys.stdin:
        version = PolicyVersion(int(line))
        publisher = Publisher(
            connections, model_folder=Path(told["model"]), policy=_EVERY_SECOND, shares=Shares(share, lines)
        )
        publisher.submit(Snapshot(version, version, _mine(version, ranks), "float32", must_publish=True))
        try:
            publisher.close()
            print(json.dumps("published"), flush=True)
        except PublicationFailed as err:
            print(json.dumps(str(err)), flush=True)
    ranks.leave(1)


if __name__ == "__main__":
    main()
