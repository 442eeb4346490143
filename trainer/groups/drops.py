"""Why a group is not trained on: every discarded group has one of these reasons, counted in groups and tokens."""

from __future__ import annotations

from enum import StrEnum


class DropReason(StrEnum):
    """A deliberate discard; the values are what metrics and reports show."""

    STALE = "stale"  # older than rollout.max_staleness at the moment of use
    DUPLICATE = "duplicate"  # it is here already, was trained, or this attempt at it was given up
    FOREIGN = "foreign"  # not a group of this run's data
    FUTURE = "future"  # sampled by a version this trainer has not reached: from a rolled-back life
    UNREADABLE = "unreadable"  # its object is missing, corrupt or not what the message says
    DEAD = "dead"  # it went to the dead letters of another service
    NO_SIGNAL = "no_signal"  # all its rewards are equal, and algorithm.dynamic_sampling replaces such groups
    NO_BASELINE = "no_baseline"  # issued under another algorithm: it has no greedy completion, and remax needs one
    LOST = "lost"  # every queue is empty and it never arrived
    SUPERSEDED = "superseded"  # a life before this one had dropped it, and its next attempt is here
    ABANDONED = "abandoned"  # held-out: its evaluation failed, or ended with the trainer that began it
