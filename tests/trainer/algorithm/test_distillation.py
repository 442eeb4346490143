"""Distillation from a teacher: gradients are those of the closed forms, exactly, also on stale samples."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.trainer.algorithm.test_full_kl import OTHER, POLICY
from tests.trainer.learner.tiny import VOCABULARY, row_of
from torch import Tensor

from penstock.protocol.token_annotations import TeacherRow
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import MicroBatch, build
from penstock.trainer.algorithm.kl import kl_from_teacher, kl_full
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.learner.logprobs import CompletionScorer, HiddenStates, read_batch


def _tables(seed: int, *, size: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of a sampler and a teacher, and logits of a policy, for one position."""
    drawn = torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
    return drawn[0].log_softmax(-1), drawn[1].log_softmax(-1), drawn[2].requires_grad_()


def _every_token(sampler: Tensor, teacher: Tensor) -> MicroBatch:
    """A batch with every token once, weighed by its probability under the sampler: sums over it are expectations."""
    size = len(sampler)
    tokens, none = torch.arange(size), torch.zeros(size)
    return MicroBatch(
        input_ids=torch.zeros(1, size, dtype=torch.int64), predictors=tokens, targets=tokens,
        behaviour_logprobs=sampler, advantages=none, weights=sampler.exp(), sequence=tokens, ages=none,
        sft_weights=none, num_sequences=size, teacher_logprobs=teacher,
    )  # fmt: skip


@pytest.mark.parametrize("is_stale", [False, True])
def test_the_reverse_form_has_the_gradient_of_the_kl_to_the_teacher(is_stale: bool) -> None:
    """In expectation over the sampler's tokens: of KL(policy ‖ teacher), whichever policy sampled."""
    sampler, teacher, logits = _tables(1)
    sampler = sampler if is_stale else logits.detach().log_softmax(-1)
    settings = AlgorithmSettings(name="opd", weight_cap=1e6, distill_coefficient=0.5)  # type: ignore[call-arg]
    batch = _every_token(sampler, teacher)
    outcome = build_objective(settings)(logits.log_softmax(-1), batch)
    (found,) = torch.autograd.grad(outcome.loss, logits)
    kl = kl_full(logits, teacher)
    (expected,) = torch.autograd.grad(0.5 * kl, logits)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert float(outcome.sums["kl_teacher"]) == pytest.approx(
        float((logits.detach().log_softmax(-1) - teacher).sum()), 1e-5
    )


def test_beside_a_reward_both_advantages_add_up() -> None:
    """The reward's, which negative weights change, and the teacher's, which they do not; a clip bounds the latter."""
    sampler, teacher, logits = _tables(2)
    batch = replace(_every_token(sampler, teacher), advantages=torch.tensor([1.0, -1.0, 0, 0, 2.0, 0, -3.0]))
    settings = AlgorithmSettings(
        name="cispo",
        weight_cap=1e6,
        negative_weight=0.5,
        distill_coefficient=2.0,
        distill_clip=0.3,  # type: ignore[call-arg]
    )
    logprobs = logits.log_softmax(-1)
    loss = build_objective(settings)(logprobs, batch).loss.detach()
    gap = (teacher - logprobs.detach()).clamp(-0.3, 0.3)
    advantages = torch.tensor([1.0, -0.5, 0, 0, 2.0, 0, -1.5]) + 2.0 * gap
    weights = (logprobs.detach() - sampler).exp() * sampler.exp()
    assert float(loss) == pytest.approx(float(-(weights * advantages * logprobs.detach()).sum()), rel=1e-4)


@examples(30)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 9), data=st.data())
def test_the_forward_form_is_the_kl_over_the_likeliest_tokens_and_the_rest(
    seed: int, size: int, data: st.DataObject
) -> None:
    """With the others as one event; over the whole vocabulary it is the KL itself. Gradients are numbers at every k."""
    k = data.draw(st.integers(1, size))
    _, teacher, logits = _tables(seed, size=size)
    tops, ids = teacher.topk(k)
    found = kl_from_teacher(logits[None], ids[None], tops[None])[0]
    theirs, mine = teacher.double().exp(), logits.double().softmax(-1)

    def events(chances: Tensor) -> Tensor:
        return (
            torch.cat([chances[ids], (1.0 - chances[ids].sum()).clamp(min=1e-12)[None]]) if k < size else chances[ids]
        )

    expected = (events(theirs) * (events(theirs).log() - events(mine).log())).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-5)
    (gradient,) = torch.autograd.grad(found, logits, retain_graph=True)
    (exact,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(gradient, exact.float(), rtol=1e-3, atol=1e-5)
    at_the_teacher = kl_from_teacher(teacher[None], ids[None], tops[None])
    assert at_the_teacher.item() == pytest.approx(0.0, abs=1e-5)


def _taught(k: int) -> MicroBatch:
    """Rows of one prompt with what a model that is the teacher says about them."""
    rows = [row_of([1, 2, 3], [4, 5, 6, 7], 0.5), row_of([1, 2, 3], [8, 9], 0.25)]
    scorer = CompletionScorer(copy.deepcopy(OTHER), 1.0)
    found = []
    for row in rows:
        one = build([row])
        with torch.no_grad():
            logprobs = HiddenStates(read_batch(scorer, one, hidden_only=True), scorer).logits().log_softmax(-1)
        tops, ids = logprobs.topk(k)
        own = logprobs.gather(1, one.targets[:, None])[:, 0]
        found.append(
            replace(row, advantage=0.0, teacher=TeacherRow(own.numpy(), ids.numpy().astype(np.int32), tops.numpy()))
        )
    return build(found)


@pytest.mark.parametrize("chunk", [2, 100])
def test_over_the_whole_vocabulary_it_is_the_exact_kl_of_two_models(chunk: int) -> None:
    """Through the model, in chunks, with every token of the teacher's distribution given: loss, sum and gradient."""
    batch = _taught(VOCABULARY)
    objective = build_objective(AlgorithmSettings(name="gkd", distill_coefficient=2.0))
    policy = CompletionScorer(copy.deepcopy(POLICY), 1.0, max_logits=chunk * VOCABULARY)
    assert batch.teacher_top_ids is not None
    assert batch.teacher_top_logprobs is not None
    logprobs, kl = read_batch(policy, batch, kl_from=(batch.teacher_top_ids, batch.teacher_top_logprobs))
    outcome = objective(logprobs, batch, teacher_kl=kl)
    outcome.loss.backward()
    mine = CompletionScorer(copy.deepcopy(POLICY), 1.0)
    teacher = torch.zeros(len(batch.targets), VOCABULARY).scatter(1, batch.teacher_top_ids, batch.teacher_top_logprobs)
    logits = mine.language_model.lm_head(read_batch(mine, batch, hidden_only=True))
    exact = (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1)
    (2.0 * exact * batch.weights).sum().backward()
    torch.testing.assert_close(kl, exact, rtol=1e-4, atol=1e-6)
    assert float(outcome.sums["kl_from_teacher"]) == pytest.approx(float(exact.detach().sum()), rel=1e-4)
    for one, other in zip(policy.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_a_batch_without_a_teacher_is_an_error_and_one_without_tokens_is_not() -> None:
    """A rank with fewer rows than others gets an empty micro-batch."""
    objective = build_objective(AlgorithmSettings(name="opd"))
    with pytest.raises(ValueError, match="needs a teacher's log-probabilities"):
        objective(torch.zeros(2, requires_grad=True), build([row_of([1], [2, 3], 1.0)]))
    assert objective(torch.zeros(0, requires_grad=True), build([])).loss.item() == 0.0
