"""When a checkpoint is due, by steps, time and held messages, and what a resume says that a crash cost."""

from __future__ import annotations

import json

import pytest

from penstock.protocol.config.shared_sections import RetentionSettings
from penstock.protocol.errors import ConfigError
from penstock.protocol.streams import streams
from penstock.protocol.transport.stream_admin import StreamState
from penstock.trainer.commit import CheckpointSchedule
from penstock.trainer.recovery.held_messages import HeldBound
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
    """Steps, their groups and seconds; a line that was being written when the trainer was killed does not count."""
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


def bound(*, messages: int, size: int = 0, groups: int = 4, together: int = 1) -> HeldBound:
    state = StreamState(0, 0, 0, 0, messages, size)
    return HeldBound.of_stream(state, groups_per_step=groups, groups_per_message=together)


@pytest.mark.parametrize(
    ("held_bound", "settled", "unsettled", "due"),
    [
        (bound(messages=24), [100] * 11, 8, False),
        (bound(messages=24), [100] * 12, 0, True),
        (bound(messages=24), [], 24, False),  # nothing would be acknowledged: it is trained first
        (bound(messages=24), [100] * 4, 20, False),  # the next step has its messages
        (bound(messages=24, groups=16), [100] * 9, 8, True),  # it needs 8 more, and 7 fit
        (bound(messages=24, groups=16), [100] * 8, 8, False),
        (bound(messages=0), [100] * 10_000, 0, False),
        (bound(messages=-1, size=1000), [100] * 5, 0, True),
        (bound(messages=20_000, size=1000), [100] * 4, 0, False),
        (
            bound(messages=20_000, size=1000, groups=2),
            [350],
            1,
            True,
        ),  # large ones: the next step's second would not fit
        (bound(messages=20_000, size=1000, groups=2), [300], 1, False),
    ],
)
def test_a_checkpoint_is_due_when_half_of_the_bound_is_held(
    held_bound: HeldBound, settled: list[int], unsettled: int, due: bool
) -> None:
    assert held_bound.is_due(settled, unsettled) == due


def test_a_step_that_can_never_fit_is_refused_with_numbers_and_setting() -> None:
    assert bound(messages=20_000, groups=512).check() == ""
    assert bound(messages=20_000, groups=512).steps_between() == 20
    text = bound(messages=24, groups=16).check()
    assert "groups_per_step = 16 groups needs 16 to 16 messages" in text
    assert "takes 24" in text
    assert "retention.scored_messages" in text
    assert bound(messages=24, groups=100, together=50).check(), "it may fit"
    with pytest.raises(ConfigError, match=r"no step can be made.*needs 50 to 100 messages.*takes 24"):
        bound(messages=24, groups=100, together=2).check()


def test_the_setting_is_the_streams_bound() -> None:
    limits = RetentionSettings(scored_messages=50_000).limits()
    assert {spec.name: spec.max_msgs for spec in streams("r", limits)}["r-scored"] == 50_000
