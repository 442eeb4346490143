"""Subject names, all below `penstock.<run>.`; the only file with subject literals.

A run id is 1 to 48 characters of ``a-z 0-9 -``, starting with a letter or digit, so that it can
stand in subjects, stream names, bucket names and object keys alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_args

from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import Split

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")
PREFIX = "penstock"
SPLITS: tuple[Split, ...] = get_args(Split)
# The kinds of events that a role publishes; the trainer publishes every kind.
EVENTS_OF_WORKERS = ("alarm", "log")
EVENTS_OF_REWARD_SERVICES = ("dead", "log", "reward_error")
_READERS = {"tasks": "a rollout worker", "generated": "the reward service", "scored": "the trainer"}


def check_run_id(run_id: str) -> str:
    if not RUN_ID.fullmatch(run_id):
        similar = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:48]
        raise ConfigError(
            f"run id {run_id!r} must be 1 to 48 characters of a-z, 0-9 and '-', starting with a letter or digit"
            + (f", such as {similar}" if RUN_ID.fullmatch(similar) else "")
        )
    return run_id


def reader(subject: str) -> str:
    """Return the role that consumes a subject, in words: what a publisher to a full stream waits for."""
    stage = subject.removeprefix(f"{PREFIX}.").split(".")[1]
    return _READERS.get(stage, f"a reader of {subject}")


def tasks(run_id: str, split: Split | str = "*") -> str:
    """Return the subject of `TaskIssued`; `*` for both splits."""
    return f"{PREFIX}.{run_id}.tasks.{split}"


def generated(run_id: str, split: Split | str = "*") -> str:
    return f"{PREFIX}.{run_id}.generated.{split}"


def scored(run_id: str, split: Split | str = "*") -> str:
    return f"{PREFIX}.{run_id}.scored.{split}"


def of_every_split(subject: Callable[[str, Split], str], run_id: str) -> tuple[str, ...]:
    """Return all subjects of a work queue; a message under another one would have no reader, and stay for ever."""
    return tuple(subject(run_id, split) for split in SPLITS)


def weights_published(run_id: str) -> str:
    return f"{PREFIX}.{run_id}.weights.published"


def weights_applied(run_id: str) -> str:
    return f"{PREFIX}.{run_id}.weights.applied"


def weights_refused(run_id: str) -> str:
    return f"{PREFIX}.{run_id}.weights.refused"


def weights(run_id: str) -> str:
    return f"{PREFIX}.{run_id}.weights.*"


def events(run_id: str, kind: str = "*") -> str:
    return f"{PREFIX}.{run_id}.events.{kind}"


def kind_of_event(subject: str) -> str:
    """Return the kind of event that a subject is for; a login may publish some kinds only."""
    return subject.rpartition(".")[2]


def dead(run_id: str, stage: str = "*") -> str:
    """Return the subject of `DeadLetter`; a stage is `tasks`, `generated` or `scored`."""
    return f"{PREFIX}.{run_id}.dead.{stage}"


def stored(subject: str) -> str:
    """Return the subject that announces each message of a watched stream once it is stored, by the message's subject.

    The announcement has no body: readers take it as a reason to read the stream.
    """
    prefix, run_id, rest = subject.split(".", 2)
    return f"{prefix}.{run_id}.stored.{rest}"
