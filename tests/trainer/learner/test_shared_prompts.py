"""Packed rows that share prefixes have the log-probabilities, entropies and gradients of every row alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import staleness, staleness_tasks
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.trainer.learner.tiny import SHAPE, VOCABULARY, qwen3, row_of
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)

from penstock.trainer.algorithm.batch import Row, build
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.attention import cpu_flash
from penstock.trainer.learner.attention.models import why_not_packed
from penstock.trainer.learner.load_model import switch_off_dropout
from penstock.trainer.learner.logprobs import CompletionScorer, read_batch


def _scorer() -> CompletionScorer:
    return CompletionScorer(qwen3().double(), temperature=1.0)


SCORER = _scorer()


def _results(scorer: CompletionScorer, pieces: list[list[Row]]) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities and entropies of micro-batches, [2, N], and the gradient of a weighted sum of both."""
    scorer.zero_grad()
    found = []
    for piece in pieces:
        micro_batch = build(piece)
        scores = read_batch(scorer, micro_batch, with_entropy=True)
        (scores * micro_batch.weights * torch.tensor([[1.0], [0.3]])).sum().backward()
        found.append(scores.detach())
    return torch.cat(found, dim=1), [p.grad.clone() for p in scorer.parameters() if p.grad is not None]


def _assert_rows_are_apart(scorer: CompletionScorer, rows: list[Row]) -> None:
    """Compare one micro-batch with one row at a time."""
    (packed, gradients), (alone, other_gradients) = _results(scorer, [rows]), _results(scorer, [[row] for row in rows])
    # logits are float32 on purpose, for a model of any dtype
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients, other_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


tokens = st.integers(0, 2)  # few, so that answers often agree and continue one another
turns = st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=9), st.booleans()), min_size=1, max_size=4)


@st.composite
def trees(draw: st.DrawFn) -> list[Row]:
    """Rows of one or more turns, some sampled and some given; a row may continue any part of an earlier one."""
    rows: list[Row] = []
    for number in range(draw(st.integers(1, 6))):
        before = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else None
        kept = draw(st.integers(1, len(before.token_ids))) if before is not None else 1
        ids = [0] if before is None else before.token_ids[:kept].tolist()
        mask = [False] if before is None else before.loss_mask[:kept].tolist()
        for some, is_sampled in draw(turns):
            ids, mask = ids + some, mask + [is_sampled] * len(some)
        length = min(len(ids), 60)
        rows.append(
            Row(
                np.array(ids[:length], dtype=np.int32), np.array(mask[:length]), np.zeros(length, np.float32), 0.5,
                0.1 * number + 0.1,
            )
        )  # fmt: skip
    return rows


@pytest.mark.parametrize("in_parts", [True, False])
@examples(10)
@given(rows=trees())
def test_a_micro_batch_equals_its_rows_one_by_one(rows: list[Row], in_parts: bool) -> None:
    """For trees of rows of several turns, whether small trees are computed by their nodes or as one."""
    with pytest.MonkeyPatch.context() as patch:
        if in_parts:
            patch.setattr(cpu_flash, "_SMALL_TREE", 0)
        _assert_rows_are_apart(SCORER, rows)


def _some_rows() -> list[Row]:
    return [row_of([1, 2, 3, 4, 5][:size], [6, 7, 8, n], 0.5) for size in (5, 3) for n in range(3)]


def _tiny(of: Any, config: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    return of(config(**SHAPE | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | more))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
def test_learned_positions_and_gradient_checkpointing() -> None:
    """GPT-2, whose positions are learned, and layers that are computed again in the backward pass, are exact too."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0, resid_pdrop=0,
        embd_pdrop=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    scorer = CompletionScorer(GPT2LMHeadModel(config).double(), 1.0)
    assert scorer.padding_reason is None
    _assert_rows_are_apart(scorer, _some_rows())
    scorer.language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _assert_rows_are_apart(scorer.train(), _some_rows())


def test_layers_of_other_kinds_are_named() -> None:
    model = _scorer().language_model
    model.config.layer_types = ["linear_attention", "full_attention"]
    assert "has layers of linear_attention" in str(why_not_packed(model))


def test_sinks_that_are_not_those_of_the_heads_are_refused() -> None:
    """As with weights that tensor parallelism cuts and sinks that it does not."""
    model = _tiny(GptOssForCausalLM, GptOssConfig, layer_types=["full_attention"] * 2)
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(UnsupportedModel, match=r"GptOssAttention asks for .* with s_aux = 3 sinks for 4 heads"):
        read_batch(CompletionScorer(model, 1.0), build(_some_rows()))


def test_a_model_whose_attention_is_not_that_of_its_config_is_refused() -> None:
    """Layers that keep the layout from their attention, so that rows attend to one another, or have other windows."""
    scorer = _scorer()
    body, micro_batch = scorer.language_model.base_model, build(_some_rows())
    body.layers[1].forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(UnsupportedModel, match=r"called the attention function 1 times, .* for 2 layers"):
        read_batch(scorer, micro_batch)
    layers = ["sliding_attention", "full_attention"]
    scorer = CompletionScorer(_tiny(MinistralForCausalLM, MinistralConfig, sliding_window=4, layer_types=layers), 1.0)
    read_batch(scorer, micro_batch)
    scorer.language_model.config.sliding_window = 5
    with pytest.raises(UnsupportedModel, match="windows 4 x 1, None x 1, for 2 layers, which have 5 x 1, None x 1"):
        read_batch(scorer, micro_batch)


@pytest.mark.parametrize(("of", "config"), [(SeedOssForCausalLM, SeedOssConfig), (GPT2LMHeadModel, GPT2Config)])
def test_a_model_s_own_dropout_is_off(of: Any, config: Any) -> None:
    """That of Seed-OSS is in functions and that of GPT-2 in modules; its config, which is exported, stays as it was."""
    model = _tiny(of, config, embd_pdrop=0.5, resid_pdrop=0.5, residual_dropout=0.5)
    before, found = model.config.to_dict(), switch_off_dropout(model.train())
    assert 0.5 in found.values()
    ids = torch.arange(8)[None]
    assert torch.equal(model(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert model.config.to_dict() == before


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_the_policy_of_the_staleness_benchmark_equals_llama(
    tmp_path: Path, dtype: torch.dtype, tolerance: float
) -> None:
    """Log-probabilities and gradients of its rows one by one, and of its samples when they are sampled."""
    llama = (
        _tiny(LlamaForCausalLM, LlamaConfig, pad_token_id=None, tie_word_embeddings=True, initializer_range=0.3)
        .to(dtype)
        .float()
    )
    llama.save_pretrained(tmp_path)
    weights, shape = staleness_tasks.read(tmp_path, dtype), staleness_tasks.Shape.of(tmp_path)
    prompts = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 6, 4, 7]])
    generator = torch.Generator().manual_seed(0)
    tokens, sampled, lengths = staleness_tasks.generate(
        weights, prompts, groups=3, longest=6, end=2, shape=shape, generator=generator
    )
    inside = torch.arange(6) < lengths[:, None]
    assert lengths.unique().numel() > 1
    found = staleness_tasks.completion_logprobs(weights, prompts, tokens, inside, shape)
    torch.testing.assert_close(found, sampled[inside], rtol=0.0, atol=tolerance)
    found.sum().backward()
    rows = []
    for row, length in enumerate(lengths.tolist()):
        ids = torch.cat([prompts[row // 3], tokens[row, :length]])
        logprobs = llama(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
        rows.append(logprobs[4:].gather(1, ids[5:, None])[:, 0])
    torch.testing.assert_close(found, torch.cat(rows), rtol=0.0, atol=tolerance)
    torch.cat(rows).sum().backward()
    for name, parameter in llama.named_parameters():
        grad = weights[name].grad
        assert grad is not None
        assert grad.dtype == dtype
        assert (grad.float() - parameter.grad).norm() <= tolerance * parameter.grad.norm(), name


def test_samples_of_the_staleness_benchmark_are_as_old_as_they_say(tmp_path: Path) -> None:
    """Their log-probabilities are those of the weights so many steps ago, the first ones where there are none."""
    task = replace(staleness.TASKS["sort"], prompts=8, group=2, sft_steps=1, sft_batch=2)
    weights, shape, codec = staleness.warm_up(task, 0, tmp_path)
    versions: list[staleness_tasks.Tensors] = []
    for step, batch in enumerate(staleness.batches(task, "mixed3", 0, 6, weights, codec, shape)):
        versions.append({name: weight.detach().clone() for name, weight in weights.items()})
        assert batch.ages.tolist() == [min(age, step) for age in range(4) for _ in range(4)]
        micro, inside = staleness.micro_batch(batch, task.group)
        for age in batch.ages.unique().tolist():
            logprobs = staleness_tasks.completion_logprobs(
                versions[step - age], batch.prompts, batch.tokens, inside, shape
            )
            its = micro.ages == age
            torch.testing.assert_close(logprobs[its], micro.behaviour_logprobs[its], rtol=0.0, atol=1e-5)
        with torch.no_grad():
            for weight in weights.values():
                weight.mul_(1.1)
