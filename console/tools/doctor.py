"""`penstock doctor`: report what this machine has, what is missing, and how to fix it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.table import Table

from penstock.console import connections
from penstock.console.tables import console
from penstock.console.tools import checks
from penstock.protocol import logs
from penstock.protocol.config.run_file import split_arguments

_SIGNS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


def report(arguments: Sequence[str], environ: Mapping[str, str], *, as_json: bool) -> int:
    """Run all checks and print the findings; return 1 when a check failed, else 0. Raises ConfigError."""
    loaded = connections.find(arguments, environ)
    logs.configure("doctor", level="critical")  # problems are reported as findings
    here = [*checks.machine(loaded.settings.run.dir, environ), *checks.engine(arguments, environ)]
    findings = [*here, *checks.services(loaded)]
    failed = [finding for finding in findings if finding.level == "fail"]
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}))
    else:
        console().print(_table(findings))
        print("\nnext: " + ("fix the lines marked fail" if failed else _next(arguments)))
    return 1 if failed else 0


def _next(arguments: Sequence[str]) -> str:
    files, _ = split_arguments(arguments)
    return f"penstock train {files[0]} --local" if files else "penstock quickstart"


def _table(findings: Sequence[checks.Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        detail = finding.detail if not finding.fix else f"{finding.detail}\n[bold]→ {finding.fix}[/]"
        table.add_row(_SIGNS[finding.level], finding.name, detail)
    return table
