"""Versions and staleness: the rules every service relies on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol import versions
from penstock.protocol.versions import PolicyVersion, VersionRun


def test_staleness_counts_versions_from_the_oldest_token():
    """A group sampled by versions 3 and 5 is two versions behind a trainer at 5."""
    runs = (VersionRun(PolicyVersion(3), 4, 6), VersionRun(PolicyVersion(5), 6, 9))
    assert versions.oldest(runs) == 3
    assert versions.newest(runs) == 5
    assert versions.staleness(PolicyVersion(5), versions.oldest(runs)) == 2
    assert versions.is_fresh(PolicyVersion(5), PolicyVersion(3), max_staleness=2)
    assert not versions.is_fresh(PolicyVersion(6), PolicyVersion(3), max_staleness=2)


def test_a_sample_from_the_future_is_an_error():
    """A sample newer than the trainer is from an earlier trainer process of the run."""
    with pytest.raises(ValueError, match="newer than the trainer's version 4"):
        versions.staleness(PolicyVersion(4), PolicyVersion(5))


def test_tokens_of_unknown_version_are_an_error():
    """A trajectory without version runs is never given a staleness."""
    with pytest.raises(ValueError, match="no version run"):
        versions.oldest(())


@given(st.integers(0, 10**6), st.integers(0, 50), st.integers(1, 512), st.integers(0, 60))
def test_admission_fills_the_pipe_and_never_overfills_it(outstanding: int, max_staleness: int, per_step: int, lag: int):
    """Outstanding groups never exceed (max_staleness + 1) steps of groups, less one for each version the announced one is behind."""
    more = versions.admissible_groups(
        outstanding=outstanding, max_staleness=max_staleness, groups_per_step=per_step, lag=lag
    )
    bound = max(0, (max_staleness + 1 - lag) * per_step)
    assert more >= 0
    assert outstanding + more == bound or (more == 0 and outstanding >= bound)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 4))
def test_the_last_chance_is_the_last_version_at_which_a_sample_is_fresh(now: int, age: int, max_staleness: int):
    trainer, sampled = PolicyVersion(now + age), PolicyVersion(now)
    fresh = [versions.is_fresh(PolicyVersion(trainer + more), sampled, max_staleness) for more in (0, 1)]
    assert (versions.last_chance_version(trainer, max_staleness) == sampled) == (fresh == [True, False])


def test_the_newer_version_wins():
    assert versions.is_newer(PolicyVersion(0), None)
    assert versions.is_newer(versions.next_version(PolicyVersion(1)), PolicyVersion(1))
    assert not versions.is_newer(PolicyVersion(1), PolicyVersion(1))
