"""Fetches and verifies scored groups, named by a message or by the run's record."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.protocol.errors import PackError
from penstock.protocol.facts import BlobRef, ScoredGroup
from penstock.protocol.packs import group_pack, pack_bounds
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.record.lineage import RecordedGroup
from penstock.protocol.trajectory import Group
from penstock.trainer.learner.step_plan import ReadyGroup


def read_groups(
    pack: BlobRef,
    wanted: Sequence[ScoredGroup],
    fetch: Callable[[BlobRef], bytes],
    *,
    promises: Sequence[TaskPromise] = (),
    vocab_size: int | None = None,
) -> list[Group]:
    """Fetch and decode groups of one pack, and check them against the messages that describe them.

    Args:
        pack: The object.
        wanted: The groups, as the message describes them.
        fetch: Reads an object.
        promises: What the task of each group asked for; () where the groups are recorded ones, which were checked.
        vocab_size: Of the model.

    Raises:
        BlobMissing, BlobCorrupt, BlobStoreUnreachable: The object cannot be read.
        PackError: The pack holds something else.
    """
    described = [scored.generated for scored in wanted]
    try:
        for one, promise in zip(described, promises, strict=bool(promises)):
            promise.check_lengths(one.group_id, one.completion_tokens, one.has_baseline, len(one.abandoned))
        pack_bounds.check_message(pack, described)
        groups = group_pack.decode(
            fetch(pack), [one.row_group for one in described], described=described, vocab_size=vocab_size
        )
        for group, promise in zip(groups, promises, strict=bool(promises)):
            promise.check(group)
    except PackError as err:
        raise PackError(f"{pack.key}: {err}") from None
    return groups


def ready_groups(
    packs: Sequence[BlobRef], groups: Sequence[RecordedGroup], fetch: Callable[[BlobRef], bytes]
) -> list[ReadyGroup]:
    found: dict[int, list[Group]] = {}
    for number, pack in enumerate(packs):
        found[number] = read_groups(pack, [g.scored for g in groups if g.pack == number], fetch)
    taken = {number: iter(read) for number, read in found.items()}
    return [ReadyGroup(g.scored, packs[g.pack], next(taken[g.pack])) for g in groups]
