"""Attention over packed rows: every backend equals the definition, forward and backward, on random trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.tagged_device import varlen, varlen_backward
from tests.trainer.algorithm.test_packed_rows import trees
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock.trainer.algorithm.packed_rows import Layout, pack
from penstock.trainer.attention_choice import MAX_MATRIX_BYTES, Attention, expected_backend, matrix_bytes
from penstock.trainer.errors import NoAttentionKernel
from penstock.trainer.learner.attention import backends, capped_scores, cpu_flash, cuda_flash
from penstock.trainer.learner.attention.backends import DenseMask, Flex, Sdpa
from penstock.trainer.learner.attention.cpu_flash import CpuFlash
from penstock.trainer.learner.attention.cuda_flash import CudaFlash
from penstock.trainer.learner.attention.models import head_sizes
from penstock.trainer.learner.attention.variant import PLAIN, Variant


def _given(layout: Layout, dtype: torch.dtype = torch.float32, variant: Variant = PLAIN) -> list[Tensor]:
    draw = torch.Generator().manual_seed(layout.num_tokens)
    sizes = [(1, heads, layout.num_tokens, 8) for heads in (4, 2, 2)]
    given = [torch.randn(size, generator=draw) for size in sizes]
    return [held.to(dtype).requires_grad_() for held in (*given, *([] if variant.sinks is None else [variant.sinks]))]


def _results(attend: Any, given: list[Tensor], layout: Layout, variant: Variant = PLAIN) -> list[Tensor]:
    out = attend(*given[:3], layout, 0.6, replace(variant, sinks=given[3] if len(given) > 3 else None))
    gradients = torch.autograd.grad((out.double() * torch.arange(8).sin()).sum(), given)
    return [held.detach().double() for held in (out, *gradients)]


windows = st.sampled_from([None, 1, 2, 3, 5, 9])
sinks = st.sampled_from([None, torch.tensor([-3.0, 0.0, 0.5, 2.0])])
variants = st.builds(Variant, windows, st.sampled_from([None, 0.7]), sinks)


def _assert_exact(attend: Any, layout: Layout, variant: Variant) -> None:
    given = _given(layout, variant=variant)
    found, true = (_results(some, given, layout, variant) for some in (attend, DenseMask().attend))
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize(("small_tree", "short_node"), [(10**9, 10**9), (0, 10**9), (0, 0), (30, 5)])
@examples(12)
@given(drawn=trees(), variant=variants, band=st.sampled_from([3, 128]))
def test_the_flash_kernel_of_the_cpu_equals_the_definition(
    drawn: Any, variant: Variant, band: int, small_tree: int, short_node: int
) -> None:
    """As masked trees, as batches of short nodes, node by node, and mixed; windows in bands of queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_flash, "_SMALL_TREE", small_tree)
        patch.setattr(cpu_flash, "_SHORT_NODE", short_node)
        patch.setattr(cpu_flash, "_BAND_QUERIES", band)
        patch.setattr(capped_scores, "_QUERIES", band)
        _assert_exact(CpuFlash().attend, pack(*drawn).layout, variant)


@examples(12)
@given(drawn=trees(), window=windows)
def test_the_definition_equals_every_row_alone(drawn: Any, window: int | None) -> None:
    """A window counts places in the row, not in the stream: a prompt is near to each of its answers."""
    packed = pack(*drawn)
    query, key, value = (held.detach() for held in _given(packed.layout))
    found = DenseMask().attend(query, key, value, packed.layout, 0.6, Variant(window))
    for where in map(torch.from_numpy, packed.positions):
        places = torch.arange(len(where))
        distances = places[:, None] - places
        mask = (distances >= 0) & (distances < (window or len(where)))
        row = [held[:, :, where] for held in (query, key, value)]
        alone = torch.nn.functional.scaled_dot_product_attention(*row, attn_mask=mask, scale=0.6, enable_gqa=True)
        torch.testing.assert_close(found[:, :, where], alone, rtol=1e-4, atol=3e-6)


@examples(12)
@given(drawn=trees(), window=windows, sinks=sinks, copies=st.sampled_from([1, 4]))
def test_the_parts_and_merging_for_cuda_equal_the_definition(
    drawn: Any, window: int | None, sinks: Tensor | None, copies: int
) -> None:
    """With the kernels' arithmetic in place of kernels, which need a GPU: a call for nodes, one per level of links."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_flash, "_MOST_COPIES", copies)
        patch.setattr(cuda_flash, "_cuda_kernel", varlen)
        patch.setattr(cuda_flash, "_cuda_kernel_backward", varlen_backward)
        _assert_exact(CudaFlash().attend, pack(*drawn).layout, Variant(window, None, sinks))


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


@examples(12)
@given(drawn=trees(), window=windows, band=st.sampled_from([3, 1024]))
def test_torch_s_own_attention_for_each_node_equals_the_definition(drawn: Any, window: int | None, band: int) -> None:
    """With a causal bias that is aligned to the lower right where a node continues others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_BAND_QUERIES", band)
        _assert_exact(Sdpa().attend, pack(*drawn).layout, Variant(window))


@examples(8)
@given(drawn=trees(), variant=variants)
def test_the_mask_and_the_blocks_of_flex_attention_equal_the_definition(drawn: Any, variant: Variant) -> None:
    """Not compiled, and without gradients, which a CPU has not: its mask, and the tables of the mask's blocks."""
    layout = pack(*drawn).layout
    query, key, value = (held.detach() for held in _given(layout))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "BLOCK", 8)
        patch.setattr(backends, "_compiled", lambda: backends.flex_attention)
        found = Flex().attend(query, key, value, layout, 0.6, variant)
        mixed, full = backends.block_tables(layout, variant.window)
        kept = backends.block_mask(layout, torch.device("cpu"), variant.window)
    torch.testing.assert_close(found, DenseMask().attend(query, key, value, layout, 0.6, variant), rtol=1e-4, atol=3e-6)
    mask = layout.mask(variant.window)
    for q in range(len(full)):
        for k in range(len(full)):
            block = mask[q * 8 : q * 8 + 8, k * 8 : k * 8 + 8]
            is_full = bool(block.all()) and q != k  # a block of one token is computed with its mask
            if variant.window is None:
                assert (bool(full[q, k]), bool(mixed[q, k])) == (is_full, bool(block.any()) and not is_full)
            else:  # one that is called mixed is computed with its mask
                assert (full[q, k] <= is_full, full[q, k] | mixed[q, k] >= block.any()) == (True, True)
            assert int(full[q].sum()) == int(kept.full_kv_num_blocks[0, 0, q])  # type: ignore[index]
            assert int(mixed[q].sum()) == int(kept.kv_num_blocks[0, 0, q])


@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_exact_kernels_are_used_at_the_head_sizes_and_ratios_that_people_train(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3, Llama 3 and Mistral have heads of 128, Gemma of 256; up to 16 query heads share a key head."""
    monkeypatch.setattr(cuda_flash, "_activate", lambda implementation: None)
    monkeypatch.setattr(cuda_flash, "_cuda_kernel", varlen)
    monkeypatch.setattr(cuda_flash, "_cuda_kernel_backward", varlen_backward)
    query = torch.empty(1, 1, 1, size, dtype=dtype)
    added = (PLAIN, Variant(512), Variant(128, None, torch.zeros(1)), Variant(512, 50.0))
    for ratio in (1, 7, 16) if (size, dtype) == (128, torch.bfloat16) else (2,):
        for backend in (CudaFlash(), CpuFlash(), Sdpa()):
            for variant in added if size in (64, 128, 256) and ratio in (2, 7) else added[:1]:
                reason = backend.supports(query, query, variant)
                if reason is None or (isinstance(backend, CudaFlash) and variant.softcap is None):
                    reason = backends.why_not_exact(backend, query, query, ratio, variant)
                    assert reason is None, (backend.name, variant, reason)


class _Faulty(CpuFlash):
    """A kernel of which something is wrong: what it is given, or the gradient."""

    name = "flash"

    def __init__(self, change: Callable[..., tuple[Tensor, Tensor, Tensor, Layout, float]]) -> None:
        self._change = change

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, variant: Variant = PLAIN
    ) -> Tensor:
        return super().attend(*self._change(query, key, value, layout, scale), variant)


def _one_row(layout: Layout) -> Layout:
    return Layout((layout.nodes[0]._replace(end=layout.num_tokens, subtree_end=layout.num_tokens),), layout.depths)


def _rough(query: Tensor) -> Tensor:
    """Return queries whose gradients go through float8, as in a kernel that keeps too few digits; values are exact."""
    rough = query.clone()
    rough.register_hook(lambda grad: grad.to(torch.float8_e4m3fn).to(grad.dtype))
    return rough


def _fails(error: Exception) -> Any:
    raise error


_MIXES_ROWS = _Faulty(lambda query, key, value, layout, scale: (query, key, value, _one_row(layout), scale))
FAULTS = {
    "rows attend to one another": _MIXES_ROWS,
    "a scale 5 % off": _Faulty(lambda query, key, value, layout, scale: (query, key, value, layout, scale * 1.05)),
    "key heads mixed up": _Faulty(
        lambda query, key, value, layout, scale: (query, key.flip(1), value.flip(1), layout, scale)
    ),
    "rough gradients": _Faulty(lambda query, key, value, layout, scale: (_rough(query), key, value, layout, scale)),
    "no kernel": _Faulty(lambda *_: _fails(RuntimeError("no kernel for this"))),
}


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_backend_that_fails_or_is_not_exact_is_refused_at_every_head_size(fault: str, size: int) -> None:
    query = torch.empty(1, 1, 1, size, dtype=torch.bfloat16)
    reason = backends.why_not_exact(FAULTS[fault], query, query, 4)
    assert reason is not None
    assert ("no kernel for this" in reason) == (fault == "no kernel")
    if fault == "no kernel":  # the control, once a size
        assert backends.why_not_exact(CpuFlash(), query, query, 4) is None


def test_the_comparison_reports_a_device_without_memory_as_such() -> None:
    query, full = torch.empty(1, 1, 1, 16), _Faulty(lambda *_: _fails(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        backends.why_not_exact(full, query, query, 1)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_choice", backends._Choice())


def _heads(count: int, size: int = 128, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(1, count, 1, size, dtype=dtype)


@pytest.mark.usefixtures("fresh")
def test_without_a_kernel_only_small_matrices_are_computed_by_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 256 MB the error has each backend's reason, the size and the ways out."""
    monkeypatch.setattr(backends, "BACKENDS", (_MIXES_ROWS, CudaFlash()))
    query, key = _heads(32), _heads(8)
    assert backends.choose(query, key, key, 1024).name == "dense"
    assert matrix_bytes(32, 1024) <= MAX_MATRIX_BYTES < matrix_bytes(32, 16_384)
    with pytest.raises(NoAttentionKernel) as refused:
        backends.choose(query, key, key, 16_384)
    for words in (
        "32 heads of 128 dimensions in bfloat16 on cpu",
        "flash: it is not exact",
        "flash: it needs a GPU",
        "34.4 GB",
    ):
        assert words in str(refused.value)
    for words in ("16,384 tokens", "trainer.micro_batch_tokens", 'trainer.attention = "dense"'):
        assert words in str(refused.value)


@pytest.mark.usefixtures("fresh")
def test_a_backend_that_is_named_is_used_or_refused_and_nothing_takes_its_place() -> None:
    query = _heads(32)
    for name in ("cpu-flash", "sdpa", "dense"):
        backends.use(name)
        assert backends.choose(query, query, query, 10**6).name == name
    for name in ("flash", "flash-3", "flash-4", "flex"):
        backends.use(name)
        with pytest.raises(NoAttentionKernel, match=f"trainer.attention = {name} cannot be used for 32 heads of 128"):
            backends.choose(query, query, query, 16)
    backends.use("auto")
    assert backends.choose(query, query, query, 10**6).name == "cpu-flash"


def test_every_backend_can_be_named_and_the_expected_one_is_one_of_them() -> None:
    """`penstock plan` says without torch what the trainer will choose."""
    assert {"auto", "dense", *(backend.name for backend in backends.BACKENDS)} == set(get_args(Attention))
    for size in (16, 64, 96, 128, 256):
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
            here = backends.choose(_heads(4, size, dtype), _heads(2, size, dtype), _heads(2, size, dtype), 10**5).name
            assert expected_backend("auto", device="cpu", dtype=name, head_size=size) == here
            on_gpu = "flash" if name == "bfloat16" else "sdpa"
            assert expected_backend("auto", device="cuda", dtype=name, head_size=size) == on_gpu
    assert expected_backend("auto", device="cuda", dtype="bfloat16", head_size=512) == "sdpa"
    assert expected_backend("flash", device="cuda", dtype="float32", head_size=128) is None
    assert expected_backend("flash", device="cpu", dtype="bfloat16", head_size=128) is None
    assert expected_backend("dense", device="cuda", dtype="float32", head_size=512) == "dense"


def test_the_kernels_for_cuda_take_the_arguments_that_they_are_given() -> None:
    """On torch's meta device: shapes, with fewer key heads and different numbers of queries and keys."""
    bounds = torch.tensor([0, 3, 10], dtype=torch.int32, device="meta")
    query = torch.empty(10, 8, 128, dtype=torch.bfloat16, device="meta")
    key = torch.empty(14, 2, 128, dtype=torch.bfloat16, device="meta")
    for window in (cuda_flash._CAUSAL, cuda_flash._FULL, (511, 0)):
        part = cuda_flash._CudaPart(slice(None), slice(None), bounds, bounds, 7, 9, window)
        out, lse = cuda_flash._cuda_kernel(query, key, key, part, 0.1)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (query.shape, query.dtype, (8, 10), torch.float32)
        found = cuda_flash._cuda_kernel_backward(out, query, key, key, out, lse, part, 0.1)
        assert [held.shape for held in found] == [query.shape, key.shape, key.shape]


def test_head_sizes_are_read_from_the_configs_of_the_families() -> None:
    """Given, derived from the width, and of multi-head latent attention."""
    from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

    qwen3 = Qwen3Config(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    assert head_sizes(qwen3) == (16, 8, 128, 128)
    assert head_sizes(LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)) == (32, 8, 128, 128)
    latent = DeepseekV3Config(num_attention_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert head_sizes(latent) == (16, 16, 192, 128)


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
    """Float32, float64 and bfloat16 use the flash kernel; heads of values that are wider torch's own function."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        query = torch.zeros(1, 4, 2, 16, dtype=dtype)
        assert backends.choose(query, query, query, 10**5).name == "cpu-flash"
    wide = torch.zeros(1, 4, 2, 24, dtype=torch.bfloat16)
    assert backends.choose(query, query, wide, 10**5).name == "sdpa"


def test_memory_grows_with_the_tokens_and_not_with_their_square() -> None:
    """Of a prompt of any length with eight answers, nothing that is kept between calls has tokens² elements."""
    for size in (1000, 4000):
        rows = [np.append(np.zeros(size), np.full(100, n + 1)).astype(np.int32) for n in range(8)]
        layout = pack(rows, [size] * 8).layout
        parts = cpu_flash._cpu_parts(layout, torch.float32)
        kept = [batch.mask for batch in parts.batches if batch.mask is not None]
        assert (len(parts.spans), len(parts.links), kept) == (9, 1, [])
        bands = cpu_flash._cpu_parts(layout, torch.float32, 512).bands
        assert max(mask.numel() for _, mask in bands if mask is not None) < 128 * (128 + 512)
        assert sum(end - start for band, _ in bands for start, end in band.keys) < layout.num_tokens * (1 + 512 / 100)


@pytest.mark.usefixtures("fresh")
def test_the_first_call_may_come_from_a_checkpointed_layer() -> None:
    """The comparison with the definition, gradients included, does not make the layer compute again."""
    layout = pack([np.arange(9, dtype=np.int32)], [4]).layout
    given, calls = _given(layout), []

    def layer(query: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return backends.attend(query.sin(), given[1], given[2], layout, 0.6)

    out = checkpoint(layer, given[0], use_reentrant=False)
    assert len(calls) == 1
    out.sum().backward()
    assert len(calls) == 2
    ((used, _),) = backends._choice.checked.values()
    assert used is not None
    assert used.name == CpuFlash.name
