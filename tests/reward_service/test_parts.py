"""The small parts: what is remembered, how long is waited, what settings are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.runfile import load
from reward_service.announce import hash_of
from reward_service.figures import WINDOW, Timings
from reward_service.loop import Patience
from reward_service.progress import Progress
from reward_service.rewards.verdict import Verdict
from reward_service.scores import GroupScores
from reward_service.settings import RewardSettings


def test_progress_is_bounded_and_forgets_the_oldest_message() -> None:
    """Settled groups add up for each message; beyond the bound the message untouched for longest is forgotten."""
    progress = Progress(max_messages=2)
    progress.add(1, frozenset({"a"}))
    progress.add(2, frozenset({"b"}))
    progress.add(1, frozenset({"c"}))
    progress.add(3, frozenset({"d"}))
    assert progress.settled(1) == {"a", "c"}
    assert progress.settled(2) == frozenset()
    progress.forget(1)
    progress.forget(1)
    assert progress.settled(1) == frozenset()


def test_a_delivery_that_met_a_server_away_is_no_attempt() -> None:
    """Only deliveries at which scoring was tried count towards reward_service.endpoint_attempts."""
    progress = Progress()
    assert progress.attempt(1, num_delivered=1) == 1
    progress.excuse(1)
    progress.add(1, frozenset({"a"}))
    assert progress.attempt(1, num_delivered=2) == 1
    assert progress.attempt(1, num_delivered=3) == 2
    assert progress.settled(1) == {"a"}


@given(st.integers(1, 10**6), st.floats(0.01, 3600))
def test_the_wait_grows_and_stays_bounded(attempt: int, delay_s: float) -> None:
    """Each redelivery waits at least as long as the one before, and at most a minute or the first wait."""
    patience = Patience(attempts=5, delay_s=delay_s)
    assert patience.next_delay_s(1) == delay_s
    assert delay_s <= patience.next_delay_s(attempt) <= patience.next_delay_s(attempt + 1)
    assert patience.next_delay_s(attempt) <= max(60.0, delay_s)


def test_the_name_of_a_set_of_groups_does_not_depend_on_their_order() -> None:
    """The same groups announced twice carry the same message id; others another."""
    assert hash_of(["a", "b"]) == hash_of(["b", "a"])
    assert hash_of(["a", "b"]) != hash_of(["ab"])


def test_quantiles_are_of_the_recent_calls_only() -> None:
    """Old durations leave the window; counts stay."""
    timings = Timings()
    assert timings.quantile(0.5) == 0.0
    timings.record(100.0, failed=True)
    for number in range(WINDOW):
        timings.record(number / WINDOW, failed=False)
    assert timings.quantile(1.0) < 1.0
    assert timings.quantile(0.5) == 0.5
    assert (timings.num_calls, timings.num_failed) == (WINDOW + 1, 1)


def test_parts_become_columns() -> None:
    """A part that one completion lacks counts 0.0 for it."""
    scores = GroupScores.of([Verdict(1.0, {"a": 2.0}), Verdict(0.0, {"b": 3.0})], "me")
    assert scores.rewards == (1.0, 0.0)
    assert scores.parts == {"a": (2.0, 0.0), "b": (0.0, 3.0)}


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("reward_service.host=0.0.0.0", "token_file"),
        ('reward_service.allowed_targets=["10.0.0.0/99"]', "allowed_targets"),
        ("reward_service.endpoint_attempts=0", "endpoint_attempts"),
        ("reward_service.prot=1", "port"),
        ("reward_service.id=a b", "id"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(override: str, text: str) -> None:
    """A wrong value is refused at the start, naming the setting."""
    with pytest.raises(ConfigError, match=text):
        load(RewardSettings, overrides=[override])


def test_the_token_comes_from_its_file(tmp_path: Path) -> None:
    """A token file is read and trimmed; one that is missing or empty is an error, not an open door."""
    file = tmp_path / "token"
    settings = load(RewardSettings, overrides=[f"reward_service.token_file={file}"]).settings.reward_service
    with pytest.raises(ConfigError, match="not readable"):
        settings.secret()
    file.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        settings.secret()
    file.write_text("abc\n")
    assert settings.secret() == "abc"
