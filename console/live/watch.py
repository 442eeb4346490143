"""`penstock watch`: the live panel of a run that another process started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from penstock.console import connections
from penstock.console.live.panel import LivePanel, Mode
from penstock.console.live.run_snapshot import Snapshot
from penstock.protocol import logs
from penstock.protocol.transport.bus import Bus

_MAX_DISCONNECTED_S = 60.0  # a restart of NATS takes seconds


def watch_run(run: str, arguments: Sequence[str], environ: Mapping[str, str], *, plain: bool, as_json: bool) -> int:
    """Watch until the run ends or Ctrl-C; returns the exit code.

    With ``as_json`` the lines go to stderr, and stdout gets one JSON object, the last thing printed.
    Raises ConfigError, BusUnreachable or MissingStream.
    """
    settings = connections.find(arguments, environ, run_id=run).settings
    logs.configure("watch", level="error")  # the panel shows when NATS is unreachable
    mode: Mode = "plain" if plain or as_json else "auto"
    code = 0
    with Bus.connect(settings.nats, name="watch", deadline_s=5.0) as bus:
        panel = LivePanel(run, bus, mode=mode, stream=sys.stderr if as_json else sys.stdout)
        try:
            with panel:
                panel.wait(lambda snapshot: has_ended(snapshot) or is_cut_off(snapshot))
        except KeyboardInterrupt:
            print(f"stopped watching; the run continues. To watch again: penstock watch {run}", file=sys.stderr)
        if not has_ended(panel.snapshot()) and is_cut_off(panel.snapshot()):
            code = 1
            print(
                f"penstock: NATS at {bus.url} unreachable for {_MAX_DISCONNECTED_S:.0f} s; the run may have ended. "
                f"See its report: penstock runs show {run}",
                file=sys.stderr,
            )
        if as_json:
            print(panel.summary().to_line(), flush=True)
    return code


def has_ended(snapshot: Snapshot) -> bool:
    """Return True if the trainer reported the end, or took the last step and exited."""
    if snapshot.finished:
        return True
    trainers = [line for line in snapshot.services if line.role == "trainer"]
    complete = snapshot.total_steps is not None and snapshot.step >= snapshot.total_steps
    return complete and not any(line.alive for line in trainers)


def is_cut_off(snapshot: Snapshot) -> bool:
    """Return True if NATS has been unreachable for too long to continue watching."""
    return snapshot.disconnected_s > _MAX_DISCONNECTED_S
