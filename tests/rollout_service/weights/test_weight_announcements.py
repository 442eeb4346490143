"""A worker compares its engine's checksum with those of other engines of the same layout."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.facts import WeightsApplied
from penstock.protocol.transport.loop_thread import Pending
from penstock.rollout_service.weights.weight_announcements import WeightAnnouncements


class _Bus:
    def publish(self, *_: Any, **__: Any) -> Pending[None]:
        async def done() -> None:
            return None

        return done()  # type: ignore[return-value]


def applied(worker: str, checksum: str, layout: str) -> WeightsApplied:
    return WeightsApplied(
        run_id="r", worker_id=worker, version=3, previous_version=2, pause_s=0.0, fetch_s=0.0, num_bytes=0,
        checksum=checksum, layout=layout,
    )  # fmt: skip


@pytest.mark.parametrize(("layout", "is_reason"), [("1-a", True), ("2-b", False)])
async def test_only_a_checksum_of_the_announced_layout_is_a_reason_to_look(layout: str, is_reason: bool) -> None:
    """What another writer announces under this worker's id in a layout that its engine does not have is not its engine's."""
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
