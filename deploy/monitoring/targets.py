"""Write the addresses of a run's services for Prometheus, from their heartbeats.

    python -P -m penstock.deploy.monitoring.targets RUN.toml ... [--write FILE] [--every SECONDS]

The output is a list of targets as ``file_sd_configs`` and ``http_sd_configs`` read it. With ``--write`` the file is replaced
as a whole, so that Prometheus never reads half of it; with ``--every`` again and again until it is stopped.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from penstock.deploy.bootstrap import ConnectionSettings
from penstock.protocol import heartbeats, logs, streams
from penstock.protocol.command_line import Help, RunArguments, UsageError, program
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.facts import Heartbeat
from penstock.protocol.files import atomic_write
from penstock.protocol.transport.bus import Bus

# Any service may write a heartbeat: only an address and Prometheus' path are taken from it.
_ADDRESS = re.compile(
    r"(https?)://((?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})|\[[0-9a-fA-F:.]{2,45}\]):[0-9]{1,5})/metrics"
)


def targets(beats: Iterable[Heartbeat], run_id: str) -> list[dict[str, Any]]:
    target_groups = []
    for beat in sorted(beats, key=lambda one: (one.role, one.service_id)):
        match = _ADDRESS.fullmatch(beat.metrics_url or "")
        if match is not None and beat.state != heartbeats.EXITED:
            labels = {"job": f"penstock-{beat.role}", "run": run_id}
            if match[1] == "https":
                labels["__scheme__"] = "https"  # Prometheus' label: how it scrapes this target
            target_groups.append({"targets": [match[2]], "labels": labels})
    return target_groups


def write_targets(
    *arguments: RunArguments,
    write: Annotated[Path | None, Help("Replace this file instead of printing.")] = None,
    every: Annotated[float | None, Help("Write again and again, after so many seconds; needs --write.")] = None,
) -> int:
    if every is not None and (write is None or every <= 0):
        raise UsageError("--every needs --write FILE and a positive number of seconds")
    logs.configure("targets")
    try:
        files, overrides = split_arguments(arguments)
        settings = load(ConnectionSettings, files=files, overrides=overrides, environ=os.environ).settings
        with Bus.connect(settings.nats, name="targets") as bus:
            live = bus.key_value(streams.live_bucket(settings.run.id).bucket).wait()
            while True:
                beats = heartbeats.readable(entry.value for entry in live.entries().wait())
                _put(targets(beats, settings.run.id), write)
                if every is None:
                    return 0
                time.sleep(every)
    except OSError as err:
        print(
            f"targets: {write}: cannot be written ({err.strerror}); give --write a file in a folder of this user",
            file=sys.stderr,
        )
        return 1


main = program("targets", write_targets)


def _put(target_groups: list[dict[str, Any]], file: Path | None) -> None:
    text = json.dumps(target_groups, indent=1) + "\n"
    if file is None:
        print(text, end="")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, text)


if __name__ == "__main__":
    sys.exit(main())
