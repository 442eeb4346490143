"""A run folder that somebody else sent is data: nothing that it names is run, called, opened or sent, on any route and by any verb."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.console.web.control.api import Api, FakeLauncher

from penstock.client import events, local_backend, local_start
from penstock.console import connections, launch
from penstock.console.connections import NamedRun
from penstock.console.live import run_snapshot
from penstock.console.live.panel import watch_run
from penstock.console.registry import exchange
from penstock.console.report import curves
from penstock.console.tools import runs, trust
from penstock.console.tracking import trackers
from penstock.console.web.jobs import job_file, queue
from penstock.console.web.launchers import local, run_process
from penstock.deploy import local_run, scoring
from penstock.deploy.evaluation import prepare, target
from penstock.forensics import backup
from penstock.forensics.audit import audit
from penstock.protocol import seals
from penstock.protocol.errors import PenstockError, UntrustedFolder
from penstock.protocol.record import run_folder
from penstock.trainer import assemble
from penstock.trainer.groups import issue_log, pack_reader, rolled_back
from penstock.trainer.recovery import resume_checks
from penstock.trainer.telemetry import event_writer

SECRET = "PRIVATE-KEY-CONTENT"
EVIL = 'from pathlib import Path\nPath("{ran}").touch()\n'


class Stranger:
    """A server of somebody else on this machine, the addresses that lead to it, and what it was sent."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.num_calls = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.num_calls += 1
            connection.close()


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    server = Stranger()
    yield server
    server.listener.close()


@pytest.fixture
def gift(tmp_path: Path, stranger: Stranger) -> Path:
    """A folder of runs with one that was sent: every file in it names code, a file of this user, or the stranger's server."""
    folder, private, code = tmp_path / "runs" / "gift", tmp_path / "id_rsa", tmp_path / "runs" / "gift" / "evil.py"
    (folder / "store").mkdir(parents=True)
    (folder / "trackers").mkdir()
    private.write_text(SECRET)
    code.write_text(EVIL.format(ran=tmp_path / "ran"))
    url = f"nats://127.0.0.1:{stranger.port}"
    servers = f'[nats]\nurl = "{url}"\nuser = "x"\npassword_file = "{private}"\nca_file = "none"\n'
    (folder / "run.toml").write_text(f'{servers}[algorithm]\nloss = "{code}:loss"\n')
    job: dict[str, Any] = {"run": "gift", "created_at": 1, "intent": "run", "starts": 1, "queued_ns": 1}
    (folder / "job.json").write_text(json.dumps({**job, "directory": str(folder), "serve": [str(code)], "handle": "7"}))
    (folder / "store" / "environment").write_text(
        f"export PENSTOCK_NATS__URL={url}\nexport PENSTOCK_S3__ENDPOINT=http://127.0.0.1:{stranger.port}\n"
    )
    recorded = {
        "data": {"format": f"{code}:form", "train": str(private)}, "reward": {"name": f"{code}:score"},
        "rollout": {"environment": f"{code}:Play"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"settings": recorded, "origins": {}}))
    (folder / "trackers" / "settings.json").write_text(json.dumps({"tracker": [{"type": f"{code}:kind"}]}))
    (folder / "reward.port").write_text(str(stranger.port))
    (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "reward_mean": 0.5}\n')
    return folder


def untouched(stranger: Stranger, gift: Path) -> None:
    assert stranger.num_calls == 0
    assert not (gift.parent.parent / "ran").exists()


def test_no_route_uses_what_a_sent_folder_names(gift: Path, stranger: Stranger, launcher: FakeLauncher) -> None:
    """Every route of a run, by every method it has, with the run as its only parameter; and the event stream's connection."""
    api = Api(gift.parent)
    api.context.environ.pop("PENSTOCK_NATS__URL", None)  # type: ignore[attr-defined]
    with api.client() as http:
        paths = [
            (str(getattr(route, "path", "")), getattr(route, "methods", None) or set[str]()) for route in api.app.routes
        ]
        routes = [
            (method, path.replace("{run}", "gift").replace("{number}", "1"))
            for path, methods in paths
            if "{run}" in path and not path.endswith("/events")
            for method in sorted(methods - {"DELETE"})
        ]
        assert len(routes) > 15
        for method, path in routes:
            answer = http.request(method, path, json={} if method == "POST" else None)
            assert answer.status_code < 500 or answer.status_code == 503, (method, path, answer.text)
            assert SECRET not in answer.text
        with pytest.raises(UntrustedFolder):
            api.context.bus("gift")
        assert queue.advance(api.context) == 0
        assert launcher.started == []
        assert (
            http.post("/v1/runs/gift/start").json()["fix"].endswith(f"penstock runs trust gift run.dir={gift.parent}")
        )
    untouched(stranger, gift)
    (gift.parent / "linked").symlink_to(gift)
    for method, path in routes:
        assert api.client().request(method, path.replace("/gift", "/linked")).status_code in {404, 422}, (method, path)
    assert "linked" not in api.client().get("/v1/runs").text


VERBS: dict[str, Callable[[Path], object]] = {
    "watch": lambda gift: watch_run(run_of(gift), plain=True, as_json=True),
    "settings": lambda gift: run_of(gift).settings,
    "weights": lambda gift: connections.trusted_keys(None, {}, gift / "store"),
    "audit": lambda gift: audit.audit_run("gift", [f"run.dir={gift.parent}"], {}, fast=True, as_json=True),
    "backup": lambda gift: backup._backup("gift", [f"run.dir={gift.parent}"], gift.parent / "to"),
    "track": lambda gift: trackers.load_settings("gift", [f"run.dir={gift.parent}", "nats.url=nats://127.0.0.1:1"], {}),
    "eval": lambda gift: target.recorded_settings(
        target.Target("gift", gift, "", recorded=gift / "config.json"), with_reward=True
    ),
    "rescore": lambda gift: scoring._recorded_rewards(gift / "config.json"),
    "client resume": lambda gift: local_start.existing("gift", gift.parent).resume(),
    "client events": lambda gift: list(events.published("gift", gift, lambda: False)),
}


def run_of(gift: Path) -> NamedRun:
    return NamedRun("gift", [f"run.dir={gift.parent}"], {})


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_uses_what_a_sent_folder_names(gift: Path, stranger: Stranger, verb: str) -> None:
    with pytest.raises(UntrustedFolder):
        VERBS[verb](gift)
    untouched(stranger, gift)


def test_a_card_has_no_digest_of_a_file_that_somebody_else_named(gift: Path) -> None:
    assert "| not read |" in exchange.model_card(gift, None, "", {})


def test_a_link_in_a_model_folder_uploads_no_other_file(gift: Path) -> None:
    (gift / "model").mkdir()
    (gift / "model" / "config.json").write_text("{}")
    (gift / "model" / "tokenizer.json").symlink_to(gift.parent.parent / "id_rsa")
    with pytest.raises(PenstockError, match="is a link"), exchange._model("gift", [f"run.dir={gift.parent}"]):
        pass


@pytest.mark.parametrize(
    "name",
    [
        "report.md", "report.json", "curve.png", run_folder.RUN_LOCK, run_folder.PAUSE, event_writer.METRICS_FILE, resume_checks.SUMMARY_FILE,
        issue_log._FILE, rolled_back._FILE, pack_reader._MARK, pack_reader._COUNTS, launch.REWARD_PORT_FILE, run_snapshot.TOTALS_FILE,
        connections.RUN_FILE, job_file.JOB, job_file._LOCK, runs.PLANNED, run_process.LOCK, run_process.LAUNCH, local.LOG,
        local_backend._LOG, "config.json", assemble._EVAL_MARK,
    ],
)  # fmt: skip
def test_a_run_in_a_sent_folder_does_not_write_through_a_link(gift: Path, name: str) -> None:
    (gift / "latest.log").symlink_to("logs/trainer.log")  # a user's own
    with run_folder.hold_lock(gift):
        pass
    (gift / name).unlink(missing_ok=True)
    (gift / name).symlink_to(gift.parent.parent / "id_rsa")
    with pytest.raises(PenstockError, match=rf"{name} is a link"), run_folder.hold_lock(gift):
        pass


@pytest.mark.parametrize(
    "name", ["tasks/export/logs/launch.log", "tasks/export", "tasks", "logs/script.log", "logs", "checkpoints-logged"]
)
def test_what_a_run_has_beside_it_is_not_written_through_a_link(
    gift: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The output of a task and what a script says would be appended to any file of this user."""
    home, script = gift.parent.parent / "home", gift.parent / "script"
    (home / "logs").mkdir(parents=True)
    for written in (".bashrc", "script.log", "metrics.jsonl"):
        (home / written).write_text("mine")
    (place := curves.training_folder(script, curves.LOG)).mkdir(parents=True)
    (place / event_writer.METRICS_FILE).write_text("")
    for folder in (gift, script):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(home / ".bashrc" if name.endswith("log") else home)
    events = [{"kind": kind, "step": 1, "text": "x", "at": 1.0, "values": {"a": 1}} for kind in ("checkpoint", "state")]
    with Api(gift.parent).client() as http:
        answers = [http.post("/v1/runs/script/metrics", json={"events": events})]
        answers += [http.post("/v1/runs/gift/tasks", json={"task": "export"})] if name.startswith("tasks") else []
    assert [(answer.status_code, "is a link" in answer.text) for answer in answers] == [(422, True)] * len(answers)
    assert not [file for file in home.rglob("*") if file.is_file() and file.read_text() != "mine"]
    trust.trust(run_of(gift), yes=True)
    assert f"{name}: what is written there is written to {home}" in capsys.readouterr().out


def test_an_evaluation_of_a_sent_run_writes_through_no_link(gift: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not the model, which it exports into a folder there before it knows what it evaluates."""
    home = gift.parent.parent / "home"
    home.mkdir()
    (gift / "evaluations").symlink_to(home)
    monkeypatch.setattr(target, "find", lambda *_: target.Target("gift", gift, ""))
    monkeypatch.setattr(target, "export", lambda _, to, __: to.mkdir())
    options = SimpleNamespace(answer=None, samples=1, num_prompts=None, reward=None, serve=(), data="none")
    with pytest.raises(PenstockError, match="evaluations is a link"), contextlib.ExitStack() as cleaned:
        prepare.prepare("gift", [], cast(Any, options), cleaned)
    assert list(home.iterdir()) == []


NAMES = ("job.json", "run.toml", "config.json", "store/environment", "trackers/settings.json")


@pytest.mark.parametrize("name", NAMES)
def test_a_seal_holds_for_one_content_at_one_place_under_one_key(gift: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:  # fmt: skip
    path = gift / name
    seals.write(path, path.read_bytes())
    assert seals.is_sealed(path)
    shutil.copytree(gift, gift.parent / "copy")
    assert not seals.is_sealed(gift.parent / "copy" / name)
    content = path.read_bytes()
    path.write_bytes(content + b" ")
    assert not seals.is_sealed(path)
    path.write_bytes(content)
    assert seals.is_sealed(path)
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))
    assert not seals.is_sealed(path)
    path.unlink()
    path.with_name("moved").rename(path)
    monkeypatch.setenv(seals.KEY_FILE, str(tmp_path / "other" / "key"))
    assert not seals.is_sealed(path)


def test_two_users_trust_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a console and the pods that its launcher starts, which have another key."""
    path = tmp_path / "run.toml"
    seals.write(path, "a = 1")
    for number in range(20):
        monkeypatch.setenv(seals.KEY_FILE, str(tmp_path / f"key{number % 2}"))
        assert seals.is_sealed(path) == (number > 1)
        seals.seal(path, path.read_bytes())
    monkeypatch.undo()
    assert seals.is_sealed(path)
    assert len((tmp_path / ".run.toml.seal").read_text().split()) == 3


def test_a_kill_between_seal_and_content_leaves_the_old_file_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.json"
    seals.write(path, "old")
    real = seals.atomic_write
    monkeypatch.setattr(
        seals, "atomic_write", lambda at, *rest, **more: None if at == path else real(at, *rest, **more)
    )
    seals.write(path, "new")
    assert seals.read(path) == b"old"
    monkeypatch.undo()
    seals.write(path, "new")
    assert seals.read(path) == b"new"
    path.write_text("old")
    assert seals.is_sealed(path)  # the one before is accepted until the next change
    seals.write(path, "newer")
    seals.write(path, "newest")
    path.write_text("new")
    assert not seals.is_sealed(path)


def test_a_named_yes_shows_everything_and_then_it_is_used(
    gift: Path, launcher: FakeLauncher, capsys: pytest.CaptureFixture[str]
) -> None:
    with (gift / "run.toml").open("a") as file:
        file.write('[s3]\nsecret_key = "hunter2"\naccess_key = "\\u001b]0;x"\n')
    assert trust.trust(run_of(gift), yes=False) == 1
    shown = capsys.readouterr().out
    code = ("evil.py:loss", "evil.py:kind", "evil.py:form")
    assert all(text in shown for text in (*code, "nats.password_file", "id_rsa", "serve", "PENSTOCK_S3__ENDPOINT"))
    assert "hunter2" not in shown
    assert "\x1b" not in shown
    api = Api(gift.parent)
    assert queue.advance(api.context) == 0
    assert trust.trust(run_of(gift), yes=True) == 0
    assert queue.advance(api.context) == 1
    assert [start.run for start in launcher.started] == ["gift"]
    assert trust.trust(run_of(gift), yes=False) == 0


def test_what_this_user_starts_needs_no_yes(tmp_path: Path, launcher: FakeLauncher) -> None:
    """Through the API, also after a restart of the console and under another path to the same folder; and by penstock train."""
    (tmp_path / "runs").mkdir()
    api = Api(tmp_path / "runs")
    folder = tmp_path / "runs" / "mine"
    folder.mkdir()
    run_file = folder / "run.toml"
    run_file.write_text('[nats]\nurl = "nats://127.0.0.1:1"\n')
    with pytest.raises(UntrustedFolder):
        api.context.settings_of("mine")
    local_run.seal_run_file([str(run_file)], folder)
    assert api.context.settings_of("mine").settings.nats.url == "nats://127.0.0.1:1"
    job_file.write(folder, job_file.Job(run="mine", created_at=1.0, intent="run", starts=1))
    (tmp_path / "other").symlink_to(tmp_path / "runs")
    assert queue.advance(Api(tmp_path / "other").context) == 1


def test_trust_in_a_folder_of_another_user_says_what_to_type(gift: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(seals, "atomic_write", refused)
    with pytest.raises(PenstockError, match=f"run it as the user of that folder.*export {seals.KEY_FILE}=FILE"):
        trust.trust(run_of(gift), yes=True)


def test_without_a_key_a_run_goes_on_and_the_queue_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seals.KEY_FILE, "/dev/null/key")
    seals.write(tmp_path / "config.json", "{}", optional=True)
    assert (tmp_path / "config.json").read_text() == "{}"
    says = rf"head -c 32 /dev/urandom > FILE; chmod 600 FILE; export {seals.KEY_FILE}=FILE"
    with pytest.raises(PenstockError, match=says):
        job_file.write(tmp_path, job_file.Job(run="a", created_at=1.0))
    with pytest.raises(UntrustedFolder, match=says):
        seals.read(tmp_path / "config.json")
    assert not seals.is_sealed(tmp_path / "config.json")
    (tmp_path / "writable").write_bytes(bytes(32))
    (tmp_path / "writable").chmod(0o664)
    monkeypatch.setenv(seals.KEY_FILE, str(tmp_path / "writable"))
    with pytest.raises(UntrustedFolder, match="chmod go-w"):
        seals.read(tmp_path / "config.json")
    monkeypatch.setenv(seals.KEY_FILE, str(tmp_path / "key"))
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(PenstockError, match="expected at least 32"):
        seals.write(tmp_path / "job.json", "{}")
