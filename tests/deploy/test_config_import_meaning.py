"""`penstock config import`: whole configurations, each held against a table of what its system does with them.

Both are in tests/data/imported_runs.toml: each property is what the run file does, or a decision.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from penstock.console.cli.main import run
from penstock.deploy.config_show import as_document, load_all
from penstock.protocol.config.sources import leaves

TABLE = tomllib.loads((Path(__file__).parents[1] / "data" / "imported_runs.toml").read_text())


@pytest.mark.parametrize("name", TABLE)
def test_a_run_file_does_what_its_source_does_or_asks(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every property of the table is equal in the run file or a decision of the report, and nothing is done with exit code 0."""
    source = TABLE[name]
    assert len(source["does"] | source["asks"]) >= 15
    file, to = tmp_path / f"a.{source['ending']}", tmp_path / "run.toml"
    file.write_text(source["text"])
    code = run(["config", "import", str(file), "--to", str(to), "--json"])
    report = json.loads(capsys.readouterr().out)
    asked = {line["key"] for line in report["keys"] if line["kind"] in ("decide", "unknown")}
    effective = {".".join(path): value for path, value in leaves(as_document(load_all([to], [], {}))["settings"])}
    done = {key: effective.get(key) for key in source["does"]}
    assert done == {key: None if value == "none" else value for key, value in source["does"].items()}
    assert set(source["asks"].values()) <= asked
    assert code == (1 if asked else 0)


REFUSED = {
    "rollout.group_size": "{pretrain: /m, rollout_batch_size: 64, num_return_sequences_in_group: 1, adv_estimator: grpo}",
    "critic.gamma": "{pretrain: /m, rollout_batch_size: 64, num_return_sequences_in_group: 8, adv_estimator: grpo, gamma: 0.99, lambd: 0.95}",
    "algorithm.kl_target": "{pretrain: /m, rollout_batch_size: 8, num_return_sequences_in_group: 8, adv_estimator: grpo, "
    "add_token_level_kl: true, init_kl_coef: 0.1, target_kl: 0.1, use_kl_loss: true, kl_loss_coef: 0.01}",
}


@pytest.mark.parametrize("subject", REFUSED)
def test_what_decides_a_run_is_never_left_out(subject: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused combination is a decision on the option that is refused; algorithm and group stay as the source has them."""
    file = tmp_path / "a.yaml"
    file.write_text(REFUSED[subject])
    assert run(["config", "import", str(file), "--to", str(tmp_path / "run.toml"), "--json", "--from", "roll"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert subject in {line["key"] for line in report["keys"] if line["kind"] == "decide"}
    assert report["settings"]["algorithm.name"] == "grpo"
    assert report["settings"]["rollout.group_size"] == (1 if subject == "rollout.group_size" else 8)


def test_the_files_of_a_hydra_configuration_are_read_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ``defaults`` name beside a file is under it, in their packages; a file elsewhere is not read, and its name stays a decision."""
    (tmp_path / "secret.yaml").write_text("seed: 7\n")
    examples, shared = tmp_path / "roll" / "examples", tmp_path / "roll" / "config"
    for folder in (examples, shared):
        folder.mkdir(parents=True)
    (shared / "envs.yaml").write_text(
        "steps: 12\nlimit: 99\nrunner: null\nunused: 1\ngame: {GuessTheNumber: {env_type: 'game:GuessTheNumber-v0', max_steps: '${steps}', "
        "agent_runner_cls: '${runner}', env_config: {max_number: 20}}, Other: {env_type: webshop}}\n"
    )
    (shared / "zero.yaml").write_text("zero_optimization: {stage: 3}\n")
    file, to = examples / "a.yaml", tmp_path / "run.toml"
    file.write_text(
        "defaults: [../config/envs@_here_, ../config/zero@deepspeed_zero3, ../../secret@_here_, _self_]\nexp_name: x\nsteps: 9\n"
        "rollout_batch_size: 8\nadv_estimator: step_reinforce\nreward_normalization: {grouping: batch, method: mean_std}\n"
        "train_env_manager: {group_size: 1, tags: [GuessTheNumber], generating_args: {max_new_tokens: 64, top_p: 1.0}}\n"
        "custom_envs: {GuessTheNumber: '${game.GuessTheNumber}'}\n"
        "actor_train: {strategy_args: {strategy_name: deepspeed_train, strategy_config: '${deepspeed_zero3}'}}\n"
    )
    assert run(["config", "import", str(file), "--to", str(to), "--json", "--from", "roll"]) == 1
    report = json.loads(capsys.readouterr().out)
    done, asked = (
        report["settings"],
        {line["key"]: line["value"] for line in report["keys"] if line["kind"] in ("decide", "unknown")},
    )
    game = "environment.define.GuessTheNumber"
    assert {key: done[key] for key in done if key.startswith(game)} == {
        f"{game}.type": "gem", f"{game}.options.id": "game:GuessTheNumber-v0", f"{game}.options.make.max_number": 20, f"{game}.max_turns": 9,
    }  # fmt: skip
    assert (done["rollout.group_size"], done["algorithm.turn_baseline"], done["trainer.zero_stage"]) == (1, "batch", 3)
    assert (done["run.seed"], done["rollout.max_new_tokens"]) == (42, 64)
    assert asked["defaults"] == ["../../secret@_here_"]
    assert not [key for key in asked if key.startswith(("game.", "deepspeed_zero3", "unused", "limit", "steps"))]
