"""The attention over packed rows: one function, with a backend chosen by device, dtype and head sizes.

A backend is compared with the definition on a small tree before its first use, gradients included: some of the kernels have
private names in torch, and others compile code for the GPU at hand. One that fails or is not exact is not used. Without any,
the run stops with the reasons, unless a [T, T] matrix is small.

`Sdpa`: the tokens of a node attend to their row up to themselves: one call with a causal bias that is aligned to the lower right
(`torch.nn.attention.bias`), for which torch has a kernel with linear memory on CUDA in float32 too. Keys of a shared prefix
are gathered once for each node below it. On a CPU the bias is a matrix of one node's tokens and its row's. With a sliding window,
some tokens of a node are one call, with a mask for them and the keys in their windows.

`DenseMask` computes the definition with a mask [T, T]: for checks and tests, and where its name is set.

`Flex`: a token attends to an earlier one exactly if it lies in the subtree of that one's node, and in a window if their places in
the row are near, so the mask is comparisons with tables of [T]. Which blocks of the kernel are empty, full or mixed follows from
the smallest and largest entries of the tables' blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch
import torch.nn.functional as F  # noqa: N812  torch's name for it
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from penstock.trainer.algorithm.device_copy import copied_together
from penstock.trainer.algorithm.packed_rows import Layout, pack
from penstock.trainer.attention_choice import MAX_MATRIX_BYTES, Attention, matrix_bytes
from penstock.trainer.errors import NoAttentionKernel
from penstock.trainer.learner.attention.cpu_flash import CpuFlash
from penstock.trainer.learner.attention.cuda_flash import CudaFlash
from penstock.trainer.learner.attention.variant import PLAIN, Variant, share_beside_sinks

log = structlog.get_logger("trainer.attention")

BLOCK = 128  # tokens; the size that torch's kernels are tuned for
_BAND_QUERIES = 1024  # of a call with windows of torch's own attention
_TOKENS = 10**9  # more than any node has

# Norm of the error over the norm of the true value, in units of the dtype's epsilon. Correct kernels were measured for heads of
# 16 to 256 dimensions and 1 to 16 query heads for each key head: at most 1.2, 0.5 and 5.
_LIMITS = {torch.bfloat16: 2.0, torch.float16: 2.0, torch.float32: 16.0}
_LIMIT_OF_OTHERS = 64.0
# A head has one sink, whose gradient is a sum over all tokens that may nearly cancel; 3.1 and 26 were measured.
_OF_SINKS = 4
_COMPARED = ("output", *(f"gradient of the {name}" for name in ("queries", "keys", "values", "sinks")))
_CHECKED_WINDOW, _CHECKED_CAP = 37, 1.5


class DenseMask:
    """Softmax over a mask; exact for every dtype and device, with memory that grows with the square of the tokens."""

    name = "dense"

    def supports(self, query: Tensor, value: Tensor, variant: Variant = PLAIN) -> str | None:
        del query, value, variant
        return None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, variant: Variant = PLAIN
    ) -> Tensor:
        known = (self.name, query.device, variant.window)
        if (mask := layout.prepared.get(known)) is None:
            mask = layout.prepared[known] = torch.from_numpy(layout.mask(variant.window)).to(query.device)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
        scores = variant.capped(scores).masked_fill(~mask, float("-inf"))
        if variant.sinks is not None:
            sinks = variant.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], -1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : value.shape[2]]
        return weights.to(value.dtype) @ value


class Sdpa:
    name = "sdpa"

    def supports(self, query: Tensor, value: Tensor, variant: Variant = PLAIN) -> str | None:
        del query, value
        if variant.softcap is not None:
            return "it does not cap scores"
        return "it has no attention sinks" if variant.sinks is not None else None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, variant: Variant = PLAIN
    ) -> Tensor:
        from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415  a second of import, where no kernel needs it

        groups, window = query.shape[1] // key.shape[1], variant.window
        outputs = []
        for band in layout.bands(window, _TOKENS if window is None else _BAND_QUERIES):
            keys, values = (
                torch.cat([held[:, :, start:end] for start, end in band.keys], dim=2).repeat_interleave(groups, dim=1)
                for held in (key, value)
            )
            queries = query[:, :, band.start : band.end]
            bias: Any = causal_lower_right(queries.shape[2], keys.shape[2])
            if window is not None:
                places = torch.arange(keys.shape[2], device=query.device)
                distances = places[band.before :, None] - places
                bias = (distances >= 0) & (distances < window)
            outputs.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale))
        return torch.cat(outputs, dim=2)


class Flex:
    name = "flex"

    def supports(self, query: Tensor, value: Tensor, variant: Variant = PLAIN) -> str | None:
        """Return None on a GPU; the compiled kernel for the CPU has no backward pass."""
        del value, variant
        return None if query.device.type == "cuda" else f"it needs a GPU, and the model is on {query.device.type}"

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, variant: Variant = PLAIN
    ) -> Tensor:
        known = (self.name, query.device, variant.window)
        if (mask := layout.prepared.get(known)) is None:
            mask = layout.prepared[known] = block_mask(layout, query.device, variant.window)
        options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
        if variant.softcap is not None:
            options["score_mod"] = lambda score, *_: variant.capped(score)
        if variant.sinks is None:
            return _compiled()(query, key, value, **options)
        out, aux = _compiled()(query, key, value, return_aux=AuxRequest(lse=True), **options)
        return out * share_beside_sinks(aux.lse, variant.sinks).unsqueeze(-1).to(out.dtype)


def block_mask(layout: Layout, device: torch.device, window: int | None = None) -> BlockMask:
    ends = subtree_ends(layout)
    tables = [part for table in block_tables(layout, window) for part in _ordered(table)]
    on_device, depths, *blocks = copied_together(
        [torch.from_numpy(ends), torch.from_numpy(layout.depths), *tables], device
    )

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        allowed = (key <= query) & (query < on_device[key])
        return allowed if window is None else allowed & (depths[query] - depths[key] < window)

    size = (layout.num_tokens, layout.num_tokens)
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=BLOCK, mask_mod=attends, seq_lengths=size)


def subtree_ends(layout: Layout) -> npt.NDArray[np.int64]:
    """Return of each token, [T], the end of its node's subtree: the tokens before it, from the token on, attend to it."""
    lengths = [node.end - node.start for node in layout.nodes]
    return np.repeat(np.array([node.subtree_end for node in layout.nodes], dtype=np.int64), lengths)


def block_tables(layout: Layout, window: int | None = None) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which blocks of queries and keys are mixed and which are full, each [B, B]; the others are empty.

    With a window, a block that is mixed may be empty or full.
    """
    ends, starts = subtree_ends(layout), np.arange(0, layout.num_tokens, BLOCK)
    last, first = np.maximum.reduceat(ends, starts), np.minimum.reduceat(ends, starts)
    below = starts[:, None] > starts[None]  # the queries of a block come after the keys of another
    stops = np.minimum(starts + BLOCK, len(ends))
    full = below & (stops[:, None] <= first[None])
    some = (below & (starts[:, None] < last[None])) | np.eye(len(starts), dtype=np.bool_)
    if window is not None:
        deepest, highest = (extreme.reduceat(layout.depths, starts) for extreme in (np.maximum, np.minimum))
        full &= deepest[:, None] - highest[None] < window
        some &= highest[:, None] - deepest[None] < window
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

    def supports(self, query: Tensor, value: Tensor, variant: Variant = PLAIN) -> str | None:
        """Return why it is not made for tensors and a variant like these; None: it is."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, variant: Variant = PLAIN
    ) -> Tensor:
        """Return attention [1, H, T, Dv], differentiable.

        Args:
            query: [1, H, T, D].
            key: [1, K, T, D]; K divides H, and consecutive query heads share one.
            value: [1, K, T, Dv].
            layout: Which token attends to which.
            scale: Multiplies the products of queries and keys.
            variant: What is added to their softmax.
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


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, variant: Variant = PLAIN) -> Tensor:
    """Return attention [1, H, T, Dv] by the fastest backend that works; arguments as in `Backend.attend`.

    Raises NoAttentionKernel if none does and the matrices of the definition would not be small.
    """
    size, variant = value.shape[-1], variant.within(layout.longest_row)
    if size < query.shape[-1]:  # as in multi-head latent attention; zeros add nothing, and kernels want equal sizes
        value = F.pad(value, (0, query.shape[-1] - size))
    backend = choose(query, key, value, layout.num_tokens, variant)
    return backend.attend(query, key, value, layout, scale, variant)[..., :size]


def choose(query: Tensor, key: Tensor, value: Tensor, num_tokens: int, variant: Variant = PLAIN) -> Backend:
    """Return the first backend that supports such tensors and agrees with the definition; the same in later calls.

    Raises NoAttentionKernel: no backend works, or not the one that ``trainer.attention`` names.
    """
    ratio = query.shape[1] // key.shape[1]
    kind = (query.device, query.dtype, query.shape[-1], value.shape[-1], ratio, *variant.kind)
    if kind not in _choice.checked:
        _choice.checked[kind] = _first_that_works(query, value, ratio, variant)
    works, reasons = _choice.checked[kind]
    if works is not None:
        return works
    num_bytes = matrix_bytes(query.shape[1], num_tokens)
    if _choice.wanted != "auto" or num_bytes > MAX_MATRIX_BYTES:
        raise NoAttentionKernel(_refusal(query, num_tokens, num_bytes, reasons, variant))
    return DENSE


def _first_that_works(query: Tensor, value: Tensor, ratio: int, variant: Variant) -> Checked:
    if _choice.wanted == DENSE.name:
        return DENSE, []
    reasons = []
    for backend in BACKENDS:
        if _choice.wanted not in ("auto", backend.name):
            continue
        reason = backend.supports(query, value, variant) or why_not_exact(backend, query, value, ratio, variant)
        if reason is None:
            return backend, reasons
        reasons.append(f"{backend.name}: {reason}")
    log.warning("no fast attention works for these heads", head_size=query.shape[-1], reasons=reasons)
    return None, reasons


def _refusal(query: Tensor, num_tokens: int, num_bytes: int, reasons: list[str], variant: Variant) -> str:
    dtype = str(query.dtype).removeprefix("torch.")
    heads = f"{query.shape[1]} heads of {query.shape[-1]} dimensions{variant.words} in {dtype} on {query.device.type}"
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


def why_not_exact(backend: Backend, query: Tensor, value: Tensor, ratio: int, variant: Variant = PLAIN) -> str | None:
    """Return why a backend has not the definition's results and gradients for tensors like these; None: it has.

    It is computed on a small tree in the dtype of ``query``, with a window and a cap that matter there; the definition in float64
    from the same numbers. Raises OutOfMemoryError if the device has no memory for the comparison, which says nothing about the backend.
    """
    layout, tensors = _small_tree(query, value, ratio)
    checked = Variant(
        window=None if variant.window is None else _CHECKED_WINDOW,
        softcap=None if variant.softcap is None else _CHECKED_CAP,
    )
    if variant.sinks is not None:
        tensors.append(torch.linspace(-2, 2, 2 * ratio, device=query.device, dtype=query.dtype))
    try:
        computed = _results(backend, tensors, layout, checked)
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
    exact = _results(DENSE, [held.double() for held in tensors], layout, checked)
    limit = _LIMITS.get(query.dtype, _LIMIT_OF_OTHERS)
    for what, some, true in zip(_COMPARED, computed, exact, strict=False):
        error = float((some.double() - true).norm() / true.norm()) / torch.finfo(query.dtype).eps
        allowed = limit * _OF_SINKS if what == _COMPARED[-1] else limit
        if not error <= allowed:
            return (
                f"it is not exact: its {what} is {error:.1f} roundings from the true one, and {allowed:g} are allowed"
            )
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


def _results(backend: Backend, tensors: list[Tensor], layout: Layout, variant: Variant) -> list[Tensor]:
    query, key, value, upstream, *sinks = (held.detach() for held in tensors)
    # A first call inside a checkpointed layer must not save tensors through the layer's hooks: reading them computes it again.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
        inputs = [held.requires_grad_() for held in (query, key, value, *sinks)]
        variant = replace(variant, sinks=sinks[0] if sinks else None)
        out = backend.attend(query, key, value, layout, query.shape[-1] ** -0.5, variant)
        gradients = torch.autograd.grad(out, inputs, upstream)
    return [held.detach() for held in (out, *gradients)]
