"""Read the chapters of a record although some are damaged, so that an audit can name what differs.

A chapter whose bytes are not those that its successor names is a violation. It is read on as it is stored, when it
decodes: its steps are compared with what the trainer reported, and the chapters before it are reached.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.forensics.audit.record_fold import Breach
from penstock.protocol.errors import BlobCorrupt, BlobMissing, WireError
from penstock.protocol.facts import BlobRef, decode
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import CheckpointCommitted, LineageChapter
from penstock.protocol.transport.blobs import Blobs

_MAX_GROWTH_BYTES = 1024 * 1024  # an object that is larger than named by more than this is not read


def read_chapters(run_id: str, last: BlobRef | None, blobs: Blobs, faults: list[Breach]) -> list[LineageChapter]:
    """Return the chapters that can be read, the oldest first; add each damage to ``faults``."""
    found: list[LineageChapter] = []
    while last is not None:
        chapter = _chapter(last, blobs, faults)
        if chapter is None:
            break
        if chapter.run_id != run_id:
            faults.append(Breach("record altered", "", f"{last.key} is a chapter of run {chapter.run_id}"))
        if found and chapter.number >= found[-1].number:  # only an altered chapter can name a later one
            detail = f"{last.key} is chapter {chapter.number}, and chapter {found[-1].number} names it as its parent"
            faults.append(Breach("record broken", "", detail))
            break
        found.append(chapter)
        last = chapter.parent
    return found[::-1]


def _chapter(ref: BlobRef, blobs: Blobs, faults: list[Breach]) -> LineageChapter | None:
    try:
        try:
            data = blobs.get(ref)
        except BlobCorrupt as err:
            faults.append(Breach("record altered", "", str(err)))
            sizes = [stat.size_bytes for stat in blobs.list(ref.key) if stat.key == ref.key]
            if not sizes or sizes[0] > ref.size_bytes + _MAX_GROWTH_BYTES:
                return None
            data = blobs.get_unverified(ref.key)
        return decode(data, LineageChapter)
    except BlobMissing as err:
        faults.append(Breach("record missing", "", str(err)))
    except WireError as err:
        faults.append(Breach("record altered", "", f"{ref.key}: {err}"))
    return None


def pointer_faults(
    recorded: Sequence[LineageChapter], state: CheckpointState | None, pointer: CheckpointCommitted | None
) -> list[Breach]:
    """Return differences between the record and the checkpoint that NATS names.

    The folder may be one checkpoint ahead of NATS, after a crash between the two; its record then continues the one that
    NATS names. Any other end was written by somebody else.
    """
    if not recorded:
        return []
    number, last = (pointer.chapter or 0) if pointer else 0, recorded[-1]
    faults = []
    if state is not None and state.chapter > number:
        following = next((chapter for chapter in recorded if chapter.number == number + 1), None)
        if state.chapter > number + 1 or following is None or following.parent != (pointer.record if pointer else None):
            named = f"NATS names chapter {number}" if number else "NATS names none"
            detail = f"the checkpoint in the folder ends with chapter {state.chapter}, {named}, and it does not continue that one"
            faults.append(Breach("checkpoint ahead of NATS", "", detail))
    if pointer is not None and last.number == number:
        faults += [
            Breach("checkpoint differs", "", f"NATS names {name} {named}, the last chapter has {found}")
            for name, named, found in (
                ("step", pointer.step, last.step),
                ("version", pointer.version, last.version),
            )
            if named != found
        ]
    return faults
