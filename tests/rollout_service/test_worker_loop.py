"""The worker's loop, as a process, against real NATS, real S3 and an engine over HTTP."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deploy.child import Child
from tests.groups import make_task
from tests.rollout_service.faulty_engine import FaultyEngine
from tests.rollout_service.ring_end import RingEnd
from tests.servers import wait_for

StartWorker = Callable[..., Child]


def attached(engine: FaultyEngine) -> tuple[str, str]:
    """Overrides of a worker whose engine is a server at a URL."""
    return "worker.engine=sglang-url", f"worker.engine_url={engine.url}"


def test_a_pack_is_generated_stored_announced_and_acknowledged(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """A pack of tasks becomes one object and one announcement, and leaves the queue."""
    ring_end.publish(0)
    tasks = [make_task(f"e0.p{i}.a0", prompt_ids=[5, 6, 7 + i], group_size=4) for i in range(3)]
    ring_end.issue("pack-0", tasks)
    start_worker("w0", *attached(faulty_engine))
    [delivery] = ring_end.collect(1)
    fact = delivery.fact
    assert (fact.pack_id, fact.worker_id) == ("pack-0", "w0")
    assert [group.group_id for group in fact.groups] == [task.group_id for task in tasks]
    wait_for(lambda: ring_end.num_tasks() == 0, "the acknowledgement")
    assert len(faulty_engine.requests) == 1
    body = faulty_engine.requests[0]
    assert body["input_ids"] == [list(task.prompt_ids) for task in tasks]
    assert body["sampling_params"]["n"] == 4


def test_stored_groups_hold_what_the_engine_said(
    ring_end: RingEnd, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """Token ids, log-probabilities, texts, finish reasons and versions in S3 are the engine's own."""
    ring_end.publish(3)
    ring_end.issue("pack-0", [make_task(group_size=5, prompt_ids=[5, 6, 8])])
    start_worker("w0", *attached(faulty_engine))
    [group] = ring_end.collect_groups(1)
    rows = faulty_engine._rows(faulty_engine.requests[0], "3")
    assert len(group.trajectories) == 5
    for trajectory, row in zip(group.trajectories, rows, strict=True):
        assert trajectory.token_ids.tolist() == [5, 6, 8, *row["output_ids"]]
        assert trajectory.completion_text == row["text"]
        assert trajectory.finish_reason == row["meta_info"]["finish_reason"]["type"]
        expected = np.array([0, 0, 0, *(lp for lp, _, _ in row["meta_info"]["output_token_logprobs"])], np.float32)
        np.testing.assert_array_equal(trajectory.behaviour_logprobs, expected)
        assert trajectory.version_runs == ((3, 3, 3 + len(row["output_ids"])),)
