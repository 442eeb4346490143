"""What a stolen login of each role cannot do, on a real nats-server: requests are generated from the API's verbs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api
from tests.deploy.nats_roles import NatsRoles
from tests.servers import require

from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.nats_config import nats_config, permissions
from penstock.deploy.rights import rights
from penstock.protocol.transport.blobs import Blobs

ROLES = ("rollout", "reward", "environment", "trainer", "viewer")
RUN, OTHER = "attacked-run", "other-run"
FACTS = ("tasks", "generated", "scored", "weights", "events", "dead")
BUCKETS = ("state", "live", "leases", "scoring")
REWARDS, ENVIRONMENTS = ("KV_penstock-rewards", "KV_penstock-secrets"), "KV_penstock-environments"
SHARED = (*REWARDS, ENVIRONMENTS)
OBJECTS = "OBJ_penstock-files"
OWN_STREAMS = (*(f"{RUN}-{fact}" for fact in FACTS), *(f"KV_{RUN}-{bucket}" for bucket in BUCKETS))
OTHER_STREAMS = (*(f"{OTHER}-{fact}" for fact in FACTS), *(f"KV_{OTHER}-{bucket}" for bucket in BUCKETS))
STREAMS = (*OWN_STREAMS, *OTHER_STREAMS, *SHARED, OBJECTS)
DURABLES = {  # durable consumer: its role, its stream
    "rollout-train": ("rollout", "tasks"),
    "rollout-eval": ("rollout", "tasks"),
    "reward": ("reward", "generated"),
    "trainer-train": ("trainer", "scored"),
    "trainer-eval": ("trainer", "scored"),
}
STREAM_VERBS = (  # https://docs.nats.io/reference/reference-protocols/nats_api_reference
    *("CREATE", "UPDATE", "DELETE", "PURGE", "INFO", "SNAPSHOT", "RESTORE", "MSG.GET", "MSG.DELETE", "PEER.REMOVE"),
    "LEADER.STEPDOWN",
)
CONSUMER_VERBS = (
    *("CREATE", "DURABLE.CREATE", "DELETE", "INFO", "MSG.NEXT", "PAUSE", "UNPIN", "RESET", "LEADER.STEPDOWN"),
)
ACCOUNT_REQUESTS = (
    *("INFO", "STREAM.LIST", "STREAM.NAMES", "STREAM.TEMPLATE.NAMES", "STREAM.TEMPLATE.CREATE.t"),
    *("META.LEADER.STEPDOWN", "SERVER.REMOVE", "ACCOUNT.PURGE.PENSTOCK", "ACCOUNT.STREAM.MOVE.PENSTOCK.x"),
    *("ACCOUNT.STREAM.CANCEL_MOVE.PENSTOCK.x", "STREAM.>", "CONSUMER.>"),
)
READS = {  # streams whose state and stored messages a role reads
    "rollout": (f"{RUN}-weights", *(f"KV_{RUN}-{bucket}" for bucket in BUCKETS), ENVIRONMENTS),
    "reward": (f"KV_{RUN}-live", f"KV_{RUN}-scoring", *REWARDS),
    "environment": (ENVIRONMENTS,),
    "trainer": (
        *(f"{RUN}-{fact}" for fact in FACTS),
        *(f"KV_{RUN}-{bucket}" for bucket in ("state", "live", "leases")),
        "KV_penstock-rewards",
    ),
    "viewer": (*OWN_STREAMS, "KV_penstock-rewards", ENVIRONMENTS),
}
LEADER_READS = {  # streams of which the leader answers a role: a replica may lag
    "rollout": (),
    "reward": REWARDS,
    "environment": (ENVIRONMENTS,),
    "trainer": (*(f"{RUN}-{fact}" for fact in FACTS if fact != "events"), f"KV_{RUN}-state"),
    "viewer": (*(f"{RUN}-{fact}" for fact in FACTS), f"KV_{RUN}-state"),
}
WRITES = {  # subjects that a role publishes, keys included
    "rollout": (
        *(f"penstock.{RUN}.{kind}" for kind in ("generated.train", "generated.eval", "dead.tasks")),
        *(f"penstock.{RUN}.events.{kind}" for kind in ("alarm", "log")),
        *(f"penstock.{RUN}.weights.applied", f"penstock.{RUN}.weights.refused"),
        *(f"$KV.{RUN}-live.rollout.w0", f"$KV.{RUN}-leases.swap.0", f"$KV.{RUN}-scoring.started.tasks.1"),
    ),
    "reward": (
        *(f"penstock.{RUN}.{kind}" for kind in ("scored.train", "scored.eval", "dead.generated")),
        *(f"penstock.{RUN}.events.{kind}" for kind in ("dead", "log", "reward_error")),
        *(f"$KV.{RUN}-live.reward.r0", f"$KV.{RUN}-scoring.reward.7", f"$KV.{RUN}-scoring.started.generated.1"),
        *("$KV.penstock-rewards.x", "$KV.penstock-secrets.endpoint.x"),
    ),
    "environment": ("$KV.penstock-environments.environment.x", "$KV.penstock-environments.lease.x.1"),
    "trainer": (
        *(f"penstock.{RUN}.{kind}" for kind in ("tasks.train", "tasks.eval", "dead.scored")),
        *(f"penstock.{RUN}.events.{kind}" for kind in ("alarm", "dead", "log", "reward_error", "state", "step")),
        *(f"penstock.{RUN}.weights.published", f"$KV.{RUN}-live.trainer.t0"),
        *(f"$KV.{RUN}-state.{key}" for key in ("head", "lease", "checkpoint", "floor", "kept")),
        *(f"$KV.{RUN}-leases.{key}" for key in ("gc", "expiry")),
    ),
    "viewer": (),
}
WATCHES = {  # announcements that a role subscribes to
    "rollout": ("weights.published", "weights.applied"),
    "reward": (),
    "environment": (),
    "trainer": ("weights.*", "events.*", "dead.*"),
    "viewer": ("weights.*", "events.*", "dead.*"),
}
ANNOUNCEMENTS = ("weights.published", "weights.applied", "weights.refused", "weights.*", "events.*", "dead.*", ">")
FILTERS = (  # of consumers that no role may create
    *(f"penstock.{RUN}.{subject}" for subject in ("tasks.*", "generated.*", "scored.*", "weights.published", ">")),
    *(f"penstock.{RUN}.{subject}" for subject in ("weights.applied", "weights.refused", "weights.*", "events.*")),
    *(f"penstock.{RUN}.dead.*", "penstock.>", ">", "$KV.>", "$KV.penstock-secrets.>", f"$KV.{RUN}-state.head"),
)
FORGED = b"forged"


@pytest.fixture(scope="module", params=["any run", "one run"])
def roles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsRoles]:
    require("nats-server")
    text = nats_config([] if request.param == "any run" else [RUN])
    started = NatsRoles(tmp_path_factory.mktemp("roles"), text)
    started.start()
    started.one_run = request.param == "one run"
    yield started
    started.close()


@pytest.fixture
def run_streams(roles: NatsRoles, blobs: Blobs) -> Iterator[None]:
    for run in (RUN, OTHER):
        bootstrap(roles.bus("admin"), blobs, run)
    yield
    for run in (RUN, OTHER):
        delete_run(roles.bus("admin"), run)


def may_read(roles: NatsRoles, role: str, stream: str) -> bool:
    """Whether the role reads a stream: without ``--run`` every one whose name is not the same in all runs.

    An environment's servers belong to no run, so they read the same with and without it.
    """
    return stream in READS[role] or (not roles.one_run and role != "environment" and stream not in SHARED)


def may_ask_leader(roles: NatsRoles, role: str, stream: str) -> bool:
    of_any_run = not roles.one_run and role in {"trainer", "viewer"} and stream not in SHARED
    return stream in LEADER_READS[role] or of_any_run


def requests_to_streams(roles: NatsRoles, role: str) -> Iterator[tuple[str, bool]]:
    for request in ACCOUNT_REQUESTS:
        yield f"$JS.API.{request}", request == "INFO" or (role == "viewer" and request in ACCOUNT_REQUESTS[1:3])
    for stream in STREAMS:
        reads = may_read(roles, role, stream)
        only_keys = {"rollout": (f"KV_{RUN}-state", f"KV_{RUN}-scoring"), "reward": (f"KV_{RUN}-scoring",)}
        for verb in STREAM_VERBS:
            allowed_to = {"INFO": reads, "MSG.GET": may_ask_leader(roles, role, stream)}
            yield f"$JS.API.STREAM.{verb}.{stream}", allowed_to.get(verb, False)
        yield (f"$JS.API.DIRECT.GET.{stream}", reads and not (roles.one_run and stream in only_keys.get(role, ())))
        for verb in ("CREATE", "LIST", "NAMES"):
            yield f"$JS.API.CONSUMER.{verb}.{stream}", False
        for verb, name in itertools.product(CONSUMER_VERBS, (*DURABLES, "tail-1")):
            owner, fact = DURABLES.get(name, ("admin", ""))
            of_stream = not roles.one_run or stream == f"{RUN}-{fact}"
            allowed = {
                "MSG.NEXT": role == owner and of_stream,
                "RESET": role == owner == "trainer" and of_stream,
                "INFO": (role == owner or role in {"trainer", "viewer"}) and owner != "admin" and of_stream,
            }
            yield f"$JS.API.CONSUMER.{verb}.{stream}.{name}", allowed.get(verb, False)
            if verb == "CREATE":
                yield from ((f"$JS.API.CONSUMER.CREATE.{stream}.{name}.{filtered}", False) for filtered in FILTERS)
        for name, (owner, fact) in DURABLES.items():
            of_stream = not roles.one_run or stream == f"{RUN}-{fact}"
            yield f"$JS.ACK.{stream}.{name}.1.1.1.1.0", role == owner and of_stream
            yield f"$JS.ACK._.hash.{stream}.{name}.1.1.1.1.0.x", False  # as servers with a domain write it
            for own, (_, own_fact) in DURABLES.items():  # the names of another consumer in the places of numbers
                yield f"$JS.ACK.{stream}.{name}.{RUN}-{own_fact}.{own}.1.1.1", role == owner and of_stream
                yield f"$JS.ACK.{RUN}-{own_fact}.{own}.{stream}.{name}.1.1.1.1.0.x", False


def requests_to_others(roles: NatsRoles, role: str) -> Iterator[str]:
    """Subjects of other roles, of the server and of other subsystems; the role may publish none of them."""
    for other in set(ROLES) - {role}:
        yield f"_INBOX_{other}.answers"
        yield from set(WRITES[other]) - set(WRITES[role])
    own_folders = {subject.rpartition(".")[0] for subject in WRITES[role] if subject.count(".") > 2}
    for key in {subject.split(".", 2)[2] for subjects in WRITES.values() for subject in subjects if "$KV" in subject}:
        if role != "reward":
            yield from (f"$KV.penstock-rewards.{key}", f"$KV.penstock-secrets.{key}")
        for subject in (f"$KV.{RUN}-{bucket}.{key}" for bucket in BUCKETS):
            if roles.one_run and subject not in WRITES[role] and subject.rpartition(".")[0] not in own_folders:
                yield subject
    if roles.one_run:
        yield from (subject.replace(RUN, OTHER) for subject in WRITES[role] if RUN in subject)
    yield from (f"$KV.{RUN}-state.resent.1", f"$KV.{OTHER}-state.resent.1", "$O.penstock-files.C.x", "$O.x.M.y")
    for stage, split in itertools.product(("tasks", "generated", "scored"), ("other", "TRAIN", "*", "train.x")):
        yield f"penstock.{RUN}.{stage}.{split}"  # no consumer reads it
    yield from (f"penstock.{RUN}.stored.weights.published", f"penstock.{RUN}.stored.events.log", "penstock.x")
    yield from ("$SYS.REQ.SERVER.PING", "$SYS.REQ.ACCOUNT.PENSTOCK.JSZ", "$SYS.REQ.SERVER.x.RELOAD", "$SRV.PING")
    yield from ("$JS.EVENT.ADVISORY.STREAM.DELETED.x", "$JS.FC.x.y", "$JSC.x", "_R_.x", "_GR_.x", "$NRG.x", "x")


def subscriptions(roles: NatsRoles, role: str) -> Iterator[str]:
    yield from (">", "*", "_INBOX.>", "_INBOX_any.>", "$JS.>", "$JS.API.>", "$JS.ACK.>", "$JS.EVENT.ADVISORY.>")
    yield from ("$SYS.>", "$KV.>", "$O.>", "_R_.>", "penstock.>", f"penstock.{RUN}.*.*", "$JS.API.CONSUMER.MSG.NEXT.>")
    yield from (f"_INBOX_{other}.>" for other in ROLES if other != role)
    watched = {announcement.split(".")[0] for announcement in WATCHES[role] if announcement.endswith("*")}
    for announcement in ANNOUNCEMENTS:
        if announcement not in WATCHES[role] and announcement.split(".")[0] not in watched:
            yield f"penstock.{RUN}.stored.{announcement}"
    if roles.one_run:
        yield from (f"penstock.{OTHER}.stored.{announcement}" for announcement in ANNOUNCEMENTS)


@pytest.mark.usefixtures("run_streams")
def test_what_the_rights_list_is_allowed(roles: NatsRoles) -> None:
    """No subject that a role's rights grant for a run is refused; admin may do everything."""
    for role_rights in rights(RUN):
        granted = permissions(role_rights)
        concrete = [subject.replace("*", "x").replace(">", "x.y") for subject in granted.publish]
        inboxes = [subject.replace(">", "x.*") for subject in granted.subscribe]
        assert roles.refused(role_rights.role, publish=concrete, subscribe=inboxes) == set()
    everything = ["penstock.x.tasks.train", "$KV.penstock-secrets.x", "$JS.API.STREAM.NAMES"]
    assert roles.refused("admin", publish=everything) == set()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.usefixtures("run_streams")
def test_every_request_that_is_not_a_right_is_refused(roles: NatsRoles, role: str) -> None:
    """Each verb of the API on each stream, consumer, bucket and object store, and each subject of others: refused unless listed."""
    table = dict(requests_to_streams(roles, role))
    forbidden = {subject for subject, allowed in table.items() if not allowed} | set(requests_to_others(roles, role))
    assert len(forbidden) > 2000
    unheard = set(subscriptions(roles, role))
    refused = roles.refused(role, publish=sorted(set(table) | forbidden), subscribe=sorted(unheard))
    assert forbidden - refused == set()
    assert unheard - refused == set()
    allowed = {subject for subject, listed in table.items() if listed}
    assert allowed & refused == set()
    assert len(allowed) >= 3


@contextlib.asynccontextmanager
async def as_role(roles: NatsRoles, role: str) -> AsyncIterator[Client]:
    async def ignore(_: Exception) -> None: ...

    secret = roles.login(role).secret()
    client = await nats.connect(
        roles.url,
        user=role,
        password=secret,
        inbox_prefix=f"_INBOX_{role}",
        error_cb=ignore,
        allow_reconnect=False,
        **roles.tls_options,
    )
    try:
        yield client
    finally:
        await client.close()


async def store_one_of_each(admin: Client) -> None:
    """Store a message of every subject, in streams from which none expires during the test."""
    js = admin.jetstream()
    for bucket in BUCKETS:
        config = (await js.stream_info(f"KV_{RUN}-{bucket}")).config
        await js.update_stream(config, max_age=0)
    for subject in (*itertools.chain.from_iterable(WRITES.values()), "$KV.penstock-secrets.endpoint.y"):
        await js.publish(subject, b"confidential" if "secrets" in subject else b"good")


async def whole_state(admin: Client, *, besides: tuple[str, ...], role: str) -> dict[str, Any]:
    """Everything stored but messages of some subjects and the consumers of one role."""
    js, found = admin.jetstream(), {}
    for stream in STREAMS:
        try:
            info = await js.stream_info(stream, subjects_filter=">")
        except nats.js.errors.NotFoundError:
            found[stream] = None
            continue
        found[stream] = (info.config, {s: n for s, n in (info.state.subjects or {}).items() if s not in besides})
        for consumer in await js.consumers_info(stream):
            own = DURABLES.get(consumer.name, ("",))[0] == role
            position = None if own else (consumer.delivered, consumer.ack_floor, consumer.num_ack_pending)
            found[stream, consumer.name] = (consumer.config, position)
    return found


def replies(role: str) -> Iterator[str]:
    """Subjects to which a role would have the server send an answer with the server's own rights."""
    for stream in STREAMS:
        for verb in ("DELETE", "PURGE", "MSG.DELETE", "CREATE", "UPDATE"):
            yield f"$JS.API.STREAM.{verb}.{stream}"
        yield f"$JS.API.CONSUMER.CREATE.{stream}"
        yield f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.stolen"
        yield from (f"$JS.API.CONSUMER.DELETE.{stream}.{name}" for name in DURABLES)
    for name, (_, fact) in DURABLES.items():
        for number in range(1, 4):
            yield f"$JS.ACK.{RUN}-{fact}.{name}.1.{number}.{number}.1.0"
    for other in set(ROLES) - {role}:
        yield from set(WRITES[other]) - set(WRITES[role])


def answered_requests(role: str, body: bytes) -> Iterator[tuple[str, bytes]]:
    """One request of each kind that a role may make, whose answers hold ``body`` or what others stored."""
    for subject in [subject for subject in WRITES[role] if subject.startswith("$KV")][:1]:
        yield f"$JS.API.DIRECT.GET.KV_{subject.split('.')[1]}.{subject}", b""
    for name in [name for name, (owner, _) in DURABLES.items() if owner == role][:1]:
        yield f"$JS.API.CONSUMER.MSG.NEXT.{RUN}-{DURABLES[name][1]}.{name}", b'{"batch":1,"no_wait":true}'
    yield f"$JS.API.DIRECT.GET.{READS[role][:2][-1]}", b'{"seq":1,"next_by_subj":">"}'
    yield f"$JS.API.STREAM.INFO.{READS[role][0]}", b""
    yield from ((subject, body) for subject in WRITES[role][:1])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.usefixtures("run_streams")
def test_the_reply_subject_of_a_request_reaches_no_stream_and_no_other_role(roles: NatsRoles, role: str) -> None:
    """The server sends stored messages, of the role's choice, to the reply subject: no stream, consumer or key changes by it."""
    push = {"deliver_subject": f"_INBOX_{role}.stolen", "ack_policy": "none", "name": "stolen"}
    bodies = (b"", json.dumps({"stream_name": SHARED[1], "config": push}).encode(), b'{"seq":1}', FORGED)
    heard: list[bytes] = []

    async def hear(msg: Msg) -> None:
        heard.append(msg.data)

    async def attack() -> None:
        async with as_role(roles, "admin") as admin, as_role(roles, role) as thief:
            js = admin.jetstream()
            await store_one_of_each(admin)
            for name in ("rollout-train", "reward", "trainer-train"):
                consumer = await js.pull_subscribe_bind(name, f"{RUN}-{DURABLES[name][1]}")
                await consumer.fetch(1, timeout=2)
            await thief.subscribe(f"_INBOX_{role}.>", cb=hear)
            before = await whole_state(admin, besides=WRITES[role], role=role)
            for body in bodies:
                for subject in WRITES[role]:
                    await thief.publish(subject, body)  # is stored: the next requests have the server send it
                for reply, (subject, request) in itertools.product(replies(role), answered_requests(role, body)):
                    await thief.publish(subject, request, reply=reply)
                await thief.flush()
            await asyncio.sleep(0.2)
            assert await whole_state(admin, besides=WRITES[role], role=role) == before

    asyncio.run(attack())
    assert role == "reward" or b"confidential" not in heard


@pytest.mark.parametrize("role", ["rollout", "reward", "trainer"])
@pytest.mark.usefixtures("run_streams")
def test_a_write_of_one_subject_removes_nothing_of_another(roles: NatsRoles, role: str) -> None:
    """A message with ``Nats-Rollup`` is refused in every stream and bucket: it would remove what other roles wrote."""

    async def attack() -> None:
        async with as_role(roles, "admin") as admin, as_role(roles, role) as thief:
            await store_one_of_each(admin)
            before = await whole_state(admin, besides=(), role="")
            for subject, how in itertools.product(WRITES[role], ("all", "sub")):
                with pytest.raises(nats.js.errors.APIError, match="rollup"):
                    await thief.jetstream().publish(subject, FORGED, headers={"Nats-Rollup": how})
            assert await whole_state(admin, besides=(), role="") == before

    asyncio.run(attack())


def test_a_role_cannot_use_up_what_others_need(tmp_path: Path) -> None:
    """Connections are counted for each role, and one connection has a limit of subscriptions and of bytes in a message."""
    require("nats-server")
    config = nats_config()
    assert "max_connections: 500," in config
    started = NatsRoles(tmp_path, config.replace("max_connections: 500,", "max_connections: 2,"))
    started.start()

    async def attack() -> list[bytes]:
        async with as_role(started, "viewer"), as_role(started, "viewer"):
            for role in ("admin", *ROLES[:3]):
                async with as_role(started, role):
                    pass
            return started.answers("viewer", [])

    try:
        assert b"maximum account active connections exceeded" in asyncio.run(attack())[-1]
        answers = started.answers("viewer", [f"SUB _INBOX_viewer.{n} {n}" for n in range(1, 1010)])
        assert sum(b"maximum subscriptions exceeded" in answer.lower() for answer in answers) == 9
        assert b"-ERR 'Maximum Payload Violation'\r\n" in started.answers("viewer", ["PUB $JS.API.INFO 1048577"])
    finally:
        started.close()


@pytest.mark.usefixtures("run_streams")
def test_a_consumer_that_an_operator_made_does_not_stay(roles: NatsRoles) -> None:
    """A durable consumer on a stream that may be watched has the stream's idle limit, and cannot ask for a longer one."""

    async def create(threshold_s: float | None) -> float | None:
        config = api.ConsumerConfig(name="mine", durable_name="mine", inactive_threshold=threshold_s)
        async with as_role(roles, "admin") as admin:
            return (await admin.jetstream().add_consumer(f"{RUN}-events", config)).config.inactive_threshold

    assert asyncio.run(create(None)) == 600.0
    with pytest.raises(nats.js.errors.BadRequestError, match="inactive threshold"):
        asyncio.run(create(6000.0))
