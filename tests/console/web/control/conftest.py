"""Fixtures of the Runs API's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.console.web.control.api import Api, FakeLauncher, check_in_process

from penstock.console.web.jobs import actions
from penstock.console.web.launchers.launcher import LAUNCHERS


@pytest.fixture
def api(tmp_path: Path) -> Api:
    """An app on an empty folder of runs."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return Api(folder)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLauncher]:
    """Instead of the local launcher one that starts no process; settings are checked in this process."""
    fake = FakeLauncher()
    monkeypatch.setitem(LAUNCHERS.built_in, "local", fake)
    monkeypatch.setattr(actions, "check", check_in_process)
    yield fake
    fake.close()
