"""The client of a Runs API: requests and errors of the real app, its events, and what a console elsewhere cannot do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.client.events import Event
from penstock.client.remote.remote_backend import RemoteBackend, RemoteTraining
from penstock.client.remote.runs_api import ApiRefused, RemoteEvents, RunsApi
from penstock.console.web.access import Role
from penstock.console.web.jobs import queue
from penstock.deploy import quickstart_task
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.record import run_folder
from penstock.protocol.transport.bus import Bus
from tests.client.test_events import next_event
from tests.console.command import server_arguments
from tests.console.record.recorded_run import Services
from tests.console.web.control.api import Api
from tests.json_server import JsonServer

ROWS = [{"prompt": "sort 31", "ground_truth": "13"}]
PAIRS = [{"prompt": "sort 31", "chosen": "13", "rejected": "31"}]


@pytest.fixture
def console(tmp_path: Path, nats_settings: NatsSettings) -> Iterator[Api]:
    """The API's real app, served by a thread of the test, without an object store."""
    runs = tmp_path / "runs"
    runs.mkdir()
    where = [*server_arguments(nats_settings), "s3.endpoint=http://127.0.0.1:9"]
    with Api(runs, *where, environ={}).served() as served:
        yield served


def api_of(console: Api) -> RunsApi:
    return RunsApi(console.url, console.tokens[Role.RUN])


def client_of(console: Api) -> penstock.Client:
    return penstock.Client(console.url, token=console.tokens[Role.RUN], runs=console.folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    quickstart_task.write_model(tmp_path / "model", seed=0)
    return tmp_path / "model"


class RewardService(JsonServer):
    def __init__(self) -> None:
        self.arrived: list[dict[str, Any]] = []
        super().__init__()

    def answer(self, method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
        if path == "/v1/endpoints":
            self.arrived.append(body)
        return 200, {}


@pytest.mark.slow
def test_a_run_is_created_and_its_function_registered_when_it_runs(
    console: Api, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings, rows and name arrive; its reward is registered at the port that the reward service has written."""
    monkeypatch.setattr(queue, "advance", lambda _: None)  # no process is started

    def length(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    service = RewardService()
    client = client_of(console)
    try:
        run = client.train(model=model, data=ROWS, reward=length, algorithm="grpo", trainer={"steps": 7}, workers=3)
        assert (run.id, run.state, run.folder) == ("run", "queued", console.folder / "run")
        text = (console.folder / "run" / "run.toml").read_text()
        assert "steps = 7" in text
        assert 'name = "length"' in text
        (rows,) = (console.folder / ".client").iterdir()
        assert str(rows) in text
        assert json.loads(rows.read_text()) == ROWS[0]
        (console.folder / "run" / "reward.port").write_text(str(service.port))
        deadline = time.monotonic() + 20.0
        while not service.arrived:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert service.arrived[0]["name"] == "length"
        run.stop()
        assert run.state in {"stopped", "created"}
    finally:
        client.close()
        service.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("reward-calls")]


@pytest.mark.slow
def test_a_training_on_given_answers_is_created_and_followed(
    console: Api, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, section and command arrive; its handle reads state, figures and the place of its model from the console."""
    monkeypatch.setattr(queue, "advance", lambda _: None)  # no process is started
    client = client_of(console)
    first, second = (client.dpo(model=model, data=PAIRS, dpo={"steps": 7, "beta": 0.2}) for _ in range(2))
    assert (first.id, first.state, second.id) == ("dpo", "queued", "dpo-2")
    assert first.folder == console.folder / "dpo"
    text = (console.folder / "dpo" / "run.toml").read_text()
    assert "beta = 0.2" in text
    training = console.folder / "dpo" / "dpo-training"
    training.mkdir()
    lines = [
        {"kind": "step", "at": 1.0, "step": 1, "loss": 0.5},
        {"kind": "eval", "at": 2.0, "step": 1, "eval_loss": 0.4},
    ]
    (training / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert first.metrics()["loss"].tolist() == [0.5]
    assert first.metrics("eval")["eval_loss"].tolist() == [0.4]
    far = RemoteTraining(Elsewhere(console.url, console.tokens[Role.RUN]), "dpo", "dpo")
    assert far.folder is None
    found = [{name: row[name] for name in row if name != "at"} for row in far.rows()]
    assert found == [
        {"kind": "step", "step": 1, "loss": 0.5, "eval_loss": 0.4},
        {"kind": "eval", "step": 1, "eval_loss": 0.4},
    ]
    with pytest.raises(PenstockError, match="dpo dpo has no model: it is queued"):
        _ = first.model
    first.stop()
    assert first.state in {"stopped", "created"}
    client.close()
    assert second.state == "queued"


class Elsewhere(RunsApi):
    is_here = False


def test_what_the_api_refuses_is_said_with_its_fix(console: Api, model: Path) -> None:
    """A wrong setting, an unknown run, a missing token and a server that does not answer."""
    client = client_of(console)
    with pytest.raises(ApiRefused, match=r"unknown key trainer\.lrr; did you mean trainer\.lr\?") as refused:
        client.train(model=model, data=ROWS, reward="exact_match", trainer={"lrr": 1})
    assert refused.value.status == 422
    assert not (console.folder / "run").exists()
    with pytest.raises(ApiRefused, match="there is no run nope; list the runs"):
        client.run("nope")
    with pytest.raises(ApiRefused, match="token"):
        penstock.Client(console.url).run("nope")
    with pytest.raises(ApiRefused, match=r"rollout.group_size is not read by penstock sft"):
        client.sft(model=model, data=ROWS, rollout={"group_size": 3})
    assert not (console.folder / "sft").exists()
    with pytest.raises(ApiRefused, match="no console answers at"):
        RunsApi("http://127.0.0.1:9", None).call("GET", "/v1/runs")
    with (
        pytest.raises(ApiRefused, match="unknown, revoked or expired token"),
        RunsApi(console.url, "wrong").stream("/v1/runs/x/events"),
    ):
        pass
    with RemoteEvents(RunsApi(console.url, "wrong"), "x") as events, pytest.raises(ApiRefused, match="expired token"):
        events.next(20.0)
    for url in ("remote", "ftp://host", "http://"):
        with pytest.raises(ConfigError, match="expected 'local' or the URL of a console"):
            penstock.Client(url)


class OtherServer(JsonServer):
    """Something else that listens where a console was."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        super().__init__()

    def answer(self, method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
        return 200, self.body


@pytest.mark.parametrize("body", [b"<html>", b"[" * 100_000])
def test_what_answers_without_json_is_no_console(body: bytes) -> None:
    """A page of another program, or one that would end this one's parser."""
    with (
        OtherServer(body) as server,
        pytest.raises(ApiRefused, match="is no console: its answer to /v1/runs is not JSON"),
    ):
        RunsApi(server.url, None).call("GET", "/v1/runs")


def test_a_console_elsewhere_gets_neither_rows_nor_functions(console: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to give instead; nothing is sent."""
    monkeypatch.setattr(RunsApi, "is_here", False)
    client = penstock.Client(console.url, token=console.tokens[Role.RUN])
    with pytest.raises(ConfigError, match=r"data\.train: rows are not sent"):
        client.train(model="m", data=ROWS, reward="exact_match")
    with pytest.raises(ConfigError, match=r"sft\.data: rows are not sent"):
        client.sft(model="m", data=ROWS)
    with pytest.raises(ConfigError, match="cannot call a function of this process"):
        client.train(model="m", data="rows.jsonl", reward=lambda completions, **columns: [])
    assert [RunsApi(url, None).is_here for url in ("http://localhost:1", "http://[::1]:1")] == [False, False]
    monkeypatch.undo()
    places = ("http://localhost:1", "http://127.9.0.1", "http://[::1]:1", "http://10.0.0.1", "http://gpu-1:8800")
    assert [RunsApi(url, None).is_here for url in places] == [True, True, True, False, False]


def test_events_go_on_after_a_restart_of_the_console_until_the_run_is_over(
    console: Api, bus: Bus, run_streams: str
) -> None:
    """Each event arrives once, in order, from the first one; the iterator ends with the run."""
    services, folder = Services(bus, run_streams), console.folder / run_streams
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"settings": {"run": {"dir": str(console.folder)}}, "origins": {}}))
    (folder / "metrics.jsonl").write_text('{"kind": "step", "at": 1.0, "step": 1, "loss": 0.5}\n')
    with run_folder.hold_lock(folder):
        run = RemoteBackend(api_of(console), run_streams)
        assert run.state == "running"
        services.say_steps(1)
        arriving = run.events()
        assert next_event(arriving).data == {"step": 1}
        console.stop()
        console.start()
        services.say_steps(2)
        assert next_event(arriving).data == {"step": 2}
        services.say_steps(3)
    assert [event.data for event in arriving if event is not None] == [{"step": 3}]
    assert run.wait(60.0)
    assert list(run.events()) == [Event("step", "trainer", 1.0, {"step": 1, "loss": 0.5})]
    assert not [thread.name for thread in threading.enumerate() if thread.name == "client-events"]


class FarAway(RunsApi):
    """An API on another machine, with the answers of the reading routes for a run of 2,500 steps."""

    is_here = False

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        if path.endswith("/summary"):
            point = {"step": 5, "version": 5, "accuracy": None, "reward": 0.25, "num_prompts": 8}
            return {"evaluations": [{"split": "eval", "points": [point]}]}
        steps = [step for step in range(1, 2501) if query["from"] <= step <= query.get("to", 10**9)]
        series = {"mean": [step / 10 for step in steps]}
        return {"steps": steps, "at": [float(step) for step in steps], "figures": {"loss": series}}


def test_figures_of_a_run_elsewhere_are_those_of_each_step() -> None:
    """More steps than one answer has; what needs the run's files is refused."""
    run = penstock.Run(RemoteBackend(FarAway("http://gpu-1:8800", "t"), "far"))
    found = run.metrics()
    assert found["step"].tolist() == list(range(1, 2501))
    assert found["loss"][-1] == 250.0
    assert run.metrics("eval")["reward_mean"].tolist() == [0.25]
    assert run.folder is None
    with pytest.raises(PenstockError, match="its weights are on another machine"):
        run.weights()
