"""The rewards that a run can use, as the trainer reads them from the registry bucket."""

from __future__ import annotations

from penstock.protocol import rewards_offered
from penstock.protocol.facts import encode
from penstock.protocol.rewards_offered import RewardsOffered
from penstock.protocol.transport.key_value import Entry


def offer(replica: str, *names: str, age_s: float = 1.0, at: float = 100.0, run_id: str = "demo") -> Entry:
    fact = RewardsOffered(run_id=run_id, replica=replica, at=at, names=names)
    return Entry(rewards_offered.key(replica), encode(fact), 1, age_s=age_s)


def test_only_running_replicas_of_the_run_count() -> None:
    """Records of ended processes, other runs, other kinds and other builds are not offers, whatever a replica's clock says."""
    entries = [
        offer("a", "gsm8k", at=1e12),
        offer("dead", "math", age_s=16.0, at=1e12),
        offer("other", "qa", run_id="elsewhere"),
        Entry("endpoints", b"{}", 1),
        Entry(rewards_offered.key("odd"), b"not a fact", 1),
    ]
    offers = rewards_offered.current_offers(entries, run_id="demo")
    assert [found.replica for found in offers] == ["a"]


def test_a_name_is_offered_when_any_replica_has_it() -> None:
    offers = rewards_offered.current_offers([offer("a", "gsm8k"), offer("b", "mine")], run_id="demo")
    assert rewards_offered.names_not_offered({"gsm8k", "mine", "typo"}, offers) == {"typo"}
    assert rewards_offered.names_not_offered({"gsm8k"}, []) == {"gsm8k"}


def test_expired_records_may_be_deleted() -> None:
    """Only offers older than ten minutes are deleted; other keys of the bucket are unchanged."""
    old = 1000.0
    entries = [
        offer("a", at=0.0),
        offer("b", age_s=old, at=1e12),
        Entry("endpoints", b"{}", 1, age_s=old),
        Entry("available.x", b"?", 1, age_s=old),
    ]
    assert rewards_offered.expired_keys(entries) == ["available.b"]
