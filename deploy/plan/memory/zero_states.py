"""What DeepSpeed 0.19.8 allocates for gradients and the optimizer, by stage and offload; pure.

Read from `bf16_optimizer.py` (stage 1 with gradients of bfloat16 summed in float32, without offload), `zero/stage_1_and_2.py`
and `zero/stage3.py`. All sizes are bytes of one rank, without padding for alignment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.deploy.plan.memory.method import FLOAT32, Method, Needs

REDUCE_BUCKET = 500_000_000  # elements, DeepSpeed's default
_ADAMW_TEMPORARY = 2  # tensors as large as what is stepped: the denominator, and its square root


@dataclass(frozen=True, slots=True)
class ZeroStates:
    """The states of the parameters that learn, on one rank."""

    held: Needs  # all the time
    later_passes: Needs  # besides, in the passes of every micro-batch but the first
    backward: Needs  # besides, at the end of a backward pass
    reduction: Needs  # besides, while ranks add up the gradients of a bucket
    step: Needs  # besides, in the optimizer step


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
                step=Needs({**gradients, "temporary tensors": _ADAMW_TEMPORARY * FLOAT32 * largest}),
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
    return ZeroStates(
        held=Needs({**_optimizer(master), "gradients": FLOAT32 * trained}),
        later_passes=Needs(),
        backward=Needs(),
        reduction=Needs(),
        step=Needs(_temporary(master)),
    )


def _of_stages_1_and_2(trained: int, largest: int, method: Method, *, several: bool) -> ZeroStates:
    """Gradients move into a bucket, of which the reduction makes a copy, and the own share out of it."""
    is_offloaded = method.offload != "none"
    master, width = FLOAT32 * trained // method.zero_ranks, method.width
    bucket = min(trained, REDUCE_BUCKET)
    own = method.gradient_width * trained // method.zero_ranks
    accumulated: Mapping[str, int] = {}  # on the host, where it is offloaded
    if method.zero_stage == 1:
        passes = backward = {"gradients": method.gradient_width * trained}
        reduction = {**backward, "copy for the reduction": method.gradient_width * bucket}
        if method.sums_apart:
            reduction["own gradients"] = own
    else:
        passes = {} if is_offloaded and not method.sums_apart else {"own gradients": own}
        if is_offloaded and several and not method.sums_apart:
            accumulated = {"accumulated gradients": own}
        backward = {**(passes if several else {}), "reduction bucket": width * bucket}
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
            step=Needs({**left, **({"own gradients": own} if method.sums_apart else {})}, _temporary(master)),
        )
    return ZeroStates(
        held=Needs(_optimizer(master)),
        later_passes=Needs(passes),
        backward=Needs(backward),
        reduction=Needs(reduction),
        step=Needs({"gradients in float32": master, **_temporary(master)}),
    )


def _of_stage_3(trained: int, method: Method) -> ZeroStates:
    """The bucket and the own share of the gradients are never freed."""
    master = FLOAT32 * trained // method.zero_ranks
    bucket = {"reduction bucket": method.gradient_width * min(trained, REDUCE_BUCKET)}
    own = {"gradients": method.gradient_width * trained // method.zero_ranks}
    copied = bucket["reduction bucket"]
    reduction = Needs({"copy for the reduction": copied}, cpu={"copy that gloo makes": copied})
    in_float32 = {"gradients in float32": master}
    if method.offload != "none":
        return ZeroStates(
            held=Needs(bucket, {**_optimizer(master), **own, **in_float32}),
            later_passes=Needs(),
            backward=Needs(),
            reduction=reduction,
            step=Needs({}, _temporary(master)),
        )
    return ZeroStates(
        held=Needs({**_optimizer(master), **own, **bucket}),
        later_passes=Needs(),
        backward=Needs(),
        reduction=reduction,
        step=Needs({**in_float32, **_temporary(master)}),
    )


def _optimizer(master: int) -> dict[str, int]:
    return {"master weights": master, "optimizer states": 2 * master}


def _temporary(master: int) -> dict[str, int]:
    return {"temporary tensors": _ADAMW_TEMPORARY * master}
