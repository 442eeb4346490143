"""What a model that reads images is not trained with is refused by name, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.errors import ConfigError, UnsupportedModel
from penstock.protocol.images.processor import read_processor
from penstock.trainer.learner.model_folder_check import check_environments, check_vision, refuse_vision
from penstock.trainer.settings import TrainerSettings

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "image_token_id": 7, "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}  # fmt: skip
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
}


def model_folder(folder: Path, config: dict[str, Any] | None = None, processor: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR if processor is None else processor))
    return folder


def settings(folder: Path, **sections: dict[str, Any]) -> TrainerSettings:
    base: dict[str, Any] = {"run": {"id": "r"}, "model": {"path": folder}, "data": {"train": "rows.jsonl"}}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return TrainerSettings.model_validate(base)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"trainer": {"tensor_parallel": 2, "num_ranks": 2}}, "trainer.tensor_parallel = 2"),
        ({"trainer": {"sequence_parallel": 2, "num_ranks": 2}}, "trainer.sequence_parallel = 2"),
        ({"algorithm": {"advantage": "gae"}}, "a critic, which algorithm.advantage = gae"),
        ({"model": {"lora": {"rank": 4}}}, "adapters, model.lora.rank = 4"),
        ({"algorithm": {"dpo_coefficient": 1.0}}, "pairs, algorithm.dpo_coefficient = 1.0"),
        ({"data": {"from_run": "other", "train": []}}, "groups of another run, data.from_run = other"),
        (
            {"teacher": {"url": "http://127.0.0.1:1"}, "algorithm": {"distill_coefficient": 1.0}},
            "the model of section .teacher.",
        ),
    ],
)
def test_what_is_not_exact_with_images_is_refused(tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    model = model_folder(tmp_path / "model")
    check_vision(settings(model))
    check_vision(settings(model, model={"train_vision_tower": True}))
    with pytest.raises(ConfigError, match=rf"reads images, and is not trained with .*{words}"):
        check_vision(settings(model, **sections))
    text = model_folder(tmp_path / "text", {"model_type": "qwen3"})
    check_vision(settings(text, **sections))


def test_a_setting_for_a_tower_that_is_not_there_is_refused(tmp_path: Path) -> None:
    text = model_folder(tmp_path / "text", {"model_type": "qwen3"})
    with pytest.raises(ConfigError, match=r"train_vision_tower = true, and .* reads text alone"):
        check_vision(settings(text, model={"train_vision_tower": True}))


def test_commands_that_read_text_refuse_such_a_model(tmp_path: Path) -> None:
    refuse_vision(settings(model_folder(tmp_path / "text", {"model_type": "qwen3"})), "sft")
    with pytest.raises(ConfigError, match="`penstock sft` reads text alone"):
        refuse_vision(settings(model_folder(tmp_path / "model")), "sft")


def test_environments_that_would_not_show_the_images_are_refused(tmp_path: Path) -> None:
    chosen = settings(model_folder(tmp_path / "model"), rollout={"environment": "tools"})
    check_environments(chosen, {None: 0})
    with pytest.raises(ConfigError, match=r"3 rows of data.train have images, and the environment tools .*use rollout"):
        check_environments(chosen, {None: 3})
    check_environments(settings(tmp_path / "model"), {None: 3})


def test_the_environment_of_each_data_set_is_asked_for_its_own_images(tmp_path: Path) -> None:
    """Images in one of them say nothing of another, whose rows are played elsewhere."""
    model = model_folder(tmp_path / "model")
    evaluated = {
        "eval": {"environment": "single_turn", "source": {"games": {"data": "games.jsonl", "environment": "tools"}}}
    }
    chosen = settings(model, data={"eval": "eval.jsonl"}, rollout={"environment": "tools"}, **evaluated)
    check_environments(chosen, {None: 0, "eval": 3, "games": 0})
    for counts, words in (
        ({None: 1, "eval": 0, "games": 0}, r"1 rows of data\.train .*use rollout\.environment = single_turn"),
        (
            {None: 0, "eval": 3, "games": 2},
            r"2 rows of eval\.source\.games\.data .*use eval\.source\.games\.environment = ",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            check_environments(chosen, counts)
    inherits = settings(model, data={"eval": "eval.jsonl"}, rollout={"environment": "tools"})
    with pytest.raises(
        ConfigError, match=r"2 rows of data\.eval .*environment tools .*use eval\.environment = single_turn"
    ):
        check_environments(inherits, {None: 0, "eval": 2})


@pytest.mark.parametrize(
    ("config", "processor", "words"),
    [
        ({"model_type": "llava"}, {}, "model_type 'llava' reads images, and only qwen2_5_vl"),
        ({"image_token_id": None}, {}, "image_token_id = None"),
        ({"vision_config": {"patch_size": 16}}, {}, "patch_size 14, vision_config of config.json has patch_size 16"),
        ({}, {"image_processor_type": "Other"}, "image_processor_type = 'Other'"),
        ({}, {"do_resize": False}, "do_resize = False"),
        ({}, {"resample": 2}, "resample = 2"),
        ({}, {"min_pixels": 100}, "min_pixels 100 and max_pixels 12845056"),
        ({}, {"max_pixels": 3135}, "min_pixels 3136 and max_pixels 3135"),
        ({}, {"image_mean": [0.5]}, r"image_mean = \[0\.5\] of its image processor, expected three numbers"),
        ({}, {"image_std": [0.5, 0, 0.5]}, "image_std = 0 of its image processor"),
        ({}, {"merge_size": "2"}, "merge_size = '2'"),
    ],
)
def test_a_processor_that_is_not_computed_here_is_refused(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any], words: str
) -> None:
    """Its pixel values, or the number of an image's tokens, would be others."""
    folder = model_folder(tmp_path / "model", CONFIG | config, PROCESSOR | processor)
    with pytest.raises(UnsupportedModel, match=words):
        read_processor(folder)


def test_a_processor_is_read_where_transformers_saves_it(tmp_path: Path) -> None:
    """In a file of its own, or as a part of the whole processor's; with its sizes in either form."""
    folder = model_folder(tmp_path / "model")
    one = read_processor(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"no preprocessor_config\.json"):
        read_processor(folder)
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": {"size": size}}))
    assert read_processor(folder) == one
    assert one is not None
    assert one.num_tokens(one.grid_of(1920, 1080)) == 2691  # as Qwen2.5-VL counts them
    assert read_processor(tmp_path / "nowhere") is None
