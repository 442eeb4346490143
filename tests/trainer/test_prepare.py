"""A trainer that is started before it is needed: what it imports, and when it begins."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from penstock.trainer import __main__ as trainer
from penstock.trainer.commands.run_command import STOPPED, USAGE_ERROR

# What it imports later, by name: a second or more of a start would be waited for.
HEAVY = ("torch", "deepspeed", "transformers", "transformers.models.auto.modeling_auto", "penstock.trainer.assemble")


@pytest.mark.parametrize(("given", "code"), [("", STOPPED), ("\n", USAGE_ERROR)])
def test_it_begins_when_it_reads_a_line(
    given: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one, because whoever started it has exited, the command is not run."""
    monkeypatch.setattr(trainer, "import_everything", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    assert trainer.main(["--prepare", "train", "nowhere.toml"]) == code
    assert ("nowhere.toml" in capsys.readouterr().err) == bool(given)


def test_what_takes_long_is_imported_ahead() -> None:
    program = f"import sys; from penstock.trainer.__main__ import import_everything; import_everything(); sys.exit(bool(set({HEAVY}) - set(sys.modules)))"
    assert subprocess.run([sys.executable, "-P", "-c", program], timeout=300, check=False).returncode == 0
