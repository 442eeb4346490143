"""`penstock watch`: the live panel on a run that somebody else started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from console import connections
from console.panel import LivePanel, Mode
from console.snapshot import Snapshot
from protocol import logs
from protocol.transport.bus import Bus


def watch_run(run: str, arguments: Sequence[str], environ: Mapping[str, str], *, plain: bool, as_json: bool) -> int:
    """Watch until the run ends or Ctrl-C; returns the exit code.

    With ``as_json`` the lines go to stderr, and stdout gets one JSON object, the last thing printed.
    Raises ConfigError, BusUnreachable or MissingStream.
    """
    settings = connections.find(arguments, environ, run_id=run).settings
    logs.configure("watch", level="warning")
    mode: Mode = "plain" if plain or as_json else "auto"
    with Bus.connect(settings.nats, name="watch", deadline_s=5.0) as bus:
        panel = LivePanel(run, bus, mode=mode, stream=sys.stderr if as_json else sys.stdout)
        try:
            with panel:
                panel.wait(_has_ended)
        except KeyboardInterrupt:
            print(f"stopped watching; the run goes on. Again: penstock watch {run}", file=sys.stderr)
        if as_json:
            print(panel.summary().to_line(), flush=True)
    return 0


def _has_ended(snapshot: Snapshot) -> bool:
    """A run has ended when its trainer said so, or took its last step and left."""
    if snapshot.finished:
        return True
    trainers = [line for line in snapshot.services if line.role == "trainer"]
    complete = snapshot.total_steps is not None and snapshot.step >= snapshot.total_steps
    return complete and not any(line.alive for line in trainers)
