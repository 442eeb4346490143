"""Attention over packed rows: every backend equals the definition, forward and backward, on random trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from tests.examples import examples
from tests.trainer.algorithm.test_packed_rows import trees
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock.trainer.algorithm.packed_rows import Layout, pack
from penstock.trainer.learner.attention import backends, cpu_flash, cuda_flash
from penstock.trainer.learner.attention.cpu_flash import CpuFlash
from penstock.trainer.learner.attention.cuda_flash import CudaFlash
from penstock.trainer.learner.attention.reference import DenseMask


def _given(layout: Layout, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(layout.num_tokens)
    sizes = [(1, heads, layout.num_tokens, 8) for heads in (4, 2, 2)]
    return [torch.randn(size, generator=draw).to(dtype).requires_grad_() for size in sizes]


def _results(attend: Any, given: list[Tensor], layout: Layout) -> list[Tensor]:
    out = attend(*given, layout, 0.6)
    gradients = torch.autograd.grad((out.double() * torch.arange(8).sin()).sum(), given)
    return [held.detach().double() for held in (out, *gradients)]


@pytest.mark.parametrize(("small_tree", "short_node"), [(10**9, 10**9), (0, 10**9), (0, 0), (30, 5)])
@examples(12)
@given(drawn=trees())
def test_the_flash_kernel_of_the_cpu_equals_the_definition(drawn: Any, small_tree: int, short_node: int) -> None:
    """As masked trees, as batches of short nodes, node by node, and as a mixture of these."""
    layout = pack(*drawn).layout
    given = _given(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_flash, "_SMALL_TREE", small_tree)
        patch.setattr(cpu_flash, "_SHORT_NODE", short_node)
        found = _results(CpuFlash().attend, given, layout)
    for some, true in zip(found, _results(DenseMask().attend, given, layout), strict=True):
        torch.testing.assert_close(some, true, rtol=1e-4, atol=3e-6)


def _dense(query: Tensor, key: Tensor, bounds: tuple[Tensor, Tensor], is_causal: bool, scale: float) -> Tensor:
    """Scores [H, Q, K] of a variable-length call, -inf where a query does not attend."""
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) * scale
    sequence = [
        torch.bucketize(torch.arange(len(t)), b[1:], right=True) for t, b in zip((query, key), bounds, strict=True)
    ]
    allowed = sequence[0][:, None] == sequence[1][None]
    if is_causal:
        allowed &= torch.arange(len(query))[:, None] >= torch.arange(len(key))[None]
    return scores.masked_fill(~allowed, float("-inf"))


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, q: Tensor, k: Tensor, *rest: Any, scale: float
) -> tuple[Any, ...]:
    """Torch's `_flash_attention_forward`, as it documents itself."""
    scores = _dense(query, key, (q, k), rest[3], scale)
    weights = scores.softmax(-1)
    groups = query.shape[1] // key.shape[1]
    out = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(groups, 1))
    return out, scores.logsumexp(-1), None, None, None


def _varlen_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:  # fmt: skip
    """Torch's `_flash_attention_backward`: probabilities from the log-sum-exp that it is given."""
    groups = query.shape[1] // key.shape[1]
    p = (_dense(query, key, (q, k), rest[3], scale) - lse.unsqueeze(-1)).exp()
    wide_k, wide_v = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    ds = p * (torch.einsum("qhd,khd->hqk", grad, wide_v) - (grad * out).sum(-1).T.unsqueeze(-1))
    found = (torch.einsum("hqk,qhd->khd", ds, query) * scale, torch.einsum("hqk,qhd->khd", p, grad))
    dk, dv = (held.unflatten(1, (key.shape[1], groups)).sum(2) for held in found)
    return torch.einsum("hqk,khd->qhd", ds, wide_k) * scale, dk, dv


@examples(20)
@given(drawn=trees())
def test_the_parts_and_merging_for_cuda_equal_the_definition(drawn: Any) -> None:
    """With the kernels' arithmetic in place of the kernels, which need a GPU: one call for nodes, one per level of links."""
    layout = pack(*drawn).layout
    given = _given(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_flash, "_kernel", _varlen)
        patch.setattr(cuda_flash, "_kernel_backward", _varlen_backward)
        found = _results(CudaFlash().attend, given, layout)
    for some, true in zip(found, _results(DenseMask().attend, given, layout), strict=True):
        torch.testing.assert_close(some, true, rtol=1e-4, atol=3e-6)


def test_bfloat16_parts_are_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, a tree of several levels has about the error of one call with a mask, not of one per level."""
    prompts = [np.full(100, 1), np.full(100, 1), np.append(np.full(160, 1), 3), np.append(np.full(200, 1), 4)]
    rows = [np.append(prompt, np.full(60, 5 + n)).astype(np.int32) for n, prompt in enumerate(prompts)]
    layout = pack(rows, [100] * 4).layout
    assert sum(node.subtree_end > node.end for node in layout.nodes) > 1
    given = _given(layout, torch.bfloat16)
    exact = _results(DenseMask().attend, [held.detach().float().requires_grad_() for held in given], layout)

    def errors() -> list[float]:
        found = _results(CpuFlash().attend, given, layout)
        layout.prepared.clear()
        return [float((some - true).norm() / true.norm()) for some, true in zip(found, exact, strict=True)]

    in_parts = errors()
    monkeypatch.setattr(cpu_flash, "_SMALL_TREE", 10**9)
    for parts, one_call in zip(in_parts, errors(), strict=True):
        assert parts < 1.25 * one_call


class _Wrong(CpuFlash):
    name = "wrong"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        whole = Layout((layout.nodes[0]._replace(end=layout.num_tokens, subtree_end=layout.num_tokens),), layout.depths)
        return super().attend(query, key, value, whole, scale)  # rows attend to one another


class _Broken(CpuFlash):
    name = "broken"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        raise RuntimeError("no kernel for this")


@pytest.mark.parametrize(
    ("backend", "chosen"), [(_Wrong(), "reference"), (_Broken(), "reference"), (CpuFlash(), "cpu-flash")]
)
def test_a_backend_that_fails_or_is_not_exact_is_not_used(
    backend: Any, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first use each is compared with the definition; where none agrees, the definition is used."""
    monkeypatch.setattr(backends, "BACKENDS", (backend,))
    monkeypatch.setattr(backends, "_chosen", {})
    query = torch.zeros(1, 4, 2, 8)
    assert backends.backend_for(query, query).name == chosen


def test_values_of_smaller_heads_than_queries_use_the_fast_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in multi-head latent attention: equal to the definition, without the definition's memory."""
    layout = pack([np.arange(n, dtype=np.int32) + n for n in (9, 14)], [3, 3]).layout
    query, key, value = _given(layout)
    value = value.detach()[..., :5].requires_grad_()
    out = backends.attend(query, key, value, layout, 0.6)
    true = DenseMask().attend(query, key, value, layout, 0.6)
    torch.testing.assert_close(out, true, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(DenseMask, "attend", None)
    assert backends.attend(query, key, value, layout, 0.6).shape == true.shape


def test_the_cpu_has_a_fast_backend_for_every_dtype_it_trains_in() -> None:
    """Float32, float64 and bfloat16 use the flash kernel; other head sizes for values use the definition."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        query = torch.zeros(1, 4, 2, 16, dtype=dtype)
        assert backends.backend_for(query, query).name == "cpu-flash"
    assert backends.backend_for(query, torch.zeros(1, 4, 2, 8, dtype=dtype)).name == "reference"


def test_memory_grows_with_the_tokens_and_not_with_their_square() -> None:
    """Of a prompt of any length with eight answers, nothing that is kept between calls has tokens² elements."""
    for size in (1000, 4000):
        rows = [np.append(np.zeros(size), np.full(100, n + 1)).astype(np.int32) for n in range(8)]
        layout = pack(rows, [size] * 8).layout
        parts = cpu_flash._parts(layout, torch.float32)
        kept = [batch.mask for batch in parts.batches if batch.mask is not None]
        assert (len(parts.spans), len(parts.links), kept) == (9, 1, [])


def test_the_first_call_may_come_from_a_checkpointed_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the definition, gradients included, does not make the layer compute again."""
    monkeypatch.setattr(backends, "_chosen", {})
    layout = pack([np.arange(9, dtype=np.int32)], [4]).layout
    given, calls = _given(layout), []

    def layer(query: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return backends.attend(query.sin(), given[1], given[2], layout, 0.6)

    out = checkpoint(layer, given[0], use_reentrant=False)
    assert len(calls) == 1
    out.sum().backward()
    assert len(calls) == 2
    assert backends._chosen.popitem()[1].name == CpuFlash.name
