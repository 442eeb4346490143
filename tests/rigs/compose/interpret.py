"""Read compose.yaml as the compose specification says, for the keys that our file has; pure.

A key that is not interpreted here is an error: what the file says is either carried out, or named in `NOT_CARRIED_OUT`.
https://github.com/compose-spec/compose-spec/blob/main/spec.md

Of an image that is built here the stages of its Dockerfile, ENV, USER, ENTRYPOINT, CMD and the folders that it gives to its user count; what
it installs is the environment of this repository. Images of others have stand-ins.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

USER = "10001"
_INSTRUCTION = re.compile(r"^(FROM|ENV|USER|ENTRYPOINT|CMD|RUN) (.*)$")


@dataclass(frozen=True, slots=True)
class Image:
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    own_folders: tuple[str, ...] = ()  # of the user: a new volume there is the user's too


NATS = Image(entrypoint=("nats-server",))
MINIO = Image(entrypoint=(sys.executable, "-P", "-m", "tests.rigs.compose.stand_ins", "s3"))
PROMETHEUS = Image(entrypoint=("prometheus",))  # Debian's, a real one
GRAFANA = Image(entrypoint=(sys.executable, "-P", "-m", "tests.rigs.compose.stand_ins", "grafana"))
FOREIGN = {"nats": NATS, "pgsty/silo": MINIO, "prom/prometheus": PROMETHEUS, "grafana/grafana": GRAFANA}


def foreign(image: str) -> Image:
    """Return the stand-in for an image of others; raises KeyError for one that has none."""
    return FOREIGN[image.rpartition(":")[0]]


def built(dockerfile: Path, target: str) -> Image:
    """Return what an image of ours starts: the stage ``target``, or the last one."""
    stages: dict[str, Image] = {}
    name, image = "", Image()
    text = re.sub(r"\\\n\s*", " ", dockerfile.read_text())
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        word, rest = match.groups()
        if word == "FROM":
            if target and name == target:
                break
            base, _, name = rest.partition(" AS ")
            image = stages.get(base, Image())
        elif word == "ENV":
            image = replace(image, environment={**image.environment, **dict(one.split("=", 1) for one in rest.split())})
        elif word == "USER":
            image = replace(image, user=rest)
        elif word == "ENTRYPOINT":
            image = replace(image, entrypoint=tuple(json.loads(rest)), command=())
        elif word == "CMD":
            image = replace(image, command=tuple(json.loads(rest)))
        elif word == "RUN":
            owned = re.findall(r"install -d -o penstock (/\S+)", rest)
            image = replace(image, own_folders=(*image.own_folders, *owned))
        stages[name] = image
    assert not target or target in stages, f"{dockerfile} has no stage {target}"
    return image


# Keys without a meaning for processes on one machine: what they say is checked by tests/deploy/test_compose.py.
NOT_CARRIED_OUT = frozenset(
    {"logging", "ports", "ipc", "ulimits", "security_opt", "cap_drop", "init", "mem_limit", "networks"}
)
_TOP_LEVEL = {"name", "services", "secrets", "volumes", "networks"}
_KNOWN = frozenset(
    {
        *("image", "build", "command", "environment", "volumes", "secrets", "depends_on", "healthcheck", "profiles"),
        *("restart", "stop_grace_period", "read_only", "tmpfs", "deploy", "network_mode"),
    }
)
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:?)-([^}]*))?\}|(\w+))")
_DURATION = re.compile(r"(\d+)(ms|s|m)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}


class NotInterpreted(Exception):
    """The file has something that this interpreter does not carry out."""


@dataclass(frozen=True, slots=True)
class Mount:
    """What a container sees at ``target``: a file or folder of the host, or a volume (no ``source``: its own)."""

    target: str
    source: str = ""
    is_volume: bool = False
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    test: tuple[str, ...]
    interval_s: float
    timeout_s: float
    retries: int
    start_period_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    image: str
    dockerfile: str  # empty: a foreign image
    target: str
    command: tuple[str, ...] | None
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]
    tmpfs: tuple[str, ...]
    depends_on: Mapping[str, str]  # a service, and its condition
    check: Check | None
    restart: str
    stop_s: float
    read_only: bool
    replicas: int
    shares_network_of: str


def interpret(
    text: str, environ: Mapping[str, str], profiles: Iterable[str], scale: Mapping[str, int]
) -> dict[str, Service]:
    document = _filled_in(yaml.safe_load(text), environ)
    if unknown := {key for key in document if not key.startswith("x-")} - _TOP_LEVEL:
        raise NotInterpreted(f"top-level keys {sorted(unknown)}")
    wanted = set(profiles)
    found = {
        name: _service(name, one, document, scale)
        for name, one in document["services"].items()
        if not one.get("profiles") or wanted & set(one["profiles"])
    }
    for service in found.values():
        if missing := {*service.depends_on, *filter(None, [service.shares_network_of])} - found.keys():
            raise NotInterpreted(f"{service.name} needs {sorted(missing)}, which no profile of {sorted(wanted)} starts")
    return found


def _filled_in(value: Any, environ: Mapping[str, str]) -> Any:
    """Replace ${NAME:-default}, ${NAME-default} and ${NAME} in every text; $$ is one dollar."""
    if isinstance(value, dict):
        return {key: _filled_in(one, environ) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled_in(one, environ) for one in value]
    if not isinstance(value, str):
        return value

    def replaced(match: re.Match[str]) -> str:
        dollar, name, colon, default, bare = match.groups()
        if dollar:
            return "$"
        given = environ.get(name or bare)
        unset = given is None or (colon == ":" and not given)
        return (default or "") if unset else str(given)

    return _VARIABLE.sub(replaced, value)


def _service(name: str, one: Mapping[str, Any], document: Mapping[str, Any], scale: Mapping[str, int]) -> Service:
    if unknown := set(one) - _KNOWN - NOT_CARRIED_OUT:
        raise NotInterpreted(f"services.{name}: {sorted(unknown)}")
    build = one.get("build", {})
    command = one.get("command")
    replicas = scale.get(name, one.get("deploy", {}).get("replicas", 1))
    network = one.get("network_mode", "")
    if network and not network.startswith("service:"):
        raise NotInterpreted(f"services.{name}.network_mode = {network}")
    if command is not None and not isinstance(command, list):
        raise NotInterpreted(f"services.{name}.command is no list")
    return Service(
        name=name,
        image=one["image"],
        dockerfile=build.get("dockerfile", ""),
        target=build.get("target", ""),
        command=None if command is None else tuple(map(str, command)),
        environment={key: _text(value) for key, value in one.get("environment", {}).items()},
        mounts=(*_volumes(name, one, document), *_secrets(one, document)),
        tmpfs=tuple(str(path).partition(":")[0] for path in one.get("tmpfs", [])),
        depends_on={other: how["condition"] for other, how in one.get("depends_on", {}).items()},
        check=_check(one.get("healthcheck")),
        restart=one.get("restart", "no"),
        stop_s=_seconds(one.get("stop_grace_period", "10s")),
        read_only=bool(one.get("read_only")),
        replicas=int(replicas),
        shares_network_of=network.removeprefix("service:"),
    )


def _volumes(name: str, one: Mapping[str, Any], document: Mapping[str, Any]) -> list[Mount]:
    found = []
    for volume in one.get("volumes", []):
        parts = str(volume).split(":")
        read_only = parts[-1] == "ro"
        parts = parts[:-1] if read_only else parts
        if len(parts) == 1:
            found.append(Mount(parts[0], is_volume=True))
        elif parts[0].startswith((".", "/")):
            found.append(Mount(parts[1], parts[0], read_only=read_only))
        elif parts[0] in document.get("volumes", {}):
            found.append(Mount(parts[1], parts[0], is_volume=True, read_only=read_only))
        else:
            raise NotInterpreted(f"services.{name}: volume {parts[0]!r} is not declared")
    return found


def _secrets(one: Mapping[str, Any], document: Mapping[str, Any]) -> list[Mount]:
    found = []
    for secret in one.get("secrets", []):
        source, target = (secret, None) if isinstance(secret, str) else (secret["source"], secret.get("target"))
        found.append(Mount(target or f"/run/secrets/{source}", document["secrets"][source]["file"], read_only=True))
    return found


def _check(given: Mapping[str, Any] | None) -> Check | None:
    if given is None or given.get("disable"):
        return None
    kind, *words = given["test"]
    if kind not in ("CMD", "CMD-SHELL"):
        raise NotInterpreted(f"healthcheck of kind {kind}")
    test = tuple(words) if kind == "CMD" else ("/bin/sh", "-c", *words)
    times = {f"{key}_s": _seconds(given[key]) for key in ("interval", "timeout", "start_period") if key in given}
    return Check(test, retries=int(given["retries"]), **times)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise NotInterpreted(f"a duration {text!r}")
    return float(match[1]) * _UNITS[match[2]]
