"""The attention over packed rows: one function, with a backend chosen by device, dtype and head sizes.

A backend is compared with the definition on a small tree before its first use, gradients included: some of the kernels have
private names in torch, and others compile code for the GPU at hand. One that fails or is not exact is not used. Without any,
the run stops with the reasons, unless a [T, T] matrix is small.

`Sdpa`: the tokens of a node attend to their row up to themselves: one call with a causal bias that is aligned to the lower right
(`torch.nn.attention.bias`), for which torch has a kernel with linear memory on CUDA in float32 too. Keys of a shared prefix
are gathered once for each node below it. On a CPU the bias is a matrix of one node's tokens and its row's.

`DenseMask` computes the definition with a mask [T, T]: for checks and tests, and where its name is set.

`Flex`: a token attends to an earlier one exactly if it lies in the subtree of that one's node, so the mask is two comparisons with
a table of [T]. Which blocks of the kernel are empty, full or mixed follows from the smallest and largest entries of the
table's blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch
import torch.nn.functional as F  # noqa: N812  torch's name for it
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from penstock.trainer.algorithm.device_copy import copied_together
from penstock.trainer.algorithm.packed_rows import Layout, Node, pack
from penstock.trainer.attention_choice import MAX_MATRIX_BYTES, Attention, matrix_bytes
from penstock.trainer.errors import NoAttentionKernel
from penstock.trainer.learner.attention.flash import CpuFlash, CudaFlash

log = structlog.get_logger("trainer.attention")

BLOCK = 128  # tokens; the size that torch's kernels are tuned for


# Norm of the error over the norm of the true value, in units of the dtype's epsilon. Correct kernels were measured for heads of
# 16 to 256 dimensions and 1 to 16 query heads for each key head: at most 1.2, 0.5 and 5.
_LIMITS = {torch.bfloat16: 2.0, torch.float16: 2.0, torch.float32: 16.0}
_LIMIT_OF_OTHERS = 64.0
_COMPARED = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")


class DenseMask:
    """Softmax over a mask; exact for every dtype and device, with memory that grows with the square of the tokens."""

    name = "dense"

    def supports(self, query: Tensor, value: Tensor) -> str | None:
        del query, value
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        if (mask := layout.prepared.get((self.name, query.device))) is None:
            mask = layout.prepared[self.name, query.device] = torch.from_numpy(layout.mask()).to(query.device)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        return weights.to(value.dtype) @ value


class Sdpa:
    name = "sdpa"

    def supports(self, query: Tensor, value: Tensor) -> str | None:
        del query, value
        return None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415  a second of import, where no kernel needs it

        groups = query.shape[1] // key.shape[1]
        outputs, path = [], list[Node]()
        for node in layout.nodes:
            while path and path[-1].subtree_end <= node.start:
                path.pop()
            path.append(node)
            keys, values = (
                torch.cat([held[:, :, some.start : some.end] for some in path], dim=2).repeat_interleave(groups, dim=1)
                for held in (key, value)
            )
            queries = query[:, :, node.start : node.end]
            bias = causal_lower_right(queries.shape[2], keys.shape[2])
            outputs.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale))
        return torch.cat(outputs, dim=2)


class Flex:
    name = "flex"

    def supports(self, query: Tensor, value: Tensor) -> str | None:
        """Return None on a GPU; the compiled kernel for the CPU has no backward pass."""
        del value
        return None if query.device.type == "cuda" else f"it needs a GPU, and the model is on {query.device.type}"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        known = layout.prepared.get((self.name, query.device))
        if known is None:
            known = layout.prepared[self.name, query.device] = block_mask(layout, query.device)
        gqa = query.shape[1] != key.shape[1]
        out: Any = _compiled()(query, key, value, block_mask=known, scale=scale, enable_gqa=gqa)
        return out


def block_mask(layout: Layout, device: torch.device) -> BlockMask:
    ends = subtree_ends(layout)
    tables = [part for table in block_tables(ends) for part in _ordered(table)]
    on_device, *blocks = copied_together([torch.from_numpy(ends), *tables], device)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return (key <= query) & (query < on_device[key])

    size = (layout.num_tokens, layout.num_tokens)
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=BLOCK, mask_mod=attends, seq_lengths=size)


def subtree_ends(layout: Layout) -> npt.NDArray[np.int64]:
    """Return of each token, [T], the end of its node's subtree: the tokens before it, from the token on, attend to it."""
    lengths = [node.end - node.start for node in layout.nodes]
    return np.repeat(np.array([node.subtree_end for node in layout.nodes], dtype=np.int64), lengths)


def block_tables(ends: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which blocks of queries and keys are mixed and which are full, each [B, B]; the others are empty."""
    starts = np.arange(0, len(ends), BLOCK)
    last, first = np.maximum.reduceat(ends, starts), np.minimum.reduceat(ends, starts)
    below = starts[:, None] > starts[None]  # the queries of a block come after the keys of another
    stops = np.minimum(starts + BLOCK, len(ends))
    full = below & (stops[:, None] <= first[None])
    some = (below & (starts[:, None] < last[None])) | np.eye(len(starts), dtype=np.bool_)
    return some & ~full, full


def _ordered(table: npt.NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of a table has, [1, 1, B] int32, and which first, [1, 1, B, B] int32."""
    order = np.argsort(~table, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(table.sum(1, dtype=np.int32))[None, None], torch.from_numpy(order)[None, None]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


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
    layout, tensors = _small_tree(query, value, ratio)
    try:
        computed = _results(backend, tensors, layout)
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
    exact = _results(DENSE, [held.double() for held in tensors], layout)
    limit = _LIMITS.get(query.dtype, _LIMIT_OF_OTHERS)
    for what, some, true in zip(_COMPARED, computed, exact, strict=True):
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
    draw = torch.Generator().manual_seed(1)  # a separate one: the state of torch's generator is part of a checkpoint
    kinds = ((2 * ratio, query), (2, query), (2, value), (2 * ratio, value))
    tensors = [
        torch.randn(1, heads, layout.num_tokens, like.shape[-1], generator=draw).to(query.device, query.dtype)
        for heads, like in kinds
    ]
    return layout, tensors


def _results(backend: Backend, tensors: list[Tensor], layout: Layout) -> list[Tensor]:
    *inputs, upstream = (held.detach() for held in tensors)
    scale = inputs[0].shape[-1] ** -0.5
    # A first call inside a checkpointed layer must not save tensors through the layer's hooks: reading them computes it again.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
        inputs = [held.requires_grad_() for held in inputs]
        out = backend.attend(inputs[0], inputs[1], inputs[2], layout, scale)
        gradients = torch.autograd.grad(out, inputs, upstream)
    return [held.detach() for held in (out, *gradients)]
