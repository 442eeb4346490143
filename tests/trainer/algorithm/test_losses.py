"""Properties of every policy loss for any data: finite, correct on-policy, independent of how the batch is split."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.trainer.algorithm.tokens import lengths, sample, seeds

from penstock.trainer.algorithm.chosen_parts import LOSSES as REGISTRY
from penstock.trainer.algorithm.losses.ce_gppo import ce_gppo
from penstock.trainer.algorithm.losses.cispo import cispo
from penstock.trainer.algorithm.losses.covariance import clip_cov
from penstock.trainer.algorithm.losses.double_sided import double_sided
from penstock.trainer.algorithm.losses.dppo import dppo_kl, dppo_tv, dppo_tv_ratio
from penstock.trainer.algorithm.losses.dro import dro
from penstock.trainer.algorithm.losses.gmpo import gmpo
from penstock.trainer.algorithm.losses.gspo import gspo, gspo_token, luspo
from penstock.trainer.algorithm.losses.minirl import minirl
from penstock.trainer.algorithm.losses.ppo_clip import ppo_clip
from penstock.trainer.algorithm.losses.product_clip import product_clip
from penstock.trainer.algorithm.losses.reinforce import reinforce
from penstock.trainer.algorithm.losses.sapo import sapo
from penstock.trainer.algorithm.losses.tokens import PolicyLoss, Sequences, Tokens
from penstock.trainer.algorithm.losses.topr import topr, topr_token
from penstock.trainer.algorithm.losses.turn_ratio import turn_ratio
from penstock.trainer.algorithm.losses.vespo import vespo

CLIP = {"clip_low": 0.2, "clip_high": 0.28}

# Losses that look at one sequence at a time; clip_cov and kl_cov look at the whole batch by definition.
LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": partial(ppo_clip, **CLIP),
    "ppo_clip dual": partial(ppo_clip, **CLIP, dual_clip=1.5, token_tis_cap=2.0),
    "ce_gppo": partial(ce_gppo, **CLIP, beta_low=0.75, beta_high=1.0),
    "sapo": partial(sapo, tau_positive=1.0, tau_negative=1.05),
    "dppo tv": partial(dppo_tv, clip_low=0.2, clip_high=0.2, weight_cap=20.0),
    "dppo kl": partial(dppo_kl, clip_low=0.05, clip_high=0.05, weight_cap=20.0),
    "dppo_tv_ratio": partial(dppo_tv_ratio, clip_low=0.2, clip_high=0.2, tv_drift=1e-3),
    "gspo": partial(gspo, **CLIP),
    "gspo dual": partial(gspo, **CLIP, dual_clip=1.5),
    "gspo_token": partial(gspo_token, **CLIP),
    "turn_ratio": partial(turn_ratio, **CLIP),
    "gmpo": partial(gmpo, clip_low=0.4, clip_high=0.4),
    "reinforce": reinforce,
    "cispo": partial(cispo, weight_cap=4.0),
    "minirl": partial(minirl, clip_low=0.2, clip_high=0.27, weight_cap=5.0),
    "topr_token": topr_token,
    "double_sided": partial(double_sided, **CLIP),
    "dro": partial(dro, dro_beta=0.1),
    "vespo": vespo.bind(),
}
# Their value for a sequence is one number, repeated for each of its tokens: the gradient is correct per sequence.
BY_SEQUENCE: dict[str, PolicyLoss] = {
    "topr": topr,
    "product_clip": partial(product_clip, **CLIP),
    "luspo": partial(luspo, **CLIP),
}
ALL = LOSSES | BY_SEQUENCE


def test_every_registered_loss_is_held_to_these_properties() -> None:
    """All but the two that look at a whole micro-batch by definition."""
    covered = {name.partition(" dual")[0].replace(" ", "_") for name in ALL}
    assert set(REGISTRY.built_in) - covered == {"clip_cov", "kl_cov"}


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


@pytest.mark.parametrize("name", ALL)
@examples(8)
@given(rows=lengths, seed=seeds, spread=st.sampled_from([0.0, 0.3, 5.0, 400.0]))
def test_any_input_gives_finite_losses_and_gradients(name: str, rows: list[int], seed: int, spread: float) -> None:
    """One-token rows, rows without tokens and extreme ratios give neither infinity nor NaN."""
    given_ = sample(rows, seed, spread=spread)
    terms = ALL[name](given_.tokens)
    terms.loss.sum().backward()
    assert torch.isfinite(terms.loss).all()
    assert torch.isfinite(terms.ratio).all()
    assert given_.current.grad is not None
    assert torch.isfinite(given_.current.grad).all()


@pytest.mark.parametrize("name", LOSSES)
@examples(8)
@given(rows=lengths, seed=seeds)
def test_on_policy_every_loss_has_the_gradient_of_the_plain_policy_gradient(
    name: str, rows: list[int], seed: int
) -> None:
    """Where current, anchor and behaviour are equal, the gradient of a token is minus its advantage."""
    given_ = sample(rows, seed, stale=False)
    LOSSES[name](given_.tokens).loss.sum().backward()
    torch.testing.assert_close(given_.current.grad, -given_.advantages)


@pytest.mark.parametrize("name", BY_SEQUENCE)
@examples(8)
@given(rows=lengths, seed=seeds)
def test_on_policy_losses_of_whole_sequences_have_it_too(name: str, rows: list[int], seed: int) -> None:
    """The product's gradient reaches every token of the sequence, whose loss is counted once."""
    given_ = sample(rows, seed, stale=False)
    once = given_.sequences.spread(given_.sequences.lengths(given_.current).clamp(min=1.0))
    weights = 1.0 / once if name in ("product_clip", "luspo") else torch.ones_like(once)
    (BY_SEQUENCE[name](given_.tokens).loss * weights).sum().backward()
    torch.testing.assert_close(given_.current.grad, -given_.advantages)


@pytest.mark.parametrize("name", ALL)
@examples(8)
@given(rows=lengths, seed=seeds, cut=st.integers(0, 6), order=st.randoms(use_true_random=False))
def test_splitting_and_permuting_sequences_changes_nothing(
    name: str, rows: list[int], seed: int, cut: int, order: object
) -> None:
    """A batch in one micro-batch, in two, or in another order has the same loss and gradient for every token."""
    whole = sample(rows, seed)
    terms = ALL[name](whole.tokens)
    terms.loss.sum().backward()
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    loss, grad = torch.zeros_like(terms.loss), torch.zeros_like(terms.loss)
    for part in (shuffled[:cut], shuffled[cut:]):
        places = torch.cat(
            [torch.nonzero(whole.sequences.index == s).flatten() for s in part] or [torch.empty(0).long()]
        )
        leaf = whole.current.detach()[places].requires_grad_()
        sequences = Sequences.of_lengths(torch.tensor([rows[s] for s in part], dtype=torch.int64))
        again = ALL[name](
            Tokens(leaf, whole.anchor[places], whole.behaviour[places], whole.advantages[places], sequences)
        )
        again.loss.sum().backward()
        loss[places], grad[places] = again.loss.detach(), leaf.grad if leaf.grad is not None else 0.0
    torch.testing.assert_close(loss, terms.loss.detach())
    torch.testing.assert_close(grad, whole.current.grad)


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


def test_ce_gppo_without_betas_has_the_gradient_of_ppo() -> None:
    """With both betas 0 the clipped tokens lose their gradient, as under the plain clip."""
    ratio, advantages = [1.5, 0.5, 1.1, 0.9], [1.0, -1.0, 1.0, -1.0]
    ours, plain = _tokens(ratio, advantages), _tokens(ratio, advantages)
    ce_gppo(ours, clip_low=0.2, clip_high=0.2, beta_low=0.0, beta_high=0.0).loss.sum().backward()
    ppo_clip(plain, clip_low=0.2, clip_high=0.2).loss.sum().backward()
    torch.testing.assert_close(ours.current.grad, plain.current.grad)


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
