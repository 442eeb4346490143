"""The attention over packed rows: one function, with a backend chosen by device, dtype and head sizes.

A backend is compared with the definition on a small tree before its first use, gradients included: some of the kernels have
private names in torch, and others compile code for the GPU at hand. One that fails or is not exact is not used. Without any,
the run stops with the reasons, unless a [T, T] matrix is small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import structlog
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from penstock.trainer.algorithm.packed_rows import Layout, pack
from penstock.trainer.attention_choice import MAX_MATRIX_BYTES, Attention, matrix_bytes
from penstock.trainer.errors import NoAttentionKernel
from penstock.trainer.learner.attention.flash import CpuFlash, CudaFlash
from penstock.trainer.learner.attention.torch_kernels import DenseMask, Flex, Sdpa

log = structlog.get_logger("trainer.attention")

# Norm of the error over the norm of the true value, in units of the dtype's epsilon. Correct kernels were measured for heads of
# 16 to 256 dimensions and 1 to 16 query heads for each key head: at most 1.2, 0.5 and 5.
_LIMITS = {torch.bfloat16: 2.0, torch.float16: 2.0, torch.float32: 16.0}
_LIMIT_OF_OTHERS = 64.0
_COMPARED = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    def supports(self, query: Tensor, value: Tensor) -> str | None:
        """Return why it is not made for tensors like these; None: it is."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        """Return attention [1, H, T, Dv], differentiable.

        Args:
            query: [1, H, T, D].
            key: [1, K, T, D]; K divides H, and consecutive query heads share one.
            value: [1, K, T, Dv].
            layout: Which token attends to which.
            scale: Multiplies the products of queries and keys.
        """
        ...


DENSE = DenseMask()
BACKENDS: tuple[Backend, ...] = (  # in the order in which they are tried
    CudaFlash("flash-3", "FA3"),
    CudaFlash("flash-4", "FA4"),
    CudaFlash(),
    CpuFlash(),
    Sdpa(),
    Flex(),
)


Checked = tuple[Backend | None, list[str]]  # the first backend that works, and why not those before it


@dataclass(slots=True)
class _Choice:
    wanted: Attention = "auto"
    checked: dict[tuple[object, ...], Checked] = field(default_factory=dict)


_choice = _Choice()


def use(wanted: Attention) -> None:
    if wanted != _choice.wanted:
        _choice.wanted = wanted
        _choice.checked.clear()


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Return attention [1, H, T, Dv] by the fastest backend that works; arguments as in `Backend.attend`.

    Raises NoAttentionKernel if none does and the matrices of the definition would not be small.
    """
    size = value.shape[-1]
    if size < query.shape[-1]:  # as in multi-head latent attention; zeros add nothing, and kernels want equal sizes
        value = F.pad(value, (0, query.shape[-1] - size))
    backend = choose(query, key, value, layout.num_tokens)
    return backend.attend(query, key, value, layout, scale)[..., :size]


def choose(query: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> Backend:
    """Return the first backend that supports such tensors and agrees with the definition; the same in later calls.

    Raises NoAttentionKernel: no backend works, or not the one that ``trainer.attention`` names.
    """
    ratio = query.shape[1] // key.shape[1]
    kind = (query.device, query.dtype, query.shape[-1], value.shape[-1], ratio)
    if kind not in _choice.checked:
        _choice.checked[kind] = _first_that_works(query, value, ratio)
    works, reasons = _choice.checked[kind]
    if works is not None:
        return works
    num_bytes = matrix_bytes(query.shape[1], num_tokens)
    if _choice.wanted != "auto" or num_bytes > MAX_MATRIX_BYTES:
        raise NoAttentionKernel(_refusal(query, num_tokens, num_bytes, reasons))
    return DENSE


def _first_that_works(query: Tensor, value: Tensor, ratio: int) -> Checked:
    if _choice.wanted == DENSE.name:
        return DENSE, []
    reasons = []
    for backend in BACKENDS:
        if _choice.wanted not in ("auto", backend.name):
            continue
        reason = backend.supports(query, value) or why_not_exact(backend, query, value, ratio)
        if reason is None:
            return backend, reasons
        reasons.append(f"{backend.name}: {reason}")
    log.warning("no fast attention works for these heads", head_size=query.shape[-1], reasons=reasons)
    return None, reasons


def _refusal(query: Tensor, num_tokens: int, num_bytes: int, reasons: list[str]) -> str:
    dtype = str(query.dtype).removeprefix("torch.")
    heads = f"{query.shape[1]} heads of {query.shape[-1]} dimensions in {dtype} on {query.device.type}"
    if _choice.wanted != "auto":
        return (
            f"trainer.attention = {_choice.wanted} cannot be used for {heads}: {'; '.join(reasons)}; set trainer.attention = "
            '"auto", or another of its names'
        )
    return (
        f"no attention kernel works for {heads} ({'; '.join(reasons)}), and attention by its definition would need several "
        f"matrices of {num_bytes / 1e9:.1f} GB for the {num_tokens:,} tokens of a micro-batch; install the torch of the "
        'constraints file, or lower trainer.micro_batch_tokens, or set trainer.attention = "dense" to pay for them'
    )


def why_not_exact(backend: Backend, query: Tensor, value: Tensor, ratio: int) -> str | None:
    """Return why a backend has not the definition's results and gradients for tensors like these; None: it has.

    It is computed on a small tree in the dtype of ``query``; the definition in float64 from the same numbers. Raises
    OutOfMemoryError if the device has no memory for the comparison, which says nothing about the backend.
    """
    layout, given = _small_tree(query, value, ratio)
    try:
        found = _results(backend, given, layout)
    except torch.OutOfMemoryError:
        raise
    except (
        RuntimeError,
        AttributeError,
        TypeError,
        ValueError,
        ImportError,
        NotImplementedError,
        AssertionError,
    ) as err:
        return f"it failed ({type(err).__name__}: {str(err).strip()[:300]})"  # a kernel of another torch or device
    exact = _results(DENSE, [held.double() for held in given], layout)
    limit = _LIMITS.get(query.dtype, _LIMIT_OF_OTHERS)
    for what, some, true in zip(_COMPARED, found, exact, strict=True):
        error = float((some.double() - true).norm() / true.norm()) / torch.finfo(query.dtype).eps
        if not error <= limit:
            return f"it is not exact: its {what} is {error:.1f} roundings from the true one, and {limit:g} are allowed"
    return None


def _small_tree(query: Tensor, value: Tensor, ratio: int) -> tuple[Layout, list[Tensor]]:
    """Return a forest and independent queries, keys, values and gradients: long and short rows, one in another, two branchings."""
    prompts = [np.arange(150), np.arange(150), np.arange(150), np.arange(7), np.arange(20), np.arange(20) + 5]
    tails = [
        np.arange(3),
        np.arange(40) + 9,
        np.append(np.arange(17) + 9, 1),
        np.arange(100) + 50,
        np.arange(30),
        np.arange(5),
    ]
    rows = [np.append(prompt, tail).astype(np.int32) for prompt, tail in zip(prompts, tails, strict=True)]
    layout = pack(rows, [len(prompt) for prompt in prompts]).layout
    draw = torch.Generator().manual_seed(1)  # of its own: the state of torch's is part of a checkpoint
    kinds = ((2 * ratio, query), (2, query), (2, value), (2 * ratio, value))
    given = [
        torch.randn(1, heads, layout.num_tokens, like.shape[-1], generator=draw).to(query.device, query.dtype)
        for heads, like in kinds
    ]
    return layout, given


def _results(backend: Backend, given: list[Tensor], layout: Layout) -> list[Tensor]:
    *inputs, upstream = (held.detach() for held in given)
    scale = inputs[0].shape[-1] ** -0.5
    # A first call inside a checkpointed layer must not save tensors through the layer's hooks: reading them computes it again.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
        inputs = [held.requires_grad_() for held in inputs]
        out = backend.attend(inputs[0], inputs[1], inputs[2], layout, scale)
        gradients = torch.autograd.grad(out, inputs, upstream)
    return [held.detach() for held in (out, *gradients)]
