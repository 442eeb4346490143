"""A batch of which filters leave nothing: nothing of it is trained, and the step is counted, on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.algorithm.test_algorithm_parts import ready
from tests.trainer.groups.stored_groups import invent_group
from tests.trainer.learner.batch_check import BY_SETTINGS, CUT, REJECTED, cut, results_by_ranks

from penstock.protocol.config.run_file import config_document, load
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.chosen_parts import PRESETS
from penstock.trainer.algorithm.credit import Credit, Scored, credit_rule
from penstock.trainer.algorithm.group_filters.interface import GroupCandidate
from penstock.trainer.data.pairs import Pair
from penstock.trainer.dpo_settings import DpoSettings
from penstock.trainer.groups.batcher import group_rules
from penstock.trainer.learner.pair_planner import PairPlanner
from penstock.trainer.learner.step_plan import Capacity, make_plan, plan_passes
from penstock.trainer.recovery.resume_checks import read_settings, what_steps_read
from penstock.trainer.settings import TrainerSettings

FILTERS = {  # filter: its setting, and its reason
    "mask_truncated": (True, "truncated"),
    "minimal_advantage": (1e9, "below_minimal_advantage"),
    "skip_non_positive_advantage": (True, "non_positive_advantage"),
    "drop_zero_advantage": (True, "zero_advantage"),
    "success_turns": (9, "too_few_turns"),
}
WITHOUT_ADVANTAGE = {name for name, values in PRESETS.items() if values["advantage"] in ("gae", "zero")}
REWARDS = {"all equal": [(1.0,), (1.0, 1.0, 1.0)], "different": [(1.0, 0.5, 0.25), (2.0, 1.0, 1.0)]}


@pytest.mark.parametrize(("preset", "name", "batch"), [*product(PRESETS, FILTERS, REWARDS)])
def test_a_filter_leaves_out_what_it_names_and_the_plan_has_the_rest(preset: str, name: str, batch: str) -> None:
    """Whatever is left out is counted, and has no row; where nothing is left, the plan is empty, and has no optimizer step."""
    value, reason = FILTERS[name]
    try:
        settings = AlgorithmSettings(name=preset, **{name: value})  # type: ignore[arg-type]
    except ValueError:
        assert preset in WITHOUT_ADVANTAGE
        return
    groups = [cut(ready(number, rewards)) for number, rewards in enumerate(REWARDS[batch])]
    baseline = (0.5, 4) if settings.needs_baseline else None

    def rule(scored: Sequence[Scored]) -> Credit:
        more = [replace(group, baseline=baseline, influences=[1.0] * len(group.rewards)) for group in scored]
        return credit_rule(settings, longest=10)(more)

    credit = rule([group.trained for group in groups])
    plan = make_plan(
        groups, credit=rule, aggregation=settings.aggregation, max_completion_tokens=10, capacity=Capacity(120, 2),
        split=lambda places: plan_passes(places, epochs=2, minibatches=2, seed=0, step=0),
    )  # fmt: skip
    sampled = len(credit.weights)
    assert (
        sum(weight > 0.0 for weight in credit.weights) + credit.skipped.total()
        == sampled
        == sum(map(len, REWARDS[batch]))
    )
    assert len(plan.rows) + sum(count for _, count in plan.skipped) == sampled
    assert (plan.passes is None) == (not plan.rows)
    if name in ("mask_truncated", "minimal_advantage"):
        assert credit.skipped[reason] == sampled
        assert not plan.rows
    if name == "skip_non_positive_advantage":
        assert [w > 0.0 for w in credit.weights] == [a > 1e-8 for a in credit.advantages]


@pytest.mark.parametrize(
    ("reasons", "has_baseline", "dropped"),
    [
        (("length", "length"), False, True),
        (("length",), False, True),
        (("length", "stop"), False, False),
        (("length", "stop"), True, True),  # the baseline, which is not trained, does not count
        (("stop", "length"), True, False),
        (("stop", "stop"), False, False),
    ],
)
def test_groups_of_cut_answers_can_be_replaced_on_arrival(
    reasons: tuple[str, ...], has_baseline: bool, dropped: bool
) -> None:
    """Others are fetched for them, as dynamic_sampling does for groups of equal rewards."""
    group = GroupCandidate((1.0,) * len(reasons), (3,) * len(reasons), reasons, has_baseline, 0, 0, "", None)
    for is_on in (True, False):
        rules = group_rules(AlgorithmSettings(drop_truncated_groups=is_on))  # type: ignore[call-arg]
        assert [rule.reason for rule in rules if rule.drops(group)] == ["all_truncated"] * (dropped and is_on)


@pytest.mark.parametrize(
    ("rewards", "has_baseline", "reasons"),
    [
        ((0.0, 0.0), False, ["mean_out_of_range", "small_spread"]),
        ((1.0, 1.0), False, ["mean_out_of_range", "small_spread"]),
        ((0.0, 1.0), False, []),
        ((0.5, 0.55), False, ["small_spread"]),
        (
            (1.0, 1.0, 0.0),
            True,
            ["mean_out_of_range", "small_spread"],
        ),  # the baseline, which is not trained, does not count
        ((0.0, 1.0, 5.0), True, []),
    ],
)
def test_groups_that_teach_little_can_be_replaced_on_arrival(
    rewards: tuple[float, ...], has_baseline: bool, reasons: list[str]
) -> None:
    group = GroupCandidate(rewards, (3,) * len(rewards), ("stop",) * len(rewards), has_baseline, 0, 0, "", None)
    rules = group_rules(AlgorithmSettings(group_mean_range=(0.0, 1.0), min_reward_spread=0.1))  # type: ignore[call-arg]
    assert [rule.reason for rule in rules if rule.drops(group)] == reasons
    assert group_rules(AlgorithmSettings()) == group_rules(AlgorithmSettings(min_reward_spread=0.0))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="the lower one first"):
        AlgorithmSettings(group_mean_range=(1.0, 0.0))  # type: ignore[call-arg]


@pytest.mark.parametrize(("num_pairs", "kl"), [(1, 0.0), (2, 9.0), (3, 9.0)])
def test_kto_without_another_prompt_has_no_kl(num_pairs: int, kl: float) -> None:
    """As in the last batch of an epoch: against its own answer a row would have a margin of 0, whatever the policy learns."""
    pair = Pair(*(np.arange(1, n, dtype=np.int32) for n in (3, 4, 4)))
    dims = SimpleNamespace(rows=SimpleNamespace(count=1, index=0), sum=list)
    planner = PairPlanner(scores(4.0), dims, DpoSettings(loss="kto"), budget_tokens=64)  # type: ignore[arg-type]
    planner.use_live(scores(1.0))
    assert planner.kl([pair] * num_pairs) == kl


def scores(logprob: float) -> Any:
    return SimpleNamespace(logprobs=lambda batch: torch.full((len(batch.behaviour_logprobs),), logprob))


def test_a_batch_without_groups_has_an_empty_plan() -> None:
    for preset in PRESETS:
        assert credit_rule(AlgorithmSettings(name=preset), longest=10)([]).weights == []


def test_a_record_without_the_key_trains_on_the_batch_as_it_did() -> None:
    """Such a run is replayed as it was made; its next session is another one for a replay."""
    loaded = load(TrainerSettings, overrides=["model.path=m", "algorithm.name=raft"])
    document = config_document(loaded)
    for key in ("empty_batch", "opsm_level", "gspo_token_limit"):
        del document["settings"]["algorithm"][key]
    before, recorded = read_settings(json.dumps(document).encode(), where="a record")
    assert (before.algorithm.opsm_level, before.algorithm.gspo_token_limit) == ("token", False)  # type: ignore[attr-defined]
    failures = [ready(0, (-1.0, -1.0, -1.0)).trained]
    assert credit_rule(before.algorithm, longest=10)(failures).weights == [1.0, 1.0, 1.0]
    now, written = read_settings(json.dumps(config_document(loaded)).encode(), where="a record")
    credit = credit_rule(now.algorithm, longest=10)(failures)
    assert (credit.weights, credit.skipped) == ([0.0, 0.0, 0.0], {"non_positive_advantage": 3})
    assert what_steps_read(recorded) != what_steps_read(written)


@pytest.fixture(scope="module")
def results(s3_server, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    groups = [invent_group(f"e0.p{i}.a0", version=min(i, 1), seed=i) for i in range(4)]
    return results_by_ranks(tmp_path_factory.mktemp("empty"), s3_server.settings, "empty", groups)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "case"), [*product((1, 2), CUT)])
def test_a_step_of_which_all_answers_are_cut_changes_nothing(
    results: dict[int, dict], num_ranks: int, case: str
) -> None:
    """Neither weights nor moments, of policy and critic; it counts, its schedule goes on, and all figures are finite."""
    first, empty, last = results[num_ranks][case]["steps"]
    assert [step["moved"] for step in (first, empty, last)] == [True, False, True]
    assert [step["steps_done"] for step in (first, empty, last)] == [1, 2, 3]
    assert (empty["skipped"], first["skipped"]) == ({"truncated": 16}, {})
    assert (empty["updates"], empty["left_out"]) == ([], [])
    assert (empty["steered"], last["steered"]) == (False, case == "steered")
    fields = empty["fields"]
    assert (fields["tokens_trained"], fields["loss"], fields["grad_norm"], fields["truncated_share"]) == (
        0,
        0.0,
        0.0,
        1.0,
    )
    assert "entropy" not in fields
    assert fields.keys() - {"ratio_percentiles"} <= first["fields"].keys()
    assert first["fields"]["lr_set"] > last["fields"]["lr_set"] == pytest.approx(4e-3 * 7 / 9)
    if case == "critic":
        assert last["fields"]["critic_lr"] < first["fields"]["critic_lr"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "case"), [*product((1, 2), REJECTED)])
def test_an_optimizer_step_of_which_all_tokens_are_rejected_changes_nothing(
    results: dict[int, dict], num_ranks: int, case: str
) -> None:
    """Each optimizer step is decided alone; cross-entropy on successes is no matter of corrections, KL and entropy train nothing alone."""
    first, rejected, last = results[num_ranks][f"rejected: {case}"]["steps"]
    is_made = case in ("successes", "recorded before")
    assert [step["moved"] for step in (first, rejected, last)] == [True, is_made, True]
    assert [step["steps_done"] for step in (first, rejected, last)] == [1, 2, 3]
    assert [step["fields"]["rejected_fraction"] for step in (first, rejected)] == [0.0, 1.0]
    assert 0.0 < last["fields"]["rejected_fraction"] < 1.0
    num_updates = 8 if case == "passes" else 1
    assert rejected["left_out"] == ([] if is_made else [*range(num_updates)])
    assert rejected["skipped"] == ({} if is_made else {"all_rejected": 16})
    assert first["fields"]["lr_set"] > last["fields"]["lr_set"]
    if case == "passes":  # group 0 alone is old
        assert last["left_out"] == [number for number, places in enumerate(last["updates"]) if places == [0]]
        assert (len(last["left_out"]), last["skipped"]) == (2, {"all_rejected": 4})
    else:
        assert (last["left_out"], last["skipped"]) == ([], {})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "case"), [*product((1, 2), BY_SETTINGS)])
def test_a_run_of_which_all_tokens_are_rejected_stays_as_it_was(
    results: dict[int, dict], num_ranks: int, case: str
) -> None:
    for step in results[num_ranks][f"rejected: {case}"]["steps"]:
        assert (step["moved"], step["skipped"]) == (False, {"all_rejected": 16})
        assert (step["fields"]["rejected_fraction"], step["fields"]["grad_norm"]) == (1.0, 0.0)
