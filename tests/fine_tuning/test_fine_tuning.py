"""`penstock sft` and `penstock dpo`: curves as TRL's, resumed as uninterrupted, stopped early, on two ranks."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.fine_tuning import trl_rows
from tests.fine_tuning.check import WHOLE
from tests.trainer.learner.forks import Fork

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterConfig, factor_names

pytestmark = pytest.mark.slow

CURVES = json.loads((Path(__file__).parents[1] / "data" / "trl" / "curves.json").read_text())
TRAINED = sorted(CURVES)
TOLERANCE = {"dpo/ipo": 2e-5}  # its values are near 25


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("kind", "at", "step_s", "eval_s")}


def check_same(run: dict[str, Any], other: dict[str, Any]) -> None:
    """Two trainings have the same lines, validations and weights, bit for bit."""
    for kind in ("steps", "evals"):
        assert [timeless(line) for line in run[kind]] == [timeless(line) for line in other[kind]]
    assert (run["weights"], run["weights_of_step"]) == (other["weights"], other["weights_of_step"])


def _start(folder: Path, *cases: str, num_ranks: int = 1) -> Fork:
    return Fork(folder, "tests.fine_tuning.check", str(folder), *cases, num_ranks=num_ranks)


def _result(fork: Fork) -> dict[str, Any]:
    return json.loads(fork.wait(deadline_s=850.0).splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and rows; held-out rows are others of the same kind."""
    folder = tmp_path_factory.mktemp("fine_tuning")
    write_model(folder / "model", seed=0)
    trl_rows.write_turns(folder / "turns.jsonl")
    trl_rows.write_pairs(folder / "pairs.jsonl")
    trl_rows.write_labelled(folder / "labelled.jsonl")
    trl_rows.write_labelled(folder / "held_out_labelled.jsonl", seed=1, num=20)
    trl_rows.write_turns(folder / "held_out.jsonl", seed=1, num=20)
    trl_rows.write(folder / "held_out_pairs.jsonl", trl_rows.pairs(seed=1, num=20))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return _result(_start(folder, *TRAINED, "resumed", "early", "lora_rm", "broken_export", "merged"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRAINED)
def test_losses_and_gradient_norms_are_those_of_trl(found: dict[str, Any], name: str) -> None:
    """Each step's loss is within 1e-5 of TRL's on the same rows, although the micro-batches are others."""
    steps, recorded = found[name]["steps"], CURVES[name]
    assert len(steps) == (50 if name in WHOLE else 5)
    for line, loss, norm in zip(steps, recorded["losses"], recorded["grad_norms"], strict=False):
        assert line["loss"] == pytest.approx(loss, abs=TOLERANCE.get(name, 1e-5))
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_preferences_are_learned_and_reported(found: dict[str, Any]) -> None:
    """Rewards begin at 0, since the policy is its reference; at the end the chosen answers have the higher ones."""
    first, *_, last = found["dpo/sigmoid"]["steps"]
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert last["rewards/accuracies"] >= 0.75
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-9)
    assert last["logps/chosen"] > first["logps/chosen"]


def test_answers_with_labels_are_reported_by_kind(found: dict[str, Any]) -> None:
    """KTO's rows have one answer each: means over each kind, their difference as the margin, no accuracy."""
    last = found["kto"]["steps"][-1]
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-12)
    assert last["logps/chosen"] < -10.0
    assert "rewards/accuracies" not in last
    [line] = found["kto"]["evals"]
    assert 0.3 < line["eval_loss"] < 0.6
    assert "eval_rewards/accuracies" not in line


def test_a_reward_model_is_a_folder_that_the_server_loads(found: dict[str, Any], folder: Path) -> None:
    """A classifier of one label whose score came from the training; it prefers the chosen answers of held-out rows."""
    [line] = found["rm"]["evals"]
    assert line["eval_accuracy"] >= 0.75
    home = folder / "runs" / "trl-rm" / "rm"
    config = json.loads((home / "config.json").read_text())
    assert (config["architectures"], config["num_labels"]) == (["Qwen3ForSequenceClassification"], 1)
    tensors = load_file(home / "model.safetensors")
    assert tensors["score.weight"].shape == (1, 64)
    assert abs(tensors["score.weight"]).max() > 1e-3
    assert "lm_head.weight" not in tensors


def test_a_resumed_training_equals_an_uninterrupted_one(found: dict[str, Any]) -> None:
    """Stopped twice, with LoRA, its dropout and shuffled rows: the same lines, validations and weights, bit for bit."""
    runs = found["resumed"]
    assert [line["step"] for line in runs["first"]["steps"]] == [1, 2, 3]
    assert [line["step"] for line in runs["second"]["steps"]] == [1, 2, 3, 4, 5]
    assert runs["second"]["files"][:2] == ["best", "best/step00000004"]
    assert "checkpoints/step00000005" in runs["second"]["files"]
    check_same(runs["last"], runs["whole"])
    assert [len(runs["last"][kind]) for kind in ("steps", "evals")] == [8, 4]
    assert runs["last"]["files"] == ["best"], "checkpoints are removed once the result is written"


def test_the_adapter_is_written_beside_the_merged_model(found: dict[str, Any], folder: Path) -> None:
    """The model's weights are the initial ones plus the adapter's products, in PEFT's names and scale."""
    assert found["resumed"]["whole"]["weights"]
    home = folder / "runs" / "whole"
    config = AdapterConfig.from_json((home / "sft-adapter" / ADAPTER_CONFIG).read_bytes())
    factors = load_file(home / "sft-adapter" / ADAPTER_WEIGHTS)
    base, merged = (load_file(path / "model.safetensors") for path in (folder / "model", home / "sft"))
    pairs = {name: factor_names(name.removesuffix(".weight")) for name in base}
    adapted = {name: pair for name, pair in pairs.items() if factors.keys() >= set(pair)}
    assert len(adapted) == 14
    for name, weight in base.items():
        expected = weight
        if name in adapted:
            down, up = (factors[factor] for factor in adapted[name])
            expected = weight + config.scale * up @ down
            assert abs(merged[name] - weight).max() > 1e-4
        np.testing.assert_allclose(merged[name], expected, atol=1e-6)


def test_a_reward_model_learns_by_adapters(found: dict[str, Any], folder: Path) -> None:
    """Score and adapters are what peft, transformers and the server read, resumed as uninterrupted."""
    run = found["lora_rm"]
    [line] = run["whole"]["evals"]
    assert line["eval_accuracy"] >= 0.75
    assert line["eval_loss"] < math.log(2.0), "that of equal scores"
    by_peft, merged, served = run["scores"]
    assert by_peft == pytest.approx(merged, abs=1e-5)
    assert served == pytest.approx(merged, abs=1e-5)
    assert max(by_peft) - min(by_peft) > 1e-3
    assert run["last"]["weights"] == run["whole"]["weights"]
    tensors = load_file(folder / "runs" / "lora-rm" / "rm" / "model.safetensors")
    base = load_file(folder / "model" / "model.safetensors")
    same = {name for name, weight in base.items() if name in tensors and (tensors[name] == weight).all()}
    assert len(same) == len(base) - 14


def test_a_training_killed_while_a_thread_writes_equals_an_uninterrupted_one(
    found: dict[str, Any], folder: Path
) -> None:
    """SIGKILL between shard and state, before and after the rename: each start continues, to the same weights."""
    for point in ("shard_written:2", "written:2", "committed:2"):
        _start(folder, f"killed@{point}").wait(expected=-9)
    check_same(_result(_start(folder, "killed@"))["killed"], found["resumed"]["whole"])


def test_a_result_that_computes_something_else_replaces_nothing(found: dict[str, Any]) -> None:
    """The written folder is loaded and compared before it gets its name."""
    run = found["broken_export"]
    assert "gives other log-probabilities than the trainer" in run["text"]
    assert run["after"] == run["before"]


def test_a_merge_is_held_against_the_noise_of_its_dtype(found: dict[str, Any]) -> None:
    """A result without its adapters is refused where they change little; one that rounding takes them from is named.

    A fixed bound of 0.1 nats, of which bfloat16 alone takes most in a pretrained model, let both pass.
    """
    run = found["merged"]
    assert 0 < run["large"]["mean_logprob_difference"] <= 3 * run["large"]["noise_of_dtype"] < 0.01
    assert run["large"]["kept"] > 0.99
    assert run["small"]["kept"] < 0.9
    apart = re.search(
        r"gives other log-probabilities than the trainer: (\S+) apart on average, expected at most", run["lost"]
    )
    assert apart is not None
    assert float(apart[1]) < 0.1


def test_early_stop_keeps_the_best_weights(found: dict[str, Any]) -> None:
    run = found["early"]
    losses = [line["eval_loss"] for line in run["evals"]]
    best = losses.index(min(losses)) + 1
    assert len(run["steps"]) == len(losses) == best + 2 < 50
    assert run["weights_of_step"] == best
    assert [line["is_best"] for line in run["evals"]][-3:] == [True, False, False]


def _check_close(line: dict[str, Any], other: dict[str, Any], name: str) -> None:
    """Compare two lines up to rounding, but for what rounding alone decides.

    That is what the weights moved by, as a score is 0 at first, and the better answer of an untrained policy.
    """
    left_out = {"rewards/accuracies"} if abs(line.get("rewards/margins", 1.0)) < 1e-5 else set()
    for field, value in timeless(line).items():
        if not field.startswith("update_ratio") and field not in left_out:
            assert value == pytest.approx(other[field], rel=1e-4, abs=2e-5), (name, field)


@pytest.mark.timeout(900)
def test_two_ranks_train_as_one(folder: Path) -> None:
    """Losses, norms, validations and weights agree, also of losses that need the whole batch, at every ZeRO stage.

    Whether ranks have rows of their own, or share tokens or weights; with checkpoints that one of them continues.
    """
    of_two = _result(_start(folder, "layouts", "moved", "divided", num_ranks=2))
    found = _result(_start(folder, "layouts", "moved", "divided"))
    begun, continued = (one["divided"].pop("moved-weights") for one in (of_two, found))
    assert [line["step"] for line in begun["steps"]] == [1, 2, 3]
    two, one = ({**run["layouts"], **run["divided"]} for run in (of_two, found))
    moved, whole = found["moved"]["moved"], found["moved"]["whole"]
    for line, other in zip(moved["steps"], whole["steps"], strict=True):
        _check_close(line, other, "moved")  # one rank continues what two began, at another stage
    for line, other in zip(continued["steps"], whole["steps"], strict=True):
        _check_close(line, other, "moved-weights")
    for run in (moved, continued):
        assert run["checksum"] == pytest.approx(whole["checksum"], rel=1e-6)
    assert sorted(one) == sorted(two)
    for name, alone in one.items():
        together = two[name]
        for line, other in zip(alone["steps"] + alone["evals"], together["steps"] + together["evals"], strict=True):
            _check_close(line, other, name)
        assert alone["checksum"] == pytest.approx(together["checksum"], rel=1e-6), name
    assert len(one["aot-1"]["evals"]) == len(one["sft-0"]["evals"]) == 1
    for line, other in zip(one["live-1"]["steps"], one["precomputed-1"]["steps"], strict=True):
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-6)
