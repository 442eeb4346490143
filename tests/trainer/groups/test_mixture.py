"""Runs that mix several environments: exact proportions in a seeded order, the same in every session and attempt."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tests.trainer.config.test_settings import settings
from tests.trainer.groups.test_dispatch import _Prompts, prompt, rollout

from penstock.protocol.config.environment_settings import MIXTURE, EnvironmentSettings
from penstock.protocol.groups import RewardRequest
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.groups.dispatch import Dispatch
from penstock.trainer.groups.group_totals import Drop, DropReason
from penstock.trainer.groups.task_packs import Mixture


def defined(**environments: dict[str, Any]) -> EnvironmentSettings:
    return EnvironmentSettings.model_validate({"define": {n: {"type": "lookup", **e} for n, e in environments.items()}})


def chosen(seed: int, count: int, **weights: int) -> list[str]:
    mixture = Mixture(defined(**{name: {"weight": weight} for name, weight in weights.items()}), seed)
    return [mixture.name(MIXTURE, position, "") for position in range(count)]


def test_the_proportions_are_exact_in_every_block() -> None:
    """Weights 6, 4 and 2 are 3, 2 and 1 of every six positions, in another order in each block and with each seed."""
    found = chosen(0, 600, lake=6, guess=4, rooms=2)
    blocks = [tuple(found[start : start + 6]) for start in range(0, 600, 6)]
    assert {tuple(sorted(Counter(block).items())) for block in blocks} == {(("guess", 2), ("lake", 3), ("rooms", 1))}
    assert len(set(blocks)) > 40  # of 60 orders
    assert chosen(0, 600, lake=6, guess=4, rooms=2) == found
    assert chosen(1, 600, lake=6, guess=4, rooms=2) != found
    for count in range(600):  # no prefix is more than a block away from its share
        assert abs(found[:count].count("lake") - count / 2) <= 3


def test_the_choice_does_not_depend_on_what_was_asked_before() -> None:
    """Only the mixture is chosen for; a row of a data source with an environment is played there."""
    mixture = Mixture(defined(lake={"weight": 2}, guess={"weight": 1}, sums={"data_sources": ["gsm8k"]}), 3)
    forwards = [mixture.name(MIXTURE, position, "") for position in range(30)]
    assert [mixture.name(MIXTURE, position, "") for position in reversed(range(30))] == forwards[::-1]
    assert {mixture.name(MIXTURE, position, "gsm8k") for position in range(30)} == {"sums"}
    assert mixture.name("lake", 1, "gsm8k") == "lake"
    assert Mixture.of(defined(sums={"data_sources": ["gsm8k"]}), 3) is None


def test_every_attempt_and_every_session_plays_a_row_where_it_was_played() -> None:
    """Tasks name the environment; a group that is issued again, or by a resumed session, is played in the same one."""
    sums = RewardRequest(name="environment", data_source="gsm8k")
    prompts = [replace(prompt(text=f"sort {n}"), index=n) for n in range(12)]
    prompts = [replace(one, reward=sums) if one.index == 5 else one for one in prompts]
    rules = rollout(environment=MIXTURE, groups_per_step=12, max_attempts=3)
    mixed = defined(lake={"weight": 2}, guess={"weight": 1}, sums={"data_sources": ["gsm8k"]})

    def fresh() -> Dispatch:
        return Dispatch(
            _Prompts(prompts),
            order=DataOrder(12, seed=1),
            rollout=rules,
            stop_token_ids=(2,),
            mixture=Mixture(mixed, 1),
        )  # type: ignore[arg-type]

    first = fresh()
    tasks = {task.group_id: task for pack in first.next_packs(PolicyVersion(0)) for task in pack.tasks}
    environments = {group_id: task.environment for group_id, task in tasks.items()}
    assert {one.environment for one in tasks.values() if one.reward.data_source == "gsm8k"} == {"sums"}
    assert set(environments.values()) == {"lake", "guess", "sums"}
    assert all(task.messages for task in tasks.values())
    done = [one for one in tasks if one.startswith("e0")][:4]
    assert not any(map(first.accept, done))
    for group_id in done:
        first.drop(Drop(group_id, DropReason.STALE, 0))
    again = {task.group_id: task for pack in first.next_packs(PolicyVersion(1)) for task in pack.tasks}
    assert {"a1"} <= {group_id.rpartition(".")[2] for group_id in again}
    for group_id, task in again.items():
        if group_id.endswith("a1"):
            assert task.environment == environments[group_id.replace("a1", "a0")]
    second = fresh()
    second.cursor.resume(first.cursor.to_document())
    packed = second.pack_again(sorted(environments)[:6], PolicyVersion(0))
    assert {task.group_id: task.environment for task in packed.tasks} == {
        group_id: environments[group_id] for group_id in sorted(environments)[:6]
    }


def test_training_and_evaluation_may_mix() -> None:
    """Each alone; weights of a mixture that is only evaluated are in use."""
    weights = ["environment.define.lake.type=frozen_lake", "environment.define.lake.weight=2"]
    assert settings(*weights, f"rollout.environment={MIXTURE}").environment.weights == {"lake": 2}
    assert settings(*weights, f"eval.environment={MIXTURE}", "data.eval=held_out.jsonl").environment.weights == {
        "lake": 2
    }
