"""A shared prompt gives the same log-probabilities and gradients as repeated prompts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.trainer.algorithm import batch
from penstock.trainer.algorithm.batch import MicroBatch, Row, build
from penstock.trainer.learner.logprobs import CompletionScorer

VOCABULARY = 17


def _scorer() -> CompletionScorer:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    return CompletionScorer(Qwen3ForCausalLM(config).double(), temperature=1.0)


SCORER = _scorer()


def _row(prompt: list[int], completion: list[int], weight: float) -> Row:
    tokens = np.array(prompt + completion, dtype=np.int32)
    return Row(tokens, np.arange(len(tokens)) >= len(prompt), np.zeros(len(tokens), np.float32), 0.5, weight)


def _gradients(micro_batch: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    SCORER.zero_grad()
    logprobs = SCORER(
        micro_batch.input_ids,
        micro_batch.predictors,
        micro_batch.targets,
        position_ids=micro_batch.position_ids,
        attention_mask=micro_batch.attention_mask,
    )
    (logprobs * micro_batch.weights).sum().backward()
    return logprobs.detach(), [p.grad.clone() for p in SCORER.parameters() if p.grad is not None]


tokens = st.integers(0, VOCABULARY - 1)
groups = st.lists(
    st.tuples(
        st.lists(tokens, min_size=1, max_size=9),
        st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=4,
)


@given(groups, st.randoms(use_true_random=False))
@examples(40)
def test_sharing_changes_no_logprob_and_no_gradient(drawn: list, random) -> None:
    """Both layouts agree for any lengths, order of rows, and number of rows per prompt."""
    rows = [_row(prompt, completion, random.random()) for prompt, members in drawn for completion in members]
    random.shuffle(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "MAX_SHARED_RATIO", float("inf"))
        shared = build(rows)
        patch.setattr(batch, "MAX_SHARED_RATIO", 0.0)
        plain = build(rows)
    assert shared.attention_mask is not None
    assert plain.attention_mask is None
    for field in ("targets", "advantages", "weights", "behaviour_logprobs"):
        assert torch.equal(getattr(shared, field), getattr(plain, field))
    (one, one_gradients), (other, other_gradients) = _gradients(shared), _gradients(plain)
    # logits are float32 on purpose, for a model of any dtype
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for a, b in zip(one_gradients, other_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_short_groups_share_their_prompt():
    """Eight completions of one prompt use one row instead of eight, and fewer tokens."""
    rows = [_row(list(range(9)), [1, 2, 3, n], 1.0) for n in range(8)]
    micro_batch = build(rows)
    assert micro_batch.input_ids.shape == (1, 9 + 8 * 3)
    assert micro_batch.predictors[::4].tolist() == [8] * 8  # the prompt's end predicts every first token


def test_prompts_are_not_shared_where_it_does_not_pay():
    """Single rows, rows longer than the mask allows, and rows of several turns are not shared."""
    alone = [_row([n, n + 1, n + 2], [1, 2], 1.0) for n in range(4)]
    long = [_row(list(range(3)), [1] * batch.MAX_SHARED_TOKENS, 1.0) for _ in range(4)]
    holes = [dataclasses.replace(row, loss_mask=np.array([False, True, False, True, True])) for row in alone]
    for rows in (alone, long, holes, []):
        assert build(rows).attention_mask is None


def test_padding_gets_finite_outputs():
    """Padding attends only to itself, and no output is NaN."""
    rows = [_row([1, 2, 3, 4, 5], [1] * (1 + n % 5), 1.0) for n in range(10)]
    rows += [_row([6, 7, 8], [n], 1.0) for n in range(4)]
    micro_batch = build(rows)
    assert micro_batch.attention_mask is not None
    logprobs, gradients = _gradients(micro_batch)
    assert torch.isfinite(logprobs).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
