"""Engines that serve one version are compared: all readers of the stream find the same minority."""

from __future__ import annotations

import pytest

from penstock.protocol.facts import WeightsApplied
from penstock.rollout_service.weights import weight_announcements
from penstock.rollout_service.weights.weight_announcements import EngineVotes


def applied(worker: str, checksum: str, *, version: int = 3, layout: str = "1-a") -> WeightsApplied:
    return WeightsApplied(
        run_id="r",
        worker_id=worker,
        version=version,
        previous_version=version - 1,
        pause_s=0.0,
        fetch_s=0.0,
        num_bytes=0,
        checksum=checksum,
        layout=layout,
    )


def test_equal_engines_agree():
    votes = EngineVotes()
    facts = [applied("a", "x"), applied("b", "x"), applied("c", "y", version=4), applied("d", "y", layout="2-b")]
    assert [votes.add(fact) for fact in facts] == [None] * 4


def test_the_less_frequent_checksum_is_the_minority():
    votes = EngineVotes()
    votes.add(applied("wrong", "y"))
    votes.add(applied("a", "x"))
    found = votes.add(applied("b", "x"))
    assert found is not None
    assert (found.minority, found.expected) == (("wrong",), "x")
    assert str(found) == "the engine of worker wrong serves other weights than the others as version 3"


def test_of_two_engines_the_later_is_the_minority():
    """Without a majority the checksum that was reported first is expected."""
    votes = EngineVotes()
    votes.add(applied("a", "x"))
    found = votes.add(applied("b", "y"))
    assert found is not None
    assert found.minority == ("b",)


def test_the_last_report_of_an_engine_counts():
    """A worker that loaded the version again is compared by the weights it serves now."""
    votes = EngineVotes()
    votes.add(applied("a", "x"))
    assert votes.add(applied("b", "y")) is not None
    assert votes.add(applied("b", "x")) is None


def test_what_is_kept_of_invented_reports_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """A login of a worker may report any texts for any number of workers and versions: each worker of the run reads them."""
    monkeypatch.setattr(weight_announcements, "_MAX_WORKERS", 20)
    monkeypatch.setattr(weight_announcements, "_MAX_VOTES", 50)
    votes = EngineVotes()
    for version in range(1, 101):
        for worker in range(30):
            assert votes.add(applied(f"w{worker}", "x", version=version)) is None
    assert sum(map(len, votes._votes.values())) <= 50
    assert max(map(len, votes._votes.values())) == 20
    for text in ("checksum", "layout"):
        assert votes.add(applied("a", "x", version=100).model_copy(update={text: "y" * 60_000})) is None
    assert "y" not in str(votes._votes)
    assert votes.add(applied("w19", "y", version=100)) is not None
