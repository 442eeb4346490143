"""Publishing with two ranks: one that fails or is killed fails the publication, by number; nothing is visible."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusing_s3 import RefusingS3
from tests.trainer.publishing.test_publish import head_of, manifest_of
from tests.weights_source import WeightsSource, read_version
from torch.distributed import TCPStore

from penstock.deploy.certificates import signing_key
from penstock.deploy.quickstart_task import write_model
from penstock.protocol import blob_keys, logs
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.layout import TensorSpec, build_layout
from penstock.protocol.weights.signature import SigningKey
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
    """Publish the versions on stdin, one a line after the setup as JSON (rank 0), or answer rank 0 until killed."""
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
            connections, model_folder=Path(setup["model"]), policy=_EVERY_SECOND, coordinator=coordinator
        )
        weights = ModelWeights(_own(version, dims))
        publisher.submit(Snapshot(version, version, weights, "float32", must_publish=True))
        try:
            publisher.close()
            print(json.dumps("published"), flush=True)
        except PublicationFailed as err:
            print(json.dumps(str(err)), flush=True)
    ranks.leave(1)


def test_buckets_are_assigned_by_bytes() -> None:
    """Every bucket has one rank, loads differ by at most one bucket, and surplus ranks have none."""
    specs = [TensorSpec(f"t{n}", "float32", (100 * (n % 7 + 1),)) for n in range(40)]
    layout = build_layout(specs, bucket_bytes=3000)
    for num_ranks in (1, 2, 3, 8, 60):
        shares = assign_buckets(layout, num_ranks)
        assert sorted(number for share in shares for number in share) == list(range(len(layout.buckets)))
        loads = [sum(layout.buckets[number].num_bytes for number in share) for share in shares]
        assert max(loads) - min(loads) <= 3000
        assert len(shares) == num_ranks


class TwoRanks:
    """Two ranks that publish together; rank 1 writes through its own proxy."""

    def __init__(self, setup: dict[str, Any], running: ExitStack) -> None:
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )  # port chosen by the kernel, never freed in between
        self.processes = []
        for rank in (0, 1):
            environ = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
            )  # fmt: skip
            running.enter_context(process)
            running.callback(process.kill)
            self.processes.append(process)
            s3 = setup["s3"] if rank == 0 else setup["s3_of_rank_1"]
            self._send(rank, json.dumps({**setup, "s3": s3}))

    def publish(self, version: int) -> str:
        self._send(0, str(version))
        output = self.processes[0].stdout
        assert output is not None
        return json.loads(output.readline())

    def _send(self, rank: int, text: str) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(text + "\n")
        stdin.flush()


@pytest.fixture
def running() -> Iterator[ExitStack]:
    """Stops processes and proxies at the end."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
def test_a_rank_that_is_refused_or_killed_fails_the_publication(
    nats_settings: NatsSettings, s3_settings: S3Settings, bus: Bus, blobs: Blobs, run_streams: str, tmp_path: Path,
    running: ExitStack,
) -> None:  # fmt: skip
    """The error names rank 1 while its store is full, a retry succeeds; killed in its upload it leaves no manifest."""
    write_model(tmp_path / "model", seed=0)
    proxy = running.enter_context(RefusingS3(s3_settings))
    secret = {"secret_key": s3_settings.secret_key}
    setup = {
        "nats": {**nats_settings.model_dump(mode="json"), "password": nats_settings.password},
        "s3": {**s3_settings.model_dump(mode="json"), **secret},
        "s3_of_rank_1": {**proxy.settings.model_dump(mode="json"), **secret},
        "run_id": run_streams,
        "model": str(tmp_path / "model"),
        "deadline_s": 1.0,
        "kill_at": "object_stored:4@1",  # two buckets of version 0, the pack of version 1, a bucket of version 2
    }
    connections = Connections(run_streams, bus, blobs)
    ranks = TwoRanks(setup, running)
    assert ranks.publish(0) == "published"
    proxy.refusal = (507, "InsufficientStorage")
    problem = ranks.publish(1)
    assert "rank 1: put runs/" in problem
    assert "InsufficientStorage" in problem
    assert head_of(connections).version == 0
    proxy.refusal = None
    assert ranks.publish(1) == "published"
    head = head_of(connections)
    assert (head.version, manifest_of(connections, head.manifest).kind) == (1, "patch")
    assert_is(connections, 1)
    assert "rank 1 of 2 has exited" in ranks.publish(2)
    assert ranks.processes[1].wait(60) == -signal.SIGKILL
    assert head_of(connections) == head
    stored = {
        stat.key.rpartition("/")[2] for stat in blobs.list(blob_keys.weights_prefix(run_streams, PolicyVersion(2)))
    }
    shards = {f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)}
    assert (
        shards - {"model-00004-of-00004.safetensors"} <= stored <= shards
    )  # rank 1 stores its two at once; no manifest
    alone = Publisher(connections, model_folder=tmp_path / "model", epoch=1)
    alone.submit(Snapshot(PolicyVersion(2), 2, ModelWeights(whole(2)), "float32", must_publish=True))
    alone.close()
    assert_is(connections, 2)


def test_a_rank_reads_no_head_that_its_key_has_not_signed(
    bus: Bus, blobs: Blobs, run_streams: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", seed=0)
    own, stranger = (SigningKey.from_file(signing_key(tmp_path / name)[0], "x") for name in ("own", "other"))
    source = WeightsSource(bus, blobs, run_streams, tmp_path / "model", signing_key=own)
    head = source.publish(0, tensors(0)).manifest
    with pytest.raises(PublicationFailed, match="signed by key"):
        RankPublisher(blobs, run_streams, trusted_keys=stranger.trusted).read_head(head, PolicyVersion(0))
    accepted = RankPublisher(blobs, run_streams, trusted_keys=own.trusted).read_head(head, PolicyVersion(0))
    assert len(accepted) == len(tensors(0))


def assert_is(connections: Connections, version: int) -> None:
    """Assert that the head names a readable version with exactly its weights."""
    head = head_of(connections)
    assert head.version == version
    found = read_version(connections.blobs, connections.run_id, version, head.manifest)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(version).items())


if __name__ == "__main__":
    main()
