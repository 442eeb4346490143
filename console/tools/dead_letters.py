"""`penstock dead-letters`: list, show and send again the messages that could not be processed.

Groups that are sent again keep their ids: by them the trainer counts dead-lettered groups as outstanding again. What
NATS deduplicates by is new: the message id, and the pack's name, from which every later message id is derived. With the
old ones NATS would drop the message as a duplicate.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar, get_args

from pydantic import AliasPath, BaseModel, Field, ValidationError

from penstock.console.connections import NamedRun
from penstock.console.terminal import indented, one_line, print_table
from penstock.protocol import logs, streams, subjects
from penstock.protocol.errors import (
    BlobCorrupt,
    BlobError,
    BlobMissing,
    ConfigError,
    PackError,
    PenstockError,
    WireError,
)
from penstock.protocol.facts import DeadLetter, Fact, GroupGenerated, GroupScored, Head, TaskIssued, TaskList, decode
from penstock.protocol.groups import Split, Task
from penstock.protocol.record.lineage import CheckpointCommitted, chapters
from penstock.protocol.trace_context import new_trace
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry
from penstock.protocol.versions import PolicyVersion, is_fresh

FACT_OF_STAGE: dict[str, type[TaskIssued | GroupGenerated | GroupScored]] = {
    "tasks": TaskIssued,
    "generated": GroupGenerated,
    "scored": GroupScored,
}
_AGAIN = re.compile(r"(\.again[0-9-]+)+$")
_MAX_NAME = 180  # characters kept of a pack's name, whose limit is 200
_FULL_S = 20.0  # deadline for a publication to a full stream
_MOST_SHOWN = 2000  # characters of one text
_POISON_SHOWN = 80  # bytes of an unreadable message
F = TypeVar("F", bound=Fact)


class UnknownLetter(PenstockError):
    """A run has no dead letter of a number, or none that this build can read."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter as stored in its stream."""

    number: int
    at: datetime
    fact: DeadLetter
    times_sent: int = 0
    sent_at: str = ""  # the last time

    @property
    def split(self) -> str:
        return self.fact.subject.rsplit(".", 1)[-1]


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far the run is; None for what is not known yet."""

    version: int | None = None  # newest published one
    step: int | None = None  # of the newest checkpoint
    total_steps: int | None = None
    max_staleness: int | None = None


def content(letter: DeadLetter) -> TaskIssued | GroupGenerated | GroupScored:
    expected = FACT_OF_STAGE.get(letter.stage)
    if expected is None:
        raise WireError(f"stage {letter.stage!r} is none of {', '.join(FACT_OF_STAGE)}")
    return decode(letter.payload, expected)


def refusal(letter: Letter, progress: RunProgress, *, run: str, once_more: bool = False) -> str | None:
    """Return why a letter cannot be sent again; None if it can. ``run`` is the run whose letter it is."""
    try:
        fact = content(letter.fact)
    except WireError as err:
        return f"its message cannot be read by this build: {err}"
    if (letter.fact.run_id, fact.run_id) != (run, run):
        return f"it is of run {letter.fact.run_id} and its message of run {fact.run_id}, not of {run}: it was forged"
    if letter.split not in get_args(Split):
        return f"its subject {letter.fact.subject!r} ends with none of {', '.join(get_args(Split))}"
    if letter.split == "eval":
        return "it belongs to an evaluation that has already failed; the next evaluation issues its prompts again"
    if letter.fact.stage == "scored" and letter.fact.group_ids:
        return "the trainer has already issued its prompts again, as their next attempt"
    if progress.step is not None and progress.total_steps is not None and progress.step >= progress.total_steps:
        return f"the run has ended: {progress.step} of {progress.total_steps} steps were trained"
    if letter.times_sent and not once_more:
        return f"it was sent again at {letter.sent_at}; add --once-more to send it another time"
    return _too_old(fact, progress)


def _too_old(fact: Fact, progress: RunProgress) -> str | None:
    """Return why the trainer would drop the groups as stale; tasks have no samples yet and are never stale."""
    if progress.version is None or progress.max_staleness is None:
        return None
    match fact:
        case GroupGenerated():
            oldest = min(group.oldest_version for group in fact.groups)
        case GroupScored():
            oldest = min(group.generated.oldest_version for group in fact.groups)
        case _:
            return None
    now = PolicyVersion(progress.version)
    if oldest <= now and is_fresh(now, PolicyVersion(oldest), progress.max_staleness):
        return None
    return (
        f"it was sampled by version {oldest} and the run is at {progress.version}: the trainer would drop it, because "
        f"max_staleness is {progress.max_staleness}"
    )


@dataclass(frozen=True, slots=True)
class Resent:
    subject: str
    fact: TaskIssued | GroupGenerated | GroupScored
    msg_id: str


def resent(letter: Letter) -> Resent:
    fact = content(letter.fact)
    times = letter.times_sent + 1
    pack_id = f"{_AGAIN.sub('', fact.pack_id)[:_MAX_NAME]}.again{letter.number}-{times}"
    subject = getattr(subjects, letter.fact.stage)(fact.run_id, letter.split)
    return Resent(subject, fact.model_copy(update={"pack_id": pack_id}), f"again:{letter.number}:{times}")


class _Mark(BaseModel):
    """When a letter was sent again, as stored."""

    times: int = Field(default=0, ge=0)
    at: str = Field(default="", max_length=100)


class _Trainer(BaseModel):
    steps: int | None = None


class _Rollout(BaseModel):
    max_staleness: int | None = None


class _Limits(BaseModel):
    """The limits among the settings of a session; a limit may be missing, its section may not."""

    trainer: _Trainer = Field(validation_alias=AliasPath("settings", "trainer"))
    rollout: _Rollout = Field(validation_alias=AliasPath("settings", "rollout"))


class DeadLetters:
    """The dead letters of one run, and the state needed to send them again; use as a context manager."""

    def __init__(self, run: NamedRun) -> None:
        """Connect; raises ConfigError, BusUnreachable or BusRefused.

        ``unreadable`` are the letters that this build cannot read, by number; ``problems`` what else it could not.
        """
        self.run = run.id
        settings = run.settings
        self.bus = Bus.connect(settings.nats, name="dead-letters", deadline_s=5.0)
        self.blobs = Blobs(settings.s3, deadline_s=20.0)
        self.unreadable: dict[int, str] = {}
        self.problems: list[str] = []

    def __enter__(self) -> DeadLetters:
        self._state = self.bus.key_value(streams.state_bucket(self.run).bucket).wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.bus.close()

    def all(self) -> list[Letter]:
        return self.read(after=0, most=None)

    def read(self, *, after: int, most: int | None) -> list[Letter]:
        marks = {entry.key: self._mark(entry) for entry in self._state.entries(f"{streams.RESENT_KEY}.").wait()}
        letters = []
        self.unreadable = {}
        for message in self.bus.read_stream(f"{self.run}-dead", after=after, most=most).wait():
            mark = marks.get(f"{streams.RESENT_KEY}.{message.sequence}", _Mark())
            try:
                fact = decode(message.data, DeadLetter)
            except WireError as err:
                self.unreadable[message.sequence] = str(err)
                continue
            letters.append(Letter(message.sequence, message.at, fact, mark.times, mark.at))
        return letters

    def _mark(self, entry: Entry) -> _Mark:
        try:
            return _Mark.model_validate_json(entry.value)
        except ValidationError:
            self.problems.append(f"key {entry.key} cannot be read: whether its letter was sent again is unknown")
            return _Mark(times=1, at="(unknown)")

    def find(self, number: int) -> Letter:
        """Return one letter; raises UnknownLetter."""
        for letter in self.read(after=max(number - 1, 0), most=1):
            if letter.number == number:
                return letter
        if number in self.unreadable:
            why = f"cannot be read by this build: {self.unreadable[number]}"
            raise UnknownLetter(f"dead letter {number} of run {self.run} {why}")
        raise UnknownLetter(f"run {self.run} has no dead letter {number}; list them again")

    def progress(self) -> RunProgress:
        """Read how far the run is, and the limits of its newest session; what cannot be read is noted, and None."""
        head = self._stored(streams.HEAD_KEY, Head)
        version = None if head is None else head.version
        committed = self._stored(streams.CHECKPOINT_KEY, CheckpointCommitted)
        if committed is None:
            return RunProgress(version)
        try:
            for chapter in chapters(committed.record, self.blobs.get):
                for session in chapter.lives[-1:]:
                    limits = _Limits.model_validate_json(self.blobs.get(session.config))
                    return RunProgress(version, committed.step, limits.trainer.steps, limits.rollout.max_staleness)
        except (WireError, BlobMissing, BlobCorrupt, ValidationError) as err:
            self.problems.append(
                f"the limits of the run cannot be read ({type(err).__name__}: {err}): age is not checked"
            )
        return RunProgress(version, committed.step)

    def _stored(self, key: str, fact: type[F]) -> F | None:
        entry = self._state.get(key).wait()
        try:
            return None if entry is None else decode(entry.value, fact)
        except WireError as err:
            self.problems.append(f"key {key} of the state bucket cannot be read: {err}")
            return None

    def report_unreadable(self) -> None:
        if self.unreadable:
            number, reason = next(iter(self.unreadable.items()))
            self.problems.insert(
                0,
                f"{len(self.unreadable)} dead letters cannot be read by this build and are left out: "
                f"{', '.join(map(str, list(self.unreadable)[:20]))}; number {number}: {reason}",
            )
        for problem in dict.fromkeys(self.problems):
            print(f"penstock: {one_line(problem)}", file=sys.stderr)

    def send(self, letter: Letter) -> None:
        message = resent(letter)
        self.bus.publish(
            message.subject, message.fact, msg_id=message.msg_id, full_deadline_s=_FULL_S, traceparent=new_trace()
        ).wait()
        mark = {"times": letter.times_sent + 1, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        self._state.put(f"{streams.RESENT_KEY}.{letter.number}", json.dumps(mark).encode()).wait()


def print_list(run: NamedRun, *, as_json: bool) -> int:
    logs.configure("dead-letters", level="error")
    with DeadLetters(run) as dead:
        letters = dead.all()
        dead.report_unreadable()
    if as_json:
        print(json.dumps([letter_document(letter) for letter in letters]))
        return 0
    if not letters:
        print(f"run {run} has no dead letters" + (" that can be read" if dead.unreadable else ""))
        return 0
    names = ("id", "when", "stage", "reason", "groups", "attempts", "sent again")
    print_table(names, map(_row, letters), right=("id", "attempts"), wide=names)
    print(f"\nnext: penstock dead-letters show {run} {letters[-1].number}")
    return 0


def _row(letter: Letter) -> tuple[object, ...]:
    fact, ids = letter.fact, letter.fact.group_ids
    groups = f"{ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}" if ids else "unknown"
    when = letter.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return letter.number, when, fact.stage, fact.reason, groups, fact.num_delivered, letter.sent_at or "–"


def print_one(run: NamedRun, number: int, *, as_json: bool) -> int:
    logs.configure("dead-letters", level="error")
    with DeadLetters(run) as dead:
        letter = dead.find(number)
        groups, problem = groups_of(letter.fact, dead.blobs)
        reason = refusal(letter, dead.progress(), run=run.id)
        for problem in dead.problems:
            print(f"penstock: {one_line(problem)}", file=sys.stderr)
    document = letter_document(letter) | {"detail": letter.fact.detail, "groups": groups, "unreadable": problem}
    if as_json:
        print(json.dumps(document | {"cannot_be_sent_again": reason}))
        return 0
    for key in ("id", "at", "stage", "reason", "detail", "group_ids", "num_delivered", "sent_at"):
        print(f"{key:14} {indented(document[key], 15) if document[key] not in ('', []) else '–'}")
    for group in groups:
        print(f"\n── {one_line(group.pop('group_id'))} ──")
        for name, value in group.items():
            for text in value if isinstance(value, list) else [value]:
                print(f"{name:14} {indented(str(text)[:_MOST_SHOWN], 15)}")
    if problem:
        print(f"\nunreadable     {one_line(problem)}")
    cannot = f"cannot be sent again: {one_line(reason)}" if reason else ""
    print(f"\n{cannot or f'next: penstock dead-letters resend {run} {number}'}")
    return 0


def resend(run: NamedRun, numbers: Sequence[int], *, everything: bool, once_more: bool) -> int:
    """Send letters again; return 1 when one was refused. Raises ConfigError when none is named."""
    if bool(numbers) == everything:
        raise ConfigError(
            "name the ids of the dead letters to send again, or give --all; list them with: penstock dead-letters list"
        )
    logs.configure("dead-letters", level="error")
    with DeadLetters(run) as dead:
        letters = dead.all() if everything else [dead.find(number) for number in numbers]
        progress = dead.progress()
        dead.report_unreadable()
        num_sent = 0
        for letter in letters:
            reason = refusal(letter, progress, run=run.id, once_more=once_more)
            if reason is not None:
                print(f"{letter.number}: not sent: {one_line(reason)}", file=sys.stderr)
                continue
            dead.send(letter)
            num_sent += 1
            ids = one_line(", ".join(letter.fact.group_ids))
            print(f"{letter.number}: sent again to {letter.fact.stage}: {ids or 'poison'}")
    total = len(letters) + (len(dead.unreadable) if everything else 0)
    print(f"{num_sent} of {total} dead letters were sent again")
    return 0 if num_sent == total else 1


def letter_document(letter: Letter) -> dict[str, Any]:
    fact = letter.fact
    return {
        "id": letter.number,
        "at": letter.at.isoformat(),
        "stage": fact.stage,
        "reason": fact.reason,
        "group_ids": list(fact.group_ids),
        "num_delivered": fact.num_delivered,
        "times_sent": letter.times_sent,
        "sent_at": letter.sent_at,
    }


def groups_of(letter: DeadLetter, blobs: Blobs) -> tuple[list[dict[str, Any]], str]:
    try:
        fact = content(letter)
    except WireError as err:
        return [], f"{err}; it begins with {letter.payload[:_POISON_SHOWN]!r}"
    try:
        match fact:
            case TaskIssued():
                return [_task(task) for task in _tasks(fact, blobs)], ""
            case GroupGenerated():
                return _answers(blobs.get(fact.pack), [group.row_group for group in fact.groups]), ""
            case GroupScored():
                answers = _answers(blobs.get(fact.pack), [group.generated.row_group for group in fact.groups])
                return [a | {"reward": list(g.rewards)} for a, g in zip(answers, fact.groups, strict=True)], ""
    except (BlobError, PackError, WireError) as err:
        return [], str(err)


def _tasks(fact: TaskIssued, blobs: Blobs) -> Sequence[Task]:
    return fact.tasks if fact.tasks_blob is None else decode(blobs.get(fact.tasks_blob), TaskList).tasks


def _task(task: Task) -> dict[str, Any]:
    return {"group_id": task.group_id, "prompt": task.prompt_text, "ground_truth": task.reward.ground_truth}


def _answers(pack: bytes, row_groups: Sequence[int]) -> list[dict[str, Any]]:
    from penstock.protocol.packs import group_pack  # noqa: PLC0415 # numpy and pyarrow: a console starts without

    return [
        {
            "group_id": texts.group_id,
            "prompt": texts.prompt_text,
            "ground_truth": texts.reward.ground_truth,
            "answer": [f"{text} [{why}]" for text, why in zip(texts.completions, texts.finish_reasons, strict=True)],
        }
        for texts in group_pack.decode_texts(pack, row_groups)
    ]
