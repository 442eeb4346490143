"""The `penstock` command in a process of its own, forked from one that has imported what most verbs need."""

from __future__ import annotations

import subprocess
from pathlib import Path

from penstock.protocol.config.connection import NatsSettings, S3Settings
from tests import forked
from tests.servers import secret_file

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


def server_arguments(nats: NatsSettings, s3: S3Settings | None = None) -> list[str]:
    """Return the settings that reach the servers of a test, as they are typed."""
    arguments = [f"nats.url={nats.url}", f"nats.user={nats.user}", f"nats.password_file={secret_file(nats.secret())}"]
    if s3 is not None:
        arguments += [f"s3.endpoint={s3.endpoint}", f"s3.bucket={s3.bucket}", f"s3.access_key={s3.access_key}"]
        arguments.append(f"s3.secret_key_file={secret_file(s3.secret())}")
    return arguments
