"""Check a service's heartbeat: exit code 0 while it is fresh. For container health checks.

    python -m penstock.deploy.health ROLE [--id PREFIX]      # ROLE: rollout, reward or trainer

Settings come from the same PENSTOCK_ variables as the service's. Without ``--id`` any service of the
role passes; with it, one whose id starts with PREFIX (a worker's default id starts with its host name).
"""

from __future__ import annotations

import argparse
import os
import sys

from pydantic import BaseModel, ConfigDict

from penstock.protocol import streams
from penstock.protocol.config.connection import NatsSettings, RunSettings
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import PenstockError
from penstock.protocol.transport.bus import Bus


class HealthSettings(BaseModel):
    """The sections that the check reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunSettings = RunSettings()
    nats: NatsSettings = NatsSettings()


def has_heartbeat(bus: Bus, run_id: str, role: str, id_prefix: str) -> bool:
    """Return True if such a service has sent a heartbeat before it expires: 10 s unless there are hundreds of workers."""
    entries = bus.key_value(streams.live_bucket(run_id).bucket).wait().entries().wait()
    return any(entry.key.startswith(streams.heartbeat_key(role, id_prefix)) for entry in entries)


def main() -> int:
    """Check once; returns 0 for healthy, 1 otherwise, with the reason on stderr."""
    parser = argparse.ArgumentParser(description="Exit code 0 while the service sends heartbeats.")
    parser.add_argument("role", choices=["rollout", "reward", "trainer"])
    parser.add_argument("--id", default="", help="start of the service's id")
    options = parser.parse_args()
    try:
        settings = load(HealthSettings, environ=os.environ).settings
        with Bus.connect(settings.nats, name="health", deadline_s=5.0) as bus:
            if has_heartbeat(bus, settings.run.id, options.role, options.id):
                return 0
    except PenstockError as err:
        print(err, file=sys.stderr)
        return 1
    print(f"no heartbeat of {options.role} {options.id} in run {settings.run.id}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
