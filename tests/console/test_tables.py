"""Tables are cut to a terminal, never to a pipe."""

from __future__ import annotations

import pytest
from rich.table import Table

from penstock.console.terminal import console


def test_no_cell_is_cut_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An id of 300 characters stays whole, whatever COLUMNS is."""
    monkeypatch.setenv("COLUMNS", "80")
    table = Table("group", "prompt")
    table.add_row("e0.p17.a0" * 30, "x" * 200)
    console().print(table)
    assert "e0.p17.a0" * 30 in capsys.readouterr().out
