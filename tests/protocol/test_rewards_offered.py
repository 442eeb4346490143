"""The rewards that a run can use, as the trainer reads them from the registry bucket."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocol import rewards_offered
from penstock.protocol.facts import encode
from penstock.protocol.rewards_offered import RewardsOffered


@dataclass
class Entry:
    key: str
    value: bytes


def offer(replica: str, *names: str, at: float = 100.0, run_id: str = "demo") -> Entry:
    fact = RewardsOffered(run_id=run_id, replica=replica, at=at, names=names)
    return Entry(rewards_offered.key(replica), encode(fact))


def test_only_running_replicas_of_the_run_count() -> None:
    """Records of ended processes, other runs, other kinds and other builds are not offers."""
    entries = [
        offer("a", "gsm8k"),
        offer("dead", "math", at=80.0),
        offer("other", "qa", run_id="elsewhere"),
        Entry("endpoints", b"{}"),
        Entry(rewards_offered.key("odd"), b"not a fact"),
    ]
    offers = rewards_offered.current_offers(entries, run_id="demo", now=101.0)
    assert [found.replica for found in offers] == ["a"]


def test_a_name_is_offered_when_any_replica_has_it() -> None:
    offers = rewards_offered.current_offers([offer("a", "gsm8k"), offer("b", "mine")], run_id="demo", now=100.0)
    assert rewards_offered.names_not_offered({"gsm8k", "mine", "typo"}, offers) == {"typo"}
    assert rewards_offered.names_not_offered({"gsm8k"}, []) == {"gsm8k"}


def test_expired_records_may_be_deleted() -> None:
    """Only offers older than ten minutes are deleted; other keys of the bucket are unchanged."""
    entries = [offer("a", at=1000.0), offer("b", at=100.0), Entry("endpoints", b"{}"), Entry("available.x", b"?")]
    assert rewards_offered.expired_keys(entries, now=1000.0) == ["available.b"]
