"""What single policy losses do to single tokens; `test_every_preset.py` has what holds for every loss and any batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from tests.examples import examples
from tests.trainer.algorithm.tokens import lengths, sample, seeds

from penstock.trainer.algorithm.losses.covariance import clip_cov
from penstock.trainer.algorithm.losses.gspo import gspo, gspo_token, luspo
from penstock.trainer.algorithm.losses.interface import Loss
from penstock.trainer.algorithm.losses.ppo_clip import ppo_clip
from penstock.trainer.algorithm.losses.product_clip import product_clip
from penstock.trainer.algorithm.losses.tokens import Sequences, Tokens

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def test_clip_cov_draws_the_same_tokens_in_every_run() -> None:
    """The draw depends on the batch and on no random state of the process, so that a replay computes the same."""
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        given_ = sample([9, 9, 9], 3)
        loss = clip_cov.bind(clip_cov_share=0.1, clip_cov_low=-1.0)(given_.tokens)
        drawn.append(loss.clipped)
    assert drawn[0].any()
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("loss", [product_clip, luspo])
@examples(8)
@given(rows=lengths, seed=seeds)
def test_on_policy_losses_of_whole_sequences_are_the_plain_policy_gradient(
    loss: Loss[Any], rows: list[int], seed: int
) -> None:
    """Their gradient reaches every token of the sequence, whose loss is counted once."""
    given_ = sample(rows, seed, stale=False)
    once = given_.sequences.spread(given_.sequences.lengths(given_.current).clamp(min=1.0))
    (loss(given_.tokens, **CLIP).loss / once).sum().backward()
    torch.testing.assert_close(given_.current.grad, -given_.advantages)


def _tokens(ratio: list[float], advantages: list[float]) -> Tokens:
    """One sequence whose tokens have these ratios to an anchor of probability e^-3."""
    anchor = torch.full((len(ratio),), -3.0, dtype=torch.float64)
    current = (anchor + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
    credit = torch.tensor(advantages, dtype=torch.float64)
    return Tokens(current, anchor, anchor, credit, Sequences.of_lengths(torch.tensor([len(ratio)])))


def test_token_truncation_caps_the_weight_in_the_gradient() -> None:
    """A failed token that became five times likelier pushes with weight 2, not 5, under a cap of 2."""
    tokens = _tokens([5.0, 0.9], [-1.0, -1.0])
    ppo_clip(tokens, clip_low=0.2, clip_high=0.2, token_tis_cap=2.0).loss.sum().backward()
    torch.testing.assert_close(tokens.current.grad, torch.tensor([2.0, 0.9], dtype=torch.float64))


def test_the_two_clips_are_counted_separately() -> None:
    # ratio: 1.5, A>0: clip; 1.5, A<0: dual 1.2; 0.5, A<0: clip; 0.5, A>0: free; 1.1: free
    tokens = _tokens([1.5, 1.5, 0.5, 0.5, 1.1], [1.0, -1.0, -1.0, 1.0, -1.0])
    terms = ppo_clip(tokens, clip_low=0.2, clip_high=0.2, dual_clip=1.2)
    terms.loss.sum().backward()
    assert terms.clipped.tolist() == [True, False, True, False, False]
    assert terms.dual_clipped.tolist() == [False, True, False, False, False]
    torch.testing.assert_close(tokens.current.grad, torch.tensor([0.0, 0.0, 0.0, -0.5, 1.1], dtype=torch.float64))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "log_ratios", [[0.1, -0.05, 0.3], [800.0], [800.0, 0.0], [-800.0, 1.0], [20.0, 25.0], [30.0] * 3]
)
def test_gspo_token_equals_gspo_for_one_advantage_per_sequence(log_ratios: list[float], advantage: float) -> None:
    """Also where log-ratios are beyond the limit of ±20, which a record without the key did not know."""
    grads = []
    for loss in (
        partial(gspo, **CLIP),
        partial(gspo_token, **CLIP),
        partial(gspo_token, **CLIP, gspo_token_limit=False),
    ):
        tokens = _tokens([1.0] * len(log_ratios), [advantage] * len(log_ratios))
        current = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
        tokens = replace(tokens, current=current, anchor=torch.zeros_like(current), behaviour=torch.zeros_like(current))
        loss(tokens).loss.sum().backward()
        grads.append(current.grad)
    torch.testing.assert_close(grads[0], grads[1])
    if max(map(abs, log_ratios)) < 20.0:
        torch.testing.assert_close(grads[1], grads[2])
