"""Decide whether a dead letter can be sent again, and make the message to send; pure.

The groups keep their ids: by them the trainer counts dead-lettered groups as outstanding again. Everything that
NATS deduplicates by is new: the message id, and the pack's name, from which every later message id is derived.
With the old ones NATS would drop the message as a duplicate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import get_args

from penstock.protocol import subjects
from penstock.protocol.errors import WireError
from penstock.protocol.facts import DeadLetter, Fact, GroupGenerated, GroupScored, TaskIssued, decode
from penstock.protocol.groups import Split
from penstock.protocol.versions import PolicyVersion, is_fresh

FACT_OF_STAGE: dict[str, type[TaskIssued | GroupGenerated | GroupScored]] = {
    "tasks": TaskIssued,
    "generated": GroupGenerated,
    "scored": GroupScored,
}
_AGAIN = re.compile(r"(\.again[0-9-]+)+$")
_MAX_NAME = 180  # characters kept of a pack's name, whose limit is 200


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
        """`train` or `eval`, from the subject of the message."""
        return self.fact.subject.rsplit(".", 1)[-1]


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far the run is; None for what is not known yet."""

    version: int | None = None  # newest published one
    step: int | None = None  # of the newest checkpoint
    total_steps: int | None = None
    max_staleness: int | None = None


def content(letter: DeadLetter) -> TaskIssued | GroupGenerated | GroupScored:
    """Decode the message of a dead letter; raises WireError when this build cannot."""
    expected = FACT_OF_STAGE.get(letter.stage)
    if expected is None:
        raise WireError(f"stage {letter.stage!r} is none of {', '.join(FACT_OF_STAGE)}")
    return decode(letter.payload, expected)


def refusal(letter: Letter, progress: RunProgress, *, run: str | None = None, once_more: bool = False) -> str | None:
    """Return why a letter cannot be sent again; None if it can. ``run`` is the run whose letter it is."""
    try:
        fact = content(letter.fact)
    except WireError as err:
        return f"its message cannot be read by this build: {err}"
    if run is not None and (letter.fact.run_id, fact.run_id) != (run, run):
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
    """Return the message to publish to the stage that gave the letter up; raises WireError."""
    fact = content(letter.fact)
    times = letter.times_sent + 1
    pack_id = f"{_AGAIN.sub('', fact.pack_id)[:_MAX_NAME]}.again{letter.number}-{times}"
    subject = getattr(subjects, letter.fact.stage)(fact.run_id, letter.split)
    return Resent(subject, fact.model_copy(update={"pack_id": pack_id}), f"again:{letter.number}:{times}")
