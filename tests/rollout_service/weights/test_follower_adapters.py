"""A worker that follows adapters: several versions concurrently, exact for every token, and no pause."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx
import pytest
from tests.contracts.tiny_model import Dense, build_endless_model
from tests.groups import make_task
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.trainer_side import TrainerSide, attached
from tests.servers import wait_for

from penstock.deploy.processes.child import Child
from penstock.protocol.facts import WeightsPublished
from penstock.protocol.trajectory import Group

StartWorker = Callable[..., Child]
PROMPT = [5, 17, 88, 250, 31, 9]
LONG = 2400  # tokens: seconds of generation


def versions_of(groups: Iterable[Group]) -> list[set[int]]:
    return [{run.version for row in group.trajectories for run in row.version_runs} for group in groups]


def check(groups: Iterable[Group], models: dict[int, Dense]) -> None:
    """Recompute every token's log-probability by its own version's merged weights; a sequence has one version."""
    for group in groups:
        for row in group.trajectories:
            start, tokens = group.num_prompt_tokens, row.token_ids.tolist()
            (run,) = row.version_runs
            assert (run.start, run.end) == (start, len(tokens))
            expected = models[run.version].of_completion(tokens[:start], tokens[start:])
            assert row.behaviour_logprobs[start:].tolist() == pytest.approx(expected, abs=1e-4)


def url_of(worker: Child) -> str:
    return re.findall(r'"url": "([^"]+)"', worker.log_tail(200))[-1]


def adapters_of(worker: Child) -> set[str]:
    models = httpx.get(f"{url_of(worker)}/v1/models").json()["data"]
    return {model["id"] for model in models if model["id"].startswith("policy@")}


def test_adapters_are_loaded_while_a_pack_generates_without_a_pause(
    trainer_side: TrainerSide, start_worker: StartWorker, tmp_path: Path
) -> None:
    """A long pack keeps its version, newer packs have the newest, and evaluations have the base or an older one.

    Each token's log-probability is its own version's. Unused adapters are unloaded, and their folders removed. A worker
    that is killed and restarted loads the base and the newest adapter.
    """
    build_endless_model(trainer_side.folder / "model-0")
    facts: dict[int, WeightsPublished] = {0: trainer_side.publish(0), 1: trainer_side.publish_adapter(1)}
    worker = start_worker("w0")
    trainer_side.wait_applied("w0", 1)
    long = make_task("e0.p0.a0", prompt_ids=PROMPT, group_size=2, max_new_tokens=LONG, stop_token_ids=())
    trainer_side.issue("long", [long])
    wait_for(
        lambda: httpx.get(f"{url_of(worker)}/v1/loads").json()["loads"][0]["num_running_reqs"] == 2, "the engine to run"
    )
    for version in (2, 3):
        facts[version] = trainer_side.publish_adapter(version)
        trainer_side.wait_applied("w0", version)
    task = make_task("e0.p1.a0", prompt_ids=PROMPT, issued_version=3, group_size=2, stop_token_ids=())
    trainer_side.issue("short", [task])
    [short] = trainer_side.collect_groups(1)
    pins = [
        make_task(f"eval.p{v}", split="eval", pinned_version=v, prompt_ids=PROMPT, group_size=1, stop_token_ids=())
        for v in (0, 1, 2)
    ]
    for task in pins:
        trainer_side.issue(task.group_id, [task])
    pinned = trainer_side.collect_groups(3)
    assert httpx.get(f"{url_of(worker)}/v1/loads").json()["loads"][0]["num_running_reqs"] == 2, (
        "the long pack still runs"
    )
    [first] = trainer_side.collect_groups(1)
    groups = [first, short, *sorted(pinned, key=lambda group: group.group_id)]
    assert versions_of(groups) == [{1}, {3}, {0}, {1}, {2}]
    models = {
        version: Dense(trainer_side.merged(fact, tmp_path / f"merged-{version}")) for version, fact in facts.items()
    }
    check(groups, models)
    assert [(fact.version, fact.pause_s) for fact in trainer_side.applied] == [(1, 0.0), (2, 0.0), (3, 0.0)]
    assert [fact.checksum for fact in trainer_side.applied[-1:]] == [trainer_side.root(facts[3])]
    assert trainer_side.applied[-1].num_bytes == facts[3].num_bytes < 0.3 * facts[0].num_bytes
    wait_for(lambda: adapters_of(worker) == {"policy@3"}, "older adapters to be unloaded")
    [held] = tmp_path.rglob("adapters")
    wait_for(lambda: [path.name for path in held.iterdir()] == ["3"], "their folders to be removed")

    worker.kill()
    worker.start()
    wait_for(lambda: len(trainer_side.applied) == 4, "the restarted worker")
    assert (trainer_side.applied[-1].version, trainer_side.applied[-1].num_bytes) == (3, facts[3].num_bytes)
    again = make_task("e0.p2.a0", prompt_ids=PROMPT, issued_version=3, group_size=2, stop_token_ids=())
    trainer_side.issue("again", [again])
    groups = trainer_side.collect_groups(1)
    assert versions_of(groups) == [{3}]
    check(groups, models)


def test_the_model_is_loaded_once(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
) -> None:
    """Adapters, and evaluations of older ones and of the model itself, cause no other model load and no pause."""
    facts = [trainer_side.publish(0)]
    start_worker("w0", *attached(faulty_engine), "worker.update_mode=retract")
    trainer_side.wait_applied("w0", 0)
    for version in (1, 2, 3):
        facts.append(trainer_side.publish_adapter(version))
        trainer_side.wait_applied("w0", version)
    pauses = list(faulty_engine.pauses)
    for version in (0, 1, 2):
        task = make_task(f"eval.p{version}", split="eval", pinned_version=version, temperature=0.0, group_size=1)
        trainer_side.issue(task.group_id, [task])
        assert versions_of(trainer_side.collect_groups(1)) == [{version}]
    trainer_side.issue("pack-0", [make_task("e0.p0.a0")])
    assert versions_of(trainer_side.collect_groups(1)) == [{3}]
    assert [version for version, _ in faulty_engine.loads] == ["0"]
    assert faulty_engine.pauses == pauses
    assert [fact.version for fact in trainer_side.applied] == [0, 1, 2, 3]
    wait_for(lambda: set(faulty_engine.adapters) == {"policy@3"}, "what was pinned to be unloaded")


def test_an_unusable_adapter_is_refused_and_the_answer_is_served(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
) -> None:
    trainer_side.publish(0)
    trainer_side.publish_adapter(1)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 1)
    trainer_side.publish_adapter(2, corrupt="adapter_model.safetensors")
    wait_for(lambda: trainer_side.refused, "the first refusal")
    trainer_side.issue("pack-0", [make_task("e0.p0.a0", issued_version=2)])
    assert versions_of(trainer_side.collect_groups(1)) == [{1}]
    trainer_side.source.answer()
    trainer_side.wait_applied("w0", 2)
    faulty_engine.lose_adapters = True
    trainer_side.publish_adapter(3)
    wait_for(lambda: len(trainer_side.refused) == 2, "the second refusal")
    faulty_engine.lose_adapters = False
    assert [(fact.version, fact.serving) for fact in trainer_side.refused] == [(2, 1), (3, 2)]
    assert "sha256" in trainer_side.refused[0].reason
    trainer_side.issue("pack-1", [make_task("e0.p1.a0", issued_version=3)])
    assert versions_of(trainer_side.collect_groups(1)) == [{2}]
    trainer_side.source.answer()
    trainer_side.wait_applied("w0", 3)


def test_models_and_adapters_may_alternate(
    trainer_side: TrainerSide, start_worker: StartWorker, faulty_engine: FaultyEngine
) -> None:
    trainer_side.publish(0)
    trainer_side.publish_adapter(1)
    start_worker("w0", *attached(faulty_engine))
    trainer_side.wait_applied("w0", 1)
    trainer_side.publish(2)
    trainer_side.wait_applied("w0", 2)
    trainer_side.issue("pack-0", [make_task("e0.p0.a0", issued_version=2)])
    assert versions_of(trainer_side.collect_groups(1)) == [{2}]
    trainer_side.issue("eval", [make_task("eval.p1", split="eval", pinned_version=1, temperature=0.0, group_size=1)])
    assert versions_of(trainer_side.collect_groups(1)) == [{1}]
    wait_for(lambda: faulty_engine.version == "2", "the newest version to be served again")
    assert [version for version, _ in faulty_engine.loads] == ["0", "2", "0", "2"]
    assert faulty_engine.adapters == {}
