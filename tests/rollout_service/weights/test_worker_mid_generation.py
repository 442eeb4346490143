"""A worker whose engine loads new weights while it generates: long generations neither wait nor are lost."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest
from tests.contracts.tiny_model import Dense, build_endless_model, logprobs_by_version
from tests.groups import make_task
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.trainer_side import TrainerSide, attached
from tests.servers import wait_for

from penstock.deploy.processes.child import Child
from penstock.protocol.trajectory import Group

StartWorker = Callable[..., Child]
PROMPT = [5, 17, 88, 250, 31, 9]
LONG = 2000  # tokens: seconds of generation


@pytest.fixture
def models(trainer_side: TrainerSide) -> dict[int, Dense]:
    """Three versions of a model that never samples an end token; `TrainerSide.publish` publishes them."""
    found = {}
    for version in range(3):
        folder = trainer_side.folder / f"model-{version}"
        build_endless_model(folder, seed=version)
        found[version] = Dense(folder)
    return found


def issue_long(trainer_side: TrainerSide, worker: Child) -> None:
    """Issue one pack of two long groups and wait until a worker's engine generates."""
    tasks = [
        make_task(f"e0.p{i}.a0", prompt_ids=PROMPT, group_size=2, max_new_tokens=LONG, stop_token_ids=())
        for i in (0, 1)
    ]
    trainer_side.issue("long", tasks)
    [url] = re.findall(r'"url": "([^"]+)"', worker.log_tail(100))
    wait_for(
        lambda: httpx.get(f"{url}/v1/loads", timeout=60).json()["loads"][0]["num_running_reqs"] == 4,
        "the engine to generate",
    )


def check(groups: list[Group], models: dict[int, Dense]) -> set[int]:
    """Recompute every token's logprob under its own version; returns all versions."""
    versions = set()
    for group in groups:
        for row in group.trajectories:
            start = group.num_prompt_tokens
            tokens = row.token_ids.tolist()
            assert len(tokens) - start == LONG
            runs = [(run.version, run.start - start, run.end - start) for run in row.version_runs]
            versions |= {version for version, _, _ in runs}
            expected = logprobs_by_version(models, tokens[:start], tokens[start:], runs)
            assert row.behaviour_logprobs[start:].tolist() == pytest.approx(expected, abs=1e-4)
    return versions


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_versions_are_applied_while_a_pack_generates(
    trainer_side: TrainerSide, start_worker: StartWorker, models: dict[int, Dense], mode: str
):
    trainer_side.publish(0)
    worker = start_worker("w0", f"worker.update_mode={mode}")
    trainer_side.wait_applied("w0", 0)
    issue_long(trainer_side, worker)
    for version in (1, 2):
        trainer_side.publish(version)
        trainer_side.wait_applied("w0", version)
    groups = trainer_side.collect_groups(1)
    assert check(groups, models) == {0, 1, 2}
    assert "pack requeued" not in worker.log_tail(100)


def test_a_worker_killed_with_a_resumed_pack_loses_no_task(
    trainer_side: TrainerSide, start_worker: StartWorker, models: dict[int, Dense]
):
    """Its partial completions are lost; the pack is redelivered to another worker and generated whole, once."""
    trainer_side.publish(0)
    first = start_worker("w0", "worker.update_mode=abort")
    trainer_side.wait_applied("w0", 0)
    issue_long(trainer_side, first)
    trainer_side.publish(1)
    trainer_side.wait_applied("w0", 1)
    first.kill()
    start_worker("w1", "worker.update_mode=abort")
    groups = trainer_side.collect_groups(1)
    assert check(groups, models) == {1}
    wait_for(lambda: trainer_side.num_tasks() == 0, "the pack to be acknowledged")


def test_an_evaluation_of_an_older_version_interrupts_nothing(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
):
    """Newer versions are loaded under a pause; the pinned older one drains; then the newest, under a pause again."""
    trainer_side.publish(0)
    start_worker("w0", *attached(faulty_engine), "worker.update_mode=retract")
    trainer_side.wait_applied("w0", 0)
    trainer_side.publish(1)
    trainer_side.wait_applied("w0", 1)
    assert faulty_engine.pauses == ["continue", "retract", "continue"]
    trainer_side.issue("eval", [make_task("eval.p0", split="eval", pinned_version=0, temperature=0.0, group_size=1)])
    trainer_side.collect(1)
    wait_for(lambda: faulty_engine.version == "1", "the newest version to be served again")
    faulty_engine.wait_for_pauses(5)
    assert faulty_engine.pauses[3:] == ["retract", "continue"]  # the load that drains finds nothing paused
