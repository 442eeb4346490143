"""Estimate the memory of one rank in each phase of a step, by formula; pure.

All sizes are bytes, without padding for alignment. What a layer keeps for its backward pass was read from autograd's saved tensors
(transformers 5.23, with this trainer's attention over packed rows). What DeepSpeed 0.19.8 allocates for gradients and the optimizer
was read from `bf16_optimizer.py` (stage 1 with gradients of bfloat16 summed in float32, without offload), `zero/stage_1_and_2.py`
and `zero/stage3.py`. `benchmarks/trainer_memory.md` has the estimates beside measured peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.deploy.plan.memory.model_shape import FLOAT32, Method, ModelShape, Needs
from penstock.trainer.attention_choice import matrix_bytes

_ADAMW_TEMPORARY = 2  # tensors as large as what is stepped: the denominator, and its square root
MAX_LOGITS = 32 * 1024 * 1024  # elements in one chunk, as in `learner/output_head.py`; on a GPU more, of what is free
LOSS = "log-probabilities and loss"
_INT64 = 8
_WITHOUT_ENTROPY, _WITH_ENTROPY = 3, 6  # tensors of the size of the logits


@dataclass(frozen=True, slots=True)
class ZeroStates:
    held: Needs  # all the time
    later_passes: Needs = field(default_factory=Needs)  # besides, in the passes of every micro-batch but the first
    backward: Needs = field(default_factory=Needs)  # besides, at the end of a backward pass
    reduction: Needs = field(default_factory=Needs)  # besides, while ranks add up the gradients of a bucket
    step: Needs = field(default_factory=Needs)  # besides, in the optimizer step


def zero_states(trained: int, largest: int, method: Method, *, several: bool) -> ZeroStates:
    """Return the states of ``trained`` parameters, of which the largest has ``largest`` elements.

    ``several`` says whether a step has several micro-batches on a rank.
    """
    match method.zero_stage:
        case 0:
            gradients = {"gradients": trained * method.width}
            return ZeroStates(
                held=Needs({"optimizer states": 2 * FLOAT32 * trained}),
                later_passes=Needs(gradients),
                backward=Needs(gradients),
                reduction=Needs(gradients),
                step=Needs(gradients, cpu=_temporary(FLOAT32 * largest)),
            )
        case 3:
            return _of_stage_3(trained, method)
        case 1 if method.sums_apart and method.offload == "none":
            return _with_whole_sums(trained, method)
        case _:
            return _of_stages_1_and_2(trained, largest, method, several=several)


def _with_whole_sums(trained: int, method: Method) -> ZeroStates:
    """BF16_Optimizer: every rank holds the sums of all gradients, and a gradient is added as soon as it is there."""
    master = FLOAT32 * trained // method.zero_ranks
    return ZeroStates(Needs({**_optimizer(master), "gradients": FLOAT32 * trained}), step=Needs(cpu=_temporary(master)))


def _of_stages_1_and_2(trained: int, largest: int, method: Method, *, several: bool) -> ZeroStates:
    """Gradients move into a bucket, of which the reduction makes a copy, and the rank's share out of it."""
    is_offloaded = method.offload != "none"
    master, width = FLOAT32 * trained // method.zero_ranks, method.width
    bucket = min(trained, method.reduce_bucket_size)
    gradient_shard = method.gradient_width * trained // method.zero_ranks
    accumulated: Mapping[str, int] = {}  # on the host, where it is offloaded
    if method.zero_stage == 1:
        passes = backward = {"gradients": method.gradient_width * trained}
        reduction = {**backward, "copy for the reduction": method.gradient_width * bucket}
        if method.sums_apart:
            reduction["own gradients"] = gradient_shard
    else:
        passes = {} if is_offloaded and not method.sums_apart else {"own gradients": gradient_shard}
        if is_offloaded and several and not method.sums_apart:
            accumulated = {"accumulated gradients": gradient_shard}
        backward = {
            **(passes if several else {}),
            "reduction bucket": width * bucket * (2 if method.overlap_comm else 1),
        }
        copies = width + (FLOAT32 if method.sums_apart else 0)  # as it is, and in the dtype of the sums
        reduction = {**passes, **backward, "copies for the reduction": copies * bucket}
    if is_offloaded:
        # Stage 1 keeps the gradients of other ranks' parameters, which are views of the whole bucket, until the step has ended.
        left = backward if method.zero_stage == 1 and method.zero_ranks > 1 else {}
        sent = {"gradients in float32": master, "parameters on their way": width * trained // method.zero_ranks}
        return ZeroStates(
            held=Needs({"largest gradient": width * largest}, {**_optimizer(master), **sent, **accumulated}),
            later_passes=Needs(passes),
            backward=Needs(backward),
            reduction=Needs(reduction),
            step=Needs(
                {**left, **({"own gradients": gradient_shard} if method.sums_apart else {})}, cpu=_temporary(master)
            ),
        )
    return ZeroStates(
        held=Needs(_optimizer(master)),
        later_passes=Needs(passes),
        backward=Needs(backward),
        reduction=Needs(reduction),
        step=Needs({"gradients in float32": master}, cpu=_temporary(master)),
    )


def _of_stage_3(trained: int, method: Method) -> ZeroStates:
    """The bucket and the rank's share of the gradients are never freed."""
    master = FLOAT32 * trained // method.zero_ranks
    bucket = {"reduction bucket": method.gradient_width * min(trained, method.reduce_bucket_size)}
    gradient_shard = {"gradients": method.gradient_width * trained // method.zero_ranks}
    copied = bucket["reduction bucket"]
    reduction = Needs({"copy for the reduction": copied}, cpu={"copy that gloo makes": copied})
    in_float32 = {"gradients in float32": master}
    if method.offload != "none":
        held = Needs(bucket, {**_optimizer(master), **gradient_shard, **in_float32})
        return ZeroStates(held, reduction=reduction, step=Needs(cpu=_temporary(master)))
    held = Needs({**_optimizer(master), **gradient_shard, **bucket})
    return ZeroStates(held, reduction=reduction, step=Needs(in_float32, cpu=_temporary(master)))


def _optimizer(master: int) -> dict[str, int]:
    return {"master weights": master, "optimizer states": 2 * master}


def _temporary(master: int) -> dict[str, int]:
    """Return what AdamW needs besides where a CPU trains; beside a GPU it is one kernel without temporary tensors."""
    return {"temporary tensors": _ADAMW_TEMPORARY * master}


@dataclass(frozen=True, slots=True)
class Pass:
    """The largest part of a micro-batch that a rank computes, and how many micro-batches it has in a step."""

    tokens: int  # computed; a shared prompt counts once
    predictors: int  # sampled tokens, whose log-probabilities are computed
    count: int = 1


@dataclass(frozen=True, slots=True)
class Network:
    held: Needs  # all the time
    phases: Mapping[str, Needs]  # besides, at the largest moment of each phase


def network(shape: ModelShape, method: Method, largest: Pass) -> Network:
    several, trained = largest.count > 1, num_trained(shape, method)
    states = zero_states(trained, _largest_tensor(shape, method), method, several=several)
    kept, one_layer = _activations(shape, method, largest.tokens)
    head = largest.tokens * shape.hidden * (FLOAT32 + method.width) + largest.predictors * shape.hidden * method.width
    kept_on_host = {"activations": kept} if method.activation_offload else {}
    on_device = 0 if method.activation_offload else kept
    parameters = {"parameters": (shape.parameters + _adapters(shape, method)) * method.width // method.shares(3)}
    if method.hpz_partition_size > 1:
        parameters["parameters for the backward"] = shape.parameters * method.width // method.hpz_partition_size
    live = {}
    if method.zero_stage == 3:  # up to DeepSpeed's limit they stay, once gathered
        live["gathered parameters"] = min(shape.parameters, method.max_live_parameters) * method.width
    # In a first micro-batch gradients appear as activations go; from the second on, they are there from the start.
    before = {**(states.later_passes.device if several else {}), **live}
    # From stage 2 on, gradients that do not fit into one bucket are reduced while there are layers before them.
    left = max(0, trained - method.reduce_bucket_size) if method.zero_stage >= 2 else 0
    during = {**live, "activations": on_device * left // trained} if left else {}
    on_host = method.offload == "parameters"
    alone = {"gradients": trained * method.width, "activations": one_layer} if method.by_gradient else {}
    return Network(
        held=Needs(
            {**({} if on_host else parameters), **states.held.device},
            {**(parameters if on_host else {}), **states.held.host},
        ),
        phases={
            LOSS: Needs(
                {**before, "activations": on_device + head, "logits": _logits(shape, method, largest)}, kept_on_host
            ),
            "backward": Needs({**before, "activations": on_device + head + one_layer}, kept_on_host),
            "end of the backward": Needs({**states.backward.device, **live, "activations": one_layer}),
            "reduction of the gradients": Needs({**states.reduction.device, **during}, cpu=states.reduction.cpu),
            "optimizer step": states.step,
            **({"gradient of one trajectory": Needs(alone)} if alone else {}),
        },
    )


def loading(shape: ModelShape, method: Method) -> tuple[int, int]:
    """Return what the device and the host of a rank hold while the model is read: all of it, or the rank's part and the largest tensor."""
    whole = shape.parameters * method.width
    if not method.is_read_in_parts:
        return whole, whole  # DeepSpeed moves it to the device, and divides it there
    part, tensor = whole // method.zero_ranks, _largest_tensor(shape, replace(method, lora_rank=0)) * method.width
    return (tensor, part + tensor) if method.offload == "parameters" else (part + tensor, tensor)


def checkpoint_copy(shape: ModelShape, method: Method) -> int:
    """Return what a rank copies to host memory for a checkpoint: master weights and both moments of its part, in float32.

    At stage 0, where ranks take whole parameters in turn, at least the largest one.
    """
    trained = num_trained(shape, method)
    part = trained // method.zero_ranks
    if method.zero_stage == 0 and method.zero_ranks > 1:
        part = max(part, _largest_tensor(shape, method))
    return 3 * FLOAT32 * part


def num_trained(shape: ModelShape, method: Method) -> int:
    return _adapters(shape, method) if method.lora_rank else shape.parameters


def _adapters(shape: ModelShape, method: Method) -> int:
    return shape.adapter(method.lora_rank, method.lora_targets)


def _largest_tensor(shape: ModelShape, method: Method) -> int:
    if not method.lora_rank:
        mixture = shape.mixture
        of_experts = (
            mixture.experts * 2 * mixture.intermediate * shape.hidden if mixture else 0
        )  # gate and up, one tensor
        return max(shape.table, of_experts, *(inputs * outputs for inputs, outputs in shape.linears.values()))
    return method.lora_rank * max(max(sizes) for sizes in shape.adapted(method.lora_targets))


def _activations(shape: ModelShape, method: Method, tokens: int) -> tuple[int, int]:
    kept, h, m = tokens * _kept_of_token(shape, method), shape.hidden, shape.intermediate
    temporary = tokens * method.width * max(3 * m, 2 * shape.query + 2 * h)
    if (
        method.dense_attention
    ):  # the weights in float32 and, in another dtype, rounded; and scores and their gradients besides
        matrix = matrix_bytes(shape.heads, tokens)
        kept += matrix + (matrix * method.width // FLOAT32 if method.width != FLOAT32 else 0)
        temporary += 2 * matrix
    more = num = 0
    if (mixture := shape.mixture) is not None:
        num = mixture.layers
        more = tokens * _kept_of_experts(shape, method) - tokens * 4 * m * method.width  # in the place of the MLP's
        temporary = max(temporary, tokens * method.width * mixture.top_k * (3 * mixture.intermediate + 2 * h))
    if method.checkpointing:
        return shape.layers * tokens * h * method.width, kept + max(0, more) + temporary
    return shape.layers * kept + num * more, temporary


def _kept_of_experts(shape: ModelShape, method: Method) -> int:
    """Return what the experts of one layer keep of one token: as a dense MLP, for each of its experts, and the router's part."""
    mixture = shape.mixture
    assert mixture is not None
    of_expert = (
        shape.hidden * 2 + mixture.intermediate * 4
    )  # input and output, which its gate multiplies; as of a dense MLP
    indices = 3 * _INT64  # by which tokens are sorted to their experts, and back
    return mixture.top_k * (of_expert * method.width + indices) + 3 * mixture.experts * FLOAT32


def _kept_of_token(shape: ModelShape, method: Method) -> int:
    b, trains_norms = method.width, not method.lora_rank
    # A norm keeps its input in float32, and what its weight multiplies.
    normalised = FLOAT32 + (b if trains_norms else 0)
    norms = shape.traits.query_norms
    of_heads = normalised if norms != "none" else 0
    kept = (
        2 * shape.hidden * b + shape.traits.norms * shape.hidden * normalised
    )  # inputs of linear layers, and of norms
    kept += 4 * shape.intermediate * b  # gate, its activation, up, their product
    kept += (shape.query + shape.key_value) * (of_heads + 2 * b)  # rotated queries and keys, values, the output
    if "qkv_proj" in shape.traits.fused:  # values are a part of it, which keeps the whole
        kept += (shape.query + shape.key_value) * b
    kept += FLOAT32 * (shape.traits.norms + shape.heads)  # scales of the norms, log-sum-exp of attention
    kept += FLOAT32 * {"none": 0, "head": shape.heads + shape.kv_heads, "width": 2}[norms]
    if (
        method.sequence_parallel > 1
    ):  # the output again, by tokens; and key heads are repeated where there are fewer than ranks
        repeated = max(0, method.sequence_parallel - shape.kv_heads) * shape.head_dim
        kept += (shape.query + 2 * repeated) * b
    return kept + len(shape.adapted(method.lora_targets)) * method.lora_rank * b


def _logits(shape: ModelShape, method: Method, largest: Pass) -> int:
    """Return the tensors as large as a chunk of logits, in float32: log-probabilities and gradients."""
    chunk = max(1, (method.max_logits or MAX_LOGITS) // shape.vocabulary)
    tensors = _WITH_ENTROPY if method.with_entropy else _WITHOUT_ENTROPY
    logits = tensors * FLOAT32 * min(chunk, largest.predictors) * shape.vocabulary
    # The head's gradient in float32: of one chunk, or a chunk's beside the sum of those before.
    tables = 0 if method.lora_rank else 2 if largest.predictors > chunk else 1
    return logits + tables * shape.table * FLOAT32
