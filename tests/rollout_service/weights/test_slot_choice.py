"""Which model folder the next version is written to."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ConfigError
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest_chain import Held
from penstock.rollout_service.weights.mirror_slot import SlotContents, nearest_source, slot_to_write

EMPTY = SlotContents(base=None, servable=None)


def holding(version: int) -> SlotContents:
    return SlotContents(base=Held(PolicyVersion(version), f"root-{version}"), servable=PolicyVersion(version))


def torn(version: int) -> SlotContents:
    """A slot whose process was killed while it was patched from a version."""
    return SlotContents(base=Held(PolicyVersion(version), f"root-{version}"), servable=None)


@pytest.mark.parametrize(
    ("slots", "in_use", "expected"),
    [
        ([EMPTY, EMPTY, EMPTY, EMPTY], (), 0),
        ([holding(4), EMPTY, EMPTY, EMPTY], (4,), 1),
        ([holding(4), holding(5), EMPTY, EMPTY], (5,), 0),
        ([holding(4), holding(5), EMPTY, EMPTY], (), 1),  # the newest needs the fewest patches
        ([holding(5), torn(4), EMPTY, EMPTY], (5,), 1),
        ([holding(4), holding(5), EMPTY, EMPTY], (4, 5), 2),  # a pinned version is written to a further slot
        ([holding(4), holding(5), holding(1), EMPTY], (1, 4, 5), 3),
        ([holding(4), holding(5), torn(1), EMPTY], (4, 5), 3),  # `trim` empties a further slot, a fetch does not
    ],
)
def test_the_slot_to_write_holds_no_version_in_use(
    slots: list[SlotContents], in_use: tuple[int, ...], expected: int
) -> None:
    assert slot_to_write(slots, [PolicyVersion(version) for version in in_use]) == expected


def test_more_versions_in_use_than_slots_is_an_error() -> None:
    slots = [holding(version) for version in (1, 2, 3, 4)]
    with pytest.raises(ConfigError, match=r"all 4 model folders are in use at once, by versions \[1, 2, 3, 4\]"):
        slot_to_write(slots, [PolicyVersion(version) for version in (1, 2, 3, 4)])


def test_the_source_of_a_copy_is_the_newest_servable_version_that_is_not_newer() -> None:
    slots = [holding(4), torn(6), holding(5), holding(9)]
    assert nearest_source(slots, PolicyVersion(7)) == 2
    assert nearest_source(slots, PolicyVersion(4)) == 0
    assert nearest_source(slots, PolicyVersion(3)) is None
