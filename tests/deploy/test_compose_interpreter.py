"""compose.yaml as `make compose-test` interprets it; starting it needs root and minutes, so here it is only read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.rigs.compose.interpret import USER, Mount, NotInterpreted, built, foreign, interpret

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "compose.yaml").read_text()


@pytest.mark.parametrize("profile", ["cpu", "gpu", "reward-model", "observability"])
def test_every_key_of_the_file_is_carried_out_or_named(profile: str) -> None:
    """Each profile is interpreted whole, and every image is built from a Dockerfile of ours or has a stand-in."""
    for service in interpret(TEXT, {}, [profile, "gpu"], {}).values():
        if service.dockerfile:
            image = built(ROOT / service.dockerfile, service.target)
            assert image.entrypoint[0] == "python"
            assert image.user == USER, "no container of ours is root's"
        elif service.name != "sglang":
            assert foreign(service.image).entrypoint


def test_a_service_may_write_into_its_volumes() -> None:
    """A new volume is root's unless the image has the folder, given to its user."""
    services = interpret(TEXT, {}, ["cpu", "gpu", "observability"], {}).values()
    written = [
        (service.name, mount.target, built(ROOT / service.dockerfile, service.target).own_folders)
        for service in services if service.dockerfile
        for mount in service.mounts if mount.is_volume and not mount.read_only
    ]  # fmt: skip
    assert {(name, target) for name, target, _ in written} > {("targets", "/targets"), ("trainer-cpu", "/runs")}
    assert [(name, target) for name, target, own in written if target not in own] == []


def test_the_profile_without_gpus_starts_in_order_and_scales() -> None:
    """Bootstrap waits for the servers, services for the bootstrap; two workers come from one service."""
    services = interpret(TEXT, {"RUN_ID": "my-run"}, ["cpu"], {"rollout-cpu": 4})
    assert list(services) == ["nats", "s3", "bootstrap", "reward", "rollout-cpu", "trainer-cpu"]
    assert services["rollout-cpu"].replicas == 4
    assert services["bootstrap"].depends_on == {"nats": "service_healthy", "s3": "service_healthy"}
    for name in ("reward", "rollout-cpu", "trainer-cpu"):
        assert services[name].depends_on["bootstrap"] == "service_completed_successfully"
        assert services[name].environment["PENSTOCK_RUN__ID"] == "my-run"
    worker = services["rollout-cpu"]
    assert Mount("/cache", is_volume=True) in worker.mounts, "a volume of its own for each container"
    image = built(ROOT / worker.dockerfile, worker.target)
    assert "/cache" in image.own_folders, "which its user may write"
    assert Mount("/etc/nats/tls/nats.key", "./secrets/tls/nats.key", read_only=True) in services["nats"].mounts
    assert worker.check is not None
    assert worker.check.test[2].startswith("python -P -m penstock.deploy.health rollout")
    assert "${PENSTOCK_WORKER__ID:-$(hostname)-}" in worker.check.test[2], "two dollars are one in the container"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    init: true\n    <<: *hardened\n", "    init: true\n    gpus: all\n    <<: *hardened\n", "gpus"),
        ("interval: 5s", "interval: 5 s", "duration"),
        ("- s3-data:/data", "- s4-data:/data", "s4-data"),
        ('network_mode: "service:sglang"', "network_mode: host", "network_mode"),
        ("volumes:\n  nats-data: {}", "configs: {}\nvolumes:\n  nats-data: {}", "configs"),
    ],
)
def test_what_is_not_carried_out_is_an_error(old: str, new: str, message: str) -> None:
    """A key or a value that the interpreter does not know is refused, never left out."""
    assert TEXT.count(old) >= 1
    with pytest.raises(NotInterpreted, match=message):
        interpret(TEXT.replace(old, new, 1), {}, ["cpu", "gpu"], {})


def test_variables_are_filled_in_as_compose_does() -> None:
    text = "services: {a: {image: x, command: ['${A:-1}', '${A-2}', '$A', '$$A', '${B:-3}']}}"
    assert interpret(text, {"A": ""}, [], {})["a"].command == ("1", "", "", "$A", "3")
    assert interpret(text, {}, [], {})["a"].command == ("1", "2", "", "$A", "3")
