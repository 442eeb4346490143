"""Parameter types and help groups shared by the files of verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

Raw = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
Flag = Annotated[bool, Parameter(negative=())]
ServiceUrl = Annotated[str, Parameter(help="URL of the reward service.")]
TokenFile = Annotated[Path | None, Parameter(help="File with its bearer token, if it requires one.")]
Endpoint = Annotated[str, Parameter(help="Name of the endpoint.")]

START = Group("Start here", sort_key=0)
TRAIN = Group("Train", sort_key=1)
SERVE = Group("Services", sort_key=2)
INSPECT = Group("Inspect", sort_key=3)

REWARD_URL = "http://127.0.0.1:8700"
