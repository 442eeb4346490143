"""What an image starts, for images that are not built here: our Dockerfiles are read, foreign images have stand-ins.

Of a Dockerfile the stages, ENV, USER, ENTRYPOINT, CMD and the folders that it gives to its user count; what it installs is
the environment of this repository.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

USER = "10001"
_INSTRUCTION = re.compile(r"^(FROM|ENV|USER|ENTRYPOINT|CMD|RUN) (.*)$")


@dataclass(frozen=True, slots=True)
class Image:
    """How a container of an image starts."""

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    own_folders: tuple[str, ...] = ()  # of the user: a new volume there is the user's too


NATS = Image(entrypoint=("nats-server",))
MINIO = Image(entrypoint=(sys.executable, "-P", "-m", "benchmarks.compose.s3_stand_in"))
PROMETHEUS = Image(entrypoint=("prometheus",))  # Debian's, a real one
GRAFANA = Image(entrypoint=(sys.executable, "-P", "-m", "benchmarks.compose.grafana_stand_in"))
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
