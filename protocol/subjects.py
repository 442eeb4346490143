"""Subject names, all below `penstock.<run>.`; the only file with subject literals.

A run id is 1 to 48 characters of ``a-z 0-9 -``, starting with a letter or digit, so that it can
stand in subjects, stream names, bucket names and object keys alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol, get_args

from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import Split

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")
PREFIX = "penstock"
SPLITS: tuple[Split, ...] = get_args(Split)
# The kinds of events that a role publishes; the trainer publishes every kind.
EVENTS_OF_WORKERS = ("alarm", "log")
EVENTS_OF_REWARD_SERVICES = ("dead", "log", "reward_error")
_READERS = {"tasks": "a rollout worker", "generated": "the reward service", "scored": "the trainer"}


def similar_run_id(text: str) -> str:
    """Return a text in the letters that a run's name may have; empty if none is left."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48]


def check_run_id(run_id: str) -> str:
    if not RUN_ID.fullmatch(run_id):
        similar = similar_run_id(run_id)
        raise ConfigError(
            f"run id {run_id!r} must be 1 to 48 characters of a-z, 0-9 and '-', starting with a letter or digit"
            + (f", such as {similar}" if RUN_ID.fullmatch(similar) else "")
        )
    return run_id


def reader(subject: str) -> str:
    """Return the role that consumes a subject, in words: what a publisher to a full stream waits for."""
    stage = subject.removeprefix(f"{PREFIX}.").split(".")[1]
    return _READERS.get(stage, f"a reader of {subject}")


class _Subject(Protocol):
    def __call__(self, run_id: str, part: str = "*") -> str: ...


def _of_stage(stage: str) -> _Subject:
    """Return the function from a run's id to a stage's subject of a split or a kind; ``*``, the default, for all of them."""

    def subject(run_id: str, part: str = "*") -> str:
        return f"{PREFIX}.{run_id}.{stage}.{part}"

    return subject


tasks = _of_stage("tasks")  # of `TaskIssued`, by split
generated = _of_stage("generated")
scored = _of_stage("scored")
weights = _of_stage("weights")
events = _of_stage("events")  # by kind
dead = _of_stage("dead")  # of `DeadLetter`, by the stage `tasks`, `generated` or `scored`


def of_every_split(subject: Callable[[str, Split], str], run_id: str) -> tuple[str, ...]:
    """Return all subjects of a work queue; a message under another one would have no reader, and stay for ever."""
    return tuple(subject(run_id, split) for split in SPLITS)


def weights_published(run_id: str) -> str:
    return weights(run_id, "published")


def weights_applied(run_id: str) -> str:
    return weights(run_id, "applied")


def weights_refused(run_id: str) -> str:
    return weights(run_id, "refused")


def kind_of_event(subject: str) -> str:
    """Return the kind of event that a subject is for; a login may publish some kinds only."""
    return subject.rpartition(".")[2]


def stored(subject: str) -> str:
    """Return the subject that announces each message of a watched stream once it is stored, by the message's subject.

    The announcement has no body: readers take it as a reason to read the stream.
    """
    prefix, run_id, rest = subject.split(".", 2)
    return f"{prefix}.{run_id}.stored.{rest}"
