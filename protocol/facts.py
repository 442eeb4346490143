"""The facts that travel between services, each a frozen model in MessagePack with a schema tag.

A fact states something that happened; it is written once and never changed. Payloads
(trajectories, weights) are objects in S3; a fact carries their key, size and sha256.

The group stays the unit of identity, scoring, staleness and accounting. Small groups travel
together: one message and one object for a *pack* of them, because a message and an object for
each costs more than training a tiny model (measured, see `benchmarks/`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgpack
from pydantic import Field, ValidationError, model_validator

from penstock.protocol.errors import MalformedFact, MessageTooLarge, UnknownSchema
from penstock.protocol.groups import (
    BlobRef,
    Clock,
    Count,
    Duration,
    Finite,
    GeneratedGroup,
    Identifier,
    ScoredGroup,
    Task,
    Wire,
)

MAX_FACT_BYTES = 63 * 1024  # the streams refuse 64 KiB including headers
MAX_LETTER_BYTES = 192 * 1024  # the stream of dead letters takes 256 KiB: a letter holds a whole message
MAX_NESTING = 32  # hostile nesting is refused before pydantic sees it


class Fact(Wire):
    """A message with a schema tag; subclasses register themselves by their ``schema_tag``."""

    schema_tag: ClassVar[str]
    max_bytes: ClassVar[int] = MAX_FACT_BYTES
    registry: ClassVar[dict[str, type[Fact]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tag = cls.__dict__.get("schema_tag")
        if tag is not None:
            Fact.registry[tag] = cls


class TaskIssued(Fact):
    """Written by the trainer, read by one rollout worker: generate these groups."""

    schema_tag = "task_issued.v1"
    run_id: Identifier
    pack_id: Identifier
    tasks: tuple[Task, ...] = ()
    tasks_blob: BlobRef | None = None  # when the prompts do not fit into a message

    @model_validator(mode="after")
    def _one_source_of_tasks(self) -> TaskIssued:
        if bool(self.tasks) == (self.tasks_blob is not None):
            raise ValueError("exactly one of tasks and tasks_blob must be given")
        return self


class TaskList(Fact):
    """The tasks of a `TaskIssued` that were too large for a message, stored as an object."""

    schema_tag = "task_list.v1"
    tasks: Annotated[tuple[Task, ...], Field(min_length=1)]


class _OfPack(Fact):
    run_id: Identifier
    pack_id: Identifier
    worker_id: Identifier
    pack: BlobRef


class GroupGenerated(_OfPack):
    """Written by a rollout worker, read by the reward service: these groups are in S3, verified."""

    schema_tag = "group_generated.v1"
    groups: Annotated[tuple[GeneratedGroup, ...], Field(min_length=1)]


class GroupScored(_OfPack):
    """Written by the reward service, read by the trainer: the same groups with their rewards."""

    schema_tag = "group_scored.v1"
    groups: Annotated[tuple[ScoredGroup, ...], Field(min_length=1)]


class WeightsPublished(Fact):
    """Written by the trainer, read by rollout workers: version ``version`` is complete in S3."""

    schema_tag = "weights_published.v1"
    run_id: Identifier
    version: Count
    step: Count
    manifest: BlobRef
    num_bytes: Count


class WeightsApplied(Fact):
    """Written by a rollout worker after its engine confirmed that it serves ``version``; read by workers and the console.

    ``checksum`` is the engine's checksum of the weights it serves; two engines are compared only
    when ``layout`` is equal, because it depends on how an engine fuses and shards its tensors.
    """

    schema_tag = "weights_applied.v2"
    run_id: Identifier
    worker_id: Identifier
    version: Count
    previous_version: Count | None
    pause_s: Duration
    fetch_s: Duration
    num_bytes: Count  # fetched from the object store for it
    checksum: str
    layout: str


class WeightsRefused(Fact):
    """Written by a rollout worker, read by trainer and console: a version's objects are missing, corrupt or contradict each other."""

    schema_tag = "weights_refused.v1"
    run_id: Identifier
    worker_id: Identifier
    version: Count
    manifest: BlobRef
    serving: Count | None
    reason: str


class Head(Fact):
    """The newest complete version, in the KV bucket under ``head``, written by the trainer; workers that join late read it first.

    ``epoch`` is that of the trainer's lease: a trainer that takes the lease over writes the head again under
    its epoch, so that the former holder can no longer change it.
    """

    schema_tag = "head.v1"
    version: Count
    step: Count
    manifest: BlobRef
    epoch: Count = 0


class Lease(Fact):
    """The trainer that holds the run, in the KV bucket under ``lease``; every renewal changes its revision.

    A lease is free when its revision has not changed for ``ttl_s`` by the observer's clock; clocks are not
    compared. ``at`` and ``since`` are seconds since 1970 by the holder's clock, for people only.
    """

    schema_tag = "lease.v1"
    holder: Identifier
    epoch: Annotated[int, Field(ge=1)]  # grows by one with every holder
    host: str
    pid: Count
    since: Finite
    ttl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    released: bool = False  # its holder exited and gave it up


class RetirementFloor(Fact):
    """Below ``version`` no weights are kept, in the KV bucket under ``floor``, written by the trainer; it only rises."""

    schema_tag = "retirement_floor.v1"
    version: Count


class KeptVersion(Wire):
    """One version that is kept below the floor, with all that it is assembled from."""

    version: Count
    step: Count
    manifest: BlobRef | None = None  # None until the garbage collection has found it
    measure: str = ""  # what ``score`` is, as people read it; empty for a milestone
    score: Finite | None = None  # of its evaluation


class KeptVersions(Fact):
    """Versions whose objects are not deleted, in the KV bucket under ``kept``; the trainer writes it before they would be."""

    schema_tag = "kept_versions.v1"
    best: tuple[KeptVersion, ...] = ()  # by their evaluations, best first
    milestones: tuple[KeptVersion, ...] = ()  # oldest first


class Heartbeat(Fact):
    """A service's record in the live bucket, for the console; it expires when the service stops renewing it."""

    schema_tag = "heartbeat.v1"
    role: Literal["rollout", "reward", "trainer"]
    service_id: Identifier
    at: Clock
    state: str  # a few words: what it does or waits for
    version: Count | None = None
    needs_version: Count | None = None  # of a worker: the oldest version it may still read; its objects stay
    busy_s: Duration = 0.0
    idle_s: Duration = 0.0
    cpu_s: Duration = 0.0
    figures: dict[str, Finite] = Field(default={})
    period_s: Annotated[Finite, Field(gt=0)] | None = None  # seconds until the next one; None: 1
    metrics_url: Annotated[str, Field(max_length=300)] | None = None  # where Prometheus may scrape it; None: nowhere


class RunEvent(Fact):
    """A metric or a change of state of any service, for the console; kinds are `step`, `eval`, `weights`, `drop`, `log`, `state`."""

    schema_tag = "run_event.v1"
    run_id: Identifier
    source: Identifier
    kind: Identifier
    at: Clock
    data: dict[str, Any] = Field(default={})


class DeadLetter(Fact):
    """A message that a service could not process, for people: the reason and its bytes, so that it can be sent again."""

    schema_tag = "dead_letter.v1"
    max_bytes = MAX_LETTER_BYTES
    run_id: Identifier
    stage: Identifier
    subject: str
    reason: str
    detail: str
    group_ids: tuple[str, ...] = ()
    num_delivered: Count
    payload: bytes = b""


F = TypeVar("F", bound=Fact)


def encode(fact: Fact) -> bytes:
    """Encode a fact as MessagePack ``[schema_tag, fields]``.

    Raises MessageTooLarge above 63 KiB (192 for a dead letter): large payloads belong in the object store.
    """
    data = encode_unbounded(fact)
    if len(data) > fact.max_bytes:
        raise MessageTooLarge(
            f"{fact.schema_tag} is {len(data)} bytes, the limit is {fact.max_bytes}; "
            "put fewer groups into a message (rollout.groups_per_message) or the payload into S3"
        )
    return data


def encode_unbounded(fact: Fact) -> bytes:
    """Encode a fact that is stored as an object, where the message limit does not apply."""
    data = msgpack.packb([fact.schema_tag, fact.model_dump(mode="python")], use_bin_type=True)
    assert data is not None
    return data


def decode(data: bytes, expected: type[F]) -> F:
    """Decode bytes from outside into the expected fact.

    Nothing is executed or unpickled. Raises UnknownSchema for another tag and MalformedFact, with
    the first offending fields, for anything else that does not fit.
    """
    try:
        unpacked = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=False,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=len(data),
            max_map_len=len(data),
        )
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as err:
        raise MalformedFact(f"not MessagePack ({type(err).__name__}: {err}); {len(data)} bytes") from None
    if not (isinstance(unpacked, tuple) and len(unpacked) == 2 and isinstance(unpacked[0], str)):
        raise MalformedFact("expected [schema tag, fields]")
    tag, fields = unpacked
    if tag != expected.schema_tag:
        known = "known to this build" if tag in Fact.registry else "unknown to this build"
        raise UnknownSchema(f"expected {expected.schema_tag}, got {tag!r} ({known})")
    _refuse_deep(fields)
    try:
        return expected.model_validate(fields)
    except ValidationError as err:
        first = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'message'}: {e['msg']}" for e in err.errors()[:3])
        raise MalformedFact(f"{tag}: {first}") from None


def _refuse_deep(value: Any, depth: int = 0) -> None:
    if depth > MAX_NESTING:
        raise MalformedFact(f"nested deeper than {MAX_NESTING} levels")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_deep(item, depth + 1)
    elif isinstance(value, tuple):
        for item in value:
            if isinstance(item, (dict, tuple)):
                _refuse_deep(item, depth + 1)
