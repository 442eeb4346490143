"""Read everything an audit needs: checkpoint, record, queues, dead letters, objects; consumes no message.

A running run changes while it is read. Queues are read in the order in which a group passes them, and a service
publishes a result before it acknowledges its input, so no group is missed. When another checkpoint is committed
in the meantime, everything is read again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import AliasPath, BaseModel, Field, ValidationError

from penstock.forensics.audit.audit_checks import LETTERS, STAGES, AuditInputs
from penstock.forensics.audit.record_checks import Breach, from_events, from_metrics
from penstock.protocol import blob_keys, streams
from penstock.protocol.errors import BlobCorrupt, BlobMissing, MalformedFact, MissingStream, WireError
from penstock.protocol.facts import DeadLetter, GroupGenerated, GroupScored, TaskIssued, TaskList, decode
from penstock.protocol.files import read_regular
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.checkpoint_state import STATE_FILE, CheckpointState, committed
from penstock.protocol.record.lineage import CheckpointCommitted, LineageChapter
from penstock.protocol.subjects import RUN_ID
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.delivery import MAX_LETTER_IDS
from penstock.protocol.transport.tail import StoredMessage

_MAX_GROWTH_BYTES = 1024 * 1024  # an object that is larger than named by more than this is not read
_MAX_READS = 5  # of a run that commits faster than it can be read


def read_chapters(run_id: str, last: BlobRef | None, blobs: Blobs, faults: list[Breach]) -> list[LineageChapter]:
    """Return the chapters that can be read, the oldest first; add each damage to ``faults``."""
    chapters: list[LineageChapter] = []
    while last is not None:
        chapter = _chapter(last, blobs, faults)
        if chapter is None:
            break
        if chapter.run_id != run_id:
            faults.append(Breach("record altered", "", f"{last.key} is a chapter of run {chapter.run_id}"))
        if chapters and chapter.number >= chapters[-1].number:  # only an altered chapter can name a later one
            detail = f"{last.key} is chapter {chapter.number}, and chapter {chapters[-1].number} names it as its parent"
            faults.append(Breach("record broken", "", detail))
            break
        chapters.append(chapter)
        last = chapter.parent
    return chapters[::-1]


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

    The folder may be one checkpoint ahead of NATS, after a crash between the two; its record then continues the one
    that NATS names. Any other end was written by somebody else.
    """
    if not recorded:
        return []
    number, last = (pointer.chapter or 0) if pointer else 0, recorded[-1]
    faults = []
    if state is not None and state.chapter > number:
        following = next((chapter for chapter in recorded if chapter.number == number + 1), None)
        if state.chapter > number + 1 or following is None or following.parent != (pointer.record if pointer else None):
            named = f"NATS names chapter {number}" if number else "NATS names none"
            ends = f"the checkpoint in the folder ends with chapter {state.chapter}"
            detail = f"{ends}, {named}, and it does not continue that one"
            faults.append(Breach("checkpoint ahead of NATS", "", detail))
    if pointer is not None and last.number == number:
        pairs = (("step", pointer.step, last.step), ("version", pointer.version, last.version))
        faults += [
            Breach("checkpoint differs", "", f"NATS names {name} {named}, the last chapter has {recorded_value}")
            for name, named, recorded_value in pairs
            if named != recorded_value
        ]
    return faults


class _Limits(BaseModel):
    """What an audit reads of the settings of a session; older runs had no section ``retention``."""

    max_staleness: int = Field(ge=0, validation_alias=AliasPath("settings", "rollout", "max_staleness"))
    max_uses: int = Field(ge=1, validation_alias=AliasPath("settings", "algorithm", "max_trained_count"))
    trained_packs_h: float = Field(default=0.0, validation_alias=AliasPath("settings", "retention", "trained_packs_h"))


def gather(run_id: str, bus: Bus, blobs: Blobs, checkpoints: Path, *, reads_packs: bool) -> AuditInputs:
    """Read a run until its newest checkpoint is the same before and after.

    Args:
        run_id: The run.
        bus: Its NATS.
        blobs: Its object store.
        checkpoints: The folder of its checkpoints; it may be missing.
        reads_packs: Fetch and hash every pack; otherwise check only that it exists with its size.

    Raises:
        MissingStream, BusUnreachable, BlobStoreUnreachable: A store cannot be read.
    """
    for _ in range(_MAX_READS):
        faults: list[Breach] = []
        pointer = _pointer(run_id, bus, faults)
        audit_inputs = _read(run_id, bus, blobs, checkpoints, pointer, faults)
        if _pointer(run_id, bus, []) == pointer:
            pack_faults = _pack_faults(run_id, blobs, audit_inputs.chapters, reads_packs=reads_packs)
            return replace(audit_inputs, pack_faults=pack_faults)
    raise MalformedFact(
        f"run {run_id} committed a checkpoint during each of {_MAX_READS} reads; "
        "audit it between two checkpoints, or after it has ended"
    )


def _pointer(run_id: str, bus: Bus, faults: list[Breach]) -> CheckpointCommitted | None:
    entry = bus.key_value(streams.state_bucket(run_id).bucket).wait().get(streams.CHECKPOINT_KEY).wait()
    try:
        return None if entry is None else decode(entry.value, CheckpointCommitted)
    except WireError as err:
        faults.append(Breach("checkpoint unreadable", "", f"key {streams.CHECKPOINT_KEY} of the state bucket: {err}"))
        return None


def _read(
    run_id: str, bus: Bus, blobs: Blobs, root: Path, pointer: CheckpointCommitted | None, faults: list[Breach]
) -> AuditInputs:
    unreadable: dict[str, list[str]] = {}
    state = _newest_state(root, pointer, faults)
    last = state.record if state else (pointer.record if pointer else None)
    recorded = read_chapters(run_id, last, blobs, faults)
    faults += pointer_faults(recorded, state, pointer)
    waiting = {stage: _waiting(bus, blobs, run_id, stage, unreadable, faults) for stage in STAGES}
    letters = _letters(bus, run_id, unreadable, faults)
    window, max_uses, packs_expire = _limits(recorded, blobs, faults)
    return AuditInputs(
        run_id=run_id,
        chapters=recorded,
        state=state,
        waiting=waiting,
        dead={group_id: letter.reason for letter in letters for group_id in letter.group_ids},
        all_letters=_has_all_letters(bus, run_id) and all(len(letter.group_ids) < MAX_LETTER_IDS for letter in letters),
        window=window,
        packs_expire=packs_expire,
        max_uses=max_uses,
        faults=tuple(faults),
        unreadable=unreadable,
        reports=(from_events(run_id, bus), from_metrics(root.parent, state)),
    )


def _messages(bus: Bus, run_id: str, stage: str, faults: list[Breach]) -> list[StoredMessage]:
    try:
        return bus.read_stream(f"{run_id}-{stage}").wait()
    except MissingStream as err:
        faults.append(Breach("stream missing", "", str(err)))
        return []


def _has_all_letters(bus: Bus, run_id: str) -> bool:
    try:
        return bus.stream_state(f"{run_id}-dead").wait().first_sequence <= 1
    except MissingStream:  # `_letters` has reported it
        return False


def _letters(bus: Bus, run_id: str, unreadable: dict[str, list[str]], faults: list[Breach]) -> list[DeadLetter]:
    letters = []
    for message in _messages(bus, run_id, "dead", faults):
        try:
            letters.append(decode(message.data, DeadLetter))
        except WireError as err:
            unreadable.setdefault(LETTERS, []).append(f"number {message.sequence} ({err})")
    return letters


def _newest_state(root: Path, pointer: CheckpointCommitted | None, faults: list[Breach]) -> CheckpointState | None:
    """Return the newest checkpoint's state; the folder may be one ahead of NATS after a crash between the two."""
    try:
        checkpoints = committed(root)
    except (OSError, MalformedFact) as err:
        faults.append(Breach("checkpoint unreadable", "", str(err)))
        return None
    if not checkpoints:
        return None
    folder, state = checkpoints[-1]
    if pointer is not None and pointer.chapter is not None:
        if state.chapter < pointer.chapter:
            detail = f"{folder} ends with chapter {state.chapter}, {pointer.chapter} is committed"
            faults.append(Breach("checkpoint missing", "", detail))
        elif state.chapter == pointer.chapter:
            digest = hashlib.sha256(read_regular(folder / STATE_FILE)).hexdigest()
            if digest != pointer.state_sha256:
                faults.append(Breach("checkpoint altered", "", f"{folder / STATE_FILE} is not what was committed"))
    return state


def _waiting(
    bus: Bus, blobs: Blobs, run_id: str, stage: str, unreadable: dict[str, list[str]], faults: list[Breach]
) -> dict[str, int]:
    tokens_by_group: dict[str, int] = {}
    for message in _messages(bus, run_id, stage, faults):
        try:
            match stage:
                case "tasks":
                    issued = decode(message.data, TaskIssued)
                    tasks = issued.tasks
                    if issued.tasks_blob is not None:
                        tasks = decode(blobs.get(issued.tasks_blob), TaskList).tasks
                    tokens_by_group |= {task.group_id: 0 for task in tasks}
                case "generated":
                    groups = decode(message.data, GroupGenerated).groups
                    tokens_by_group |= {group.group_id: sum(group.completion_tokens) for group in groups}
                case _:
                    scored = decode(message.data, GroupScored).groups
                    tokens_by_group |= {g.generated.group_id: sum(g.generated.completion_tokens) for g in scored}
        except (WireError, BlobMissing, BlobCorrupt) as err:  # its consumer will dead-letter it
            unreadable.setdefault(f"messages of {stage}", []).append(f"number {message.sequence} ({err})")
    return tokens_by_group


def _pack_faults(run_id: str, blobs: Blobs, recorded: Iterable[LineageChapter], *, reads_packs: bool) -> dict[str, str]:
    used = {pack.key: pack for chapter in recorded for step in chapter.steps for pack in step.packs}
    packs = {pack.key: pack for chapter in recorded for pack in chapter.closed_packs} | used
    owners = {run_id, *(blob_keys.owner_of_pack(key) for key in packs)}  # a run may train on the input of another
    owners = {owner for owner in owners if RUN_ID.fullmatch(owner)}
    stored = {f.key: f.size_bytes for owner in sorted(owners) for f in blobs.list(blob_keys.groups_prefix(owner))}
    faults = {key: "missing" for key in packs if key not in stored}
    faults |= {key: "altered" for key, pack in packs.items() if key in stored and stored[key] != pack.size_bytes}
    if reads_packs:
        for key in packs.keys() - faults.keys():
            try:
                blobs.get(packs[key])
            except BlobMissing:
                faults[key] = "missing"
            except BlobCorrupt:
                faults[key] = "altered"
    return faults


def _limits(
    recorded: Iterable[LineageChapter], blobs: Blobs, faults: list[Breach]
) -> tuple[int | None, int | None, bool]:
    """Return the smallest max_staleness and largest max_trained_count of any session, and whether packs may expire.

    They bound how far back the ledger must reach, how often a group may be trained on, and whether a missing pack is
    a fault.
    """
    windows, uses, packs_expire = [], [], False
    for config in {session.config.key: session.config for chapter in recorded for session in chapter.lives}.values():
        try:
            limits = _Limits.model_validate_json(blobs.get(config))
        except (BlobMissing, BlobCorrupt, ValidationError) as err:
            faults.append(Breach("record altered", "", f"settings {config.key}: {type(err).__name__}: {err}"))
            continue
        windows.append(limits.max_staleness)
        uses.append(limits.max_uses)
        packs_expire |= limits.trained_packs_h > 0.0
    return min(windows, default=None), max(uses, default=None), packs_expire
