"""The loss, the advantages and the aggregation against public implementations, outputs and gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.advantages import grpo
from trainer.aggregation import Denominators, sequence_weight
from trainer.losses import ppo_clip

VECTORS = json.loads((Path(__file__).parent.parent / "data" / "loss_conformance.json").read_text())
BASE = {name: torch.tensor(value, dtype=torch.float64) for name, value in VECTORS["inputs"].items()}
MASK = BASE["response_mask"].bool()


def _cases(part: str) -> list:
    return [pytest.param(case, id=case["id"]) for case in VECTORS["cases"] if part in case["id"]]


def _weights(mode: str, batch: Denominators) -> Tensor:
    """One weight for each token of the masked matrix."""
    rows = [sequence_weight(mode, int(n), batch) for n in MASK.sum(1)]
    return (torch.tensor(rows, dtype=torch.float64)[:, None] * MASK)[MASK]


def _denominators(options: dict) -> Denominators:
    return Denominators(
        num_tokens=options.get("batch_num_tokens", int(MASK.sum())),
        num_sequences=options.get("global_batch_size", len(MASK)),
        max_completion_tokens=options.get("loss_scale_factor", MASK.shape[1]),
    )


@pytest.mark.parametrize("case", _cases("verl/agg"))
def test_aggregation_equals_verl(case: dict) -> None:
    """Each mode gives verl's value and gradient, also with denominators that count other ranks' data."""
    options = case["options"]
    losses = BASE[case["inputs"]["loss_mat"]].clone().requires_grad_()
    loss = (losses[MASK] * _weights(options["loss_agg_mode"], _denominators(options))).sum()
    loss = loss * options.get("dp_size", 1)  # verl undoes the averaging over ranks inside; our policy does it outside
    loss.backward()
    torch.testing.assert_close(loss.item(), case["outputs"]["loss"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(losses.grad, torch.tensor(case["grads"]["loss_mat"], dtype=torch.float64))


@pytest.mark.parametrize("case", _cases("/adv/"))
def test_grpo_advantages_equal_verl(case: dict) -> None:
    """Group-relative advantages are verl's, with and without the division by the standard deviation."""
    rewards = BASE["token_level_rewards"].sum(1)
    groups = BASE["group_index"]
    expected = torch.tensor(case["outputs"]["advantages"], dtype=torch.float64)
    for group in groups.unique():
        ours = grpo(rewards[groups == group], normalise_by_std=case["options"]["norm_adv_by_std_in_grpo"])
        torch.testing.assert_close(ours, expected[groups == group], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [*_cases("verl/pg"), *_cases("formula/"), *_cases("openrlhf/")])
def test_clipped_loss_equals_public_implementations(case: dict) -> None:
    """The clipped loss with dual clip has the value and gradient of verl, OpenRLHF and ROLL."""
    options = case["options"]
    current = BASE["log_prob"].clone().requires_grad_()
    eps = options.get("pg_clip", 0.2)
    terms = ppo_clip(
        current[MASK],
        BASE["old_log_prob"][MASK],
        BASE[case["inputs"]["advantages"]][MASK],
        clip_low=options.get("clip_ratio_low", options.get("clip_eps_low", eps)),
        clip_high=options.get("clip_ratio_high", options.get("clip_eps_high", eps)),
        dual_clip=options.get("clip_ratio_c", options.get("dual_clip", 3.0) if "dual" not in options else 1.4),
    )
    loss = (terms.loss * _weights(options.get("loss_agg_mode", "token-mean"), _denominators({}))).sum()
    loss.backward()
    torch.testing.assert_close(loss.item(), case["outputs"]["loss"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(current.grad, torch.tensor(case["grads"]["log_prob"], dtype=torch.float64))


def test_loss_at_the_behaviour_policy_is_the_plain_policy_gradient() -> None:
    """Where current equals behaviour, every option leaves the gradient -A per token."""
    current = torch.tensor([-0.3, -1.2, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, 0.0], dtype=torch.float64)
    ppo_clip(
        current, current.detach(), advantages, clip_low=0.2, clip_high=0.2, dual_clip=1.2, token_tis_cap=2.0
    ).loss.sum().backward()
    assert current.grad is not None
    torch.testing.assert_close(current.grad, -advantages)


def test_token_truncation_caps_the_weight_in_the_gradient() -> None:
    """A failed token that became five times likelier pushes with weight 2, not 5, under a cap of 2."""
    behaviour = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    current = (behaviour + torch.tensor([5.0, 0.9]).log()).requires_grad_()
    advantages = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    terms = ppo_clip(current, behaviour, advantages, clip_low=0.2, clip_high=0.2, token_tis_cap=2.0)
    terms.loss.sum().backward()
    assert current.grad is not None
    torch.testing.assert_close(current.grad, torch.tensor([2.0, 0.9], dtype=torch.float64))


def test_which_clip_applied_is_told_apart() -> None:
    """The clip and the dual clip are counted separately, each only where it took the gradient away."""
    # ratio:                    1.5, A>0: clip   1.5, A<0: dual 1.2   0.5, A<0: clip   0.5, A>0: free   1.1: free
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    current = ratio.log().requires_grad_()
    terms = ppo_clip(
        current, torch.zeros(5, dtype=torch.float64), advantages, clip_low=0.2, clip_high=0.2, dual_clip=1.2
    )
    terms.loss.sum().backward()
    assert terms.clipped.tolist() == [True, False, True, False, False]
    assert terms.dual_clipped.tolist() == [False, True, False, False, False]
    assert current.grad is not None
    torch.testing.assert_close(current.grad, torch.tensor([0.0, 0.0, 0.0, -0.5, 1.1], dtype=torch.float64))


def test_negative_weight_scales_only_negative_advantages() -> None:
    """A negative weight of 0.5 halves the push of failures and leaves successes alone."""
    current = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    ppo_clip(
        current, torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -1.0]),
        clip_low=0.2, clip_high=0.2, negative_weight=0.5,
    ).loss.sum().backward()  # fmt: skip
    assert current.grad is not None
    assert current.grad.tolist() == [-1.0, 0.5]


def test_impossible_tokens_stay_finite() -> None:
    """A token that the behaviour policy called impossible gives neither infinity nor NaN."""
    current = torch.tensor([-0.1, -900.0], requires_grad=True)
    terms = ppo_clip(
        current, torch.tensor([-900.0, -0.1]), torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2, dual_clip=1.2
    )
    terms.loss.sum().backward()
    assert current.grad is not None
    assert torch.isfinite(terms.loss).all()
    assert torch.isfinite(current.grad).all()


finite = st.floats(-1e3, 1e3, allow_nan=False)


@settings(deadline=None, max_examples=60)
@given(rewards=st.lists(finite, min_size=1, max_size=12), shift=finite)
def test_advantages_sum_to_zero_and_ignore_a_shift(rewards: list[float], shift: float) -> None:
    """Advantages of any group are finite, sum to 0 and do not change when every reward moves by the same amount."""
    plain = grpo(torch.tensor(rewards), normalise_by_std=False)
    scaled = grpo(torch.tensor(rewards, dtype=torch.float64))
    assert torch.isfinite(scaled).all()
    assert abs(scaled.sum().item()) < 1e-6
    moved = grpo(torch.tensor(rewards, dtype=torch.float64) + shift, normalise_by_std=False)
    torch.testing.assert_close(plain, moved, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1], [0.0, 0.0], [0.1 + 0.2, 0.3]])
def test_groups_that_teach_nothing_get_zero(rewards: list[float]) -> None:
    """A group of one and a group of equal rewards have advantage 0, exactly."""
    assert grpo(torch.tensor(rewards, dtype=torch.float64)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_splitting_a_batch_changes_no_weight(mode: str) -> None:
    """Weights depend on the whole batch only: parts of it sum to the same loss."""
    batch = _denominators({})
    losses, weights = BASE["advantages_tok"][MASK], _weights(mode, batch)
    parts = sum(((losses * weights)[some]).sum() for some in (slice(0, 31), slice(31, None)))
    torch.testing.assert_close((losses * weights).sum(), parts)
