"""`penstock runs`: what a folder of runs and the broker tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.console.cli.test_command import penstock
from tests.console.record import recorded_run as recorded

from penstock.console import connections
from penstock.console.report import report
from penstock.console.tools.runs import list_broker, list_folder
from penstock.deploy.local import LocalStack
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.transport.bus import Bus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recorded.write_metrics(tmp_path / "runs" / "sorting")
    (tmp_path / "runs" / "not-a-run").mkdir()
    (tmp_path / "runs" / "Not A Run.txt").write_text("x")
    return tmp_path


def test_runs_lists_what_the_folder_holds(folder: Path):
    """A run is a folder with a run's files; the line shows how far it came."""
    (line,) = list_folder(folder / "runs")
    assert (line.run, line.state, line.step, line.accuracy) == ("sorting", "stopped", 60, 0.95)


def test_a_run_with_a_report_is_finished(folder: Path):
    """The report is the last thing that is written."""
    report.write(folder / "runs" / "sorting", recorded.whole_run().summary())
    assert [line.state for line in list_folder(folder / "runs")] == ["finished"]


def test_the_command_prints_table_and_json(folder: Path):
    """`penstock runs` is for people, `--json` for machines."""
    answer = penstock("runs", cwd=folder)
    assert answer.returncode == 0, answer.stderr
    assert "sorting" in answer.stdout
    assert "0.950" in answer.stdout
    assert "next: penstock runs show sorting" in answer.stdout
    (row,) = json.loads(penstock("runs", "list", "--json", cwd=folder).stdout)
    assert row["step"] == 60


def test_no_runs_is_an_invitation(tmp_path: Path):
    """An empty folder says what to type."""
    answer = penstock("runs", cwd=tmp_path)
    assert answer.returncode == 0
    assert "penstock quickstart" in answer.stdout


def test_show_prints_the_report(folder: Path):
    """`penstock runs show` prints report.md as it is where there is no terminal."""
    path = report.write(folder / "runs" / "sorting", recorded.whole_run().summary())
    assert penstock("runs", "show", "sorting", cwd=folder).stdout.strip() == path.read_text().strip()


def test_show_of_an_unfinished_run_says_how_far_it_is(folder: Path):
    """Without a report the state and the next command are shown."""
    answer = penstock("runs", "show", "sorting", cwd=folder)
    assert answer.returncode == 0
    assert "no report yet: stopped, step 60" in answer.stdout


def test_show_of_an_unknown_run_names_the_known_ones(folder: Path):
    """A wrong name gets the right ones, and a name that cannot be one is refused."""
    answer = penstock("runs", "show", "nosuch", cwd=folder)
    assert answer.returncode == 1
    assert "no run nosuch in runs/; found: sorting" in answer.stderr
    assert "run id '../x' must be" in penstock("runs", "show", "../x", cwd=folder).stderr


def test_a_run_with_its_own_servers_is_running_and_found(tmp_path: Path):
    """While the local stack of a run lives the run counts as running, and its address is known without asking."""
    store = tmp_path / "runs" / "own" / connections.STORE
    with LocalStack(store) as stack:
        (line,) = list_folder(tmp_path / "runs")
        assert line.state == "running"
        found = connections.find([f"run.dir={tmp_path / 'runs'}"], {}, run_id="own").settings
        assert found.nats.url == stack.nats.url
        with Bus.connect(found.nats, name="test"):
            pass
    assert [line.state for line in list_folder(tmp_path / "runs")] == ["stopped"]


def test_what_was_typed_beats_the_store(tmp_path: Path):
    """An address on the command line is used, whatever the run's own store says."""
    store = tmp_path / "own" / connections.STORE
    store.mkdir(parents=True)
    (store / "environment").write_text("export PENSTOCK_NATS__URL='nats://127.0.0.1:7'\nexport OTHER=1\n")
    typed = [f"run.dir={tmp_path}"]
    assert connections.find(typed, {}, run_id="own").settings.nats.url == "nats://127.0.0.1:7"
    assert connections.find([*typed, "nats.url=nats://x:1"], {}, run_id="own").settings.nats.url == "nats://x:1"


def test_the_broker_knows_its_runs(bus: Bus, ring_streams: str):
    """A run with streams and no living service is idle."""
    found = {line.run: line.state for line in list_broker(bus)}
    assert found[ring_streams] == "idle"


def test_runs_of_the_broker_are_listed_when_one_is_configured(
    tmp_path: Path, ring_streams: str, nats_settings: NatsSettings
):
    """With NATS in the environment the broker's runs join the table."""
    environment = {
        "PENSTOCK_NATS__URL": nats_settings.url,
        "PENSTOCK_NATS__USER": nats_settings.user,
        "PENSTOCK_NATS__PASSWORD": nats_settings.secret(),
    }
    rows = json.loads(penstock("runs", "--json", cwd=tmp_path, **environment).stdout)
    assert ring_streams in {row["run"] for row in rows}


def test_a_broker_that_is_away_does_not_hide_the_folder(folder: Path):
    """The runs of this machine are listed, and what is missing is said."""
    answer = penstock("runs", "--json", "nats.url=nats://127.0.0.1:1", cwd=folder)
    assert answer.returncode == 0
    assert [row["run"] for row in json.loads(answer.stdout)] == ["sorting"]
    assert "runs on NATS are not listed" in answer.stderr
