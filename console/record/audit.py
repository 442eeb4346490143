"""`penstock audit`: prove from the outside that every group of a run counts once, or name those that do not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from penstock.console import connections
from penstock.console.record.audit_checks import Proof, SplitLine, prove
from penstock.console.record.audit_inputs import gather
from penstock.protocol import logs
from penstock.protocol.subjects import check_run_id
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

_SHOWN = 40  # breaches of the table; --json has all


def audit_run(run: str, arguments: Sequence[str], environ: Mapping[str, str], *, fast: bool, as_json: bool) -> int:
    """Audit a run, running or not; returns 0 when its account closes, 1 when it does not.

    Raises ConfigError, BusUnreachable, MissingStream, BlobStoreUnreachable or BlobStoreRefused.
    """
    check_run_id(run)
    settings = connections.find(arguments, environ, run_id=run).settings
    logs.configure("audit", level="error")
    blobs = Blobs(settings.s3)
    with Bus.connect(settings.nats, name="audit", deadline_s=5.0) as bus:
        audit_inputs = gather(run, bus, blobs, settings.run.folder / "checkpoints", reads_packs=not fast)
    proof = prove(audit_inputs)
    if as_json:
        print(json.dumps(proof.to_document()), flush=True)
    else:
        show(proof, Console())
    return 0 if proof.closes else 1


def show(proof: Proof, console: Console) -> None:
    """Print the account, what is in motion, and every breach."""
    at = "nothing committed" if proof.step is None else f"checkpoint of step {proof.step}, version {proof.version}"
    console.print(f"run {proof.run_id}: {at}, {proof.chapters} chapters\n")
    console.print(_table(proof.splits))
    for kind, count in proof.moving.items():
        console.print(f"in motion: {count} groups {kind}")
    for note in proof.notes:
        console.print(f"note: {note}")
    for breach in proof.breaches[:_SHOWN]:
        console.print(f"[red]✗[/] {breach.kind}: {breach.group_id or '–'}: {breach.detail}", highlight=False)
    if len(proof.breaches) > _SHOWN:
        console.print(f"[red]✗[/] and {len(proof.breaches) - _SHOWN} more; --json lists all")
    verdict = "[green]the account closes[/]" if proof.closes else "[red]THE ACCOUNT DOES NOT CLOSE[/]"
    console.print(f"\n{verdict}: every group is issued once, and used, dropped or in flight once")


def _table(lines: Sequence[SplitLine]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for line in lines:
        table.add_column(f"{line.split}: groups", justify="right")
        table.add_column("tokens", justify="right")
    rows: dict[str, list[tuple[int, int | None]]] = {"issued": [(line.issued, None) for line in lines]}
    rows["trained / evaluated"] = [(line.used, line.used_tokens) for line in lines]
    for reason in sorted({reason for line in lines for reason in line.dropped}):
        rows[f"dropped: {reason}"] = [
            (line.dropped.get(reason, 0), line.dropped_tokens.get(reason, 0)) for line in lines
        ]
    rows["dead letters"] = [(line.dead, None) for line in lines]
    for place in sorted({place for line in lines for place in line.in_flight}):
        rows[f"in flight: {place}"] = [(line.in_flight.get(place, 0), None) for line in lines]
    rows["in flight"] = [(sum(line.in_flight.values()), line.in_flight_tokens) for line in lines]
    for name, figures in rows.items():
        cells = [cell for groups, tokens in figures for cell in (str(groups), "" if tokens is None else str(tokens))]
        table.add_row(name, *cells)
    return table
