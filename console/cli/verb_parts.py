"""What the files of verbs share: how raw words and switches are typed, and the groups of the help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

Raw = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
Flag = Annotated[bool, Parameter(negative=())]
ServiceUrl = Annotated[str, Parameter(help="Where the reward service is.")]
TokenFile = Annotated[Path | None, Parameter(help="File with its bearer token, if it wants one.")]
Endpoint = Annotated[str, Parameter(help="Name of the endpoint.")]

START = Group("Start here", sort_key=0)
TRAIN = Group("Train", sort_key=1)
SERVE = Group("Services", sort_key=2)
LOOK = Group("Look at it", sort_key=3)

OWN_HELP = ()  # no flags of ours: --help goes to the process that the command becomes, which lists its options
REWARD_URL = "http://127.0.0.1:8700"
