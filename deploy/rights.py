"""What each role may do on NATS and in the object store, as data.

`deploy/nats_config.py` makes the permissions of a NATS server of it, `deploy/s3_policies.py` the policies of an object store. A
service that begins to publish, tail, fetch, read or write something new is granted the right here, and
`python -P -m penstock.deploy.nats_config > deploy/nats.conf` writes it into the server's configuration. The role ``admin`` and the
store's own user are not listed: they may do everything, because they create streams, buckets and users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.protocol import blob_keys, streams, subjects
from penstock.protocol.streams import BucketSpec, ConsumerSpec, stream_name

Role = Literal["rollout", "reward", "environment", "trainer", "viewer"]
ANY_RUN = "*"
ANY_KEY = ">"


@dataclass(frozen=True, slots=True)
class TailRight:
    """Watch one subject of a stream; whoever may do so can also read the stream's other messages."""

    stream: str
    subject: str


@dataclass(frozen=True, slots=True)
class KeyRight:
    """Read or write the keys of a bucket that match a pattern; `ANY_KEY` also allows to list them.

    ``newest``: a read asks the leader of a replicated bucket, by a request whose body names the key: it needs `ANY_KEY`.
    """

    bucket: BucketSpec
    key: str = ANY_KEY
    newest: bool = False


@dataclass(frozen=True, slots=True)
class Rights:
    """All that one role may do; what is not listed is refused.

    Attributes:
        publishes: Subjects of facts.
        fetches: Durable consumers whose messages it fetches and acknowledges.
        resets: Durable consumers that it resets when it starts.
        observes: Durable consumers whose state it asks for.
        tails: Subjects that it watches.
        scans: Streams whose state and stored messages it reads without a consumer.
        reads: Keys that it reads.
        writes: Keys that it writes and deletes.
        lists_streams: Whether it may list the names of all streams.
    """

    role: Role
    publishes: tuple[str, ...] = ()
    fetches: tuple[ConsumerSpec, ...] = ()
    resets: tuple[ConsumerSpec, ...] = ()
    observes: tuple[ConsumerSpec, ...] = ()
    tails: tuple[TailRight, ...] = ()
    scans: tuple[str, ...] = ()
    reads: tuple[KeyRight, ...] = ()
    writes: tuple[KeyRight, ...] = ()
    lists_streams: bool = False


def rights(run_id: str = ANY_RUN) -> tuple[Rights, ...]:
    """Return the rights of every role but admin, for one run or for all."""
    of_services = rollout_rights(run_id), reward_rights(run_id), environment_rights(), trainer_rights(run_id)
    return (*of_services, viewer_rights(run_id))


def rollout_rights(run_id: str) -> Rights:
    weights = stream_name(run_id, "weights")
    consumers = (streams.tasks_consumer(run_id, "train"), streams.tasks_consumer(run_id, "eval"))
    marks = KeyRight(streams.scoring_bucket(run_id), streams.kill_mark_key("tasks", "*"))
    own_leases = [
        KeyRight(streams.lease_bucket(run_id), key) for key in (streams.swap_permit_key("*"), streams.peer_key("*"))
    ]
    return Rights(
        "rollout",
        publishes=(
            *subjects.of_every_split(subjects.generated, run_id),
            subjects.weights_applied(run_id),
            subjects.weights_refused(run_id),
            *(subjects.events(run_id, kind) for kind in subjects.EVENTS_OF_WORKERS),
            subjects.dead(run_id, "tasks"),
        ),
        fetches=consumers,
        observes=consumers,
        tails=(
            TailRight(weights, subjects.weights_published(run_id)),
            TailRight(weights, subjects.weights_applied(run_id)),
        ),
        reads=(
            KeyRight(streams.state_bucket(run_id), streams.HEAD_KEY),
            KeyRight(streams.live_bucket(run_id)),
            KeyRight(streams.lease_bucket(run_id)),
            marks,
            KeyRight(streams.environments_bucket()),
        ),
        writes=(KeyRight(streams.live_bucket(run_id), streams.heartbeat_key("rollout", ANY_KEY)), *own_leases, marks),
    )


def reward_rights(run_id: str) -> Rights:
    consumers, live = (streams.generated_consumer(run_id),), streams.live_bucket(run_id)
    progress = KeyRight(streams.scoring_bucket(run_id), streams.pack_progress_key("*"))
    marks = KeyRight(streams.scoring_bucket(run_id), streams.kill_mark_key("generated", "*"))
    shared = (KeyRight(streams.registry_bucket(), newest=True), KeyRight(streams.secrets_bucket(), newest=True))
    return Rights(
        "reward",
        publishes=(
            *subjects.of_every_split(subjects.scored, run_id),
            *(subjects.events(run_id, kind) for kind in subjects.EVENTS_OF_REWARD_SERVICES),
            subjects.dead(run_id, "generated"),
        ),
        fetches=consumers,
        observes=consumers,
        reads=(KeyRight(live), progress, marks, *shared),
        writes=(KeyRight(live, streams.heartbeat_key("reward", ANY_KEY)), progress, marks, *shared),
    )


def environment_rights() -> Rights:
    """Return what environment servers may do: register themselves; a registration belongs to no run."""
    registry = (KeyRight(streams.environments_bucket(), newest=True),)
    return Rights("environment", reads=registry, writes=registry)


def trainer_rights(run_id: str) -> Rights:
    consumers = (streams.scored_consumer(run_id, "train"), streams.scored_consumer(run_id, "eval"))
    state, leases = streams.state_bucket(run_id), streams.lease_bucket(run_id)
    state_keys = (streams.HEAD_KEY, streams.LEASE_KEY, streams.CHECKPOINT_KEY, streams.FLOOR_KEY, streams.KEPT_KEY)
    return Rights(
        "trainer",
        publishes=(
            *subjects.of_every_split(subjects.tasks, run_id),
            subjects.weights_published(run_id),
            subjects.events(run_id),
            subjects.dead(run_id, "scored"),
        ),
        fetches=consumers,
        resets=consumers,
        observes=streams.consumers(run_id),
        tails=(
            TailRight(stream_name(run_id, "weights"), subjects.weights(run_id)),
            TailRight(stream_name(run_id, "dead"), subjects.dead(run_id)),
            # For the report of a run whose services run elsewhere: deploy/train.py.
            TailRight(stream_name(run_id, "events"), subjects.events(run_id)),
        ),
        scans=tuple(stream_name(run_id, stage) for stage in ("tasks", "generated", "scored", "weights", "dead")),
        reads=(
            KeyRight(state, newest=True),
            KeyRight(leases),
            KeyRight(streams.live_bucket(run_id)),
            KeyRight(streams.registry_bucket()),
        ),
        writes=(
            *(KeyRight(state, key) for key in state_keys),
            *(KeyRight(leases, key) for key in (streams.GARBAGE_LEASE, streams.EXPIRY_LEASE)),
            KeyRight(streams.live_bucket(run_id), streams.heartbeat_key("trainer", ANY_KEY)),
        ),
    )


def viewer_rights(run_id: str) -> Rights:
    """Return what a person who looks at a run may do: read everything but secrets, write nothing."""
    buckets = (*streams.run_buckets(run_id)[1:], streams.registry_bucket(), streams.environments_bucket())
    return Rights(
        "viewer",
        observes=streams.consumers(run_id),
        tails=(
            TailRight(stream_name(run_id, "events"), subjects.events(run_id)),
            TailRight(stream_name(run_id, "weights"), subjects.weights(run_id)),
            TailRight(stream_name(run_id, "dead"), subjects.dead(run_id)),
        ),
        scans=streams.stream_names(run_id),
        reads=(KeyRight(streams.state_bucket(run_id), newest=True), *map(KeyRight, buckets)),
        lists_streams=True,
    )


@dataclass(frozen=True, slots=True)
class ObjectRights:
    """All that one role may do with objects, by prefixes of their keys; what is not listed is refused.

    Attributes:
        reads: Objects that it gets, by key.
        writes: Objects that it puts. A store has no right to create without one to replace, so readers verify a sha256.
        deletes: Objects that it removes.
        lists: Keys that it may list.
    """

    role: Role
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()


def object_rights(run_id: str = ANY_RUN) -> tuple[ObjectRights, ...]:
    groups, tasks = blob_keys.groups_prefix(run_id), blob_keys.task_lists_prefix(run_id)
    weights, checkpoints = blob_keys.all_weights_prefix(run_id), blob_keys.checkpoints_prefix(run_id)
    layouts, models = blob_keys.layouts_prefix(run_id), blob_keys.models_prefix(run_id)
    lineage, logprobs = blob_keys.lineage_prefix(run_id), blob_keys.logprobs_prefix(run_id)
    inputs, check = blob_keys.rescored_prefix(run_id), blob_keys.access_check_prefix(run_id)
    episodes, images = blob_keys.all_finished_episodes_prefix(run_id), blob_keys.images_prefix(run_id)
    run, users = blob_keys.run_prefix(run_id), blob_keys.input_users_prefix(run_id)
    return (
        ObjectRights(
            "rollout",
            reads=(tasks, weights, layouts, models, episodes, images),
            writes=(groups, episodes, images),
            deletes=(episodes,),
            lists=(episodes, check),
        ),
        ObjectRights("reward", reads=(groups,), lists=(check,)),
        ObjectRights(
            "trainer",
            reads=(groups, weights, layouts, models, lineage, checkpoints, inputs, images),
            writes=(tasks, weights, layouts, models, lineage, checkpoints, logprobs, images, users),
            deletes=(groups, episodes, tasks, weights, checkpoints, logprobs),
            lists=(groups, episodes, tasks, weights, checkpoints, logprobs, inputs, check),
        ),
        ObjectRights("viewer", reads=(run,), lists=(run,)),
    )
