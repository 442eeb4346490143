"""A crash costs at most about a minute of training, and a resume says how much it cost."""

from __future__ import annotations

import json

from penstock.trainer.commit import CheckpointSchedule
from penstock.trainer.recovery.resume_checks import RolledBack, describe_rolled_back, read_rolled_back


def due(schedule: CheckpointSchedule, *, step_s: float, took_s: float, num_steps: int) -> list[int]:
    now, found = 0.0, []
    for step in range(1, num_steps + 1):
        now += step_s
        if schedule.is_due(step, now):
            schedule.written(started=now, now=now + took_s)
            now += took_s
            found.append(step)
    return found


def test_a_checkpoint_is_due_by_steps_and_by_time() -> None:
    """Fast steps have one every ``every_steps``; slow ones one a minute; 0 s means by steps only."""
    assert due(CheckpointSchedule(every_steps=50, every_s=60.0, now=0.0), step_s=0.5, took_s=0.1, num_steps=110) == [
        50,
        100,
    ]
    assert due(CheckpointSchedule(every_steps=50, every_s=60.0, now=0.0), step_s=7.0, took_s=0.1, num_steps=30) == [
        9,
        18,
        27,
    ]
    assert due(CheckpointSchedule(every_steps=50, every_s=0.0, now=0.0), step_s=7.0, took_s=0.1, num_steps=60) == [50]


def test_checkpoints_by_time_take_a_twentieth_of_a_run_at_most() -> None:
    """One of a large model that takes 30 s is not repeated after a minute: 600 s later is due."""
    written = due(
        CheckpointSchedule(every_steps=10_000, every_s=60.0, now=0.0), step_s=20.0, took_s=30.0, num_steps=100
    )
    assert written == [3, 33, 63, 93]


def test_the_steps_after_a_checkpoint_are_counted_from_metrics() -> None:
    """Steps, their groups and their seconds; the line that was being written when the trainer was killed does not count."""
    step = {"kind": "step", "scored_by": {"built-in": 3, "mine@2": 1}, "wait_s": 0.5, "step_s": 1.0}
    lines = b"\n".join(
        [json.dumps(step).encode(), b'{"kind": "eval", "step": 2}', json.dumps(step).encode(), b'{"kind": "st']
    )
    assert read_rolled_back(lines) == RolledBack(steps=2, groups=8, seconds=3.0)


def test_a_resume_says_what_it_cost() -> None:
    """A new run says nothing; one that was killed before its first checkpoint says that it starts again at step 0."""
    lost = RolledBack(46, 184, 23.4)
    assert describe_rolled_back(RolledBack(), resumed_step=None) == ""
    assert describe_rolled_back(RolledBack(), resumed_step=50) == "resumed at step 50; no step was lost"
    assert "starts again at step 0: rolled back 46 steps, 184 groups (23 s" in describe_rolled_back(
        lost, resumed_step=None
    )
    text = describe_rolled_back(lost, resumed_step=100, num_again=40)
    assert text.startswith("resumed at step 100: rolled back 46 steps, 184 groups (23 s")
    assert text.endswith("; 40 steps are made again of the groups they had")
