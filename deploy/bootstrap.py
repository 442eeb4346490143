"""Create the streams, consumers and buckets of a run on NATS and S3; idempotent.

    penstock bootstrap run.toml [run.id=ID nats.url=... s3.endpoint=...]
    penstock bootstrap run.toml --s3-users FOLDER      # also a user of the object store for each role
    penstock bootstrap run.id=ID --delete [--yes]

Services only bind to them and have no right to create them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from penstock.protocol import logs, streams
from penstock.protocol.config.connection import NatsSettings, RunSettings, S3Settings
from penstock.protocol.config.run_file import Loaded, load, split_arguments
from penstock.protocol.config.shared_sections import RetentionSettings
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.process_end import error_text
from penstock.protocol.streams import StreamLimits
from penstock.protocol.subjects import check_run_id
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus


def bootstrap(bus: Bus, blobs: Blobs, run_id: str, limits: StreamLimits | None = None) -> None:
    """Create everything one run needs, or update it to ``limits``; safe to repeat.

    Raises BusError or BlobError when a server is unreachable or refuses.
    """
    check_run_id(run_id)
    made = [bus.ensure_stream(spec) for spec in streams.streams(run_id, limits)]
    made += [bus.ensure_bucket(spec) for spec in streams.buckets(run_id)]
    blobs.ensure_bucket()
    for pending in made:
        pending.wait()
    for pending in [bus.ensure_consumer(spec) for spec in streams.consumers(run_id, limits)]:
        pending.wait()


def delete_run(bus: Bus, run_id: str) -> int:
    """Delete a run's streams and its buckets with their contents; returns how many existed.

    Objects in S3 stay, and so does the registry of reward endpoints, which runs share.
    """
    check_run_id(run_id)
    names = (*streams.stream_names(run_id), *(f"KV_{spec.bucket}" for spec in streams.run_buckets(run_id)))
    return sum([pending.wait() for pending in [bus.delete_stream(name) for name in names]])


class ConnectionSettings(BaseModel):
    """The sections of a run file that commands about a run's streams read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunSettings = RunSettings()
    nats: NatsSettings = NatsSettings()
    s3: S3Settings = S3Settings()
    retention: RetentionSettings = RetentionSettings()


def connection_arguments(arguments: Sequence[str]) -> list[str]:
    """Return those that say where a run's servers and folders are: its run files, and overrides of nats, s3 and run."""
    files, overrides = _split_joined(arguments)
    return [*map(str, files), *(override for override in overrides if _is_of_servers(override))]


def without_servers(arguments: Sequence[str]) -> list[str]:
    """Return the arguments for services that must not connect to the servers of the run; with absolute paths of run files."""
    files, overrides = _split_joined(arguments)
    return [
        *(str(file.absolute()) for file in files),
        *(override for override in overrides if not _is_of_servers(override)),
    ]


def _split_joined(arguments: Sequence[str]) -> tuple[Sequence[Path], list[str]]:
    files, overrides = split_arguments(arguments)
    words = iter(overrides)
    return files, [f"{word}={next(words, '')}" if word.startswith("--") and "=" not in word else word for word in words]


def _is_of_servers(override: str) -> bool:
    return override.lstrip("-").startswith(("nats.", "s3.", "run."))


def create_or_delete(arguments: Sequence[str], run: str | None, *, s3_users: str, delete: bool, yes: bool) -> int:
    """Create or delete what a run needs; returns the exit code. ``s3_users``: folder of secret keys, empty for no users."""
    logs.configure("bootstrap")
    try:
        files, overrides = split_arguments(arguments)
        loaded = load(ConnectionSettings, files=files, overrides=overrides, environ=os.environ)
        settings, run_id = loaded.settings, _run_id(run, loaded)
        with Bus.connect(settings.nats, name="bootstrap") as bus:
            if delete:
                question = f"delete all streams of run {run_id} at {bus.url}, and their contents? [y/N] "
                if (not yes) and not (sys.stdin.isatty() and input(question).strip().lower() == "y"):
                    print("nothing was deleted; answer y, or pass --yes", file=sys.stderr)
                    return 1
                print(f"{delete_run(bus, run_id)} streams of run {run_id} were deleted")
                return 0
            bootstrap(bus, Blobs(settings.s3), run_id, settings.retention.limits())
        if s3_users:
            from penstock.deploy.s3_policies import create_users  # noqa: PLC0415  its library is needed only here

            created = create_users(settings.s3, Path(s3_users))
            print(f"users of {settings.s3.endpoint}: {', '.join(created)}")
    except PenstockError as err:
        print(error_text(f"bootstrap: {err}"), file=sys.stderr)
        return 1
    print(f"run {run_id} is ready at {settings.nats.url} and {settings.s3.endpoint}/{settings.s3.bucket}")
    return 0


def _run_id(run_id: str | None, loaded: Loaded[ConnectionSettings]) -> str:
    """Return the id of the run; raises ConfigError when none was named, since the default is hardly meant."""
    if run_id is None and loaded.origins["run.id"] == "default":
        raise ConfigError("no run was named; give its run file, or run.id=NAME")
    return check_run_id(run_id or loaded.settings.run.id)


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("bootstrap")
