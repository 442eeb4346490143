"""Check a service's heartbeat: exit code 0 while it is fresh. For container health checks.

Settings come from the same PENSTOCK_ variables as the service's. Without ``--id`` any service of the
role passes; with it, one whose id starts with PREFIX (a worker's default id starts with its host name).
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from penstock.protocol import streams
from penstock.protocol.command_line import Help, program
from penstock.protocol.config.connection import NatsSettings, RunSettings
from penstock.protocol.config.run_file import load
from penstock.protocol.transport.bus import Bus


class HealthSettings(BaseModel):
    """What the probe reads: a wrong value of another section must not make a service unhealthy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunSettings = RunSettings()
    nats: NatsSettings = NatsSettings()


def has_heartbeat(bus: Bus, run_id: str, role: str, id_prefix: str) -> bool:
    """Return True if such a service has sent a heartbeat before it expires: 10 s unless there are hundreds of workers."""
    entries = bus.key_value(streams.live_bucket(run_id).bucket).wait().entries().wait()
    return any(entry.key.startswith(streams.heartbeat_key(role, id_prefix)) for entry in entries)


def check(
    role: Literal["rollout", "reward", "trainer"], *, id: Annotated[str, Help("Start of the service's id.")] = ""
) -> int:
    settings = load(HealthSettings, environ=os.environ).settings
    with Bus.connect(settings.nats, name="health", deadline_s=5.0) as bus:
        if has_heartbeat(bus, settings.run.id, role, id):
            return 0
    print(f"no heartbeat of {role} {id} in run {settings.run.id}", file=sys.stderr)
    return 1


main = program("health", check)


if __name__ == "__main__":
    sys.exit(main())
