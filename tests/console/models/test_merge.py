"""Model folders are merged tensor by tensor, by the formulas of the papers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from penstock.console.registry.adapter_merge import merge_adapter
from penstock.console.registry.model_merge import (
    METHODS,
    Method,
    Recipe,
    dare,
    merge_folders,
    open_model,
    packed,
    parse_weights,
    slerp,
    ties,
)
from penstock.protocol.errors import ConfigError
from penstock.protocol.model_folder import INDEX

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
Tensors = dict[str, torch.Tensor]
LAYERS = ["q_proj", "v_proj", "down_proj"]
PATTERNS = {
    "rank_pattern": {"q_proj": 2, "^model.layers.1.mlp.down_proj": 7},
    "alpha_pattern": {"layers.0.self_attn.v_proj": 3},
}


def _tensors(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (4, 6), "b.weight": (7,), "c.bias": (1,)}
    found = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return {**found, "positions": torch.arange(5)}


def _folder(path: Path, tensors: Tensors) -> Path:
    path.mkdir()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, some in parts.items() for name in some}}
    (path / INDEX).write_text(json.dumps(index))
    (path / "config.json").write_text("{}")
    return path


def _loaded(folder: Path) -> Tensors:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_a_weighted_mean_is_that_of_torch_and_keeps_shards_dtype_and_files(tmp_path: Path) -> None:
    """bfloat16 is averaged in float32 and rounded once, as torch rounds it."""
    models = [_tensors(seed, torch.bfloat16) for seed in (1, 2, 3)]
    folders = [_folder(tmp_path / str(n), one) for n, one in enumerate(models)]
    assert merge_folders(folders, None, tmp_path / "out", Recipe("linear", (1.0, 2.0, 1.0))) == 4
    merged = _loaded(tmp_path / "out")
    for name in ("a.weight", "b.weight", "c.bias"):
        mean = sum(w * one[name].float() for w, one in zip((1.0, 2.0, 1.0), models, strict=True)) / 4
        assert isinstance(mean, torch.Tensor)
        assert torch.equal(merged[name], mean.to(torch.bfloat16)), name
    assert torch.equal(merged["positions"], torch.arange(5))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", INDEX, "merge.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "merge.json").read_text())["weights"] == [1.0, 2.0, 1.0]


@pytest.mark.parametrize("method", METHODS)
def test_models_that_are_equal_stay_what_they_are(method: Method, tmp_path: Path) -> None:
    folders = [_folder(tmp_path / name, _tensors(1)) for name in ("x", "y", "base")]
    base = None if method in ("linear", "slerp") else folders[2]
    merge_folders(folders[:2], base, tmp_path / "out", Recipe(method, (1.0, 1.0)))
    for name, tensor in _tensors(1).items():
        torch.testing.assert_close(_loaded(tmp_path / "out")[name], tensor)


def test_task_arithmetic_adds_changes_to_the_base(tmp_path: Path) -> None:
    one, two, base = (_folder(tmp_path / str(n), _tensors(n)) for n in (1, 2, 3))
    merge_folders([one, two], base, tmp_path / "out", Recipe("task_arithmetic", (1.0, -0.5), scale=0.25))
    x, y, b = (_tensors(n)["a.weight"] for n in (1, 2, 3))
    torch.testing.assert_close(_loaded(tmp_path / "out")["a.weight"], b + 0.25 * ((x - b) - 0.5 * (y - b)))


def test_slerp_stays_on_the_arc() -> None:
    """Half way between two perpendicular vectors; on the line between parallel ones; at its ends the models."""
    x, y = np.array([1.0, 0.0], np.float32), np.array([0.0, 1.0], np.float32)
    np.testing.assert_allclose(slerp(x, y, 0.5), [2**-0.5, 2**-0.5], rtol=1e-6)
    np.testing.assert_allclose(slerp(x, 3 * x, 0.5), [2.0, 0.0])
    np.testing.assert_allclose(slerp(x, y, 0.0), x)
    np.testing.assert_allclose(slerp(x, 0 * y, 0.25), [0.75, 0.0])


def test_ties_trims_elects_and_averages() -> None:
    """The smaller half is dropped, the heavier sign wins, and only those that have it are averaged."""
    one, two = np.array([4.0, 0.1, -3.0, 0.2], np.float32), np.array([2.0, 0.1, 5.0, -0.3], np.float32)
    np.testing.assert_allclose(ties([one, two], [1.0, 1.0], 0.5), [3.0, 0.0, 5.0, 0.0])
    np.testing.assert_allclose(ties([one, two], [3.0, 1.0], 0.5), [3.5, 0.0, -3.0, 0.0])


def test_dare_keeps_the_expected_change_and_is_repeatable() -> None:
    """A tenth is kept, ten times as large; the seed decides which."""
    change = np.ones(100_000, np.float32)
    kept = dare(change, 0.1, "0 0 a")
    assert set(np.unique(kept)) == {np.float32(0), np.float32(10)}
    assert abs(float(kept.mean()) - 1.0) < 0.05
    assert np.array_equal(kept, dare(change, 0.1, "0 0 a"))
    assert not np.array_equal(kept, dare(change, 0.1, "0 1 a"))


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    """Nearest, ties to even, with NaN, infinities, zeros and subnormal numbers."""
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)])
    ours = np.frombuffer(packed(values, "BF16"), "<u2")
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan], theirs[~nan])
    assert np.isnan((ours[nan].astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize(
    ("recipe", "has_base", "message"),
    [
        (Recipe("linear", (1.0,)), False, "at least two models"),
        (Recipe("slerp", (1.0, 1.0, 1.0)), False, "slerp merges two models, got 3"),
        (Recipe("ties", (1.0, 1.0)), False, "name it with --base"),
        (Recipe("linear", (1.0, 1.0)), True, "leave out --base"),
        (Recipe("dare", (1.0, 1.0), density=0.0), True, "density 0 must be above 0"),
        (Recipe("linear", (1.0, -1.0)), False, "add up to 0"),
    ],
)
def test_what_a_method_cannot_do_is_refused(recipe: Recipe, has_base: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.check(has_base=has_base)


def test_models_of_different_shape_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    """The tensor is named; a damaged file, a missing shard and whole numbers that differ are refused too."""
    first = _folder(tmp_path / "first", _tensors(1))
    other = _tensors(2)
    cases = {
        "shape": ({**other, "a.weight": torch.zeros(6, 4)}, r"a.weight is F32 \[4, 6\] .* F32 \[6, 4\]"),
        "names": ({**other, "d.weight": torch.zeros(1)}, "d.weight is only in .*names"),
        "whole": ({**other, "positions": torch.arange(1, 6)}, "positions has whole numbers that differ"),
        "nan": ({**other, "b.weight": torch.full((7,), float("nan"))}, "b.weight .* not finite"),
    }
    for name, (tensors, message) in cases.items():
        with pytest.raises(ConfigError, match=message):
            merge_folders(
                [first, _folder(tmp_path / name, tensors)], None, tmp_path / "out", Recipe("linear", (1.0, 1.0))
            )
    torn = next((tmp_path / "names").glob("model-00001*"))
    torn.write_bytes(torn.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="is no whole safetensors file"):
        open_model(tmp_path / "names")
    torn.unlink()
    with pytest.raises(ConfigError, match=r"model-00001-of-00002\.safetensors is not in the folder"):
        open_model(tmp_path / "names")
    with pytest.raises(ConfigError, match="exists; name another folder"):
        merge_folders([first, first], None, first, Recipe("linear", (1.0, 1.0)))
    assert not list(tmp_path.glob("out*"))


def test_a_weight_for_each_model() -> None:
    assert parse_weights(None, 3) == (1.0, 1.0, 1.0)
    assert parse_weights("0.3,0.7", 2) == (0.3, 0.7)
    for wrong in ("0.3", "a,b", "1,nan"):
        with pytest.raises(ConfigError, match="--weights"):
            parse_weights(wrong, 2)


def _header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model.safetensors": (2**40).to_bytes(8, "little") + bytes(8)}, "its header of 1099511627776"),
        ({"model.safetensors": _header([[], {}] * 2**20)}, "may take"),
        ({"model.safetensors": _header({"a": {"dtype": "F8", "shape": [1], "data_offsets": [0, 1]}})}, "dtype F8"),
        ({"model.safetensors": _header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}})}, "cut off"),
        ({"model.safetensors": _header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}})}, "no dtype, shape and offsets"),
        ({"model.safetensors": _header({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}})}, "no dtype, shape and offsets"),
        ({"model.safetensors": _header([1])}, "no whole safetensors file"),
        ({INDEX: b"[]"}, "expected a JSON object"),
        ({}, "no model.safetensors"),
    ],
)  # fmt: skip
def test_a_hostile_file_of_tensors_is_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        open_model(tmp_path)


def test_a_tensor_that_two_files_have_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "twice", _tensors(1))
    first, second = sorted(folder.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(ConfigError, match=r"tensor a\.weight is in model-00001.* and in model-00002"):
        open_model(folder)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of two layers by name: with biases, with a head of its own or a tied one, and with transposed weights."""
    root, sizes = tmp_path_factory.mktemp("bases"), {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}
    llama = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, **heads}
    gpt2 = GPT2Config(n_embd=128, n_layer=2, n_head=2, n_positions=64, tie_word_embeddings=False, **sizes)
    configs = {tied: LlamaConfig(**sizes, **llama, tie_word_embeddings=tied == "tied") for tied in ("untied", "tied")}
    for name, config in {**configs, "gpt2": gpt2}.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return {name: root / name for name in ("untied", "tied", "gpt2")}


@pytest.mark.parametrize(
    ("base", "options", "refused"),
    [
        ("untied", {}, ""),
        ("untied", {"use_rslora": True, "r": 8}, ""),
        ("untied", {"use_dora": True}, ""),
        ("tied", {"use_dora": True, "use_rslora": True, "target_modules": "all-linear"}, ""),
        ("untied", {**PATTERNS, "use_rslora": True}, ""),
        ("untied", {"layers_to_transform": [1]}, ""),
        ("untied", {"exclude_modules": ["model.layers.0.mlp.down_proj"]}, ""),
        ("untied", {"target_modules": r".*\.(q|v)_proj"}, ""),
        ("untied", {"bias": "all"}, ""),
        ("untied", {"bias": "lora_only"}, ""),
        ("untied", {"modules_to_save": ["lm_head", "embed_tokens"]}, ""),
        ("untied", {"target_modules": ["lm_head", "embed_tokens", "q_proj"]}, ""),
        ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}, ""),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}, ""),
        ("tied", {"modules_to_save": ["lm_head"]}, "lm_head, which is embedding and head at once"),
        ("tied", {"modules_to_save": ["embed_tokens"]}, "embed_tokens, which is embedding and head at once"),
        ("tied", {"target_modules": ["lm_head", "q_proj"]}, "lm_head, which is embedding and head at once"),
        ("untied", {"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ("untied", {"lora_bias": True}, "lora_bias = 'True'"),
        ("untied", {"trainable_token_indices": [3]}, "trainable_token_indices"),
        ("untied", {"rank_pattern": {"(q|v)_proj": 2}}, r"rank_pattern has '\(q\|v\)_proj'"),
    ],
)  # fmt: skip
def test_an_adapter_of_peft_is_merged_exactly_or_refused_by_name(
    bases: dict[str, Path], tmp_path: Path, base: str, options: dict[str, Any], refused: str
) -> None:
    """The merged model's logits are those of peft's, which differ from the base's by much more."""
    torch.manual_seed(1)
    config = LoraConfig(**{"r": 4, "lora_alpha": 9, "target_modules": LAYERS, "task_type": "CAUSAL_LM", **options})
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(bases[base]), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    adapted.save_pretrained(tmp_path / "adapter")
    if refused:
        with pytest.raises(ConfigError, match=refused):
            merge_adapter(bases[base], tmp_path / "adapter", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    merge_adapter(bases[base], tmp_path / "adapter", tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(bases[base])
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        before, merged = (
            model(ids).logits for model in (plain, AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
        )
        expected = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))(ids).logits
    torch.testing.assert_close(merged, expected, rtol=0, atol=5e-6)
    assert float((expected - before).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("damage", "refused"),
    [
        ({"v_proj.lora_A": None}, "model.layers.0.self_attn.v_proj: expected the tensors"),
        ({"layers.1.mlp.down_proj": None}, "no tensors for model.layers.1.mlp.down_proj.weight, which target_modules names"),
        ({"0.self_attn.q_proj.lora_B": torch.zeros(7, 4)}, r"B of model.layers.0.self_attn.q_proj has shape \(7, 4\), expected \(128, 4\)"),
        ({"0.self_attn.q_proj.lora_A": torch.full((4, 128), torch.nan)}, "q_proj.lora_A.weight has a value that is not finite"),
    ],
)  # fmt: skip
def test_a_damaged_adapter_is_refused_by_its_tensor(
    bases: dict[str, Path], tmp_path: Path, damage: dict[str, torch.Tensor | None], refused: str
) -> None:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(bases["untied"]), LoraConfig(r=4, target_modules=LAYERS)
    )
    model.save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    [(part, tensor)] = damage.items()
    kept = {name: tensor if part in name else value for name, value in load_file(file).items()}
    save_file({name: value for name, value in kept.items() if value is not None}, file)
    with pytest.raises(ConfigError, match=refused):
        merge_adapter(bases["untied"], tmp_path / "a", tmp_path / "out")
