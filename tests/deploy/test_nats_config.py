"""The permissions of each NATS role, on a real nats-server: operations in its rights succeed, all others are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from nats.js import api
from tests.deploy.nats_roles import NatsRoles
from tests.servers import require

from penstock.deploy import nats_config as command
from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.nats_config import nats_config
from penstock.deploy.nats_permissions import permissions
from penstock.protocol import streams, subjects
from penstock.protocol.errors import ConfigError
from penstock.protocol.rights import rights
from penstock.protocol.transport.blobs import Blobs

CONFIG = Path(__file__).parents[2] / "deploy" / "nats.conf"
ROLES = ("rollout", "reward", "trainer", "viewer")
RUN, OTHER_RUN = "rights-run", "other-run"
KINDS = ("tasks", "generated", "scored", "weights", "events", "dead")
SHARED = ("KV_penstock-rewards", "KV_penstock-secrets")
STREAMS = (
    *(f"{RUN}-{kind}" for kind in KINDS),
    *(f"KV_{RUN}-{kind}" for kind in ("state", "live", "leases", "scoring")),
    *SHARED,
)
DURABLES = {
    "rollout-train": ("rollout", "tasks"),
    "rollout-eval": ("rollout", "tasks"),
    "reward": ("reward", "generated"),
    "trainer-train": ("trainer", "scored"),
    "trainer-eval": ("trainer", "scored"),
}
ONLY_ADMIN_STREAM = (
    "CREATE",
    "UPDATE",
    "DELETE",
    "PURGE",
    "MSG.GET",
    "MSG.DELETE",
    "SNAPSHOT",
    "RESTORE",
    "PEER.REMOVE",
)
ONLY_ADMIN_CONSUMER = ("DURABLE.CREATE", "DELETE", "PAUSE", "UNPIN", "LEADER.STEPDOWN", "CREATE")
PUBLISHES = {
    "tasks.train": "trainer",
    "tasks.eval": "trainer",
    "generated.train": "rollout",
    "generated.eval": "rollout",
    "scored.train": "reward",
    "scored.eval": "reward",
    "weights.published": "trainer",
    "weights.applied": "rollout",
    "weights.refused": "rollout",
    "dead.tasks": "rollout",
    "dead.generated": "reward",
    "dead.scored": "trainer",
}
TAILS = {  # filter subject: roles that may watch it
    "weights.published": ("rollout", "viewer"),
    "weights.applied": ("rollout", "viewer"),
    "weights.refused": ("trainer", "viewer"),
    "weights.*": ("viewer",),
    "events.*": ("viewer",),
    "dead.*": ("trainer", "viewer"),
    "tasks.*": (),
    "generated.*": (),
    "scored.*": (),
}
KEYS = {  # key: the role that writes it
    f"{RUN}-state.head": "trainer",
    f"{RUN}-state.lease": "trainer",
    f"{RUN}-state.checkpoint": "trainer",
    f"{RUN}-state.floor": "trainer",
    f"{RUN}-state.resent.1": "admin",
    f"{RUN}-leases.gc": "trainer",
    f"{RUN}-leases.expiry": "trainer",
    f"{RUN}-leases.swap.0": "rollout",
    f"{RUN}-live.rollout.w-0": "rollout",
    f"{RUN}-live.reward.r-0": "reward",
    f"{RUN}-live.trainer.trainer": "trainer",
    f"{RUN}-scoring.reward.7": "reward",
    "penstock-rewards.endpoints": "reward",
    "penstock-rewards.available.r-0": "reward",
    "penstock-rewards.lease": "reward",
    "penstock-rewards.head": "reward",
    "penstock-rewards.trainer.x": "reward",
    "penstock-secrets.endpoint.x": "reward",
    "penstock-secrets.rollout.x": "reward",
    "penstock-secrets.swap.0": "reward",
    "penstock-secrets.lease": "reward",
}


def test_the_committed_file_matches_the_rights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`--check` passes for the file in the repository, and names the command that repairs another one."""
    assert command.main(["--check", str(CONFIG)]) == 0
    (tmp_path / "old.conf").write_text("listen: 0.0.0.0:4222\n")
    assert command.main(["--check", str(tmp_path / "old.conf")]) == 1
    assert f"python -P -m penstock.deploy.nats_config > {tmp_path}/old.conf" in capsys.readouterr().err
    assert command.main([]) == 0
    assert capsys.readouterr().out == CONFIG.read_text()


def test_an_invalid_run_id_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A run id is checked before it becomes part of a pattern."""
    with pytest.raises(ConfigError, match="run id"):
        nats_config(["*"])
    assert command.main(["--run", "A.b"]) == 1
    assert "run id" in capsys.readouterr().err


@pytest.fixture(scope="module", params=["any run", "one run"])
def roles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsRoles]:
    require("nats-server")
    text = CONFIG.read_text() if request.param == "any run" else nats_config([RUN])
    started = NatsRoles(tmp_path_factory.mktemp("roles"), text)
    yield started
    started.close()


@pytest.fixture
def run_streams(roles: NatsRoles, blobs: Blobs) -> Iterator[None]:
    bootstrap(roles.bus("admin"), blobs, RUN)
    yield
    delete_run(roles.bus("admin"), RUN)


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
def test_streams_and_consumers_are_changed_by_admin_alone(roles: NatsRoles, role: str) -> None:
    """Every request that creates, changes, empties or deletes a stream or consumer is refused, for every stream."""
    api_subjects = [f"$JS.API.STREAM.{verb}.{stream}" for verb in ONLY_ADMIN_STREAM for stream in STREAMS]
    for stream in STREAMS:
        api_subjects += [
            f"$JS.API.CONSUMER.{verb}.{stream}.{name}" for verb in ONLY_ADMIN_CONSUMER for name in (*DURABLES, "x")
        ]
        api_subjects += [f"$JS.API.CONSUMER.{verb}.{stream}" for verb in ("CREATE", "NAMES", "LIST")]
        api_subjects += [f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}"]
    api_subjects += ["$JS.API.META.LEADER.STEPDOWN", "$JS.API.SERVER.REMOVE", "$JS.API.ACCOUNT.PURGE.PENSTOCK"]
    if role != "viewer":
        api_subjects += ["$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST"]
    assert set(api_subjects) - roles.refused(role, publish=api_subjects) == set()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.usefixtures("run_streams")
def test_a_durable_consumer_belongs_to_its_role(roles: NatsRoles, role: str) -> None:
    """Another role cannot pull from it, acknowledge or reset; no role can rewrite one, with any filter subject."""
    forbidden = []
    for name, (owner, kind) in DURABLES.items():
        stream = f"{RUN}-{kind}"
        forbidden += [f"$JS.API.CONSUMER.CREATE.{s}.{name}.penstock.{RUN}.{f}" for s in STREAMS for f in TAILS]
        if role != owner:
            forbidden += [
                f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}",
                f"$JS.ACK.{stream}.{name}.1.1.1.1.0",
                f"$JS.ACK.domain.account.{stream}.{name}.1.1.1.1.0.x",
            ]
        if role != owner or role != "trainer":
            forbidden.append(f"$JS.API.CONSUMER.RESET.{stream}.{name}")
    assert set(forbidden) - roles.refused(role, publish=forbidden) == set()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.usefixtures("run_streams")
def test_a_role_publishes_and_watches_only_its_own_subjects(roles: NatsRoles, role: str) -> None:
    """Facts of other roles are refused, as are tails of other subjects, on any stream."""
    forbidden = [f"penstock.{RUN}.{subject}" for subject, owner in PUBLISHES.items() if owner != role]
    if role == "viewer":
        forbidden.append(f"penstock.{RUN}.events.log")
    for stream in STREAMS:
        create = f"$JS.API.CONSUMER.CREATE.{stream}.tail-1"
        forbidden += [
            f"{create}.penstock.{RUN}.{subject}" for subject, watchers in TAILS.items() if role not in watchers
        ]
        forbidden += [
            f"{create}.>",
            f"{create}.penstock.>",
            f"{create}.penstock.{RUN}.>",
            f"{create}.$KV.penstock-secrets.>",
        ]
    for stream in SHARED:
        forbidden += [f"$JS.API.CONSUMER.CREATE.{stream}.tail-1.penstock.{RUN}.{subject}" for subject in TAILS]
        forbidden.append(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.x")
    subscriptions = [">", "penstock.>", f"penstock.{RUN}.*.*", "$KV.>", "$JS.>", "$JS.EVENT.>", "_INBOX.>"]
    subscriptions += [f"_INBOX_{other}.>" for other in ROLES if other != role]
    refused = roles.refused(role, publish=forbidden, subscribe=subscriptions)
    assert {*forbidden, *subscriptions} - refused == set()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.usefixtures("run_streams")
def test_a_role_writes_only_its_own_keys_and_secrets_are_read_by_reward_services_alone(
    roles: NatsRoles, role: str
) -> None:
    """Keys of other roles are refused, in shared buckets under any name; so is every way to read a secret."""
    forbidden = [f"$KV.{key}" for key, owner in KEYS.items() if owner != role]
    if role != "reward":
        stream = "KV_penstock-secrets"
        forbidden += [
            f"$JS.API.STREAM.INFO.{stream}",
            f"$JS.API.DIRECT.GET.{stream}",
            f"$JS.API.STREAM.MSG.GET.{stream}",
        ]
        forbidden += [f"$JS.API.DIRECT.GET.{stream}.$KV.penstock-secrets.endpoint.x"]
    assert set(forbidden) - roles.refused(role, publish=forbidden) == set()


def test_rights_for_one_run_end_at_its_streams(tmp_path: Path) -> None:
    """With ``--run`` another run, and streams and buckets that the role does not use, are refused by name."""
    require("nats-server")
    started = NatsRoles(tmp_path, nats_config([RUN]))
    try:
        for role in ROLES:
            forbidden = [
                f"penstock.{OTHER_RUN}.events.log",
                f"$JS.API.STREAM.INFO.{OTHER_RUN}-weights",
                f"$JS.API.DIRECT.GET.{OTHER_RUN}-weights",
                f"$JS.API.DIRECT.GET.KV_{OTHER_RUN}-live",
                f"$JS.API.CONSUMER.CREATE.{OTHER_RUN}-events.t.penstock.{OTHER_RUN}.events.*",
                f"$JS.API.CONSUMER.CREATE.{RUN}-tasks.t.penstock.{RUN}.events.*",
                f"$JS.API.CONSUMER.MSG.NEXT.{RUN}-tasks.t",
                f"$KV.{OTHER_RUN}-live.{role}.x",
                f"$KV.{RUN}-state.swap.0",
                f"$KV.{RUN}-state.reward.0",
                f"$KV.{RUN}-leases.head",
            ]
            if role in {"rollout", "reward"}:
                forbidden += [f"$JS.API.DIRECT.GET.{RUN}-{kind}" for kind in KINDS]
                forbidden += [f"$JS.API.DIRECT.GET.KV_{RUN}-state", f"$JS.API.DIRECT.GET.KV_{RUN}-scoring"]
            assert set(forbidden) - started.refused(role, publish=forbidden) == set(), role
    finally:
        started.close()


@pytest.mark.usefixtures("run_streams")
def test_a_consumer_that_is_not_read_does_not_stay(roles: NatsRoles) -> None:
    """A durable consumer made on a stream that may be tailed has the stream's idle limit, and cannot ask for a longer one."""

    async def create(threshold_s: float | None) -> float | None:
        settings = roles.settings("viewer")
        client = await nats.connect(roles.url, user="viewer", password=settings.secret(), inbox_prefix="_INBOX_viewer")
        try:
            config = api.ConsumerConfig(name="mine", durable_name="mine", inactive_threshold=threshold_s)
            config.filter_subject = subjects.events(RUN)
            made = await client.jetstream().add_consumer(streams.stream_name(RUN, "events"), config)
            return made.config.inactive_threshold
        finally:
            await client.close()

    assert asyncio.run(create(None)) == streams.CONSUMER_IDLE_S
    with pytest.raises(nats.js.errors.BadRequestError, match="inactive threshold"):
        asyncio.run(create(10 * streams.CONSUMER_IDLE_S))
