"""Published versions as a worker knows them, and what workers announce: all readers find the same minority."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.protocol.facts import WeightsApplied
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.loop_thread import Pending
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.weights import weight_announcements
from penstock.rollout_service.weights.weight_announcements import (
    MAX_VERSIONS,
    EngineVotes,
    PublishedVersions,
    WeightAnnouncements,
)

V = PolicyVersion


def applied(worker: str, checksum: str, layout: str = "1-a", *, version: int = 3) -> WeightsApplied:
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


@pytest.mark.parametrize(
    ("reports", "minority"),
    [
        ([("a", "x"), ("b", "x")], None),
        ([("wrong", "y"), ("a", "x"), ("b", "x")], ("wrong",)),
        ([("a", "x"), ("b", "y")], ("b",)),  # without a majority the checksum that was reported first is expected
        ([("a", "x"), ("b", "y"), ("b", "x")], None),  # it has loaded the version again
        ([("a", "x"), ("b", "y", "2-b")], None),
    ],
)
def test_the_less_frequent_checksum_of_a_version_and_layout_is_the_minority(
    reports: list[tuple[str, ...]], minority: tuple[str, ...] | None
) -> None:
    votes = EngineVotes()
    assert votes.add(applied("other", "z", version=4)) is None
    *_, found = [votes.add(applied(*report)) for report in reports]
    assert (None if found is None else (found.minority, found.expected)) == (
        None if minority is None else (minority, "x")
    )
    assert found is None or str(found).startswith(
        f"the engine of worker {found.minority[0]} serves other weights than the"
    )


def test_what_is_kept_of_invented_reports_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """A login may report any texts for any number of workers and versions: each worker of the run reads them."""
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


class _Bus:
    def publish(self, *_: Any, **__: Any) -> Pending[None]:
        async def done() -> None:
            return None

        return done()  # type: ignore[return-value]


@pytest.mark.parametrize(("layout", "is_reason"), [("1-a", True), ("2-b", False)])
async def test_only_a_checksum_of_the_announced_layout_is_a_reason_to_look(layout: str, is_reason: bool) -> None:
    """What another announces under this worker's id, in a layout that its engine does not have, is not its engine's."""
    announcements = WeightAnnouncements(_Bus(), run_id="r", worker_id="w")  # type: ignore[arg-type]
    own = applied("w", "mine", "1-a")
    await announcements.announce_applied(own)
    for fact in (applied("a", "theirs", layout), applied("b", "theirs", layout), own, applied("w", "forged", layout)):
        announcements._compare(fact)
    assert (announcements.take_disagreement() is not None) is is_reason
    assert announcements.take_disagreement() is None


async def test_what_others_say_about_verified_weights_is_no_reason_to_look() -> None:
    """A mirror, and an engine whose checksum is that of its files, are compared with the manifest."""
    announcements = WeightAnnouncements(_Bus(), run_id="r", worker_id="w")  # type: ignore[arg-type]
    own = applied("w", "mine", "mirror")
    await announcements.announce_applied(own, is_verified=True)
    for fact in (own, applied("a", "theirs", "mirror"), applied("b", "theirs", "mirror")):
        announcements._compare(fact)
    assert announcements.take_disagreement() is None


async def test_both_sides_of_a_tie_look() -> None:
    """Of two engines either may be wrong: the one that reported first has a reason too."""
    announcements = WeightAnnouncements(_Bus(), run_id="r", worker_id="w")  # type: ignore[arg-type]
    own = applied("w", "mine", "1-a")
    await announcements.announce_applied(own)
    for fact in (own, applied("a", "theirs", "1-a")):
        announcements._compare(fact)
    assert announcements.take_disagreement() is not None
    announcements._compare(applied("b", "mine", "1-a"))
    assert announcements.take_disagreement() is None


def manifest(name: str) -> BlobRef:
    return BlobRef(key=name, size_bytes=1, sha256="0" * 64)


def test_the_newest_version_is_the_highest_that_was_not_refused() -> None:
    """A late announcement of an older version changes nothing; a refused version counts again with another manifest."""
    published = PublishedVersions()
    assert published.newest() is None
    assert published.add(V(5), manifest("a"))
    assert not published.add(V(5), manifest("a"))
    assert published.add(V(3), manifest("b"))
    assert published.newest() == 5
    published.refuse(V(5), published.manifest(V(5)))
    assert published.newest() == 3
    assert published.add(V(5), manifest("answer"))
    assert published.newest() == 5
    assert published.manifest(V(5)) == manifest("answer")


def test_an_announcement_waits_for_the_head() -> None:
    """No version beyond the head is published, however often it is announced; those below it are."""
    published = PublishedVersions()
    assert published.announce(V(4), manifest("d"))
    assert published.announce(V(9), manifest("forged"))
    assert published.newest() is None
    published.add(V(5), manifest("e"))
    assert (published.newest(), len(published)) == (5, 2)
    assert not published.announce(V(3), manifest("c"))
    assert published.announce(V(6), manifest("f"))
    assert (published.newest(), V(3) in published, V(6) in published) == (5, True, False)
    published.add(V(9), manifest("i"))
    assert published.newest() == 9
    assert published.manifest(V(9)) == manifest("i")


def test_no_announcement_replaces_a_manifest_that_the_head_named() -> None:
    published = PublishedVersions()
    published.add(V(5), manifest("named"))
    published.add(V(7), manifest("newest"))
    for version in (5, 7):
        assert not published.announce(V(version), manifest("forged"))
    assert (published.manifest(V(5)), published.manifest(V(7))) == (manifest("named"), manifest("newest"))
    published.announce(V(6), manifest("corrupt"))
    published.announce(V(6), manifest("again"))
    assert published.manifest(V(6)) == manifest("again")


def test_announcements_count_where_the_head_cannot_be_read() -> None:
    published = PublishedVersions()
    published.announce(V(4), manifest("d"))
    published.add_announced()
    assert published.newest() == 4
    for version in range(5, 5 + 2 * MAX_VERSIONS):
        published.announce(V(version), manifest("forged"))
    published.add_announced()
    assert len(published) == MAX_VERSIONS


async def test_a_refusal_ends_the_wait_for_a_version() -> None:
    published = PublishedVersions()
    for version in (1, 2):
        published.add(V(version), manifest(str(version)))
    waiting = asyncio.create_task(published.wait_until_refused(V(2)))
    await asyncio.sleep(0)
    published.refuse(V(1), published.manifest(V(1)))
    await asyncio.sleep(0)
    assert not waiting.done()
    published.refuse(V(2), published.manifest(V(2)))
    await asyncio.wait_for(waiting, 60)
