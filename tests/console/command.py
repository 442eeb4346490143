"""The `penstock` command in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock.protocol.config.connection import NatsSettings, S3Settings
from tests import forked
from tests.servers import secret_file

_ROOT = Path(__file__).parents[2]


class Replaced(Exception):
    """This process would have been replaced by another."""


def penstock(
    *arguments: str, cwd: Path, code: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a verb in a folder, which is also its home; ``code`` is the exit code that is expected.

    The process is forked from one that has imported what most verbs need.
    """
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "COLUMNS": "100", **environment}
    command = [sys.executable, "-P", "-m", "penstock", *arguments]
    answer = forked.run(command, cwd=cwd, environ=environ, deadline_s=180.0)
    assert code in {None, answer.returncode}, answer.stderr
    return answer


def started(*arguments: str, cwd: Path, code: int = 0, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    """Start the command itself as a user does, with ``typed`` as its input."""
    environ = {"PYTHONPATH": str(_ROOT / "src"), "PATH": "/usr/bin:/bin", "HOME": str(cwd), "COLUMNS": "100"}
    command = [sys.executable, "-P", "-m", "penstock", *arguments]
    answer = subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=300, check=False, cwd=cwd, env=environ
    )
    assert answer.returncode == code, answer.stderr
    return answer


def server_arguments(nats: NatsSettings, s3: S3Settings | None = None) -> list[str]:
    """Return the settings that reach the servers of a test, as they are typed."""
    arguments = [f"nats.url={nats.url}", f"nats.user={nats.user}", f"nats.password_file={secret_file(nats.secret())}"]
    if s3 is not None:
        arguments += [f"s3.endpoint={s3.endpoint}", f"s3.bucket={s3.bucket}", f"s3.access_key={s3.access_key}"]
        arguments.append(f"s3.secret_key_file={secret_file(s3.secret())}")
    return arguments
