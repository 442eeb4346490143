"""The published versions known to a worker, and those it has refused."""

from __future__ import annotations

import asyncio

from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.weights.weight_announcements import MAX_VERSIONS, PublishedVersions

V = PolicyVersion


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
