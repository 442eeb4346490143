"""Count groups without a reward by reason, and whether they wait or were dead-lettered (`penstock reward errors RUN`)."""

from __future__ import annotations

import json

from penstock.console.connections import NamedRun
from penstock.console.live.watcher import read_run
from penstock.console.terminal import print_table
from penstock.protocol import logs
from penstock.protocol.transport.bus import Bus


def print_errors(run: NamedRun, *, as_json: bool) -> int:
    """Print a run's reward errors; return 1 when groups were dead-lettered. Raises ConfigError, BusUnreachable or MissingStream."""
    settings = run.settings
    logs.configure("reward-errors", level="error")
    with Bus.connect(settings.nats, name="reward-errors", deadline_s=5.0) as bus:
        errors = read_run(bus, run.id).reward_errors
    by_count = sorted(errors.items(), key=lambda item: (-item[1].dead, -item[1].waited))
    if as_json:
        keys = ("waited", "dead", "newest")
        print(
            json.dumps([{"reason": reason} | {key: getattr(found, key) for key in keys} for reason, found in by_count])
        )
    elif not errors:
        print(f"run {run} has no reward errors")
    else:
        right = ("waited", "dead letters")
        rows = [(reason, found.waited, found.dead, found.newest) for reason, found in by_count]
        print_table(("reason", *right, "newest message"), rows, right=right, wide=("newest message",))
        print("\nwaited: times that groups were returned to the queue; dead letters: groups that were given up")
    return 1 if any(found.dead for found in errors.values()) else 0
