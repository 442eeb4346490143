"""Targets of adapters that would be in no version and no result are refused by every command that trains."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft.tuners.lora import Embedding
from tests.contracts.tiny_model import Adapter
from torch import nn

from penstock.console.registry.model_merge import open_model
from penstock.console.tools.chat import find_model
from penstock.deploy.early_checks import check_inputs
from penstock.deploy.evaluation.target import find
from penstock.fine_tuning.__main__ import fine_tune
from penstock.fine_tuning.sections import DPO, RM, SFT
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import AdapterConfig
from penstock.reward_model.commands import serve_model
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner import adapter
from penstock.trainer.learner.adapter import Lora
from penstock.trainer.learner.model_folder_check import check_adapters
from penstock.trainer.learner.step_metrics import StepMetrics
from penstock.trainer.learner.trainable import optimisation
from penstock.trainer.publishing.publication import Publication, UnchangedVersions
from penstock.trainer.settings import TrainerSettings

TIED, UNTIED, NESTED = (
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"text_config": {"tie_word_embeddings": True}},
)
ALL, TRAIN, TUNED = ("train", "sft", "dpo", "rm"), ("train",), ("sft", "dpo", "rm")


def chosen(folder: Path, config: dict[str, Any], *overrides: str) -> TrainerSettings:
    (folder / "config.json").write_text(json.dumps(config))
    return load(TrainerSettings, overrides=[f"model.path={folder}", "model.lora.rank=4", *overrides]).settings


@pytest.mark.parametrize(
    ("config", "overrides", "commands", "refused"),
    [
        (TIED, ['model.lora.targets=["lm_head"]'], ALL, "lm_head has the weight of the input embedding"),
        (TIED, ['model.lora.targets=["lm_head"]', "model.lora.publish=merged"], TRAIN, "lm_head has the weight"),
        (TIED, ['model.lora.targets=["q_proj", "model.lm_head"]'], ALL, "leave it out, or train the whole model"),
        (NESTED, ['model.lora.targets=["lm_head"]'], ALL, "tie_word_embeddings"),
        (TIED, ['model.lora.targets=["embed_tokens"]'], ALL, "embed_tokens is an embedding"),
        (UNTIED, ['model.lora.targets=["embed_tokens"]', "model.lora.publish=merged"], TRAIN, "embed_tokens is an emb"),
        (UNTIED, ['model.lora.targets=["wte", "lm_head"]'], ALL, "wte is an embedding"),
        (UNTIED, ['model.lora.targets=["lm_head"]'], TRAIN, 'set model.lora.publish = "merged"'),
        (UNTIED, ['model.lora.targets=["lm_head"]'], TUNED, ""),
        (UNTIED, ['model.lora.targets=["lm_head"]', "model.lora.publish=merged"], TRAIN, ""),
        ({}, ['model.lora.targets=["lm_head"]'], TUNED, ""),  # its family decides: the layers are asked
        (TIED, [], ALL, ""),
        (TIED, ['model.lora.targets=["q_proj", "v_proj", "o_proj"]'], ALL, ""),
        (TIED, ['model.lora.targets=["q_proj", "o_proj"]'], TRAIN, "q_proj without v_proj: SGLang fuses them"),
        (TIED, ['model.lora.targets=["self_attn.up_proj"]'], TRAIN, "up_proj without gate_proj"),
        (TIED, ['model.lora.targets=["layers.0.self_attn.o_proj"]'], TRAIN, "is one of them; name o_proj"),
        (TIED, ['model.lora.targets=["q_proj"]', "model.lora.publish=merged"], TRAIN, ""),
        (TIED, ['model.lora.targets=["layers.0.mlp.up_proj"]'], TUNED, ""),
    ],
)  # fmt: skip
def test_targets_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], overrides: list[str], commands: tuple[str, ...], refused: str
) -> None:
    """Advice names keys that the command reads: `model.lora.publish` is one of `penstock train` alone."""
    settings = chosen(tmp_path, config, *overrides)
    for command in commands:
        if not refused:
            check_adapters(settings, command)
            continue
        with pytest.raises(ConfigError, match=r"model\.lora\.targets = ") as caught:
            check_adapters(settings, command)
        assert refused in str(caught.value)
        assert command == "train" or "publish =" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        *(
            f"model.lora.targets={word}"
            for word in ('"all-linear"', '["all-linear"]', '["q_proj", "all"]', "all_linear")
        ),
        'actor_rollout_ref.model.target_modules=["all-linear"]',
    ],
)
def test_words_for_every_linear_layer_are_the_default(tmp_path: Path, override: str) -> None:
    """PEFT's, and those of others: the answer is to leave the key out, not to write a list."""
    with pytest.raises(ConfigError, match=r"leave model\.lora\.targets out: every linear layer but the head") as caught:
        chosen(tmp_path, UNTIED, override)
    assert len(str(caught.value).splitlines()) == 1


def outside(model_folder: Path, folder: Path, **config: Any) -> Adapter:
    one = Adapter.random(model_folder, folder, seed=1, targets=("q_proj", "v_proj"))
    one.config.update(config)
    return one


def test_an_adapter_of_peft_gives_its_own_settings(model_folder: Path, tmp_path: Path) -> None:
    """Rank-stabilised, its scale is alpha / sqrt(rank), also as published for engines that ignore the option."""
    outside(model_folder, tmp_path / "a", use_rslora=True, lora_alpha=6).write()
    settings = load(TrainerSettings, overrides=[f"model.path={model_folder}", f"model.lora.path={tmp_path}/a"]).settings
    lora = settings.model.lora
    assert (lora.rank, lora.alpha, lora.use_rslora, lora.targets) == (4, 6.0, True, ["q_proj", "v_proj"])
    chosen = optimisation(settings, settings.trainer, 1).lora
    assert chosen is not None
    model = Tiny(ties=False)
    adapter.attach(model, replace(chosen, targets=("proj",)))
    [(_, _, scale)] = adapter.factors(model).values()
    written = adapter.config(model)
    assert written is not None
    assert AdapterConfig.from_json(written.to_json()).scale == pytest.approx(scale) == 3.0
    check_adapters(settings, "train")


@pytest.mark.parametrize(
    ("config", "overrides", "refused"),
    [
        ({}, ["model.lora.rank=8"], r"model.lora.rank = 8, and the adapter .* has 4; leave model.lora.rank out"),
        ({}, ["model.lora.alpha=1"], "model.lora.alpha = 1.0, and the adapter .* has 8.0"),
        ({}, ['model.lora.targets=["q_proj"]'], r"has \['q_proj', 'v_proj'\].* penstock model merge BASE --adapter"),
        ({}, ["model.lora.use_rslora=true"], "has False"),
        *(({name: value}, [], f"{name} = .* penstock model merge BASE --adapter") for name, value in {
            "use_dora": True, "modules_to_save": ["lm_head"], "bias": "all", "fan_in_fan_out": True,
            "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}, "layers_to_transform": [0],
            "exclude_modules": ["x"], "init_lora_weights": "pissa", "lora_bias": True, "target_parameters": ["x"],
            "trainable_token_indices": [1], "of_a_later_release": 1,
        }.items()),
        ({"target_modules": ".*proj"}, [], "target_modules is '.*proj', expected 'all-linear'"),
        ({"peft_type": "IA3"}, [], "no.* LoRA adapter|not describe a LoRA adapter"),
        ({"r": True}, [], "r: Input should be a valid integer"),
    ],
)  # fmt: skip
def test_an_adapter_that_is_not_trained_further_exactly_is_refused(
    model_folder: Path, tmp_path: Path, config: dict[str, Any], overrides: list[str], refused: str
) -> None:
    outside(model_folder, tmp_path / "a", **config).write()
    with pytest.raises(ConfigError, match=refused):
        load(TrainerSettings, overrides=[f"model.path={model_folder}", f"model.lora.path={tmp_path}/a", *overrides])


def test_every_command_refuses_an_adapter_of_another_base_or_in_the_place_of_a_model(
    model_folder: Path, tmp_path: Path
) -> None:
    one = outside(model_folder, tmp_path / "a")
    name = next(iter(one.tensors))
    one.tensors[name] = one.tensors[name][:, 1:].contiguous()
    one.write()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    wrong_base, as_model = [f"model.path={model_folder}", f"model.lora.path={one.folder}"], [f"model.path={one.folder}"]
    for given, refused in (
        (wrong_base, f"{name} has shape .* expected .* name its base model"),
        (as_model, "model.path = .* is an adapter .* --adapter"),
    ):
        with pytest.raises(PenstockError, match=refused):
            check_inputs(load(TrainerSettings, overrides=given).settings)
        for command in (SFT, DPO, RM):
            with pytest.raises(PenstockError, match=refused):
                fine_tune(command, [*given, f"{command.section}.data={tmp_path}/rows.jsonl", f"run.dir={tmp_path}"])
    verbs = (
        lambda: find(str(one.folder), [], {}), lambda: find_model(tmp_path, str(one.folder)),
        lambda: open_model(one.folder), lambda: serve_model(one.folder),
    )  # fmt: skip
    for verb in verbs:
        with pytest.raises(PenstockError, match=r"is an adapter .* penstock model merge BASE --adapter"):
            verb()


def test_the_reference_is_the_policy_that_a_training_begins_with(model_folder: Path, tmp_path: Path) -> None:
    """Switching the adapter off would give another model: the reference is computed before the first step, or named."""
    path = outside(model_folder, tmp_path / "a").write().folder
    given = [f"model.path={model_folder}", f"model.lora.path={path}"]
    for command, override, is_refused in (
        ("dpo", "dpo.beta=0.1", False), ("dpo", 'dpo.reference="live"', True), ("dpo", 'dpo.loss="kto"', True),
        ("dpo", 'dpo.loss="simpo"', False), ("train", "algorithm.kl_coefficient=0.1", True),
        ("sft", "algorithm.kl_coefficient=0.1", False),
    ):  # fmt: skip
        settings = load(TrainerSettings, overrides=[*given, override]).settings
        with pytest.raises(ConfigError, match=r"without the adapter .* set ") if is_refused else nullcontext():
            check_adapters(settings, command)


def test_every_command_asks_before_it_loads_the_model(model_folder: Path, tmp_path: Path) -> None:
    given = [f"model.path={model_folder}", "model.lora.rank=4", 'model.lora.targets=["lm_head"]']
    with pytest.raises(ConfigError, match="lm_head has the weight"):
        check_inputs(load(TrainerSettings, overrides=given).settings)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    for command in (SFT, DPO, RM):
        with pytest.raises(ConfigError, match="lm_head has the weight"):
            fine_tune(command, [*given, f"{command.section}.data={tmp_path}/rows.jsonl", f"run.dir={tmp_path}"])


class Tiny(nn.Module):
    def __init__(self, *, ties: bool) -> None:
        super().__init__()
        self.embed, self.proj = nn.Embedding(6, 4), nn.Linear(4, 4, bias=False)
        self.conv, self.head = nn.Conv1d(4, 4, 1), nn.Linear(4, 6, bias=False)
        if ties:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("targets", "ties", "refused"),
    [
        (("proj",), True, ""),
        (("proj", "head"), False, ""),
        (("head",), True, "head has the weight of the input embedding"),
        (("proj", "head"), True, "head has the weight of the input embedding"),
        (("embed",), False, "embed is a layer of type Embedding"),
        (("conv",), False, "conv is a layer of type Conv1d"),
        (("proj", "q_porj"), False, "no layer of the model is called q_porj"),
    ],
)
def test_targets_are_refused_by_their_layers(targets: tuple[str, ...], ties: bool, refused: str) -> None:
    """Whatever their names are; a record of an earlier release is replayed with the layers that it had."""
    model = Tiny(ties=ties)
    adapter.attach(model, Lora(2, 4.0, targets=targets))
    if not refused:
        adapter.check_layers(model, targets)
        return
    with pytest.raises(UnsupportedModel, match=refused):
        adapter.check_layers(model, targets)
    assert isinstance(model.embed, Embedding) == (targets == ("embed",))


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("modules_to_save=['lm_head']", "train the whole model with model.lora.rank = 0"),
        ("use_dora=true", "not offered: engines serve no magnitudes"),
        ("dora=true", "not offered: engines serve no magnitudes"),
        ("rslora=true", "did you mean model.lora.use_rslora?"),
        ("trainable_token_indices=[1]", "embeddings have no adapters"),
        ("rank_pattern=1", "not offered"),
        ("init_lora_weights=pissa", "adapters start as zero"),
    ],
)
def test_forms_of_adapters_that_are_not_offered_are_refused_by_name(key: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(TrainerSettings, overrides=["model.path=m", "model.lora.rank=4", f"model.lora.{key}"])
    assert advice in str(caught.value)
    assert f"model.lora.{key.partition('=')[0]}" in str(caught.value)


@pytest.mark.parametrize(
    ("versions", "alarms"),
    [
        ([(1, True, True), (2, True, True), (3, True, True), (4, True, True)], [2]),
        ([(1, True, True), (2, False, True), (3, True, True)], []),
        ([(1, True, True), (2, True, False), (3, True, False)], []),  # steps without an update are no alarm
        ([(1, True, True), (2, True, False), (3, True, True)], [3]),
        ([(1, True, True), (2, True, True), (3, False, True), (4, True, True), (5, True, True)], [2, 5]),
    ],
)
def test_versions_that_equal_the_one_before_raise_an_alarm(
    versions: list[tuple[int, bool, bool]], alarms: list[int]
) -> None:
    """Once for each two in a row between which the optimizer made steps; ``versions``: number, unchanged, updated."""
    unchanged = UnchangedVersions()
    texts = {}
    for number, is_unchanged, is_updated in versions:
        if is_updated:
            unchanged.updated(PolicyVersion(number))
        unchanged.updated(PolicyVersion(number + 100))  # made, and not published yet
        publication = Publication(
            PolicyVersion(number), number, "patch", number - 1, 0.0, 1, 1, 0.0, 0.0, 0.0, is_unchanged
        )
        texts[number] = unchanged.published(publication)
    assert [number for number, text in texts.items() if text] == alarms
    assert all("although the optimizer made steps" in texts[number] for number in alarms)


def test_a_step_moves_weights_if_one_of_its_updates_is_made() -> None:
    for norm, lr, left_out, moved in (
        (1.0, 1.0, (), True), (1.0, 1.0, ("",), True), (1.0, 1.0, ("all_rejected", ""), True),
        (1.0, 1.0, ("outlier_step",), False), (0.0, 1.0, ("",), False), (0.0, 0.0, (), False),
    ):  # fmt: skip
        assert StepMetrics(0.0, norm, lr, {}, {}, left_out=left_out).moved_weights == moved
