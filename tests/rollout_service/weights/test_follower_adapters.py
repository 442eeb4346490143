"""A worker that follows adapters: several versions concurrently, exact for every token, and no pause."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import httpx
from tests.contracts.tiny_model import Dense, build_endless_model, check_groups
from tests.groups import make_task
from tests.rollout_service.trainer_side import WorkerRun, engine_url, num_running
from tests.servers import wait_for

from penstock.deploy.processes.child import Child
from penstock.protocol.facts import WeightsPublished
from penstock.protocol.trajectory import Group

PROMPT = [5, 17, 88, 250, 31, 9]
LONG = 2400  # tokens: seconds of generation


def versions_of(groups: Iterable[Group]) -> list[set[int]]:
    return [{run.version for row in group.trajectories for run in row.version_runs} for group in groups]


def adapters_of(worker: Child) -> set[str]:
    models = httpx.get(f"{engine_url(worker)}/v1/models").json()["data"]
    return {model["id"] for model in models if model["id"].startswith("policy@")}


def test_adapters_are_loaded_while_a_pack_generates_without_a_pause(run: WorkerRun, tmp_path: Path) -> None:
    """A long pack keeps its version, newer packs have the newest, and evaluations have the base or an older one.

    Each token's log-probability is its own version's. Unused adapters are unloaded, and their folders removed. A worker
    that is killed and restarted loads the base and the newest adapter.
    """
    build_endless_model(run.folder / "model-0")
    facts: dict[int, WeightsPublished] = {0: run.publish(0), 1: run.publish_adapter(1)}
    worker = run.start("w0")
    run.wait_applied("w0", 1)
    long = make_task("e0.p0.a0", prompt_ids=PROMPT, group_size=2, max_new_tokens=LONG, stop_token_ids=())
    run.issue("long", [long])
    wait_for(lambda: num_running(worker) == 2, "the engine to run")
    for version in (2, 3):
        facts[version] = run.publish_adapter(version)
        run.wait_applied("w0", version)
    task = make_task("e0.p1.a0", prompt_ids=PROMPT, issued_version=3, group_size=2, stop_token_ids=())
    run.issue("short", [task])
    [short] = run.collect_groups(1)
    pins = [
        make_task(f"eval.p{v}", split="eval", pinned_version=v, prompt_ids=PROMPT, group_size=1, stop_token_ids=())
        for v in (0, 1, 2)
    ]
    for task in pins:
        run.issue(task.group_id, [task])
    pinned = run.collect_groups(3)
    assert num_running(worker) == 2, "the long pack still runs"
    [first] = run.collect_groups(1)
    groups = [first, short, *sorted(pinned, key=lambda group: group.group_id)]
    assert versions_of(groups) == [{1}, {3}, {0}, {1}, {2}]
    models = {version: Dense(run.merged(fact, tmp_path / f"merged-{version}")) for version, fact in facts.items()}
    check_groups(groups, models.__getitem__)
    assert [(fact.version, fact.pause_s) for fact in run.applied] == [(1, 0.0), (2, 0.0), (3, 0.0)]
    assert [fact.checksum for fact in run.applied[-1:]] == [run.root(facts[3])]
    assert run.applied[-1].num_bytes == facts[3].num_bytes < 0.3 * facts[0].num_bytes
    wait_for(lambda: adapters_of(worker) == {"policy@3"}, "older adapters to be unloaded")
    [held] = tmp_path.rglob("adapters")
    wait_for(lambda: [path.name for path in held.iterdir()] == ["3"], "their folders to be removed")

    worker.kill()
    worker.start()
    wait_for(lambda: len(run.applied) == 4, "the restarted worker")
    assert (run.applied[-1].version, run.applied[-1].num_bytes) == (3, facts[3].num_bytes)
    again = make_task("e0.p2.a0", prompt_ids=PROMPT, issued_version=3, group_size=2, stop_token_ids=())
    run.issue("again", [again])
    groups = run.collect_groups(1)
    assert versions_of(groups) == [{3}]
    check_groups(groups, models.__getitem__)


def test_the_model_is_loaded_once(run: WorkerRun) -> None:
    """Adapters, and evaluations of older ones and of the model itself, cause no other model load and no pause."""
    facts = [run.publish(0)]
    run.attach("w0", "worker.update_mode=retract")
    run.wait_applied("w0", 0)
    for version in (1, 2, 3):
        facts.append(run.publish_adapter(version))
        run.wait_applied("w0", version)
    pauses = list(run.engine.pauses)
    for version in (0, 1, 2):
        task = make_task(f"eval.p{version}", split="eval", pinned_version=version, temperature=0.0, group_size=1)
        run.issue(task.group_id, [task])
        assert versions_of(run.collect_groups(1)) == [{version}]
    run.issue("pack-0", [make_task("e0.p0.a0")])
    assert versions_of(run.collect_groups(1)) == [{3}]
    assert [version for version, _ in run.engine.loads] == ["0"]
    assert run.engine.pauses == pauses
    assert [fact.version for fact in run.applied] == [0, 1, 2, 3]
    wait_for(lambda: set(run.engine.adapters) == {"policy@3"}, "what was pinned to be unloaded")


def test_an_unusable_adapter_is_refused_and_the_answer_is_served(run: WorkerRun) -> None:
    run.publish(0)
    run.publish_adapter(1)
    run.attach()
    run.wait_applied("w0", 1)
    run.publish_adapter(2, corrupt="adapter_model.safetensors")
    wait_for(lambda: run.refused, "the first refusal")
    run.issue("pack-0", [make_task("e0.p0.a0", issued_version=2)])
    assert versions_of(run.collect_groups(1)) == [{1}]
    run.source.answer()
    run.wait_applied("w0", 2)
    run.engine.lose_adapters = True
    run.publish_adapter(3)
    wait_for(lambda: len(run.refused) == 2, "the second refusal")
    run.engine.lose_adapters = False
    assert [(fact.version, fact.serving) for fact in run.refused] == [(2, 1), (3, 2)]
    assert "sha256" in run.refused[0].reason
    run.issue("pack-1", [make_task("e0.p1.a0", issued_version=3)])
    assert versions_of(run.collect_groups(1)) == [{2}]
    run.source.answer()
    run.wait_applied("w0", 3)


def test_models_and_adapters_may_alternate(run: WorkerRun) -> None:
    run.publish(0)
    run.publish_adapter(1)
    run.attach()
    run.wait_applied("w0", 1)
    run.publish(2)
    run.wait_applied("w0", 2)
    run.issue("pack-0", [make_task("e0.p0.a0", issued_version=2)])
    assert versions_of(run.collect_groups(1)) == [{2}]
    run.issue("eval", [make_task("eval.p1", split="eval", pinned_version=1, temperature=0.0, group_size=1)])
    assert versions_of(run.collect_groups(1)) == [{1}]
    wait_for(lambda: run.engine.version == "2", "the newest version to be served again")
    assert [version for version, _ in run.engine.loads] == ["0", "2", "0", "2"]
    assert run.engine.adapters == {}
