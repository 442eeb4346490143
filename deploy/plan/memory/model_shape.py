"""Read the shape of a language model from its config.json, and define how it is trained, as far as memory depends on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from penstock.protocol.files import json_value, read_regular
from penstock.protocol.token_annotations import routers_of
from penstock.trainer.errors import NotEstimated

FLOAT32 = 4
BFLOAT16 = 2
Sizes = Mapping[str, int]
_MAX_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class Family:
    """What the layers of a family have, besides grouped-query attention and a gated MLP, that changes memory."""

    query_norms: Literal["none", "head", "width"] = "none"  # their weight is of a head's size, or for all heads
    norms: int = 2  # of a layer's width
    ties: bool = False  # embedding and output head, where config.json does not say
    fused: tuple[Literal["qkv_proj", "gate_up_proj"], ...] = ()  # they stand for q, k and v, or for gate and up


FAMILIES = {  # by model_type in config.json; measured, see benchmarks/trainer_memory.md
    **dict.fromkeys(("granite", "llama", "mistral", "qwen2", "seed_oss"), Family()),
    "smollm3": Family(ties=True),
    **dict.fromkeys(("qwen3", "qwen3_moe"), Family(query_norms="head")),
    "olmo2": Family(query_norms="width"),
    "phi3": Family(fused=("qkv_proj", "gate_up_proj")),
    "glm4": Family(norms=4, fused=("gate_up_proj",)),
}


@dataclass(frozen=True, slots=True)
class Needs:
    device: Sizes = field(default_factory=dict)  # the one that trains
    host: Sizes = field(default_factory=dict)
    cpu: Sizes = field(default_factory=dict)  # only where the CPU trains, whose memory is that of device and host too


@dataclass(frozen=True, slots=True)
class Method:
    """How a network is trained, as far as it changes memory."""

    dtype: Literal["float32", "bfloat16"]
    zero_stage: int
    num_ranks: int = 1
    sequence_parallel: int = 1  # ranks that share the tokens of a micro-batch
    tensor_parallel: int = 1  # ranks that share the weights
    checkpointing: bool = False
    activation_offload: bool = False  # of what checkpointing keeps
    gradient_dtype: Literal["float32", "as-trained"] = "float32"  # of sums
    offload: Literal["none", "optimizer", "parameters"] = "none"
    overlap_comm: bool = False  # with a second bucket
    reduce_bucket_size: int = 500_000_000  # elements
    max_live_parameters: int = 1_000_000_000
    hpz_partition_size: int = 1
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    max_logits: int | None = None  # of a chunk of the output head; None: the smallest that the trainer chooses
    dense_attention: bool = False  # by its definition, with matrices [H, T, T]
    with_entropy: bool = False  # of every distribution, in the loss, or the KL from a teacher over its likeliest tokens
    by_gradient: bool = False  # of each trajectory by itself, before the step, in an estimator of advantages

    @property
    def zero_ranks(self) -> int:
        """Ranks with the same part of the weights, over which ZeRO shards."""
        return self.num_ranks // self.tensor_parallel

    @property
    def width(self) -> int:
        return FLOAT32 if self.dtype == "float32" else BFLOAT16

    @property
    def gradient_width(self) -> int:
        """Bytes of a gradient that is summed over micro-batches and ranks."""
        return FLOAT32 if self.gradient_dtype == "float32" else self.width

    @property
    def sums_apart(self) -> bool:
        return self.gradient_width > self.width

    @property
    def is_read_in_parts(self) -> bool:
        """True if parameters are divided while they are read; ranks that share weights read all of them."""
        return self.zero_stage == 3 and self.tensor_parallel == 1

    def shares(self, stage: int) -> int:
        return self.zero_ranks if self.zero_stage >= stage else 1


@dataclass(frozen=True, slots=True)
class ExpertShape:
    layers: int
    experts: int  # of a layer
    top_k: int  # that compute one token
    intermediate: int  # of one expert

    def weights(self, hidden: int, experts: int) -> int:
        return self.experts * hidden + experts * 3 * hidden * self.intermediate


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP or experts, as the families of `FAMILIES` are built."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool  # embedding and output head are one tensor
    has_biases: bool = False  # of queries, keys and values
    mixture: ExpertShape | None = None  # None: every layer has a gated MLP
    window: int | None = None  # tokens that a token attends to in some layers; None: all before it in each
    windowed_layers: int = 0

    @property
    def config(self) -> Mapping[str, Any]:
        return {
            "model_type": self.family,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
        }

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def traits(self) -> Family:
        return FAMILIES[self.family]

    @property
    def table(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        outputs = {
            "qkv_proj": {"q_proj": self.query, "k_proj": self.key_value, "v_proj": self.key_value},
            "gate_up_proj": {"gate_proj": self.intermediate, "up_proj": self.intermediate},
        }
        found = {"o_proj": (self.query, self.hidden), "down_proj": (self.intermediate, self.hidden)}
        for fused, parts in outputs.items():
            sizes = {fused: sum(parts.values())} if fused in self.traits.fused else parts
            found |= {name: (self.hidden, size) for name, size in sizes.items()}
        return found

    @property
    def block(self) -> int:
        weights = sum(inputs * outputs for inputs, outputs in self.linears.values())
        biases = self.query + 2 * self.key_value if self.has_biases else 0
        of_queries = {"none": 0, "head": 2 * self.head_dim, "width": self.query + self.key_value}
        norms = self.traits.norms * self.hidden + of_queries[self.traits.query_norms]
        return weights + biases + norms

    @property
    def body(self) -> int:
        return self.layers * self.block + self._beside_blocks(self.mixture.experts if self.mixture else 0)

    @property
    def active_body(self) -> int:
        """Those that one token is computed with: of a layer's experts, ``top_k``."""
        return self.layers * self.block + self._beside_blocks(self.mixture.top_k if self.mixture else 0)

    def _beside_blocks(self, experts: int) -> int:
        if self.mixture is None:
            return self.hidden
        more = self.mixture.weights(self.hidden, experts) - 3 * self.hidden * self.intermediate
        return self.hidden + self.mixture.layers * more

    @property
    def parameters(self) -> int:
        return self.body + self.table * (1 if self.tied else 2)

    def of_rank(self, tensor_parallel: int) -> ModelShape:
        """Return what one of the ranks has that share the weights: a part of each linear layer, and embedding, head and norms whole."""
        ranks = tensor_parallel
        return replace(
            self, heads=self.heads // ranks, kv_heads=self.kv_heads // ranks, intermediate=self.intermediate // ranks
        )

    def adapted(self, targets: Collection[str]) -> Collection[tuple[int, int]]:
        """Return the sizes of the linear layers of a block that get adapters; ``targets`` are endings of names, none: all."""
        ends = {target.rpartition(".")[2] for target in targets}
        if self.mixture is not None and not ends:
            ends = {"q_proj", "k_proj", "v_proj", "o_proj"}
        return [sizes for name, sizes in self.linears.items() if not ends or name in ends]

    def adapter(self, rank: int, targets: Collection[str]) -> int:
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.adapted(targets))


def read_shape(folder: Path, key: str) -> ModelShape:
    """Read the shape of the model in a folder, which the setting ``key`` names.

    Raises NotEstimated if it has no readable config.json here, or if its layers are not of a family whose memory was measured.
    """
    file = folder / "config.json"
    try:
        if len(data := read_regular(file, _MAX_BYTES + 1, follow=True)) > _MAX_BYTES:
            raise NotEstimated(f"{file} has more than {_MAX_BYTES} bytes; restore the file of the model")
        config = json_value(data)
    except OSError as err:
        raise NotEstimated(
            f"{key} = {folder}: no config.json could be read ({err.strerror}); set it to the folder of a downloaded model"
        ) from None
    except ValueError as err:
        raise NotEstimated(f"{file} is not JSON ({err}); restore the file of the model") from None
    return shape_of(config, str(file))


def shape_of(config: Mapping[str, Any], where: str) -> ModelShape:
    """Return the shape that a config.json describes; raises NotEstimated, which names ``where``."""
    family = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(family, str) or family not in FAMILIES:
        raise NotEstimated(
            f"{where}: model_type = {family}: memory is estimated for {', '.join(FAMILIES)}; "
            "for another model, start the training with few steps and look at the memory of its process"
        )
    heads = _count(config, "num_attention_heads", where)
    hidden = _count(config, "hidden_size", where)
    return ModelShape(
        family=str(family),
        layers=_count(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", where) if config.get("num_key_value_heads") else heads,
        head_dim=_count(config, "head_dim", where) if config.get("head_dim") else hidden // heads,
        intermediate=_count(config, "intermediate_size", where),
        vocabulary=_count(config, "vocab_size", where),
        tied=bool(config.get("tie_word_embeddings", FAMILIES[family].ties)),
        has_biases=family == "qwen2" or bool(config.get("attention_bias", False)),
        mixture=_mixture(config, where) if family == "qwen3_moe" else None,
        **_windows(config, where),
    )


def _windows(config: Mapping[str, Any], where: str) -> dict[str, int]:
    if config.get("model_type") == "llama" or not config.get("use_sliding_window") or not config.get("sliding_window"):
        return {}
    layers = _count(config, "num_hidden_layers", where)
    if isinstance(kinds := config.get("layer_types"), list):
        windowed = kinds.count("sliding_attention")
    else:  # as older releases of transformers write it
        windowed = layers - (0 if config.get("max_window_layers") == 0 else _count(config, "max_window_layers", where))
    return {"window": _count(config, "sliding_window", where), "windowed_layers": max(0, windowed)}


def _mixture(config: Mapping[str, Any], where: str) -> ExpertShape | None:
    try:
        routers = routers_of(config)
    except ValueError as err:
        raise NotEstimated(f"{where}: {err}; restore the file of the model") from None
    if routers is None:
        return None
    intermediate = _count(config, "moe_intermediate_size", where)
    return ExpertShape(len(routers.layers), routers.num_experts, routers.top_k, intermediate)


def _count(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**9:
        raise NotEstimated(f"{where}: {key} = {value!r}: expected a positive number; restore the file of the model")
    return value
