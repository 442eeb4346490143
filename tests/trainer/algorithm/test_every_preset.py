"""Properties of every algorithm, from rewards to gradients: plan, micro-batches, credit by token, corrections, loss.

Each preset, and each way of setting the parts that no preset sets, is run through all stages of a step: `make_plan`,
`build`, `TokenCredit` where a critic credits tokens, the batch's limit where M2PO sets one, and the objective.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.trainer.learner.test_shared_prompts import SCORER
from tests.trainer.learner.tiny import VOCABULARY
from torch import Tensor

from penstock.protocol.groups import BlobRef, GeneratedGroup, RewardRequest, ScoredGroup
from penstock.protocol.token_annotations import TeacherRow, TeacherScores
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import MicroBatch, Row, build, first_sampled
from penstock.trainer.algorithm.chosen_parts import LOSSES, PRESETS
from penstock.trainer.algorithm.corrections.m2po import m2po_limit, m2po_width, moved_along
from penstock.trainer.algorithm.credit import credit_rule
from penstock.trainer.algorithm.estimators.gae import gae
from penstock.trainer.algorithm.kl import of_teacher, top_of_teacher
from penstock.trainer.algorithm.mismatch import mismatch_metrics
from penstock.trainer.algorithm.objective import Objective, Outcome, build_objective
from penstock.trainer.algorithm.packed_rows import pack
from penstock.trainer.learner.critic import TokenCredit
from penstock.trainer.learner.logprobs import read_batch
from penstock.trainer.learner.step_plan import Capacity, ReadyGroup, StepPlan, make_plan, rows_of

LONGEST = 10
PACK = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)

ALGORITHMS: dict[str, dict[str, Any]] = {name: {"name": name} for name in PRESETS} | {
    "groups used again": {"max_trained_count": 3, "retrained_interval": 1},
    "ppo with whitened rewards": {"name": "ppo", "whiten_rewards": True},
    "remax by group": {"name": "remax", "reward_norm": "group", "asym_clip": True},
    "prompt mean": {"aggregation": "prompt-mean"},
    "gspo, failures left out": {"name": "gspo", "opsm_delta": 0.1, "veto": 1e-3},
    "reinforce, IcePop": {"name": "reinforce", "importance": "token", "importance_bound": "mask"},
    "reinforce, sequences rejected": {"name": "reinforce", "rejection": "seq_mean_k3", "rejection_high": 0.5},
    "an age band": {"age_band_cap": 2.0, "age_band_decay": 0.3},
    "weights by length and difficulty": {"length_weight": True, "difficulty_weight": True, "mask_truncated": True},
    "cross-entropy mixed in": {"sft_coefficient": 0.3},
    "truncated ratios, dual clip": {"token_tis_cap": 2.0, "dual_clip": 1.5},
    "gspo with a dual clip": {"name": "gspo", "dual_clip": 1.5},
}
# Losses of no preset; clip_cov and kl_cov look at a whole micro-batch by definition.
ALGORITHMS |= {
    name: {"name": "grpo", "loss": name}
    for name in sorted(set(LOSSES.built_in) - {AlgorithmSettings(**keys).loss for keys in ALGORITHMS.values()})
    if name not in ("clip_cov", "kl_cov")
}
# product_clip and luspo count a sequence's loss once for each of its tokens.
ON_POLICY = [name for name in ALGORITHMS if name not in ("cross-entropy mixed in", "gkd", "product_clip", "luspo")]
TOP = np.log([0.5, 0.3, 0.1]).astype(np.float32)  # of a teacher's likeliest tokens


@dataclass(frozen=True)
class Sampled:
    """One trajectory: its sampled tokens, with their behaviour and current log-probabilities."""

    mask: tuple[bool, ...]  # behind the prompt; a hole is a tool's reply
    reward: float
    cut: bool


def _mask(choice: int, length: int) -> tuple[bool, ...]:
    kinds = ([True] * length, [True] * length, [n % 3 != 1 for n in range(length)], [False] * length)
    return tuple(kinds[choice])


some_trajectory = st.builds(
    Sampled,
    st.builds(_mask, st.integers(0, 3), st.integers(1, LONGEST)),
    st.sampled_from([0.0, 1.0, 1.0, 0.5, -1.0]),
    st.booleans(),
)
some_batch = st.lists(st.lists(some_trajectory, min_size=1, max_size=4), min_size=1, max_size=4)
full_trajectory = st.builds(
    Sampled, st.integers(1, LONGEST).map(lambda n: (True,) * n), st.sampled_from([0.0, 1.0]), st.just(False)
)
full_batch = st.lists(st.lists(full_trajectory, min_size=2, max_size=4), min_size=1, max_size=3)


def group_of(number: int, members: Sequence[Sampled], section: AlgorithmSettings, names: Sequence[int]) -> ReadyGroup:
    """A group whose tokens follow from its number and its members' names, so that a permuted batch has the same."""
    prompt = np.arange(3 + number % 3, dtype=np.int32) + number
    trajectories, taught = [], []
    greedy = [Sampled((True, True), 0.25, False)] if section.needs_baseline else []
    for place, (name, one) in enumerate(zip([*names, 99], [*members, *greedy], strict=False)):
        rng = np.random.default_rng([number, name])
        mask = np.concatenate([np.zeros(len(prompt), dtype=np.bool_), np.array(one.mask)])
        tokens = np.concatenate([prompt, rng.integers(0, VOCABULARY, len(one.mask))]).astype(np.int32) % VOCABULARY
        logprobs = np.where(mask, -rng.exponential(1.0, len(mask)) - 0.05, 0.0).astype(np.float32)
        runs = tuple(VersionRun(PolicyVersion(int(name) % 2), int(p), int(p) + 1) for p in np.flatnonzero(mask))
        reason = "length" if one.cut else "stop"
        is_baseline = place == len(members)
        trajectories.append(Trajectory(tokens, mask, logprobs, runs, reason, "", is_baseline=is_baseline))
        num = 0 if is_baseline else int(mask.sum())
        top_ids = rng.permuted(np.tile(np.arange(VOCABULARY, dtype=np.int32), (num, 1)), axis=1)[:, : len(TOP)]
        taught.append(TeacherRow((-rng.exponential(1.0, num)).astype(np.float32), top_ids, np.tile(TOP, (num, 1))))
    teacher = TeacherScores("teacher", len(TOP), tuple(taught)) if section.needs_teacher else None
    group = Group(
        f"e0.p{number}.a0", "train", 0, 0, "", len(prompt), RewardRequest(name="r", ground_truth="1"),
        tuple(trajectories), teacher=teacher,
    )  # fmt: skip
    generated = GeneratedGroup(
        group_id=group.group_id, row_group=number, split="train", attempt=0, reward_name="r", issued_version=0,
        oldest_version=0, newest_version=1, prompt_tokens=len(prompt),
        completion_tokens=tuple(t.num_completion_tokens for t in trajectories),
        finish_reasons=tuple(t.finish_reason for t in trajectories), has_baseline=section.needs_baseline,
    )  # fmt: skip
    rewards = tuple(one.reward for one in [*members, *greedy])
    return ReadyGroup(ScoredGroup(generated=generated, rewards=rewards, scorer="test"), PACK, group)


def groups_of(batch: Sequence[Sequence[Sampled]], section: AlgorithmSettings) -> list[ReadyGroup]:
    return [group_of(n, members, section, range(len(members))) for n, members in enumerate(batch)]


@cache
def section_of(name: str) -> AlgorithmSettings:
    return AlgorithmSettings(**ALGORITHMS[name])


@dataclass
class Policy:
    """Current log-probability of each token, by prompt and tokens: independent of the layout of the batch."""

    spread: float
    leaves: dict[tuple[bytes, bytes], Tensor]

    def logprobs(self, rows: Sequence[Row]) -> Tensor:
        found = [torch.empty(0)]
        for row in rows:
            key = (row.token_ids.tobytes(), row.behaviour_logprobs.tobytes())
            if key not in self.leaves:
                moved = torch.from_numpy(row.behaviour_logprobs[row.loss_mask].copy())
                random_ = torch.Generator().manual_seed(sum(key[0]) + len(key[0]))
                moved = moved + self.spread * torch.randn(len(moved), generator=random_)
                self.leaves[key] = moved.requires_grad_()
            found.append(self.leaves[key])
        return torch.cat(found)


def outcome_of(rule: Objective, logprobs: Tensor, batch: MicroBatch, teacher_kl: Tensor | None = None) -> Outcome:
    """Compute a loss; without a model another function of the log-probabilities is the KL from the teacher."""
    if rule.needs_teacher_kl and teacher_kl is None:
        teacher_kl = (logprobs - of_teacher(batch)).square()
    return rule(logprobs, batch, teacher_kl=teacher_kl)


@dataclass
class Trained:
    loss: float
    gradients: dict[tuple[bytes, bytes], Tensor]  # of every sampled token's log-probability
    sums: dict[str, float]
    maxima: dict[str, float]
    plan: StepPlan
    batches: list[MicroBatch]
    rows: list[list[Row]]


def plan_of(
    groups: Sequence[ReadyGroup], section: AlgorithmSettings, *, budget: int, num_ranks: int, version: int
) -> StepPlan:
    rule = credit_rule(section, longest=LONGEST)
    return make_plan(
        groups, credit=lambda some: rule([replace(g, influences=[1.0 + n for n in g.lengths]) for g in some]),
        aggregation=section.aggregation, max_completion_tokens=LONGEST, capacity=Capacity(budget, num_ranks),
        version=version, sft_coefficient=section.sft_coefficient,
    )  # fmt: skip


def prepared(section: AlgorithmSettings, rows: Sequence[Sequence[Row]], logprobs: Sequence[Tensor]) -> list[MicroBatch]:
    """Build micro-batches and give them what depends on the whole batch: credit by token, M2PO's limit."""
    built = [build(some) for some in rows]
    if section.has_critic:
        values = [torch.sin(batch.targets.float()) for batch in built]
        credit = TokenCredit(whiten=section.whiten_advantages, whiten_rewards=section.options_of(gae).whiten_rewards)
        built = credit(built, values).micro_batches
    if section.m2po_budget is None:
        return built
    gaps = [some.detach() - batch.behaviour_logprobs for some, batch in zip(logprobs, built, strict=True)]
    squares = [gap.square()[moved_along(gap, batch.advantages)] for gap, batch in zip(gaps, built, strict=True)]
    find = m2po_width if section.m2po_form == "clip" else m2po_limit
    limit = find(torch.cat(squares), section.m2po_budget)
    return [replace(batch, drift_limit=limit) for batch in built]


def train(
    name: str, groups: Sequence[ReadyGroup], *, spread: float = 0.3, budget: int = 10_000, num_ranks: int = 1,
    version: int = 3,
) -> Trained:  # fmt: skip
    section, policy = section_of(name), Policy(spread, {})
    plan = plan_of(groups, section, budget=budget, num_ranks=num_ranks, version=version)
    held = {(0, group.scored.generated.row_group): group.group for group in groups}
    rows = [rows_of(plan, numbers, held) for rank in plan.micro_batches for numbers in rank]
    logprobs = [policy.logprobs(some) for some in rows]
    built = prepared(section, rows, logprobs)
    rule = build_objective(section)
    outcomes = [outcome_of(rule, some, batch) for some, batch in zip(logprobs, built, strict=True)]
    total = torch.stack([outcome.loss for outcome in outcomes]).sum()
    if total.requires_grad:
        total.backward()
    sums = {key: sum(float(o.sums[key]) for o in outcomes) for key in outcomes[0].sums}
    maxima = {key: max(float(o.maxima[key]) for o in outcomes) for key in outcomes[0].maxima}
    gradients = {key: torch.zeros(0) if leaf.grad is None else leaf.grad for key, leaf in policy.leaves.items()}
    return Trained(float(total.detach()), gradients, sums, maxima, plan, built, rows)


def assert_same(one: Trained, other: Trained) -> None:
    assert other.loss == pytest.approx(one.loss, rel=1e-4, abs=1e-5)
    assert other.gradients.keys() == one.gradients.keys()
    for key, gradient in one.gradients.items():
        torch.testing.assert_close(other.gradients[key], gradient, rtol=1e-3, atol=1e-5)
    for key, value in one.sums.items():
        assert other.sums[key] == pytest.approx(value, rel=1e-4, abs=1e-3), key
    assert other.maxima == pytest.approx(one.maxima, rel=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
@examples(3)
@given(batch=some_batch, spread=st.sampled_from([0.0, 0.3, 5.0, 400.0]), version=st.sampled_from([1, 3]))
def test_any_batch_gives_finite_numbers(name: str, batch: list[list[Sampled]], spread: float, version: int) -> None:
    """Groups of one, equal rewards, one-token answers, holes, rows without a sampled token, absurd ratios."""
    found = train(name, groups_of(batch, section_of(name)), spread=spread, version=version)
    figures = {"loss": found.loss, **found.sums, **found.maxima}
    empty = {key for key, value in found.maxima.items() if value == float("-inf")}  # of no token at all
    assert all(np.isfinite(value) for key, value in figures.items() if key not in empty), figures
    assert "ratio" not in empty
    assert all(torch.isfinite(gradient).all() for gradient in found.gradients.values())
    assert np.isfinite(build_objective(section_of(name)).lr_factor(found.sums))
    compared = mismatch_metrics(found.sums, found.maxima)
    assert all(np.isfinite(value) for value in compared.values() if not isinstance(value, dict)), compared


@pytest.mark.parametrize("name", ALGORITHMS)
@examples(3)
@given(batch=some_batch, budget=st.integers(16, 60), num_ranks=st.integers(1, 3))
def test_micro_batches_and_ranks_change_nothing(
    name: str, batch: list[list[Sampled]], budget: int, num_ranks: int
) -> None:
    """Loss, gradient of every token and every figure are those of the batch in one piece."""
    groups = groups_of(batch, section_of(name))
    whole, apart = train(name, groups), train(name, groups, budget=budget, num_ranks=num_ranks)
    assert len(apart.plan.micro_batches) == num_ranks
    assert_same(whole, apart)


@pytest.mark.parametrize("name", ALGORITHMS)
@examples(3)
@given(batch=some_batch, seed=st.integers(0, 1000))
def test_the_order_changes_nothing(name: str, batch: list[list[Sampled]], seed: int) -> None:
    section, order = section_of(name), random.Random(seed)
    if section.advantage == "pass_at_k":  # of equally good answers the first is the best, and leads by 0
        assume(all(len({member.reward for member in members}) == len(members) for members in batch))
    shuffled = []
    for number, members in enumerate(batch):
        names = order.sample(range(len(members)), len(members))
        some = [members[place] for place in names]
        shuffled.append(group_of(number, some, section, names))
    order.shuffle(shuffled)
    assert_same(train(name, groups_of(batch, section)), train(name, shuffled))


@pytest.mark.parametrize("name", ON_POLICY)
@examples(3)
@given(batch=some_batch)
def test_on_fresh_samples_it_is_the_plain_policy_gradient(name: str, batch: list[list[Sampled]]) -> None:
    """The gradient of each token is minus its weight times its advantage, for every loss."""
    found, rule = (
        train(name, groups_of(batch, section_of(name)), spread=0.0, version=0),
        build_objective(section_of(name)),
    )
    for rows, micro_batch in zip(found.rows, found.batches, strict=True):
        taught = rule.taught(micro_batch.advantages, micro_batch.behaviour_logprobs, micro_batch)
        expected = (-micro_batch.weights * taught).split([int(row.loss_mask.sum()) for row in rows])
        for row, wanted in zip(rows, expected, strict=True):
            gradient = found.gradients[row.token_ids.tobytes(), row.behaviour_logprobs.tobytes()]
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    assert found.sums["clipped"] == found.sums["dual_clipped"] == found.sums["rejected"] == 0
    assert rule.lr_factor(found.sums) == pytest.approx(1.0)


TEACHING = [
    [Sampled((True,) * 4, 1.0, False), Sampled((True, False, True, True), 0.0, False), Sampled((True,), 0.5, False)],
    [Sampled((True, True, False, False, True), 1.0, False), Sampled((False,) * 3, 0.0, False)],
]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_the_policy_did_not_sample_gets_no_gradient(name: str) -> None:
    """Logits at prompts and tool replies: exactly 0. At positions that predict a sampled token of a success: not 0."""
    section = section_of(name)
    groups = groups_of(TEACHING, section)
    plan = plan_of(groups, section, budget=10_000, num_ranks=1, version=0)
    rows = rows_of(plan, plan.micro_batches[0][0], {(0, g.scored.generated.row_group): g.group for g in groups})
    packed = pack([row.token_ids[:-1] for row in rows], [first_sampled(row.loss_mask) for row in rows])
    table = torch.randn(len(packed.token_ids), VOCABULARY, generator=torch.Generator().manual_seed(1)).requires_grad_()
    held = table.detach().log_softmax(-1)
    fresh, predicts = [], torch.zeros(len(table), dtype=torch.bool)
    for row, where in zip(rows, packed.positions, strict=True):  # as if exactly these logits had sampled it
        sampled = np.flatnonzero(row.loss_mask)
        logprobs = np.zeros(len(row.token_ids), dtype=np.float32)
        logprobs[sampled] = held[where[sampled - 1], row.token_ids[sampled]]
        predicts[where[sampled - 1]] = True
        fresh.append(replace(row, behaviour_logprobs=logprobs))
    first = build(fresh)
    logprobs = table.log_softmax(-1)[first.predictors].gather(1, first.targets[:, None])[:, 0]
    [batch] = prepared(section, [fresh], [logprobs])
    rule = build_objective(section)
    outcome_of(rule, logprobs, batch).loss.backward()
    assert table.grad is not None
    moved = table.grad.abs().sum(1) > 0
    assert not (moved & ~predicts).any()
    teaches = rule.taught(batch.advantages, logprobs.detach(), batch).abs() > 1e-6
    teaches |= torch.tensor(rule.needs_teacher_kl)  # at every sampled token
    assert teaches.any()
    assert moved[first.predictors[teaches]].all()


@pytest.mark.parametrize("name", ALGORITHMS)
@examples(2)
@given(batch=full_batch)
def test_rows_of_a_micro_batch_change_no_parameters_gradient(name: str, batch: list[list[Sampled]]) -> None:
    """Through a real model: all rows in one stream that shares their prompts, and each row alone, agree."""
    section = section_of(name)
    groups = groups_of(batch, section)
    plan = plan_of(groups, section, budget=10_000, num_ranks=1, version=2)
    assume(plan.rows)  # a batch without a success has none with raft
    rows = rows_of(plan, plan.micro_batches[0][0], {(0, g.scored.generated.row_group): g.group for g in groups})

    rule = build_objective(section)

    def gradients(pieces: list[list[Row]]) -> list[Tensor]:
        SCORER.zero_grad()
        scores = [
            torch.atleast_2d(read_batch(SCORER, b, kl_from=top_of_teacher(b) if rule.needs_teacher_kl else None))
            for b in map(build, pieces)
        ]
        built = prepared(section, pieces, [some[0] for some in scores])
        losses = [
            outcome_of(rule, some[0], b, some[1] if rule.needs_teacher_kl else None).loss
            for some, b in zip(scores, built, strict=True)
        ]
        torch.stack(losses).sum().backward()
        return [p.grad.clone() for p in SCORER.parameters() if p.grad is not None]

    packed = gradients([rows])
    for other in (gradients([[row] for row in rows]), gradients([rows[:1], rows[1:]])):
        for one, two in zip(packed, other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-5)
