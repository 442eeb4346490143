"""The parts of an algorithm in a training step: entropy, KL, proximal policy, filters and the learning rate factor."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.trainer.algorithm import train_steps
from tests.trainer.groups.stored_groups import invent_group
from tests.trainer.groups.test_batcher import Box
from tests.trainer.learner import forks

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.credit import Scored, credit_rule
from penstock.trainer.groups.batcher import staleness_tokens
from penstock.trainer.groups.group_totals import DropReason
from penstock.trainer.learner.step_plan import Capacity, ReadyGroup, StepPlan, make_plan
from penstock.trainer.telemetry.metrics import reward_parts

PACK = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)


CASES = {
    "default": [],
    "no ess": ["algorithm.ess_level=off"],
    "proximal": ["algorithm.ratio_anchor=proximal"],
    "tight m2po": ["algorithm.name=m2po", "algorithm.m2po_budget=0.01"],
    "wide m2po": ["algorithm.name=m2po", "algorithm.m2po_budget=50.0"],
    "reward kl": [
        "algorithm.reward_kl_coefficient=0.1", "algorithm.reward_kl_form=k2", "algorithm.normalise_by_std=false",
    ],
    "steered": ["algorithm.kl_coefficient=0.1", "algorithm.kl_target=1.0", "algorithm.kl_horizon=100"],
    "full kl": [
        "algorithm.kl_coefficient=0.1", "algorithm.kl_form=full", "algorithm.entropy_coefficient=0.01",
        "algorithm.reference_device=parked",
    ],
    "full reward kl": ["algorithm.reward_kl_coefficient=100.0", "algorithm.reward_kl_form=full"],
    "m2po clip": ["algorithm.name=m2po_released", "algorithm.m2po_budget=0.001"],
    "m2po free": ["algorithm.name=m2po_released", "algorithm.m2po_budget=50.0"],
    "vcpo": ["algorithm.name=vcpo"],
    "distilled": ["algorithm.name=opd", "teacher.url=http://t:1"],
    "distilled forward": ["algorithm.name=gkd", "teacher.url=http://t:1", "teacher.top_k=5"],
    "distilled m2po": ["algorithm.name=m2po", "algorithm.distill_coefficient=1.0", "teacher.url=http://t:1"],
    "remote reference": [
        "algorithm.kl_coefficient=0.1", "algorithm.reward_kl_coefficient=0.1", "algorithm.reference_device=remote",
        "teacher.url=http://t:1",
    ],
    "everything": [
        "algorithm.kl_coefficient=0.1", "algorithm.kl_unbiased=true", "algorithm.reference_device=parked",
        "algorithm.entropy_coefficient=0.01", "algorithm.ratio_anchor=proximal", "algorithm.importance=token",
        "algorithm.rejection=token_k2", "algorithm.rejection_high=0.05", "algorithm.veto=1e-4",
        "algorithm.opsm_delta=0.5", "algorithm.age_band_cap=4", "algorithm.sft_coefficient=0.1",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Three steps of a fresh policy for each case, all in one process of their own."""
    model = tmp_path_factory.mktemp("model") / "model"
    write_model(model, seed=0)
    return forks.results(model.parent, train_steps.__name__, str(model), json.dumps(CASES), deadline_s=800.0)[1]


def ready(number: int, rewards: tuple[float, ...]) -> ReadyGroup:
    group = invent_group(f"e0.p{number}.a0", size=len(rewards), seed=number)
    scored = ScoredGroup(generated=group.summary(number), rewards=rewards, scorer="test")
    return ReadyGroup(scored, PACK, group)


def plan_of(groups: list[ReadyGroup], settings: AlgorithmSettings, **more: float) -> StepPlan:
    return make_plan(
        groups, credit=credit_rule(settings, longest=10), aggregation=settings.aggregation,
        max_completion_tokens=10, capacity=Capacity(120), **more,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.slow
def test_the_learning_rate_shrinks_with_the_effective_sample_size(trained: dict[str, list[dict]]) -> None:
    """Samples far from the policy scale the step's rate by the effective share; off, the schedule alone does."""
    for scaled, plain in zip(trained["default"], trained["no ess"], strict=True):
        sums = scaled["sums"]
        share = sums["ess_weight"] ** 2 / (sums["ess_count"] * sums["ess_weight_squared"])
        assert 0.1 < share < 1.0
        assert scaled["lr"] == pytest.approx(plain["lr"] * max(share**4, 0.1), rel=1e-4)


def test_a_step_with_every_part_reports_every_part(trained: dict[str, list[dict]]) -> None:
    """Reference, entropy, recomputed policy, importance weights, rejection and added cross-entropy, together."""
    figures = trained["everything"]
    assert figures[0]["sums"]["kl_reference"] == pytest.approx(0.0, abs=1e-5)  # the policy still is the reference
    assert figures[2]["sums"]["kl_reference"] > 1e-6
    assert 0 < figures[0]["sums"]["entropy"] / figures[0]["sums"]["tokens"] < 4.1  # at most log 55
    assert 0 < figures[0]["sums"]["rejected"] < figures[0]["sums"]["tokens"]


def test_a_recomputed_anchor_makes_the_first_ratio_one(trained: dict[str, list[dict]]) -> None:
    """Against the proximal policy no token is clipped in the one step of a batch; against the sampler some are."""
    proximal, behaviour = trained["proximal"][0]["sums"], trained["default"][0]["sums"]
    assert proximal["ratio"] == pytest.approx(proximal["tokens"], rel=1e-5)
    assert proximal["clipped"] == 0
    assert behaviour["clipped"] > 0


def test_m2po_leaves_out_what_moved_furthest(trained: dict[str, list[dict]]) -> None:
    """A tight budget rejects tokens of the batch, a wide one none."""
    tight, wide = trained["tight m2po"][0]["sums"], trained["wide m2po"][0]["sums"]
    assert 0 < tight["rejected"] < tight["tokens"]
    assert wide["rejected"] == wide["clipped"] == 0


def test_vcpos_advantages_are_those_of_plain_torch(trained: dict[str, list[dict]]) -> None:
    """Rewards 1, 0, 1, 0: the answer that the policy prefers, and whose gradient is long, decides the baseline."""
    first, *later = trained["vcpo"]
    assert first["advantages"] == pytest.approx(first["plain"], rel=1e-4)
    assert len({round(abs(advantage), 3) for advantage in first["advantages"]}) > 3
    assert later[0]["advantages"] != pytest.approx(first["advantages"], rel=1e-3)
    sums = first["sums"]
    share = sums["ess_weight"] ** 2 / (sums["ess_count"] * sums["ess_weight_squared"])
    assert (sums["ess_count"], first["lr"]) == (12, pytest.approx(trained["no ess"][0]["lr"] * share**0.5))


def test_the_kl_to_the_reference_can_be_part_of_the_reward(trained: dict[str, list[dict]]) -> None:
    """Each trajectory loses the KL of its tokens, so equal rewards get different advantages; reported per token."""
    plain, priced = trained["no ess"][0]["advantages"], trained["reward kl"][0]["advantages"]
    assert sorted({round(a, 3) for a in plain}) == [-0.866, 0.866]
    assert len({round(a, 6) for a in priced}) == len(priced) == 12
    for first in range(0, 12, 4):
        assert sum(priced[first : first + 4]) == pytest.approx(0.0, abs=1e-9)
    assert all(step["reward_kl"] > 0 for step in trained["reward kl"])


def test_the_kl_over_the_vocabulary_starts_at_zero_and_needs_no_sample(trained: dict[str, list[dict]]) -> None:
    """For equal policy and reference it is 0 in loss and reward, unlike an estimate on samples; then it grows."""
    kl = [step["sums"]["kl_reference"] / step["sums"]["tokens"] for step in trained["full kl"]]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[2] > 1e-6
    assert 0 < trained["full kl"][0]["sums"]["entropy"] / trained["full kl"][0]["sums"]["tokens"] < 4.1
    rewards = [step["reward_kl"] for step in trained["full reward kl"]]
    assert rewards[0] == pytest.approx(0.0, abs=1e-6)
    assert rewards[2] > 1e-6
    advantages = [step["advantages"] for step in trained["full reward kl"]]
    assert sorted({round(a, 3) for a in advantages[0]}) == [-0.866, 0.866]
    assert len({round(a, 6) for a in advantages[2]}) > 2  # each answer's reward is lowered by its own KL


def test_the_kl_coefficient_is_adapted_to_its_target(trained: dict[str, list[dict]]) -> None:
    """Below the target it falls by 0.2 x trajectories / horizon a step; the step reports the one that it used."""
    used = [step["kl_coefficient"] for step in trained["steered"]]
    assert used == pytest.approx([0.1 * (1 - 0.2 * 12 / 100) ** step for step in range(3)])


def test_released_m2po_clips_at_the_limit_of_the_batch(trained: dict[str, list[dict]]) -> None:
    """A tight budget clips ratios and rejects nothing; within the budget no ratio is clipped."""
    clipped, free = trained["m2po clip"][0]["sums"], trained["m2po free"][0]["sums"]
    assert 0 < clipped["clipped"] < clipped["tokens"]
    assert clipped["rejected"] == free["rejected"] == free["clipped"] == 0


@pytest.mark.parametrize(("case", "figure"), [("distilled", "kl_teacher"), ("distilled forward", "kl_from_teacher")])
def test_a_policy_moves_towards_its_teacher(trained: dict[str, list[dict]], case: str, figure: str) -> None:
    """Whatever its rewards are: their advantages are 0, and the KL falls from step to step on one batch."""
    assert {advantage for step in trained[case] for advantage in step["advantages"]} == {0.0}
    measured = [step["sums"][figure] / step["sums"]["tokens"] for step in trained[case]]
    assert measured[0] > measured[1] > measured[2]
    assert all("kl_teacher" in step["sums"] for step in trained[case])


def test_a_teacher_beside_a_correction_and_as_a_reference(trained: dict[str, list[dict]]) -> None:
    """M2PO sees the advantages that the teacher changed; a remote reference is the teacher, in loss and reward."""
    assert trained["distilled m2po"][0]["sums"]["kl_teacher"] != 0.0
    remote = trained["remote reference"][0]
    assert remote["sums"]["kl_reference"] / remote["sums"]["tokens"] > 0.1
    assert remote["reward_kl"] != 0.0
    assert "kl_teacher" not in remote["sums"]


def test_filtered_trajectories_are_not_in_the_plan_nor_in_its_denominators() -> None:
    groups = [ready(1, (1.0, 0.0, 0.0)), ready(2, (0.5, 0.5, 0.5))]
    plan = plan_of(groups, AlgorithmSettings(drop_zero_advantage=True))
    alone = plan_of(groups[:1], AlgorithmSettings())
    assert plan.skipped == (("zero_advantage", 3),)
    assert [r.weight for r in plan.rows] == [r.weight for r in alone.rows]
    assert [r.advantage for r in plan.rows] == [r.advantage for r in alone.rows]


def test_rewards_are_shaped_in_the_documented_order() -> None:
    """Overlong penalty, clip, normalisation, estimator, clip of the advantages; weights sum to the batch."""
    settings = AlgorithmSettings(
        overlong_buffer=0.5, reward_clip=0.6, reward_norm="batch", reward_scale=False, advantage_clip=1.0,
        advantage="reinforce", name="reinforce", loss="ppo_clip", length_weight=True, difficulty_weight=True,
    )  # fmt: skip
    found = credit_rule(settings, longest=10)([Scored([1.0, 1.0], [4, 10], [False, True])])
    assert found.rewards == [0.6, 0.0]  # 1.0 cut to 0.6; 1.0 - 1.0
    assert found.advantages == pytest.approx([0.3, -0.3])
    assert sum(found.weights) == pytest.approx(2.0)
    assert found.weights[0] > found.weights[1]


def remax_group(number: int, rewards: tuple[float, ...], greedy: float) -> ReadyGroup:
    group = invent_group(f"e0.p{number}.a0", size=len(rewards) + 1, seed=number)
    trajectories = (*group.trajectories[:-1], dataclasses.replace(group.trajectories[-1], is_baseline=True))
    group = dataclasses.replace(group, trajectories=trajectories)
    scored = ScoredGroup(generated=group.summary(number), rewards=(*rewards, greedy), scorer="test")
    return ReadyGroup(scored, PACK, group)


def test_a_step_reports_the_mean_of_every_part_of_its_rewards() -> None:
    """Parts count over the trajectories that have them, without baselines; a batch without parts reports none."""
    made = [remax_group(0, (1.0, 0.0), 0.5), ready(1, (1.0, 1.0)), ready(2, (0.0, 0.0))]
    columns = [{"form": (1.0, 0.0, 9.0)}, {"form": (1.0, 1.0), "short": (-0.5, 0.0)}, {}]
    batch = [
        dataclasses.replace(one, scored=one.scored.model_copy(update={"parts": parts}))
        for one, parts in zip(made, columns, strict=True)
    ]
    assert reward_parts(batch) == {"form": 0.75, "short": -0.25}
    assert reward_parts(batch[2:]) == {}


def test_remax_compares_with_the_greedy_completion_and_never_trains_on_it() -> None:
    """Advantages are rewards minus the group's own baseline, for groups of one too; the baseline is in no plan."""
    groups = [remax_group(1, (1.0, 0.0), 0.25), remax_group(2, (0.5,), 0.5), remax_group(3, (0.0,), 1.0)]
    plan = plan_of(groups, AlgorithmSettings(name="remax"))
    assert [row.advantage for row in plan.rows] == [0.75, -0.25, 0.0, -1.0]
    assert [(row.row_group, row.trajectory) for row in plan.rows] == [(1, 0), (1, 1), (2, 0), (3, 0)]
    trained = sum(n for g in groups for n in g.scored.generated.completion_tokens[:-1])
    assert [row.weight for row in plan.rows] == pytest.approx([1 / trained] * 4)
    ages = staleness_tokens(groups, PolicyVersion(0))
    assert ages == {0: trained}


def test_a_baseline_is_shaped_like_the_rewards_it_is_compared_with() -> None:
    """Overlong penalty, clip and normalisation are the baseline's too, so that equal answers have advantage 0."""
    settings = AlgorithmSettings(
        name="remax", overlong_buffer=0.5, reward_clip=0.6, reward_norm="group", reward_scale=False
    )
    rule = credit_rule(settings, longest=10)
    found = rule([Scored([1.0, 0.0], [10, 4], [True, False], baseline=(1.0, 10))])
    assert found.advantages == pytest.approx([0.0, 0.0])  # both were 0.0 before the mean was subtracted
    assert rule([Scored([2.0], [1], [False], baseline=(0.0, 1))]).advantages == pytest.approx([0.6])


def test_groups_without_a_baseline_are_issued_again_under_remax() -> None:
    """Groups that another algorithm issued before the run was resumed are dropped under a reason that is not final."""
    box = Box(groups_per_step=1, algorithm=AlgorithmSettings(name="remax"))
    drop = box.offer(ready(1, (1.0, 0.0)))
    assert drop is not None
    assert drop.reason is DropReason.NO_BASELINE
    assert box.offer(remax_group(2, (1.0, 0.0), 0.0)) is None
