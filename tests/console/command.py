"""The `penstock` command in a process of its own, forked from one that has imported what most verbs need."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import forked

_PRELOADED = (
    "penstock.forensics.audit.audit",
    "penstock.console.record.lineage",
    "penstock.forensics.rescore",
    "penstock.console.tools.dead_letters",
    "penstock.console.tools.removal",
    "penstock.console.tools.rewards",
)


def penstock(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a verb in a folder, which is also its home; `tests/console/cli/test_command.py` starts the command itself."""
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "COLUMNS": "100", **environment}
    return forked.run(
        "penstock.console.cli.main", *_PRELOADED, arguments=arguments, cwd=cwd, environ=environ, deadline_s=180.0
    )
