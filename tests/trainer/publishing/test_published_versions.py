"""Which versions a pack may name: those that workers can have sampled with."""

from __future__ import annotations

from penstock.protocol.versions import PolicyVersion
from penstock.trainer.publishing.publication import MOST_KNOWN, PublishedVersions


def versions(*numbers: int) -> list[PolicyVersion]:
    return [PolicyVersion(number) for number in numbers]


def test_nothing_is_known_about_versions_before_the_oldest_announcement() -> None:
    """The stream loses its oldest messages: older versions are accepted, as all are that were published since."""
    known = PublishedVersions(versions(7, 9), PolicyVersion(12))
    assert known.never_published(versions(*range(14))) == versions(8, 10, 11, 13)
    assert PublishedVersions((), PolicyVersion(12)).never_published(versions(3, 12, 13)) == versions(13)
    assert PublishedVersions((), None).never_published(versions(0)) == versions(0)


def test_what_is_known_of_a_long_run_is_bounded() -> None:
    known = PublishedVersions((), None)
    for number in range(0, 6 * MOST_KNOWN, 2):
        known.add(PolicyVersion(number))
    last = 6 * MOST_KNOWN - 2
    assert len(known._versions) <= 2 * MOST_KNOWN
    assert known.never_published(versions(1, last - 1, last, last + 1)) == versions(last - 1, last + 1)
