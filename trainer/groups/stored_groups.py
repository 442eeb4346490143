"""Fetches and verifies scored groups, named by a message or by the run's record."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.protocol import group_pack
from penstock.protocol.errors import PackError
from penstock.protocol.facts import BlobRef, ScoredGroup
from penstock.protocol.record.lineage import RecordedGroup
from penstock.protocol.trajectory import Group
from penstock.trainer.learner.step_plan import ReadyGroup


def read_groups(pack: BlobRef, wanted: Sequence[ScoredGroup], fetch: Callable[[BlobRef], bytes]) -> list[Group]:
    """Fetch and decode groups of one pack, and check them against the messages that describe them.

    Raises BlobMissing, BlobCorrupt, BlobStoreUnreachable, or PackError when the pack holds something else.
    """
    groups = group_pack.decode(fetch(pack), [scored.generated.row_group for scored in wanted])
    for scored, group in zip(wanted, groups, strict=True):
        if group.summary(scored.generated.row_group) != scored.generated:
            raise PackError(
                f"row group {scored.generated.row_group} of {pack.key} holds group {group.group_id} "
                f"({len(group.trajectories)} trajectories), not {scored.generated.group_id} as the message describes it"
            )
    return groups


def ready_groups(
    packs: Sequence[BlobRef], groups: Sequence[RecordedGroup], fetch: Callable[[BlobRef], bytes]
) -> list[ReadyGroup]:
    """Return the recorded groups of a step in their order, fetching each pack once. Raises as `read_groups`."""
    found: dict[int, list[Group]] = {}
    for number, pack in enumerate(packs):
        found[number] = read_groups(pack, [g.scored for g in groups if g.pack == number], fetch)
    taken = {number: iter(read) for number, read in found.items()}
    return [ReadyGroup(g.scored, packs[g.pack], next(taken[g.pack])) for g in groups]
