"""Pairs of answers in the steps of a run: exact beside its groups, on two ranks, after a resume and in a replay."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fine_tuning.trl_rows import pairs
from tests.trainer.groups.stored_groups import invent_group
from tests.trainer.learner import forks
from tests.trainer.learner.forks import Command
from tests.trainer.producer import ScriptedProducer, recite, write_run_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.facts import GroupScored, decode, encode
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.packs import group_pack
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.learner.learner import Learner, build_learner
from penstock.trainer.learner.pair_planner import open_mixed_pairs, pair_metrics
from penstock.trainer.learner.planning import Planner, learn
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings

pytestmark = pytest.mark.slow

SCORED = "scored.msgpack"
NUM_STEPS, COEFFICIENT, BETA, NUM_PAIRS = 3, 0.5, 0.3, 5
WAYS: dict[str, dict[str, Any]] = {
    "sigmoid": {"trainer": {"zero_stage": 0}},
    "sigmoid-3": {"trainer": {"zero_stage": 3}},
    "coupled": {"dpo": {"loss": "aot"}},
    "without reference": {"dpo": {"loss": "orpo", "beta": 0.1}, "algorithm": {"reference_path": None}},
    "lora": {"model": {"lora": {"rank": 4}}, "trainer": {"zero_stage": 2}, "algorithm": {"reference_path": None}},
    "whole": {"algorithm": {"dpo_coefficient": 1.0}},
    "groups alone": {"algorithm": {"dpo_coefficient": 0.0, "reference_path": None}, "dpo": {}},
}


class PackFolder:
    """Packs below a folder, as `Learner` fetches them from an object store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, ref: BlobRef) -> bytes:
        return (self._folder / ref.key).read_bytes()


def settings(folder: Path, changes: dict[str, Any]) -> TrainerSettings:
    given: dict[str, dict[str, Any]] = {
        "run": {"id": "mixed", "dir": folder / "runs", "seed": 7},
        "model": {"path": folder / "model"},
        "data": {"train": folder / "rows.jsonl", "max_prompt_tokens": 64},
        "reward": {"name": "exact_match"},
        "rollout": {"group_size": 4, "groups_per_step": 3, "max_new_tokens": 16},
        "algorithm": {"name": "gspo", "dpo_coefficient": COEFFICIENT, "reference_path": folder / "other"},
        "dpo": {"beta": BETA, "batch_size": NUM_PAIRS},
        "trainer": {"lr": 1e-3, "steps": 10, "micro_batch_tokens": 128},
    }
    return TrainerSettings.model_validate(
        {name: {**given.get(name, {}), **changes.get(name, {})} for name in {**given, **changes}}
    )


def trained(folder: Path, way: str, ranks: Ranks) -> dict[str, Any]:
    """Make some steps, and the last of them again from a checkpoint (rank 0)."""
    chosen, dims = settings(folder, WAYS[way]), ParallelDims(ranks)
    pairs = open_mixed_pairs(chosen)
    learner = build_learner(chosen, dims, PackFolder(folder), pairs)  # type: ignore[arg-type]
    if not ranks.is_leader:
        learner.follow()
        return {}
    message = decode((folder / SCORED).read_bytes(), GroupScored)
    groups = group_pack.decode((folder / message.pack.key).read_bytes())
    batch = [ReadyGroup(group, message.pack, groups[group.generated.row_group]) for group in message.groups]
    planner, steps = Planner(chosen, learner, {}), []
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            saved = folder / f"{way}-{ranks.num_ranks}"
            learner.save(saved)
        steps.append(line(learner, planner, batch))
    weights = learner.snapshot()
    learner.load(saved)
    again = line(learner, planner, batch)
    mixed = learner._pairs
    found = {
        "prompts": [[pair.prompt.tolist() for pair in mixed.at(step)] for step in range(2)] if mixed else [],
        "steps": steps,
        "again": again == steps[-1] and same(weights, learner.snapshot()),
        "checksum": float(sum(tensor.double().abs().sum() for tensor in weights.values())),
        "digests": learner.data_digests,
    }
    learner.dismiss()
    return found


def line(learner: Learner, planner: Planner, batch: list[ReadyGroup]) -> dict[str, Any]:
    learned = learn(planner, learner, batch, 0, keep_groups="all")
    figures, kept = learned.metrics, learned.metrics.kept
    assert kept is not None
    return {
        "loss": figures.loss,
        "grad_norm": figures.grad_norm,
        "tokens": figures.sums["tokens"],
        "ratio": figures.sums["ratio"],
        "kept": sorted(kept.rows.tolist()),
        **pair_metrics(figures.sums),
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def by_hand(folder: Path) -> dict[str, Any]:
    """Return loss and gradient norm of the first step's pairs, from plain logits, and the prompts of two steps."""
    chosen = settings(folder, {})
    pairs = open_mixed_pairs(chosen)
    assert pairs is not None
    order = DataOrder(len(pairs), chosen.run.seed)
    steps = [[pairs[order.at(NUM_PAIRS * step + place).prompt] for place in range(NUM_PAIRS)] for step in range(2)]
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in ("model", "other"))
    losses = []
    for pair in steps[0]:
        margin = torch.zeros(())
        for answer, sign in ((pair.chosen, 1.0), (pair.rejected, -1.0)):
            with torch.no_grad():
                held = logprob(reference, pair.prompt, answer)
            margin = margin + sign * (logprob(policy, pair.prompt, answer) - held)
        losses.append(-torch.nn.functional.logsigmoid(BETA * margin))
    loss = torch.stack(losses).mean()
    loss.backward()
    squares = sum(float(p.grad.double().square().sum()) for p in policy.parameters() if p.grad is not None)
    return {
        "pair_loss": float(loss),
        "grad_norm": squares**0.5,
        "num_pairs": len(pairs),
        "prompts": [[pair.prompt.tolist() for pair in step] for step in steps],
    }


def logprob(model: torch.nn.Module, prompt: Any, answer: Any) -> Tensor:
    ids = torch.tensor([*prompt, *answer], dtype=torch.int64)
    scores = model(ids[None]).logits[0].float().log_softmax(-1)
    return scores[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]).sum()


def main(arguments: Sequence[str]) -> int:
    """Train groups and pairs together in every way below the folder that is the argument; print what each gave."""
    folder, ranks = Path(arguments[0]), Ranks()
    found: dict[str, Any] = {way: trained(folder, way, ranks) for way in WAYS}
    if ranks.num_ranks == 1:
        found["by hand"] = by_hand(folder)
    if ranks.is_leader:
        print(json.dumps(found))
    ranks.leave(0)
    return 0


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
    return forks.results(folder, __name__, str(folder), ranks=(1, 2))


@pytest.mark.timeout(400)
def test_losses_and_gradients_add_up(results: dict[int, dict[str, Any]]) -> None:
    """The loss is that of the groups plus the weighed one of the pairs, which plain logits give; so is the gradient."""
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
    """Losses, norms, figures and weights agree, also where a loss couples all pairs; a resumed step is the same."""
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
