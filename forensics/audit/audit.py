"""`penstock audit`: check that every group of a run was counted exactly once, and list those that were not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.console import connections
from penstock.console.terminal import console, one_line
from penstock.forensics.audit.audit_checks import AuditResult, SplitLine, check_record
from penstock.forensics.audit.audit_inputs import gather
from penstock.protocol import logs
from penstock.protocol.subjects import check_run_id
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

_SHOWN = 40  # violations printed; --json has all


def audit_run(run: str, arguments: Sequence[str], environ: Mapping[str, str], *, fast: bool, as_json: bool) -> int:
    """Audit a running or finished run; return 0 when its accounting balances, else 1.

    Raises ConfigError, BusUnreachable, MissingStream, BlobStoreUnreachable or BlobStoreRefused.
    """
    check_run_id(run)
    settings = connections.find(arguments, environ, run_id=run).settings
    logs.configure("audit", level="error")
    blobs = Blobs(settings.s3)
    with Bus.connect(settings.nats, name="audit", deadline_s=5.0) as bus:
        audit_inputs = gather(run, bus, blobs, settings.run.folder / "checkpoints", reads_packs=not fast)
    result = check_record(audit_inputs)
    if as_json:
        print(json.dumps(result.to_document()), flush=True)
    else:
        show(result, console())
    return 0 if result.closes else 1


def show(result: AuditResult, console: Console) -> None:
    at = "nothing committed" if result.step is None else f"checkpoint of step {result.step}, version {result.version}"
    console.print(f"run {result.run_id}: {at}, {result.chapters} chapters\n")
    console.print(_table(result.splits))
    for kind, count in result.moving.items():
        console.print(f"in motion: {count} groups {kind}")
    for line in result.splits:
        for reason, count in line.abandoned.items():
            console.print(
                f"{line.split}: {count} redundant completions {reason}, {line.abandoned_tokens[reason]} tokens"
            )
    for one in result.selections:
        compared = f"chi-square {one.chi_square:.1f}, {one.freedom} degrees of freedom, p {one.p:.2g}"
        console.print(
            f"trained against sampled, by the {one.by}: {one.trained} and {one.left_out} dropped; "
            + (compared if one.freedom else "too few dropped to differ")
        )
    for note in result.notes:
        console.print(f"note: {one_line(note)}", markup=False)
    for breach in result.breaches[:_SHOWN]:
        line = one_line(f"{breach.kind}: {breach.group_id or '–'}: {breach.detail}")
        console.print(Text.assemble(("✗ ", "red"), line), highlight=False)
    if len(result.breaches) > _SHOWN:
        console.print(f"[red]✗[/] and {len(result.breaches) - _SHOWN} more; --json lists all")
    verdict = "[green]the accounting balances[/]" if result.closes else "[red]THE ACCOUNTING DOES NOT BALANCE[/]"
    console.print(f"\n{verdict}; rule: every group is issued once, and used, dropped or in flight once")


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
    for location in sorted({location for line in lines for location in line.in_flight}):
        rows[f"in flight: {location}"] = [(line.in_flight.get(location, 0), None) for line in lines]
    rows["in flight"] = [(sum(line.in_flight.values()), line.in_flight_tokens) for line in lines]
    for name, figures in rows.items():
        cells = [cell for groups, tokens in figures for cell in (str(groups), "" if tokens is None else str(tokens))]
        table.add_row(Text(one_line(name)), *cells)
    return table
