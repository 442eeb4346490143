"""The simulated run: nothing is lost, nothing is favoured, and its figures are those of the rules that it imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from penstock.deploy.plan.plan_run import Advice, Waits, advise, describe_waits, measure_waits, num_steps
from penstock.deploy.plan.simulated_run import SimulatedRun
from penstock.deploy.plan.simulation import Durations, EnginePace, Fleet, LengthMix, Outcome
from penstock.rollout_service.engines.redundancy import Redundancy
from penstock.trainer.groups.prompt_cursor import GroupKey
from penstock.trainer.settings import RolloutSettings

MIX = LengthMix(median_tokens=48, longest_tokens=1024)
PACE = EnginePace(slots=16, step_s_alone=0.007, step_s_full=0.02)
NUM_WORKERS, GROUPS, GROUP_SIZE, MEASURED = 2, 12, 8, 8
TOKEN_S = 1.0 / (NUM_WORKERS * PACE.tokens_per_s)  # training takes as long as generation by full engines
DURATIONS = Durations(token_s=TOKEN_S, step_s=0.1, score_s=0.1, publish_s=0.05, load_s=0.1)


def fleet(*, drains: bool = False, packs_in_flight: int = 8) -> Fleet:
    """Two engines that go on with new weights."""
    return Fleet(num_workers=NUM_WORKERS, pace=PACE, packs_in_flight=packs_in_flight, drains=drains)


def outcome_of(
    max_staleness: int, *, steps: int = 0, seed: int = 0, patience: float = 3.0, drains: bool = False
) -> Outcome:
    rollout = RolloutSettings(
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS,
        groups_per_message=1,
        max_staleness=max_staleness,
        max_attempts=100,
    )
    steps = steps or num_steps(max_staleness, MEASURED)
    packs = 8 if max_staleness else GROUPS // NUM_WORKERS
    run = SimulatedRun(
        rollout, fleet(drains=drains, packs_in_flight=packs), DURATIONS, MIX, steps=steps, seed=seed, oldest_patience=patience
    )  # fmt: skip
    return run.run()


def waits_of(max_staleness: int, measured: int = MEASURED) -> Waits:
    outcome = outcome_of(max_staleness, steps=num_steps(max_staleness, measured))
    return measure_waits(
        outcome, fleet(), DURATIONS, max_staleness=max_staleness, first=max_staleness + 3, num=measured
    )


def lengths_of(group_id: str) -> Sequence[int]:
    return MIX.group(repr((GroupKey.parse(group_id).prompt,)), GROUP_SIZE)


@pytest.mark.parametrize("max_staleness", [0, 1, 4, 8])
@pytest.mark.parametrize("seed", range(2))
def test_every_group_that_is_generated_is_trained_once_and_nothing_else_is(max_staleness: int, seed: int) -> None:
    """Without drops the groups that are trained are those that were sampled: lengths and prompts have one distribution."""
    outcome = outcome_of(max_staleness, steps=6 + max_staleness, seed=seed)
    trained = [group for step in outcome.steps for group in step.groups]
    assert len(trained) == len(set(trained)) == GROUPS * (6 + max_staleness)
    lengths = sorted(length for step in outcome.steps for length in step.lengths)
    if not outcome.dropped:
        assert set(trained) == set(outcome.sampled)
        assert lengths == sorted(length for group in outcome.sampled.values() for length in group)
    assert lengths == sorted(length for group in trained for length in lengths_of(group))
    issued = {group.rpartition(".")[0] for group in outcome.sampled}
    assert {group.rpartition(".")[0] for group in trained} == issued  # a dropped prompt comes back as another attempt


@pytest.mark.parametrize("max_staleness", [1, 2, 4, 8])
def test_no_length_is_favoured_in_the_middle_of_a_run(max_staleness: int) -> None:
    """Steps train the lengths that were sampled: a group that takes long is late, but not left out."""
    outcome = outcome_of(max_staleness, steps=24 + 2 * max_staleness)
    middle = [length for step in outcome.steps[max_staleness + 3 : -max_staleness - 1] for length in step.lengths]
    sampled = sorted(length for group in outcome.sampled.values() for length in group)
    assert fmean(middle) == pytest.approx(fmean(sampled), rel=0.1)
    long = sampled[int(0.9 * len(sampled))]
    assert sum(length > long for length in middle) / len(middle) == pytest.approx(0.1, rel=0.2)
    assert not outcome.dropped


def test_a_full_batch_that_does_not_wait_drops_the_long_groups() -> None:
    """What `trainer.oldest_patience` is for: without it, a bound of one version drops the groups with the longest completions."""
    hasty = outcome_of(1, steps=16, patience=0.0)
    assert sum(hasty.dropped.values()) > 10 * max(1, sum(outcome_of(1, steps=16).dropped.values()))


def test_asynchrony_is_worth_what_the_waits_of_a_synchronous_run_cost() -> None:
    """At a bound of 8 versions hardly anything waits; a synchronous run of the same job takes over twice as long."""
    synchronous, ahead = (
        waits_of(0),
        waits_of(8, measured=24),
    )  # short groups are trained first, so a few steps are not enough
    assert ahead.tokens_per_s > 2.2 * synchronous.tokens_per_s
    assert ahead.tokens_per_s > 0.9 * ahead.ideal_tokens_per_s
    assert ahead.trainer_idle < 0.1
    assert ahead.engines_idle < 0.03
    assert synchronous.trainer_idle > 0.5
    assert synchronous.staleness_mean == 0.0


def test_no_token_is_older_than_the_bound() -> None:
    for drains in (True, False):
        for bound in (0, 1, 2):
            outcome = outcome_of(bound, steps=8, drains=drains)
            assert max(age for step in outcome.steps for age in step.ages) <= bound


def test_steps_and_engines_take_the_time_of_their_tokens() -> None:
    """One engine without a tail: a synchronous step is its generation, its training, and what lies between."""
    mix = LengthMix(median_tokens=100, longest_tokens=100, spread_of_prompts=0.0, spread_of_samples=0.0)
    rollout = RolloutSettings(group_size=8, groups_per_step=2, groups_per_message=1, max_staleness=0)
    durations = Durations(token_s=0.001, step_s=0.5, score_s=0.25, publish_s=0.125, load_s=0.0625)
    one = Fleet(num_workers=1, pace=PACE, packs_in_flight=2, drains=True)
    outcome = SimulatedRun(rollout, one, durations, mix, steps=3).run()
    generated_s, trained_s = 99 * PACE.step_s_full, 0.5 + 0.001 * 2 * 8 * 100  # a prompt gives the first token
    between = [later.ended - earlier.ended for earlier, later in zip(outcome.steps, outcome.steps[1:], strict=False)]
    assert between == pytest.approx([0.125 + 0.0625 + generated_s + 0.25 + trained_s] * 2)
    (_, busy_0, tokens_0), (_, busy_1, tokens_1) = outcome.busy[0], outcome.busy[1]
    assert (busy_1 - busy_0, tokens_1 - tokens_0) == pytest.approx((generated_s, 1600))


def test_a_number_of_packs_that_follows_the_engine_is_as_good_as_the_best_fixed_one() -> None:
    """Two packs leave half of the slots unused; without a setting the worker finds what fills them (bound of 4 versions)."""
    rates = {packs: rate_of(packs) for packs in (0, 2, 4, 8)}
    assert rates[0] > 1.2 * rates[2]
    assert rates[0] > 0.95 * max(rates.values())


def rate_of(packs_in_flight: int) -> float:
    """Return the trained tokens per second of 24 steps."""
    rollout = RolloutSettings(group_size=GROUP_SIZE, groups_per_step=GROUPS, groups_per_message=1, max_staleness=4)
    workers = fleet(packs_in_flight=packs_in_flight)
    run = SimulatedRun(rollout, workers, DURATIONS, MIX, steps=num_steps(4, 24))
    return measure_waits(run.run(), workers, DURATIONS, max_staleness=4, first=7, num=24).tokens_per_s


def redundant_outcome(redundancy: Redundancy, *, slots: int = 16) -> Outcome:
    """Simulate twelve steps at a bound of two versions, of groups for which more is started than is needed."""
    rollout = RolloutSettings(
        group_size=redundancy.enough, redundant_completions=redundancy.extra, redundant_wait=redundancy.wait,
        groups_per_step=GROUPS, groups_per_message=2, max_staleness=2, max_attempts=100,
    )  # fmt: skip
    workers = replace(fleet(), pace=replace(PACE, slots=slots))
    return SimulatedRun(rollout, workers, DURATIONS, MIX, steps=12).run()


def means(outcome: Outcome) -> tuple[float, float]:
    """Return the mean lengths of what was trained, and of all that were started for the same groups."""
    trained = fmean(length for step in outcome.steps for length in step.lengths)
    groups = [group for step in outcome.steps for group in step.groups]
    return trained, fmean(length for group in groups for length in outcome.sampled[group])


@pytest.mark.parametrize("wait", [0.0, 0.5, 1000.0])
@pytest.mark.parametrize("slots", [16, 1000])
def test_every_completion_that_is_started_is_kept_or_abandoned(wait: float, slots: int) -> None:
    """Once each, also where the redundant ones never get a slot; without a wait a group has exactly its size."""
    redundancy = Redundancy(GROUP_SIZE, 3, wait)
    outcome = redundant_outcome(redundancy, slots=slots)
    kept = [length for step in outcome.steps for length in step.lengths]
    num_groups = sum(len(step.groups) for step in outcome.steps)
    assert num_groups == 12 * GROUPS == len(outcome.sampled) - sum(outcome.dropped.values())
    assert len(kept) >= GROUP_SIZE * num_groups if wait else len(kept) == GROUP_SIZE * num_groups
    of_dropped = len(outcome.sampled) - num_groups  # what was kept of these is not in the steps
    num_abandoned = sum(outcome.abandoned.values())
    started = redundancy.started * len(outcome.sampled)
    assert started - redundancy.started * of_dropped <= len(kept) + num_abandoned <= started
    assert (num_abandoned == 0) == (wait == 1000.0)
    assert 0.0 <= outcome.abandoned_tokens <= sum(sum(group) for group in outcome.sampled.values())


def test_the_first_that_end_are_the_short_ones() -> None:
    """With a slot for each, exactly the shortest are kept: what is trained is shorter, and the less so the longer the rest may take."""
    for group in (outcome := redundant_outcome(Redundancy(GROUP_SIZE, 3), slots=1000)).steps[5].groups:
        assert sum(sorted(outcome.sampled[group])[:GROUP_SIZE]) in sums_of_groups(outcome)
    shares = [
        trained / started
        for trained, started in (means(redundant_outcome(Redundancy(GROUP_SIZE, 3, w))) for w in (0.0, 0.5, 1000.0))
    ]
    assert shares[0] < 0.8
    assert shares[0] < shares[1] < shares[2] == 1.0
    assert means(redundant_outcome(Redundancy(GROUP_SIZE)))[0] == means(redundant_outcome(Redundancy(GROUP_SIZE)))[1]


def sums_of_groups(outcome: Outcome) -> set[int]:
    return {
        sum(step.lengths[i : i + GROUP_SIZE]) for step in outcome.steps for i in range(0, len(step.lengths), GROUP_SIZE)
    }


def test_the_plan_says_what_limits_a_run() -> None:
    """The trainer that waits, the bound that would help, and too few packs in flight."""
    rows = [waits_of(bound) for bound in (1, 8)]
    advice = advise(
        rows[0], [Advice(("rollout.max_staleness=8",), rows[1]), Advice(("worker.packs_in_flight=0",), rows[0])]
    )
    said = " / ".join(describe_waits(rows[0], advice, fleet(), GROUP_SIZE))
    assert "the trainer waits for rollouts" in said
    assert "rollout.max_staleness=8 would train" in said
    assert "worker.packs_in_flight=0 would" not in said
    assert "packs_in_flight = 1 keeps at most 8 sequences" in " ".join(
        describe_waits(rows[0], (), fleet(packs_in_flight=1), GROUP_SIZE)
    )
    busy = replace(rows[1], trainer_idle=0.01, slots_used=0.99)
    assert describe_waits(busy, (), fleet(), GROUP_SIZE) == [
        "no service waits for long: no other bound on staleness trains more than 5 % faster"
    ]


@pytest.mark.parametrize(("median", "longest", "spread"), [(0.5, 10, 0.1), (20, 10, 0.1), (10, 20, -0.1)])
def test_a_mix_that_is_none_is_refused(median: float, longest: int, spread: float) -> None:
    with pytest.raises(ValueError, match=r"median_tokens|spreads"):
        LengthMix(median, longest, spread_of_samples=spread)


def test_an_engine_decodes_slower_the_more_sequences_run() -> None:
    rates = [running / PACE.step_s(running) for running in range(1, PACE.slots + 1)]
    assert rates == sorted(rates)
    assert PACE.step_s(1) == PACE.step_s_alone
    assert PACE.step_s(1000) == PACE.step_s_full
    with pytest.raises(ValueError, match="slots"):
        EnginePace(0, 0.1, 0.2)
