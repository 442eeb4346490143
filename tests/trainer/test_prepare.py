"""A trainer that is started before it is needed: what it imports, and when it begins."""

from __future__ import annotations

import io
import sys

import pytest

from penstock.trainer import __main__ as trainer
from penstock.trainer import prepare
from penstock.trainer.commands.run_command import STOPPED, USAGE_ERROR


@pytest.mark.parametrize(("given", "code"), [("", STOPPED), ("\n", USAGE_ERROR)])
def test_it_begins_when_it_reads_a_line(
    given: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one, because whoever started it has exited, the command is not run."""
    monkeypatch.setattr(prepare, "import_everything", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    assert trainer.main(["--prepare", "train", "nowhere.toml"]) == code
    assert ("nowhere.toml" in capsys.readouterr().err) == bool(given)
