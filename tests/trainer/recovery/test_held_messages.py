"""What the stream of scored messages takes, against what is held until a checkpoint."""

from __future__ import annotations

import pytest

from penstock.protocol.config.shared_sections import RetentionSettings
from penstock.protocol.errors import ConfigError
from penstock.protocol.streams import streams
from penstock.protocol.transport.stream_admin import StreamState
from penstock.trainer.recovery.held_messages import HeldBound


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
