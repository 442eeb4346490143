"""The live page beside a local run: a console of its own that nothing of the run waits for."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from pathlib import Path

import httpx
import pytest
from tests.servers import wait_for

from penstock.deploy.processes.page_and_trackers import PageProcess
from penstock.protocol.errors import ConfigError


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    return folder


def test_its_link_opens_the_page_until_the_run_ends(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this user may read the link; one browser gets the page and the API with it; nothing listens after the block."""
    monkeypatch.setattr("penstock.deploy.processes.page_and_trackers._PAGE_START_S", 60.0)
    with PageProcess(run_folder, is_wanted=True, as_json=True) as page:
        page.start()
        notice = page.notice()
        link, again = re.fullmatch(
            r"(http://\S+)   \(opens once, in one browser; after the run: (.+)\)", notice
        ).groups()  # type: ignore[union-attr]
        assert again == f"penstock console run.dir={run_folder.parent}"
        assert (run_folder / "logs" / "console.log").stat().st_mode & 0o777 == 0o600
        with httpx.Client(base_url=link.partition("/?")[0], follow_redirects=True) as browser:
            assert browser.get("/v1/runs").status_code == 401
            assert "<title>" in browser.get(link).text
            assert browser.get("/v1/runs").status_code == 200
        assert page.new_problem() == ""
    with pytest.raises(httpx.ConnectError):
        httpx.get(link)


def test_its_death_is_reported_once(run_folder: Path) -> None:
    """With the exit code, the log and the command that opens the page again."""
    with PageProcess(run_folder, is_wanted=True, as_json=False) as page:
        page.start()
        os.kill(page.pid, signal.SIGKILL)
        problems: list[str] = []
        wait_for(lambda: problems.append(page.new_problem()) or problems[-1], "the report")
        assert problems[-1] == (
            f"the live page has ended with exit code -9 (see {run_folder / 'logs' / 'console.log'}); the run goes on, and "
            f"penstock console run.dir={run_folder.parent} opens it again"
        )
        assert page.new_problem() == ""


@pytest.mark.parametrize(
    ("is_wanted", "as_json", "is_terminal", "is_installed", "starts"),
    [
        (None, False, True, True, True),
        (None, False, False, True, False),
        (None, True, True, True, False),
        (None, False, True, False, False),
        (False, False, True, True, False),
    ],
)
def test_it_is_served_where_somebody_looks(
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_wanted: bool | None,
    as_json: bool,
    is_terminal: bool,
    is_installed: bool,
    starts: bool,
) -> None:
    """By default on a terminal whose output no program reads, where the extra `console` is installed; never against --no-page."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec(name) if is_installed else None)
    with PageProcess(run_folder, is_wanted=is_wanted, as_json=as_json) as page:
        page.start()
        assert bool(page.pid) == starts
        if not starts:
            assert page.notice() == f"penstock console run.dir={run_folder.parent}   (in another terminal)"
            assert page.new_problem() == ""


def test_a_page_that_is_asked_for_needs_its_extra(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package to install, before anything starts."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"--page: uvicorn is not installed; run: pip install 'penstock\[console\]'"):
        PageProcess(run_folder, is_wanted=True, as_json=False)
