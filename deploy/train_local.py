"""``penstock train run.toml --local``: every service of one run on this machine, watched, with a report at the end.

python -m penstock.deploy.train_local run.toml [--workers N] [--serve my_reward.py] [--json] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from penstock.console.live.panel import LivePanel
from penstock.console.report import report
from penstock.console.report.run_summary import RunSummary
from penstock.deploy.local import end_on_signals
from penstock.deploy.ring import TRAINER, Ring
from penstock.protocol import logs
from penstock.protocol.errors import PenstockError
from penstock.protocol.transport.bus import Bus

_POLL_S = 0.2
_ENDED_ON_REQUEST = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a ring to the trainer's end; returns the trainer's exit code, 130 when it was ended on request."""
    parser = argparse.ArgumentParser(
        prog="penstock train --local",
        description="Every service of one run on this machine. Other arguments: run files and section.key=value.",
        allow_abbrev=False,
    )
    parser.add_argument("--workers", type=int, default=2, help="number of rollout workers (default: 2)")
    parser.add_argument(
        "--serve",
        type=Path,
        action="append",
        default=[],
        metavar="FILE.py",
        help="also serve this reward file as an HTTP endpoint, in a process of its own; may be given again",
    )
    parser.add_argument("--json", action="store_true", help="nothing but one JSON object, as the last line of stdout")
    options, rest = parser.parse_known_args(arguments)
    logs.configure("ring", level="warning")
    asked_to_end = end_on_signals()
    try:
        with Ring(rest, num_workers=options.workers, reward_files=options.serve) as ring:
            print(f"run {ring.run_id}: logs in {ring.folder / 'logs'}", file=sys.stderr)
            ring.start_services()
            code, summary = _watch(ring, asked_to_end, quiet=options.json)
            last_words = ring.log_tail(TRAINER)
    except PenstockError as err:
        print(f"ring: {err}", file=sys.stderr)
        return 1
    if code is None:
        print("ring: ended on request; the run resumes when it is started again", file=sys.stderr)
        return _ENDED_ON_REQUEST
    if code:
        print(f"ring: the trainer ended with exit code {code}; its log ends with\n{last_words}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    following = next_steps(ring.folder)
    path = report.write(ring.folder, summary, next_steps=following)
    print(f"ring: {ring.usage.wall_s:.1f} s of wall time, {ring.usage.cpu_s:.1f} s of CPU time", file=sys.stderr)
    print(f"report: {path}", *(f"next: {line}" for line in following), sep="\n", file=sys.stderr)
    if options.json:
        print(summary.to_line())
    return 0


def next_steps(folder: Path) -> list[str]:
    """Return what to type after a run, from where its folder lies."""
    if folder.parent == Path("runs").absolute():
        return [f"penstock chat {folder.name}", f"penstock runs show {folder.name}"]
    return [f"penstock chat {folder.name} --model {folder / 'model'}"]


def _watch(ring: Ring, asked_to_end: threading.Event, *, quiet: bool) -> tuple[int | None, RunSummary]:
    """Start the trainer and show the run until it ends; the code is None when the person asked to end it."""
    with Bus.connect(ring.nats, name="ring") as bus:
        panel = LivePanel(ring.run_id, bus, total_steps=ring.total_steps, mode="quiet" if quiet else "auto")
        with panel:
            ring.tell(lambda event: event.as_incident and panel.note(event.as_incident))
            ring.start_trainer()
            code = None
            while code is None and not asked_to_end.is_set():
                code = ring.wait(_POLL_S)
        return code, panel.summary()


if __name__ == "__main__":
    sys.exit(main())
