"""The progress of a job without a terminal: ten log lines, whose figures are numbers."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.fine_tuning.loop import ProgressLine


def test_a_log_has_ten_lines_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to four digits, and the last step is among them."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    progress = ProgressLine("sft", 25)
    with capture_logs() as logs:
        for step in range(1, 26):
            progress.show(step, loss=2 / 3, kind="nll")
    assert [line["step"] for line in logs] == [*range(2, 25, 2), 25]
    assert logs[0] == {"event": "sft", "log_level": "info", "step": 2, "of": 25, "loss": 0.6667, "kind": "nll"}
