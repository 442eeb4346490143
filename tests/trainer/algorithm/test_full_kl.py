"""The KL over the whole vocabulary: exact, with the correct gradient, and never for all tokens in one chunk."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.trainer.learner.tiny import VOCABULARY, qwen3, row_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3ForCausalLM

from penstock.trainer.algorithm.batch import MicroBatch, build
from penstock.trainer.algorithm.losses.reinforce import reinforce
from penstock.trainer.algorithm.objective import KlTerm, PolicyGradient
from penstock.trainer.learner.logprobs import CompletionScorer, read_batch
from penstock.trainer.learner.reference import Reference

POLICY, OTHER = (qwen3(seed, num_hidden_layers=1, initializer_range=0.3) for seed in (0, 1))


class _MostLogits(TorchDispatchMode):
    """Rows of the largest product or softmax over the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten._log_softmax.default) and found.shape[1] == VOCABULARY:
            self.rows = max(self.rows, len(found))
        return found


def _scorers(chunk: int, temperature: float) -> tuple[CompletionScorer, Reference]:
    """Policy and reference that send ``chunk`` tokens through the output head at once."""
    policy = CompletionScorer(copy.deepcopy(POLICY), temperature, max_logits=chunk * VOCABULARY)
    other = CompletionScorer(copy.deepcopy(OTHER), temperature, max_logits=chunk * VOCABULARY)
    return policy, Reference(other, torch.device("cpu"))


def _by_hand(batch: MicroBatch, temperature: float) -> tuple[Tensor, list[Tensor]]:
    """The KL of every sampled token's position from whole tables of logits, and the gradient of its weighted sum."""
    model = copy.deepcopy(POLICY)
    assert batch.layout is not None
    mask = torch.from_numpy(batch.layout.mask())[None, None]

    def table(of: Qwen3ForCausalLM) -> Tensor:
        logits = of(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=mask).logits
        return logits.flatten(0, 1)[batch.predictors].double() / temperature

    mine, theirs = table(model).log_softmax(-1), table(OTHER).detach().log_softmax(-1)
    kl = torch.stack([(m.exp() * (m - t)).sum() for m, t in zip(mine, theirs, strict=True)])
    (kl * batch.weights).sum().backward()
    return kl.detach(), [p.grad.double() for p in model.parameters() if p.grad is not None]


@examples(15)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), chunk=st.integers(1, 9),
    temperature=st.sampled_from([1.0, 0.7]), with_entropy=st.booleans(), same_prompt=st.booleans(),
)  # fmt: skip
def test_in_chunks_it_is_the_sum_over_the_vocabulary_with_its_gradient(
    lengths: list[int], chunk: int, temperature: float, with_entropy: bool, same_prompt: bool
) -> None:
    """For any chunk size, temperature and layout, with entropies or alone; at most one chunk of logits in memory."""
    prompts = [[1, 2, 3, 4] if same_prompt else [n + 1, 2] for n in range(len(lengths))]
    rows = [
        row_of(prompts[n], [(3 * n + k) % VOCABULARY for k in range(size)], 0.1 * n + 0.1)
        for n, size in enumerate(lengths)
    ]
    batch = build(rows)
    policy, reference = _scorers(chunk, temperature)
    with _MostLogits() as most:
        scores = read_batch(policy, batch, with_entropy=with_entropy, kl_to=reference.hidden_states(batch))
        assert len(scores) == 2 + with_entropy
        (scores[-1] * batch.weights).sum().backward()
    expected, gradients = _by_hand(batch, temperature)
    torch.testing.assert_close(scores[-1].detach().double(), expected, rtol=1e-4, atol=1e-6)
    found = [p.grad.double() for p in policy.parameters() if p.grad is not None]
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert most.rows == min(chunk, len(batch.targets))
    plain = read_batch(policy, batch, with_entropy=with_entropy)
    torch.testing.assert_close(torch.atleast_2d(scores)[0], torch.atleast_2d(plain)[0])


def test_in_the_loss_it_counts_with_its_coefficient_and_is_reported() -> None:
    """The loss is the policy gradient's plus coefficient x KL, weighted as any token's; the sum is the KL itself."""
    batch = build([row_of([1, 2], [3, 4, 5], 0.5), row_of([2], [6], 0.25)])
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    kl = torch.tensor([0.1, 0.2, 0.3, 0.4], requires_grad=True)
    term = KlTerm("full", 0.5)
    rule = PolicyGradient(loss=reinforce, kl=term)
    assert (rule.needs_full_kl, rule.needs_reference) == (True, False)
    plain = PolicyGradient(loss=reinforce)(logprobs, batch).loss
    outcome = rule(logprobs, batch, full_kl=kl)
    outcome.loss.backward()
    assert float(outcome.loss.detach() - plain.detach()) == pytest.approx(0.5 * (0.5 * 0.6 + 0.25 * 0.4))
    torch.testing.assert_close(kl.grad, 0.5 * batch.weights)
    assert float(outcome.sums["kl_reference"]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="needs full KL values"):
        rule(logprobs, batch)
