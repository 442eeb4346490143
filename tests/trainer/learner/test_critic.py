"""Values and advantages by token are finite, and the same for any layout, micro-batches and ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.trainer.learner.tiny import VOCABULARY, qwen3

from penstock.trainer.algorithm.batch import MicroBatch, Row, build
from penstock.trainer.learner.critic import TokenCredit, ValueScorer, ValueTargets, value_figures


def _row(prompt: int, completion: int, reward: float, *, hole: bool = False) -> Row:
    tokens = np.arange(1, prompt + completion + 1, dtype=np.int32) % VOCABULARY
    mask = np.arange(len(tokens)) >= prompt
    if hole and completion > 2:
        mask[prompt + 1] = False
    return Row(tokens, mask, np.zeros(len(tokens), np.float32), reward, 0.1)


def _values(some: MicroBatch, seed: int = 0) -> torch.Tensor:
    """Return values that depend on a token's place in its row and the row's reward only."""
    place = some.sequences.place().float()
    return torch.sin(place * 1.7 + some.advantages * 3.0 + seed)


rows = st.lists(
    st.builds(
        _row,
        prompt=st.integers(1, 5),
        completion=st.integers(1, 6),
        reward=st.sampled_from([0.0, 1.0, -0.5, 0.25]),
        hole=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)
rules = st.builds(
    TokenCredit,
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    whiten=st.booleans(),
    whiten_rewards=st.booleans(),
    clip=st.sampled_from([None, 0.5]),
)


def _rewards_by_hand(some: list[Row], *, whiten: bool) -> list[list[float]]:
    """Every sampled token's reward: 0 except at the last, or that whitened over all tokens of the batch."""
    plain = [[0.0] * (int(row.loss_mask.sum()) - 1) + [row.advantage] for row in some]
    every = torch.tensor([reward for one in plain for reward in one], dtype=torch.float64)
    if not whiten:
        return plain
    spread = float(every.var()) if len(every) > 1 else 0.0
    mean = float(every.mean())
    return [[(r - mean) / (spread + 1e-8) ** 0.5 if spread > 1e-12 else 0.0 for r in one] for one in plain]


def _by_hand(rewards: list[float], values: list[float], rule: TokenCredit) -> tuple[list[float], list[float]]:
    """GAE in plain Python, over the sampled tokens of one row."""
    advantages, following, running = [0.0] * len(values), 0.0, 0.0
    for place in reversed(range(len(values))):
        running = rewards[place] + rule.gamma * following - values[place] + rule.gamma * rule.lam * running
        advantages[place], following = running, values[place]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@given(rows, rules)
@examples(60)
def test_advantages_are_those_of_a_loop_over_tokens(some: list[Row], rule: TokenCredit) -> None:
    """GAE skips tool output, rewards the last sampled token, and whitens over all tokens of the batch."""
    whole = build(some)
    values = _values(whole)
    found = rule([whole], [values])
    expected, returns = [], []
    for number, rewards in enumerate(_rewards_by_hand(some, whiten=rule.whiten_rewards)):
        mine = values[whole.sequence == number].tolist()
        advantages, targets = _by_hand(rewards, mine, rule)
        expected += advantages
        returns += targets
    wanted = torch.tensor(expected, dtype=torch.float64)
    if rule.whiten:
        spread = float(wanted.var()) if len(wanted) > 1 else 0.0
        wanted = (wanted - wanted.mean()) / (spread + 1e-8) ** 0.5 if spread > 1e-10 else wanted * 0
    if rule.clip is not None:
        wanted = wanted.clamp(-rule.clip, rule.clip)
    torch.testing.assert_close(found.micro_batches[0].advantages.double(), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.targets[0].returns, torch.tensor(returns), rtol=1e-3, atol=1e-3)
    assert found.targets[0].weight == pytest.approx(1 / len(wanted))
    assert torch.isfinite(found.micro_batches[0].advantages).all()


@given(rows, rules, st.integers(0, 8))
@examples(40)
def test_micro_batches_change_nothing(some: list[Row], rule: TokenCredit, cut: int) -> None:
    """One micro-batch or two, of which one may be empty, give the same advantages, targets and figures."""
    whole, pieces = build(some), [build(some[:cut]), build(some[cut:])]
    together = rule([whole], [_values(whole)])
    apart = rule(pieces, [_values(piece) for piece in pieces])
    joined = torch.cat([piece.advantages for piece in apart.micro_batches])
    torch.testing.assert_close(joined, together.micro_batches[0].advantages, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([t.returns for t in apart.targets]), together.targets[0].returns)
    assert apart.figures == pytest.approx(together.figures, rel=1e-4, abs=1e-5)


def test_a_critic_of_zeros_credits_every_token_with_the_reward() -> None:
    some = build([_row(3, 4, 1.0), _row(3, 1, -0.5)])
    found = TokenCredit(gamma=1.0, lam=1.0, whiten=False)([some], [torch.zeros(5)])
    assert found.micro_batches[0].advantages.tolist() == [1.0, 1.0, 1.0, 1.0, -0.5]


def test_a_kl_in_the_reward_is_subtracted_token_by_token() -> None:
    some = build([_row(3, 3, 1.0)])
    some = replace(some, reference_logprobs=torch.tensor([-0.5, 0.0, -2.0]))
    found = TokenCredit(gamma=1.0, lam=1.0, whiten=False)([some], [torch.zeros(3)], kl_coefficient=0.1)
    assert found.micro_batches[0].advantages.tolist() == pytest.approx([1.0 - 0.25, 1.0 - 0.2, 1.0 - 0.2])
    with pytest.raises(ValueError, match="the micro-batch carries none"):
        TokenCredit()([build([_row(3, 3, 1.0)])], [torch.zeros(3)], kl_coefficient=0.1)
    exact = replace(some, reference_logprobs=None, reference_kl=torch.tensor([0.5, 0.0, 1.0]))
    found = TokenCredit(gamma=1.0, lam=1.0, whiten=False, kl_form="full")([exact], [torch.zeros(3)], kl_coefficient=0.1)
    assert found.micro_batches[0].advantages.tolist() == pytest.approx([1.0 - 0.15, 1.0 - 0.1, 1.0 - 0.1])


def test_a_batch_without_differences_or_tokens_is_finite() -> None:
    """One token, equal rewards, or an empty batch give advantages of 0, not NaN."""
    for some in ([_row(2, 1, 1.0)], [_row(2, 2, 0.5)] * 3, []):
        whole = build(some)
        found = TokenCredit(lam=1.0)([whole], [torch.zeros(len(whole.targets))])
        assert found.micro_batches[0].advantages.tolist() == [0.0] * len(whole.targets)
        assert all(np.isfinite(value) for value in found.figures.values())


def test_explained_variance_equals_its_definition() -> None:
    """It is 1 for exact values, 0 for the mean, and below 0 for values of the wrong sign."""
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    cases = {1.0: returns, 0.0: returns.mean().expand(4), -3.0: -returns}
    for wanted, values in cases.items():
        figures = value_figures([ValueTargets(values, returns, 0.25)])
        assert figures["explained_variance"] == pytest.approx(wanted, abs=1e-6)


def _scorer() -> ValueScorer:
    scorer = ValueScorer(qwen3())
    torch.nn.init.normal_(scorer.value_head.weight)
    return scorer


def test_a_shared_prompt_changes_no_value_and_no_gradient() -> None:
    scorer, found = _scorer(), []
    some = [_row(5, 1 + n % 4, 1.0) for n in range(6)]
    for n, row in enumerate(some):
        row.token_ids[5:] = (row.token_ids[5:] * (n + 2)) % VOCABULARY
    assert build(some).input_ids.numel() < sum(len(row.token_ids) - 1 for row in some)
    for pieces in ([some], [[row] for row in some]):
        scorer.zero_grad()
        values = []
        for piece in pieces:
            held = build(piece)
            values.append(
                scorer(held.input_ids, held.predictors, position_ids=held.position_ids, layout=held.layout)
            )  # fmt: skip
            values[-1].square().sum().backward()
        found.append((torch.cat(values).detach(), [p.grad.clone() for p in scorer.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_value_is_of_the_state_before_its_token() -> None:
    scorer, row = _scorer(), _row(3, 4, 1.0)
    before = scorer(build([row]).input_ids, build([row]).predictors).detach()
    row.token_ids[5] = (row.token_ids[5] + 1) % VOCABULARY  # the third sampled token
    after = scorer(build([row]).input_ids, build([row]).predictors).detach()
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3], after[3])
