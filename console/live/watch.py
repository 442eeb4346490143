"""`penstock watch`: the live panel on a run that somebody else started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from penstock.console import connections
from penstock.console.live.panel import LivePanel, Mode
from penstock.console.live.run_snapshot import Snapshot
from penstock.protocol import logs
from penstock.protocol.transport.bus import Bus

_PATIENCE_S = 60.0  # a restart of NATS takes seconds


def watch_run(run: str, arguments: Sequence[str], environ: Mapping[str, str], *, plain: bool, as_json: bool) -> int:
    """Watch until the run ends or Ctrl-C; returns the exit code.

    With ``as_json`` the lines go to stderr, and stdout gets one JSON object, the last thing printed.
    Raises ConfigError, BusUnreachable or MissingStream.
    """
    settings = connections.find(arguments, environ, run_id=run).settings
    logs.configure("watch", level="error")  # the panel itself says when NATS is away
    mode: Mode = "plain" if plain or as_json else "auto"
    code = 0
    with Bus.connect(settings.nats, name="watch", deadline_s=5.0) as bus:
        panel = LivePanel(run, bus, mode=mode, stream=sys.stderr if as_json else sys.stdout)
        try:
            with panel:
                panel.wait(lambda snapshot: has_ended(snapshot) or is_cut_off(snapshot))
        except KeyboardInterrupt:
            print(f"stopped watching; the run goes on. Again: penstock watch {run}", file=sys.stderr)
        if not has_ended(panel.snapshot()) and is_cut_off(panel.snapshot()):
            code = 1
            print(
                f"penstock: NATS at {bus.url} has been away for {_PATIENCE_S:.0f} s; the run may have ended with it. "
                f"Its report: penstock runs show {run}",
                file=sys.stderr,
            )
        if as_json:
            print(panel.summary().to_line(), flush=True)
    return code


def has_ended(snapshot: Snapshot) -> bool:
    """Say whether the trainer said that it is over, or took its last step and left."""
    if snapshot.finished:
        return True
    trainers = [line for line in snapshot.services if line.role == "trainer"]
    complete = snapshot.total_steps is not None and snapshot.step >= snapshot.total_steps
    return complete and not any(line.alive for line in trainers)


def is_cut_off(snapshot: Snapshot) -> bool:
    """Say whether there is nothing to watch any more: NATS has been away for too long."""
    return snapshot.bus_away_s > _PATIENCE_S
