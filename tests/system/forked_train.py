"""`penstock train --local` in this process: its services are forked from processes that have imported them."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.console.cli.main import run
from penstock.deploy import train
from tests.deploy.forked_run import ForkedRun


def train_forked(run_file: Path, *words: str) -> dict[str, Any]:
    """Train a run to its end with one worker; return the summary that the command prints."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    out = io.StringIO()
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            patch.setattr(train, "LocalRun", ForkedRun)
            code = run(["train", str(run_file), "--local", "--workers", "1", "--json", *words])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert code == 0, out.getvalue()
    return json.loads(out.getvalue().splitlines()[-1])
