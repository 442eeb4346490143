"""A run that is neither in the folder of runs nor on NATS is named as what it is: a wrong name."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.console.command import Replaced
from tests.console.record import recorded_run as recorded

from penstock.console import connections, launch
from penstock.console.cli.main import app
from penstock.console.record.stored_run import with_local_servers
from penstock.protocol.errors import ConfigError


def test_a_misspelt_run_is_refused_without_waiting_for_nats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No NATS was configured and none is at the default address: the runs found and the nearest name are shown."""
    recorded.write_metrics(tmp_path / "sorting")
    monkeypatch.setattr(connections, "answers", lambda _: False)  # a NATS of this machine may listen there
    with pytest.raises(
        ConfigError, match=r"no run sorted in .*; found: sorting; did you mean sorting\? check the name"
    ):
        with_local_servers("sorted", [f"run.dir={tmp_path}"])


def test_a_misspelt_run_on_nats_is_refused_with_the_runs_there(
    tmp_path: Path, run_streams: str, typed: list[str]
) -> None:
    at = [f"run.dir={tmp_path}", *typed]
    with pytest.raises(ConfigError, match=r"no run nosuch at nats://.*; found: .*check the name"):
        with_local_servers("nosuch", at)
    with_local_servers(run_streams, at)


@pytest.mark.parametrize(
    "command", ["audit far", "weights far", "weights export far --best --to b", "watch far", "dead-letters list far"]
)
def test_a_run_on_servers_that_are_not_set_here_is_refused_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is here, its NATS and S3 are elsewhere: the settings to load are named, no default address is waited for."""
    (tmp_path / "far").mkdir()
    monkeypatch.setattr(connections, "answers", lambda _: False)
    with pytest.raises(
        ConfigError, match=r"run far keeps .* nats.url and s3.endpoint are not set here; .*data/environment"
    ):
        app([*command.split(), f"run.dir={tmp_path}"])


@pytest.mark.parametrize(
    "command",
    [
        *("audit first", "replay first", "watch first", "weights first", "reward errors first"),
        *("weights export first --best --to best", "rescore first --weights reward=2", "rescore first --reward gsm8k"),
        *("dead-letters list first", "dead-letters show first 1", "dead-letters resend first --all"),
    ],
)
def test_a_command_about_a_finished_local_run_gets_its_servers(
    command: str, tmp_path: Path, replaced: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first" / "store").mkdir(parents=True)
    (tmp_path / "first" / "report.json").write_text("{}")
    typed = [*command.split(), f"run.dir={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["penstock", *typed])
    with pytest.raises(Replaced):
        app(typed)
    stored = launch.module("penstock.deploy.stored", str(tmp_path / "first" / "store"), "--")
    assert replaced[0][: len(stored)] == stored
