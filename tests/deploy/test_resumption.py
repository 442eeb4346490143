"""A stopped command says how to resume; a resumed run says which settings it changes."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import pytest

from penstock.console.cli.main import run
from penstock.console.live.run_view import RunView
from penstock.console.report.run_summary import RunSummary
from penstock.deploy import quickstart, resumption, train
from penstock.fine_tuning import __main__ as fine_tuning
from penstock.protocol import logs
from penstock.protocol.config.run_file import config_document, load
from penstock.trainer.recovery import resume_checks
from penstock.trainer.settings import TrainerSettings


def test_the_command_is_that_of_the_stopped_one():
    line = resumption.ended("stopped", ["my run.toml", "trainer.lr=1e-6", "--local"])
    assert line == "stopped on request; resume it with: penstock train 'my run.toml' trainer.lr=1e-6 --local"


def test_changed_settings_are_listed_for_a_run_with_a_checkpoint(tmp_path: Path):
    """Each with its new and its old value; nothing for a run that starts from the beginning."""
    before = ["model.path=m", f"run.dir={tmp_path}", "run.id=r", "trainer.lr=1e-4"]
    now = [*before[:3], "trainer.lr=2e-4", "rollout.max_staleness=1"]
    (tmp_path / "r").mkdir()
    document = config_document(load(TrainerSettings, overrides=before))
    (tmp_path / "r" / "config.json").write_text(json.dumps(document))
    assert resumption.start_notes(now, {}) == []
    (tmp_path / "r" / "checkpoints" / "step00000001").mkdir(parents=True)
    assert resumption.start_notes(now, {}) == [
        "changed since the last session: rollout.max_staleness = 1, was 4",
        "changed since the last session: trainer.lr = 0.0002, was 0.0001",
    ]
    assert resumption.start_notes(before, {}) == []
    assert resumption.start_notes([*before, "reward.success.gsm8k=0.5"], {}) == [
        "changed since the last session: reward.success.gsm8k = 0.5, was null"
    ]
    assert resumption.start_notes([*before, "trainer.resume=true", "eval.samples=1"], {}) == [
        "note: eval.samples has no effect without data.eval [override]"
    ]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings of a run with model and rows, and with servers: the command does not ask whether they answer."""
    monkeypatch.setenv("PENSTOCK_NATS__URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("PENSTOCK_S3__ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(train, "stop_on_signals", threading.Event)
    monkeypatch.setattr(train, "create_what_is_missing", lambda _: None)
    monkeypatch.setattr(train, "AttachedTrainer", StoppedTrainer)
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").touch()
    return [f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'rows.jsonl'}", f"run.dir={tmp_path}"]


class Started(Exception):
    pass


def start(_: object) -> None:
    raise Started


class StoppedTrainer(contextlib.AbstractContextManager):
    stop_requested = True
    is_logged = False

    def __init__(self, *_: object) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("watch", "local"), [("_watch_local", ["--local"]), ("_watch_attached", [])], ids=["--local", "attached"]
)
def test_a_stopped_run_says_how_to_resume_it(
    watch: str, local: list[str], given: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    for method in ("start_services", "check", "log_tail"):
        monkeypatch.setattr(train.LocalRun, method, lambda *_: "")
    monkeypatch.setattr(train, watch, lambda *_, **__: (None if local else 130, None))
    assert run(["train", *given, *local]) == 130
    assert f"resume it with: penstock train {' '.join([*given, *local])}\n" in capfd.readouterr().err


def test_a_run_that_was_stopped_after_its_end_is_not_to_be_resumed(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Ctrl-C while the report is written, or while the trainer exits: it is written, and no command resumes the run."""
    reports: list[object] = []
    endings = iter([0, 143])

    def watched(*_: object, **__: object) -> tuple[int, RunSummary]:
        code = next(endings)
        if code:  # its summary is the last that a trainer writes
            (tmp_path / "run").mkdir(exist_ok=True)
            summary = {"run_id": "run", "steps": 100, "complete": True}
            (tmp_path / "run" / resume_checks.SUMMARY_FILE).write_text(json.dumps(summary))
        return code, RunView("run").summary()

    monkeypatch.setattr(train, "_watch_attached", watched)
    monkeypatch.setattr(train, "write_report", lambda *given, **_: reports.append(given))
    assert [run(["train", *given]), run(["train", *given])] == [0, 143]
    assert len(reports) == 2
    assert "resume it with" not in capfd.readouterr().err


@pytest.mark.parametrize("local", [["--local"], []], ids=["--local", "attached"])
def test_they_are_listed_before_anything_starts(
    local: list[str],
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """On the terminal, where the panel hides the trainer's log."""
    given = [*given, "run.id=r"]
    (tmp_path / "r" / "checkpoints" / "step00000001").mkdir(parents=True)
    (tmp_path / "r" / "config.json").write_text(json.dumps(config_document(load(TrainerSettings, overrides=given))))
    monkeypatch.setattr(train.LocalRun, "start_services", start)
    monkeypatch.setattr(train.LocalRun, "check", lambda _: None)
    monkeypatch.setattr(train, "create_what_is_missing", start)
    with pytest.raises(Started):
        run(["train", *local, *given, "trainer.lr=3e-4"])
    assert "changed since the last session: trainer.lr = 0.0003, was 1e-06" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("warm", "line"), [(True, "run.toml --local"), (False, "start it again with: penstock quickstart")]
)
def test_the_quickstart_is_resumed_from_its_run_file(tmp_path: Path, warm: bool, line: str):
    """Once the warm-up has written the model; before that it starts again."""
    if warm:
        (tmp_path / "sft").mkdir()
        (tmp_path / "sft" / "config.json").touch()
    options = quickstart.Options(
        seed=0, steps=2, workers=1, run_id="r", folder=tmp_path, as_json=False, kill=False, engine="embedded"
    )
    assert quickstart._again(options).endswith(line)


def test_a_command_of_the_trainer_that_is_stopped_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Supervised fine-tuning says what to type to go on from its checkpoint."""

    def stop(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(fine_tuning, "fine_tune", stop)
    assert fine_tuning.main(["sft", "run.toml", "sft.steps=3"]) == 130
    assert "stopped on request; start it again with: penstock sft run.toml sft.steps=3" in capsys.readouterr().err
