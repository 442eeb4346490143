"""`penstock dead-letters`: list, show and send again the messages that could not be processed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from rich.text import Text

from penstock.console import connections
from penstock.console.terminal import console, printable, table
from penstock.console.tools.resending import Letter, RunProgress, content, refusal, resent
from penstock.protocol import logs, streams
from penstock.protocol.errors import BlobCorrupt, BlobError, BlobMissing, ConfigError, PackError, WireError
from penstock.protocol.facts import DeadLetter, Fact, GroupGenerated, GroupScored, Head, TaskIssued, TaskList, decode
from penstock.protocol.groups import Task
from penstock.protocol.record.lineage import CheckpointCommitted, chapters
from penstock.protocol.subjects import check_run_id
from penstock.protocol.trace_context import new_trace
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry

_FULL_S = 20.0  # deadline for a publication to a full stream
_MOST_SHOWN = 2000  # characters of one text
_POISON_SHOWN = 80  # bytes of an unreadable message


F = TypeVar("F", bound=Fact)


class _Mark(BaseModel):
    """When a letter was sent again, as stored."""

    times: int = Field(default=0, ge=0)
    at: str = Field(default="", max_length=100)


class _Trainer(BaseModel):
    steps: int | None = None


class _Rollout(BaseModel):
    max_staleness: int | None = None


class _Settings(BaseModel):
    trainer: _Trainer
    rollout: _Rollout


class _Recorded(BaseModel):
    """The limits among the settings of a session."""

    settings: _Settings


class DeadLetters:
    """The dead letters of one run, and the state needed to send them again; use as a context manager."""

    def __init__(self, run: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Connect; raises ConfigError, BusUnreachable or BusRefused.

        ``unreadable`` are the letters that this build cannot read, by number; ``problems`` what else it could not.
        """
        self.run = check_run_id(run)
        settings = connections.find(arguments, environ, run_id=run).settings
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
        """Read all letters, the oldest first, and note those that cannot be read; raises MissingStream."""
        return self.read(after=0, most=None)

    def read(self, *, after: int, most: int | None) -> list[Letter]:
        """Read the letters whose number is above ``after``, at most ``most`` of them; otherwise like `all`."""
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

    def find(self, numbers: Sequence[int]) -> list[Letter]:
        """Return letters by number; raises ConfigError for an unknown number."""
        letters = {letter.number: letter for letter in self.all()}
        for number in numbers:
            if number in self.unreadable:
                raise ConfigError(
                    f"dead letter {number} of run {self.run} cannot be read by this build: {self.unreadable[number]}"
                )
            if number not in letters:
                known = f"{min(letters)} to {max(letters)}" if letters else "none"
                raise ConfigError(f"run {self.run} has no dead letter {number}; known are {known}")
        return [letters[number] for number in numbers]

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
                    limits = _Recorded.model_validate_json(self.blobs.get(session.config)).settings
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
            print(f"penstock: {printable(problem)}", file=sys.stderr)

    def send(self, letter: Letter) -> None:
        """Send a letter again and store that it was sent."""
        message = resent(letter)
        self.bus.publish(
            message.subject, message.fact, msg_id=message.msg_id, full_deadline_s=_FULL_S, traceparent=new_trace()
        ).wait()
        mark = {"times": letter.times_sent + 1, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        self._state.put(f"{streams.RESENT_KEY}.{letter.number}", json.dumps(mark).encode()).wait()


def print_list(run: str, arguments: Sequence[str], environ: Mapping[str, str], *, as_json: bool) -> int:
    logs.configure("dead-letters", level="error")
    with DeadLetters(run, arguments, environ) as dead:
        letters = dead.all()
        dead.report_unreadable()
    if as_json:
        print(json.dumps([letter_document(letter) for letter in letters]))
        return 0
    if not letters:
        print(f"run {run} has no dead letters" + (" that can be read" if dead.unreadable else ""))
        return 0
    names = ("id", "when", "stage", "reason", "groups", "attempts", "sent again")
    rows = table(*names, right=("id", "attempts"), wide=names)
    for letter in letters:
        ids = letter.fact.group_ids
        groups = f"{ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}" if ids else "unknown"
        when = letter.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        fact = letter.fact
        cells = (fact.stage, fact.reason, groups, str(fact.num_delivered), letter.sent_at or "–")
        rows.add_row(str(letter.number), when, *(Text(printable(cell)) for cell in cells))
    console().print(rows)
    print(f"\nnext: penstock dead-letters show {run} {letters[-1].number}")
    return 0


def print_one(run: str, number: int, arguments: Sequence[str], environ: Mapping[str, str], *, as_json: bool) -> int:
    logs.configure("dead-letters", level="error")
    with DeadLetters(run, arguments, environ) as dead:
        (letter,) = dead.find([number])
        groups, problem = groups_of(letter.fact, dead.blobs)
        reason = refusal(letter, dead.progress(), run=run)
        for problem in dead.problems:
            print(f"penstock: {printable(problem)}", file=sys.stderr)
    document = letter_document(letter) | {"detail": letter.fact.detail, "groups": groups, "unreadable": problem}
    if as_json:
        print(json.dumps(document | {"cannot_be_sent_again": reason}))
        return 0
    for key in ("id", "at", "stage", "reason", "detail", "group_ids", "num_delivered", "sent_at"):
        print(f"{key:14} {printable(document[key]) if document[key] not in ('', []) else '–'}")
    for group in groups:
        print(f"\n── {printable(group.pop('group_id'))} ──")
        for name, value in group.items():
            for text in value if isinstance(value, list) else [value]:
                print(f"{name:14} {printable(str(text)[:_MOST_SHOWN])}")
    if problem:
        print(f"\nunreadable     {printable(problem)}")
    print(f"\n{f'cannot be sent again: {reason}' if reason else f'next: penstock dead-letters resend {run} {number}'}")
    return 0


def resend(
    run: str,
    numbers: Sequence[int],
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    everything: bool,
    once_more: bool,
) -> int:
    """Send letters again; return 1 when one was refused. Raises ConfigError when none is named."""
    if bool(numbers) == everything:
        raise ConfigError(
            "name the ids of the dead letters to send again, or give --all; list them with: penstock dead-letters list"
        )
    logs.configure("dead-letters", level="error")
    with DeadLetters(run, arguments, environ) as dead:
        letters = dead.all() if everything else dead.find(numbers)
        progress = dead.progress()
        dead.report_unreadable()
        num_sent = 0
        for letter in letters:
            reason = refusal(letter, progress, run=run, once_more=once_more)
            if reason is not None:
                print(f"{letter.number}: not sent: {printable(reason)}", file=sys.stderr)
                continue
            dead.send(letter)
            num_sent += 1
            ids = printable(", ".join(letter.fact.group_ids))
            print(f"{letter.number}: sent again to {letter.fact.stage}: {ids or 'poison'}")
    total = len(letters) + (len(dead.unreadable) if everything else 0)
    print(f"{num_sent} of {total} dead letters were sent again")
    return 0 if num_sent == total else 1


def letter_document(letter: Letter) -> dict[str, Any]:
    """Return a letter as `--json` shows it in a list."""
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
    """Return the groups of a letter as text, and the problem when they cannot be read."""
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
    from penstock.protocol.packs import group_pack  # noqa: PLC0415 # numpy and pyarrow: the page's console starts without them

    return [
        {
            "group_id": texts.group_id,
            "prompt": texts.prompt_text,
            "ground_truth": texts.reward.ground_truth,
            "answer": [f"{text} [{why}]" for text, why in zip(texts.completions, texts.finish_reasons, strict=True)],
        }
        for texts in group_pack.decode_texts(pack, row_groups)
    ]
