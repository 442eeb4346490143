"""Everything random in a run follows from its seed: two synchronous runs on a deterministic engine are the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.agents.environments.episode_environment import Begun, group_seed
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.groups import MAX_SEED, derived_seed
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.engines.completion import Completion, Resumption
from penstock.trainer.recovery.resume_checks import read_settings
from tests.contracts.engine_under_test import embedded_engine
from tests.groups import make_task
from tests.trainer.learner.forks import Fork


@pytest.mark.slow
def test_the_same_seed_makes_the_same_versions_and_another_one_others(tmp_path: Path) -> None:
    """Order of the prompts, samples, dropout and adapters: digests of all versions are equal, and all differ for another seed."""
    write_model(tmp_path / "model", seed=0)
    with embedded_engine(tmp_path / "model", tmp_path) as engine:
        process = Fork(tmp_path, "tests.system.seed_check", str(tmp_path / "model"), str(tmp_path), engine.url)
        try:
            found = json.loads(process.wait(deadline_s=150.0).splitlines()[-1])
        finally:
            process.kill()
    first, again, other = found["first"], found["again"], found["other"]
    assert first == again
    assert first["digests"][0] == other["digests"][0], "adapters begin as the model that they adapt"
    assert len({*first["digests"], *other["digests"]}) == 5
    assert first["groups"] != other["groups"]
    rows = [tuple(row) for step in first["tokens"] for row in step]
    assert len(set(rows)) > len(rows) // 2, "the samples of a prompt differ"


def test_seeds_are_of_their_names_alone() -> None:
    assert derived_seed(0, "train", "e0.p1.a0") == 9169662777259491591
    names = [("train", "e0.p1.a0"), ("train", "e0.p1.a1"), ("eval", "e0.p1.a0"), ("traine0.p1.a0",)]
    seeds = {derived_seed(seed, *name) for seed in range(3) for name in names}
    assert len(seeds) == 12
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_a_record_of_an_earlier_release_is_read_with_its_own_start() -> None:
    """Its adapters began with the seed 0 whatever run.seed was; what it recorded is not changed."""
    document = {"settings": {"run": {"seed": 3}, "model": {"path": "m", "lora": {"rank": 4}}}}
    settings, flat = read_settings(json.dumps(document).encode(), where="a record")
    assert settings.first_seed == 0
    assert "model.lora.seed" not in flat
    document["settings"]["model"]["lora"] = {"rank": 4, "seed": None}
    assert read_settings(json.dumps(document).encode(), where="a record")[0].first_seed == 3
    document["settings"]["model"]["lora"] = {"rank": 0}
    assert read_settings(json.dumps(document).encode(), where="a record")[0].model.lora.seed is None


def test_a_continued_sample_draws_other_numbers_than_its_first_part() -> None:
    """An engine counts the tokens of a request from 0: with the same seed it would draw the first numbers again."""
    one, other = (Resumption([5], 10, 7, number) for number in range(2))
    assert (one.next_seed, other.next_seed) == (7, 7), "an engine derives those of n samples from one"
    for sequence in (one, other):
        sequence.parts.append(Completion([1, 2], [-1.0, -1.0], (VersionRun(PolicyVersion(0), 0, 2),), "abort", ""))
    assert len({7, one.next_seed, other.next_seed}) == 3
    assert Resumption([5], 10).next_seed is None


def test_the_episodes_of_a_group_share_their_world_and_not_their_samples() -> None:
    """The world is of the task's seed; the answers are of the episode and its attempt. Without a seed, as before."""
    task = make_task("e0.p1.a0").model_copy(update={"seed": 11})
    begun = [Begun(f"e0.p1.a0.{index}", task, attempt, group_seed(task)) for index in range(2) for attempt in range(2)]
    assert {one.seed for one in begun} == {11}
    assert len({one.sampling_seed for one in begun}) == 4
    old = make_task("e0.p1.a0")
    assert group_seed(old) == 8532283660177784555
    assert Begun("e", old, 0, 1).sampling_seed is None
