"""The compose deployment, checked without a container engine: schema, images, settings, rights."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from pydantic import BaseModel
from tests.groups import make_generated, make_groups, make_scored, make_task_issued
from tests.servers import require, wait_for

from penstock.deploy.bootstrap import ConnectionSettings, bootstrap, delete_run
from penstock.deploy.child import Child
from penstock.deploy.health import HealthSettings, beats
from penstock.deploy.make_secrets import make_secrets
from penstock.deploy.servers import find_program
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import BusError, BusRefused
from penstock.protocol.facts import (
    BlobRef,
    GroupGenerated,
    GroupScored,
    Heartbeat,
    RunEvent,
    TaskIssued,
    WeightsApplied,
    WeightsPublished,
    WeightsRefused,
    encode,
)
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.reward_model.__main__ import _parser as reward_model_options
from penstock.reward_service.settings import RewardSettings
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.settings import TrainerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
PORT = "PENSTOCK_REWARD_SERVICE__PORT"
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
OURS: dict[str, type[BaseModel]] = {
    "bootstrap": ConnectionSettings,
    "reward": RewardSettings,
    "rollout-gpu": RolloutSettings,
    "rollout-cpu": RolloutSettings,
    "trainer-gpu": TrainerSettings,
    "trainer-cpu": TrainerSettings,
}


def tool(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else (shutil.which(name) or pytest.skip(f"{name} is not installed"))


def filled_in(value: object) -> str:
    """The value with every ${VARIABLE:-default} at its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))


# ── the files ─────────────────────────────────────────────────────────────────────────────────────


def test_the_compose_file_fits_the_schema() -> None:
    """The compose specification's own schema accepts the file."""
    done = subprocess.run(
        [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(COMPOSE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").glob("*.Dockerfile")), ids=lambda p: p.name)
def test_dockerfiles_pass_the_linter(path: Path) -> None:
    """hadolint, with its shell checks, has nothing to say."""
    done = subprocess.run([tool("hadolint"), str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").glob("*.Dockerfile")), ids=lambda p: p.name)
def test_dockerfiles_copy_what_exists_and_start_what_can_be_imported(path: Path) -> None:
    """Every copied path is in the repository, and every module that is started exists."""
    text = path.read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (DEPLOY.parent / source).exists() or source == "README.md", source
    for command in re.findall(r"^CMD (.+)$", text, re.MULTILINE):
        module = "src/" + json.loads(command)[0].replace(".", "/")
        assert any((DEPLOY.parent / f"{module}{end}").exists() for end in (".py", "/__main__.py")), module


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_a_health_check_and_an_init(name: str) -> None:
    """Health is checked everywhere but in the service that ends, and children are reaped."""
    service = SERVICES[name]
    assert service["init"] is True
    if name == "bootstrap":
        assert service["healthcheck"] == {"disable": True}
    else:
        assert service["healthcheck"]["test"]
        assert {"interval", "timeout", "retries"} <= set(service["healthcheck"])


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned(name: str) -> None:
    """No image is taken without a version, or as latest."""
    image = filled_in(SERVICES[name]["image"])
    tag = image.rpartition("/")[2].partition(":")[2]
    assert tag, f"{image} has no tag"
    assert "latest" not in tag


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").glob("*.Dockerfile")), ids=lambda p: p.name)
def test_every_base_image_is_pinned(path: Path) -> None:
    """Base images carry a version too, directly or as the default of their argument."""
    text = path.read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        image = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], base)
        assert image in stages or re.search(r":[\w.-]*\d", image), image


def test_the_reward_model_is_started_with_options_that_it_takes() -> None:
    """Its command line parses, it registers where the reward service is, and says how that reaches it."""
    module, *arguments = (filled_in(word) for word in SERVICES["reward-model"]["command"])
    options = reward_model_options().parse_args(arguments)
    assert module == "penstock.reward_model"
    assert str(options.path) == SERVICES["reward-model"]["volumes"][0].split(":")[-2]
    assert urlsplit(options.register).netloc == "reward:" + SERVICES["reward"]["environment"][PORT]
    assert urlsplit(options.url).netloc == f"reward-model:{options.port}"
    assert f":{options.port}/" in SERVICES["reward-model"]["healthcheck"]["test"][-1]
    assert Path(options.token_file).name in SERVICES["reward-model"]["secrets"]
    assert SERVICES["reward"]["environment"]["PENSTOCK_REWARD_SERVICE__TOKEN_FILE"] == str(options.token_file)


def test_the_s3_image_is_one_variable() -> None:
    """Another S3 server is a matter of one environment variable."""
    assert SERVICES["s3"]["image"].startswith("${PENSTOCK_S3_IMAGE:-")


@pytest.mark.parametrize(("name", "settings_class"), OURS.items(), ids=OURS)
def test_every_setting_in_the_environment_exists(name: str, settings_class: type[BaseModel]) -> None:
    """Each service accepts its PENSTOCK_ variables, and none of them is another service's business."""
    environment = {k: filled_in(v) for k, v in SERVICES[name]["environment"].items() if k.startswith("PENSTOCK_")}
    loaded = load(settings_class, environ=environment)
    for variable in environment:
        section, key = variable.removeprefix("PENSTOCK_").lower().split("__")
        if section in settings_class.model_fields:
            assert loaded.origins[f"{section}.{key}"] == f"environment {variable}"
        else:
            assert (name, section) == ("bootstrap", "run")


@pytest.mark.parametrize("name", SERVICES)
def test_every_secret_is_made_and_declared(name: str, tmp_path: Path) -> None:
    """A secret a service mounts is declared, written by make_secrets, and every *_FILE points to one of its own."""
    make_secrets(tmp_path)
    declared = yaml.safe_load(COMPOSE.read_text())["secrets"]
    mounted = [s if isinstance(s, str) else s["source"] for s in SERVICES[name].get("secrets", [])]
    for secret in mounted:
        assert (tmp_path / Path(declared[secret]["file"]).name).exists()
    for value in SERVICES[name].get("environment", {}).values():
        if str(value).startswith("/run/secrets/"):
            assert Path(str(value)).name in mounted


def test_services_depend_on_services_that_can_be_healthy() -> None:
    """Whoever waits for health waits for a service with a health check, of its own profiles."""
    for service in SERVICES.values():
        for other, how in service.get("depends_on", {}).items():
            assert set(SERVICES[other].get("profiles", [])) <= set(service.get("profiles", []))
            if how["condition"] == "service_healthy":
                assert "test" in SERVICES[other]["healthcheck"]


def test_secrets_are_made_once(tmp_path: Path) -> None:
    """A second call changes nothing; a password that was replaced reaches the NATS file."""
    make_secrets(tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert make_secrets(tmp_path) == []
    (tmp_path / "nats_reward").write_text("replaced")
    assert [path.name for path in make_secrets(tmp_path)] == ["nats_passwords.conf"]
    assert 'REWARD_PASSWORD: "replaced"' in (tmp_path / "nats_passwords.conf").read_text()
    for name in before.keys() - {"nats_reward", "nats_passwords.conf"}:
        assert (tmp_path / name).read_text() == before[name]
    assert tmp_path.stat().st_mode & 0o077 == 0


# ── what each role may do, on a real nats-server with our nats.conf ───────────────────────────────


class Roles:
    """A nats-server with the shipped configuration, moved to the loopback; ``bus(user)`` connects as a role."""

    def __init__(self, folder: Path) -> None:
        self.secrets = folder / "secrets"
        make_secrets(self.secrets)
        shutil.copy(self.secrets / "nats_passwords.conf", folder / "passwords.conf")
        text = (DEPLOY / "nats.conf").read_text()
        for old, new in (
            ("listen: 0.0.0.0:4222", f'listen: "127.0.0.1:-1"\nports_file_dir: "{folder}"'),
            ("http: 0.0.0.0:8222", 'http: "127.0.0.1:-1"'),
            ("store_dir: /data/jetstream", f'store_dir: "{folder}/js"'),
        ):
            assert old in text
            text = text.replace(old, new)
        (folder / "nats.conf").write_text(text)
        self.server = Child(
            "nats-server",
            [find_program("nats-server"), "-c", str(folder / "nats.conf")],
            log=folder / "log",
            death_signal=signal.SIGTERM,
        )
        self.server.start()
        ports = folder / f"nats-server_{self.server.pid}.ports"
        wait_for(
            lambda: ports.exists() and ports.read_text().endswith("}"), f"nats-server: {self.server.log_tail()}", 10.0
        )
        self.url = json.loads(ports.read_text())["nats"][0]
        self._buses: dict[str, Bus] = {}

    def bus(self, user: str) -> Bus:
        if user not in self._buses:
            settings = NatsSettings(url=self.url, user=user, password_file=self.secrets / f"nats_{user}")
            self._buses[user] = Bus.connect(settings, name=user)
        return self._buses[user]

    def close(self) -> None:
        for bus in self._buses.values():
            bus.close()
        self.server.stop()


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    require("nats-server")
    started = Roles(tmp_path_factory.mktemp("roles"))
    yield started
    started.close()


@pytest.fixture
def secured_run(roles: Roles, blobs: Blobs, run_id: str) -> Iterator[str]:
    bootstrap(roles.bus("admin"), blobs, run_id)
    yield run_id
    delete_run(roles.bus("admin"), run_id)


def beat(bus: Bus, run: str, role: Any, service: str) -> None:
    fact = Heartbeat(role=role, service_id=service, at=0.0, state="testing")
    live = bus.key_value(streams.live_bucket(run).bucket).wait()
    live.put(streams.heartbeat_key(role, service), encode(fact)).wait()


def test_each_role_may_do_its_part_of_the_ring(roles: Roles, secured_run: str) -> None:
    """Task, generation, scoring, training, weights, heartbeats, events and dead letters: all with the role's own user."""
    run = secured_run
    trainer, rollout, reward, viewer = (roles.bus(user) for user in ("trainer", "rollout", "reward", "viewer"))
    manifest = BlobRef(key="k", size_bytes=1, sha256="0" * 64)
    groups = make_groups(2, size=2)
    seen: list[object] = []
    rollout.tail(f"{run}-weights", subjects.weights_published(run), WeightsPublished, seen.append).wait()
    viewer.tail(f"{run}-events", subjects.events(run), RunEvent, seen.append).wait()

    trainer.publish(subjects.tasks(run, "train"), make_task_issued(run), msg_id="p0").wait()
    (task,) = rollout.inbox(streams.tasks_consumer(run, "train"), TaskIssued).wait().fetch(1, 5.0).wait()
    generated = make_generated(run, groups)
    rollout.publish(subjects.generated(run, "train"), generated, msg_id="g:p0").wait()
    task.ack().wait()

    (to_score,) = reward.inbox(streams.generated_consumer(run), GroupGenerated).wait().fetch(5, 5.0).wait()
    reward.publish(subjects.scored(run, "train"), make_scored(generated), msg_id="s:p0").wait()
    to_score.ack().wait()
    offers = reward.key_value(streams.registry_bucket().bucket).wait()
    revision = offers.swap(f"r-{run}", b"endpoint", None).wait()
    assert [e.revision for e in offers.entries().wait() if e.key == f"r-{run}"] == [revision]
    offers.delete(f"r-{run}").wait()

    spec = streams.scored_consumer(run, "train")
    inbox = trainer.inbox(spec, GroupScored).wait()
    trainer.reset_consumer(spec).wait()
    (scored,) = inbox.fetch(5, 5.0).wait()
    scored.ack().wait()
    trainer.key_value(streams.state_bucket(run).bucket).wait().swap(streams.HEAD_KEY, b"1", None).wait()
    published = WeightsPublished(run_id=run, version=1, step=1, manifest=manifest, num_bytes=1)
    trainer.publish(subjects.weights_published(run), published, msg_id="w1").wait()
    head = rollout.key_value(streams.state_bucket(run).bucket).wait().get(streams.HEAD_KEY).wait()
    assert head is not None
    applied = WeightsApplied(
        run_id=run,
        worker_id="w0",
        version=1,
        previous_version=None,
        pause_s=0.0,
        fetch_s=0.0,
        num_bytes=1,
        checksum="",
        layout="mirror",
    )
    rollout.publish(subjects.weights_applied(run), applied, msg_id="a1").wait()
    rollout.tail(f"{run}-weights", subjects.weights_applied(run), WeightsApplied, lambda _: None).wait()
    refused = WeightsRefused(run_id=run, worker_id="w0", version=1, manifest=manifest, serving=None, reason="sha256")
    rollout.publish(subjects.weights_refused(run), refused, msg_id="r1").wait()
    trainer.tail(f"{run}-weights", subjects.weights_refused(run), WeightsRefused, lambda _: None).wait()
    leases = {
        role: bus.key_value(streams.lease_bucket(run).bucket).wait() for role, bus in (("r", rollout), ("t", trainer))
    }
    leases["r"].swap(streams.swap_turn_key(0), b"w0", None).wait()
    leases["t"].swap(streams.GARBAGE_LEASE, b"t", None).wait()
    for bus, role in ((trainer, "trainer"), (rollout, "rollout"), (reward, "reward")):
        beat(bus, run, role, "x-1")
        event = RunEvent(run_id=run, source=role, kind="log", at=0.0)
        bus.publish(subjects.events(run, "log"), event, msg_id=role).wait()
        assert beats(viewer, run, role, "x-")
        assert not beats(viewer, run, role, "y-")
    wait_for(lambda: len(seen) == 4, "the published version and three events")
    assert f"{run}-events" in viewer.stream_names().wait()
    for name in ("tasks", "generated", "scored"):
        assert viewer.stream_state(f"{run}-{name}").wait().num_messages == 0


def test_a_poisoned_message_can_be_buried_by_every_role(roles: Roles, secured_run: str) -> None:
    """Each consumer's role may write the dead letter of its own stage."""
    run = secured_run
    for user, subject, spec, fact in (
        ("rollout", subjects.tasks(run, "train"), streams.tasks_consumer(run, "train"), TaskIssued),
        ("reward", subjects.generated(run, "train"), streams.generated_consumer(run), GroupGenerated),
        ("trainer", subjects.scored(run, "train"), streams.scored_consumer(run, "train"), GroupScored),
    ):
        poison = RunEvent(run_id=run, source="x", kind="log", at=0.0)
        roles.bus("admin").publish(subject, poison, msg_id="poison").wait()
        assert roles.bus(user).inbox(spec, fact).wait().fetch(1, 0.5).wait() == []
        wait_for(lambda spec=spec: roles.bus("viewer").stream_state(spec.stream).wait().num_messages == 0, "the burial")
    assert roles.bus("viewer").stream_state(f"{run}-dead").wait().num_messages == 3


def test_no_role_may_do_anothers_part(roles: Roles, secured_run: str) -> None:
    """Publishing in another role's name, moving the head and deleting streams are refused with the server's reason."""
    run = secured_run
    generated = make_generated(run, make_groups(1))
    attempts = [
        roles.bus(user).publish(subject, fact, msg_id="x", deadline_s=1.0)
        for user, subject, fact in (
            ("rollout", subjects.scored(run, "train"), make_scored(generated)),
            ("rollout", subjects.weights_published(run), make_task_issued(run)),
            ("reward", subjects.generated(run, "train"), generated),
            ("trainer", subjects.scored(run, "train"), make_scored(generated)),
            ("viewer", subjects.tasks(run, "train"), make_task_issued(run)),
        )
    ]
    deletion = roles.bus("trainer").delete_stream(f"{run}-dead")
    for attempt in attempts:
        with pytest.raises(BusRefused, match=r"(?i)permissions violation for publish"):
            attempt.wait()
    with pytest.raises(BusRefused, match=r"(?i)permissions violation for publish"):
        deletion.wait()
    assert roles.bus("admin").stream_state(f"{run}-tasks").wait().num_messages == 0


def test_only_reward_services_read_what_endpoints_were_given_in_confidence(roles: Roles, secured_run: str) -> None:
    """The reward service writes and reads secrets and its progress; no other service may read a secret."""
    reward = roles.bus("reward")
    progress = reward.key_value(streams.scoring_bucket(secured_run).bucket).wait()
    progress.put("reward.7", b"{}").wait()
    progress.delete("reward.7").wait()
    name = streams.secrets_bucket().bucket
    key = f"endpoint.{secured_run}"
    secrets = reward.key_value(name).wait()
    secrets.put(key, b"confidential").wait()
    assert secrets.get(key).wait() is not None
    theirs = [roles.bus(user).key_value(name).wait() for user in ("trainer", "rollout", "viewer")]
    reading = [read for bucket in theirs for read in (bucket.get(key), bucket.entries())]  # all at once: each times out
    for read in reading:
        with pytest.raises(BusError):
            read.wait()
    secrets.delete(key).wait()


def test_health_settings_come_from_the_environment() -> None:
    """The health check reads the variables the service reads."""
    for name in ("rollout-gpu", "trainer-gpu", "trainer-cpu"):
        environment = {k: filled_in(v) for k, v in SERVICES[name]["environment"].items() if k.startswith("PENSTOCK_")}
        assert load(HealthSettings, environ=environment).settings.nats.url == "nats://nats:4222"
