"""Decide which slot of the model mirror to write to, and which to copy from. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.protocol.errors import ConfigError
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.protocol.weights.manifest_chain import Held

NUM_REGULAR_SLOTS = 2  # the version that is served, and the next one; further slots hold pinned versions


@dataclass(frozen=True, slots=True)
class SlotContents:
    """What one slot holds."""

    base: Held | None  # what patches may start from; None: nothing
    servable: PolicyVersion | None  # None: empty, torn or not verified


def slot_to_write(slots: Sequence[SlotContents], in_use: Collection[PolicyVersion]) -> int:
    """Return the number of the slot to write the next version to; it holds no version in ``in_use``.

    Of the regular slots, the one with the newest contents: it needs the fewest patches. Otherwise an empty further slot.
    Raises ConfigError when all slots are in use.
    """
    free = [number for number, slot in enumerate(slots) if slot.servable is None or slot.servable not in in_use]
    regular = [number for number in free if number < NUM_REGULAR_SLOTS]
    usable = regular or [number for number in free if slots[number].base is None]
    if not usable:
        held = [slot.servable for slot in slots]
        raise ConfigError(f"all {len(slots)} model folders are in use at once, by versions {held}; please report this")
    return max(usable, key=lambda number: _base_version(slots[number]))


def nearest_source(slots: Sequence[SlotContents], target: PolicyVersion) -> int | None:
    """Return the slot with the newest servable version that is not newer than ``target``; None when there is none."""
    servable = {n: slot.servable for n, slot in enumerate(slots) if slot.servable is not None}
    candidates = {number: version for number, version in servable.items() if not is_newer(version, target)}
    return max(candidates, key=lambda number: candidates[number], default=None)


def _base_version(slot: SlotContents) -> int:
    return -1 if slot.base is None else slot.base.version
