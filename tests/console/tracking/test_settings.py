"""Trackers in a run file, in the names of Penstock and of other systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.console.tracking import trackers
from penstock.console.tracking.trackers import TrackSettings
from penstock.deploy.processes.page_and_trackers import TrackerProcesses
from penstock.protocol import seals
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError


def _types(*overrides: str) -> list[str]:
    return [one.type for one in load(TrackSettings, overrides=overrides).settings.tracker]


@pytest.mark.parametrize(
    ("written", "types"),
    [
        ("tracker=wandb", ["wandb"]),
        ('tracker=["wandb", "mlflow"]', ["wandb", "mlflow"]),
        ('report_to=["wandb"]', ["wandb"]),
        ("report_to=tensorboard", ["tensorboard"]),
        ("report_to=none", []),
        ('trainer.logger=["console","wandb"]', ["wandb"]),
        ("trainer.logger=console", []),
        ("track_with=stdout", []),
        ("track_with=swanlab", ["swanlab"]),
    ],
)
def test_trackers_are_taken_under_the_names_of_other_systems(written: str, types: list[str]) -> None:
    """Panel and metrics.jsonl are always on, so `console`, `stdout` and `file` add nothing."""
    assert _types(written) == types


def test_every_tracker_has_a_table_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[tracking]\nproject = "gsm8k"\n[[tracker]]\ntype = "wandb"\noptions = {mode = "offline"}\n'
        '[[tracker]]\ntype = "mlflow"\nproject = "other"\n'
    )
    settings = load(TrackSettings, files=[file], overrides=["tracker_kwargs.log_dir=/logs"]).settings
    assert [(one.type, one.project, one.options) for one in settings.tracker] == [
        ("wandb", None, {"mode": "offline"}),
        ("mlflow", "other", {}),
    ]
    assert (settings.tracking.project, settings.tracking.folder) == ("gsm8k", Path("/logs"))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('tracker=[{type="wandb", options={api_key="1"}}]', "options.api_key is a credential"),
        ('tracker=[{type="wandb", colour="red"}]', "Extra inputs"),
        ('tracker=["wandb", "wandb"]', "each may be given once"),
        ("use_wandb=true", 'tracker = ["wandb"] in the run file'),
    ],
)
def test_trackers_that_cannot_be_meant_are_refused(written: str, message: str) -> None:
    """Credentials above all: settings are shown, and stored with the run."""
    with pytest.raises(ConfigError) as caught:
        _types(written)
    assert message in str(caught.value)


def test_a_run_with_an_unknown_or_missing_tracker_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown tracker 'wanbd'; did you mean 'wandb'"):
        TrackerProcesses(["tracker=wanbd"], {})
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'penstock\[swanlab\]'"):
        TrackerProcesses(["tracker=swanlab"], {})


def test_a_run_is_tracked_later_as_it_was_started(tmp_path: Path) -> None:
    arguments = [f"run.dir={tmp_path}", "run.id=r", "nats.url=nats://127.0.0.1:1"]
    written = load(TrackSettings, overrides=[*arguments, 'tracker=["tensorboard"]', "tracking.project=p"]).settings
    trackers.store(written)
    found = trackers.load_settings("r", [arguments[0], arguments[2]], {})
    assert (found.tracker, found.tracking) == (written.tracker, written.tracking)
    assert [one.type for one in trackers.load_settings("r", [*arguments, "tracker=wandb"], {}).tracker] == ["wandb"]


def test_a_local_run_is_found_by_its_own_store(tmp_path: Path) -> None:
    """As `penstock watch` finds it; a server that is configured comes first."""
    (tmp_path / "r" / "store").mkdir(parents=True)
    seals.write(tmp_path / "r" / "store" / "environment", "PENSTOCK_NATS__URL=nats://127.0.0.1:7\n")
    arguments = [f"run.dir={tmp_path}", "tracker=tensorboard"]
    assert trackers.load_settings("r", arguments, {}).nats.url == "nats://127.0.0.1:7"
    assert trackers.load_settings("r", [*arguments, "nats.url=nats://127.0.0.1:8"], {}).nats.url == "nats://127.0.0.1:8"
    assert (
        trackers.load_settings("r", arguments, {"PENSTOCK_NATS__URL": "nats://127.0.0.1:9"}).nats.url
        == "nats://127.0.0.1:9"
    )
