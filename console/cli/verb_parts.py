"""Parameter types and help groups shared by the files of verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from penstock.protocol.command_line import Group, Parameter

ServiceUrl = Annotated[str, Parameter(help="URL of the reward service.")]
AnyServiceUrl = Annotated[
    str | None,
    Parameter(
        help="URL of the reward service; by default the one at http://127.0.0.1:8700, or if none answers there, one that is "
        "started for this command and offers the built-in rewards, those of the run and those of --serve."
    ),
]
ServedFiles = Annotated[
    tuple[Path, ...],
    Parameter(
        name="--serve",
        help="File to score with: Python with a reward function, JSON with a grader, TOML with a judge; its reward has "
        "the file's name. Repeatable.",
    ),
]
TokenFile = Annotated[Path | None, Parameter(help="File with its bearer token, if it requires one.")]
Endpoint = Annotated[str, Parameter(help="Name of the endpoint.")]

START = Group("Start here", sort_key=0)
TRAIN = Group("Train", sort_key=1)
SERVE = Group("Services", sort_key=2)
INSPECT = Group("Inspect", sort_key=3)
