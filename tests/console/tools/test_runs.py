"""`penstock runs`: runs of a folder and of NATS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.console.command import penstock, server_arguments
from tests.console.record import recorded_run as recorded

from penstock.console import connections
from penstock.console.report import report
from penstock.console.tools.runs import RunLine, list_broker, list_folder, merge
from penstock.console.web.jobs import job_file
from penstock.deploy.local import LocalStack
from penstock.protocol import seals
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.record import run_folder
from penstock.protocol.transport.bus import Bus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recorded.write_metrics(tmp_path / "runs" / "sorting")
    (tmp_path / "runs" / "not-a-run").mkdir()
    (tmp_path / "runs" / "Not A Run.txt").write_text("x")
    return tmp_path


def test_the_folders_of_runs_are_listed(folder: Path):
    """A run is a folder with a run's files; the line shows its last step. Without runs the first command is printed."""
    (line,) = list_folder(folder / "runs")
    assert (line.run, line.state, line.step, line.accuracy) == ("sorting", "stopped", 60, 0.95)
    shown = penstock("runs", cwd=folder, code=0).stdout
    for text in ("sorting", "0.950", "next: penstock runs show sorting"):
        assert text in shown
    (row,) = json.loads(penstock("runs", "list", "--json", cwd=folder, code=0).stdout)
    assert row["step"] == 60
    assert "penstock quickstart" in penstock("runs", "run.dir=empty", cwd=folder, code=0).stdout


def test_show_prints_the_report_of_a_known_run(folder: Path):
    """Without a terminal unchanged; without a report state, step and the next command are shown."""
    assert "no report yet: stopped, step 60" in penstock("runs", "show", "sorting", cwd=folder, code=0).stdout
    path = report.write(folder / "runs" / "sorting", recorded.whole_run().summary())
    assert penstock("runs", "show", "sorting", cwd=folder).stdout.strip() == path.read_text().strip()
    for name, reply in (
        ("nosuch", "no run nosuch in runs/; found: sorting; check the name"),
        ("sort1ng", "did you mean sorting?"),
        ("../x", "run id '../x' must be"),
    ):
        assert reply in penstock("runs", "show", name, cwd=folder, code=1).stderr


def test_a_run_with_its_own_servers_is_found(tmp_path: Path):
    """Its address is read from its folder; servers alone (penstock up) do not make it running."""
    store = tmp_path / "runs" / "own" / connections.STORE
    with LocalStack(store) as stack:
        (line,) = list_folder(tmp_path / "runs")
        assert line.state == "stopped"
        found = connections.find([f"run.dir={tmp_path / 'runs'}"], {}, run_id="own").settings
        assert found.nats.url == stack.nats.url
        with Bus.connect(found.nats, name="test"):
            pass
    assert [line.state for line in list_folder(tmp_path / "runs")] == ["stopped"]


def test_a_failed_run_says_why_and_is_failed_until_it_starts_again(folder: Path):
    """In the list and in `runs show`, with the end of the log and without secrets; a run that has finished has not failed."""
    sorting = folder / "runs" / "sorting"
    tail = "    Traceback\n    CUDA error"
    run_folder.write_failure(sorting, "notes before it\nno GPU is left", tail)
    (line,) = list_folder(folder / "runs")
    assert (line.state, line.failure) == ("failed", "no GPU is left")
    assert job_file.run_state(sorting, None) == job_file.RunState("failed", "no GPU is left")
    assert "sorting failed: no GPU is left" in penstock("runs", cwd=folder, code=0).stdout
    shown = penstock("runs", "show", "sorting", cwd=folder, code=0).stdout
    assert f"run sorting failed: no GPU is left\n{tail}\n" in shown
    with run_folder.hold_lock(sorting):
        with run_folder.hold_lock(sorting):  # of the trainer, beside that of the process that started it
            pass
        assert [(one.state, one.failure) for one in list_folder(folder / "runs")] == [("running", "")]
    (sorting / run_folder.FAILURE).unlink()
    assert list_folder(folder / "runs")[0].state == "stopped"


@pytest.mark.parametrize(
    ("ended", "asked", "state"),
    [
        ({"finished": True, "steps": 60}, 60, "finished"),
        ({"finished": True, "steps": 60}, 90, "stopped"),  # continued with more steps, and killed
        ({"finished": False, "steps": 40}, 60, "stopped"),
        ({"finished": True, "complete": False, "steps": 60}, 60, "stopped"),  # killed before the model was exported
        ({"finished": True, "complete": True, "steps": 60}, 60, "finished"),
    ],
)
def test_a_run_is_finished_when_its_trainer_took_all_steps(
    folder: Path, ended: dict[str, object], asked: int, state: str
):
    """Whether it was local or not; a report of an earlier end does not count."""
    sorting = folder / "runs" / "sorting"
    report.write(sorting, recorded.whole_run().summary())
    (sorting / "trainer.json").write_text(json.dumps(ended))
    (sorting / "config.json").write_text(json.dumps({"settings": {"trainer": {"steps": asked}}}))
    assert [line.state for line in list_folder(folder / "runs")] == [state]


def test_a_run_whose_trainer_is_on_another_machine_is_running():
    """NATS has its heartbeat; a folder that is finished, or only has waiting workers, stays what it is."""
    here = [RunLine("a", "stopped", step=3), RunLine("b", "finished"), RunLine("c", "stopped")]
    broker = [RunLine("a", "running"), RunLine("b", "running"), RunLine("c", "idle"), RunLine("d", "running")]
    merged = merge(here, broker)
    assert [(line.run, line.state, line.step) for line in merged] == [
        ("a", "running", 3), ("b", "finished", None), ("c", "stopped", None), ("d", "running", None)
    ]  # fmt: skip


def test_arguments_take_precedence_over_the_store(tmp_path: Path):
    """An address on the command line replaces that of the run's own store."""
    store = tmp_path / "own" / connections.STORE
    store.mkdir(parents=True)
    seals.write(store / "environment", "export PENSTOCK_NATS__URL='nats://127.0.0.1:7'\nexport OTHER=1\n")
    typed = [f"run.dir={tmp_path}"]
    assert connections.find(typed, {}, run_id="own").settings.nats.url == "nats://127.0.0.1:7"
    assert connections.find([*typed, "nats.url=nats://x:1"], {}, run_id="own").settings.nats.url == "nats://x:1"


def test_runs_of_nats_are_listed_when_it_is_configured(
    bus: Bus, tmp_path: Path, run_streams: str, nats_settings: NatsSettings
):
    assert {line.run: line.state for line in list_broker(bus)}[run_streams] == "idle"
    rows = json.loads(penstock("runs", "--json", *server_arguments(nats_settings), cwd=tmp_path).stdout)
    assert run_streams in {row["run"] for row in rows}


def test_the_folder_is_listed_when_nats_is_unreachable(folder: Path):
    """The runs of this machine are listed, with a message about those missing."""
    answer = penstock("runs", "--json", "nats.url=nats://127.0.0.1:1", cwd=folder, code=0)
    assert [row["run"] for row in json.loads(answer.stdout)] == ["sorting"]
    assert "runs on NATS are not listed" in answer.stderr
