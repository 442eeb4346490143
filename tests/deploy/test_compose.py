"""The compose deployment, checked without a container engine: schema, images, settings, secrets."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from pydantic import BaseModel

from penstock.deploy import certificates
from penstock.deploy.bootstrap import ConnectionSettings
from penstock.deploy.make_secrets import make_secrets
from penstock.deploy.s3_policies import access_key
from penstock.protocol.command_line import application
from penstock.protocol.config.run_file import load
from penstock.reward_model.commands import serve_model
from penstock.reward_service.endpoints.endpoint import Access, Role, read_tokens
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
    "targets": ConnectionSettings,
}
DOCKERFILES = pytest.mark.parametrize("path", sorted((DEPLOY / "docker").glob("*.Dockerfile")), ids=lambda p: p.name)


def tool(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else (shutil.which(name) or pytest.skip(f"{name} is not installed"))


def filled_in(value: object) -> str:
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", str(value))


# ── the files ─────────────────────────────────────────────────────────────────────────────────────


def test_the_compose_file_fits_the_schema() -> None:
    done = subprocess.run(
        [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(COMPOSE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@DOCKERFILES
def test_dockerfiles_pass_the_linter(path: Path) -> None:
    done = subprocess.run([tool("hadolint"), str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@DOCKERFILES
def test_dockerfiles_copy_what_exists_and_start_what_can_be_imported(path: Path) -> None:
    text = path.read_text()
    not_ignored = re.findall(r"^!(.+)$", (DEPLOY.parent / ".dockerignore").read_text(), re.MULTILINE)
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (DEPLOY.parent / source).exists(), source
            assert source in not_ignored, source
    for command in re.findall(r"^CMD (.+)$", text, re.MULTILINE):
        module = json.loads(command)[0].replace(".", "/")
        assert any((DEPLOY.parent / "src" / f"{module}{end}").exists() for end in (".py", "/__main__.py")), module


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_pinned_bounded_and_watched(name: str) -> None:
    """An image with a tag that is not "latest", a limit of memory, an init, and a health check."""
    service = SERVICES[name]
    tag = filled_in(service["image"]).rpartition("/")[2].partition(":")[2]
    assert tag
    assert "latest" not in tag
    assert re.fullmatch(r"\d+g", filled_in(service["mem_limit"]))
    assert service["init"] is True
    if name == "bootstrap":
        assert service["healthcheck"] == {"disable": True}
    else:
        assert service["healthcheck"]["test"]
        assert {"interval", "timeout", "retries"} <= set(service["healthcheck"])


def test_every_variable_is_in_the_example_with_its_default() -> None:
    """`deploy/env.example` is what a person copies; a variable in double dollars is the container's own."""
    used = dict(re.findall(r"(?<!\$)\$\{(\w+):?-([^}]*)\}", COMPOSE.read_text()))
    lines = (DEPLOY / "env.example").read_text().splitlines()
    given = dict(line.split("#")[0].strip().split("=", 1) for line in lines if line and not line.startswith("#"))
    assert given == used


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "sglang"])
def test_containers_can_write_volumes_and_tmp_only(name: str) -> None:
    """A read-only root without capabilities, but SGLang's; what torch compiles is loaded from its cache below /tmp."""
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp:exec,mode=1777"]
    mounted = {
        str(volume).split(":")[-2 if str(volume).endswith(":ro") else -1] for volume in service.get("volumes", [])
    }
    folders = [service.get("environment", {}).get(key) for key in ("PENSTOCK_WORKER__CACHE_DIR", "PENSTOCK_RUN__DIR")]
    assert all(folder in mounted for folder in folders if folder is not None)


def test_endpoints_reach_the_reward_service_alone() -> None:
    """A reward model's network has no NATS, no object store and no server of /metrics, which asks for no token."""
    networks = {name: service.get("networks", ["default"]) for name, service in SERVICES.items()}
    assert networks.pop("reward-model") == ["endpoints"]
    assert {name for name, found in networks.items() if "endpoints" in found} == {"reward"}


def test_engine_and_trainer_have_gpus_of_their_own() -> None:
    """Reserved by number: by count, docker gives the same first GPU to both."""
    found = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0].get("device_ids")
        for name, service in SERVICES.items()
        if "resources" in service.get("deploy", {})
    }
    assert found == {"sglang": ["${SGLANG_GPUS:-0}"], "trainer-gpu": ["${TRAINER_GPUS:-1}"]}


def test_workers_can_be_scaled() -> None:
    """No id and no port of its own: the id follows from the container's name."""
    for service in (SERVICES["rollout-cpu"], SERVICES["rollout-gpu"]):
        assert "PENSTOCK_WORKER__ID" not in service["environment"]
        assert "ports" not in service


@DOCKERFILES
def test_every_base_image_is_pinned(path: Path) -> None:
    text = path.read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        image = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], base)
        assert image in stages or re.search(r":[\w.-]*\d", image), image


def test_the_reward_model_is_started_with_options_that_it_takes() -> None:
    """Its command line parses; it registers at the reward service, with the URL that service reaches it by."""
    module, *arguments = (filled_in(word) for word in SERVICES["reward-model"]["command"])
    app = application()
    app.default(serve_model)
    given = app.parse_args(arguments)[1].arguments
    options = given["options"]
    assert module == "penstock.reward_model"
    assert str(given["path"]) == SERVICES["reward-model"]["volumes"][0].split(":")[-2]
    assert urlsplit(options.register).netloc == "reward:" + SERVICES["reward"]["environment"][PORT]
    assert urlsplit(options.url).netloc == f"reward-model:{options.port}"
    assert f":{options.port}/" in SERVICES["reward-model"]["healthcheck"]["test"][-1]
    assert options.token_file.name in SERVICES["reward-model"]["secrets"]


def test_the_s3_image_is_one_variable() -> None:
    assert SERVICES["s3"]["image"].startswith("${PENSTOCK_S3_IMAGE:-")


@pytest.mark.parametrize(("name", "settings_class"), OURS.items(), ids=OURS)
def test_every_setting_in_the_environment_exists(name: str, settings_class: type[BaseModel]) -> None:
    """Each service accepts its PENSTOCK_ variables, and has none of another service."""
    given = SERVICES[name]["environment"].items()
    environment = {k: filled_in(v) for k, v in given if k.startswith("PENSTOCK_") and "__" in k}
    loaded = load(settings_class, environ=environment)
    for variable in environment:
        section, key = variable.removeprefix("PENSTOCK_").lower().split("__")
        if section in settings_class.model_fields:
            assert loaded.origins[f"{section}.{key}"] == f"environment {variable}"
        else:
            assert (name, section) == ("bootstrap", "run")
    assert load(ConnectionSettings, environ=environment).settings.nats.url == "tls://nats:4222", "as a health check"


@pytest.mark.parametrize("name", [name for name in OURS if name != "bootstrap"])
def test_every_service_with_settings_of_the_run_reads_its_run_file(name: str) -> None:
    words = SERVICES[name].get("command")
    if words is None:
        dockerfile = DEPLOY.parent / SERVICES[name]["build"]["dockerfile"]
        words = json.loads(re.findall(r"^CMD (.+)$", dockerfile.read_text(), re.MULTILINE)[-1])
    assert words[-1] == "/etc/penstock/run.toml"
    assert f"${{RUN_FILE:-./run.toml}}:{words[-1]}:ro" in SERVICES[name]["volumes"]


def test_every_secret_and_named_file_is_mounted_and_made(tmp_path: Path) -> None:
    """What a service mounts below `secrets` is made by make_secrets; each `*_FILE` is a mounted file or secret."""
    make_secrets(tmp_path)
    declared = {name: one["file"] for name, one in yaml.safe_load(COMPOSE.read_text())["secrets"].items()}
    for name, service in SERVICES.items():
        volumes = (filled_in(one).removesuffix(":ro").split(":") for one in service.get("volumes", []) if ":" in one)
        sources = {target: source for source, target in volumes}
        for one in service.get("secrets", []):
            secret = one if isinstance(one, str) else one["source"]
            sources[f"/run/secrets/{secret}"] = declared[secret]
        for source in sources.values():
            if source.startswith("./secrets/"):
                assert (tmp_path / source.removeprefix("./secrets/")).is_file(), (name, source)
        for variable, value in service.get("environment", {}).items():
            if variable.endswith("_FILE") or str(value).startswith("/run/secrets/"):
                assert value in sources, (name, variable)


def test_the_roles_have_credentials_of_their_own() -> None:
    """No two roles share a password or S3 key; the root's are the bootstrap's, the signing key is the trainer's."""
    holders: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for one in service.get("secrets", []):
            secret = one if isinstance(one, str) else one["source"]
            holders.setdefault(secret, set()).add(name.partition("-")[0])
    assert holders["s3_secret_key"] == {"s3", "bootstrap"}
    assert holders["signing_key"] == {"trainer"}
    for role in ("trainer", "rollout", "reward"):
        assert holders[f"nats_{role}"] == {role}
        assert holders[f"s3_{role}"] == {role, "bootstrap"}
    for name, role in (("reward", "reward"), ("rollout-cpu", "rollout"), ("trainer-cpu", "trainer")):
        assert filled_in(SERVICES[name]["environment"]["PENSTOCK_S3__ACCESS_KEY"]) == access_key(role)


def test_nothing_between_containers_is_in_clear_text() -> None:
    """NATS, object store and HTTP APIs are called with TLS; SGLang, which has no login, on the worker's loopback."""
    for name, service in SERVICES.items():
        texts = [*map(str, service.get("environment", {}).values()), *map(str, service.get("command") or [])]
        plain = [text for text in texts if "http://" in text or "nats://" in text]
        assert all("//127.0.0.1:" in text for text in plain), (name, plain)
    assert SERVICES["rollout-gpu"]["network_mode"] == "service:sglang"
    assert "--host=127.0.0.1" in SERVICES["sglang"]["command"]


def test_services_depend_on_services_that_can_be_healthy() -> None:
    for service in SERVICES.values():
        for other, how in service.get("depends_on", {}).items():
            assert set(SERVICES[other].get("profiles", [])) <= set(service.get("profiles", []))
            if how["condition"] == "service_healthy":
                assert "test" in SERVICES[other]["healthcheck"]


def test_a_trainer_that_is_stopped_has_time_for_its_checkpoint() -> None:
    """Docker kills what has not ended by then; a checkpoint of a large model takes minutes."""
    assert {SERVICES[name]["stop_grace_period"] for name in ("trainer-gpu", "trainer-cpu")} == {"300s"}


def test_containers_can_read_the_secrets_whatever_the_umask(tmp_path: Path) -> None:
    """They have another user id; nobody else may enter the folder. Files of an earlier call are mended."""
    folder = tmp_path / "secrets"
    before = os.umask(0o077)
    try:
        make_secrets(folder, ["nats-0.nats"])
        (folder / "nats_trainer").chmod(0o600)
        make_secrets(folder, ["nats-0.nats"])
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert modes.pop("ca.key") == 0o600
    assert set(modes.values()) == {0o644}, modes
    assert folder.stat().st_mode & 0o777 == 0o700


def test_secrets_are_made_once(tmp_path: Path) -> None:
    """A second call changes nothing; a password that was replaced reaches the NATS file."""
    make_secrets(tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert make_secrets(tmp_path) == []
    (tmp_path / "nats_reward").write_text("replaced")
    assert [path.name for path in make_secrets(tmp_path)] == ["nats_passwords.conf"]
    assert 'REWARD_PASSWORD: "replaced"' in (tmp_path / "nats_passwords.conf").read_text()
    for name in before.keys() - {"nats_reward", "nats_passwords.conf"}:
        (found,) = tmp_path.rglob(name)
        assert found.read_text() == before[name]
    assert tmp_path.stat().st_mode & 0o077 == 0


def test_a_server_that_joins_a_cluster_is_in_the_certificate(tmp_path: Path) -> None:
    """A certificate without its name is replaced, under the same authority and with the names it had; once."""
    make_secrets(tmp_path, ["n0.example"])
    authority = (tmp_path / "tls" / "ca.pem").read_text()
    written = make_secrets(tmp_path, ["n1.example:6222"])
    assert {path.name for path in written} == {"nats_routes.conf", "nats.pem", "nats.key"}
    assert {"n0.example", "n1.example"} <= set(certificates.hosts_of(tmp_path / "tls" / "nats.pem"))
    assert certificates.certificate(tmp_path / "tls", "nats").ca_file.read_text() == authority
    assert make_secrets(tmp_path, ["n1.example:6222"]) == []


def test_the_reward_service_knows_hashes_of_tokens_only(tmp_path: Path) -> None:
    """Endpoints register with a token of their own, Prometheus reads with another; the service's file has neither."""
    make_secrets(tmp_path)
    file = SERVICES["reward"]["environment"]["PENSTOCK_REWARD_SERVICE__TOKENS_FILE"]
    hashes = (tmp_path / Path(file).name).read_text()
    access = Access(read_tokens(hashes))
    roles = {}
    for secret in ("reward_token", "reward_register_token", "reward_read_token"):
        token = (tmp_path / secret).read_text()
        assert token not in hashes
        caller = access.caller(token)
        assert caller is not None
        roles[secret] = caller.role
    assert list(roles.values()) == [Role.ADMIN, Role.REGISTER, Role.READ]
    assert "reward_register_token" in SERVICES["reward-model"]["secrets"]
    assert "reward_read_token" in SERVICES["prometheus"]["secrets"]
    assert not any("reward_token" in str(service.get("secrets")).split("'") for service in SERVICES.values())
