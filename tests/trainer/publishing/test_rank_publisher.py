"""Publishing by the shares of two ranks: one that fails or dies fails the publication, by its name, and nothing is seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusing_s3 import RefusingS3
from tests.trainer.publishing.rank_publisher_kill import tensors, whole
from tests.trainer.publishing.test_publish import head_of, manifest_of
from tests.weights_source import read_version
from torch.distributed import TCPStore

from penstock.deploy.quickstart_task import write_model
from penstock.protocol import blob_keys
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.layout import TensorSpec, build_layout
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.snapshot import Snapshot
from penstock.trainer.publishing.weight_buckets import split


def test_buckets_are_shared_out_by_bytes() -> None:
    """Every bucket has one rank, no rank has more than a bucket more than another, and more ranks than buckets idle."""
    specs = [TensorSpec(f"t{n}", "float32", (100 * (n % 7 + 1),)) for n in range(40)]
    layout = build_layout(specs, bucket_bytes=3000)
    for num_ranks in (1, 2, 3, 8, 60):
        shares = split(layout, num_ranks)
        assert sorted(number for share in shares for number in share) == list(range(len(layout.buckets)))
        loads = [sum(layout.buckets[number].num_bytes for number in share) for share in shares]
        assert max(loads) - min(loads) <= 3000
        assert len(shares) == num_ranks


class TwoRanks:
    """Two processes that publish by shares; rank 1 writes through a proxy of its own."""

    def __init__(self, told: dict[str, Any], running: ExitStack) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # no port that another may take
        self.processes = []
        for rank in (0, 1):
            environ = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.trainer.publishing.rank_publisher_kill"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
            )  # fmt: skip
            running.enter_context(process)
            running.callback(process.kill)
            self.processes.append(process)
            s3 = told["s3"] if rank == 0 else told["s3_of_rank_1"]
            self._tell(rank, json.dumps({**told, "s3": s3}))

    def publish(self, version: int) -> str:
        """Have a version published; returns "published" or the error."""
        self._tell(0, str(version))
        output = self.processes[0].stdout
        assert output is not None
        return json.loads(output.readline())

    def _tell(self, rank: int, text: str) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(text + "\n")
        stdin.flush()


@pytest.fixture
def running() -> Iterator[ExitStack]:
    """What is to be ended."""
    with ExitStack() as stack:
        yield stack


def test_a_rank_that_is_refused_or_killed_fails_the_publication_by_its_name(
    nats_settings: NatsSettings, s3_settings: S3Settings, bus: Bus, blobs: Blobs, ring_streams: str, tmp_path: Path,
    running: ExitStack,
) -> None:  # fmt: skip
    """Refused by a full store, rank 1 is named and tried again with room; killed in mid-upload it leaves no manifest."""
    write_model(tmp_path / "model", seed=0)
    proxy = running.enter_context(RefusingS3(s3_settings))
    secret = {"secret_key": s3_settings.secret_key}
    told = {
        "nats": {**nats_settings.model_dump(mode="json"), "password": nats_settings.password},
        "s3": {**s3_settings.model_dump(mode="json"), **secret},
        "s3_of_rank_1": {**proxy.settings.model_dump(mode="json"), **secret},
        "run_id": ring_streams,
        "model": str(tmp_path / "model"),
        "deadline_s": 1.0,
        "kill_at": "object_stored:4@1",  # two buckets of version 0, the pack of version 1, a bucket of version 2
    }
    connections = Connections(ring_streams, bus, blobs)
    ranks = TwoRanks(told, running)
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
    stored = [
        stat.key.rpartition("/")[2] for stat in blobs.list(blob_keys.weights_prefix(ring_streams, PolicyVersion(2)))
    ]
    assert sorted(stored) == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3)]  # not rank 1's second bucket
    alone = Publisher(connections, model_folder=tmp_path / "model", epoch=1)
    alone.submit(Snapshot(PolicyVersion(2), 2, whole(2), "float32", must_publish=True))
    alone.close()
    assert_is(connections, 2)


def assert_is(connections: Connections, version: int) -> None:
    """The head is a version that can be put together, with exactly its weights."""
    head = head_of(connections)
    assert head.version == version
    found = read_version(connections.blobs, connections.run_id, version, head.manifest)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(version).items())
