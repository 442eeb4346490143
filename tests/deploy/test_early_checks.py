"""What is certain to fail is refused before a process is started, with the fix."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.deploy.early_checks import (
    check_engine,
    check_engine_is_installed,
    check_inputs,
    check_metrics_ports,
    check_reward_files,
    missing_rewards,
)
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.record import run_folder
from penstock.rollout_service.embedded_engine.errors import UnsupportedModel
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.commands import train
from penstock.trainer.settings import TrainerSettings


def model_folder(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, **config})
    )
    save_file({"model.embed_tokens.weight": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
    return folder


def settings(tmp_path: Path, model: Path, **data: str) -> TrainerSettings:
    (tmp_path / "rows.jsonl").touch()
    return TrainerSettings.model_validate(
        {
            "run": {"id": "r", "dir": tmp_path},
            "model": {"path": model},
            "data": {"train": str(tmp_path / "rows.jsonl"), **data},
        }
    )


def changed(given: TrainerSettings, section: str, **values: object) -> TrainerSettings:
    return given.model_copy(update={section: getattr(given, section).model_copy(update=values)})


def engine(name: str, *flags: str) -> RolloutSettings:
    return RolloutSettings.model_validate({"worker": {"engine": name}, "sglang": {"extra_args": flags}})


def test_files_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    """Model folder, training data and held-out data, each by its setting."""
    model = model_folder(tmp_path / "model")
    check_inputs(settings(tmp_path, model))
    with pytest.raises(ConfigError, match=r"model\.path = .*none: there is no such folder"):
        check_inputs(settings(tmp_path, tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"data\.eval: there is no file nowhere\.jsonl"):
        check_inputs(settings(tmp_path, model, eval="nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"reward\.name = 'overlong': this built-in reward needs parameters"):
        check_inputs(changed(settings(tmp_path, model), "reward", name="overlong"))


def test_an_engine_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    """Before a worker starts and fails six times; the embedded engine is always there."""
    check_engine_is_installed([], {})
    with pytest.raises(
        ConfigError, match=r"worker\.engine = 'vllm', and .* has no vllm; install vllm into an environment"
    ):
        check_engine_is_installed(["worker.engine=vllm"], {})


def test_completions_as_long_as_the_context_are_refused(tmp_path: Path) -> None:
    """The default of 256 new tokens does not fit a model of 128; one that says nothing, or has one more, is taken."""
    given = settings(tmp_path, model_folder(tmp_path / "small", max_position_embeddings=128))
    with pytest.raises(
        ConfigError, match=r"rollout\.max_new_tokens = 256 leaves no room .* 128 tokens .* less than 128"
    ):
        check_inputs(given)
    check_inputs(changed(given, "rollout", max_new_tokens=127))
    check_inputs(settings(tmp_path, model_folder(tmp_path / "silent")))
    with pytest.raises(ConfigError, match="of 256 tokens"):
        check_inputs(settings(tmp_path, model_folder(tmp_path / "equal", max_position_embeddings=256)))


def test_a_model_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    size = weights.stat().st_size
    with pytest.raises(
        PenstockError, match=f"model.safetensors: {size} bytes, its header says {size + 10}: it is cut off"
    ):
        check_inputs(settings(tmp_path, model))
    weights.write_bytes(b"<html>")
    with pytest.raises(PenstockError, match=r"model\.safetensors: not a safetensors file"):
        check_inputs(settings(tmp_path, model))


def test_a_run_is_not_resumed_with_another_model(tmp_path: Path) -> None:
    """A checkpoint fits one shape; a copy of the model is the same model, and a run without a checkpoint is free."""
    first, copy = model_folder(tmp_path / "first"), model_folder(tmp_path / "copy")
    larger = model_folder(tmp_path / "larger", hidden_size=128)
    run = tmp_path / "r"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"settings": {"model": {"path": str(first)}}}))
    check_inputs(settings(tmp_path, larger))
    (run / "checkpoints" / "step00000002").mkdir(parents=True)
    check_inputs(settings(tmp_path, copy))
    with pytest.raises(
        ConfigError,
        match=r"run r has checkpoints of the model .*first \(hidden_size = 64\).*larger has hidden_size = 128",
    ):
        check_inputs(settings(tmp_path, larger))


def test_a_run_is_resumed_on_as_many_ranks_as_wrote_its_checkpoint(tmp_path: Path) -> None:
    """The newest checkpoint counts; the error names both numbers and two ways on."""
    one = settings(tmp_path, model_folder(tmp_path / "model"))
    for step, ranks in (("step00000002", 1), ("step00000004", 2)):
        folder = tmp_path / "r" / "checkpoints" / step
        folder.mkdir(parents=True)
        for rank in range(ranks):
            (folder / f"random_state_{rank}.bin").touch()
    (tmp_path / "r" / "checkpoints" / "step00000006.e1.partial").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"step00000004 was written by 2 rank\(s\), and trainer\.num_ranks = 1.*"
        r"Resume with trainer\.num_ranks=2 until its next checkpoint, or .*penstock weights export r ",
    ):
        check_inputs(one)
    with pytest.raises(ConfigError, match="step00000004 was written by 2 rank"):  # without `penstock train`
        train.main([f"model.path={one.model.path}", f"run.dir={tmp_path}", "run.id=r"])
    check_inputs(changed(one, "trainer", num_ranks=2))


def test_a_model_that_the_engine_does_not_serve_is_refused(tmp_path: Path) -> None:
    trainer = settings(tmp_path, model_folder(tmp_path / "gpt2", architectures=["GPT2LMHeadModel"]))
    with pytest.raises(UnsupportedModel, match="architecture GPT2LMHeadModel is not served by the embedded engine"):
        check_engine(trainer, RolloutSettings())
    check_engine(trainer, engine("sglang"))


def test_redundant_completions_need_an_engine_that_ends_single_ones(tmp_path: Path) -> None:
    """SGLang does, vLLM has no route for it, and of an engine of one's own only its client can tell."""
    trainer = changed(settings(tmp_path, model_folder(tmp_path / "m")), "rollout", redundant_completions=2)
    with pytest.raises(ConfigError, match=r"redundant_completions = 2 with worker\.engine = 'vllm', which cannot end"):
        check_engine(trainer, engine("vllm"))
    check_engine(trainer, engine("sglang"))


def test_router_replay_needs_routers_and_an_engine_that_says_what_they_choose(tmp_path: Path) -> None:
    """Both are known from config.json and the run file, before a process is started."""
    mixture = model_folder(
        tmp_path / "moe", model_type="qwen3_moe", num_hidden_layers=2, num_experts=4, num_experts_per_tok=2
    )

    def replaying(model: Path) -> TrainerSettings:
        return changed(settings(tmp_path, model), "trainer", router_replay=True)

    check_inputs(replaying(mixture))
    with pytest.raises(
        ConfigError, match=r"router_replay = true, and model\.path = .* is a qwen3 model without routers"
    ):
        check_inputs(replaying(model_folder(tmp_path / "dense", model_type="qwen3")))
    for name, words in (("vllm", "does not say which experts"), ("sglang", "add --enable-return-routed-experts to")):
        with pytest.raises(ConfigError, match=words):
            check_engine(replaying(mixture), engine(name))
    check_engine(replaying(mixture), engine("sglang", "--enable-return-routed-experts"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(a)\n", r"reward\.py:1: expected ':'"),
        ("x = 1\nreturn 2\n", r"reward\.py:2: 'return' outside function"),
        ("\0", "reward.py"),
    ],
)
def test_a_reward_file_with_a_syntax_error_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "reward.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        check_reward_files([file])
    file.write_text("raise SystemExit(3)")
    check_reward_files([file])


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"folder .*file/r cannot be written \(Not a directory\); .* set run\.dir"),
        run_folder.hold_lock(tmp_path / "file" / "r"),
    ):
        pass


@pytest.mark.parametrize(
    ("metrics", "num_workers", "refused"),
    [
        ({}, 3, ""),
        ({"rollout_port": 0, "trainer_port": 0}, 3, ""),
        ({"rollout_port": 9471, "trainer_port": 9470}, 1, ""),
        ({"rollout_port": 9471}, 2, "rollout_port = 9471 with 2 workers.*0 for any free one"),
        ({"rollout_port": 9470, "trainer_port": 9470}, 1, "both 9470"),
    ],
)
def test_ports_that_services_of_one_machine_would_share_are_refused(
    metrics: dict[str, int], num_workers: int, refused: str
) -> None:
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_metrics_ports(RolloutSettings.model_validate({"metrics": metrics}), num_workers)


def test_a_reward_that_nothing_offers_is_named_before_the_start(tmp_path: Path) -> None:
    """With what is served; built-in rewards, names of data sets, paths and compositions are known."""
    settings = TrainerSettings.model_validate({"model": {"path": tmp_path}, "reward": {"name": "compute_score"}})
    (line,) = missing_rewards(settings, [Path("own/my_reward.py")])
    assert "reward 'compute_score' is not built in and not served here: --serve offers my_reward" in line
    for name in ("exact_match", "openai/gsm8k", "my_reward.py:compute_score", "my_reward", "auto"):
        assert missing_rewards(changed(settings, "reward", name=name), [Path("own/my_reward.py")]) == []


def test_a_misspelt_reward_is_refused_before_the_start(tmp_path: Path) -> None:
    """Not in a run file of the Python client or the Runs API, whose function may have any name and registers itself."""
    document = {"model": {"path": tmp_path}, "reward": {"name": "exact_mach"}, "run": {"id": "r", "dir": tmp_path}}
    settings = TrainerSettings.model_validate(document)
    with pytest.raises(ConfigError, match=r"no reward is named exact_mach; did you mean exact_match\?"):
        missing_rewards(settings, [])
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.toml").touch()
    assert len(missing_rewards(settings, [])) == 1
