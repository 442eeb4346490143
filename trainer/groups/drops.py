"""Groups that are not trained on, each with one reason; counted in groups and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from penstock.protocol.facts import AbandonedCompletion, BlobRef, ScoredGroup

MAX_CLAIMED_TOKENS = 2**32  # 4096 trajectories of 1,000,000 tokens: no group is larger


class DropReason(StrEnum):
    """Why a group is discarded; the values are what metrics and reports show."""

    STALE = "stale"  # older than rollout.max_staleness at the moment of use
    DUPLICATE = "duplicate"  # it has arrived already, was trained, or this attempt was given up
    FOREIGN = "foreign"  # not a group that this run has issued
    FUTURE = "future"  # sampled by weights this run does not have: of a session that was rolled back
    UNREADABLE = "unreadable"  # its object is missing, corrupt or not what the message says
    QUARANTINED = "quarantined"  # two readers were killed while they processed its message
    DEAD = "dead"  # it went to the dead letters of another service
    NO_SIGNAL = "no_signal"  # all its rewards are equal (group filter `equal_rewards`, algorithm.dynamic_sampling)
    NO_BASELINE = "no_baseline"  # issued under another algorithm: it has no greedy completion, and remax needs one
    LOST = "lost"  # every queue is empty and it never arrived
    SUPERSEDED = "superseded"  # an earlier session had dropped it, and its next attempt has arrived
    ABANDONED = "abandoned"  # held-out: its evaluation failed, or ended with the trainer that started it


_CURES: dict[str, str] = {
    DropReason.NO_SIGNAL: "all rewards of each were equal, and algorithm.dynamic_sampling waits for others: check the reward with "
    "`penstock reward test`, use easier or harder prompts, raise rollout.group_size or rollout.temperature, or set "
    "algorithm.dynamic_sampling = false",
    DropReason.STALE: "older than rollout.max_staleness: raise it, or lower rollout.groups_per_step",
    DropReason.UNREADABLE: "their objects are missing or corrupt: check the object store with `penstock audit`",
    DropReason.LOST: "they were in no queue any more: look for workers and reward services that were stopped",
    DropReason.NO_BASELINE: "issued under another algorithm, and remax needs a greedy completion: they are sampled again",
}


def describe_drops(counts: Mapping[str, int]) -> str:
    most_first = sorted(counts.items(), key=lambda one: -one[1])
    return "; ".join(
        f"{count} {reason}" + (f" ({_CURES[reason]})" if reason in _CURES else "")
        for reason, count in most_first
        if count
    )


@dataclass(frozen=True, slots=True)
class Drop:
    group_id: str
    reason: str  # a `DropReason`, or that of a group filter
    num_tokens: int
    pack: BlobRef | None = None
    abandoned: tuple[AbandonedCompletion, ...] = ()  # completions of it that were started and not kept
    is_final: bool = False  # its prompt is not issued again


def claimed_tokens(scored: ScoredGroup) -> int:
    """Return the number of sampled tokens that a message states, before its pack is read; at most `MAX_CLAIMED_TOKENS`.

    Anybody who may write to the queue chooses it, and the totals in a checkpoint must stay within the range of a count.
    """
    return min(sum(scored.generated.completion_tokens), MAX_CLAIMED_TOKENS)
