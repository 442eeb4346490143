"""`penstock profile`: where the time of a run went, from the files in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from penstock.console import connections
from penstock.console.live import watched_totals
from penstock.console.printable import printable
from penstock.console.report import curves
from penstock.console.tables import console
from penstock.console.tools.run_profile import RunProfile, limits, profile
from penstock.console.tools.runs import unknown_run
from penstock.protocol.errors import ConfigError
from penstock.protocol.subjects import check_run_id

_NUM_PARTS = 4  # of a service's CPU that are named in the table


def print_profile(run: str, arguments: Sequence[str], environ: Mapping[str, str], *, as_json: bool) -> int:
    """Print the profile of a run; return the exit code. Raises ConfigError when there is no such run, or nothing to read."""
    check_run_id(run)
    folder = connections.find(arguments, environ).settings.run.dir / run
    if not folder.is_dir():
        raise unknown_run(run, folder.parent)
    found = profile(curves.rows(folder), watched_totals.load(folder))
    if not found.steps and not found.services:
        raise ConfigError(
            f"run {run} has no steps in {folder / 'metrics.jsonl'} yet; wait for the first one: penstock watch {run}"
        )
    if as_json:
        print(json.dumps(document(run, found)))
    else:
        _print(run, found)
    return 0


def document(run: str, found: RunProfile) -> dict[str, Any]:
    """Return the profile as a JSON object; seconds, shares from 0 to 1."""
    services = [{**asdict(one), "waiting_share": one.waiting_share} for one in found.services]
    return {"run_id": run, **asdict(found), "services": services, "cpu_s": found.cpu_s, "says": limits(found)}


def _print(run: str, found: RunProfile) -> None:
    out = console()
    out.print(f"run {run}: {found.steps} steps in {found.step_wall_s:.1f} s{_around(found)}", highlight=False)
    if found.steps:
        out.print()
        out.print(_phases(found))
    if found.publish_s is not None:
        out.print(f"\nbeside the steps: {found.publish_s * 1000:.0f} ms to publish a version", highlight=False)
    if found.services:
        out.print()
        out.print(_services(found))
    else:
        out.print(
            "\nno heartbeats in its folder: `penstock train` and the quickstart keep them",
            highlight=False,
            markup=False,
        )
    for line in ("", *(f"- {text}" for text in limits(found))):
        out.print(line, markup=False, highlight=False)


def _around(found: RunProfile) -> str:
    parts = [
        f"{seconds:.1f} s {when}"
        for seconds, when in ((found.before_s, "before the first"), (found.after_s, "after the last"))
        if seconds is not None
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _phases(found: RunProfile) -> Table:
    table = _table("trainer", "ms a step", "s", "share")
    for phase in found.phases:
        each = f"{phase.seconds / found.steps * 1000:.1f}"
        table.add_row(phase.name, each, f"{phase.seconds:.1f}", f"{phase.share:.1%}")
    return table


def _services(found: RunProfile) -> Table:
    table = _table("service", "works s", "waits s", "waits", "CPU s", "CPU share", "of its newest process", left=(0, 6))
    for one in found.services:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in list(one.cpu_parts.items())[:_NUM_PARTS])
        starts = f" ({one.num_starts} starts)" if one.num_starts > 1 else ""
        waits = "–" if one.waiting_share is None else f"{one.waiting_share:.1%}"
        share = f"{one.cpu_s / found.cpu_s:.1%}" if found.cpu_s > 0.0 else "–"
        numbers = (f"{one.working_s:.1f}", f"{one.waiting_s:.1f}", waits, f"{one.cpu_s:.1f}", share)
        table.add_row(printable(one.name) + starts, *numbers, printable(parts))
    return table


def _table(*columns: str, left: Sequence[int] = (0,)) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number in left else "right", no_wrap=number not in left[1:])
    return table
