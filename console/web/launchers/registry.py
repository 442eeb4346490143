"""All launchers by name."""

from __future__ import annotations

from typing import Literal

from penstock.console.web.launchers.kubernetes import Kubernetes
from penstock.console.web.launchers.launcher import Launcher
from penstock.console.web.launchers.local import Local
from penstock.console.web.launchers.slurm import Slurm

LauncherName = Literal["local", "slurm", "kubernetes"]
LAUNCHERS: dict[str, Launcher] = {one.name: one for one in (Local(), Slurm(), Kubernetes())}
