"""Whether a dead letter can be sent again, and as what; pure.

The groups keep their ids: the trainer knows by them that they had died, and counts them as alive again. Everything
that the broker recognises repetitions by is new: the message id, and the pack's name, from which every later
message id is made. With the old ones the broker would take the second coming for a repetition, and drop it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from penstock.protocol import subjects
from penstock.protocol.errors import WireError
from penstock.protocol.facts import DeadLetter, Fact, GroupGenerated, GroupScored, TaskIssued, decode
from penstock.protocol.versions import PolicyVersion, is_fresh

FACT_OF_STAGE: dict[str, type[TaskIssued | GroupGenerated | GroupScored]] = {
    "tasks": TaskIssued,
    "generated": GroupGenerated,
    "scored": GroupScored,
}
_AGAIN = re.compile(r"(\.again[0-9-]+)+$")
_MAX_NAME = 180  # of a pack's name, which may have 200 characters in all


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter as it lies in its stream."""

    number: int
    at: datetime
    fact: DeadLetter
    times_sent: int = 0
    sent_at: str = ""  # the last time

    @property
    def split(self) -> str:
        """`train` or `eval`, as the subject says that it came by."""
        return self.fact.subject.rsplit(".", 1)[-1]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far the run is; None for what nobody has told yet."""

    version: int | None = None  # the newest that is published
    step: int | None = None  # of the newest checkpoint
    total_steps: int | None = None
    max_staleness: int | None = None


def content(letter: DeadLetter) -> TaskIssued | GroupGenerated | GroupScored:
    """Read the message that died; raises WireError when this build cannot."""
    expected = FACT_OF_STAGE.get(letter.stage)
    if expected is None:
        raise WireError(f"stage {letter.stage!r} is none of {', '.join(FACT_OF_STAGE)}")
    return decode(letter.payload, expected)


def refusal(letter: Letter, standing: Standing, *, once_more: bool = False) -> str | None:
    """Say why a letter cannot be sent again; None: it can."""
    try:
        fact = content(letter.fact)
    except WireError as err:
        return f"its message cannot be read by this build: {err}"
    if letter.split == "eval":
        return "it is of an evaluation, which failed when it died; the next one asks for its prompts anew"
    if letter.fact.stage == "scored" and letter.fact.group_ids:
        return "the trainer has issued its prompts again by itself, as their next attempt"
    if standing.step is not None and standing.total_steps is not None and standing.step >= standing.total_steps:
        return f"the run is over: {standing.step} of {standing.total_steps} steps are trained"
    if letter.times_sent and not once_more:
        return f"it was sent again at {letter.sent_at}; --once-more sends it another time"
    return _age(fact, standing)


def _age(fact: Fact, standing: Standing) -> str | None:
    """Refuse what the trainer would drop as stale; tasks have no age, they are sampled anew."""
    if standing.version is None or standing.max_staleness is None:
        return None
    match fact:
        case GroupGenerated():
            oldest = min(group.oldest_version for group in fact.groups)
        case GroupScored():
            oldest = min(group.generated.oldest_version for group in fact.groups)
        case _:
            return None
    now = PolicyVersion(standing.version)
    if oldest <= now and is_fresh(now, PolicyVersion(oldest), standing.max_staleness):
        return None
    return (
        f"it was sampled by version {oldest} and the run is at {standing.version}: the trainer takes at most "
        f"{standing.max_staleness} versions of age, and would drop it"
    )


@dataclass(frozen=True, slots=True)
class Resent:
    """What is published."""

    subject: str
    fact: TaskIssued | GroupGenerated | GroupScored
    msg_id: str


def again(letter: Letter) -> Resent:
    """Return the message to publish to the stage the letter died in; raises WireError."""
    fact = content(letter.fact)
    times = letter.times_sent + 1
    pack_id = f"{_AGAIN.sub('', fact.pack_id)[:_MAX_NAME]}.again{letter.number}-{times}"
    subject = getattr(subjects, letter.fact.stage)(fact.run_id, letter.split)
    return Resent(subject, fact.model_copy(update={"pack_id": pack_id}), f"again:{letter.number}:{times}")
