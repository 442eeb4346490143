"""Read a Hugging Face ``config.json`` into the numbers that the forward pass needs, or refuse it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.protocol import errors as protocol_errors
from penstock.protocol.model_folder import check_numbers, read_object
from penstock.protocol.token_annotations import routers_of
from penstock.rollout_service.embedded_engine.errors import UnsupportedModel

_MIXTURE = "Qwen3MoeForCausalLM"
_VISION = "Qwen2_5_VLForConditionalGeneration"
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", _MIXTURE, _VISION)
_WITH_QKV_BIAS = ("Qwen2ForCausalLM", _VISION)  # and with none behind the attention
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
# Of a vision_config: differ between copies of one model, or name the whole model in older files.
_NOT_BUILT_FROM = ("model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "context_tokens")  # fmt: skip
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base frequency and how it is stretched.

    ``linear`` divides every frequency by ``factor``. ``llama3`` keeps high frequencies, divides low
    ones by ``factor`` and interpolates between them (Llama 3.1 report, arXiv:2407.21783; same formula as transformers).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class Mixture:
    layers: tuple[int, ...]  # in rising order; all others have a dense MLP
    num_experts: int
    top_k: int  # experts that compute one token
    intermediate_size: int  # of one expert
    normalised: bool  # the gates of a token add up to 1


@dataclass(frozen=True, slots=True)
class Vision:
    image_token_id: int  # stands for one merged patch
    merge_size: int  # merged patches are squares of so many patches a side
    rope_axes: tuple[int, ...]  # [head_dim / 2]: which position of a token rotates it: 0 time, 1 height, 2 width
    tower: str  # ``vision_config`` as JSON, from which transformers builds the vision tower


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder; two checkpoints are interchangeable if and only if these are equal."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_tokens: int
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Rope
    mixture: Mixture | None = None  # None: every layer has a dense MLP
    vision: Vision | None = None  # None: text alone

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return self.mixture.layers if self.mixture is not None else ()

    @property
    def kv_floats_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_model_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json``; raises UnsupportedModel, also for a feature that would make results inexact."""
    whole = _read_json(folder / "config.json")
    try:
        config = _config_of(folder, whole)
        sizes = [getattr(config, name) for name in _SIZES]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"sizes {sizes}")
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise UnsupportedModel(
            f"{folder}/config.json is not as transformers writes it ({error!r:.300}); restore it"
        ) from None
    return config


def _config_of(folder: Path, whole: dict[str, Any]) -> ModelConfig:
    architecture = (whole.get("architectures") or ["(none named)"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModel(
            f"{folder}: architecture {architecture} is not served by the embedded engine; it serves "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}. Serve this model with SGLang instead (worker.engine=sglang-url)."
        )
    raw = _decoder_of(whole) if architecture == _VISION else whole
    _refuse_features(folder, raw)
    rope = _read_rope(folder, raw)
    missing = [name for name in _REQUIRED if name not in raw]
    if missing:
        raise UnsupportedModel(
            f"{folder}/config.json has no {', '.join(missing)}; add them, as transformers writes them"
        )
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    llama_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        context_tokens=raw.get("max_position_embeddings", 2048),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture in _WITH_QKV_BIAS or llama_bias,
        output_bias=architecture not in _WITH_QKV_BIAS and llama_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias", False)),
        qk_norm=architecture in ("Qwen3ForCausalLM", _MIXTURE),
        rope=rope,
        mixture=_read_mixture(folder, raw) if architecture == _MIXTURE else None,
        vision=_read_vision(folder, whole, raw, head_dim) if architecture == _VISION else None,
    )


def _decoder_of(whole: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of the config of a model with images; files of older releases have no part for it."""
    raw = dict(whole.get("text_config") or whole)
    raw["tie_word_embeddings"] = whole.get("tie_word_embeddings") or raw.get("tie_word_embeddings", False)
    return raw


def _read_vision(folder: Path, whole: dict[str, Any], decoder: dict[str, Any], head_dim: int) -> Vision:
    tower, token = whole.get("vision_config"), whole.get("image_token_id")
    if not isinstance(tower, dict) or not isinstance(token, int):
        raise UnsupportedModel(
            f"{folder}/config.json has no vision_config or no image_token_id, as transformers writes them"
        )
    rope = decoder.get("rope_parameters") or decoder.get("rope_scaling") or {}
    section = rope.get("mrope_section")
    if not isinstance(section, list) or len(section) != 3 or sum(section) != head_dim // 2:
        raise UnsupportedModel(
            f"{folder}/config.json: mrope_section = {section!r}, expected three numbers that add up to {head_dim // 2}, half of head_dim"
        )
    axes = tuple(axis for axis, num in enumerate(section) for _ in range(num))
    built_from = {name: value for name, value in tower.items() if name not in _NOT_BUILT_FROM}
    return Vision(token, tower.get("spatial_merge_size", 2), axes, json.dumps(built_from, sort_keys=True))


def _read_mixture(folder: Path, raw: dict[str, Any]) -> Mixture | None:
    try:
        routers = routers_of(raw)
    except ValueError as error:
        raise UnsupportedModel(f"{folder}/config.json: {error}") from None
    if routers is None:
        return None
    size = raw.get("moe_intermediate_size")
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModel(f"{folder}/config.json: moe_intermediate_size = {size!r}, expected a positive number")
    return Mixture(
        layers=routers.layers,
        num_experts=routers.num_experts,
        top_k=routers.top_k,
        intermediate_size=size,
        normalised=bool(raw.get("norm_topk_prob", False)),
    )


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a completion: those of generation_config.json, else those of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = _read_json(path).get("eos_token_id")
            if value is not None:
                ids = tuple(value) if isinstance(value, list) else (value,)
                if not all(type(token) is int and token >= 0 for token in ids):
                    raise UnsupportedModel(f"{path}: eos_token_id = {str(value)[:80]}: expected token ids; restore it")
                return ids
    return ()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UnsupportedModel(f"{path} does not exist; the model path must be a Hugging Face model folder")
    try:
        content = read_object(path)
        check_numbers(path, content)
    except protocol_errors.UnsupportedModel as error:
        raise UnsupportedModel(str(error)) from None
    return content


def _refuse_features(folder: Path, raw: dict[str, Any]) -> None:
    wrong = []
    if raw.get("hidden_act", "silu") != "silu":
        wrong.append(f"hidden_act={raw['hidden_act']} (silu is served)")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or []):
        wrong.append("sliding window attention")
    if raw.get("quantization_config"):
        wrong.append("quantised weights")
    partial = raw.get("partial_rotary_factor") or (raw.get("rope_parameters") or {}).get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        wrong.append(f"partial_rotary_factor={partial}")
    if wrong:
        raise UnsupportedModel(f"{folder}: the embedded engine does not compute {', '.join(wrong)}; use SGLang")


def _read_rope(folder: Path, raw: dict[str, Any]) -> Rope:
    # transformers 5 writes rope_parameters; older ones rope_theta and rope_scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "default" if kind == "mrope" else kind  # what older files call a default one with several positions
    if kind not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedModel(
            f"{folder}: rope type {kind!r} is not served by the embedded engine; it serves "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}. Serve this model with SGLang instead."
        )
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=float(scaling["factor"]))
    return Rope(
        theta=theta,
        kind=kind,
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_context_tokens=int(scaling["original_max_position_embeddings"]),
    )
