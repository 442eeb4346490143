"""Log-probabilities of steps reach the object store, or are counted; training never waits for them."""

from __future__ import annotations

import threading

import numpy as np
from tests.servers import wait_for
from tests.trainer.algorithm.test_algorithm_parts import ready

from penstock.protocol import blob_keys
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.groups import BlobRef
from penstock.protocol.packs import step_logprobs
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer.learner.planning import Learned
from penstock.trainer.learner.step_metrics import KeptRows, StepMetrics
from penstock.trainer.learner.step_plan import Capacity, ReadyGroup, all_rows
from penstock.trainer.telemetry.logprob_writer import LogprobWriter, StepNumbers


class Slow(Blobs):
    """A store whose writes do not end before ``may_end`` is set."""

    def __init__(self, settings: S3Settings, *, deadline_s: float) -> None:
        super().__init__(settings, deadline_s=deadline_s)
        self.may_end = threading.Event()

    def put(self, key: str, data: bytes) -> BlobRef:
        assert self.may_end.wait(60.0)
        return super().put(key, data)


def a_step(value: float = -0.5) -> tuple[list[ReadyGroup], Learned]:
    batch = [ready(number, (1.0, 0.0)) for number in range(2)]
    plan = all_rows(batch, Capacity(1000))
    counts = [int(batch[row.row_group].group.trajectories[row.trajectory].loss_mask.sum()) for row in plan.rows]
    numbers = np.arange(len(counts))[::-1]  # the ranks have the rows in any order
    lengths = np.array(counts)[numbers]
    logprobs, outcomes = (value - np.repeat(numbers, lengths)).astype(np.float32), np.repeat(numbers % 2, lengths)
    kept = KeptRows(numbers, lengths, logprobs, outcomes.astype(np.uint8))
    return batch, Learned(plan, StepMetrics(0.0, 0.0, 0.0, {}, {}, kept=kept), {})


def test_each_step_is_one_object_with_its_groups(blobs: Blobs, run_id: str) -> None:
    batch, learned = a_step()
    lost: list[str] = []
    for epoch in (1, 2):
        with LogprobWriter(blobs, run_id, epoch=epoch, on_first_loss=lost.append) as writer:
            writer.submit(StepNumbers(4, 3, 5), batch, learned)
            writer.submit(StepNumbers(5, 5, 6), batch, Learned(learned.plan, StepMetrics(0.0, 0.0, 0.0, {}, {}), {}))
    found = list(blobs.list(blob_keys.logprobs_prefix(run_id)))
    sha256 = found[0].key.rpartition("/")[2].removesuffix(".safetensors")
    assert [one.key for one in found] == [blob_keys.step_logprobs(run_id, 4, epoch, sha256) for epoch in (1, 2)]
    data = blobs.get(BlobRef(key=found[0].key, size_bytes=found[0].size_bytes, sha256=sha256))
    read = step_logprobs.decode(data, run_id=run_id, step=4)
    assert (read.header.trained_version, read.header.made_version) == (3, 5)
    assert {(group.group_id, group.pack) for group in read.header.groups} == {
        (g.group_id, g.pack.sha256) for g in batch
    }
    second = read.group(batch[1].group_id, batch[1].pack.sha256)
    assert second is not None
    values = {number: (set(row.logprobs.tolist()), set(row.outcomes.tolist())) for number, row in second.items()}
    assert values == {0: ({-2.5}, {0}), 1: ({-3.5}, {1})}
    assert (lost, writer.num_lost) == ([], 0)


def test_what_cannot_be_stored_is_counted_and_said_once(unused_tcp_port: int, blobs: Blobs, run_id: str) -> None:
    """Neither a store that is gone nor values that are none hold the training thread up, or end it."""
    batch, learned = a_step()
    gone = Slow(S3Settings(endpoint=f"http://127.0.0.1:{unused_tcp_port}", bucket="none"), deadline_s=0.5)
    said: list[str] = []
    with LogprobWriter(gone, run_id, epoch=1, on_first_loss=said.append) as writer:
        for step in range(1, 9):
            writer.submit(StepNumbers(step, step - 1, step), batch, learned)
        assert writer.num_lost >= 5  # and no write has ended
        gone.may_end.set()
        wait_for(lambda: writer.num_lost == 8, "the writes that were waiting")
    assert len(said) == 1
    assert "2 steps wait for the object store" in said[0]
    with LogprobWriter(blobs, run_id, epoch=1, on_first_loss=said.append) as writer:
        writer.submit(StepNumbers(1, 0, 1), *a_step(float("-inf")))
        wait_for(lambda: writer.num_lost == 1, "the refusal")
    assert "not a log-probability" in said[1]
    assert not list(blobs.list(blob_keys.logprobs_prefix(run_id)))
