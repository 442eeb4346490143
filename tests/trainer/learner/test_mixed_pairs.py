"""Pairs of answers in the steps of a run: exact beside its groups, the same on two ranks, after a resume and in a replay."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.fine_tuning.trl_rows import pairs
from tests.trainer.groups.stored_groups import invent_group
from tests.trainer.learner.forks import Command, Fork
from tests.trainer.learner.mixed_check import COEFFICIENT, NUM_PAIRS, SCORED, WAYS
from tests.trainer.producer import ScriptedProducer, recite, write_run_file

from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.facts import GroupScored, encode
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.packs import group_pack
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

NUM_ROWS = 12  # pairs of the file; steps use some of them a second time


def write_rows(path: Path) -> None:
    """Write prompts and pairs in turn, as in one file of a platform."""
    lines = []
    for row in pairs(seed=3, num=NUM_ROWS):
        lines += [{"prompt": row["prompt"], "ground_truth": row["chosen"], "data_source": "sort"}, row]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def store_groups(folder: Path) -> None:
    """Store a pack of three groups, and the message about it."""
    groups = [invent_group(f"e0.p{number}.a0", seed=number) for number in range(3)]
    data = group_pack.encode(groups)
    pack = BlobRef(key="pack", size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (folder / pack.key).write_bytes(data)
    rewards = ((1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 0.0, 0.0), (1.0, 1.0, 0.0, 1.0))
    scored = tuple(
        ScoredGroup(generated=group.summary(number), rewards=rewards[number], scorer="test")
        for number, group in enumerate(groups)
    )
    message = GroupScored(run_id="mixed", pack_id="p", worker_id="w", pack=pack, groups=scored)
    (folder / SCORED).write_bytes(encode(message))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mixed")
    write_model(folder / "model", seed=0)
    write_model(folder / "other", seed=1)
    write_rows(folder / "rows.jsonl")
    store_groups(folder)
    started = {num: Fork(folder, "tests.trainer.learner.mixed_check", str(folder), num_ranks=num) for num in (1, 2)}
    try:
        return {num: json.loads(one.wait(deadline_s=300.0).splitlines()[-1]) for num, one in started.items()}
    finally:
        for one in started.values():
            one.kill()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_and_gradients_add_up(results: dict[int, dict[str, Any]]) -> None:
    """The loss is that of the groups alone plus the weighed one of the pairs, which plain logits give; so is the gradient."""
    one, hand = results[1], results[1]["by hand"]
    alone, half, whole = (one[way]["steps"][0] for way in ("groups alone", "sigmoid", "whole"))
    assert half["pair_loss"] == pytest.approx(hand["pair_loss"], abs=1e-5)
    assert abs(hand["pair_loss"] - math.log(2.0)) > 0.01, "the reference is another model"
    assert half["loss"] == pytest.approx(alone["loss"] + COEFFICIENT * hand["pair_loss"], abs=1e-5)
    assert whole["loss"] == pytest.approx(alone["loss"] + hand["pair_loss"], abs=1e-5)
    # |a + b|² - 2 |a + b/2|² + |a|² = |b|² / 2, of the gradients a of the groups and b of the pairs
    squares = [step["grad_norm"] ** 2 for step in (alone, half, whole)]
    assert 2.0 * (squares[2] - 2.0 * squares[1] + squares[0]) == pytest.approx(hand["grad_norm"] ** 2, rel=1e-3)


def test_figures_of_groups_and_pairs_are_apart(results: dict[int, dict[str, Any]]) -> None:
    alone, mixed = (results[1][way]["steps"][0] for way in ("groups alone", "sigmoid"))
    assert (mixed["tokens"], mixed["ratio"], mixed["kept"]) == (alone["tokens"], alone["ratio"], alone["kept"])
    assert mixed["kept"] == list(range(12))
    assert mixed["pairs_trained"] == NUM_PAIRS
    assert "pair_loss" not in alone
    assert mixed["pair_margin"] == pytest.approx(mixed["pair_reward_chosen"] - mixed["pair_reward_rejected"], abs=1e-9)


def test_pairs_follow_from_seed_and_step(results: dict[int, dict[str, Any]]) -> None:
    """Each step has the next ones of a shuffled order, another one in every pass over the file."""
    hand = results[1]["by hand"]
    assert hand["num_pairs"] == NUM_ROWS
    assert results[1]["sigmoid"]["prompts"] == results[2]["sigmoid"]["prompts"] == hand["prompts"]
    assert not {tuple(ids) for ids in hand["prompts"][0]} & {tuple(ids) for ids in hand["prompts"][1]}


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_equal_one_and_a_checkpoint_continues(results: dict[int, dict[str, Any]], way: str) -> None:
    """Losses, norms, figures and weights agree, also of a loss that couples all pairs; a resumed step is the same bit for bit."""
    one, two = results[1][way], results[2][way]
    assert one["again"]
    assert two["again"]
    for alone, together in zip(one["steps"], two["steps"], strict=True):
        for name, value in alone.items():
            if name == "pair_accuracy" and abs(alone["pair_margin"]) < 1e-5:
                continue  # the policy is its reference: which answer is better is a matter of rounding
            assert together[name] == pytest.approx(value, rel=5e-5, abs=2e-6), (way, name)
    assert two["checksum"] == pytest.approx(one["checksum"], rel=1e-6)
    assert two["digests"] == one["digests"]
    assert bool(one["digests"]) == (way != "groups alone")


@pytest.mark.timeout(300)
def test_a_run_with_pairs_is_replayed_hash_for_hash(
    nats_server: NatsServer, s3_server: S3Server, tmp_path: Path
) -> None:
    """One file of prompts and pairs; the replay reads the pairs again, and names a file that has changed since."""
    write_model(tmp_path / "model", seed=0)
    write_rows(tmp_path / "rows.jsonl")
    run_file = write_run_file(
        tmp_path / "run.toml", nats=nats_server.settings, s3=s3_server.settings,
        sections={
            "run": {"id": "pairs", "dir": str(tmp_path / "runs"), "seed": 3},
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": [str(tmp_path / "rows.jsonl")], "max_prompt_tokens": 64},
            "rollout": {"group_size": 4, "groups_per_step": 2, "max_new_tokens": 8},
            "algorithm": {"name": "gspo", "dpo_coefficient": 1.0},
            "reward": {"name": "exact_match"},
            "dpo": {"batch_size": 4},
            "trainer": {"steps": 3, "lr": 1e-3, "micro_batch_tokens": 256, "max_mismatch": "None"},
        },
    )  # fmt: skip
    with Bus.connect(nats_server.settings, name="test") as bus:
        bootstrap(bus, Blobs(s3_server.settings), "pairs")
        try:
            with ScriptedProducer(nats_server.settings, s3_server.settings, "pairs", recite):
                Command(tmp_path, "train", str(run_file)).wait()
            verdict = json.loads(Command(tmp_path, "replay", "pairs", str(run_file), "--json").wait())
            assert verdict["difference"] is None
            assert (verdict["findings"], verdict["surroundings"], verdict["num_steps"]) == ([], [], 3)
            lines = map(json.loads, (tmp_path / "runs" / "pairs" / "metrics.jsonl").read_text().splitlines())
            steps = [line for line in lines if line["kind"] == "step"]
            assert [line["pairs_trained"] for line in steps] == [4, 4, 4]
            assert steps[0]["pair_loss"] == pytest.approx(math.log(2.0), abs=1e-6)
            rows = (tmp_path / "rows.jsonl").read_text()
            (tmp_path / "rows.jsonl").write_text(rows.replace('"chosen": "', '"chosen": "1'))
            verdict = json.loads(Command(tmp_path, "replay", "pairs", str(run_file), "--json").wait(1))
            assert verdict["difference"]["step"] == 1
            assert ["pairs of data.train" in line for line in verdict["surroundings"]] == [True]
        finally:
            delete_run(bus, "pairs")
