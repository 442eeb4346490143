"""Streams, consumers and key-value buckets of a run, as data.

`deploy/bootstrap.py` creates them; services only bind to them and say how to create them when they
are missing. The three work queues are bounded and refuse new messages when full: back-pressure is
the broker's, a refused publisher waits. ``max_deliver`` is unlimited everywhere: after the last
delivery the broker would leave the message in the stream, unread. Services count deliveries and write dead letters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.protocol import subjects
from penstock.protocol.groups import Split
from penstock.protocol.heartbeats import LIVE_TTL_S

StreamStage = Literal["tasks", "generated", "scored", "weights", "events", "dead"]
KEEPALIVES_PER_ACK_WAIT = 3  # a held message is renewed this often within its ack wait
# The server keeps the file that a bucket writes in memory until it is full: 4 MB for this bucket, 8 MB from 32 MiB on.
_SMALL_BUCKET_BYTES = 16 * 1024 * 1024
CONSUMER_IDLE_S = 600.0  # readers of a limits stream need no consumer; one that an operator made does not stay
HEAD_KEY = "head"  # `Head`
FLOOR_KEY = "floor"  # `RetirementFloor`
KEPT_KEY = "kept"  # `KeptVersions`
LEASE_KEY = "lease"  # `Lease`
RESENT_KEY = "resent"  # below it, by the number of a dead letter: when it was sent again
CHECKPOINT_KEY = "checkpoint"  # `CheckpointCommitted` of protocol/record/lineage.py
LEASE_RENEWAL_S = 3.0
GARBAGE_LEASE = "gc"
EXPIRY_LEASE = "expiry"


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One JetStream stream. Sizes in bytes, times in seconds; 0 means no limit."""

    name: str
    subjects: tuple[str, ...]
    retention: Literal["workqueue", "limits"]
    max_msgs: int
    max_bytes: int
    max_age_s: float = 0.0
    duplicate_window_s: float = 600.0
    max_msg_bytes: int = 64 * 1024
    consumer_idle_s: float = 0.0  # a consumer, durable or not, is deleted after this long without a pull
    announces: bool = False  # each stored message is announced to `subjects.stored`, for readers without a consumer


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    stream: str
    durable: str
    filter_subject: str
    ack_wait_s: float
    max_ack_pending: int
    run_id: str
    stage: str
    marks_bucket: str = ""  # where messages in progress are marked (`KillMarks`); empty: they are not


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """One key-value bucket; ``ttl_s`` 0: keys do not expire.

    A write to one that is not ``synced`` does not wait for the disk: the newest values are lost when the server
    crashes. With ``key_ttls`` a key may have its own TTL, even endless: readers ignore what is older than ``ttl_s``.
    """

    bucket: str
    ttl_s: float = 0.0
    history: int = 1
    synced: bool = True
    max_bytes: int = 64 * 1024 * 1024
    key_ttls: bool = False


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How far each stage may run ahead of the next, in messages; chosen at bootstrap."""

    max_tasks: int = 20_000
    max_generated: int = 20_000
    max_scored: int = 20_000
    max_bytes: int = 512 * 1024 * 1024
    events_age_s: float = 0.0  # 0: they stay until the stream is full, then the oldest go
    dead_age_s: float = 0.0
    ack_wait_s: float = 9.0  # the tasks of a worker that was killed are redelivered within this time
    scored_ack_wait_s: float = 30.0  # the trainer holds messages until a checkpoint


def stream_name(run_id: str, stage: StreamStage) -> str:
    return f"{run_id}-{stage}"


def stream_names(run_id: str) -> tuple[str, ...]:
    return tuple(spec.name for spec in streams(run_id))


def streams(run_id: str, limits: StreamLimits | None = None) -> tuple[StreamSpec, ...]:
    limits = limits or StreamLimits()

    def queue(stage: StreamStage, subject: Callable[[str, Split], str], max_msgs: int) -> StreamSpec:
        of_splits = subjects.of_every_split(subject, run_id)
        return StreamSpec(stream_name(run_id, stage), of_splits, "workqueue", max_msgs, limits.max_bytes)

    def watched(stage: StreamStage, subject: Callable[[str], str], max_msgs: int, **more: Any) -> StreamSpec:
        name, of_stage = stream_name(run_id, stage), (subject(run_id),)
        spec = StreamSpec(name, of_stage, "limits", max_msgs, limits.max_bytes, **more)
        return replace(spec, consumer_idle_s=CONSUMER_IDLE_S, announces=True)

    return (
        queue("tasks", subjects.tasks, limits.max_tasks),
        queue("generated", subjects.generated, limits.max_generated),
        queue("scored", subjects.scored, limits.max_scored),
        watched("weights", subjects.weights, 100_000),
        watched("events", subjects.events, 1_000_000, max_age_s=limits.events_age_s),
        watched("dead", subjects.dead, 1_000_000, max_age_s=limits.dead_age_s, max_msg_bytes=256 * 1024),
    )


def tasks_consumer(run_id: str, split: str, limits: StreamLimits | None = None) -> ConsumerSpec:
    subject, marks = subjects.tasks(run_id, split), scoring_bucket(run_id).bucket
    return _consumer(run_id, "tasks", f"rollout-{split}", subject, (limits or StreamLimits()).ack_wait_s, marks)


def generated_consumer(run_id: str, limits: StreamLimits | None = None) -> ConsumerSpec:
    subject, marks = subjects.generated(run_id), scoring_bucket(run_id).bucket
    return _consumer(run_id, "generated", "reward", subject, (limits or StreamLimits()).ack_wait_s, marks)


def scored_consumer(run_id: str, split: str, limits: StreamLimits | None = None) -> ConsumerSpec:
    """Return the trainer's consumer for one split; it holds messages until a checkpoint."""
    subject, ack_wait_s = subjects.scored(run_id, split), (limits or StreamLimits()).scored_ack_wait_s
    return _consumer(run_id, "scored", f"trainer-{split}", subject, ack_wait_s)


def _consumer(
    run_id: str, stage: StreamStage, durable: str, subject: str, ack_wait_s: float, marks_bucket: str = ""
) -> ConsumerSpec:
    return ConsumerSpec(stream_name(run_id, stage), durable, subject, ack_wait_s, 100_000, run_id, stage, marks_bucket)


def consumers(run_id: str, limits: StreamLimits | None = None) -> tuple[ConsumerSpec, ...]:
    return (
        tasks_consumer(run_id, "train", limits),
        tasks_consumer(run_id, "eval", limits),
        generated_consumer(run_id, limits),
        scored_consumer(run_id, "train", limits),
        scored_consumer(run_id, "eval", limits),
    )


def state_bucket(run_id: str) -> BucketSpec:
    """Return the bucket of the run's durable state: ``head``, ``lease``, ``checkpoint``, ``floor``, ``resent``."""
    return BucketSpec(f"{run_id}-state", max_bytes=_SMALL_BUCKET_BYTES)


def live_bucket(run_id: str) -> BucketSpec:
    return BucketSpec(f"{run_id}-live", ttl_s=LIVE_TTL_S, synced=False, max_bytes=_SMALL_BUCKET_BYTES, key_ttls=True)


def lease_bucket(run_id: str) -> BucketSpec:
    """Return the bucket of leases and semaphore slots; a key expires 10 s after its last renewal."""
    return BucketSpec(f"{run_id}-leases", ttl_s=10.0, max_bytes=_SMALL_BUCKET_BYTES)


def registry_bucket() -> BucketSpec:
    return BucketSpec("penstock-rewards", max_bytes=_SMALL_BUCKET_BYTES)


def secrets_bucket() -> BucketSpec:
    """Return the bucket of the secrets of reward endpoints; only reward services may read it."""
    return BucketSpec("penstock-secrets", max_bytes=_SMALL_BUCKET_BYTES)


def environments_bucket() -> BucketSpec:
    return BucketSpec("penstock-environments", max_bytes=_SMALL_BUCKET_BYTES, key_ttls=True)


def shared_buckets() -> tuple[BucketSpec, ...]:
    return (registry_bucket(), secrets_bucket(), environments_bucket())


def scoring_bucket(run_id: str) -> BucketSpec:
    """Return the bucket of partly scored packs, where a replica resumes, and of marked messages (`kill_mark_key`)."""
    return BucketSpec(f"{run_id}-scoring", ttl_s=86_400.0)


def run_buckets(run_id: str) -> tuple[BucketSpec, ...]:
    return (state_bucket(run_id), live_bucket(run_id), lease_bucket(run_id), scoring_bucket(run_id))


def buckets(run_id: str) -> tuple[BucketSpec, ...]:
    return (*run_buckets(run_id), *shared_buckets())


def heartbeat_key(role: str, service_id: str) -> str:
    """Return the key of one service's heartbeat in the live bucket; `>` for every service of a role."""
    return f"{role}.{service_id}"


def swap_permit_key(number: int | Literal["*"]) -> str:
    """Return the key of one slot of the swap semaphore in the lease bucket; `*` for every slot."""
    return f"swap.{number}"


def peer_key(host: str) -> str:
    """Return the lease key of a host's offer of weights; `*` for every host, "" for what all keys begin with."""
    return f"peer.{host}"


def pack_progress_key(sequence: int | Literal["*"]) -> str:
    """Return the key of a partly scored pack in the scoring bucket, by its number in the stream; `*` for every pack."""
    return f"reward.{sequence}"


def kill_mark_key(stage: str, sequence: int | Literal["*"]) -> str:
    """Return the key of a redelivered message in the scoring bucket, by its number in the stream; `*` for all."""
    return f"started.{stage}.{sequence}"
