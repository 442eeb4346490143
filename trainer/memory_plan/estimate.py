"""The memory of one rank in each phase of a step, by formula; pure.

All sizes are bytes. What a layer keeps for its backward pass was read from autograd's saved tensors (transformers 5.23, with
this trainer's attention over packed rows), what an optimizer step holds from DeepSpeed 0.19.8;
`benchmarks/trainer_memory.md` has the estimates beside measured peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.trainer.memory_plan.model_shape import ModelShape

FLOAT32 = 4
BFLOAT16 = 2
MAX_LOGITS = 32 * 1024 * 1024  # elements of logits in one chunk, as in `learner/logprobs.py`
REDUCE_BUCKET = 500_000_000  # elements, DeepSpeed's default
_MOST_GATHERED = 1_000_000_000  # parameters, DeepSpeed's default
_WITHOUT_ENTROPY, _WITH_ENTROPY = 3, 6  # tensors of the size of the logits
Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Method:
    """How a network is trained, as far as it changes memory."""

    dtype: Literal["float32", "bfloat16"]
    zero_stage: int
    num_ranks: int = 1
    checkpointing: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    with_entropy: bool = False  # of every distribution, in the loss

    @property
    def width(self) -> int:
        """Bytes of a parameter."""
        return FLOAT32 if self.dtype == "float32" else BFLOAT16

    def shares(self, stage: int) -> int:
        """Return over how many ranks something is split that ZeRO shards from this stage on."""
        return self.num_ranks if self.zero_stage >= stage else 1


@dataclass(frozen=True, slots=True)
class Pass:
    """The largest micro-batch of a rank, and how many it has in a step."""

    tokens: int  # computed; a shared prompt counts once
    predictors: int  # sampled tokens, whose log-probabilities are computed
    count: int = 1


@dataclass(frozen=True, slots=True)
class Network:
    """What training a network takes on one rank."""

    held: Sizes  # all the time
    phases: Mapping[str, Sizes]  # besides, at the largest moment of each phase


def network(shape: ModelShape, method: Method, largest: Pass) -> Network:
    """Return what a policy takes on one rank; ``largest`` is its largest micro-batch."""
    trained = _trained(shape, method)
    gradients = trained * method.width // method.shares(2)
    activations, one_layer = _activations(shape, method, largest.tokens)
    head = largest.tokens * shape.hidden * (FLOAT32 + method.width) + largest.predictors * shape.hidden * method.width
    held = {
        "parameters": (shape.parameters * method.width + _adapters(shape, method) * method.width) // method.shares(3),
        "optimizer states": 2 * FLOAT32 * trained // method.shares(1),
    }
    live: dict[str, int] = {}
    if method.zero_stage == 0:
        step = {"gradients": gradients, "temporary tensors": 2 * FLOAT32 * _largest_tensor(shape, method)}
    else:
        master = FLOAT32 * trained // method.shares(1)
        held["master weights"] = master
        step = {"gradients in float32": master, "temporary tensors": 2 * master}
    if method.zero_stage == 3:  # DeepSpeed keeps the buffers of gradients, and gathered parameters up to its limit
        held["gradients"] = gradients
        held["reduction bucket"] = min(trained, REDUCE_BUCKET) * method.width
        live["gathered parameters"] = min(shape.parameters, _MOST_GATHERED) * method.width
        gradients = 0
    # In a first micro-batch gradients appear as activations go; from the second on, all are there from the start.
    before = {"gradients": gradients if largest.count > 1 else 0, **live}
    logits = _logits(shape, method, largest)
    return Network(
        held=held,
        phases={
            "log-probabilities and loss": {**before, "activations": activations + head, "logits": logits},
            "backward": {**before, "activations": activations + head + one_layer},
            "end of the backward": {"gradients": gradients, **live, "activations": one_layer},
            "optimizer step": step,
        },
    )


def checkpoint_copy(shape: ModelShape, method: Method) -> int:
    """Return what a rank copies to host memory for a checkpoint: master weights and both moments of its part, in float32.

    At stage 0, where ranks take whole parameters in turn, at least the largest one.
    """
    trained = _trained(shape, method)
    part = trained // method.num_ranks
    if method.zero_stage == 0 and method.num_ranks > 1:
        part = max(part, _largest_tensor(shape, method))
    return 3 * FLOAT32 * part


def _trained(shape: ModelShape, method: Method) -> int:
    return _adapters(shape, method) if method.lora_rank else shape.parameters


def _adapters(shape: ModelShape, method: Method) -> int:
    return shape.adapter(method.lora_rank, method.lora_targets)


def _largest_tensor(shape: ModelShape, method: Method) -> int:
    if not method.lora_rank:
        return max(shape.table, *(inputs * outputs for inputs, outputs in shape.linears.values()))
    return method.lora_rank * max(max(sizes) for sizes in shape.adapted(method.lora_targets))


def _activations(shape: ModelShape, method: Method, tokens: int) -> tuple[int, int]:
    """Return what the forward pass keeps of all layers, and what the backward pass of one layer adds."""
    kept, h, m = tokens * _kept_of_token(shape, method), shape.hidden, shape.intermediate
    temporary = tokens * method.width * max(3 * m, 2 * shape.query + 2 * h)
    if method.checkpointing:
        return shape.layers * tokens * h * method.width, kept + temporary
    return shape.layers * kept, temporary


def _kept_of_token(shape: ModelShape, method: Method) -> int:
    """Return what one layer keeps of one token for its backward pass."""
    b, trains_norms = method.width, not method.lora_rank
    # A norm keeps its input in float32, and what its weight multiplies.
    normalised = FLOAT32 + (b if trains_norms else 0)
    of_heads = normalised if shape.has_head_norms else 0
    kept = 2 * shape.hidden * (normalised + b)  # two norms, and their outputs as inputs of linear layers
    kept += 4 * shape.intermediate * b  # gate, its activation, up, their product
    kept += (shape.query + shape.key_value) * (of_heads + 2 * b)  # rotated queries and keys, values, the output
    kept += FLOAT32 * (2 + shape.heads)  # scales of the norms, log-sum-exp of attention
    if shape.has_head_norms:
        kept += FLOAT32 * (shape.heads + shape.kv_heads)
    return kept + len(shape.adapted(method.lora_targets)) * method.lora_rank * b


def _logits(shape: ModelShape, method: Method, largest: Pass) -> int:
    """Return the tensors as large as a chunk of logits, in float32: log-probabilities and gradients."""
    chunk = max(1, MAX_LOGITS // shape.vocabulary)
    tensors = _WITH_ENTROPY if method.with_entropy else _WITHOUT_ENTROPY
    logits = tensors * FLOAT32 * min(chunk, largest.predictors) * shape.vocabulary
    adds_up = largest.predictors > chunk and not method.lora_rank  # the head's gradient, over the chunks
    return logits + (shape.table * method.width if adds_up else 0)
