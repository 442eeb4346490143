"""A short share of `make chaos`: every process of a run is killed once, and nothing is lost, doubled or changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked
from tests.rigs.chaos.kills import LAST_STEPS, POINTS, plan_kills, plan_points
from tests.rigs.chaos.run import GROUPS_PER_STEP, VICTIMS, ChaosRun
from tests.servers import require

STEPS, KILL_WITHIN = 14, 9  # a fast machine must not be done before the last kill
REDUNDANT = 2  # completions of a group that are started besides, and aborted once enough have ended
REDUNDANCY = [f"rollout.redundant_completions={REDUNDANT}"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_process_is_killed_once_and_nothing_is_lost_or_counted_twice(tmp_path: Path) -> None:
    """Seven kills at random moments and one at a crash point: the audit closes, and a replay makes every version again.

    Every completion that was started for a trained group is in it, or is counted as abandoned, once.
    """
    require("nats-server")
    require("rclone")
    kills = plan_kills(0, VICTIMS, num_kills=len(VICTIMS), steps=KILL_WITHIN, longest_delay_s=0.2)
    run = ChaosRun(tmp_path, seed=0, steps=STEPS, kills=kills, points=1, overrides=["trainer.lease_s=2", *REDUNDANCY])
    with forked.children():  # most of the time of a restart is that of imports
        outcome = run.go(deadline_s=400.0)
    assert outcome.failures == []
    assert outcome.by_victim() == {**dict.fromkeys(VICTIMS, 1), "trainer, at a point": 1}
    assert all(kill.restarted_s is not None for kill in outcome.kills)
    assert outcome.account["closes"]
    assert outcome.account["splits"][0]["used"] == STEPS * GROUPS_PER_STEP
    assert outcome.replay["num_steps"] == STEPS
    train = outcome.account["splits"][0]
    closed = train["used"] + sum(train["dropped"].values())
    assert REDUNDANT * train["used"] <= sum(train["abandoned"].values()) <= REDUNDANT * closed
    assert sum(train["abandoned_tokens"].values()) > 0


def test_a_plan_kills_every_process_and_is_the_same_for_the_same_seed() -> None:
    """Every victim is killed, in the order of the steps, never in the last ones; every crash point is used once."""
    for seed in range(20):
        kills = plan_kills(seed, VICTIMS, num_kills=30, steps=60)
        assert kills == plan_kills(seed, VICTIMS, num_kills=30, steps=60)
        counts = [sum(kill.victim == victim for kill in kills) for victim in VICTIMS]
        assert sum(counts) == 30
        assert set(counts) <= {4, 5}
        assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
        assert 1 <= kills[0].step <= kills[-1].step <= 60 - LAST_STEPS
        points = plan_points(seed, len(POINTS))
        assert {point for point, _ in points} == set(POINTS)
    assert plan_kills(0, VICTIMS, num_kills=30, steps=60) != plan_kills(1, VICTIMS, num_kills=30, steps=60)
