"""`penstock dead-letters`: list, show and send again the messages that could not be processed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.console import connections
from penstock.console.tools.resending import Letter, RunProgress, content, refusal, resent
from penstock.protocol import group_pack, logs, streams
from penstock.protocol.errors import BlobError, ConfigError, PackError, WireError
from penstock.protocol.facts import DeadLetter, GroupGenerated, GroupScored, Head, Task, TaskIssued, TaskList, decode
from penstock.protocol.record.lineage import CheckpointCommitted, chapters
from penstock.protocol.subjects import check_run_id
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

_FULL_S = 20.0  # deadline for a publication to a full stream
_MOST_SHOWN = 2000  # characters of one text
_POISON_SHOWN = 80  # bytes of an unreadable message


class DeadLetters:
    """The dead letters of one run, and the state needed to send them again; use as a context manager."""

    def __init__(self, run: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Connect; raises ConfigError, BusUnreachable or BusRefused."""
        self.run = check_run_id(run)
        settings = connections.find(arguments, environ, run_id=run).settings
        logs.configure("dead-letters", level="error")
        self.bus = Bus.connect(settings.nats, name="dead-letters", deadline_s=5.0)
        self.blobs = Blobs(settings.s3, deadline_s=20.0)

    def __enter__(self) -> DeadLetters:
        self._state = self.bus.key_value(streams.state_bucket(self.run).bucket).wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.bus.close()

    def all(self) -> list[Letter]:
        """Read all letters, the oldest first; raises MissingStream."""
        marks = {entry.key: json.loads(entry.value) for entry in self._state.entries(f"{streams.RESENT_KEY}.").wait()}
        letters = []
        for message in self.bus.read_stream(f"{self.run}-dead").wait():
            mark = marks.get(f"{streams.RESENT_KEY}.{message.sequence}", {"times": 0, "at": ""})
            fact = decode(message.data, DeadLetter)
            letters.append(Letter(message.sequence, message.at, fact, mark["times"], mark["at"]))
        return letters

    def find(self, numbers: Sequence[int]) -> list[Letter]:
        """Return letters by number; raises ConfigError for an unknown number."""
        letters = {letter.number: letter for letter in self.all()}
        for number in numbers:
            if number not in letters:
                known = f"{min(letters)} to {max(letters)}" if letters else "none"
                raise ConfigError(f"run {self.run} has no dead letter {number}; known are {known}")
        return [letters[number] for number in numbers]

    def progress(self) -> RunProgress:
        """Read how far the run is, and the limits of its newest session."""
        head = self._state.get(streams.HEAD_KEY).wait()
        version = None if head is None else decode(head.value, Head).version
        entry = self._state.get(streams.CHECKPOINT_KEY).wait()
        committed = None if entry is None else decode(entry.value, CheckpointCommitted)
        if committed is None:
            return RunProgress(version)
        for chapter in chapters(committed.record, self.blobs.get):
            for session in chapter.lives[-1:]:
                chosen = json.loads(self.blobs.get(session.config))["settings"]
                return RunProgress(
                    version, committed.step, chosen["trainer"]["steps"], chosen["rollout"]["max_staleness"]
                )
        return RunProgress(version, committed.step)

    def send(self, letter: Letter) -> None:
        """Send a letter again and store that it was sent."""
        message = resent(letter)
        self.bus.publish(message.subject, message.fact, msg_id=message.msg_id, full_deadline_s=_FULL_S).wait()
        mark = {"times": letter.times_sent + 1, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        self._state.put(f"{streams.RESENT_KEY}.{letter.number}", json.dumps(mark).encode()).wait()


def print_list(run: str, arguments: Sequence[str], environ: Mapping[str, str], *, as_json: bool) -> int:
    """Print all letters of a run; return the exit code."""
    with DeadLetters(run, arguments, environ) as dead:
        letters = dead.all()
    if as_json:
        print(json.dumps([_document(letter) for letter in letters]))
        return 0
    if not letters:
        print(f"run {run} has no dead letters")
        return 0
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("id", "when", "stage", "reason", "groups", "attempts", "sent again"):
        table.add_column(name, justify="right" if name in {"id", "attempts"} else "left", overflow="fold")
    for letter in letters:
        ids = letter.fact.group_ids
        groups = f"{ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}" if ids else "unknown"
        when = letter.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        fact = letter.fact
        table.add_row(
            str(letter.number), when, fact.stage, fact.reason, groups, str(fact.num_delivered), letter.sent_at or "–"
        )
    Console().print(table)
    print(f"\nnext: penstock dead-letters show {run} {letters[-1].number}")
    return 0


def print_one(run: str, number: int, arguments: Sequence[str], environ: Mapping[str, str], *, as_json: bool) -> int:
    """Print one letter with its prompts and completions; return the exit code."""
    with DeadLetters(run, arguments, environ) as dead:
        (letter,) = dead.find([number])
        groups, problem = _groups(letter.fact, dead.blobs)
        reason = refusal(letter, dead.progress())
    document = _document(letter) | {"detail": letter.fact.detail, "groups": groups, "unreadable": problem}
    if as_json:
        print(json.dumps(document | {"cannot_be_sent_again": reason}))
        return 0
    for key in ("id", "at", "stage", "reason", "detail", "group_ids", "num_delivered", "sent_at"):
        print(f"{key:14} {document[key] if document[key] not in ('', []) else '–'}")
    for group in groups:
        print(f"\n── {group.pop('group_id')} ──")
        for name, value in group.items():
            for text in value if isinstance(value, list) else [value]:
                print(f"{name:14} {str(text)[:_MOST_SHOWN]}")
    if problem:
        print(f"\nunreadable     {problem}")
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
    with DeadLetters(run, arguments, environ) as dead:
        letters = dead.all() if everything else dead.find(numbers)
        progress = dead.progress()
        num_sent = 0
        for letter in letters:
            reason = refusal(letter, progress, once_more=once_more)
            if reason is not None:
                print(f"{letter.number}: not sent: {reason}", file=sys.stderr)
                continue
            dead.send(letter)
            num_sent += 1
            print(f"{letter.number}: sent again to {letter.fact.stage}: {', '.join(letter.fact.group_ids) or 'poison'}")
    print(f"{num_sent} of {len(letters)} dead letters were sent again")
    return 0 if num_sent == len(letters) else 1


def _document(letter: Letter) -> dict[str, Any]:
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


def _groups(letter: DeadLetter, blobs: Blobs) -> tuple[list[dict[str, Any]], str]:
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
    return [
        {
            "group_id": texts.group_id,
            "prompt": texts.prompt_text,
            "ground_truth": texts.reward.ground_truth,
            "answer": [f"{text} [{why}]" for text, why in zip(texts.completions, texts.finish_reasons, strict=True)],
        }
        for texts in group_pack.decode_texts(pack, row_groups)
    ]
